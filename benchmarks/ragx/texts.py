"""A collection of texts as RAGX's retrievers see it: words, weights of terms, one vector a passage,
or one for every token."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import espnx
from espnx.encoders import load_sparse_encoder
from espnx.encoders.doc2vec import Doc2VecEncoder
from espnx.importers.beir import read_beir
from espnx.postings import Analyzer, Postings
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.sparse_encoder import term_vectors

from ..harness.registry import Say
from . import vectors
from .late import MaxSim, pooled
from .lists import PLACEMENTS, Lists
from .parts import Retriever
from .vectors import Vectors

_TOPICS = ("reads", "graphs", "caches", "lists", "disks", "tokens", "codes", "pages")
_AT_ONCE = 64


@dataclass(frozen=True)
class Texts:
    """Attributes: name; passages; queries."""

    name: str
    passages: Sequence[str]
    queries: Sequence[str]


def read(folder: str | None, queries: int) -> Texts:
    """A collection in BEIR's form, of whose queries the first are taken; None: forty sentences.
    Raises as `read_beir`."""
    if folder is None:
        rng = np.random.default_rng(0)
        made = [
            f"{_TOPICS[i % 8]} of {' and '.join(rng.choice(_TOPICS, 3, replace=False))} number {i}"
            for i in range(40)
        ]
        return Texts(
            "toy", made, [" ".join(made[i].split()[-5:]) for i in range(0, 40, 8)][:queries]
        )
    found = read_beir(folder)
    passages = [f"{each.get('title') or ''} {each['text']}".strip() for each in found.corpus]
    return Texts(
        folder.rstrip("/").rsplit("/", 1)[-1], passages, list(found.queries.values())[:queries]
    )


def retrievers(
    wanted: Sequence[str],
    folder: str | None,
    encoder: str,
    sparse_encoder: str,
    queries: int,
    ef: int,
    candidates: int,
    k: int,
    say: Say,
) -> Iterator[tuple[Retriever, int]]:
    """(each of the retrievers that are wanted, passages), texts encoded when the first needs
    them."""
    texts = read(folder, queries)
    for name in ("bm25", "splade"):
        if name in wanted:
            say(f"{name} of {len(texts.passages):,} passages")
            for each in _of_terms(texts, name, sparse_encoder, k):
                yield each, len(texts.passages)
    if "doc2vec" in wanted:
        say(f"training Doc2Vec on {len(texts.passages):,} passages")
        data = _doc2vec(texts, k)
        for each in vectors.retrievers(data, "doc2vec", ef):
            yield each, len(data.base)
    if not {"gtr-shape", "colbert-pooled", "colbert"} & set(wanted):
        return
    say(f"encoding {len(texts.passages):,} passages")
    made = espnx.load_encoder(encoder)
    passages = [each for some in _chunks(texts.passages) for each in made.encode_documents(some)]
    asked = [each for some in _chunks(texts.queries) for each in made.encode_queries(some)]
    yield from _of_tokens(wanted, texts.name, passages, asked, ef, candidates, k)


def _of_terms(texts: Texts, name: str, sparse_encoder: str, k: int) -> Iterator[Retriever]:
    """Both placements; one index of all passages, for what is right, stays open for so long."""
    given: dict[str, Sequence[Any]]
    queries: Sequence[Any]
    if name == "bm25":
        analyzer = Analyzer(stop_words="english", stemmer="english")
        given, queries = (
            {"terms": [analyzer.terms(text) for text in texts.passages]},
            [analyzer.terms(text) for text in texts.queries],
        )
    else:
        made = load_sparse_encoder(sparse_encoder)
        given, queries = (
            {"vectors": list(term_vectors(made, texts.passages))},
            list(term_vectors(made, texts.queries, queries=True)),
        )
    with tempfile.TemporaryDirectory(prefix="espnx-bench-ragx-") as folder, ExitStack() as opened:
        Postings.build(Path(folder) / name, **given)  # type: ignore[arg-type]
        whole = opened.enter_context(Postings.open(Path(folder) / name))
        for placement in PLACEMENTS:
            yield Lists(name, texts.name, given, queries, placement, k, whole)


def _of_tokens(
    wanted: Sequence[str],
    name: str,
    passages: Sequence[Encoded],
    queries: Sequence[Encoded],
    ef: int,
    candidates: int,
    k: int,
) -> Iterator[tuple[Retriever, int]]:
    if "gtr-shape" in wanted and len(passages[0].cls):
        base, asked = (
            np.stack([each.cls.numpy() for each in some]).astype(np.float32)
            for some in (passages, queries)
        )
        for each in vectors.retrievers(Vectors(name, base, asked, "ip", k), "gtr-shape", ef):
            yield each, len(base)
    if "colbert-pooled" in wanted:
        base = _of_length_1(pooled(passages))
        for each in vectors.retrievers(
            Vectors(name, base, pooled(queries), "l2", k), "colbert-pooled", ef
        ):
            yield each, len(base)
    if "colbert" in wanted:
        yield MaxSim(name, passages, queries, candidates, k), len(passages)


def _doc2vec(texts: Texts, k: int) -> Vectors:
    """Vectors of length 1, so that squared L2 orders as the cosine does, which its encoder is
    measured to need."""
    model = Doc2VecEncoder.train(texts.passages)
    base, asked = (
        model.vectors(list(some), is_query=False).numpy()
        for some in (texts.passages, texts.queries)
    )
    return Vectors(texts.name, _of_length_1(base), _of_length_1(asked), "l2", k)


def _of_length_1(rows: np.ndarray) -> np.ndarray:
    """Scales rows to length 1, and leaves out those of length 0, of texts that have no known word:
    they would be at distance 1 from everything, nearer than most, and every link of a graph would
    lead to them."""
    length = np.linalg.norm(rows.astype(np.float64), axis=1, keepdims=True)
    there = length[:, 0] > 0
    return np.ascontiguousarray(rows[there] / length[there], dtype=np.float32)


def _chunks(given: Sequence[str]) -> Iterator[list[str]]:
    for begin in range(0, len(given), _AT_ONCE):
        yield list(given[begin : begin + _AT_ONCE])
