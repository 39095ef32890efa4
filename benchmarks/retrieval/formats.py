"""What each record format costs and loses: bytes, latency and quality on a labelled collection,
against fp16 scored exactly."""

from __future__ import annotations

import hashlib
import json
import random
import statistics
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

import espnx
from espnx.encoders import load_encoder
from espnx.errors import InvalidInputError
from espnx.ops.maxsim import FORMATS
from espnx.retrieval.build.documents import Document
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.evaluate import DEFAULT_METRICS, evaluate, read_qrels
from espnx.retrieval.search.index import Index
from espnx.retrieval.store.projection import Projection
from espnx.retrieval.store.store import VERSION

from ..harness.registry import Say
from ..harness.result import Row
from .measure import ranking_problem
from .options import Options
from .rows import simple_row
from .session import tolerance
from .systems.whole_store import WholeStoreRanker, lists_of, query_vectors

BASELINE = "fp16"
COARSE = ("bit1", "residual1", "residual2")
K = 100
_VERIFIED, _ENCODED_AT_ONCE = 3, 256


@dataclass(frozen=True)
class Dataset:
    """A labelled collection, encoded."""

    name: str
    documents: list[Document]
    queries: dict[str, Encoded]
    qrels: Mapping[str, Mapping[str, int]]
    encoder: str
    dims: tuple[int, int]


@dataclass
class Variant:
    """One way to keep and search the collection; the answers to its queries as they come."""

    name: str
    data: Dataset
    build: dict[str, Any]
    search: dict[str, Any] = field(default_factory=dict)
    problem: str | None = None
    seconds: dict[str, float] = field(default_factory=dict)
    rankings: dict[str, list[Any]] = field(default_factory=dict)
    bytes_asked: list[int] = field(default_factory=list)
    bytes_moved: list[int] = field(default_factory=list)


def load_dataset(folder: Path, encoder_spec: str, say: Say, limit: int | None = None) -> Dataset:
    """corpus.jsonl and queries.jsonl (``_id``, ``text``, perhaps ``title``), qrels.tsv. Raises
    InvalidInputError."""
    for name in ("corpus.jsonl", "queries.jsonl", "qrels.tsv"):
        if not (folder / name).is_file():
            raise InvalidInputError(
                "dataset",
                got=f"{folder} without {name}",
                expected="corpus.jsonl, queries.jsonl and qrels.tsv",
            )
    qrels = read_qrels(str(folder / "qrels.tsv"))
    texts = list(_lines(folder / "corpus.jsonl"))[:limit]
    queries = {name: text for name, text in _lines(folder / "queries.jsonl") if name in qrels}
    encoder = load_encoder(encoder_spec)
    begun = time.perf_counter()
    documents = []
    for first in range(0, len(texts), _ENCODED_AT_ONCE):
        part = texts[first : first + _ENCODED_AT_ONCE]
        found = encoder.encode_documents([text for _, text in part])
        documents += [
            Document(name, text, vectors) for (name, text), vectors in zip(part, found, strict=True)
        ]
    encoded = dict(zip(queries, encoder.encode_queries(list(queries.values())), strict=True))
    say(
        f"  encoded {len(documents):,} documents and {len(queries)} queries in "
        f"{time.perf_counter() - begun:.0f} s"
    )
    return Dataset(
        folder.name, documents, encoded, qrels, encoder.name, (encoder.d_cls, encoder.dim)
    )


def _lines(path: Path) -> Iterator[tuple[str, str]]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            item = json.loads(line)
            yield (
                str(item["_id"]),
                f"{item['title']} {item['text']}" if item.get("title") else item["text"],
            )


