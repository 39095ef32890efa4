"""Builds an embedding store from a stream of documents, in bounded memory, resumable, published atomically.

Three passes: spool (encode and write in arrival order), arrange (train the first stage, assign lists), write (records in list order).
The spool and the store exist side by side for a while, so a build needs about twice the store's size on disk.
After a crash at any point, the same call goes on from the last checkpoint; the store published before stays untouched until the end.
"""

from __future__ import annotations

import difflib
import os
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from dataclasses import asdict, dataclass, fields
from typing import Any

import numpy as np
import torch
from safetensors.numpy import save as save_safetensors

from .. import errors
from ..storage import NativeEngine
from ..storage.lock import DirectoryLock
from ..storage.manifest import write_manifest
from ..storage.native import load_native
from ..storage.stream import StreamWriter, crc32c, file_sums, make_directory, read_file, read_windows, write_file
from . import arrange, generations
from .budget import MemoryBudget
from .documents import Document, batches, encode
from .encoder import Encoder
from .first_stage import CODES, load_faiss
from .projection import Projection
from .record import RecordSchema
from .segments import SegmentWriter, copier, copy_texts, pieces
from .spool import DISCARD, Spool, SpoolWriter, spool_salt, write_state
from .store import FIRST_STAGE_NAME, MAGIC, META_NAME, TEXTS_NAME, VERSION, Segment, store_salt
from .texts import TextReader, TextWriter

CHECKPOINT_S = 5.0
PROJECTION = "projection.f32"
_PCA_DOCUMENTS = 4096
_NPROBE_CANDIDATES, _NPROBE_RECALL = 1000, 0.98

#: Called with (phase, done, total or None): ``spool``, ``arrange``, ``write``.
Progress = Callable[[str, int, int | None], None]


@dataclass(frozen=True)
class BuildOptions:
    """How a store is built.

    Attributes:
        format: of the vectors in the records: ``fp16`` or ``fp32``.
        first_stage: code of the IVF lists: ``flat``, ``sq8`` or ``pqM``.
        nlist: number of lists; None chooses from the number of documents.
        pca: dimensions to project token vectors to; None keeps them.
        cls_weight: weight of the CLS similarity in the score, beside MaxSim.
        memory: what the process may use, as bytes or ``1GiB``.
        directories: where data segments go, one per SSD; empty keeps them in the store's directory.
    """

    format: str = "fp16"
    first_stage: str = "sq8"
    nlist: int | None = None
    pca: int | None = None
    cls_weight: float = 1.0
    memory: int | str = "1GiB"
    directories: Sequence[str] = ()

    def __post_init__(self) -> None:
        code = self.first_stage
        if code not in CODES and not (code.startswith("pq") and code[2:].isdigit()):
            raise errors.InvalidInputError("first-stage code", got=repr(code), expected="flat, sq8 or pqM")
        if self.nlist is not None and self.nlist < 1:
            raise errors.InvalidInputError("nlist", got=self.nlist, expected="at least 1")
        if isinstance(self.directories, (str, bytes)):
            raise errors.InvalidInputError(
                "directories", got=repr(self.directories), expected="a sequence of them", fix=f"pass [{self.directories!r}]"
            )
        # Absolute from here on: a build may be resumed, and its store opened, from anywhere.
        object.__setattr__(self, "directories", [os.path.abspath(directory) for directory in self.directories])
        if not np.isfinite(self.cls_weight):
            raise errors.InvalidInputError("cls_weight", got=self.cls_weight, expected="a finite number")


@dataclass(frozen=True)
class BuildReport:
    """What a build did. Sizes in bytes, times in seconds."""

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


