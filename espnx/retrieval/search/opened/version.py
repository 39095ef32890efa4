"""One version of a store, open and ready to be searched. Searches hold it while they last, so that
a newer one can take its place."""

from __future__ import annotations

import logging
import os
import threading
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass

import numpy as np
import torch

from .... import errors
from ....checks import check_finite, check_whole, plain
from ....sizes import parse_size
from ....storage.engine import because
from ....storage.manifest import open_current
from ...encoder import Encoded, Encoder, check_query_encoder
from ...first_stage.interface import LoadedStage
from ...first_stage.registry import with_sparse_encoder
from ...sparse_encoder import SparseEncoder, SparseEncoderLike, sparse_encoder_of
from ...store.places import DETACH
from ...store.store import EmbeddingStore
from ...store.tier import Tier
from ..chosen_stage import ChosenStage
from ..devices import IndexDevices
from ..filters import Filters
from ..options import SearchOptions
from ..read_cost import DeviceCost, measure
from .hot_records import HotRecords
from .ram_tier import RamTier
from .scoring import QueryVectors

log = logging.getLogger(__name__)

_THREADS_MAX = 1024


@dataclass(frozen=True)
class OpenOptions:
    """How an index is opened: where its parts lie and run; see the arguments of `Index`.

    Attributes:
        compute: where records are scored, its number known.
        threads, first_stage_on: of the first stage: how many, and ``cpu`` or ``cuda``.
        hot_bytes, coarse, cost: as for `Index`.
        sparse_encoder: loaded, or None: the one that the store remembers.
    """

    compute: torch.device
    threads: int
    first_stage_on: str
    hot_bytes: int
    coarse: str
    cost: DeviceCost | None
    sparse_encoder: SparseEncoder | None = None

    @classmethod
    def of(
        cls,
        compute: torch.device,
        threads: int | None,
        first_stage_on: str,
        hot: int | str,
        coarse: str,
        cost: DeviceCost | None,
        sparse_encoder: SparseEncoderLike | None,
    ) -> OpenOptions:
        """What the arguments of `Index` say, checked. Raises InvalidInputError, and what loading a
        sparse encoder raises."""
        for name, value, known in (
            ("coarse", coarse, ("ssd", "ram")),
            ("first_stage_on", first_stage_on, ("cpu", "cuda")),
        ):
            if value not in known:
                raise errors.InvalidInputError(name, got=repr(value), expected=" or ".join(known))
        threads, hot = plain(threads), plain(hot)
        if threads is not None:
            check_whole("threads", threads, 1, _THREADS_MAX)
        if not isinstance(hot, str):
            check_whole("hot", hot, 0)
        if cost is not None and not isinstance(cost, DeviceCost):
            raise errors.InvalidInputError("cost", got=repr(cost), expected="a DeviceCost or None")
        threads = threads or min(4, len(os.sched_getaffinity(0)))
        sparse = sparse_encoder_of(sparse_encoder)
        return cls(compute, threads, first_stage_on, parse_size(hot), coarse, cost, sparse)


