"""`Index`: a store with its first stage, ready to search. What happens in a search stands in wave.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from types import TracebackType
from typing import Any, Unpack, overload
from weakref import WeakSet

import torch

from .. import errors
from ..checks import check_path, check_whole, plain
from ..sizes import parse_size
from ..storage import Engine, NativeEngine, open_engine
from ..storage.manifest import read_manifest
from .cost import DeviceCost
from .documents import check_count
from .encoder import Encoded, Encoder
from .evaluate import DEFAULT_METRICS, Qrels, check_judged, evaluate
from .first_stage import IvfFirstStage
from .hot import HotDocuments
from .lookup import alive_numbers, texts_of
from .request import SearchOptions, check_arguments
from .resident import ResidentTier
from .result import SearchResult
from .searchable import Places, Searchable
from .store import MAGIC, VERSION, EmbeddingStore
from .texts import DocumentId, document_id, document_ids
from .tier import Tier
from .turns import Turns
from .waves import Waves

Query = str | Encoded
Queries = list[str] | list[Encoded] | list[Query] | tuple[Query, ...]

#: Searches under way at a time; further callers wait. More would only share the same cores and disk in smaller pieces.
_SEARCHES_PER_CORE = 2
_RERANK_THREADS = 32  # they wait for the disk most of the time
_THREADS_MAX = 1024
_GDS_PATHS = ("gds", "gds-compat")


class Index:
    """A store with its first stage, ready to search. Safe to use from several threads. A context manager.

    It stays with the version of the store that was there when it was opened, whatever is added, deleted or compacted meanwhile, until
    `reload` is called. ``len(index)``, ``identifier in index`` and iteration (over ids) are of that version's documents.

    Args:
        path: the store's directory.
        encoder: for queries given as text; must be the one the store was built with.
        engine: path of the record reads (``auto``, ``uring``, ``posix``, ``memory``; ``gds`` or ``gds-compat`` with a CUDA device), or an
            engine, which stays the caller's.
        device: where records are scored: ``cpu``, ``cuda`` (the thread's current GPU, once for all), or ``cuda:1``.
        threads: that scan the first stage's lists for one search; None for as many as there are cores, at most 4.
        first_stage: where the lists are scanned: ``cpu``, or ``cuda`` where faiss-gpu is installed (at most 2,032 candidates), then on
            the GPU of `device`.
        hot: RAM for documents that many queries want, in bytes or as ``256MiB``; 0 keeps none.
        compact: where the compact tier of a cascade is read from: ``ssd``, or ``ram`` (loaded whole, now).
        cost: of the device's reads; None measures it (tens of milliseconds; small stores get the defaults).

    Raises:
        what `EmbeddingStore` raises; InvalidInputError for another encoder or a bad option; PathUnavailableError.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        encoder: Encoder | None = None,
        *,
        engine: str | Engine = "auto",
        device: str | torch.device = "cpu",
        threads: int | None = None,
        first_stage: str = "cpu",
        hot: int | str = 0,
        compact: str = "ssd",
        cost: DeviceCost | None = None,
    ):
        self._path = check_path("path of a store", path)
        self.device = _device(device)
        for name, value, known in (("compact", compact, ("ssd", "ram")), ("first_stage", first_stage, ("cpu", "cuda"))):
            if value not in known:
                raise errors.InvalidInputError(name, got=repr(value), expected=" or ".join(known))
        threads, hot = plain(threads), plain(hot)
        if threads is not None:
            check_whole("threads", threads, 1, _THREADS_MAX)
        if not isinstance(hot, str):
            check_whole("hot", hot, 0)
        if cost is not None and not isinstance(cost, DeviceCost):
            raise errors.InvalidInputError("cost", got=repr(cost), expected="a DeviceCost or None")
        self._places = Places(self.device, threads or min(4, len(os.sched_getaffinity(0))), first_stage, parse_size(hot), compact, cost)
        self._closed = False
        self._changing, self._swapping = threading.Lock(), threading.Lock()  # of versions: one change at a time; which one is current
        self._turns = Turns(_SEARCHES_PER_CORE * len(os.sched_getaffinity(0)))
        self._retired: WeakSet[Searchable] = WeakSet()
        self.encoder: Encoder | None = None
        with ExitStack() as opened:
            self._native, self._records = self._open_engines(engine, opened)
            self._workers = ThreadPoolExecutor(max_workers=_RERANK_THREADS, thread_name_prefix="espnx-rerank")
            opened.callback(self._workers.shutdown, wait=True)
            self._newest = self._open_version()
            opened.callback(lambda: self._newest.close())  # the newest by then  # noqa: PLW0108
            if encoder is not None:
                self.use_encoder(encoder)
            self._opened = opened.pop_all()

    def _open_engines(self, engine: str | Engine, opened: ExitStack) -> tuple[NativeEngine, Engine]:
        records = engine
        if isinstance(records, str):
            on_gpu = {"device": self.device} if records in _GDS_PATHS and self.device.type == "cuda" else {}
            records = opened.enter_context(open_engine(records, **on_gpu))
        if isinstance(records, NativeEngine):
            return records, records
        # Reads into GPU memory; manifest, metadata and first stage are read into host memory all the same.
        if self.device.type == "cpu":
            raise errors.InvalidInputError("records would lie in GPU memory", got="device='cpu'", fix="open the index with device='cuda'")
        return opened.enter_context(NativeEngine()), records

    def _open_version(self) -> Searchable:
        return Searchable(self._path, self._native, self._records, self._places, self._workers)

    def use_encoder(self, encoder: Encoder) -> None:
        """Encodes queries given as text with it. Raises InvalidInputError unless the store was built with the same (or with none)."""
        self._newest.check_encoder(encoder)
        self.encoder = encoder

    def reload(self) -> bool:
        """Goes over to the newest version of the store; returns whether there was one.

        Searches under way end on the version they began with, later ones see the new one, and no search sees both or neither. Both are
        in memory until the last search of the old one has ended; hot documents begin anew.

        Raises:
            what opening raises, InvalidInputError where the store was built anew with another encoder: the index stays as it is.
        """
        with self._changing:
            self._check_open()
            newest, live = read_manifest(self._native, self._path, MAGIC, VERSION), self.store.manifest
            if all(newest[key] == live[key] for key in ("store_id", "generation")):
                return False
            version = self._open_version()
            try:
                if self.encoder is not None:
                    version.check_encoder(self.encoder)
            except BaseException:
                version.close()
                raise
            with self._swapping:
                old, self._newest = self._newest, version
            self._retired.add(old)
            old.retire()
            return True

    @contextmanager
    def _current(self) -> Iterator[Searchable]:
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
    def first_stage(self) -> IvfFirstStage:
        return self._newest.first_stage

    @property
    def hot(self) -> HotDocuments | None:
        return self._newest.hot

    @property
    def compact(self) -> Tier | ResidentTier | None:
        """The compact tier, wherever it is."""
        return self._newest.compact

    @property
    def cost(self) -> DeviceCost:
        """Of the device's reads."""
        return self._newest.cost

    @property
    def engine(self) -> Engine:
        """The engine of the record reads."""
        return self._records

    @property
    def default_nprobe(self) -> int:
        """The number of lists that found 98 % of the exhaustive candidates when the store was built."""
        return self._newest.default_nprobe

    @property
    def resident_bytes(self) -> dict[str, int]:
        """What is held in RAM, by part: metadata of the store, compact tier, hot documents. The first stage's index is FAISS's own."""
        return self._newest.resident_bytes

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
                with self._turns:
                    self._check_open()
                    rows = version.store.texts.get(numbers.tolist())
                yield from (identifier for identifier, _ in rows)

    def __iter__(self) -> Iterator[DocumentId]:
        return self.ids()

    @contextmanager
    def _reading(self) -> Iterator[Searchable]:
        """The newest version, while it is our turn."""
        with self._turns, self._current() as version:
            self._check_open()
            yield version

    @overload
    def search(self, queries: Query, k: int = ..., **options: Unpack[SearchOptions]) -> SearchResult: ...
    @overload
    def search(self, queries: Queries, k: int = ..., **options: Unpack[SearchOptions]) -> list[SearchResult]: ...
    @overload
    def search(self, queries: Mapping[Any, Query], k: int = ..., **options: Unpack[SearchOptions]) -> dict[Any, SearchResult]: ...

    def search(
        self,
        queries: Query | Queries | Mapping[Any, Query],
        k: int = 10,
        *,
        candidates: int = 1000,
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
            candidates: how many the first stage hands on; at least k are.
            rerank: how many of them are read and scored exactly, the best first; None for all. The others follow in first-stage order.
            cascade: score the compact records of all candidates, then so many full ones exactly; the others follow in compact order.
                Needs a store built with a compact tier. Lossy as `rerank` is, and much less so.
            nprobe: lists the first stage scans, or ``auto`` (measured at build: 98 % of the exhaustive candidates). Lists without a
                document that may be found do not count. With ``auto``, and beside a filter or deleted documents, as many more are
                scanned as it takes to find `candidates`, or all there are; with a number, as it takes to find k.
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
        arguments = check_arguments(k, candidates, rerank, cascade, nprobe, prefetch_step, deadline_s)
        is_one = isinstance(queries, (str, Encoded))
        if not is_one and not isinstance(queries, Iterable):
            raise errors.InvalidInputError("a query", got=type(queries).__name__, expected="a str or an Encoded, or a list of them")
        if isinstance(queries, Mapping):
            wanted: Sequence[Query] = list(queries.values())
        else:
            wanted = [queries] if isinstance(queries, (str, Encoded)) else list(queries)
        begun = time.perf_counter()
        encoded = self._encode(wanted)
        encode_s = (time.perf_counter() - begun) / max(1, len(wanted))
        with self._turns as is_alone, self._current() as version:
            self._check_open()  # it may have been closed before our turn came
            if arguments.is_cascade:
                version.compact_tier("cascade")
            weight = version.cls_weight(plain(cls_weight))
            vectors = [version.query(query, weight) for query in encoded]
            waves = Waves(version, self._turns, is_alone, arguments, version.filters.allowed(include, exclude), explain)
            results = list(waves.search(vectors, encode_s))
        if isinstance(queries, Mapping):
            return dict(zip(queries, results, strict=True))
        return results[0] if is_one else results

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the index is closed", fix="open it again")

    def _encode(self, queries: Sequence[Query]) -> list[Encoded]:
        for query in queries:
            if not isinstance(query, (str, Encoded)):
                raise errors.InvalidInputError("a query", got=type(query).__name__, expected="a str or an Encoded")
        texts = [query for query in queries if isinstance(query, str)]
        if texts and self.encoder is None:
            raise errors.InvalidInputError(
                "a query is text, and the index has no encoder", fix="open the index with encoder=..., or pass vectors"
            )
        made = list(self.encoder.encode_queries(texts)) if texts and self.encoder else []
        check_count(self.encoder, len(texts), len(made))
        vectors = iter(made)
        return [query if isinstance(query, Encoded) else next(vectors) for query in queries]

    def evaluate(
        self, queries: Mapping[Any, Query], qrels: Qrels, metrics: Sequence[str] = DEFAULT_METRICS, **options: Any
    ) -> dict[str, float]:
        """Searches for every judged query and computes `metrics` (see `evaluate.evaluate`). `options`: of `search`; k is what they need.

        Raises what `search` and `evaluate` raise.
        """
        if "k" in options:
            raise errors.InvalidInputError("evaluate: k", got=options["k"], expected="no k", fix="name it in the metrics: nDCG@5")
        k = max((int(metric.rpartition("@")[2]) for metric in metrics if metric.rpartition("@")[2].isdigit()), default=10)
        check_judged(queries, qrels)
        judged = [query for query in queries if query in qrels]
        self._check_known({document for query in judged for document in qrels[query]})
        results = self.search({query: queries[query] for query in judged}, k=k, **options)
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
        """Searches under way are finished first; later ones raise EngineClosedError."""
        self._closed = True
        with self._changing, self._turns.none():
            for version in list(self._retired):
                version.close()  # somebody is still listing its ids
            self._opened.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _device(name: str | torch.device) -> torch.device:
    """With the number of the GPU: `cuda` alone means another one in every thread."""
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise errors.InvalidInputError("device", got=repr(name), expected="cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise errors.PathUnavailableError("no CUDA device here", got=str(name), fix="use device='cpu'")
    return torch.device("cuda", torch.cuda.current_device() if device.index is None else device.index)
