"""The space of a device that keeps rows in one data file: segments as it knows them, those whose
places a published state names, and those that are still on their way there."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...ops.crc32c import crc32c_ranges
from ...storage import NativeEngine, Plan
from ...storage.engine import FileHandle
from ...storage.files import write_error
from ..interface import Segment, SegmentPlace
from .extents import Extents
from .writes import PutWrite, Writing


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

    def check(self, blocks: torch.Tensor, path: str) -> None:
        """Raises ChecksumError unless these blocks, uint8, read from `path`, are those that were
        written."""
        size_bytes, wanted = self.layout.block_bytes, self.sums.reshape(-1)
        offsets = torch.arange(0, blocks.numel(), size_bytes)
        found = crc32c_ranges(blocks, offsets, torch.full_like(offsets, size_bytes)).numpy()
        for i in np.flatnonzero(found != wanted)[:1].tolist():
            raise errors.ChecksumError(
                "stored rows are damaged",
                path=path,
                offset_bytes=self.place + i * size_bytes,
                size_bytes=size_bytes,
                got=f"CRC32C {found[i]}",
                expected=f"CRC32C {wanted[i]}",
            )


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


class WritesBehind:
    """Rows on their way into a data file: who puts them goes on meanwhile, and waits where more
    bytes than these are under way. A place is not used again as long as something may land there.

    Args:
        space, file: of the data file.
        limit_bytes: of rows whose write nobody has waited for.

    Attributes:
        bytes_begun, count: of the writes that were begun so far.
    """

    def __init__(self, space: FileSpace, file: FileHandle, limit_bytes: int):
        self._space, self._file, self._limit_bytes = space, file, limit_bytes
        self._under_way: deque[FileSegment] = deque()
        self._late = list[PutWrite]()  # failed, of nobody, and still in flight
        self._under_way_bytes = self.bytes_begun = self.count = 0

    def begin(
        self, size_bytes: int, n_segments: int, start: Callable[[Plan], Writing]
    ) -> tuple[int, PutWrite]:
        """Starts a write of so many bytes, which are so many segments (`add`): (its place, the
        write). Raises what an earlier write raised, and DiskFullError."""
        self.settle(self._limit_bytes - size_bytes)
        place = self._space.extents.take(size_bytes)
        try:
            writing = start(Plan.of(self._file, [place], [size_bytes], [0]))
        except BaseException:
            self._space.give_back(place, size_bytes)
            raise
        self.bytes_begun += size_bytes
        self.count += 1
        return place, PutWrite(writing, n_segments)

    def add(self, segments: list[FileSegment]) -> list[FileSegment]:
        """The same: the segments of a write that was begun."""
        self._under_way.extend(segments)
        self._under_way_bytes += sum(segment.size_bytes for segment in segments)
        return segments

    def settle(self, keep_bytes: int) -> None:
        """Waits for writes until at most `keep_bytes` are under way. Raises what one raised."""
        for each in self._late:
            self._give_back(each.free())
        self._late = [each for each in self._late if each.is_late]
        while self._under_way and (
            self._under_way_bytes > max(keep_bytes, 0) or self._under_way[0].writing is None
        ):
            segment = self._under_way[0]
            # raises what the write raised; the segment stays in line, and its rows are written
            # again
            self.wait(segment)
            self._under_way.popleft()
            self._under_way_bytes -= segment.size_bytes

    def wait(self, segment: FileSegment) -> None:
        """Waits until the segment's rows are in the file. Raises what its write raised."""
        if segment.writing is not None:
            segment.writing.wait()
            self._give_back(segment.writing.settle())
            segment.writing = None

    def is_written(self, segment: FileSegment) -> bool:
        """Whether `wait` will not wait. Raises what the write raised."""
        if segment.writing is not None and segment.writing.done():
            self.wait(segment)
        return segment.writing is None

    def release(self, segment: FileSegment) -> None:
        """Nobody needs the segment any more: its place may be used again when its write is over."""
        if segment.size_bytes and not segment.is_lent:
            place, writing = (segment.place, segment.size_bytes), segment.writing
            self._give_back([place] if writing is None else writing.leave(place))
            if writing is not None and writing.is_late:
                self._late.append(writing)
            segment.writing = None

    def cancel(self) -> list[PutWrite]:
        """Nothing of this is wanted any more. Returns the writes of which something may land."""
        found = {id(each): each for each in self._late}
        for each in self._late:
            each.cancel()
        for segment in self._under_way:
            if segment.writing is not None:
                segment.writing.cancel()
                found[id(segment.writing)] = segment.writing
                segment.writing = None  # it has the data file open, and with it its space
        self._under_way.clear()
        self._late.clear()
        return list(found.values())

    def _give_back(self, places: Sequence[tuple[int, int]]) -> None:
        for place, size_bytes in places:
            self._space.give_back(place, size_bytes)


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