class Builder:
    """One build, from lock to publication. Use `build`."""

    def __init__(
        self, path: str, encoder: Encoder | None, options: BuildOptions, engine: NativeEngine, dims: tuple[int, int], progress: Progress
    ):
        self.path, self.encoder, self.options, self.engine, self.progress = path, encoder, options, engine, progress
        self.spool_schema = RecordSchema(options.format, *dims)
        self.schema = RecordSchema(options.format, dims[0], dims[1] if options.pca is None else options.pca)
        if self.schema.dim > self.spool_schema.dim:
            raise errors.InvalidInputError("dimensions to project to", got=self.schema.dim, expected=f"at most {self.spool_schema.dim}")
        self.budget = MemoryBudget(options.memory)
        self.building = os.path.join(path, generations.BUILDING)
        self.state: dict[str, Any] = {}

    # What must be the same for an interrupted build to go on.
    def _settings(self) -> dict[str, Any]:
        options = asdict(self.options)
        del options["memory"]
        name = self.encoder.name if self.encoder else None
        return {"encoder": name, "d_cls": self.spool_schema.d_cls, "dim": self.spool_schema.dim, **options}

    def run(self, documents: Iterable[Any], restart: bool, replace: bool) -> BuildReport:
        published = generations.published(self.engine, self.path, replace)
        self.state, resumed = generations.begin(self.engine, self.path, self._settings(), published, restart)
        begun = time.perf_counter()
        if self.state["phase"] == "spool":
            self._spool(documents)
        spooled = time.perf_counter()
        spool = Spool(self.engine, self.building, self.spool_schema, self.state)
        try:
            self._check_disk(spool)
            self._arrange(spool)
            arranged = time.perf_counter()
            writer = self._write(spool)
        finally:
            spool.close()
        self._publish(writer, published)
        written = time.perf_counter()
        meta = writer.metadata()
        return BuildReport(
            path=self.path,
            documents=writer.count,
            tokens=int(meta["n_tokens"].sum(dtype=np.int64)),
            generation=self.state["generation"],
            resumed_documents=resumed,
            record_bytes=sum(segment.size_bytes for segment in writer.segments),
            resident_bytes_per_document=sum(array.nbytes for array in meta.values()) / max(writer.count, 1),
            nlist=self.state["nlist"],
            nprobe=self.state["nprobe"],
            spool_s=spooled - begun,
            arrange_s=arranged - spooled,
            write_s=written - arranged,
        )

    def _spool(self, documents: Iterable[Any]) -> None:
        limit_bytes = self.budget.left() // 12
        total = len(documents) if isinstance(documents, Sized) else None
        kept = self.state["documents"]
        spool = SpoolWriter(self.engine, self.building, self.spool_schema, self.state)
        try:
            seen, last = 0, time.monotonic()
            for batch in batches(documents, kept, 256, limit_bytes, self.spool_schema.dim):
                if seen < kept:
                    self._compare(spool.texts, batch, seen)
                else:
                    spool.append([d.id for d in batch], [d.text for d in batch], encode(batch, self.encoder))
                seen += len(batch)
                self.budget.trim()
                self.progress("spool", seen, total)
                if time.monotonic() - last > CHECKPOINT_S:
                    spool.checkpoint()
                    last = time.monotonic()
            if seen < kept:
                self._differs(f"{seen} documents", f"at least {kept}")
            spool.checkpoint(phase="arrange")
            spool.close()
        except BaseException:
            spool.abandon()
            raise

    def _compare(self, texts: TextWriter, batch: list[Document], first: int) -> None:
        """A resumed build must see the documents that the interrupted one saw."""
        for document, known in zip(batch, texts.ids(first, len(batch)), strict=True):
            if document.id != known:
                self._differs(repr(document.id), repr(known))

    def _differs(self, got: str, expected: str) -> None:
        raise errors.InvalidInputError(
            "the documents are not those of the interrupted build",
            got=got,
            expected=expected,
            fix="give the same documents, or restart the build (--restart)",
        )

    def _check_disk(self, spool: Spool) -> None:
        """Says now, not in an hour, that the store will not fit."""
        if self.state.get("segments"):
            return
        need = int(self.schema.sizes(spool.n_tokens).sum()) * 21 // 20 + (16 << 20)
        roots = [os.path.join(self.path, root) for root in generations.data_directories(self.path, self.options.directories, self.state)]
        devices = [os.stat(root).st_dev for root in roots]
        for root, device in zip(roots, devices, strict=True):
            free, share = load_native().free_bytes(root), need * devices.count(device) // len(devices)
            if free < share and os.statvfs(root).f_blocks:  # a file system that counts no blocks (ramfs, some network ones) cannot say
                raise errors.DiskFullError("the store's records will not fit", needed_bytes=share, free_bytes=free, path=root)

    def _arrange(self, spool: Spool) -> None:
        if self.state["phase"] != "arrange":
            return
        self.progress("arrange", 0, len(spool))
        index = arrange.train(spool, self.options.first_stage, self.options.nlist, self.budget.left())
        sizes: list[int] = []
        sums: list[int] = []
        nprobe, steps = 0, dict[str, float]()
        if index is not None:
            sums = arrange.assign(self.engine, self.building, spool, index, self.budget.left())
            sizes = [index.invlists.list_size(i) for i in range(index.nlist)]
            nprobe, steps = arrange.measure_probing(index, spool, _NPROBE_CANDIDATES, _NPROBE_RECALL)
            faiss = load_faiss()
            with StreamWriter(self.engine, os.path.join(self.directory, FIRST_STAGE_NAME)) as writer:
                faiss.write_index(index, faiss.PyCallbackIOWriter(writer.write))
                writer.sync()
            self.state["first_stage"] = [writer.size_bytes, writer.crc32c]
        self._save_projection(spool)
        self.progress("arrange", len(spool), len(spool))
        self.state.update(phase="write", list_sums=sums, list_sizes=sizes, nlist=len(sizes), nprobe=nprobe, steps=steps, segments=[])
        write_state(self.engine, self.building, self.state)

    def _save_projection(self, spool: Spool) -> None:
        if self.options.pca is None or not len(spool):
            return
        chosen = np.random.default_rng(2).choice(len(spool), size=min(len(spool), _PCA_DOCUMENTS), replace=False)
        projection = Projection.fit(self._tokens(spool, np.sort(chosen).astype(np.int64)), self.spool_schema.dim, self.schema.dim)
        _, self.state["projection"] = write_file(
            self.engine, os.path.join(self.building, PROJECTION), projection.components.numpy().tobytes()
        )

    def _tokens(self, spool: Spool, chosen: np.ndarray) -> Iterator[torch.Tensor]:
        """Token vectors of some documents, float32 [n, dim] each."""
        schema = self.spool_schema
        limit_bytes = self.budget.left() // 16
        for part in pieces(iter([chosen]), lambda arrivals: schema.sizes(spool.n_tokens[arrivals]), limit_bytes, lambda: len(chosen)):
            memory, positions = spool.read(part)
            for at, n_tokens in zip((positions + schema.fixed_bytes).tolist(), spool.n_tokens[part].tolist(), strict=True):
                values = memory[at : at + n_tokens * schema.row_bytes].view(schema.dtype).astype(np.float32)
                yield torch.from_numpy(values.reshape(-1, schema.dim))

    def _projection(self) -> Projection | None:
        if "projection" not in self.state:
            return None
        path = os.path.join(self.building, PROJECTION)
        data = read_file(self.engine, path)
        if crc32c(data) != self.state["projection"]:
            raise errors.ChecksumError("the build's projection is damaged", path=path, fix=DISCARD)
        values = np.frombuffer(bytearray(data), dtype=np.float32)
        return Projection(torch.from_numpy(values.reshape(self.spool_schema.dim, self.schema.dim)))

    @property
    def directory(self) -> str:
        return os.path.join(self.path, generations.name(self.state["generation"]))

    def _segment_bytes(self, total_bytes: int) -> int:
        """One file per GiB on one SSD; on several, enough files that they share the load."""
        devices = len(self.options.directories)
        return 1 << 30 if devices <= 1 else int(np.clip(total_bytes // (8 * devices), 16 << 20, 1 << 30))

    def _write(self, spool: Spool) -> SegmentWriter:
        directories = generations.data_directories(self.path, self.options.directories, self.state)
        total_bytes = int(self.schema.sizes(spool.n_tokens).sum())
        done = [Segment(**segment) for segment in self.state["segments"]]
        writer = SegmentWriter(
            self.engine,
            self.path,
            directories,
            self.schema,
            self.state["store_id"],
            self.state["generation"],
            self._segment_bytes(total_bytes),
            done,
        )
        work_bytes = self.budget.left()
        projection = self._projection()
        salt = store_salt(self.state["store_id"], self.state["generation"])
        target = TextWriter(os.path.join(self.directory, TEXTS_NAME), salt, keep=sum(segment.records for segment in done))
        source = TextReader(os.path.join(self.building, TEXTS_NAME), spool_salt(self.state))
        try:
            list_sizes = np.array(self.state["list_sizes"], dtype=np.int64)
            order = arrange.record_order(self.engine, self.building, self.state["list_sums"], list_sizes, max(65536, work_bytes // 4 // 32))
            limit_bytes = min(32 << 20, max(1 << 20, work_bytes // 8))
            self._skip_and_write(
                spool,
                writer,
                pieces(order, lambda a: self.spool_schema.sizes(spool.n_tokens[a]), limit_bytes, writer.room),
                source,
                target,
                projection,
            )
            writer.finish_segment()
            target.commit()
        except BaseException:
            writer.abandon()
            raise
        finally:
            target.close()
            source.close()
        return writer

    def _skip_and_write(
        self,
        spool: Spool,
        writer: SegmentWriter,
        runs: Iterable[np.ndarray],
        source: TextReader,
        target: TextWriter,
        projection: Projection | None,
    ) -> None:
        again = [(segment.records, 4096) for segment in writer.segments]  # finished by an interrupted build
        left, free_at = again.pop(0) if again else (0, 0)
        for run in runs:
            while left and len(run):
                part, run = run[:left], run[left:]
                free_at = writer.count_again(spool.n_tokens[part], free_at)
                left -= len(part)
                if not left and again:
                    left, free_at = again.pop(0)
            if not len(run):
                continue
            copy_texts(source, target, run, writer.count)
            writer.append(spool.n_tokens[run], copier(spool, self.schema, run, projection))
            self.progress("write", writer.count, len(spool))
            if writer.full():
                writer.finish_segment()
                target.commit()
                self.state["segments"] = writer.state()
                write_state(self.engine, self.building, self.state)

    def _publish(self, writer: SegmentWriter, published: dict[str, Any] | None) -> None:
        meta = writer.metadata()
        projection = self._projection()
        if projection is not None:
            meta["projection"] = projection.components.numpy()
        sizes = {META_NAME: write_file(self.engine, os.path.join(self.directory, META_NAME), save_safetensors(meta))}
        if "first_stage" in self.state:
            sizes[FIRST_STAGE_NAME] = self.state["first_stage"]
        texts = os.path.join(self.directory, TEXTS_NAME)
        whole, parts = file_sums(self.engine, texts)
        for _ in read_windows(self.engine, texts, sums=parts):
            pass  # SQLite wrote it, so nothing else is known of it: what two reads agree on is what is there
        sizes[TEXTS_NAME] = (os.path.getsize(texts), whole)
        self.engine.sync_directory(self.directory)
        self.engine.sync_directory(self.path)
        for directory in self.options.directories:
            self.engine.sync_directory(directory)
        contents = {
            "store_id": self.state["store_id"],
            "generation": self.state["generation"],
            "directory": generations.name(self.state["generation"]),
            "records": {
                "count": writer.count,
                "format": self.schema.format,
                "d_cls": self.schema.d_cls,
                "dim": self.schema.dim,
                "tokens": int(meta["n_tokens"].sum(dtype=np.int64)),
            },
            "encoder": {
                "name": self.encoder.name if self.encoder else None,
                "d_cls": self.spool_schema.d_cls,
                "dim": self.spool_schema.dim,
            },
            "first_stage": {
                "kind": "ivf",
                "code": self.options.first_stage,
                "nlist": self.state["nlist"],
                "nprobe": self.state["nprobe"],
                "steps": self.state["steps"],
            },
            "cls_weight": self.options.cls_weight,
            "segments": writer.state(),
            "files": {name: {"size_bytes": size, "crc32c": crc} for name, (size, crc) in sizes.items()},
        }
        write_manifest(self.engine, self.path, MAGIC, VERSION, contents)
        shutil.rmtree(self.building, ignore_errors=True)
        if published is not None:
            generations.remove(self.path, published)


def _options(given: dict[str, Any]) -> BuildOptions:
    known = [field.name for field in fields(BuildOptions)]
    for name in given:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            raise errors.InvalidInputError(
                f"unknown build option {name!r}", expected=", ".join(known), fix=f"did you mean {near[0]}?" if near else None
            )
    return BuildOptions(**given)


def build(
    path: str | os.PathLike[str],
    documents: Iterable[Any],
    encoder: Encoder | None = None,
    *,
    dims: tuple[int, int] | None = None,
    engine: NativeEngine | None = None,
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
        restart: discards an interrupted build instead of going on with it.
        replace: publishes over the store that is there. It stays readable until the new one is complete.
        progress: called often, from this thread.
        **options: fields of `BuildOptions`: format, first_stage, nlist, pca, cls_weight, memory, directories.

    Raises:
        InvalidInputError: documents, vectors or options that do not fit; a store is there and `replace` is not set.
        StoreBusyError: another process is building here.
        DiskFullError, WriteError, ReadError, ...: what was spooled is kept; the same call resumes.
    """
    if dims is None:
        if encoder is None:
            raise errors.InvalidInputError("build needs an encoder, or dims=(d_cls, dim) and documents with vectors")
        dims = (encoder.d_cls, encoder.dim)
    chosen = _options(options)
    where = os.fspath(path)
    make_directory(where)
    owned = NativeEngine(pool_bytes=64 << 20) if engine is None else engine
    try:
        with DirectoryLock(where):
            return Builder(where, encoder, chosen, owned, dims, progress).run(documents, restart, replace)
    finally:
        if engine is None:
            owned.close()
