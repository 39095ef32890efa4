"""Passages by recipe: half of the words from Zipf's law over all terms, half from one of many
topics. The law's first ranks are left out, as by a list of stop words: a million passages have 39.9
different terms each, of 46.6 words, and queries meet about 25,700 postings."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

TERMS, TOPICS, TOPIC_TERMS, MEAN_WORDS, ZIPF = 200_000, 2_000, 300, 46.6, 1.05
#: Ranks of Zipf's law that no passage has.
STOP_RANKS = 160
#: Queries have about so many words of one passage, drawn by how many passages have them to this
#: power: rather the frequent ones.
QUERY_WORDS, QUERY_POWER = 4, 0.55
_AT_ONCE = 10_000


@dataclass(frozen=True, eq=False)
class Passages:
    """Attributes:
    words: int32: terms of all passages, one after the other.
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
    topics = random.integers(0, TERMS, (TOPICS, TOPIC_TERMS)).astype(np.int32)
    of_all = _drawn(random, _zipf(TERMS, STOP_RANKS), total)
    place = _drawn(random, _zipf(TOPIC_TERMS), total)
    of_topic = topics[np.repeat(random.integers(0, TOPICS, n), lengths), place]
    return Passages(np.where(random.random(total) < 0.5, of_all, of_topic), lengths)


def _zipf(n: int, left_out: int = 0) -> np.ndarray:
    share = np.cumsum(1 / np.arange(left_out + 1, left_out + n + 1) ** ZIPF)
    return share / share[-1]


def _drawn(random: np.random.Generator, share: np.ndarray, count: int) -> np.ndarray:
    """int32 [count]: ranks by a law, whose numbers of ten million passages are gigabytes."""
    return np.searchsorted(share, random.random(count)).clip(max=len(share) - 1).astype(np.int32)


def df_of(passages: Passages) -> np.ndarray:
    """int64 [terms]: how many passages have each."""
    df = np.zeros(TERMS, np.int64)
    begins = np.concatenate([[0], np.cumsum(passages.lengths)])
    for first in range(0, len(passages), _AT_ONCE):
        lengths = passages.lengths[first : first + _AT_ONCE]
        words = passages.words[begins[first] : begins[first + len(lengths)]]
        pairs = np.unique(np.repeat(np.arange(len(lengths)), lengths) * TERMS + words)
        df += np.bincount(pairs % TERMS, minlength=TERMS)
    return df


def make_queries(passages: Passages, n: int, seed: int, df: np.ndarray) -> list[list[str]]:
    """Words of a passage each, all different. `df`: `df_of` the passages."""
    random = np.random.default_rng(seed + 1)
    begins = np.concatenate([[0], np.cumsum(passages.lengths)])
    found = []
    for passage in random.integers(0, len(passages), n).tolist():
        words = np.unique(passages.words[begins[passage] : begins[passage + 1]])
        weight = df[words].astype(np.float64) ** QUERY_POWER
        count = min(len(words), max(1, int(random.poisson(QUERY_WORDS))))
        found.append(
            [
                f"t{word}"
                for word in random.choice(
                    words, count, replace=False, p=weight / weight.sum()
                ).tolist()
            ]
        )
    return found


def postings_of(queries: Sequence[list[str]], df: np.ndarray) -> np.ndarray:
    """int64 [n]: how many postings the lists of each query have."""
    return np.array([df[[int(term[1:]) for term in query]].sum() for query in queries], np.int64)
