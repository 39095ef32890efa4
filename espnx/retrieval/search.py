"""Search: prefetch what the first stage finds early, score it as it arrives, read only what was missed in the critical path.

    first stage, delta lists ----> all other lists ------------------> misses: read, score --> merge, top k
                          \\--> prefetch: read, check, score as records arrive --------------/

ESPN (sections 4.2 to 4.4), with its stated weakness removed: misses are read at once, ahead of what the prefetch still waits for, instead
of after it.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import TracebackType
from typing import Any, overload

import numpy as np
import torch

from .. import errors
from ..storage import Engine, NativeEngine, open_engine
from ..storage.engine import Future
from .documents import check_count
from .encoder import Encoded, Encoder
from .first_stage import FirstStage, IvfFirstStage, load_faiss
from .rerank import QueryVectors, Scored, score_arrivals
from .result import Hit, SearchResult, Timings
from .store import FIRST_STAGE_NAME, EmbeddingStore

Query = str | Encoded
Queries = list[str] | list[Encoded] | list[Query] | tuple[Query, ...]

#: A hole of this size between two records is read rather than skipped. A drive that does 80,000 requests and 1.3 GB a second spends as long
#: on one more request as on 16 KiB; on that hardware 16 KiB was the best of 0, 16 and 64.
GAP_BYTES = 16 * 1024


def load_first_stage(store: EmbeddingStore) -> IvfFirstStage:
    """The store's IVF index, checked before FAISS sees a byte of it."""
    if not store.count:
        return IvfFirstStage(None)
    faiss = load_faiss()
    path = os.path.join(store.directory, FIRST_STAGE_NAME)
    source = _Bytes(store.checked_windows(FIRST_STAGE_NAME))
    index = faiss.read_index(faiss.PyCallbackIOReader(source.read))
    if index.ntotal != store.count or index.d != store.schema.d_cls:
        raise errors.FormatError(
            "first stage does not fit the store",
            path=path,
            got=f"{index.ntotal} x {index.d}",
            expected=f"{store.count} x {store.schema.d_cls}",
        )
    return IvfFirstStage(index)


class _Bytes:
    """A stream of arrays as a read(n)."""

    def __init__(self, windows: Any):
        self._windows, self._rest = windows, memoryview(b"")

    def read(self, count: int) -> bytes:
        parts, have = [], 0
        while have < count:
            if not self._rest:
                window = next(self._windows, None)
                if window is None:
                    break
                self._rest = memoryview(window.tobytes())
            part = self._rest[: count - have]
            self._rest = self._rest[len(part) :]
            parts.append(bytes(part))
            have += len(part)
        return b"".join(parts)


