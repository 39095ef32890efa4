"""Builds an embedding store from a stream of documents, in bounded memory, resumable, published atomically.

Three passes: spool (encode and write in arrival order), arrange (train the first stage, assign lists), write (records in list order).
The spool and the store exist side by side for a while, so a build needs about twice the store's size on disk.
After a crash at any point, the same call goes on from the last checkpoint; the store published before stays untouched until the end.
What goes on is what the corpus of this call confirms, document by document (see resuming.py).
"""

from __future__ import annotations

import itertools
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sized
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load as load_safetensors
from safetensors.numpy import save as save_safetensors

from .. import errors
from ..ops.maxsim import Codebook, token_format
from ..storage import NativeEngine
from ..storage.lock import DirectoryLock
from ..storage.native import load_native
from ..storage.stream import crc32c, make_directory, read_file, write_file
from . import arrange, generations
from .budget import MemoryBudget
from .build_state import Arranged, BuildSettings, BuildState, in_words, write_state
from .codebooks import TokenSource, codebook_sum, codebook_tensors, train_codebooks
from .documents import Document, batches, check_documents, decode_rows, encode
from .draft import place_of_base
from .encoder import Encoder
from .encoding import Target, fills, format_until_coded, tokens_of
from .lists import trained_arrays
from .options import BuildOptions, build_options, checked_dims
from .part import PartEntry, Segment
from .part_file import FileWriter
from .part_writer import PartContents, PartPlace, finish_part
from .pooling import make_pooling
from .projection import Projection
from .publish import publish
from .record import RecordSchema
from .resuming import confirm
from .segments import SegmentWriter, pieces, resident_bytes
from .spool import CODEBOOKS, CODES, DISCARD, PROJECTION, TEXTS, TRAINED, Spool, SpoolWriter, cut, digests, spool_salt, spool_windows, trim
from .store import codebook_of
from .texts import TextReader

CHECKPOINT_S = 5.0
BATCH_DOCUMENTS = 256  # encoded together, at most
_PCA_DOCUMENTS = 4096

#: Called with (phase, done, total or None): ``spool``, ``arrange``, ``write``.
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class BuildReport:
    """What a build did. Sizes in bytes, times in seconds.

    `resumed_documents`: taken from an interrupted build. `restarted_because`: why not all that it had was taken; None where all was.
    """

    path: str
    documents: int
    tokens: int
    generation: int
    resumed_documents: int
    record_bytes: int
    resident_bytes_per_document: float
    nlist: int
    nprobe: int
    spool_s: float
    arrange_s: float
    write_s: float
    restarted_because: str | None = None


