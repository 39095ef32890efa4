"""Passages by recipe: half of the words from Zipf's law over all terms, half from one of many topics."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

TERMS, TOPICS, TOPIC_TERMS, MEAN_WORDS, ZIPF = 200_000, 2_000, 300, 46.6, 1.05
#: Queries have about so many words of one passage, drawn by df to this power: neither all rare nor stop words.
QUERY_WORDS, QUERY_POWER = 4, -0.3
_AT_ONCE = 10_000


@dataclass(frozen=True, eq=False)
class Passages:
    """Attributes:
    words: int64: terms of all passages, one after the other.
    lengths: int64 [n]: words of each.
    """

    words: np.ndarray
    lengths: np.ndarray

    def __len__(self) -> int:
        return len(self.lengths)

    def __iter__(self) -> Iterator[list[str]]:
        """The terms of each passage."""
        at = 0
        for first in range(0, len(self), _AT_ONCE):
            counts = self.lengths[first : first + _AT_ONCE].tolist()
            terms = [f"t{word}" for word in self.words[at : at + sum(counts)].tolist()]
            at, place = at + sum(counts), 0
            for count in counts:
                yield terms[place : place + count]
                place += count


def make_passages(n: int, seed: int) -> Passages:
    """The same for the same arguments."""
    random = np.random.default_rng(seed)
    lengths = np.maximum(4, random.poisson(MEAN_WORDS, n))
    total = int(lengths.sum())
    topics = random.integers(0, TERMS, (TOPICS, TOPIC_TERMS))
    of_all = np.searchsorted(_zipf(TERMS), random.random(total)).clip(max=TERMS - 1)
    place = np.searchsorted(_zipf(TOPIC_TERMS), random.random(total)).clip(max=TOPIC_TERMS - 1)
    of_topic = topics[np.repeat(random.integers(0, TOPICS, n), lengths), place]
    return Passages(np.where(random.random(total) < 0.5, of_all, of_topic), lengths)


def _zipf(n: int) -> np.ndarray:
    share = np.cumsum(1 / np.arange(1, n + 1) ** ZIPF)
    return share / share[-1]


def make_queries(passages: Passages, n: int, seed: int) -> list[list[str]]:
    """Words of a passage each, all different."""
    random = np.random.default_rng(seed + 1)
    begins = np.concatenate([[0], np.cumsum(passages.lengths)])
    df = np.bincount(passages.words, minlength=TERMS).astype(np.float64)
    found = []
    for passage in random.integers(0, len(passages), n).tolist():
        words = np.unique(passages.words[begins[passage] : begins[passage + 1]])
        weight = df[words] ** QUERY_POWER
        count = min(len(words), max(1, int(random.poisson(QUERY_WORDS))))
        found.append([f"t{word}" for word in random.choice(words, count, replace=False, p=weight / weight.sum()).tolist()])
    return found
