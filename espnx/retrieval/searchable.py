"""One version of a store, open and ready to be searched. Searches hold it while they last, so that a newer one can take its place."""

from __future__ import annotations

import os
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors
from ..checks import check_finite
from ..storage import Engine, NativeEngine
from .advice import Adviser
from .cost import DeviceCost, measure
from .encoder import Encoded, Encoder
from .filters import Filters
from .first_stage import IvfFirstStage
from .gpu_first_stage import GpuIvfFirstStage
from .hot import HotDocuments
from .places import DETACH
from .rerank import QueryVectors
from .resident import ResidentTier
from .store import EmbeddingStore, open_current
from .tier import Tier
from .wave import Means


@dataclass(frozen=True)
class Places:
    """Where the parts of an open index lie and run; see the arguments of `Index`.

    Attributes:
        device: where records are scored, its number known.
        threads, first_stage: of the first stage: how many, and ``cpu`` or ``cuda``.
        hot_bytes, compact, cost: as for `Index`.
    """

    device: torch.device
    threads: int
    first_stage: str
    hot_bytes: int
    compact: str
    cost: DeviceCost | None


class Searchable:
    """See the module. Holds files and memory until `close`, or until it was retired and nobody uses it any more.

    Args:
        path: the store's directory.
        native, records: engines of metadata and of record reads; stay the caller's, as `workers` do.

    Raises:
        what `EmbeddingStore` raises; InvalidInputError; PathUnavailableError.
    """

    def __init__(self, path: str, native: NativeEngine, records: Engine, places: Places, workers: ThreadPoolExecutor):
        self._device = places.device
        self._users, self._retired, self._lock = 0, False, threading.Lock()
        with ExitStack() as opened:
            self.store, index = open_current(path, lambda: _open(path, native, records))
            opened.callback(self.store.close)
            self.first_stage: IvfFirstStage = _first_stage(index, places)
            opened.callback(self.first_stage.close)
            self.filters = Filters(self.store, index)
            base = self.store.parts[0].count if self.store.parts else 0
            self.cost = measure(self.store.full, base) if places.cost is None else places.cost
            self.hot = HotDocuments(self.store.full, places.hot_bytes) if places.hot_bytes and self.store.end_number else None
            self.compact: Tier | ResidentTier | None = self.store.compact
            if places.compact == "ram":
                self.compact = ResidentTier(self.compact_tier("compact='ram'"), self._device)
            self.means = Means(self.first_stage, self.store.full, self.compact, workers, self._device, self.cost.gap_bytes, self.hot)
            self.adviser = Adviser(self.store.manifest["first_stage"].get("steps", {}))
            self._opened = opened.pop_all()

    @property
    def default_nprobe(self) -> int:
        return max(1, self.store.manifest["first_stage"]["nprobe"])

    @property
    def resident_bytes(self) -> dict[str, int]:
        compact = self.compact.size_bytes if isinstance(self.compact, ResidentTier) else 0
        return {"metadata": self.store.resident_bytes, "compact": compact, "hot": self.hot.resident_bytes if self.hot else 0}

    def check_encoder(self, encoder: Encoder) -> None:
        """Raises InvalidInputError unless the store was built with it (or with none)."""
        built = self.store.manifest["encoder"]
        if built["name"] is not None and encoder.name != built["name"]:
            raise errors.InvalidInputError("the store was built with another encoder", got=encoder.name, expected=built["name"])

    def compact_tier(self, what: str) -> Tier:
        """Raises InvalidInputError where there is none, naming who wants it."""
        if self.store.compact is None:
            raise errors.InvalidInputError(
                what, got="a store without a compact tier", fix="build it with compact='bit1' (or another format), or use rerank"
            )
        return self.store.compact

    def cls_weight(self, override: float | None) -> float:
        """Of a search. Raises InvalidInputError."""
        if override is None:
            return float(self.store.manifest["cls_weight"])
        check_finite("cls_weight", override)
        if override and not self.store.schema.d_cls:
            raise errors.InvalidInputError("cls_weight", got=override, expected="0 or None: the store's documents have no CLS vector")
        return float(override)

    def query(self, query: Encoded, cls_weight: float) -> QueryVectors:
        """Raises InvalidInputError for vectors that are not finite or do not fit the store."""
        built = self.store.manifest["encoder"]
        try:
            cls, tokens = (torch.as_tensor(values, dtype=torch.float32).detach() for values in (query.cls, query.tokens))
        except (TypeError, ValueError, RuntimeError) as error:
            raise errors.InvalidInputError("query vectors", got=str(error), expected="tensors") from None
        if tuple(cls.shape) != (built["d_cls"],) or tokens.dim() != 2 or tokens.shape[1] != built["dim"]:
            raise errors.InvalidInputError(
                "query vectors",
                got=f"cls {list(cls.shape)}, tokens {list(tokens.shape)}",
                expected=f"cls [{built['d_cls']}], tokens [n, {built['dim']}]",
            )
        if not (bool(torch.isfinite(cls).all()) and bool(torch.isfinite(tokens).all())):
            raise errors.InvalidInputError("query vectors", got="NaN or infinity", expected="finite numbers")
        pooling = self.store.pooling
        vector = (cls if pooling is None else pooling.query(tokens)).cpu().numpy()
        if self.store.projection is not None:
            tokens = self.store.projection(tokens)
        similarity_weight = cls_weight if pooling is None else 0.0
        device = self._device
        return QueryVectors(cls.reshape(1, -1).to(device), tokens.contiguous().to(device), cls_weight, vector, similarity_weight)

    def hold(self) -> None:
        """It stays open until `let_go`, unless it is closed."""
        with self._lock:
            self._users += 1

    def let_go(self) -> None:
        with self._lock:
            self._users -= 1
            is_last = self._retired and not self._users
        if is_last:
            self.close()

    def retire(self) -> None:
        """Nobody holds it from now on: closes it when the last one lets go."""
        with self._lock:
            self._retired = True
            is_last = not self._users
        if is_last:
            self.close()

    def close(self) -> None:
        with self._lock:
            opened = self._opened.pop_all()
        opened.close()


def _first_stage(index: Any, places: Places) -> IvfFirstStage:
    if places.first_stage == "cpu":
        return IvfFirstStage(index, places.threads)
    gpu = places.device.index if places.device.type == "cuda" else torch.cuda.current_device() if torch.cuda.is_available() else 0
    return GpuIvfFirstStage(index, places.threads, gpu)


def _open(path: str | os.PathLike[str], engine: NativeEngine, records: Engine) -> tuple[EmbeddingStore, Any]:
    store = EmbeddingStore(path, engine, records)
    try:
        if store.shared_homes:
            warnings.warn(f"{store.path} shares data with another store ({store.shared_homes[0]}): {DETACH}", stacklevel=4)
        return store, store.load_index()
    except BaseException:
        store.close()
        raise
