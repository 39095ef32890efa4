"""Corpora of any size for the retrieval benchmark: vectors made chunk by chunk from a seed, the
same on every machine.

`Mixture` draws from topics; base.py expands real documents. Nothing larger than a chunk is held.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from espnx.retrieval.build.documents import Document
from espnx.retrieval.encoder import Encoded

CHUNK_DOCUMENTS = 4096
QUERY_TOKENS = 32
#: Norm of the noise that makes a query of a document, against a vector of norm 1: its CLS, its
#: tokens.
QUERY_CLS_NOISE, QUERY_TOKEN_NOISE = 0.5, 0.3
_QUERY_CHUNKS = 32
_TOKENS_MEAN, _TOKENS_SHAPE, _TOKENS_LEAST, _TOKENS_MOST = 68.0, 6.0, 12, 200
_WORDS, _TOPIC_WORDS, _TOPIC_SHARE, _WORD_NOISE = 30_000, 64, 0.6, 0.35
# What each random stream is for: a stream is seeded by (seed, purpose, chunk).
_CENTRES, _CHUNK, _QUERIES, _LENGTHS = range(4)


@dataclass(frozen=True)
class Chunk:
    """Consecutive documents. cls: float32 [m, d_cls]. tokens: float32 [sum of counts, dim]. counts:
    int64 [m]."""

    cls: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray

    def encoded(self) -> Iterator[Encoded]:
        cls, tokens = torch.from_numpy(self.cls), torch.from_numpy(self.tokens)
        ends = np.cumsum(self.counts)
        for i, (begin, end) in enumerate(
            zip((ends - self.counts).tolist(), ends.tolist(), strict=True)
        ):
            yield Encoded(cls[i], tokens[begin:end])


class Corpus(Protocol):
    """Documents by number, in chunks of `CHUNK_DOCUMENTS`.

    Attributes:
        key: names this corpus among all others: whatever changes a vector changes it. Fit for a
            directory.
        count: documents.
        d_cls, dim: of their vectors.
    """

    @property
    def key(self) -> str: ...

    @property
    def count(self) -> int: ...

    @property
    def d_cls(self) -> int: ...

    @property
    def dim(self) -> int: ...

    def chunk(self, number: int) -> Chunk: ...

    def cls(self, number: int) -> np.ndarray:
        """The CLS vectors of a chunk, without the cost of its tokens."""


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of norm 1, float32."""
    return vectors / np.maximum(np.linalg.norm(vectors, axis=-1, keepdims=True), 1e-12).astype(
        np.float32
    )


def stream(seed: int, purpose: int, number: int = 0) -> np.random.Generator:
    return np.random.default_rng((seed, purpose, number))


def _normal(rng: np.random.Generator, rows: int, dim: int, norm: float) -> np.ndarray:
    """Noise of about that norm a row."""
    return rng.standard_normal((rows, dim), dtype=np.float32) * np.float32(norm / dim**0.5)


@dataclass(frozen=True)
class MixtureRecipe:
    """Topics whose centres lie near a low-dimensional subspace, as embeddings of real text do.

    A centre is the image, scaled to norm 1, of a standard normal vector of `latent` dimensions
    under one fixed random map into the d_cls dimensions of a CLS vector. A document's CLS vector is
    its topic's centre plus isotropic noise of norm `spread`, scaled to norm 1. More latent
    dimensions and more spread make topics overlap, and the first stage scan more lists.
    """

    topics: int
    latent: int
    spread: float


#: B is as clustered as a tidy collection. C needs a sixth of the lists for 95 % of the candidates,
#: more than MS MARCO's tenth.
MIXTURES = {"B": MixtureRecipe(20_000, 10, 0.6), "C": MixtureRecipe(50_000, 24, 1.0)}


