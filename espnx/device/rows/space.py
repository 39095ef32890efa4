"""The space of a device that keeps rows in one data file: segments as it knows them, and those
whose places a published state names."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ... import errors
from ...storage import NativeEngine
from ...storage.engine import FileHandle
from ...storage.files import write_error
from ..interface import Segment, SegmentPlace
from .extents import Extents
from .writes import PutWrite


@dataclass(eq=False, slots=True)
class FileSegment(Segment):
    """A segment in a data file.

    Attributes:
        place: bytes into the file.
        every_sum: uint32: CRC32C of blocks, of this segment's and others': an array for each would
            be a small piece of memory that stays.
        first_sum: of its own among them.
        writing: the write that may still be under way, or None.
        is_lent: its place is somebody else's to hand out.
    """

    place: int
    every_sum: np.ndarray
    first_sum: int = 0
    writing: PutWrite | None = None
    is_lent: bool = False

    @property
    def sums(self) -> np.ndarray:
        """uint32 [heads, blocks]: CRC32C of each block."""
        shape = len(self.heads), self.n_blocks
        return self.every_sum.reshape(-1)[
            self.first_sum : self.first_sum + shape[0] * shape[1]
        ].reshape(shape)

    @property
    def memory_bytes(self) -> int:
        return len(self.heads) * self.n_blocks * self.every_sum.itemsize


def file_segment(segment: Segment) -> FileSegment:
    """Raises InvalidInputError for a segment of a device of another kind."""
    if not isinstance(segment, FileSegment):
        raise errors.InvalidInputError(
            "segment of another device", got=type(segment).__name__, expected=FileSegment.__name__
        )
    return segment


class FileSpace:
    """See `Space`.

    Args:
        engine, file: of the data file.
        reserved_bytes: reserved at once. Raises DiskFullError with bytes needed and free.
    """

    def __init__(self, engine: NativeEngine, file: FileHandle, reserved_bytes: int = 0):
        self._engine, self._file = engine, file
        self.extents = Extents(engine, file, reserved_bytes)
        self._pinned: dict[int, int] = {}  # place -> bytes
        self._left: set[int] = set()  # of them, those that no segment holds any more

    @property
    def path(self) -> str:
        """See `Space`."""
        return self._file.path

    @property
    def used_bytes(self) -> int:
        """Bytes that segments use, or that are pinned."""
        return self.extents.used_bytes

    def give_back(self, place: int, size_bytes: int) -> None:
        """A segment does not hold this place any more."""
        if place in self._pinned:
            self._left.add(place)
        else:
            self.extents.give_back(place, size_bytes)

    def reserve(self, size_bytes: int) -> None:
        """See `Space`."""
        self.extents.reserve(size_bytes)

    def place(self, segment: Segment) -> SegmentPlace:
        """See `Space`."""
        mine = file_segment(segment)
        return SegmentPlace(mine.layout, mine.heads, mine.n_rows, mine.place, mine.sums)

    def restore(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        """See `Space`."""
        for each in places:
            if each.size_bytes:
                self.extents.claim(each.offset_bytes, each.size_bytes)
        found = _segments_at(places, is_lent=False)
        self.pin(found)
        self._cut()
        return found

    def lend(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        """See `Space`."""
        return _segments_at(places, is_lent=True)

    def _cut(self) -> None:
        """Takes away what a process that was killed wrote behind the last state that it
        published."""
        try:
            if os.path.getsize(self.path) > self.extents.size_bytes:
                os.truncate(self.path, self.extents.size_bytes)
        except OSError as error:
            raise write_error("cannot cut the rows of a kept cache", self.path, error) from error

    def pin(self, segments: Sequence[Segment], *, also: bool = False) -> None:
        """See `Space`."""
        before = self._pinned
        self._pinned = {
            mine.place: mine.size_bytes for mine in map(file_segment, segments) if mine.size_bytes
        }
        if also:
            self._pinned |= before
        for place in before.keys() - self._pinned.keys():
            if place in self._left:
                self._left.discard(place)
                self.extents.give_back(place, before[place])

    def sync(self) -> None:
        """The file survives a power cut as it is; what nobody has taken at its end is cut off."""
        self.extents.shrink()
        self._engine.sync(self._file)


def _segments_at(places: Sequence[SegmentPlace], *, is_lent: bool) -> list[Segment]:
    sums = [each.checksums.reshape(-1) for each in places]
    every_sum = np.concatenate(sums) if sums else np.empty(0, np.uint32)
    found, first = list[Segment](), 0
    for each in places:
        found.append(
            FileSegment(
                each.layout,
                each.heads,
                each.n_rows,
                each.offset_bytes,
                every_sum,
                first,
                is_lent=is_lent,
            )
        )
        first += each.checksums.size
    return found