class Index:
    """A store with its first stage, ready to search. Safe to use from several threads. A context manager.

    Args:
        path: the store's directory.
        encoder: for queries given as text; must be the one the store was built with.
        engine: path of the record reads (``auto``, ``uring``, ``posix``, ``memory``; ``gds`` or ``gds-compat`` with a CUDA device), or an
            engine, which stays the caller's.
        device: where records are scored: ``cpu`` or ``cuda``.

    Raises:
        what `EmbeddingStore` raises; InvalidInputError for another encoder; PathUnavailableError.
    """

    def __init__(self, path: str | os.PathLike[str], encoder: Encoder | None = None, *, engine: str | Engine = "auto", device: str = "cpu"):
        try:
            self.device = torch.device(device)
        except RuntimeError:
            raise errors.InvalidInputError("device", got=repr(device), expected="cpu or cuda") from None
        if self.device.type == "cuda" and not torch.cuda.is_available():
            raise errors.PathUnavailableError("no CUDA device here", got=device, fix="use device='cpu'")
        with ExitStack() as opened:
            records = opened.enter_context(open_engine(engine)) if isinstance(engine, str) else engine
            if isinstance(records, NativeEngine):
                native = records
            else:  # reads into GPU memory; manifest, metadata and first stage are read into host memory all the same
                if self.device.type == "cpu":
                    raise errors.InvalidInputError(
                        "records would lie in GPU memory", got="device='cpu'", fix="open the index with device='cuda'"
                    )
                native = opened.enter_context(NativeEngine())
            self.store, self.first_stage = _open_current(path, native, records)
            self._engines = opened.pop_all()
        self._workers = ThreadPoolExecutor(max_workers=8, thread_name_prefix="espnx-rerank")
        self._closed = False
        self.encoder: Encoder | None = None
        try:
            if encoder is not None:
                self.use_encoder(encoder)
        except BaseException:
            self.close()
            raise

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

    @overload
    def search(
        self,
        queries: Query,
        k: int = ...,
        *,
        candidates: int = ...,
        rerank: int | None = ...,
        nprobe: int | str = ...,
        prefetch_step: float = ...,
        cls_weight: float | None = ...,
        deadline_s: float = ...,
    ) -> SearchResult: ...
    @overload
    def search(
        self,
        queries: Queries,
        k: int = ...,
        *,
        candidates: int = ...,
        rerank: int | None = ...,
        nprobe: int | str = ...,
        prefetch_step: float = ...,
        cls_weight: float | None = ...,
        deadline_s: float = ...,
    ) -> list[SearchResult]: ...

    def search(
        self,
        queries: Query | Queries,
        k: int = 10,
        *,
        candidates: int = 1000,
        rerank: int | None = None,
        nprobe: int | str = "auto",
        prefetch_step: float = 0.3,
        cls_weight: float | None = None,
        deadline_s: float = 30.0,
    ) -> SearchResult | list[SearchResult]:
        """Ranks documents for one query (a `SearchResult`) or several (a list of them).

        Args:
            queries: text, or vectors already encoded.
            k: hits wanted; fewer where the corpus or the candidates are fewer.
            candidates: how many the first stage hands on.
            rerank: how many of them are read and scored exactly, the best first; None for all. The others follow in first-stage order.
            nprobe: lists the first stage scans, or ``auto`` (measured at build: 98 % of the exhaustive candidates).
            prefetch_step: share of those lists after which the reads begin (ESPN, eq. 3); 0 reads nothing ahead.
            cls_weight: overrides the store's.
            deadline_s: for the reads of one query.

        Raises:
            InvalidInputError: arguments out of range; vectors of the wrong dimension, NaN or infinite.
            ReadError, ChecksumError, DeadlineExceededError, ...: nothing is ranked on bytes that are not right. The index stays usable.
        """
        if self._closed:
            raise errors.EngineClosedError("the index is closed", fix="open it again")
        if cls_weight is not None and not np.isfinite(cls_weight):
            raise errors.InvalidInputError("cls_weight", got=cls_weight, expected="a finite number")
        if k < 1 or candidates < 1 or (rerank is not None and rerank < 0):
            raise errors.InvalidInputError(
                "k and candidates must be at least 1, rerank at least 0", got=f"k={k}, candidates={candidates}, rerank={rerank}"
            )
        if not 0 <= prefetch_step <= 1:
            raise errors.InvalidInputError("prefetch_step", got=prefetch_step, expected="a share of the lists, 0 to 1")
        lists = self.default_nprobe if nprobe == "auto" else nprobe
        if not isinstance(lists, int) or lists < 1:
            raise errors.InvalidInputError("nprobe", got=repr(nprobe), expected="at least 1, or 'auto'")
        one = isinstance(queries, (str, Encoded))
        wanted: Sequence[Query] = [queries] if isinstance(queries, (str, Encoded)) else list(queries)
        begun = time.perf_counter()
        vectors = self._encode(wanted, self.store.manifest["cls_weight"] if cls_weight is None else cls_weight)
        encode_s = (time.perf_counter() - begun) / max(1, len(wanted))
        depth = min(rerank if rerank is not None else candidates, candidates)
        results = [self._search_one(query, k, candidates, depth, lists, prefetch_step, deadline_s, encode_s) for query in vectors]
        return results[0] if one else results

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
        cls, tokens = torch.as_tensor(query.cls, dtype=torch.float32), torch.as_tensor(query.tokens, dtype=torch.float32)
        if tuple(cls.shape) != (built["d_cls"],) or tokens.dim() != 2 or tokens.shape[1] != built["dim"]:
            raise errors.InvalidInputError(
                "query vectors",
                got=f"cls {list(cls.shape)}, tokens {list(tokens.shape)}",
                expected=f"cls [{built['d_cls']}], tokens [n, {built['dim']}]",
            )
        if not (bool(torch.isfinite(cls).all()) and bool(torch.isfinite(tokens).all())):
            raise errors.InvalidInputError("query vectors", got="NaN or infinity", expected="finite numbers")
        if self.store.projection is not None:
            tokens = self.store.projection(tokens)
        return QueryVectors(cls.reshape(1, -1).to(self.device), tokens.contiguous().to(self.device), cls_weight)

    def _search_one(
        self,
        query: QueryVectors,
        k: int,
        candidates: int,
        depth: int,
        nprobe: int,
        prefetch_step: float,
        deadline_s: float,
        encode_s: float,
    ) -> SearchResult:
        timings = Timings(encode_s=encode_s)
        begun = time.perf_counter()
        stage = self.first_stage.start(query.cls.cpu().numpy()[0], min(candidates, self.store.count), nprobe, prefetch_step)
        early = np.empty(0, dtype=np.int64)
        task: Task[Scored] | None = None
        reads: list[Future] = []
        prefetch_begun = time.perf_counter()
        if prefetch_step > 0 and depth > 0:
            early = stage.partial()[0][:depth]
            prefetch_begun = time.perf_counter()
            timings.delta_s = prefetch_begun - begun
            reads.append(self.store.read(early, gap_bytes=GAP_BYTES, deadline_s=deadline_s))
            task = self._workers.submit(score_arrivals, self.store, reads[0], early, query, self.device)
        try:
            numbers, similarities = stage.complete()
            complete = time.perf_counter()
            timings.prefetch_budget_s = complete - prefetch_begun
            late = np.setdiff1d(numbers[:depth], early)
            # Ahead of the prefetch: these were not expected, and everything waits for them.
            reads.append(self.store.read(late, gap_bytes=GAP_BYTES, priority=1, deadline_s=deadline_s))
            scored = [score_arrivals(self.store, reads[-1], late, query, self.device)]
            waited = time.perf_counter()
            if task is not None:
                scored.append(task.result())
                timings.prefetch_s = scored[1].finished_at - prefetch_begun
            timings.critical_io_s = scored[0].waited_s + time.perf_counter() - waited
        except BaseException:
            for read in reads:
                read.cancel()
            # It holds the error, whose traceback holds this frame: a cycle that would keep buffers and files until a collection.
            task = None
            raise
        timings.maxsim_s = sum(part.maxsim_s for part in scored)
        merging = time.perf_counter()
        hits = self._merge(numbers, similarities, depth, scored, k)
        end = time.perf_counter()
        timings.merge_s, timings.total_s = end - merging, end - begun + encode_s
        exact = len(numbers[:depth])
        return SearchResult(
            hits=hits,
            candidates=len(numbers),
            reranked=exact,
            hit_rate=(exact - len(late)) / exact if exact and len(early) else 0.0,
            bytes_asked=sum(read.bytes_asked for read in reads),
            bytes_moved=sum(read.bytes_moved for read in reads),
            requests=sum(read.request_count for read in reads),
            effective_path=self.store.effective_path,
            timings=timings,
        )

    def _merge(self, numbers: np.ndarray, similarities: np.ndarray, depth: int, scored: list[Scored], k: int) -> list[Hit]:
        known = np.concatenate([part.numbers for part in scored])
        exact = np.concatenate([part.scores for part in scored])
        order = np.argsort(known)
        head = numbers[:depth]
        scores = exact[order][np.searchsorted(known, head, sorter=order)] if len(head) else np.empty(0, np.float32)
        best = np.lexsort((head, -scores))[:k]
        chosen = np.concatenate([head[best], numbers[depth : depth + k - len(best)]])
        values = np.concatenate([scores[best], similarities[depth : depth + k - len(best)]])
        rows = self.store.texts.get(chosen.tolist())
        return [
            Hit(id=identifier, score=float(value), text=text, number=int(number), reranked=i < len(best))
            for i, (number, value, (identifier, text)) in enumerate(zip(chosen, values, rows, strict=True))
        ]

    def close(self) -> None:
        self._closed = True
        self._workers.shutdown(wait=True)
        self.store.close()
        self._engines.close()

    def __enter__(self) -> Index:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _open_current(path: str | os.PathLike[str], engine: NativeEngine, records: Engine) -> tuple[EmbeddingStore, FirstStage]:
    """Opens the store; again, once, if a new generation was published (and the old one removed) between manifest and files."""
    try:
        return _open(path, engine, records)
    except errors.StorageError as error:
        try:
            return _open(path, engine, records)
        except errors.StorageError:
            raise error from None


def _open(path: str | os.PathLike[str], engine: NativeEngine, records: Engine) -> tuple[EmbeddingStore, FirstStage]:
    store = EmbeddingStore(path, engine, records)
    try:
        return store, load_first_stage(store)
    except BaseException:
        store.close()
        raise
