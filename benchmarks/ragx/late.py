"""ColBERT as it is: MaxSim over all token vectors of a passage. Each device has an index of its
share; inverted lists in memory name its candidates, whose records it reads and scores."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

import espnx
from espnx.retrieval.build.documents import Document
from espnx.retrieval.encoder import Encoded
from espnx.retrieval.first_stage.pooling import MeanPooling

from .parts import Answer, Found, Part, Private, Spread, Work

_SCORE_BYTES = 8  # a float32, and the record's number
_TOLERANCE = 2e-3  # of scores from records in fp16


class MaxSim:
    """Effort: candidates of a device."""

    def __init__(
        self,
        collection: str,
        documents: Sequence[Encoded],
        queries: Sequence[Encoded],
        candidates: int,
        k: int,
    ):
        self.name, self.index, self.collection, self.effort, self.least = (
            "colbert",
            "MaxSim",
            collection,
            candidates,
            k,
        )
        self._documents, self._queries, self._k = documents, queries, k
        self._exact = [_scores(documents, query) for query in queries]

    def build(self, folder: Path, shares: Sequence[np.ndarray]) -> Spread:
        first = self._documents[0]
        parts = list[Part]()
        for i, rows in enumerate(shares):
            given = (Document(j, "", self._documents[row]) for j, row in enumerate(rows.tolist()))
            espnx.build(
                folder / str(i), given, dims=(len(first.cls), first.tokens.shape[1]), cls_weight=0.0
            )
            parts.append(_StorePart(espnx.open(folder / str(i), None), self._queries))
        return Private(parts, shares)

    def recall(self, ids: Sequence[np.ndarray]) -> float:
        """The share of passages that score as the k-th best does, but for the rounding of fp16."""
        found = 0
        for exact, each in zip(self._exact, ids, strict=True):
            limit = np.partition(exact, -self._k)[-self._k]
            found += min(self._k, int((exact[each] >= limit - _TOLERANCE * abs(limit)).sum()))
        return found / (self._k * len(self._exact))

    def problem(self, found: Sequence[Answer], k: int) -> str | None:
        """Scores that are not those of all tokens in float32."""
        for i, (exact, each) in enumerate(zip(self._exact, found, strict=True)):
            if len(set(each.ids.tolist())) != len(each.ids) or len(each.ids) != k:
                return f"query {i}: {len(each.ids)} passages, or one twice"
            if (np.abs(-each.far - exact[each.ids]) > _TOLERANCE * np.abs(exact[each.ids])).any():
                return f"query {i}: {-each.far} instead of {exact[each.ids]}"
        return None


class _StorePart:
    def __init__(self, index: espnx.Index, queries: Sequence[Encoded]):
        self._index, self._queries = index, queries

    def ask(self, effort: int, k: int) -> list[Found]:
        return [self._ask(query, effort, k) for query in self._queries]

    def _ask(self, query: Encoded, effort: int, k: int) -> Found:
        """One query alone: of several together the costs are shared evenly."""
        result = self._index.search(query, k=k, candidates=effort, prefetch_step=0)
        link_bytes = query.tokens.nbytes + query.cls.nbytes + result.reranked * _SCORE_BYTES
        work = Work(result.requests, result.bytes_moved, link_bytes, result.reranked, 1)
        return Found(
            np.array([int(hit.id) for hit in result]),
            np.array([-hit.score for hit in result]),
            work,
        )

    def close(self) -> None:
        self._index.close()


def _scores(documents: Sequence[Encoded], query: Encoded) -> np.ndarray:
    """float64 [n]: of each query token the most similar of the passage's, added up."""
    return np.array(
        [
            float((query.tokens @ each.tokens.T).amax(dim=1).sum()) if len(each.tokens) else 0.0
            for each in documents
        ]
    )


def pooled(encoded: Sequence[Encoded]) -> np.ndarray:
    """float32 [n, dim]: RAGX's ColBERT, the mean of a passage's token vectors; of length 1, or 0
    for one without tokens."""
    pooling = MeanPooling(encoded[0].tokens.shape[1])
    return np.stack([pooling.documents(each.tokens).numpy() for each in encoded])