class OpenVersion:
    """See the module. Holds files and memory until `close`, or until it was retired and nobody uses
    it any more.

    Args:
        path: the store's directory.
        devices: what reads and scores; they stay the caller's.

    Attributes:
        end_number: record numbers lie below it.
        cost, gap_bytes: of the device's reads; and which holes between records they read through.

    Raises:
        what `EmbeddingStore` raises; InvalidInputError; PathUnavailableError.
    """

    def __init__(self, path: str, devices: IndexDevices, options: OpenOptions):
        self._device = devices.records.compute
        self._users, self._retired, self._lock = 0, False, threading.Lock()
        with ExitStack() as opened:
            self.store, self.first_stage = open_current(path, lambda: _open(path, devices, options))
            opened.callback(self.store.close)
            opened.callback(self.first_stage.close)
            self.filters = Filters(self.store)
            base = self.store.parts[0].count if self.store.parts else 0
            self.end_number = self.store.manifest.end_number
            self.cost = measure(self.store.full, base) if options.cost is None else options.cost
            self.gap_bytes = self.cost.gap_bytes
            if options.hot_bytes and not devices.records.capabilities.hands_out_records:
                raise errors.InvalidInputError(
                    "hot", got="a device that keeps its records to itself", fix="hot=0"
                )
            self.hot = (
                HotRecords(self.store.full, options.hot_bytes)
                if options.hot_bytes and self.end_number
                else None
            )
            self.ram_tier = (
                RamTier(self.coarse_tier("coarse='ram'"), self._device)
                if options.coarse == "ram"
                else None
            )
            self._chosen: dict[tuple[tuple[str, ...], str], ChosenStage] = {}
            self._tell(options)
            self._opened = opened.pop_all()

    def _tell(self, options: OpenOptions) -> None:
        """Logs where the parts are."""
        store, cost = self.store, self.cost
        log.debug(
            "%s: %d documents, records by %s%s",
            store.path,
            store.count,
            store.effective_path,
            because(store.fallback_reason),
        )
        log.debug(
            "first stage on %s, %d threads, nprobe %d",
            options.first_stage_on,
            options.threads,
            self.default_nprobe,
        )
        how = (
            "given, or supposed for a small store"
            if cost in (options.cost, DeviceCost())
            else "measured"
        )
        rates = (how, 1e6 * cost.request_s, cost.bytes_per_s / 1e9, self.gap_bytes >> 10)
        log.debug(
            "reads cost (%s) %.1f us each and a second for %.2f GB, so holes up to %d KiB are read "
            "through",
            *rates,
        )
        if store.coarse is not None:
            log.debug(
                "coarse records in %s", "memory" if self.ram_tier is not None else "their file"
            )

    @property
    def default_nprobe(self) -> int:
        return self.first_stage.auto_effort

    @property
    def resident_bytes(self) -> dict[str, int]:
        coarse = 0 if self.ram_tier is None else self.ram_tier.size_bytes
        return {
            "metadata": self.store.resident_bytes,
            "coarse": coarse,
            "hot": self.hot.resident_bytes if self.hot else 0,
        }

    def check_encoder(self, encoder: Encoder) -> None:
        """Raises InvalidInputError unless the store was built with it, in whatever dtype, or with
        none."""
        check_query_encoder(encoder, self.store.manifest.encoder.name)

    def coarse_tier(self, what: str) -> Tier:
        """Raises InvalidInputError where there is none, naming who wants it."""
        if self.store.coarse is None:
            raise errors.InvalidInputError(
                what,
                got="a store without a coarse tier",
                fix="build it with coarse='bit1' (or another format), or use rerank",
            )
        return self.store.coarse

    def cls_weight(self, override: float | None) -> float:
        """The weight of CLS vectors in a search. Raises InvalidInputError."""
        if override is None:
            return float(self.store.manifest.cls_weight)
        check_finite("cls_weight", override)
        if override and not self.store.full.schema.d_cls:
            raise errors.InvalidInputError(
                "cls_weight",
                got=override,
                expected="0 or None: the store's documents have no CLS vector",
            )
        return float(override)

    def stage(self, options: SearchOptions) -> ChosenStage:
        """The first stage that a search wants. Raises InvalidInputError for one that the store does
        not have."""
        key = options.stages, "rrf" if options.fuses_maxsim else options.fuse
        with self._lock:
            if key not in self._chosen:
                self._chosen[key] = ChosenStage.of(
                    self.store.first_stage, self.first_stage, *key, self.store.texts.first_of
                )
            return self._chosen[key]

    def without_vectors(self, queries: Sequence[str | Encoded]) -> list[Encoded]:
        """Stand-ins for the vectors of queries whose words alone are looked at: none is encoded."""
        built = self.store.manifest.encoder
        none = Encoded(torch.zeros(built.d_cls), torch.empty(0, built.dim))
        return [query if isinstance(query, Encoded) else none for query in queries]

    def queries(
        self,
        encoded: Sequence[Encoded],
        given: Sequence[str | Encoded],
        cls_weight: float | None,
        stage: ChosenStage,
    ) -> list[QueryVectors]:
        """What the scorer and the stage take. `given`: as the caller has given them. Raises as
        `query` and `cls_weight`."""
        weight = self.cls_weight(cls_weight)
        return [
            self.query(query, text if isinstance(text, str) else None, weight, stage)
            for query, text in zip(encoded, given, strict=True)
        ]

    def query(
        self, query: Encoded, text: str | None, cls_weight: float, stage: ChosenStage
    ) -> QueryVectors:
        """`text`: where the query was given as one. Raises InvalidInputError for vectors that are
        not finite or do not fit the store."""
        built = self.store.manifest.encoder
        try:
            cls, tokens = (
                torch.as_tensor(values, dtype=torch.float32).detach()
                for values in (query.cls, query.tokens)
            )
        except (TypeError, ValueError, RuntimeError) as error:
            raise errors.InvalidInputError(
                "query vectors", got=str(error), expected="tensors"
            ) from None
        if tuple(cls.shape) != (built.d_cls,) or tokens.dim() != 2 or tokens.shape[1] != built.dim:
            raise errors.InvalidInputError(
                "query vectors",
                got=f"cls {list(cls.shape)}, tokens {list(tokens.shape)}",
                expected=f"cls [{built.d_cls}], tokens [n, {built.dim}]",
            )
        # a sixth of the time of torch's
        if not all(np.isfinite(each.cpu().numpy()).all() for each in (cls, tokens)):
            raise errors.InvalidInputError(
                "query vectors", got="NaN or infinity", expected="finite numbers"
            )
        prepared = stage.loaded.prepare(Encoded(cls, tokens), text)
        if self.store.projection is not None:
            tokens = self.store.projection(tokens)
        similarity_weight = cls_weight if stage.is_cls_similarity else 0.0
        device = self._device
        return QueryVectors(
            cls.reshape(1, -1).to(device),
            tokens.contiguous().to(device),
            cls_weight,
            prepared,
            similarity_weight,
        )

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


def _gpu_of_first_stage(options: OpenOptions) -> int | None:
    """Number of the one that lists are scanned on: that which scores, else the current one. None:
    the CPU."""
    if options.first_stage_on == "cpu":
        return None
    if options.compute.type == "cuda":
        return options.compute.index
    return torch.cuda.current_device() if torch.cuda.is_available() else 0


def _open(
    path: str | os.PathLike[str], devices: IndexDevices, options: OpenOptions
) -> tuple[EmbeddingStore, LoadedStage]:
    store = EmbeddingStore(path, devices.native, devices.records)
    try:
        if store.shared_homes:
            warnings.warn(
                f"{store.path} shares data with another store ({store.shared_homes[0]}): {DETACH}",
                stacklevel=4,
            )
        if options.sparse_encoder is not None:
            store.first_stage = with_sparse_encoder(store.first_stage, options.sparse_encoder)
        return store, store.load_first_stage(
            threads=options.threads, gpu=_gpu_of_first_stage(options), device=devices.stages
        )
    except BaseException:
        store.close()
        raise