class Mixture:
    """Documents drawn from topics.

    The topic of a document is uniform. Its length is Gamma distributed (shape 6, mean 68, cut to
    12..200). A token is, in 6 cases of 10, one of its topic's 64 words, else any of 30,000 words
    with frequency like 1/rank; its vector is the word's (uniform on the sphere) plus noise of norm
    0.35, scaled to norm 1.
    """

    d_cls, dim = 128, 32

    def __init__(self, name: str, count: int, recipe: MixtureRecipe, seed: int = 1):
        self.count, self._seed, self._recipe = count, seed, recipe
        shape = f"topics{recipe.topics}x{recipe.latent}-spread{recipe.spread:g}"
        self.key = f"{name}-{count}-{shape}-seed{seed}"
        rng = stream(seed, _CENTRES)
        map_ = rng.standard_normal((recipe.latent, self.d_cls), dtype=np.float32)
        self._centres = unit(
            rng.standard_normal((recipe.topics, recipe.latent), dtype=np.float32) @ map_
        )
        self._words = unit(rng.standard_normal((_WORDS, self.dim), dtype=np.float32))

    def chunk(self, number: int) -> Chunk:
        rng = stream(self._seed, _CHUNK, number)
        topics, cls = self._topics_and_cls(number, rng)
        counts = lengths(self._seed, number)[: len(topics)]
        total = int(counts.sum())
        # log-uniform: frequency like 1/rank
        common = np.minimum((_WORDS ** rng.random(total)).astype(np.int64), _WORDS - 1)
        own = np.repeat(topics * _TOPIC_WORDS * 7919, counts) + 7919 * rng.integers(
            _TOPIC_WORDS, size=total
        )
        words = np.where(rng.random(total) < _TOPIC_SHARE, own % _WORDS, common)
        return Chunk(
            cls, unit(self._words[words] + _normal(rng, total, self.dim, _WORD_NOISE)), counts
        )

    def cls(self, number: int) -> np.ndarray:
        return self._topics_and_cls(number, stream(self._seed, _CHUNK, number))[1]

    def _topics_and_cls(
        self, number: int, rng: np.random.Generator
    ) -> tuple[np.ndarray, np.ndarray]:
        rows = min(CHUNK_DOCUMENTS, self.count - number * CHUNK_DOCUMENTS)
        topics = rng.integers(self._recipe.topics, size=CHUNK_DOCUMENTS)[:rows]
        return topics, unit(
            self._centres[topics] + _normal(rng, rows, self.d_cls, self._recipe.spread)
        )


def lengths(seed: int, chunk: int) -> np.ndarray:
    """int64 [CHUNK_DOCUMENTS]: tokens of the documents of a chunk of a mixture."""
    drawn = stream(seed, _LENGTHS, chunk).gamma(
        _TOKENS_SHAPE, _TOKENS_MEAN / _TOKENS_SHAPE, size=CHUNK_DOCUMENTS
    )
    return np.clip(np.round(drawn), _TOKENS_LEAST, _TOKENS_MOST).astype(np.int64)


def chunks(corpus: Corpus) -> Iterator[tuple[int, Chunk]]:
    """(number of its first document, chunk) of all chunks."""
    for number in range(-(-corpus.count // CHUNK_DOCUMENTS)):
        yield number * CHUNK_DOCUMENTS, corpus.chunk(number)


def chunks_of_cls(corpus: Corpus) -> Iterator[np.ndarray]:
    """float32 [m, d_cls] of all chunks, in order."""
    for number in range(-(-corpus.count // CHUNK_DOCUMENTS)):
        yield corpus.cls(number)


class Documents:
    """What `espnx.build` takes: ids are the documents' numbers."""

    def __init__(self, corpus: Corpus):
        self._corpus = corpus

    def __len__(self) -> int:
        return self._corpus.count

    def __iter__(self) -> Iterator[Document]:
        for first, chunk in chunks(self._corpus):
            for number, vectors in enumerate(chunk.encoded(), first):
                yield Document(number, f"document {number} of {self._corpus.key}", vectors)


def make_queries(corpus: Corpus, count: int, seed: int = 2) -> list[Encoded]:
    """Queries, each made of one document: its CLS vector with noise, and 32 of its tokens (drawn
    with replacement) with noise."""
    rng = stream(seed, _QUERIES)
    total_chunks = -(-corpus.count // CHUNK_DOCUMENTS)
    used = np.sort(rng.choice(total_chunks, size=min(_QUERY_CHUNKS, total_chunks), replace=False))
    held = {int(number): corpus.chunk(int(number)) for number in used}
    starts = {number: np.cumsum(chunk.counts) - chunk.counts for number, chunk in held.items()}
    made = []
    for _ in range(count):
        number = int(rng.choice(used))
        chunk = held[number]
        document = int(rng.integers(len(chunk.counts)))
        cls = unit(chunk.cls[document] + _normal(rng, 1, corpus.d_cls, QUERY_CLS_NOISE)[0])
        rows = starts[number][document] + rng.integers(
            max(1, chunk.counts[document]), size=QUERY_TOKENS
        )
        tokens = unit(
            chunk.tokens[rows] + _normal(rng, QUERY_TOKENS, corpus.dim, QUERY_TOKEN_NOISE)
        )
        made.append(Encoded(torch.from_numpy(cls), torch.from_numpy(tokens)))
    return made
