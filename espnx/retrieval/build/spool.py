"""The build's first pass: documents as they come, encoded, checked, on disk, resumable.

A spool is a directory that is never published:

    records.bin     the vectors, as records numbered in arrival order, in the encoder's own
                    dimension
    vectors.f32     what the first stage wants of each document as a vector, float32, to be trained
                    and filled with
    n_tokens.u16    token counts
    texts.sqlite    ids and texts
    documents.b16   a digest of each document as it was given, by which a build that goes on knows
                    it again
    STATE.json      how far everything above is known to be on disk; replaced atomically at every
                    checkpoint
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from ... import errors
from ...device.record_layout import RecordSchema, damage, locate_records, seal
from ...ops.maxsim import Codebook
from ...storage import NativeEngine, Plan
from ...storage.files import WINDOW_BYTES, StreamWriter, crc32c, read_range, read_windows, regroup
from ..encoder import Encoded
from ..first_stage.interface import FirstStage
from ..store.part import GROUP_RECORDS
from ..store.places import DIGESTS, N_TOKENS, RECORDS, TEXTS, VECTORS
from ..store.record import check_document, pack
from ..store.texts import TextReader, TextWriter
from .documents import DIGEST_BYTES, Document, digest
from .state import BuildState, SpoolFile, write_state

DISCARD = (
    "check the device; run the same build again, and if that does not help, discard it with restart"
)
_TEXTS_AT_ONCE, _DIGESTS_AT_ONCE = 8192, 256
_SUMMED = (VECTORS, N_TOKENS, DIGESTS)  # records and texts carry their own checksums
_BUFFER_BYTES = {RECORDS: 4 << 20, VECTORS: 1 << 20, N_TOKENS: 64 << 10, DIGESTS: 64 << 10}


def spool_windows(engine: NativeEngine, path: str, sums: Sequence[int]) -> Iterator[np.ndarray]:
    """`read_windows` of a file of the spool. Damage is a ChecksumError that says what to do."""
    try:
        yield from read_windows(engine, path, sums=sums)
    except (errors.ChecksumError, errors.TruncatedFileError) as error:
        raise errors.ChecksumError(
            "the build's spool is damaged",
            path=path,
            offset_bytes=error.offset_bytes,
            got=error.got,
            expected=error.expected,
            fix=DISCARD,
        ) from error


def spool_salt(state: BuildState) -> int:
    """Seeds the checksums of a spool's records and texts."""
    return crc32c(bytes.fromhex(state.store_id))


def trim(engine: NativeEngine, directory: str, state: BuildState) -> None:
    """Cuts off what was written after the last checkpoint. Raises ChecksumError where less is there
    than it says."""
    for name, known in state.spool.items():
        path = os.path.join(directory, name)
        found = os.path.getsize(path) if os.path.exists(path) else 0
        if found < known.size_bytes:
            raise errors.ChecksumError(
                "the build's spool is damaged",
                path=path,
                got=f"{found} bytes",
                expected=known.size_bytes,
                fix=DISCARD,
            )
        if found > known.size_bytes:
            file = engine.open(path, "r+")
            try:
                engine.truncate(file, known.size_bytes)
            finally:
                engine.close_file(file)


def digests(engine: NativeEngine, directory: str, state: BuildState) -> Iterator[bytes]:
    """Yields the digests of the documents in the spool, in order; checked."""
    if not state.documents:
        return
    windows = spool_windows(
        engine, os.path.join(directory, DIGESTS), state.spool[DIGESTS].sums or []
    )
    for block in regroup(windows, _DIGESTS_AT_ONCE * DIGEST_BYTES):
        data = block.tobytes()
        yield from (data[at : at + DIGEST_BYTES] for at in range(0, len(data), DIGEST_BYTES))


def cut(
    engine: NativeEngine,
    directory: str,
    schema: RecordSchema,
    vector_dim: int,
    state: BuildState,
    documents: int,
) -> None:
    """Takes the documents from that number on out of a spool. In the state alone: whoever writes
    next overwrites them."""
    n_tokens = token_counts(engine, directory, state)[:documents]
    end = 0
    for first in range(0, documents, GROUP_RECORDS):
        _, end = schema.lay_out(n_tokens[first : first + GROUP_RECORDS], end)
    sizes = {
        RECORDS: end,
        VECTORS: 4 * vector_dim * documents,
        N_TOKENS: 2 * documents,
        DIGESTS: DIGEST_BYTES * documents,
    }
    state.spool = {
        name: SpoolFile(
            size,
            _sums_of_prefix(engine, os.path.join(directory, name), state.spool[name].sums, size),
        )
        for name, size in sizes.items()
    }
    state.documents = documents
    state.back_to_spool()
    write_state(engine, directory, state)