def variants(options: Options, data: Dataset) -> list[Variant]:
    """fp16 first; then every other format, a projection, partial re-ranking, and cascades. All but
    the projections keep all dimensions.

    A build projects unit vectors to unit vectors. ``-plain``: vectors that were projected before
    they came to the build, so that each is shorter by what it lost.
    """
    formats = [
        BASELINE,
        *(
            fmt
            for fmt in (FORMATS if options.formats == ["all"] else options.formats)
            if fmt != BASELINE
        ),
    ]
    found = [Variant(fmt, data, {"format": fmt}) for fmt in formats]
    found.append(
        Variant(f"{BASELINE}-pca-{options.pca}", data, {"format": BASELINE, "pca": options.pca})
    )
    found.append(
        Variant(
            f"{BASELINE}-pca-{options.pca}-plain",
            projected(data, options.pca),
            {"format": BASELINE},
        )
    )
    depths = [depth for depth in options.reranks if depth is not None]
    found += [
        Variant(f"{BASELINE}-rerank-{depth}", data, {"format": BASELINE}, {"rerank": depth})
        for depth in depths
    ]
    for coarse in COARSE:
        build = {"format": BASELINE, "coarse": coarse}
        found += [
            Variant(f"cascade-{coarse}-{count}", data, build, {"cascade": count})
            for count in options.cascades
        ]
    return found


def projected(data: Dataset, dim: int) -> Dataset:
    """The collection with all token vectors, of queries too, projected by PCA and not scaled to
    their length before."""
    tokens = (
        document.vectors.tokens for document in data.documents if document.vectors is not None
    )
    plain = Projection(Projection.fit(tokens, data.dims[1], dim).components)

    def shortened(vectors: Encoded | None) -> Encoded:
        assert vectors is not None
        return Encoded(vectors.cls, plain(vectors.tokens))

    documents = [
        replace(document, vectors=shortened(document.vectors)) for document in data.documents
    ]
    queries = {name: shortened(vectors) for name, vectors in data.queries.items()}
    return replace(data, documents=documents, queries=queries, dims=(data.dims[0], dim))


def show_formats(options: Options, say: Say) -> list[Row]:
    """A row a variant. Raises InvalidInputError without ``--dataset``."""
    if options.dataset is None:
        raise InvalidInputError(
            "formats are compared on a labelled collection", fix="--dataset DIR"
        )
    data = load_dataset(options.dataset, options.encoder, say, 300 if options.quick else None)
    if options.pca >= data.dims[1]:
        raise InvalidInputError(
            "--pca",
            got=options.pca,
            expected=f"fewer than the {data.dims[1]} dimensions of {data.encoder}",
        )
    with ExitStack() as stack:
        opened: dict[str, Index] = {}
        chosen = variants(options, data)
        for variant in chosen:
            path = _ensure(options, variant, say)
            if str(path) not in opened:
                opened[str(path)] = stack.enter_context(
                    Index(path, engine=options.engine, threads=options.threads)
                )
            variant.problem = _verify(opened[str(path)], options, variant)
            if variant.problem:
                say(f"WRONG RESULT of {variant.name}: {variant.problem}. It is not measured.")
        indexes = {variant.name: opened[str(_place(options, variant))] for variant in chosen}
        _search_all([variant for variant in chosen if variant.problem is None], indexes, options)
        return _rows(chosen, indexes, options, say)


def _place(options: Options, variant: Variant) -> Path:
    data = variant.data
    text = json.dumps(
        [data.encoder, data.dims, len(data.documents), VERSION, variant.build], sort_keys=True
    )
    return (
        options.path
        / f"dataset-{data.name}-{hashlib.blake2b(text.encode(), digest_size=6).hexdigest()}"
    )


def _ensure(options: Options, variant: Variant, say: Say) -> Path:
    path, data = _place(options, variant), variant.data
    if not (path / "MANIFEST.json").exists():
        say(
            f"  building {', '.join(f'{key} {value}' for key, value in variant.build.items())}, "
            f"{data.dims[1]} dimensions"
        )
        espnx.build(
            path,
            data.documents,
            dims=data.dims,
            first_stage_code="flat",
            restart=True,
            memory="4GiB",
            **variant.build,
        )
    return path


