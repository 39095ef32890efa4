"""`Index`: a store with its first stage, ready to search. What happens in a search stands in
batch.py."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Unpack, overload

import torch

from ... import errors
from ...checks import check_path
from ...device.interface import RecordDevice
from ...device.registry import Devices
from ...storage import Engine
from ...storage.documents.ids import DocumentId
from ...suggestions import suggests_keywords
from ..encoder import AUTO, Encoded, Encoder, EncoderLike
from ..evaluate import DEFAULT_METRICS, Qrels, check_judged, depth_of, evaluate
from ..sparse_encoder import SparseEncoderLike
from .batch import search_in_batches
from .devices import compute_of, watched
from .known import OnCandidates
from .lookup import check_judged_known
from .opened.index import OpenIndex
from .opened.version import OpenOptions
from .options import SearchKeywords, SearchOptions
from .query_encoder import Queries, Query, QueryEncoder, listed
from .read_cost import DeviceCost
from .result import SearchResult


class Index(OpenIndex):
    """A store with its first stage, ready to search. Safe to use from several threads. A context
    manager.

    It stays with the version of the store that was there when it was opened, whatever is added,
    deleted or compacted meanwhile, until `reload` is called. ``len(index)``, ``identifier in
    index`` and iteration (over ids) are of that version's documents. Its pickle is its path and its
    options: whoever loads it, a worker that was spawned for one, opens the store anew, at the
    version that is there then.

    Args:
        path: the store's directory.
        encoder: for queries given as text: an encoder, or a description of one as
            `espnx.load_encoder` takes it; must be the one the store was built with. One that is
            described computes in the dtype that the documents were encoded in; one that was loaded
            may compute in the other. ``auto``: the one that the store remembers, loaded when the
            first text comes; one out of a folder has to be named, as a store does not know where
            that lies. None: queries are vectors.
        engine: path of the record reads (``auto``, ``uring``, ``posix``, ``memory``; ``gds`` or
            ``gds-compat`` with a CUDA device), a file of settings (``nvme.toml``, see
            docs/engine.md), or an engine, which stays the caller's.
        compute: where records are scored: ``cpu``, ``cuda`` (the thread's current GPU, once for
            all), or ``cuda:1``.
        threads: that scan the first stage's lists for one search; None for as many as there are
            cores, at most 4.
        first_stage_on: where the lists are scanned: ``cpu``, or ``cuda`` where faiss-gpu is
            installed (at most 2,032 candidates), then on that GPU.
        hot: RAM for documents that many queries want, in bytes or as ``256MiB``; 0 keeps none.
        coarse: where the coarse tier of a cascade is read from: ``ssd``, or ``ram`` (loaded whole,
            now).
        cost: of the device's reads; None measures it (tens of milliseconds; small stores get the
            defaults).
        device: what keeps and scores the records: a name (`espnx.device.names`); an open device, or
            several, in whose directories the data files lie, or a `RecordDevice`, which stay the
            caller's. None: the plain SSD, read by `engine` and scored on `compute`.
        sparse_encoder: of queries for a first stage of ``splade``, or a description of it; must be
            the one that the store was built with. None: the one that the store remembers, loaded
            when it is wanted (one out of a folder has to be named).

    Raises:
        InvalidInputError: another encoder than the store's, or an option that is out of range.
        PathUnavailableError: the engine that was named cannot be had here.
        StoreNotFoundError, FormatError, ForeignFileError, TruncatedFileError, ChecksumError:
            nothing damaged is opened.
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
        self._given = {
            "encoder": encoder,
            "engine": engine,
            "compute": compute,
            "threads": threads,
            "first_stage_on": first_stage_on,
            "hot": hot,
            "coarse": coarse,
            "cost": cost,
            "device": device,
            "sparse_encoder": sparse_encoder,
        }
        on = compute_of(compute, device)
        options = OpenOptions.of(on, threads, first_stage_on, hot, coarse, cost, sparse_encoder)
        super().__init__(check_path("path of a store", path), options, engine, device)
        try:
            self._queries = QueryEncoder(encoder, str(self.compute), self._versions)
        except BaseException:
            self.close()
            raise

    @property
    def encoder(self) -> Encoder | None:
        """The encoder of queries given as text; None: there is none.

        Raises what `espnx.load_encoder` raises, where it is the one that the store remembers and
        was not wanted before.
        """
        return self._queries.encoder()

    def use_encoder(self, encoder: EncoderLike) -> None:
        """Encodes queries given as text with it. Raises InvalidInputError unless the store was
        built with the same (or with none)."""
        self._queries.use(encoder)
        self._given["encoder"] = encoder

    def reload(self) -> bool:
        """Goes over to the newest version of the store; returns whether there was one.

        Searches under way end on the version they began with, later ones see the new one, and no
        search sees both or neither. Both are in memory until the last search of the old one has
        ended; hot documents begin anew.

        Raises:
            what opening raises, InvalidInputError where the store was built anew with another
                encoder: the index stays as it is.
        """
        with self._versions.changing:
            self._gate.check_open()
            return self._versions.reload(self._queries.check)

    def __reduce__(self) -> tuple[object, ...]:
        self._gate.check_open()
        return _reopened, (os.path.abspath(self._path), _picklable(self._given))

    @overload
    def search(
        self, queries: Query, k: int = ..., **options: Unpack[SearchKeywords]
    ) -> SearchResult: ...
    @overload
    def search(
        self, queries: Queries, k: int = ..., **options: Unpack[SearchKeywords]
    ) -> list[SearchResult]: ...
    @overload
    def search(
        self, queries: Mapping[Any, Query], k: int = ..., **options: Unpack[SearchKeywords]
    ) -> dict[Any, SearchResult]: ...

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
        on_candidates: OnCandidates | None = None,
        deadline_s: float = 30.0,
    ) -> SearchResult | list[SearchResult] | dict[Any, SearchResult]:
        """Ranks documents for one query (a `SearchResult`) or several (a list of them, which share
        reads of documents that several want).

        Args:
            queries: text, or vectors already encoded; or a mapping of names to such, which gives a
                dict of results under the same names. A query without tokens is ranked by its CLS
                vector, in first-stage order; nothing is read for it.
            k: hits wanted; fewer where the corpus or the candidates are fewer.
            candidates: how many the first stage hands on; at least k are. None: 1,000, and 100
                where each costs a read (``graph``, ``clusters``).
            first_stage: which of the index's first stages finds them (`build`, `first_stages`), or
                several, whose rankings are fused: each brings so many candidates, and the best of
                the union are kept. None: the one that was named first at build.
            fuse: ``rrf`` (reciprocal ranks) or ``weighted`` (scaled scores), see
                `espnx.retrieval.first_stage.fusion`. ``rrf+maxsim``: MaxSim's own ranking of the
                candidates is one more list, and the fused ranks order the hits, those that no more
                than a first stage has found among them.
            rerank: how many of them are read and scored exactly, the best first; None for all. The
                others follow in first-stage order.
            cascade: score the coarse records of all candidates, then so many full ones exactly; the
                others follow in coarse order. Needs a store built with a coarse tier. Lossy as
                `rerank` is, and much less so.
            nprobe: effort of the first stage (of the first that is named): lists that an IVF scans,
                or that are read of each part's clusters, or candidates that a walk over a graph
                keeps (DiskANN's L); or ``auto`` (measured at build: 98 % of the exhaustive
                candidates). Lists without a document that may be
                found do not count. With ``auto``, and beside a filter or deleted documents, as many
                more are scanned as it takes to find `candidates`, or all there are; with a number,
                as it takes to find k.
            prefetch_step: share of those lists after which the reads begin (ESPN, eq. 3), or
                several of them; 0 reads nothing ahead; ``auto`` chooses from predicted times, and
                none for a batch or beside other callers, whose first stages hide the reads.
            cls_weight: overrides the store's.
            include, exclude: ids of documents: no other is found; those are not found.
            explain: fill in `Hit.matches` (reads the k hits once more).
            on_candidates: told after each step what is known of each query (a `KnownCandidates`):
                the first stage's best after every prefetch step and at its end, once their reads
                have begun, then the hits, once. For whoever begins to load what belongs to the
                documents while they are ranked. Where the search fails, or its call-back raises,
                the last of these does not come; what was begun is then its caller's to give up.
            deadline_s: for each read.

        Raises:
            InvalidInputError: arguments out of range; vectors of the wrong dimension, NaN or
                infinite.
            ReadError, ChecksumError, DeadlineExceededError, ...: nothing is ranked on bytes that
                are not right. The index stays usable.
        """
        self._gate.check_open()
        options = SearchOptions(
            k,
            candidates,
            rerank,
            cascade,
            nprobe,
            prefetch_step,
            cls_weight,
            include,
            exclude,
            explain,
            deadline_s,
            first_stage,
            fuse,
            on_candidates,
        )
        results = self._search(
            listed(queries, self._versions.newest.store.manifest.encoder), options
        )
        if isinstance(queries, Mapping):
            return dict(zip(queries, results, strict=True))
        return results[0] if isinstance(queries, (str, Encoded)) else results

    def _search(self, wanted: Sequence[Query], options: SearchOptions) -> list[SearchResult]:
        with self._versions.current() as version:
            begun, stage = time.perf_counter(), version.stage(options)
            encoded = (
                self._queries.encode(wanted)
                if options.reads_records or stage.loaded.needs_vectors
                else version.without_vectors(wanted)
            )
            encode_s = (time.perf_counter() - begun) / max(1, len(wanted))
            with self._gate as is_alone:
                if options.is_cascade:
                    version.coarse_tier("cascade")
                if options.candidates is None:
                    options = replace(options, candidates=stage.loaded.default_candidates)
                begun = time.perf_counter()
                vectors = version.queries(encoded, wanted, options.cls_weight, stage)
                # a stage of words may have a model of its own
                encode_s += (time.perf_counter() - begun) / max(1, len(wanted))
                results = search_in_batches(
                    version, stage, self._gate, vectors, options, encode_s, is_alone=is_alone
                )
                if self._devices.topologies:
                    return watched(self._devices, results)
                return list(results)

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
        """Searches for every judged query and computes `metrics` (see `evaluate.evaluate`), as deep
        as they need: the k of each is its own.

        Args:
            queries, qrels: texts or vectors, and judgements, by the same names of queries.
            metrics: as of `espnx.evaluate`.
            candidates, first_stage, fuse, rerank, cascade, nprobe, prefetch_step, cls_weight,
                include, exclude, deadline_s: as of `search`.

        Raises what `search` and `evaluate` raise.
        """
        k = depth_of(metrics)
        check_judged(queries, qrels)
        judged = [query for query in queries if query in qrels]
        with self._reading() as version:
            check_judged_known(
                version.store, {document for query in judged for document in qrels[query]}
            )
        results = self.search(
            {query: queries[query] for query in judged},
            k,
            candidates=candidates,
            first_stage=first_stage,
            fuse=fuse,
            rerank=rerank,
            cascade=cascade,
            nprobe=nprobe,
            prefetch_step=prefetch_step,
            cls_weight=cls_weight,
            include=include,
            exclude=exclude,
            deadline_s=deadline_s,
        )
        ids = {query: [hit.id for hit in result] for query, result in results.items()}
        return evaluate(ids, qrels, metrics)


def _picklable(given: dict[str, Any]) -> dict[str, Any]:
    """The same options, of which each can be had in another process."""
    for name, value in given.items():
        if not isinstance(value, (str, int, os.PathLike, torch.device, DeviceCost, type(None))):
            raise errors.InvalidInputError(
                f"a pickled index; its {name}",
                got=type(value).__name__,
                expected="a name or a path",
                fix="name it instead, or open the index in each process: espnx.open(path)",
            )
    return given


def _reopened(path: str, given: dict[str, Any]) -> Index:
    """What a pickle of an index is: its arguments."""
    return Index(path, **given)
