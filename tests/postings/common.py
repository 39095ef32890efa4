"""Small corpora of words, and BM25 in plain NumPy beside what is tested."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import numpy as np

from espnx.postings import BM25
from espnx.postings.stored.segment import Segment
from espnx.postings.stored.terms import hash_of

WORDS = [f"w{i}" for i in range(2000)]


def corpus(n: int, seed: int = 0, longest: int = 60) -> list[list[str]]:
    """Records of words whose frequencies follow Zipf's law."""
    random = np.random.default_rng(seed)
    share = 1 / np.arange(1, len(WORDS) + 1) ** 1.05
    share /= share.sum()
    return [
        [WORDS[i] for i in random.choice(len(WORDS), random.integers(1, longest), p=share)]
        for _ in range(n)
    ]


def numbers_of(segment: Segment, terms: Sequence[str]) -> np.ndarray:
    """int64: in a segment that has all of these terms."""
    numbers = {hash_: number for number, hash_ in enumerate(segment.dictionary.hashes.tolist())}
    return np.array([numbers[hash_of(term.encode())] for term in terms], np.int64)


def plain_absent(rule: BM25, idf: float) -> np.float32:
    """What a term gives to records that do not have it."""
    if rule.variant == "bm25l":
        return np.float32(idf * ((rule.k1 + 1) * rule.delta / (rule.k1 + rule.delta)))
    return np.float32(idf * rule.delta if rule.variant == "bm25+" else 0.0)


def plain_bm25(
    documents: Sequence[Sequence[str]], query: Sequence[str], rule: BM25
) -> tuple[np.ndarray, np.ndarray]:
    """(numbers, scores float32) of all records that have a term of the query, best first, of equal
    ones the lower number first."""
    n = len(documents)
    counts = [Counter(document) for document in documents]
    lengths = np.array([len(document) for document in documents], np.int64)
    norms = rule.norms(lengths, lengths.sum() / max(1, n))
    sums, has, absent = np.zeros(n, np.float32), np.zeros(n, bool), []
    for term in query:
        with_term = np.array([i for i in range(n) if term in counts[i]], np.int64)
        if not len(with_term):
            continue
        idf = rule.idf(len(with_term), n)
        absent.append(plain_absent(rule, idf))
        tf = np.array([counts[i][term] for i in with_term])
        part = np.float64(np.float32(idf)) * rule.part(tf, norms[with_term]) - np.float64(
            absent[-1]
        )
        sums[with_term] += part.astype(np.float32)
        has[with_term] = True
    sums += np.array(absent, np.float32).sum()
    numbers = np.flatnonzero(has)
    numbers = numbers[np.lexsort((numbers, -sums[numbers]))]
    return numbers, sums[numbers]