def _options(index: Index, options: Options) -> dict[str, Any]:
    # All lists: every format sees the same candidates.
    return {"candidates": options.candidates, "nprobe": max(1, lists_of(index).nlist)}


def _verify(index: Index, options: Options, variant: Variant) -> str | None:
    """Exact search equals plain PyTorch on the same records."""
    if variant.search:
        return None
    reference = WholeStoreRanker(index, "memory")
    for query in list(variant.data.queries.values())[:_VERIFIED]:
        expected = reference.reference(query, k=K, rerank=None, **_options(index, options))
        found = [
            (hit.number, hit.score)
            for hit in index.search(query, k=K, **_options(index, options)).hits
        ]
        if problem := ranking_problem(found, expected, tolerance(query_vectors(index, query))):
            return problem
    return None


def _search_all(chosen: list[Variant], indexes: Mapping[str, Index], options: Options) -> None:
    """Every query by every variant, in shuffled order."""
    rng = random.Random(options.seed)
    names = list(chosen[0].data.queries) if chosen else []
    for number, name in enumerate([*names[:_VERIFIED], *names]):
        for variant in rng.sample(chosen, len(chosen)):
            index, query = indexes[variant.name], variant.data.queries[name]
            begun = time.perf_counter()
            result = index.search(query, k=K, **_options(index, options), **variant.search)
            seconds = time.perf_counter() - begun
            if number >= _VERIFIED:  # the first ones only warm up
                variant.seconds[name] = seconds
                variant.rankings[name] = [hit.id for hit in result.hits]
                variant.bytes_asked.append(result.bytes_asked)
                variant.bytes_moved.append(result.bytes_moved)


def _rows(
    chosen: list[Variant], indexes: Mapping[str, Index], options: Options, say: Say
) -> list[Row]:
    rows, baseline = [], chosen[0]
    exact = evaluate(baseline.rankings, baseline.data.qrels) if baseline.rankings else {}
    for variant in chosen:
        index, data = indexes[variant.name], variant.data
        metrics = _sizes(index)
        if variant.rankings:
            quality = evaluate(variant.rankings, data.qrels, DEFAULT_METRICS)
            metrics |= quality | {
                f"{name}_of_{BASELINE}": value / max(exact[name], 1e-12)
                for name, value in quality.items()
                if exact
            }
            say(
                f"    {variant.name}: "
                + ", ".join(f"{name} {value:.4f}" for name, value in quality.items())
            )
        params = {
            "show": "formats",
            "corpus": data.name,
            "documents": len(data.documents),
            "dim": index.store.full.schema.dim,
            "encoder": data.encoder,
            "format": variant.build["format"],
            "coarse": variant.build.get("coarse"),
            "memory_bytes": None,
            "nprobe": lists_of(index).nlist,
            "candidates": options.candidates,
            "rerank": variant.search.get("rerank"),
            "cascade": variant.search.get("cascade"),
            "batch": 1,
            "threads": options.threads,
        }
        pairs = [
            baseline.seconds[name] / seconds
            for name, seconds in variant.seconds.items()
            if name in baseline.seconds
        ]
        rows.append(
            simple_row(
                params,
                variant.name,
                list(variant.seconds.values()),
                metrics,
                path=index.store.effective_path,
                correct=variant.problem is None,
                bytes_asked=statistics.median(variant.bytes_asked or [0]),
                bytes_moved=statistics.median(variant.bytes_moved or [0]),
                ratio={BASELINE: pairs} if variant is not baseline else None,
            )
        )
    return rows


def _sizes(index: Index) -> dict[str, float]:
    store = index.store
    count = max(1, store.count)
    sizes = {
        "bytes_per_document": float(store.full.schema.sizes(store.n_tokens).sum()) / count,
        "tokens": float(np.mean(store.n_tokens)),
    }
    if store.coarse is not None:
        sizes["coarse_bytes_per_document"] = (
            float(store.coarse.schema.sizes(store.n_tokens).sum()) / count
        )
    return sizes
