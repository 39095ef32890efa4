"""The build's second pass: the first stage takes the spooled documents up, and says in which order
their records go to disk.

What it makes lies in the build's directory until the third pass puts it into the store: the order,
and a file for each section.
"""

from __future__ import annotations

import os
from collections.abc import Generator, Iterable, Iterator, Mapping

import numpy as np

from ... import errors
from ...storage import NativeEngine
from ...storage.files import Region, StreamWriter, regroup
from ..first_stage.interface import Entries, FirstStage
from ..store.part import stage_section
from ..store.places import ORDER
from .budget import MemoryBudget
from .spool import DISCARD, Spool, spool_windows
from .state import SpoolFile

_ORDER_ROWS = 1 << 16  # numbers at a time: half a MiB


def section_file(name: str) -> str:
    """The file of a section in the build's directory. Raises InvalidInputError for a name that
    cannot be."""
    return f"{stage_section(name).replace('stage.', 'stage-', 1)}.bin"


def assign(
    engine: NativeEngine, directory: str, spool: Spool, stage: FirstStage, budget: MemoryBudget
) -> dict[str, SpoolFile]:
    """Gives every document its place. Returns what is known of the files that it writes.

    Raises InvalidInputError where what the stage needs for it cannot fit the memory budget.
    """
    budget.require(
        stage.add_bytes(len(spool)),
        "the first stage does not fit the memory budget",
        "give more --memory, or a smaller code (--first-stage-code sq8 or pq16)",
    )
    entries = stage.add(spool)
    files = {
        ORDER: _save(engine, os.path.join(directory, ORDER), checked_order(entries, len(spool)))
    }
    for name, pieces in entries.sections.items():
        files[section_file(name)] = _save(
            engine, os.path.join(directory, section_file(name)), pieces
        )
    return files


def _save(engine: NativeEngine, path: str, pieces: Iterable[np.ndarray]) -> SpoolFile:
    with StreamWriter(engine, path, sums=()) as writer:
        for piece in pieces:
            writer.write(np.ascontiguousarray(piece).reshape(-1).view(np.uint8))
        writer.sync()
    return SpoolFile(writer.size_bytes, list(writer.sums or []))


def checked_order(entries: Entries, count: int) -> Iterator[np.ndarray]:
    """The order of so many documents. Raises InvalidInputError, at its end at the latest, unless
    each is there once: whatever a first stage does, no document is lost and none is written
    twice."""
    seen = np.zeros(count, dtype=bool)
    for numbers in entries.order:
        inside = numbers[(numbers >= 0) & (numbers < count)]
        if len(inside) < len(numbers) or seen[inside].any() or len(np.unique(inside)) < len(inside):
            raise errors.InvalidInputError(
                "order of a first stage",
                got="a document twice, or another one",
                expected=f"{count} documents",
            )
        seen[inside] = True
        yield numbers.astype("<i8", copy=False)
    if not seen.all():
        raise errors.InvalidInputError(
            "order of a first stage", got=f"{int(seen.sum())} documents", expected=count
        )


def record_order(
    engine: NativeEngine, directory: str, files: Mapping[str, SpoolFile], count: int
) -> Iterator[np.ndarray]:
    """Numbers of the spooled documents in the order of their records, int64, half a MiB at a time.
    Raises ChecksumError."""
    if files[ORDER].size_bytes != 8 * count:
        raise errors.ChecksumError(
            "the build's order is damaged",
            path=os.path.join(directory, ORDER),
            expected=8 * count,
            fix=DISCARD,
        )
    for window in regroup(
        spool_windows(engine, os.path.join(directory, ORDER), files[ORDER].sums or []),
        8 * _ORDER_ROWS,
    ):
        numbers = window.view("<i8")
        if (numbers < 0).any() or (numbers >= count).any():
            raise errors.ChecksumError(
                "the build's order is damaged", path=os.path.join(directory, ORDER), fix=DISCARD
            )
        yield numbers


class SpooledEntries:
    """See `StoredEntries`: those of a build, before they are part of a store."""

    first_number = 0

    def __init__(
        self, engine: NativeEngine, directory: str, files: Mapping[str, SpoolFile], count: int
    ):
        self._engine, self.path, self._files, self.count = engine, directory, files, count

    def size_bytes(self, name: str) -> int:
        return self._file(name).size_bytes

    def read(self, name: str) -> np.ndarray:
        return np.concatenate(
            [np.empty(0, np.uint8), *(window.copy() for window in self.windows(name))]
        )

    def windows(self, name: str) -> Generator[np.ndarray, None, None]:
        yield from spool_windows(
            self._engine, os.path.join(self.path, section_file(name)), self._file(name).sums or []
        )

    def place(self, name: str) -> Region:
        return Region(os.path.join(self.path, section_file(name)), 0, self._file(name).size_bytes)

    def _file(self, name: str) -> SpoolFile:
        if section_file(name) not in self._files:
            raise errors.FormatError(
                f"no section {name} of the first stage", path=self.path, fix=DISCARD
            )
        return self._files[section_file(name)]

    def sections(self) -> dict[str, Iterator[np.ndarray]]:
        """All of them, as a part takes them."""
        names = [
            name.removeprefix("stage-").removesuffix(".bin")
            for name in self._files
            if name != ORDER
        ]
        return {name: self.windows(name) for name in names}


def tune(
    engine: NativeEngine,
    directory: str,
    spool: Spool,
    stage: FirstStage,
    files: Mapping[str, SpoolFile],
) -> FirstStage:
    """The stage with what an effort of ``auto`` means, measured on what `assign` wrote."""
    loaded = stage.load([SpooledEntries(engine, directory, files, len(spool))])
    try:
        return stage.tune(loaded, spool)
    finally:
        loaded.close()
