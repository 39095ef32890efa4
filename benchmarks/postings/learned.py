"""Sparse vectors by recipe: real ones of real texts, and as many as are wanted, mixed of those.

A real model's vectors of some thousand texts have what makes learned vectors hard for posting
lists, long queries and flat weights, but are too few for lists that matter. A mixed passage has
terms of one to three real ones, so that it has about as many as they, and half of its weights are
those that its terms have somewhere else.
"""

from __future__ import annotations

import ast
import json
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from espnx.postings import CsrArrays

#: Words of a text that is encoded; shorter ends are left out.
WORDS, WORDS_MIN = 80, 20
#: Of one, two and three real vectors in a mixed one; share of its weights that are drawn from their
#: term's others.
SHARES, REDRAWN = (0.4, 0.4, 0.2), 0.5
_AT_ONCE = 4096


@dataclass(frozen=True, eq=False)
class Vectors:
    """Attributes: begins: int64 [n + 1]. terms: int64, weights: float32: of all, one vector after
    the other."""

    begins: np.ndarray
    terms: np.ndarray
    weights: np.ndarray

    def __len__(self) -> int:
        return len(self.begins) - 1

    @property
    def rows(self) -> CsrArrays:
        return CsrArrays(self.begins, self.terms, self.weights)

    def save(self, path: Path) -> None:
        np.savez(path, begins=self.begins, terms=self.terms, weights=self.weights)

    @classmethod
    def load(cls, path: Path) -> Vectors:
        with np.load(path) as found:
            return cls(found["begins"], found["terms"], found["weights"])

    @classmethod
    def of(cls, encoded: Sequence[Any]) -> Vectors:
        """Takes `SparseVector` objects."""
        counts = [len(each.terms) for each in encoded]
        terms, weights = (
            np.concatenate([np.asarray(getattr(each, name)) for each in encoded])
            for name in ("terms", "weights")
        )
        return cls(
            np.concatenate([[0], np.cumsum(counts)]),
            terms.astype(np.int64),
            weights.astype(np.float32),
        )


def windows(text: str) -> list[str]:
    """Its words, so many at a time."""
    words = text.split()
    parts = (words[first : first + WORDS] for first in range(0, len(words), WORDS))
    return [" ".join(part) for part in parts if len(part) >= WORDS_MIN]


def docstrings() -> Iterator[str]:
    """Yields docstrings of the installed packages, in the order of their paths."""
    for path in sorted(Path(sysconfig.get_path("purelib")).rglob("*.py")):
        try:
            tree = ast.parse(path.read_bytes())
        except (SyntaxError, ValueError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (
                text := ast.get_docstring(node)
            ):
                yield text


def real_texts(collection: Path | None, count: int) -> tuple[list[str], list[str]]:
    """(texts, queries): of a folder in BEIR's form all passages and queries, and of docstrings as
    many texts as are still missing, one in four of those that there are. Without a folder, first
    lines of docstrings that no text has are the queries."""
    texts: list[str] = []
    queries: list[str] = []
    if collection is not None:
        for line in (collection / "corpus.jsonl").read_text().splitlines():
            texts += windows(json.loads(line)["text"])
        queries = [
            json.loads(line)["text"]
            for line in (collection / "queries.jsonl").read_text().splitlines()
        ]
    seen = set[str]()
    for number, text in enumerate(docstrings()):
        if len(texts) >= count:
            break
        head = text.partition("\n")[0]
        if collection is None and number % 4 == 2 and len(head.split()) > 5:
            queries.append(head)
        elif number % 4 == 0 and text not in seen:
            texts += windows(text)[:1]
            seen.add(text)
    return texts[:count], queries


def mixed(real: Vectors, n: int, seed: int) -> Vectors:
    """So many vectors, mixed of real ones; the same for the same arguments."""
    random = np.random.default_rng(seed)
    by_term = np.argsort(real.terms, kind="stable")
    n_terms = int(real.terms.max()) + 1
    first = np.searchsorted(real.terms[by_term], np.arange(n_terms + 1))
    parts = [
        _mixed_part(real, min(_AT_ONCE, n - done), random, by_term, first)
        for done in range(0, n, _AT_ONCE)
    ]
    counts = np.concatenate([part[0] for part in parts])
    begins = np.concatenate([[0], np.cumsum(counts)])
    return Vectors(
        begins,
        np.concatenate([part[1] for part in parts]),
        np.concatenate([part[2] for part in parts]),
    )


def _mixed_part(
    real: Vectors, n: int, random: np.random.Generator, by_term: np.ndarray, first: np.ndarray
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(counts, terms, weights) of some."""
    n_sources = random.choice(len(SHARES), n, p=SHARES) + 1
    sources = random.integers(0, len(real), int(n_sources.sum()))
    sizes = np.diff(real.begins)[sources]
    ends = np.cumsum(sizes)
    entries = np.arange(int(ends[-1])) + np.repeat(real.begins[sources] - (ends - sizes), sizes)
    record = np.repeat(np.repeat(np.arange(n), n_sources), sizes)
    kept = random.random(len(entries)) < (1 / n_sources)[record]
    entries, record = entries[kept], record[kept]
    terms, weights = real.terms[entries], real.weights[entries]
    redrawn = random.random(len(entries)) < REDRAWN
    low, high = first[terms[redrawn]], first[terms[redrawn] + 1]
    weights[redrawn] = real.weights[
        by_term[low + (random.random(len(low)) * (high - low)).astype(np.int64)]
    ]
    order = np.lexsort((-weights, terms, record))  # of a term that several have, the largest weight
    record, terms, weights = record[order], terms[order], weights[order]
    single = np.concatenate([[True], (record[1:] != record[:-1]) | (terms[1:] != terms[:-1])])
    return np.bincount(record[single], minlength=n), terms[single], weights[single]