def _sums_of_prefix(
    engine: NativeEngine, path: str, sums: list[int] | None, size_bytes: int
) -> list[int] | None:
    """The checksums of a file's windows as they are without what comes after `size_bytes`."""
    if sums is None:
        return None
    whole, rest = divmod(size_bytes, WINDOW_BYTES)
    if not rest:
        return sums[:whole]
    file = engine.open(path)
    try:
        window = read_range(
            engine,
            file,
            whole * WINDOW_BYTES,
            min(WINDOW_BYTES, file.size_bytes - whole * WINDOW_BYTES),
        )
    finally:
        engine.close_file(file)
    if crc32c(window) != sums[whole]:
        raise errors.ChecksumError(
            "the build's spool is damaged",
            path=path,
            offset_bytes=whole * WINDOW_BYTES,
            fix=DISCARD,
        )
    return [*sums[:whole], crc32c(window[:rest])]


def token_counts(engine: NativeEngine, directory: str, state: BuildState) -> np.ndarray:
    """uint16 [documents], checked."""
    windows = spool_windows(
        engine, os.path.join(directory, N_TOKENS), state.spool[N_TOKENS].sums or []
    )
    return np.frombuffer(bytearray().join(window.tobytes() for window in windows), dtype=np.uint16)


class SpoolWriter:
    """Appends documents to a spool, new or from its last checkpoint on.

    `stored`: the format that their vectors have to fit in the end.
    """

    def __init__(
        self,
        engine: NativeEngine,
        directory: str,
        schema: RecordSchema,
        state: BuildState,
        stage: FirstStage,
        stored: str | None = None,
    ):
        self._engine, self._directory, self._schema, self._state = engine, directory, schema, state
        self._checked = schema if stored is None else RecordSchema(stored, schema.d_cls, schema.dim)
        self._stage = stage
        self._salt = spool_salt(state)
        self.count = state.documents
        self._writers: dict[str, StreamWriter] = {}
        try:
            for name, size in _BUFFER_BYTES.items():
                known = state.spool.get(name, SpoolFile(0, [] if name in _SUMMED else None))
                self._writers[name] = StreamWriter(
                    engine,
                    os.path.join(directory, name),
                    at_bytes=known.size_bytes,
                    buffer_bytes=size,
                    sums=known.sums,
                )
            self.texts = TextWriter(os.path.join(directory, TEXTS), self._salt, keep=self.count)
        except BaseException:
            for writer in self._writers.values():
                writer.close()
            raise

    def append(self, given: Sequence[Document], documents: Sequence[Encoded]) -> None:
        """`given`: the documents as they came, whose rows, where they bring some, are kept as they
        are. `documents`: their vectors.

        Raises InvalidInputError for vectors that do not fit or an id that came before; then nothing
        of the batch counts.
        """
        for item, document in zip(given, documents, strict=True):
            check_document(document, self._checked, item.id)
        self.texts.add([(self.count + i, item.id, item.text) for i, item in enumerate(given)])
        counts = np.array([len(document.tokens) for document in documents], dtype=np.uint16)
        records = self._writers[RECORDS]
        offsets, end = self._schema.lay_out(counts, records.size_bytes)
        block = np.zeros(end - records.size_bytes, dtype=np.uint8)
        offsets = offsets - records.size_bytes
        pack(documents, self._schema, block, offsets, rows=[item.rows for item in given])
        seal(block, self._schema, offsets, counts, self.count, self._salt)
        records.write(block)
        if documents:
            vectors = torch.stack([self._stage.vector(document) for document in documents])
            self._writers[VECTORS].write(
                np.ascontiguousarray(vectors.numpy(), "<f4").view(np.uint8).reshape(-1)
            )
        self._writers[N_TOKENS].write(counts.view(np.uint8))
        self._writers[DIGESTS].write(b"".join(digest(item) for item in given))
        self.count += len(documents)

    def checkpoint(self, phase: str = "spool") -> None:
        """Everything appended so far survives a crash from here on."""
        for writer in self._writers.values():
            writer.sync()
        self.texts.commit()
        self._state.documents, self._state.phase = self.count, phase
        self._state.spool = {
            name: SpoolFile(writer.size_bytes, None if writer.sums is None else list(writer.sums))
            for name, writer in self._writers.items()
        }
        write_state(self._engine, self._directory, self._state)

    def close(self) -> None:
        self.texts.close()
        for writer in self._writers.values():
            writer.close()

    def abandon(self) -> None:
        """Closes after a failure; the error that led here is the one to tell."""
        try:
            self.close()
        except errors.EspnxError:
            pass


