"""The kept side of a `KVCache`: as what it is kept, its lock, the model that it belongs to, what is
saved beside the rows."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from transformers import PreTrainedModel

from ... import errors
from ...device.row_layout import DTYPES
from ...kv.cache import SsdCache
from ...kv.kept.folders import KeptName
from ...kv.kept.library import evict
from ...kv.kept.state import ROWS_NAME, load, save
from ...kv.striping import Storage
from ...sizes import parse_size
from .identity import fingerprint as fingerprints
from .identity.watch import Watch


@dataclass(frozen=True)
class KeptAs:
    """The name of a cache and what goes with it. Checked when it is made: raises InvalidInputError.

    Attributes:
        name, fingerprint, library_bytes: as of `KVCache`.
    """

    name: str | None
    fingerprint: str
    library_bytes: int | str | None

    def __post_init__(self) -> None:
        if self.fingerprint not in fingerprints.KINDS:
            raise errors.InvalidInputError(
                "fingerprint", got=repr(self.fingerprint), expected=" or ".join(fingerprints.KINDS)
            )
        if self.library_bytes is not None:
            parse_size(self.library_bytes)
            if self.name is None:
                raise errors.InvalidInputError(
                    "library_bytes of a cache without a name",
                    got=self.library_bytes,
                    fix="KVCache(..., name=...)",
                )

    def lock(self, storage: Storage) -> KeptState | None:
        """Locks the name; None: nothing is kept. Raises what `KeptState` raises."""
        if self.name is None:
            return None
        limit = None if self.library_bytes is None else parse_size(self.library_bytes)
        return KeptState(storage, self.name, self.fingerprint, limit)


class KeptState:
    """A name that this process has locked, from construction until it is unlocked or abandoned.

    Args:
        storage, name: as of `KVCache`.
        kind: of fingerprint.
        library_bytes: after each save, other kept caches of these directories are removed until all
            fit into that. None: none is.

    Attributes:
        name: and its lock.

    Raises:
        InvalidInputError, StoreBusyError, ForeignFileError: see `espnx.kv.kept.folders.KeptName`.
    """

    def __init__(self, storage: Storage, name: str, kind: str, library_bytes: int | None):
        self._kind, self._library_bytes = kind, library_bytes
        self.name = KeptName(storage, name)
        self._fingerprint: dict[str, Any] | None = None
        # of the model that was checked last
        self._core: Callable[[], torch.nn.Module | None] = lambda: None
        self._watch: Watch | None = None

    def close(self, *, may_land: bool) -> None:
        """The cache is closed: another may have the name. Not where a write that was given up
        `may_land` even now: it stays locked until the process ends."""
        if may_land:
            self.name.hold()
        else:
            self.name.unlock()

    @property
    def directories(self) -> list[str]:
        """The directories of the cache's data files, one for each SSD."""
        return self.name.directories

    @property
    def names(self) -> list[str]:
        """Names of the data files, one in each directory."""
        return [ROWS_NAME] * len(self.directories)

    def open(self, store: SsdCache, x_rows: int | None) -> dict[str, torch.Tensor] | None:
        """Fills an empty store with what was saved.

        Args:
            x_rows: that the caller asked for; None: as many as were kept.

        Returns:
            What `save` was given beside the store; None where nothing was saved.

        Raises:
            InvalidInputError: it was kept with another format, or other X rows: what is lossy is
                continued only by who asks for that.
            FormatError, ChecksumError, TruncatedFileError, ForeignFileError: what was saved is
                damaged, or of another number of layers.
        """
        if not self.name.exists:
            return None
        self._fingerprint, tensors = load(store, self.directories[0])
        if x_rows not in (None, store.rows.x_rows):
            raise errors.InvalidInputError(
                "x_rows of a kept cache", got=x_rows, expected=f"{store.rows.x_rows}, or None"
            )
        dtypes = str(self._fingerprint["dtype"])  # of the model that computed the rows
        exact = {name for name, dtype in DTYPES.items() if str(dtype) in dtypes.split(", ")}
        # weights of integers alone do not say in which floats they compute
        exact = exact - {"int8"} or set(DTYPES) - {"int8"}
        asked = {store.options.format} if store.options.format else exact
        for rows in store.rows.kv:
            if rows is not None and rows.layout.format not in asked:
                raise errors.InvalidInputError(
                    "format of a kept cache",
                    got=store.options.format or "none: rows as they are",
                    expected=repr(rows.layout.format),
                    fix="open it as it was made, or choose another name",
                )
        return tensors

    def check(self, model: PreTrainedModel) -> None:
        """The model whose K and V come next, in each forward pass. Raises ForeignFileError where
        what was kept is another one's."""
        core = model.base_model  # either may be called
        if self._watch is not None and core is self._core() and self._watch.is_unchanged():
            return
        now = fingerprints.fingerprint(model, self._kind)
        if self._fingerprint is not None:
            fingerprints.compare(self._fingerprint, now, self.directories[0])
        self._fingerprint, self._core, self._watch = now, weakref.ref(core), Watch(core)

    def save(self, store: SsdCache, tensors: dict[str, torch.Tensor]) -> None:
        """Publishes the state of a store, and `tensors` with it, unless no model has used it yet.
        Raises WriteError, DiskFullError."""
        if self._fingerprint is None:
            return
        save(store, self.directories[0], self._fingerprint, tensors)
        self.name.touch()
        if self._library_bytes is not None:
            evict(self.name.roots, self._library_bytes)
