"""Data files of records: laid out, numbered, sealed, a file at a time; and what a part's metadata
says of them."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from ...device.record_layout import RecordSchema, seal
from ...storage import NativeEngine
from ..store.part import GROUP_RECORDS, Segment
from ..store.part_file import FileWriter

#: More bytes, or records, than any file has.
NO_LIMIT = 1 << 62


class Layout:
    """What a part's metadata says of the records of a tier: token counts, and the offset of every
    64th."""

    def __init__(self, schema: RecordSchema):
        self.schema, self.count = schema, 0
        self.n_tokens: list[np.ndarray] = []
        self.group_offset_bytes: list[int] = []

    def lay_out(self, n_tokens: np.ndarray, begin_bytes: int) -> tuple[np.ndarray, int]:
        """Notes further records. Returns where each begins in its file, and the first free byte
        after them."""
        offsets, end = self.schema.lay_out(n_tokens, begin_bytes)
        self.group_offset_bytes.extend(
            offsets[-self.count % GROUP_RECORDS :: GROUP_RECORDS].tolist()
        )
        self.n_tokens.append(n_tokens)
        self.count += len(n_tokens)
        return offsets, end

    def append(
        self,
        file: FileWriter,
        n_tokens: np.ndarray,
        fill: Callable[[np.ndarray, np.ndarray], None],
        first_number: int,
        salt: int,
    ) -> None:
        """Writes records. `fill(block, offsets)` puts their vectors into a zeroed block; headers
        are added here."""
        begin, number = file.stream.size_bytes, first_number + self.count
        offsets, end = self.lay_out(n_tokens, begin)
        block = np.zeros(end - begin, dtype=np.uint8)
        fill(block, offsets - begin)
        seal(block, self.schema, offsets - begin, n_tokens, number, salt)
        file.stream.write(block)

    @property
    def tokens(self) -> int:
        return sum(int(counts.sum(dtype=np.int64)) for counts in self.n_tokens)

    def all_tokens(self) -> np.ndarray:
        """uint16 [count]: token counts."""
        return np.concatenate(self.n_tokens) if self.n_tokens else np.empty(0, np.uint16)

    def offsets(self) -> np.ndarray:
        """int64 [groups]: `group_offset_bytes` as an array."""
        return np.array(self.group_offset_bytes, dtype=np.int64)


class SegmentWriter:
    """Writes the records of a base, which may be many files on several devices.

    Args:
        directories: where segments go, in turn; relative ones are inside `root`.
        segment_bytes: a segment is closed at the first multiple of 64 records after this size.
        done: segments that an interrupted build finished; their records are only counted again.
        salt: seeds the records' checksums.
        first_number: of the first record, a multiple of 64.
        name: what the files' names begin with.
    """

    def __init__(
        self,
        engine: NativeEngine,
        root: str,
        directories: list[str],
        schema: RecordSchema,
        store_id: str,
        generation: int,
        segment_bytes: int,
        done: list[Segment],
        *,
        salt: int,
        first_number: int = 0,
        name: str = "segment",
    ):
        self._engine, self._root, self._directories, self.schema = engine, root, directories, schema
        self._store_id, self._generation = store_id, generation
        self._segment_bytes, self._name = segment_bytes, name
        self._salt, self._first_number = salt, first_number
        self.segments = list(done)
        self.layout = Layout(schema)
        self._file: FileWriter | None = None
        self._first_record = 0
        self._path = ""

    @property
    def count(self) -> int:
        """Records so far."""
        return self.layout.count

    def count_again(self, n_tokens: np.ndarray, begin_bytes: int) -> int:
        """Lays out records that are on disk already; returns the first free byte after them."""
        return self.layout.lay_out(n_tokens, begin_bytes)[1]

    def append(self, n_tokens: np.ndarray, fill: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Appends records. `fill(block, offsets)` puts their vectors into a zeroed block; headers
        are added here."""
        self.layout.append(
            self._file or self._open(), n_tokens, fill, self._first_number, self._salt
        )

    def full(self) -> bool:
        """Whether the segment may and should be closed now."""
        return (
            self._file is not None
            and self.count % GROUP_RECORDS == 0
            and self._file.stream.size_bytes >= self._segment_bytes
        )

    def room(self) -> int:
        """Records until the next place where a segment may end."""
        return GROUP_RECORDS - self.count % GROUP_RECORDS

    def _open(self) -> FileWriter:
        number = len(self.segments)
        self._path = os.path.join(
            self._directories[number % len(self._directories)], f"{self._name}-{number:05d}.bin"
        )
        self._file = FileWriter(
            self._engine, os.path.join(self._root, self._path), buffer_bytes=4 << 20
        )
        self._first_record = self.count
        return self._file

    def finish_segment(self) -> None:
        """Flushes the open segment, header last, so that a torn segment never looks whole."""
        file, self._file = self._file, None
        if file is None:
            return
        first, records = self._first_number + self._first_record, self.count - self._first_record
        size = file.finish(self._store_id, self._generation, len(self.segments), first, records)
        self.segments.append(Segment(self._path, first, records, size))

    def abandon(self) -> None:
        """Closes the open file after a failure."""
        if self._file is not None:
            self._file.abandon()
            self._file = None

    @property
    def resident_bytes(self) -> int:
        """What an open store holds of this tier, beside token counts and codebook
        (`Tier.resident_bytes`)."""
        return 8 * len(self.layout.group_offset_bytes) + 16 * len(self.segments)

    def state(self) -> list[dict[str, object]]:
        """The finished segments, for the build's state file."""
        return [asdict(segment) for segment in self.segments]


def resident_bytes(
    writers: Sequence[SegmentWriter], extra: Mapping[str, np.ndarray]
) -> tuple[int, int]:
    """What an open store of this part holds (`EmbeddingStore.resident_bytes`), and what of it was
    trained, the same for any number of documents. `extra`: codebooks and projection."""
    counts = sum(array.nbytes for array in writers[0].layout.n_tokens)
    shared = sum(
        array.nbytes
        for name, array in extra.items()
        if name in ("full.centroids", "coarse.centroids", "projection")
    )
    trained = shared if counts else 0
    return counts + sum(writer.resident_bytes for writer in writers) + trained, trained


def pieces(
    order: Iterator[np.ndarray],
    sizes: Callable[[np.ndarray], np.ndarray],
    limit_bytes: int,
    room: Callable[[], int],
) -> Iterator[np.ndarray]:
    """Cuts a stream of arrival numbers into runs of at most `limit_bytes` of records that stop at
    places where a segment may end."""
    for arrivals in order:
        done = 0
        while done < len(arrivals):
            upcoming = arrivals[done : done + 65536]
            fits = int(np.searchsorted(np.cumsum(sizes(upcoming)), limit_bytes, side="right"))
            count = min(max(1, fits), len(upcoming))
            if count > room():  # end on a multiple of 64 records where the budget allows one
                count = room() + (count - room()) // GROUP_RECORDS * GROUP_RECORDS
            yield upcoming[:count]
            done += count