def segment_bytes(total_bytes: int, devices: int) -> int:
    """One file per GiB on one SSD; on several, enough files that they share the load."""
    return 1 << 30 if devices <= 1 else int(np.clip(total_bytes // (8 * devices), 16 << 20, 1 << 30))


def spool_format(options: BuildOptions, codebook: Codebook | None = None) -> str:
    """What a build keeps the encoder's vectors in until they are coded: as they came wherever something lossy is still made of them."""
    if codebook is not None:
        return options.format
    return format_until_coded(options.format, options.compact is not None, options.pca is not None)


class Builder:
    """One build, from lock to publication. Use `build`."""

    def __init__(
        self,
        path: str,
        encoder: Encoder | None,
        options: BuildOptions,
        engine: NativeEngine,
        dims: tuple[int, int],
        progress: Progress,
        codebook: Codebook | None = None,
        kind: str = "build",
    ):
        self.kind = kind
        self.path, self.encoder, self.options, self.engine, self.progress = path, encoder, options, engine, progress
        self.codebook = codebook  # of rows that documents bring
        self.spool_schema = RecordSchema(spool_format(options, codebook), *dims)
        self.schema = RecordSchema(options.format, dims[0], dims[1] if options.pca is None else options.pca)
        if codebook is not None:
            token_format(options.format).check_codebook(dims[1], codebook)
            if options.pca is not None:
                raise errors.InvalidInputError("pca beside codebook=", got=options.pca, expected="None: rows are kept bit for bit")
        self.compact = None if options.compact is None else RecordSchema(options.compact, 0, self.schema.dim)
        vector = options.pooling or ("cls" if dims[0] else "mean")
        if vector == "cls" and not dims[0]:
            raise errors.InvalidInputError("pooling", got="'cls'", expected="mean or muvera, for an encoder without a CLS vector")
        self.pooling = None if vector == "cls" else make_pooling(vector, dims[1])
        if self.schema.dim > self.spool_schema.dim:
            raise errors.InvalidInputError("dimensions to project to", got=self.schema.dim, expected=f"at most {self.spool_schema.dim}")
        self.budget = MemoryBudget(options.memory)
        self.building = os.path.join(path, generations.BUILDING)
        self.state: BuildState
        self.restarted_because: str | None = None
        self._encoder_failed = False
        self._work_bytes = 0  # of what may be held, once records are written

    def _settings(self) -> BuildSettings:
        options = asdict(self.options)
        directories = [options.pop(name) for name in ("memory", "directories")][1]
        spooled = {
            "encoder": self.encoder.name if self.encoder else None,
            "d_cls": self.spool_schema.d_cls,
            "dim": self.spool_schema.dim,
            "spool": self.spool_schema.format,
            "codebook": None if self.codebook is None else codebook_sum(self.codebook),
            "pooling": options.pop("pooling"),
        }
        return BuildSettings(in_words(spooled), in_words({"kind": self.kind, **options}), list(directories))

    def run(self, documents: Iterable[Any], restart: bool, replace: bool) -> BuildReport:
        published = generations.published(self.engine, self.path, replace)
        store_id = published["store_id"] if published is not None and self.kind == "add" else None
        self.state, changed = generations.begin(self.engine, self.path, self._settings(), published, restart, store_id)
        if changed:
            self._restarted(changed)
        begun = time.perf_counter()
        resumed = self._spool(documents, published)
        spooled = time.perf_counter()
        vector_dim = None if self.pooling is None else self.pooling.dim
        spool = Spool(self.engine, self.building, self.spool_schema, self.state, vector_dim, self.codebook)
        try:
            self._check_disk(spool)
            arranged = self._arrange(spool)
            arranged_at = time.perf_counter()
            writers = self._write(spool, arranged)
        finally:
            spool.close()
        model = self._model(arranged) if writers[0].count else {}
        entry = self._finish(writers, arranged, model) if model else None
        for directory in (self.path, *self.options.directories):
            self.engine.sync_directory(directory)
        publish(self.engine, self.path, self._contents(entry, arranged), published)
        written = time.perf_counter()
        return BuildReport(
            path=self.path,
            documents=writers[0].count,
            tokens=writers[0].layout.tokens,
            generation=self.state.generation,
            resumed_documents=resumed,
            record_bytes=sum(segment.size_bytes for each in writers for segment in each.segments),
            resident_bytes_per_document=resident_bytes(writers, model) / max(writers[0].count, 1),
            nlist=len(arranged.sizes),
            nprobe=arranged.nprobe,
            spool_s=spooled - begun,
            arrange_s=arranged_at - spooled,
            write_s=written - arranged_at,
            restarted_because=self.restarted_because,
        )

    def _spool(self, documents: Iterable[Any], published: dict[str, Any] | None) -> int:
        """Returns how many documents are an interrupted build's. An error in the documents leaves nothing to resume."""
        total = len(documents) if isinstance(documents, Sized) else None
        stream = batches(documents, BATCH_DOCUMENTS, self.budget.left() // 12, self.spool_schema.dim)
        try:
            first, resumed = self._confirm(stream, total, published)
            if first or self.state.phase == "spool":
                self._append(itertools.chain([first] if first else [], stream), total)
        except Exception as error:
            if isinstance(error, errors.InvalidInputError) or self._encoder_failed:
                generations.discard(self.engine, self.path, published)
            raise
        return resumed

    def _confirm(self, stream: Iterator[list[Document]], total: int | None, published: dict[str, Any] | None) -> tuple[list[Document], int]:
        """Keeps what the corpus confirms of an interrupted build. Returns the first documents that are new, and how many are not."""
        kept, phase = self.state.documents, self.state.phase
        if not kept and phase == "spool":
            return [], 0
        trim(self.engine, self.building, self.state)
        same, other = confirm(stream, digests(self.engine, self.building, self.state), lambda done: self.progress("spool", done, total))
        if same < kept:
            got = f"document {same} ({other[0].id!r}) is another one" if other else f"the corpus ends after {same} documents"
            self._restarted(f"{got}; {kept} were spooled")
        elif other and phase != "spool":
            self._restarted(f"the corpus goes on after the {kept} documents that it had")
        if same < kept or (other and phase != "spool"):
            vector_dim = self.spool_schema.d_cls if self.pooling is None else self.pooling.dim
            generations.back_to_spool(self.engine, self.path, self.state, published)
            cut(self.engine, self.building, self.spool_schema, vector_dim, self.state, same)
            make_directory(self.directory)
        return other, same

    def _restarted(self, why: str) -> None:
        """Says that this build is not simply the interrupted one."""
        self.restarted_because = why if self.restarted_because is None else f"{self.restarted_because}; {why}"
        warnings.warn(f"{self.path}: not all of the interrupted build is gone on with: {why}", stacklevel=2)

    def _append(self, stream: Iterable[list[Document]], total: int | None) -> None:
        """Spools what the interrupted build had not."""
        spool = SpoolWriter(self.engine, self.building, self.spool_schema, self.state, self.pooling, self.options.format)
        try:
            last = time.monotonic()
            for batch in stream:
                decoded = decode_rows(batch, self.schema.format, self.spool_schema.dim, self.codebook)
                try:
                    vectors = encode(decoded, self.encoder)
                except Exception as error:
                    # Once mended, it may make other vectors under the same name; of a machine that was too small that is not to be feared.
                    self._encoder_failed = not isinstance(error, (OSError, MemoryError, torch.OutOfMemoryError))
                    raise
                spool.append(batch, vectors)
                self.budget.trim()
                self.progress("spool", spool.count, total)
                if time.monotonic() - last > CHECKPOINT_S:
                    spool.checkpoint()
                    last = time.monotonic()
            spool.checkpoint(phase="arrange")
            spool.close()
        except BaseException:
            spool.abandon()
            raise

    def _check_disk(self, spool: Spool) -> None:
        """Says now, not in an hour, that the store will not fit."""
        if self.state.segments:
            return
        tiers = [self.schema] if self.compact is None else [self.schema, self.compact]
        need = sum(int(schema.sizes(spool.n_tokens).sum()) for schema in tiers) * 21 // 20 + (16 << 20)
        roots = [os.path.join(self.path, root) for root in self._data_directories()]
        devices = [os.stat(root).st_dev for root in roots]
        for root, device in zip(roots, devices, strict=True):
            free, share = load_native().free_bytes(root), need * devices.count(device) // len(devices)
            if free < share and os.statvfs(root).f_blocks:  # a file system that counts no blocks (ramfs, some network ones) cannot say
                raise errors.DiskFullError("the store's records will not fit", needed_bytes=share, free_bytes=free, path=root)

    def _arrange(self, spool: Spool) -> Arranged:
        if self.state.arranged is not None:
            return self.state.arranged
        self.progress("arrange", 0, len(spool))
        index = arrange.train(spool, self.options.first_stage, self.options.nlist, self.budget.left())
        sizes: list[int] = []
        sums: list[int] = []
        nprobe, steps, trained, codes = 0, dict[str, float](), 0, list[int]()
        if index is not None:
            sums = arrange.assign(self.engine, self.building, spool, index, self.budget)
            sizes = [index.invlists.list_size(i) for i in range(index.nlist)]
            nprobe, steps = arrange.measure_probing(index, spool)
            _, trained = write_file(self.engine, os.path.join(self.building, TRAINED), save_safetensors(trained_arrays(index)))
            codes = arrange.save_codes(self.engine, self.building, index)
        self._save_projection(spool)
        self._save_codebooks(spool)
        self.progress("arrange", len(spool), len(spool))
        self.state.phase, self.state.arranged = "write", Arranged(sums, sizes, nprobe, steps, trained, codes)
        write_state(self.engine, self.building, self.state)
        return self.state.arranged

    def _save_projection(self, spool: Spool) -> None:
        if self.options.pca is None or not len(spool):
            return
        chosen = np.random.default_rng(2).choice(len(spool), size=min(len(spool), _PCA_DOCUMENTS), replace=False)
        projection = Projection.fit(self._tokens(spool, np.sort(chosen).astype(np.int64)), self.spool_schema.dim, self.schema.dim)
        self.state.is_normalised = projection.is_normalised
        _, self.state.projection = write_file(self.engine, os.path.join(self.building, PROJECTION), projection.components.numpy().tobytes())

    def _tokens(self, spool: Spool, chosen: np.ndarray) -> Iterator[torch.Tensor]:
        """Token vectors of some documents, float32 [n, dim] each."""
        schema = self.spool_schema
        limit_bytes = self.budget.left() // 16
        for part in pieces(iter([chosen]), lambda arrivals: schema.sizes(spool.n_tokens[arrivals]), limit_bytes, lambda: len(chosen)):
            yield from tokens_of(spool, part, None)

    def _save_codebooks(self, spool: Spool) -> None:
        names = {name: schema.format for name, schema in self._tiers() if token_format(schema.format).needs_codebook}
        if self.codebook is not None:
            names.pop("full", None)
        if not names or not len(spool):
            return
        source = TokenSource(spool, self._projection(), self.schema.dim)
        books = train_codebooks(source, names, self.options.centroids, self.budget.left() // 8)
        _, self.state.codebooks = write_file(self.engine, os.path.join(self.building, CODEBOOKS), save_safetensors(books))

    def _tiers(self) -> list[tuple[str, RecordSchema]]:
        return [("full", self.schema)] if self.compact is None else [("full", self.schema), ("compact", self.compact)]

    def _codebook_tensors(self) -> dict[str, np.ndarray]:
        """Of every tier that has one: ``full.centroids``, ..."""
        tensors = {} if self.codebook is None else codebook_tensors("full", self.codebook)
        if self.state.codebooks is not None:
            tensors |= load_safetensors(self._kept(CODEBOOKS, self.state.codebooks))
        return tensors

    def _kept(self, name: str, crc: int) -> bytes:
        """A file that the second pass left for the third."""
        path = os.path.join(self.building, name)
        data = read_file(self.engine, path)
        if crc32c(data) != crc:
            raise errors.ChecksumError("a file of the build is damaged", path=path, fix=DISCARD)
        return data

    def _projection(self) -> Projection | None:
        if self.state.projection is None:
            return None
        values = np.frombuffer(bytearray(self._kept(PROJECTION, self.state.projection)), dtype=np.float32)
        return Projection(torch.from_numpy(values.reshape(self.spool_schema.dim, self.schema.dim)), self.state.is_normalised)

    @property
    def directory(self) -> str:
        return os.path.join(self.path, generations.name(self.state.generation))

    def _writers(self, spool: Spool, directories: list[str]) -> list[SegmentWriter]:
        """One for each tier. Their segments cover the same records, so that they end, and a build resumes, together."""
        total_bytes = int(self.schema.sizes(spool.n_tokens).sum())
        limits = [segment_bytes(total_bytes, len(self.options.directories)), 1 << 62]  # of the compact tier where the full one's ends
        return [
            SegmentWriter(
                self.engine, self.path, directories, schema, self.state.store_id, self.state.generation, limit,
                self._finished(name, directories), salt=self._place()[0].salt,
                name="segment" if name == "full" else name,
            )
            for (name, schema), limit in zip(self._tiers(), limits, strict=False)
        ]  # fmt: skip

    def _finished(self, tier: str, directories: list[str]) -> list[Segment]:
        """The data files that an interrupted build finished."""
        found = self.state.segments.get(tier, [])
        for segment in found:
            if os.path.dirname(segment.path) not in directories:
                raise errors.FormatError(
                    "state of an interrupted build names a foreign file", path=segment.path, expected=f"one in {directories}", fix=DISCARD
                )
        return found

    def _data_directories(self) -> list[str]:
        return generations.data_directories(self.path, self.options.directories, self.state.store_id, self.state.generation)

    def _place(self) -> tuple[PartPlace, str]:
        return place_of_base(self.path, self.state.store_id, self.state.generation)

    def _write(self, spool: Spool, arranged: Arranged) -> list[SegmentWriter]:
        writers = self._writers(spool, self._data_directories())
        limit_bytes, self._work_bytes = self.budget.record_bytes(), self.budget.left()
        try:
            runs = pieces(self._order(arranged), lambda a: self.spool_schema.sizes(spool.n_tokens[a]), limit_bytes, writers[0].room)
            self._skip_and_write(spool, writers, runs)
            for writer in writers:
                writer.finish_segment()
        except BaseException:
            for writer in writers:
                writer.abandon()
            raise
        return writers

    def _order(self, arranged: Arranged) -> Iterator[np.ndarray]:
        """Arrival numbers in record order."""
        sizes = np.array(arranged.sizes, dtype=np.int64)
        return arrange.record_order(self.engine, self.building, arranged.sums, sizes, max(65536, self._work_bytes // 4 // 32))

    def _model(self, arranged: Arranged) -> dict[str, np.ndarray]:
        """Everything that was trained: what a base's file holds of it."""
        model = {**load_safetensors(self._kept(TRAINED, arranged.trained)), **self._codebook_tensors()}
        projection = self._projection()
        return model if projection is None else {**model, "projection": projection.components.numpy()}

    def _finish(self, writers: list[SegmentWriter], arranged: Arranged, model: dict[str, np.ndarray]) -> PartEntry:
        """Writes the file that holds all but the records: ids and texts, lists and codes, metadata, and what was trained."""
        place, path = self._place()
        lists = np.flatnonzero(arranged.sizes)
        source = TextReader(os.path.join(self.building, TEXTS), spool_salt(self.state))
        try:
            contents = PartContents(
                rows=(row for arrivals in self._order(arranged) for row in source.rows(arrivals)),
                lists=(lists, np.array(arranged.sizes, dtype=np.int64)[lists]),
                codes=spool_windows(self.engine, os.path.join(self.building, CODES), arranged.codes),
                model=model,
            )
            names = [name for name, _ in self._tiers()]
            layouts = {name: writer.layout for name, writer in zip(names, writers, strict=True)}
            segments = {name: writer.segments for name, writer in zip(names, writers, strict=True)}
            return finish_part(FileWriter(self.engine, path), place, layouts, contents, segments)
        finally:
            source.close()

    def _skip_and_write(self, spool: Spool, writers: list[SegmentWriter], runs: Iterable[np.ndarray]) -> None:
        first = writers[0]
        projection, tensors = self._projection(), self._codebook_tensors()
        targets = [Target(schema, codebook_of(tensors, name, schema, self.building)) for name, schema in self._tiers()]
        again = [segment.records for segment in first.segments]  # finished by an interrupted build
        left, free_at = (again.pop(0) if again else 0), [4096] * len(writers)
        for run in runs:
            while left and len(run):
                part, run = run[:left], run[left:]
                free_at = [writer.count_again(spool.n_tokens[part], at) for writer, at in zip(writers, free_at, strict=True)]
                left -= len(part)
                if not left and again:
                    left, free_at = again.pop(0), [4096] * len(writers)
            if not len(run):
                continue
            for writer, fill in zip(writers, fills(spool, run, projection, targets), strict=True):
                writer.append(spool.n_tokens[run], fill)
            self.progress("write", first.count, len(spool))
            if first.full():
                for writer in writers:
                    writer.finish_segment()
                self.state.segments = {name: list(writer.segments) for (name, _), writer in zip(self._tiers(), writers, strict=True)}
                write_state(self.engine, self.building, self.state)

    def _contents(self, entry: PartEntry | None, arranged: Arranged) -> dict[str, Any]:
        """The manifest of a store of one part, or of none."""
        pooling = self.pooling
        return {
            "store_id": self.state.store_id,
            "generation": self.state.generation,
            "base_generation": self.state.generation,
            "records": {
                "count": entry.count if entry else 0,
                "format": self.schema.format,
                "d_cls": self.schema.d_cls,
                "dim": self.schema.dim,
                "tokens": entry.tokens if entry else 0,
            },
            "compact": None if self.compact is None else {"format": self.compact.format, "dim": self.compact.dim},
            "projection": None if self.options.pca is None else {"is_normalised": self.state.is_normalised},
            "encoder": {
                "name": self.encoder.name if self.encoder else None,
                "d_cls": self.spool_schema.d_cls,
                "dim": self.spool_schema.dim,
            },
            "first_stage": {
                "kind": "ivf",
                "vector": "cls" if pooling is None else pooling.name,
                "parameters": {} if pooling is None else pooling.parameters(),
                "dim": self.spool_schema.d_cls if pooling is None else pooling.dim,
                "code": self.options.first_stage,
                "nlist": len(arranged.sizes),
                "nprobe": arranged.nprobe,
                "steps": arranged.steps,
            },
            "cls_weight": self.options.cls_weight if self.schema.d_cls else 0.0,
            "directories": list(self.options.directories),
            "parts": [entry.fields()] if entry else [],
            "deleted": None,
        }


def build(
    path: str | os.PathLike[str],
    documents: Iterable[Any],
    encoder: Encoder | None = None,
    *,
    dims: tuple[int, int] | None = None,
    engine: NativeEngine | None = None,
    codebook: Codebook | None = None,
    restart: bool = False,
    replace: bool = False,
    progress: Progress = lambda phase, done, total: None,
    **options: Any,
) -> BuildReport:
    """Builds and publishes a store of the documents' vectors and texts.

    Args:
        path: the store's directory; made if need be.
        documents: an iterable, read once: ``(id, text)`` pairs, mappings with ``id`` and ``text``, or `Document`. Only a batch is held.
        encoder: turns texts into vectors; needed unless every document brings its own.
        dims: (d_cls, dim) of vectors that documents bring; an encoder knows its own.
        engine: a native engine to use; default ``auto``.
        codebook: of the token rows that documents bring already in a residual format (`Document.rows`); they are kept bit for bit.
        restart: discards an interrupted build instead of going on with it.
        replace: publishes over the store that is there. It stays readable until the new one is complete.
        progress: called often, from this thread.
        **options: fields of `BuildOptions`: format, first_stage, nlist, pca, cls_weight, memory, directories,
            compact, pooling, centroids.

    Raises:
        InvalidInputError: documents, vectors or options that do not fit; a store is there and `replace` is not set.
        StoreBusyError: another process is building here.
        DiskFullError, WriteError, ReadError, ...: what was spooled is kept; the same call resumes. A WriteError that says "published":
            the store is there, and only the last flush failed.
    """
    if dims is None:
        if encoder is None:
            raise errors.InvalidInputError("build needs an encoder, or dims=(d_cls, dim) and documents with vectors")
        dims = (encoder.d_cls, encoder.dim)
    dims = checked_dims(dims)
    check_documents(documents)
    chosen = build_options(options)
    where = os.fspath(path)
    make_directory(where)
    owned = NativeEngine(pool_bytes=64 << 20) if engine is None else engine
    try:
        with DirectoryLock(where):
            return Builder(where, encoder, chosen, owned, dims, progress, codebook).run(documents, restart, replace)
    finally:
        if engine is None:
            owned.close()