class Spool:
    """A finished spool, for the passes that follow. Resident: 2.125 bytes a document."""

    def __init__(
        self,
        engine: NativeEngine,
        directory: str,
        schema: RecordSchema,
        state: BuildState,
        vector_dim: int,
        codebook: Codebook | None = None,
    ):
        self._engine, self._directory, self.schema = engine, directory, schema
        self.vector_dim = vector_dim
        self.codebook = codebook
        self._salt = spool_salt(state)
        self._vector_sums = state.spool[VECTORS].sums or []
        self.n_tokens = token_counts(engine, directory, state)
        self._groups = torch.empty(-(-len(self.n_tokens) // GROUP_RECORDS), dtype=torch.int64)
        end = 0
        for group in range(len(self._groups)):
            counts = self.n_tokens[group * GROUP_RECORDS : (group + 1) * GROUP_RECORDS]
            offsets, end = schema.lay_out(counts, end)
            self._groups[group] = int(offsets[0])
        self._file = engine.open(os.path.join(directory, RECORDS))

    def __len__(self) -> int:
        return len(self.n_tokens)

    def vectors(self, rows: int) -> Iterator[np.ndarray]:
        """First-stage vectors, float32 [m, vector_dim], m <= rows, of all documents in arrival
        order. Raises ChecksumError."""
        windows = spool_windows(
            self._engine, os.path.join(self._directory, VECTORS), self._vector_sums
        )
        for block in regroup(windows, 4 * self.vector_dim * rows):
            yield block.view("<f4").reshape(-1, self.vector_dim)

    @property
    def scratch(self) -> str:
        """The build's own directory."""
        return self._directory

    def texts(self, order: np.ndarray | None = None) -> Iterator[str]:
        """The text of each document, in arrival order or this one. Raises ChecksumError,
        FormatError."""
        reader = TextReader(os.path.join(self._directory, TEXTS), self._salt)
        try:
            for first in range(0, len(self), _TEXTS_AT_ONCE):
                end = min(first + _TEXTS_AT_ONCE, len(self))
                for _, text in reader.rows(
                    np.arange(first, end) if order is None else order[first:end]
                ):
                    yield text
        finally:
            reader.close()

    def vector_sample(self, wanted: np.ndarray) -> np.ndarray:
        """First-stage vectors of some documents (ascending), float32 [m, vector_dim]. One pass over
        all, because that can be checked."""
        out = np.empty((len(wanted), self.vector_dim), dtype=np.float32)
        first = 0
        for vectors in self.vectors(8192):
            begin, end = np.searchsorted(wanted, (first, first + len(vectors)))
            out[begin:end] = vectors[wanted[begin:end] - first]
            first += len(vectors)
        return out

    def read(self, arrivals: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Records by arrival number: the I/O buffer (uint8) and where each lies in it. Checked;
        raises ChecksumError."""
        begin = torch.zeros(1, dtype=torch.int64)
        _, offsets, sizes = locate_records(
            arrivals, self.n_tokens, self._groups, begin, self.schema
        )
        future = self._engine.read(Plan.of(self._file, offsets, sizes), gap_bytes=16 << 10)
        memory, positions = future.wait(), future.position_bytes
        found = damage(
            memory, self.schema, positions, arrivals, self.n_tokens[arrivals], self._salt
        )
        if found:
            index, what = found[0]
            raise errors.ChecksumError(
                "the build's spool is damaged",
                path=self._file.path,
                offset_bytes=int(offsets[index]),
                size_bytes=int(sizes[index]),
                got=what,
                fix=DISCARD,
            )
        return memory.numpy(), positions.numpy()

    def close(self) -> None:
        self._engine.close_file(self._file)
