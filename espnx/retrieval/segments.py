"""The build's third pass: records from arrival order into list order, projected, numbered, sealed, segment by segment."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict

import numpy as np

from ..storage import NativeEngine, Plan
from ..storage.stream import StreamWriter, aligned_empty
from .record import RecordSchema, seal
from .store import GROUP_RECORDS, SEGMENT_HEADER_BYTES, Segment, segment_header
from .texts import TextReader, TextWriter


class SegmentWriter:
    """Writes the records of a store, and keeps what the store's metadata needs: token counts and the offset of every 64th record.

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
        self.count = 0
        self.n_tokens: list[np.ndarray] = []
        self.group_offset_bytes: list[int] = []
        self._writer: StreamWriter | None = None
        self._first_record = 0
        self._path = ""

    def count_again(self, n_tokens: np.ndarray, begin_bytes: int) -> int:
        """Lays out records that are on disk already; returns the first free byte after them."""
        offsets, end = self.schema.lay_out(n_tokens, begin_bytes)
        self._note(n_tokens, offsets)
        return end

    def _note(self, n_tokens: np.ndarray, offsets: np.ndarray) -> None:
        self.group_offset_bytes.extend(offsets[-self.count % GROUP_RECORDS :: GROUP_RECORDS].tolist())
        self.n_tokens.append(n_tokens)
        self.count += len(n_tokens)

    def append(self, n_tokens: np.ndarray, fill: Callable[[np.ndarray, np.ndarray], None]) -> None:
        """Appends records. `fill(block, offsets)` puts their vectors into a zeroed block; headers are added here."""
        writer = self._writer or self._open()
        begin = writer.size_bytes
        offsets, end = self.schema.lay_out(n_tokens, begin)
        block = np.zeros(end - begin, dtype=np.uint8)
        fill(block, offsets - begin)
        seal(block, self.schema, offsets - begin, n_tokens, self._first_number + self.count, self._salt)
        writer.write(block)
        self._note(n_tokens, offsets)

    def full(self) -> bool:
        """Whether the segment may and should be closed now."""
        return self._writer is not None and self.count % GROUP_RECORDS == 0 and self._writer.size_bytes >= self._segment_bytes

    def room(self) -> int:
        """Records until the next place where a segment may end."""
        return GROUP_RECORDS - self.count % GROUP_RECORDS

    def _open(self) -> StreamWriter:
        number = len(self.segments)
        self._path = os.path.join(self._directories[number % len(self._directories)], f"{self._name}-{number:05d}.bin")
        self._writer = StreamWriter(self._engine, os.path.join(self._root, self._path))
        self._writer.write(bytes(SEGMENT_HEADER_BYTES))
        self._first_record = self.count
        return self._writer

    def finish_segment(self) -> None:
        """Flushes the open segment, header last, so that a torn segment never looks whole."""
        writer, self._writer = self._writer, None
        if writer is None:
            return
        with writer:
            writer.pad(SEGMENT_HEADER_BYTES)
            writer.sync()
        segment = Segment(self._path, self._first_number + self._first_record, self.count - self._first_record, writer.size_bytes)
        header = aligned_empty(SEGMENT_HEADER_BYTES)
        header.numpy()[:] = np.frombuffer(segment_header(self._store_id, self._generation, len(self.segments), segment), dtype=np.uint8)
        path = os.path.join(self._root, self._path)
        file = self._engine.open(path, "r+")
        try:
            self._engine.write(Plan.of(file, [0], [SEGMENT_HEADER_BYTES], [0]), header).wait()
            self._engine.sync(file)
        finally:
            self._engine.close_file(file)
        self._engine.sync_directory(os.path.dirname(path))
        self.segments.append(segment)

    def abandon(self) -> None:
        """Closes the open file after a failure."""
        if self._writer is not None:
            self._writer.__exit__(RuntimeError, None, None)
            self._writer = None

    def metadata(self) -> dict[str, np.ndarray]:
        """The arrays of meta.safetensors."""
        return {
            "n_tokens": np.concatenate(self.n_tokens) if self.n_tokens else np.empty(0, np.uint16),
            "group_offset_bytes": np.array(self.group_offset_bytes, dtype=np.int64),
            "segment_begin": np.array([segment.first_record for segment in self.segments], dtype=np.int64),
        }

    @property
    def resident_bytes(self) -> int:
        """What an open store holds of this tier, beside token counts and codebook (`Tier.resident_bytes`)."""
        return 8 * len(self.group_offset_bytes) + 16 * len(self.segments)

    def state(self) -> list[dict[str, object]]:
        """The finished segments, for the build's state file."""
        return [asdict(segment) for segment in self.segments]


def resident_bytes(writers: Sequence[SegmentWriter], extra: Mapping[str, np.ndarray]) -> int:
    """What an open store of this part holds (`EmbeddingStore.resident_bytes`). `extra`: codebooks and projection."""
    counts = sum(array.nbytes for array in writers[0].n_tokens)
    shared = sum(array.nbytes for name, array in extra.items() if name.endswith((".centroids", "projection")))
    return counts + sum(writer.resident_bytes for writer in writers) + (shared if counts else 0)


def copy_texts(source: TextReader, target: TextWriter, arrivals: np.ndarray, first_number: int) -> None:
    """Ids and texts, from arrival number to record number."""
    rows = source.get(arrivals.tolist())
    target.add([(first_number + i, identifier, text) for i, (identifier, text) in enumerate(rows)])


def pieces(
    order: Iterator[np.ndarray], sizes: Callable[[np.ndarray], np.ndarray], limit_bytes: int, room: Callable[[], int]
) -> Iterator[np.ndarray]:
    """Cuts a stream of arrival numbers into runs of at most `limit_bytes` of records that stop at places where a segment may end."""
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
