"""An index that is open: the version of its store, whose turn it is, and its documents by id. What
searches it stands in index.py."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Self, overload

import torch

from .... import errors
from ....device.interface import RecordDevice
from ....device.registry import Devices
from ....sizes import format_size
from ....storage import Engine
from ....storage.documents.ids import DocumentId, document_id, document_ids
from ....tables import render_table
from ...first_stage.interface import LoadedStage
from ...store.store import EmbeddingStore
from ...store.tier import Tier
from ..devices import open_for_index
from ..gate import SearchGate
from ..lookup import alive_numbers, texts_of
from ..read_cost import DeviceCost
from .hot_records import HotRecords
from .ram_tier import RamTier
from .version import OpenOptions, OpenVersion
from .versions import OpenVersions

#: Searches under way at a time; further callers wait. More would only share the same cores and disk
#: in smaller pieces.
_SEARCHES_PER_CORE = 2


class OpenIndex:
    """See the module, and `Index`, whose arguments these are."""

    def __init__(
        self,
        path: str,
        options: OpenOptions,
        engine: str | os.PathLike[str] | Engine,
        device: RecordDevice | Devices | None,
    ):
        self._path = path
        self.compute: torch.device = options.compute
        self._gate = SearchGate(_SEARCHES_PER_CORE * len(os.sched_getaffinity(0)))
        with ExitStack() as opened:
            self._devices = open_for_index(path, self.compute, engine, device, opened)
            self._versions = OpenVersions(path, self._devices, options)
            opened.callback(self._versions.close)
            self._opened = opened.pop_all()

    @property
    def store(self) -> EmbeddingStore:
        return self._versions.newest.store

    @property
    def first_stage(self) -> LoadedStage:
        return self._versions.newest.first_stage

    @property
    def hot(self) -> HotRecords | None:
        return self._versions.newest.hot

    @property
    def coarse(self) -> Tier | RamTier | None:
        """The coarse tier, wherever it is."""
        return self._versions.newest.ram_tier or self.store.coarse

    @property
    def cost(self) -> DeviceCost:
        """What the device's reads cost."""
        return self._versions.newest.cost

    @property
    def device(self) -> RecordDevice:
        """What keeps and scores the records."""
        return self._devices.records

    @property
    def default_nprobe(self) -> int:
        """The number of lists that found 98 % of the exhaustive candidates when the store was
        built."""
        return self._versions.newest.default_nprobe

    @property
    def resident_bytes(self) -> dict[str, int]:
        """What is held in RAM, by part: metadata of the store, coarse tier, hot documents. The
        first stage's index is FAISS's own."""
        return self._versions.newest.resident_bytes

    def __repr__(self) -> str:
        state = (
            "closed"
            if self._gate.is_closed
            else f"{len(self):,} documents, generation {self.store.manifest.generation}"
        )
        return f"<Index {self._path!r}: {state}>"

    def summary(self) -> str:
        """What the store holds, its sizes on disk and in memory, and how it is searched here: a
        table of several lines."""
        self._gate.check_open()
        with self._versions.current() as version:
            held = {
                name: size
                for name, size in version.resident_bytes.items()
                if name != "metadata" and size
            }
            rows = [
                ("path", self._path),
                *version.store.facts(),
                *((f"in memory: {name}", format_size(size)) for name, size in held.items()),
                ("scored on", str(self.compute)),
            ]
        return render_table(("", ""), rows)

    def __len__(self) -> int:
        """Documents that may be found."""
        return self.store.count

    def __contains__(self, identifier: object) -> bool:
        try:
            wanted = [document_id(identifier)]
        except errors.InvalidInputError:
            return False
        with self._reading() as version:
            return bool(version.store.texts.numbers(wanted)[0] >= 0)

    @overload
    def get(self, ids: DocumentId) -> str | None: ...  # type: ignore[overload-overlap]  # a str is an Iterable too
    @overload
    def get(self, ids: Iterable[DocumentId]) -> list[str | None]: ...

    def get(self, ids: DocumentId | Iterable[DocumentId]) -> str | list[str | None] | None:
        """The text of a document, or of several (a list, in their order); None for an id that the
        store does not hold.

        Raises InvalidInputError for what can be no id, and what reading texts raises.
        """
        is_one = isinstance(ids, (str, int)) or getattr(ids, "ndim", None) == 0
        wanted = [document_id(ids)] if is_one else document_ids(ids)
        with self._reading() as version:
            texts = texts_of(version.store, wanted)
        return texts[0] if is_one else texts

    def ids(self) -> Iterator[DocumentId]:
        """The ids of all documents, in the order of records: those of the version that is current
        when it begins, to the end."""
        with self._versions.current() as version:
            for numbers in alive_numbers(version.store):
                with self._gate:
                    rows = version.store.texts.get(numbers.tolist())
                yield from (identifier for identifier, _ in rows)

    def __iter__(self) -> Iterator[DocumentId]:
        return self.ids()

    @contextmanager
    def _reading(self) -> Iterator[OpenVersion]:
        """The newest version, while it is our turn."""
        with self._gate, self._versions.current() as version:
            yield version

    def close(self) -> None:
        """Searches under way are finished first; later ones raise EngineClosedError. In a child
        after fork() nothing is done."""
        if os.getpid() != self._gate.process:
            return
        self._gate.is_closed = True
        with self._versions.changing, self._gate.none():
            self._opened.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()
