"""`Index`: a store with its first stage, ready to search. What happens in a search stands in batch.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack, overload
from weakref import WeakSet

import torch

from ... import errors
from ...checks import check_path, check_whole, plain
from ...device.around import topologies_of
from ...device.interface import RecordDevice
from ...device.near_storage import NearStorageDevice
from ...device.registry import Devices, open_records
from ...forks import check_own
from ...sizes import format_size, parse_size
from ...storage import Engine, NativeEngine, open_engine
from ...storage.documents.ids import DocumentId, document_id, document_ids
from ...storage.native import host_engine
from ...suggestions import suggests_keywords
from ...tables import render_table
from ..encoder import AUTO, Encoded, Encoder, EncoderLike, check_count, check_same_encoder, encoder_of, remembered_encoder
from ..evaluate import DEFAULT_METRICS, Qrels, check_judged, depth_of, evaluate
from ..first_stage.interface import LoadedStage
from ..sparse_encoder import SparseEncoderLike, sparse_encoder_of
from ..store.manifest import data_directories, read_store_manifest
from ..store.store import EmbeddingStore
from ..store.tier import Tier
from .batch import search_in_batches
from .gate import SearchGate
from .hot_records import HotRecords
from .lookup import alive_numbers, texts_of
from .open_version import OpenOptions, OpenVersion
from .options import SearchKeywords, SearchOptions
from .ram_tier import RamTier
from .read_cost import DeviceCost
from .result import SearchResult

Query = str | Encoded
Queries = list[str] | list[Encoded] | list[Query] | tuple[Query, ...]

#: Searches under way at a time; further callers wait. More would only share the same cores and disk in smaller pieces.
_SEARCHES_PER_CORE = 2
_THREADS_MAX = 1024
_GDS_PATHS = ("gds", "gds-compat")


class Index:
    """A store with its first stage, ready to search. Safe to use from several threads. A context manager.

    It stays with the version of the store that was there when it was opened, whatever is added, deleted or compacted meanwhile, until
    `reload` is called. ``len(index)``, ``identifier in index`` and iteration (over ids) are of that version's documents. Its pickle is its
    path and its options: whoever loads it, a worker that was spawned for one, opens the store anew, at the version that is there then.

    Args:
        path: the store's directory.
        encoder: for queries given as text: an encoder, or a description of one as `espnx.load_encoder` takes it; must be the one the store
            was built with. One that is described computes in the dtype that the documents were encoded in; one that was loaded may compute
            in the other. ``auto``: the one that the store remembers, loaded when the first text comes; one out of a folder has to be named,
            as a store does not know where that lies. None: queries are vectors.
        engine: path of the record reads (``auto``, ``uring``, ``posix``, ``memory``; ``gds`` or ``gds-compat`` with a CUDA device), a file
            of settings (``nvme.toml``, see docs/engine.md), or an engine, which stays the caller's.
        compute: where records are scored: ``cpu``, ``cuda`` (the thread's current GPU, once for all), or ``cuda:1``.
        threads: that scan the first stage's lists for one search; None for as many as there are cores, at most 4.
        first_stage_on: where the lists are scanned: ``cpu``, or ``cuda`` where faiss-gpu is installed (at most 2,032 candidates), then on
            that GPU.
        hot: RAM for documents that many queries want, in bytes or as ``256MiB``; 0 keeps none.
        coarse: where the coarse tier of a cascade is read from: ``ssd``, or ``ram`` (loaded whole, now).
        cost: of the device's reads; None measures it (tens of milliseconds; small stores get the defaults).
        device: what keeps and scores the records: a name (`espnx.device.names`); an open device, or several, in whose directories the data
            files lie, or a `RecordDevice`, which stay the caller's. None: the plain SSD, read by `engine` and scored on `compute`.
        sparse_encoder: of queries for a first stage of ``splade``, or a description of it; must be the one that the store was built with.
            None: the one that the store remembers, loaded when it is wanted (one out of a folder has to be named).

    Raises:
        InvalidInputError: another encoder than the store's, or an option that is out of range.
        PathUnavailableError: the engine that was named cannot be had here.
        StoreNotFoundError, FormatError, ForeignFileError, TruncatedFileError, ChecksumError: nothing damaged is opened.
    """

    @suggests_keywords
    def __init__(
        self,
        path: str | os.PathLike[str],
        encoder: EncoderLike | None = AUTO,
        *,
        engine: str | os.PathLike[str] | Engine = "auto",
        compute: str | torch.device = "cpu",
        threads: int | None = None,
        first_stage_on: str = "cpu",
        hot: int | str = 0,
        coarse: str = "ssd",
        cost: DeviceCost | None = None,
        device: RecordDevice | Devices | None = None,
        sparse_encoder: SparseEncoderLike | None = None,
    ):
        self._path = check_path("path of a store", path)
        self._given = {
            "encoder": encoder, "engine": engine, "compute": compute, "threads": threads, "first_stage_on": first_stage_on, "hot": hot,
            "coarse": coarse, "cost": cost, "device": device, "sparse_encoder": sparse_encoder,
        }  # fmt: skip
        self.compute = _device(compute)
        if device is not None and not isinstance(device, (str, NearStorageDevice, Sequence)):
            _check_has("device", device, ("compute", "keep_records", "path_report"))
            self.compute = device.compute
        for name, value, known in (("coarse", coarse, ("ssd", "ram")), ("first_stage_on", first_stage_on, ("cpu", "cuda"))):
            if value not in known:
                raise errors.InvalidInputError(name, got=repr(value), expected=" or ".join(known))
        threads, hot = plain(threads), plain(hot)
        if threads is not None:
            check_whole("threads", threads, 1, _THREADS_MAX)
        if not isinstance(hot, str):
            check_whole("hot", hot, 0)
        if cost is not None and not isinstance(cost, DeviceCost):
            raise errors.InvalidInputError("cost", got=repr(cost), expected="a DeviceCost or None")
        self._options = OpenOptions(
            self.compute,
            threads or min(4, len(os.sched_getaffinity(0))),
            first_stage_on,
            parse_size(hot),
            coarse,
            cost,
            sparse_encoder_of(sparse_encoder),
        )
        self._closed, self._process = False, os.getpid()
        self._changing, self._swapping = threading.Lock(), threading.Lock()  # of versions: one change at a time; which one is current
        self._gate = SearchGate(_SEARCHES_PER_CORE * len(os.sched_getaffinity(0)))
        self._retired: WeakSet[OpenVersion] = WeakSet()
        self._remembers = isinstance(encoder, str) and encoder == AUTO
        self._encoder: Encoder | None = None
        with ExitStack() as opened:
            self._native, self._device = self._open_device(engine, device, opened)
            self._topologies = topologies_of(self._device)
            self._newest = self._open_version()
            opened.callback(lambda: self._newest.close())  # the newest by then  # noqa: PLW0108
            if encoder is not None and not self._remembers:
                self.use_encoder(encoder)
            self._opened = opened.pop_all()

    def _open_device(
        self, engine: str | os.PathLike[str] | Engine, device: RecordDevice | Devices | None, opened: ExitStack
    ) -> tuple[NativeEngine, RecordDevice]:
        """(what reads all but records, what keeps and scores those)."""
        if isinstance(engine, (str, os.PathLike)):
            engine = os.fspath(engine)
            on_gpu = {"device": self.compute} if engine in _GDS_PATHS and self.compute.type == "cuda" else {}
            engine = opened.enter_context(open_engine(engine, **on_gpu))
        _check_has("engine", engine, ("open", "read", "stats"))
        # Of an engine that reads into GPU memory: manifest, metadata and first stage are read into host memory all the same.
        native = host_engine(engine) or opened.enter_context(NativeEngine())
        if device is None or isinstance(device, (str, NearStorageDevice, Sequence)):
            directories = data_directories(self._path) if isinstance(device, str) else ()
            device, close = open_records(engine, self.compute, device, directories)
            opened.callback(close)
        return native, device

    def _open_version(self) -> OpenVersion:
        return OpenVersion(self._path, self._native, self._device, self._options)

    @property
    def encoder(self) -> Encoder | None:
        """Of queries given as text; None: there is none.

        Raises what `espnx.load_encoder` raises, where it is the one that the store remembers and was not wanted before.
        """
        if self._encoder is None and self._remembers:
            with self._changing:  # once for all threads, and not while another version comes
                if self._encoder is None:
                    self._encoder = remembered_encoder(self.store.manifest.encoder.name, str(self.compute))
        return self._encoder

    def use_encoder(self, encoder: EncoderLike) -> None:
        """Encodes queries given as text with it. Raises InvalidInputError unless the store was built with the same (or with none)."""
        found = encoder_of(encoder, str(self.compute), built_with=self.store.manifest.encoder.name)
        if found is None:
            raise errors.InvalidInputError("encoder", got="None", expected="an encoder, or a description of one")
        self._newest.check_encoder(found)
        self._encoder, self._given["encoder"] = found, encoder

    def reload(self) -> bool:
        """Goes over to the newest version of the store; returns whether there was one.

        Searches under way end on the version they began with, later ones see the new one, and no search sees both or neither. Both are
        in memory until the last search of the old one has ended; hot documents begin anew.

        Raises:
            what opening raises, InvalidInputError where the store was built anew with another encoder: the index stays as it is.
        """
        with self._changing:
            self._check_open()
            newest, live = read_store_manifest(self._native, self._path), self.store.manifest
            if (newest.store_id, newest.generation) == (live.store_id, live.generation):
                return False
            version = self._open_version()
            try:
                built_with = version.store.manifest.encoder.name
                if self._encoder is not None and built_with != live.encoder.name:  # nobody chose it for these documents, nor its dtype
                    check_same_encoder(self._encoder, built_with)
            except BaseException:
                version.close()
                raise
            with self._swapping:
                old, self._newest = self._newest, version
            self._retired.add(old)
            old.retire()
            return True

    @contextmanager
    def _current(self) -> Iterator[OpenVersion]:
        """The newest version, which stays open meanwhile."""
        with self._swapping:
            version = self._newest
            version.hold()
        try:
            yield version
        finally:
            version.let_go()

    @property
    def store(self) -> EmbeddingStore:
        return self._newest.store

    @property
    def first_stage(self) -> LoadedStage:
        return self._newest.first_stage

    @property
    def hot(self) -> HotRecords | None:
        return self._newest.hot

    @property
    def coarse(self) -> Tier | RamTier | None:
        """The coarse tier, wherever it is."""
        return self._newest.ram_tier or self.store.coarse

    @property
    def cost(self) -> DeviceCost:
        """Of the device's reads."""
        return self._newest.cost

    @property
    def device(self) -> RecordDevice:
        """What keeps and scores the records."""
        return self._device

    @property
    def default_nprobe(self) -> int:
        """The number of lists that found 98 % of the exhaustive candidates when the store was built."""
        return self._newest.default_nprobe

    @property
    def resident_bytes(self) -> dict[str, int]:
        """What is held in RAM, by part: metadata of the store, coarse tier, hot documents. The first stage's index is FAISS's own."""
        return self._newest.resident_bytes

    def __reduce__(self) -> tuple[object, ...]:
        self._check_open()
        for name, value in self._given.items():
            if not isinstance(value, (str, int, os.PathLike, torch.device, DeviceCost, type(None))):
                fix = "name it instead, or open the index in each process: espnx.open(path)"
                raise errors.InvalidInputError(
                    f"a pickled index; its {name}", got=type(value).__name__, expected="a name or a path", fix=fix
                )
        return _reopened, (os.path.abspath(self._path), self._given)

    def __repr__(self) -> str:
        state = "closed" if self._closed else f"{len(self):,} documents, generation {self.store.manifest.generation}"
        return f"<Index {self._path!r}: {state}>"

    def summary(self) -> str:
        """What the store holds, its sizes on disk and in memory, and how it is searched here: a table of several lines."""
        self._check_open()
        with self._current() as version:
            held = {name: size for name, size in version.resident_bytes.items() if name != "metadata" and size}
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
        """The text of a document, or of several (a list, in their order); None for an id that the store does not hold.

        Raises InvalidInputError for what can be no id, and what reading texts raises.
        """
        is_one = isinstance(ids, (str, int)) or getattr(ids, "ndim", None) == 0
        wanted = [document_id(ids)] if is_one else document_ids(ids)
        with self._reading() as version:
            texts = texts_of(version.store, wanted)
        return texts[0] if is_one else texts

    def ids(self) -> Iterator[DocumentId]:
        """The ids of all documents, in the order of records: those of the version that is current when it begins, to the end."""
        with self._current() as version:
            for numbers in alive_numbers(version.store):
                with self._gate:
                    self._check_open()
                    rows = version.store.texts.get(numbers.tolist())
                yield from (identifier for identifier, _ in rows)

    def __iter__(self) -> Iterator[DocumentId]:
        return self.ids()

    @contextmanager
    def _reading(self) -> Iterator[OpenVersion]:
        """The newest version, while it is our turn."""
        with self._gate, self._current() as version:
            self._check_open()
            yield version

    @overload
    def search(self, queries: Query, k: int = ..., **options: Unpack[SearchKeywords]) -> SearchResult: ...
    @overload
    def search(self, queries: Queries, k: int = ..., **options: Unpack[SearchKeywords]) -> list[SearchResult]: ...
    @overload
    def search(self, queries: Mapping[Any, Query], k: int = ..., **options: Unpack[SearchKeywords]) -> dict[Any, SearchResult]: ...

    @suggests_keywords
    def search(
        self,
        queries: Query | Queries | Mapping[Any, Query],
        k: int = 10,
        *,
        candidates: int | None = None,
        first_stage: str | Sequence[str] | None = None,
        fuse: str = "rrf",
        rerank: int | None = None,
        cascade: int | None = None,
        nprobe: int | str = "auto",
        prefetch_step: float | Sequence[float] | str = "auto",
        cls_weight: float | None = None,
        include: Iterable[DocumentId] | None = None,
        exclude: Iterable[DocumentId] | None = None,
        explain: bool = False,
        deadline_s: float = 30.0,
    ) -> SearchResult | list[SearchResult] | dict[Any, SearchResult]:
        """Ranks documents for one query (a `SearchResult`) or several (a list of them, which share reads of documents that several want).

        Args:
            queries: text, or vectors already encoded; or a mapping of names to such, which gives a dict of results under the same names.
                A query without tokens is ranked by its CLS vector, in first-stage order; nothing is read for it.
            k: hits wanted; fewer where the corpus or the candidates are fewer.
            candidates: how many the first stage hands on; at least k are. None: 1,000, and 100 where each costs a read (``graph``).
            first_stage: which of the index's first stages finds them (`build`, `first_stages`), or several, whose rankings are fused: each
                brings so many candidates, and the best of the union are kept. None: the one that was named first at build.
            fuse: ``rrf`` (reciprocal ranks) or ``weighted`` (scaled scores), see `espnx.retrieval.first_stage.fusion`. ``rrf+maxsim``:
                MaxSim's own ranking of the candidates is one more list, and the fused ranks order the hits, those that no more than a first
                stage has found among them.
            rerank: how many of them are read and scored exactly, the best first; None for all. The others follow in first-stage order.
            cascade: score the coarse records of all candidates, then so many full ones exactly; the others follow in coarse order.
                Needs a store built with a coarse tier. Lossy as `rerank` is, and much less so.
            nprobe: effort of the first stage (of the first that is named): lists that an IVF scans, or candidates that a walk over a graph
                keeps (DiskANN's L); or ``auto`` (measured at build: 98 % of the exhaustive candidates). Lists without a document that may
                be found do not count. With ``auto``, and beside a filter or deleted documents, as many more are scanned as it takes to
                find `candidates`, or all there are; with a number, as it takes to find k.
            prefetch_step: share of those lists after which the reads begin (ESPN, eq. 3), or several of them; 0 reads nothing ahead;
                ``auto`` chooses from predicted times, and none for a batch or beside other callers, whose first stages hide the reads.
            cls_weight: overrides the store's.
            include: ids of documents; no other is found.
            exclude: ids of documents that are not found.
            explain: fill in `Hit.matches` (reads the k hits once more).
            deadline_s: for each read.

        Raises:
            InvalidInputError: arguments out of range; vectors of the wrong dimension, NaN or infinite.
            ReadError, ChecksumError, DeadlineExceededError, ...: nothing is ranked on bytes that are not right. The index stays usable.
        """
        self._check_open()
        options = SearchOptions(
            k, candidates, rerank, cascade, nprobe, prefetch_step, cls_weight, include, exclude, explain, deadline_s, first_stage, fuse,
        )  # fmt: skip
        is_one = isinstance(queries, (str, Encoded))
        if not is_one and (not isinstance(queries, Iterable) or isinstance(queries, torch.Tensor) or getattr(queries, "ndim", 0) > 1):
            raise self._no_query(queries, "a str or an Encoded, or a list of them")
        if isinstance(queries, Mapping):
            wanted: Sequence[Query] = list(queries.values())
        else:
            wanted = [queries] if isinstance(queries, (str, Encoded)) else list(queries)
        results = self._search(wanted, options)
        if isinstance(queries, Mapping):
            return dict(zip(queries, results, strict=True))
        return results[0] if is_one else results

    def _search(self, wanted: Sequence[Query], options: SearchOptions) -> list[SearchResult]:
        for query in wanted:
            if not isinstance(query, (str, Encoded)):
                raise self._no_query(query, "a str or an Encoded")
        with self._current() as version:
            begun, stage = time.perf_counter(), version.stage(options)
            encoded = self._encode(wanted) if options.reads_records or stage.loaded.needs_vectors else version.without_vectors(wanted)
            encode_s = (time.perf_counter() - begun) / max(1, len(wanted))
            with self._gate as is_alone:
                self._check_open()  # it may have been closed before our turn came
                if options.is_cascade:
                    version.coarse_tier("cascade")
                weight = version.cls_weight(options.cls_weight)
                texts = [query if isinstance(query, str) else None for query in wanted]
                if options.candidates is None:
                    options = replace(options, candidates=stage.loaded.default_candidates)
                begun = time.perf_counter()
                vectors = [version.query(query, text, weight, stage) for query, text in zip(encoded, texts, strict=True)]
                encode_s += (time.perf_counter() - begun) / max(1, len(wanted))  # a stage of words may have a model of its own
                results = search_in_batches(version, stage, self._gate, vectors, options, encode_s, is_alone=is_alone)
                return _watched(self._topologies, results) if self._topologies else list(results)

    def _no_query(self, given: object, expected: str) -> errors.InvalidInputError:
        """For what is no query; vectors are told how they become one."""
        shape, built = getattr(given, "shape", None), self.store.manifest.encoder
        got = type(given).__name__ + ("" if shape is None else f" of shape {list(shape)}")
        cls = f"of shape [{built.d_cls}]" if built.d_cls else "torch.zeros(0)"
        fix = f"espnx.Encoded(cls=..., tokens=...), cls {cls}, tokens of shape [n, {built.dim}]"
        return errors.InvalidInputError("a query", got=got, expected=expected, fix=None if shape is None else fix)

    def _check_open(self) -> None:
        check_own(self._process, "the index")
        if self._closed:
            raise errors.EngineClosedError("the index is closed", fix="open it again")

    def _encode(self, queries: Sequence[Query]) -> list[Encoded]:
        texts = [query for query in queries if isinstance(query, str)]
        if texts:
            encoder = self.encoder
            if encoder is None:
                raise errors.InvalidInputError(
                    "a query is text, and the index has no encoder",
                    got="a store whose documents brought their vectors" if self._remembers else "encoder=None",
                    fix="open the index with encoder=..., or pass vectors",
                )
            made = list(encoder.encode_queries(texts))
            check_count(encoder, len(texts), len(made))
        else:
            made = []
        vectors = iter(made)
        return [query if isinstance(query, Encoded) else next(vectors) for query in queries]

    def evaluate(
        self,
        queries: Mapping[Any, Query],
        qrels: Qrels,
        metrics: Sequence[str] = DEFAULT_METRICS,
        *,
        candidates: int | None = None,
        first_stage: str | Sequence[str] | None = None,
        fuse: str = "rrf",
        rerank: int | None = None,
        cascade: int | None = None,
        nprobe: int | str = "auto",
        prefetch_step: float | Sequence[float] | str = "auto",
        cls_weight: float | None = None,
        include: Iterable[DocumentId] | None = None,
        exclude: Iterable[DocumentId] | None = None,
        deadline_s: float = 30.0,
    ) -> dict[str, float]:
        """Searches for every judged query and computes `metrics` (see `evaluate.evaluate`), as deep as they need: the k of each is its own.

        Args:
            queries, qrels: texts or vectors, and judgements, by the same names of queries.
            metrics: as of `espnx.evaluate`.
            candidates, first_stage, fuse, rerank, cascade, nprobe, prefetch_step, cls_weight, include, exclude, deadline_s: as of `search`.

        Raises what `search` and `evaluate` raise.
        """
        k = depth_of(metrics)
        check_judged(queries, qrels)
        judged = [query for query in queries if query in qrels]
        self._check_known({document for query in judged for document in qrels[query]})
        results = self.search(
            {query: queries[query] for query in judged}, k, candidates=candidates, first_stage=first_stage, fuse=fuse, rerank=rerank,
            cascade=cascade, nprobe=nprobe, prefetch_step=prefetch_step, cls_weight=cls_weight, include=include, exclude=exclude,
            deadline_s=deadline_s,
        )  # fmt: skip
        rankings = {query: [hit.id for hit in result] for query, result in results.items()}
        return evaluate(rankings, qrels, metrics)

    def _check_known(self, judged: set[Any]) -> None:
        """Raises InvalidInputError where none of the judged documents is in the store: their ids are then of another kind."""
        ids = document_ids(judged, "qrels")
        with self._reading() as version:
            if not ids or (version.store.texts.numbers(ids) >= 0).any():
                return
            stored = version.store.texts.any_id()
        raise errors.InvalidInputError(
            "evaluate: no judged document is in the store",
            got=f"ids such as {ids[0]!r} ({type(ids[0]).__name__})",
            expected="a store with documents" if stored is None else f"ids such as {stored!r} ({type(stored).__name__})",
            fix="give both the same ids, of the same type",
        )

    def close(self) -> None:
        """Searches under way are finished first; later ones raise EngineClosedError. In a child after fork() nothing is done."""
        if os.getpid() != self._process:
            return
        self._closed = True
        with self._changing, self._gate.none():
            for version in list(self._retired):
                version.close()  # somebody is still listing its ids
            self._opened.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _watched(topologies: Sequence[Any], results: Iterator[SearchResult]) -> list[SearchResult]:
    """The same, with what they take emulated devices."""
    from ...device.emulation.use import Watch  # of few programs

    with Watch(topologies, "--show search") as watched:
        found = list(results)
        watched.beside_bytes = sum(each.stage_bytes for each in found)
    return [replace(each, device=watched.use) for each in found]


def _check_has(name: str, given: object, parts: tuple[str, ...]) -> None:
    """Raises InvalidInputError for an object that lacks one of its parts; None is none."""
    if given is not None and not all(hasattr(given, part) for part in parts):
        raise errors.InvalidInputError(name, got=repr(given), expected=f"an object with {', '.join(parts)}")


def _reopened(path: str, given: dict[str, Any]) -> Index:
    """What a pickle of an index is: its arguments."""
    return Index(path, **given)


def _device(name: str | torch.device) -> torch.device:
    """With the number of the GPU: `cuda` alone means another one in every thread."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise errors.InvalidInputError("compute", got=repr(name), expected="cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise errors.PathUnavailableError("no CUDA device here", got=str(name), fix="use compute='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
