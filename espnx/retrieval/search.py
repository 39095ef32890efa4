"""`Index`: a store with its first stage, ready to search. What happens in a search stands in wave.py."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import replace
from types import TracebackType
from typing import Any, Unpack, overload

import numpy as np
import torch

from .. import errors
from ..checks import check_finite, check_whole
from ..sizes import parse_size
from ..storage import Engine, NativeEngine, open_engine
from .advice import NO_PREFETCH, Adviser
from .cost import DeviceCost, measure
from .documents import check_count
from .encoder import Encoded, Encoder
from .evaluate import DEFAULT_METRICS, Qrels, check_judged, evaluate
from .explain import token_matches
from .filters import Filters
from .first_stage import Allowed, IvfFirstStage
from .gpu_first_stage import GpuIvfFirstStage
from .hot import HotDocuments
from .ranking import rank
from .request import Arguments, SearchOptions, check_arguments
from .rerank import QueryVectors
from .resident import ResidentTier
from .result import Hit, SearchResult
from .store import EmbeddingStore
from .texts import DocumentId, document_ids
from .tier import Tier
from .turns import Turns
from .wave import Means, Outcome, Request, Wave

Query = str | Encoded
Queries = list[str] | list[Encoded] | list[Query] | tuple[Query, ...]

#: A wave is cut so that its records, candidates and lists take no more memory than this, and two waves are under way at a time.
_WAVE_BYTES = 48 << 20
#: What the first stage notes of a candidate, or of a list to scan: its number and its similarity.
_FOUND_BYTES = 12
#: A batch of more queries than `_TOGETHER` is cut into at least so many waves: one's first stage runs while another's records arrive.
_WAVES = 2
_TOGETHER = 4
#: Searches under way at a time; further callers wait. More would only share the same cores and disk in smaller pieces.
_SEARCHES_PER_CORE = 2
_RERANK_THREADS = 32  # they wait for the disk most of the time
_THREADS_MAX = 1024


class Index:
    """A store with its first stage, ready to search. Safe to use from several threads. A context manager.

    It stays with the version of the store that was there when it was opened, whatever is added, deleted or compacted meanwhile.

    Args:
        path: the store's directory.
        encoder: for queries given as text; must be the one the store was built with.
        engine: path of the record reads (``auto``, ``uring``, ``posix``, ``memory``; ``gds`` or ``gds-compat`` with a CUDA device), or an
            engine, which stays the caller's.
        device: where records are scored: ``cpu`` or ``cuda``.
        threads: that scan the first stage's lists for one search; None for as many as there are cores, at most 4.
        first_stage: where the lists are scanned: ``cpu``, or ``cuda`` where faiss-gpu is installed (at most 2,032 candidates).
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
        device: str = "cpu",
        threads: int | None = None,
        first_stage: str = "cpu",
        hot: int | str = 0,
        compact: str = "ssd",
        cost: DeviceCost | None = None,
    ):
        self.device = _device(device)
        for name, value, known in (("compact", compact, ("ssd", "ram")), ("first_stage", first_stage, ("cpu", "cuda"))):
            if value not in known:
                raise errors.InvalidInputError(name, got=repr(value), expected=" or ".join(known))
        if threads is not None:
            check_whole("threads", threads, 1, _THREADS_MAX)
        if not isinstance(hot, str):
            check_whole("hot", hot, 0)
        hot_bytes = parse_size(hot)
        if cost is not None and not isinstance(cost, DeviceCost):
            raise errors.InvalidInputError("cost", got=repr(cost), expected="a DeviceCost or None")
        self._closed, self._closing = False, threading.Lock()
        self._turns = Turns(_SEARCHES_PER_CORE * len(os.sched_getaffinity(0)))
        self.encoder: Encoder | None = None
        with ExitStack() as opened:
            native, records = self._open_engines(engine, opened)
            self.store, index = _open_current(path, native, records)
            opened.callback(self.store.close)
            stage = GpuIvfFirstStage if first_stage == "cuda" else IvfFirstStage
            self.first_stage = stage(index, threads or min(4, len(os.sched_getaffinity(0))))
            opened.callback(self.first_stage.close)
            self._filters = Filters(self.store, index)
            self.cost = measure(self.store.full) if cost is None else cost
            self.hot = HotDocuments(self.store.full, hot_bytes) if hot_bytes and self.store.end_number else None
            self.compact: Any = self.store.compact
            if compact == "ram":
                self.compact = ResidentTier(self._compact_tier("compact='ram'"), self.device)
            workers = ThreadPoolExecutor(max_workers=_RERANK_THREADS, thread_name_prefix="espnx-rerank")
            opened.callback(workers.shutdown, wait=True)
            self._means = Means(self.first_stage, self.store.full, self.compact, workers, self.device, self.cost.gap_bytes, self.hot)
            self._adviser = Adviser(self.store.manifest["first_stage"].get("steps", {}))
            if encoder is not None:
                self.use_encoder(encoder)
            self._opened = opened.pop_all()

    def _open_engines(self, engine: str | Engine, opened: ExitStack) -> tuple[NativeEngine, Engine]:
        records = opened.enter_context(open_engine(engine)) if isinstance(engine, str) else engine
        if isinstance(records, NativeEngine):
            return records, records
        # Reads into GPU memory; manifest, metadata and first stage are read into host memory all the same.
        if self.device.type == "cpu":
            raise errors.InvalidInputError("records would lie in GPU memory", got="device='cpu'", fix="open the index with device='cuda'")
        return opened.enter_context(NativeEngine()), records

    def use_encoder(self, encoder: Encoder) -> None:
        """Encodes queries given as text with it. Raises InvalidInputError unless the store was built with the same (or with none)."""
        built = self.store.manifest["encoder"]
        if built["name"] is not None and encoder.name != built["name"]:
            raise errors.InvalidInputError("the store was built with another encoder", got=encoder.name, expected=built["name"])
        self.encoder = encoder

    @property
    def engine(self) -> Engine:
        """The engine of the record reads."""
        return self.store.record_engine

    @property
    def default_nprobe(self) -> int:
        """The number of lists that found 98 % of the exhaustive candidates when the store was built."""
        return max(1, self.store.manifest["first_stage"]["nprobe"])

    @property
    def resident_bytes(self) -> dict[str, int]:
        """What is held in RAM, by part: metadata of the store, compact tier, hot documents. The first stage's index is FAISS's own."""
        compact = self.compact.size_bytes if isinstance(self.compact, ResidentTier) else 0
        return {"metadata": self.store.resident_bytes, "compact": compact, "hot": self.hot.resident_bytes if self.hot else 0}

    @overload
    def search(self, queries: Query, k: int = ..., **options: Unpack[SearchOptions]) -> SearchResult: ...
    @overload
    def search(self, queries: Queries, k: int = ..., **options: Unpack[SearchOptions]) -> list[SearchResult]: ...

    def search(
        self,
        queries: Query | Queries,
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
    ) -> SearchResult | list[SearchResult]:
        """Ranks documents for one query (a `SearchResult`) or several (a list of them, which share reads of documents that several want).

        Args:
            queries: text, or vectors already encoded.
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
        weight = self._cls_weight(cls_weight)
        arguments = check_arguments(k, candidates, rerank, cascade, nprobe, prefetch_step, deadline_s)
        if arguments.is_cascade:
            self._compact_tier("cascade")
        is_one = isinstance(queries, (str, Encoded))
        if not is_one and not isinstance(queries, Iterable):
            raise errors.InvalidInputError("a query", got=type(queries).__name__, expected="a str or an Encoded, or a list of them")
        wanted: Sequence[Query] = [queries] if isinstance(queries, (str, Encoded)) else list(queries)
        begun = time.perf_counter()
        vectors = self._encode(wanted, weight)
        encode_s = (time.perf_counter() - begun) / max(1, len(wanted))
        with self._turns as is_alone:
            self._check_open()  # it may have been closed before our turn came
            allowed = self._filters.allowed(include, exclude)
            results = list(self._search(vectors, arguments, allowed, explain, encode_s, is_alone))
        return results[0] if is_one else results

    def _check_open(self) -> None:
        if self._closed:
            raise errors.EngineClosedError("the index is closed", fix="open it again")

    def _compact_tier(self, what: str) -> Tier:
        if self.store.compact is None:
            raise errors.InvalidInputError(
                what, got="a store without a compact tier", fix="build it with compact='bit1' (or another format), or use rerank"
            )
        return self.store.compact

    def _cls_weight(self, override: float | None) -> float:
        """Of a search."""
        if override is None:
            return float(self.store.manifest["cls_weight"])
        check_finite("cls_weight", override)
        if override and not self.store.schema.d_cls:
            raise errors.InvalidInputError("cls_weight", got=override, expected="0 or None: the store's documents have no CLS vector")
        return float(override)

    def _encode(self, queries: Sequence[Query], cls_weight: float) -> list[QueryVectors]:
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
        return [self._check_query(query if isinstance(query, Encoded) else next(vectors), cls_weight) for query in queries]

    def _check_query(self, query: Encoded, cls_weight: float) -> QueryVectors:
        built = self.store.manifest["encoder"]
        try:
            cls, tokens = (torch.as_tensor(values, dtype=torch.float32) for values in (query.cls, query.tokens))
        except (TypeError, ValueError, RuntimeError) as error:
            raise errors.InvalidInputError("query vectors", got=str(error), expected="tensors") from None
        if tuple(cls.shape) != (built["d_cls"],) or tokens.dim() != 2 or tokens.shape[1] != built["dim"]:
            raise errors.InvalidInputError(
                "query vectors",
                got=f"cls {list(cls.shape)}, tokens {list(tokens.shape)}",
                expected=f"cls [{built['d_cls']}], tokens [n, {built['dim']}]",
            )
        if not (bool(torch.isfinite(cls).all()) and bool(torch.isfinite(tokens).all())):
            raise errors.InvalidInputError("query vectors", got="NaN or infinity", expected="finite numbers")
        pooling = self.store.pooling
        vector = (cls if pooling is None else pooling.query(tokens)).cpu().numpy()
        if self.store.projection is not None:
            tokens = self.store.projection(tokens)
        similarity_weight = cls_weight if pooling is None else 0.0
        return QueryVectors(cls.reshape(1, -1).to(self.device), tokens.contiguous().to(self.device), cls_weight, vector, similarity_weight)

    def _search(
        self, queries: list[QueryVectors], arguments: Arguments, allowed: Allowed | None, explain: bool, encode_s: float, is_alone: bool
    ) -> Iterator[SearchResult]:
        """Wave by wave: the first stage of one runs while the records of the one before arrive."""
        request, kind, predicted_s = self._plan(len(queries) == 1 and is_alone, arguments, allowed)
        size = self._wave_queries(len(queries), request)
        request = replace(request, is_pipelined=size < len(queries))
        under_way: tuple[Wave, list[QueryVectors]] | None = None
        try:
            for first in range(0, len(queries), size):
                part = queries[first : first + size]
                wave = Wave(self._means, part, request)
                wave.begin()
                if under_way is not None:
                    yield from self._results(*under_way, request, arguments.k, explain, encode_s, 0.0)
                under_way = wave, part
            if under_way is not None:
                wave, part = under_way
                yield from self._results(wave, part, request, arguments.k, explain, encode_s, predicted_s)
                if len(queries) == 1 and is_alone and self._turns.still_alone:
                    self._adviser.learn(kind, request.steps, wave.timings.first_stage_s, wave.timings.total_s)
        except BaseException:
            if under_way is not None:
                under_way[0].cancel()
            raise

    def _plan(self, is_alone: bool, arguments: Arguments, allowed: Allowed | None) -> tuple[Request, Any, float]:
        nprobe = self.default_nprobe if arguments.nprobe is None else arguments.nprobe
        candidates = min(arguments.candidates, self.store.end_number)
        kind = (nprobe, candidates, arguments.depth, arguments.is_cascade, allowed is None)
        steps, predicted_s = arguments.steps, None
        if steps is None:
            steps, predicted_s = self._adviser.choose(kind) if is_alone else (NO_PREFETCH, None)
        # Who names a number of lists wants no more of them, as long as they hold k documents.
        at_least = candidates if arguments.nprobe is None or allowed is not None else min(arguments.k, candidates)
        request = Request(
            candidates, arguments.depth, nprobe, steps, allowed, at_least, arguments.deadline_s, is_cascade=arguments.is_cascade
        )
        return request, kind, predicted_s or 0.0

    def _wave_queries(self, queries: int, request: Request) -> int:
        def mean_bytes(tier: Tier) -> float:
            return tier.size_bytes / max(1, self.store.count)

        lists = self.first_stage.lists_at_most(request.nprobe, request.allowed, request.at_least)
        bytes_each = request.depth * mean_bytes(self.store.full) + _FOUND_BYTES * (request.candidates + lists)
        if request.is_cascade and isinstance(self.compact, Tier):
            bytes_each += request.candidates * mean_bytes(self.compact)
        most = int(_WAVE_BYTES / max(1.0, bytes_each))
        return max(1, min(most, queries if queries <= _TOGETHER else -(-queries // _WAVES)))

    def _results(
        self, wave: Wave, queries: list[QueryVectors], request: Request, k: int, explain: bool, encode_s: float, predicted_s: float
    ) -> Iterator[SearchResult]:
        outcomes = wave.finish()
        timings, costs = wave.timings, wave.costs
        timings.encode_s, timings.predicted_s = encode_s, predicted_s
        for i, (query, outcome) in enumerate(zip(queries, outcomes, strict=True)):
            begun = time.perf_counter()
            hits = self._hits(query, outcome, k, explain, request.deadline_s)
            merge_s = time.perf_counter() - begun
            own = type(timings)(**{**vars(timings), "merge_s": merge_s, "total_s": timings.total_s + merge_s + encode_s})
            yield SearchResult(
                hits=hits,
                candidates=len(outcome.numbers),
                reranked=len(outcome.exact),
                hit_rate=outcome.hit_rate,
                bytes_asked=_share(costs.bytes_asked, i, len(queries)),
                bytes_moved=_share(costs.bytes_moved, i, len(queries)),
                requests=_share(costs.requests, i, len(queries)),
                hot=_share(costs.hot, i, len(queries)),
                effective_path=self.store.effective_path,
                prefetch_steps=request.steps,
                queries_together=len(queries),
                timings=own,
            )

    def _hits(self, query: QueryVectors, outcome: Outcome, k: int, explain: bool, deadline_s: float) -> list[Hit]:
        for scores in (outcome.exact, outcome.similarities):
            if not scores.max(initial=-np.inf) < np.inf:
                got = f"a score of {scores.max()}"
                raise errors.InvalidInputError("query vectors", got=got, expected="scores that float32 can hold", fix="smaller vectors")
        chosen, values, exact = rank(outcome, k)
        rows = self.store.texts.get(chosen.tolist())
        matches: Sequence[Any] = [None] * len(chosen)
        if explain and len(chosen):
            matches = token_matches(self.store.full, chosen, query.tokens, deadline_s)
        return [
            Hit(id=identifier, score=float(value), text=text, number=int(number), reranked=i < exact, matches=found)
            for i, (number, value, (identifier, text), found) in enumerate(zip(chosen, values, rows, matches, strict=True))
        ]

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
        results = self.search([queries[query] for query in judged], k=k, **options)
        rankings = {query: [hit.id for hit in result.hits] for query, result in zip(judged, results, strict=True)}
        return evaluate(rankings, qrels, metrics)

    def _check_known(self, judged: set[Any]) -> None:
        """Raises InvalidInputError where none of the judged documents is in the store: their ids are then of another kind."""
        ids = document_ids(judged, "qrels")
        with self._turns:
            self._check_open()
            if not ids or (self.store.texts.numbers(ids) >= 0).any():
                return
            stored = self.store.texts.any_id()
        raise errors.InvalidInputError(
            "evaluate: no judged document is in the store",
            got=f"ids such as {ids[0]!r} ({type(ids[0]).__name__})",
            expected="a store with documents" if stored is None else f"ids such as {stored!r} ({type(stored).__name__})",
            fix="give both the same ids, of the same type",
        )

    def close(self) -> None:
        """Searches under way are finished first; later ones raise EngineClosedError."""
        self._closed = True
        with self._closing, self._turns.none():
            self._opened.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _share(total: int, i: int, parts: int) -> int:
    return total * (i + 1) // parts - total * i // parts


def _device(name: str) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        raise errors.InvalidInputError("device", got=repr(name), expected="cpu or cuda") from None
    if device.type == "cuda" and not torch.cuda.is_available():
        raise errors.PathUnavailableError("no CUDA device here", got=name, fix="use device='cpu'")
    return device


def _open_current(path: str | os.PathLike[str], engine: NativeEngine, records: Engine) -> tuple[EmbeddingStore, Any]:
    """Opens store and IVF index; again, once, if a new generation was published (and the old one removed) between manifest and files."""
    try:
        return _open(path, engine, records)
    except errors.StorageError as error:
        try:
            return _open(path, engine, records)
        except errors.StorageError:
            raise error from None


def _open(path: str | os.PathLike[str], engine: NativeEngine, records: Engine) -> tuple[EmbeddingStore, Any]:
    store = EmbeddingStore(path, engine, records)
    try:
        return store, store.load_index()
    except BaseException:
        store.close()
        raise
