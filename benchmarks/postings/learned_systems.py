"""Sparse vectors: whole lists and two steps of espnx from SSD, SINDI and Seismic in memory. Each
asks the same queries one at a time."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from espnx.postings import Postings

from .learned import Vectors
from .names import WHOLE
from .systems import Asked, files_of

#: A system that finds less of the best is broken, whatever it is good at.
RECALL_MIN = 0.5
#: SINDI: vectors that are re-ranked; share of the light terms of a query that it leaves out.
_SINDI_CANDIDATES, _SINDI_PRUNED = 100, 0.0
#: Seismic: terms of a query that give candidates, and how close to the best a block must be.
_SEISMIC_CUT, _SEISMIC_FACTOR = 10, 0.7


class Learned(Asked):
    """A system whose queries are weights of terms, by number. Some do not find all that is best:
    what share is in the rows."""

    is_exact = False

    def verify(self) -> str | None:
        found = [self.numbers(self.ask(query)[0]) for query in self.queries]
        self._recall = recall(found, list(self.expected[0]))
        return None if self._recall >= RECALL_MIN else f"recall@{self.k} {self._recall:.3f}"

    def facts(self) -> dict[str, float]:
        return {**super().facts(), "recall": self._recall}


def recall(found: Sequence[np.ndarray], best: Sequence[np.ndarray]) -> float:
    """The share that was found of the best records of all queries; -1 is no record."""
    known = [set(each[each >= 0].tolist()) for each in best]
    hits = sum(
        len(known_here & set(here.tolist())) for here, known_here in zip(found, known, strict=True)
    )
    return hits / max(1, sum(map(len, known)))


class EspnxLearned(Learned):
    """One of espnx's ways to search; of two steps how many terms give candidates, and how many, are
    in the name."""

    group = "espnx"
    requested_path = "auto"

    def __init__(self, name: str, folder: Path, *asked: Any):
        super().__init__(*asked)
        self.name, self._folder = name, folder
        self._postings = Postings.open(folder)
        self.effective_path = self._postings.path_of_reads
        self._found: Any = None
        words = name.replace(",", "").split()
        self._two_steps = (
            None
            if name == WHOLE
            else {
                "whole_terms": int(words[2]),
                "query_terms": int(words[4]),
                "candidates": int(words[6]),
            }
        )

    def files(self) -> list[Path]:
        return files_of(self._folder)

    def ask(self, query: Any) -> tuple[np.ndarray, np.ndarray]:
        if self._two_steps is None:
            self._found = self._postings.search([query], self.k, threads=1)
        else:
            self._found = self._postings.search_two_step(
                [query], self.k, threads=1, **self._two_steps
            )
        return self._found.numbers[0], self._found.scores[0]

    def verify(self) -> str | None:
        problem = super().verify()
        # a batch would read ahead into more memory
        whole = [self._postings.search([query], self.k, threads=1) for query in self.queries]
        own = [self.ask(query) for query in self.queries]
        self._recall_of_whole = recall(
            [numbers for numbers, _ in own], [each.numbers[0] for each in whole]
        )
        for (numbers, scores), all_lists in zip(own, whole, strict=True):
            best, exact = all_lists.numbers[0], all_lists.scores[0]
            of_number = dict(zip(best.tolist(), exact.tolist(), strict=True))
            if any(
                of_number.get(number, score) != score
                for number, score in zip(numbers.tolist(), scores.tolist(), strict=True)
            ):
                return "a score is not that of the whole lists"
        return problem

    def costs(self) -> tuple[int, int]:
        return int(self._found.requests[0]), int(self._found.bytes_asked[0])

    def facts(self) -> dict[str, float]:
        return {
            **super().facts(),
            "resident_bytes": float(self._postings.memory_bytes),
            "recall_of_whole": self._recall_of_whole,
        }

    def close(self) -> None:
        self._postings.close()


class InMemory(Learned):
    """What needs its index in memory."""

    requested_path = effective_path = "memory"
    cache_state = "warm"

    def __init__(self, folder: Path, *asked: Any):
        super().__init__(*asked)
        self._path = folder

    def files(self) -> list[Path]:
        return files_of(self._path)


class Sindi(InMemory):
    """VSAG's SINDI, with its vectors kept for exact scores."""

    name = group = "sindi"

    def __init__(self, *args: Any):
        super().__init__(*args)
        import pyvsag

        self._index = pyvsag.Index("sindi", (self._path / "options").read_text())
        self._index.load(str(self._path / "index"))
        self._search = json.dumps(
            {"sindi": {"query_prune_ratio": _SINDI_PRUNED, "n_candidate": _SINDI_CANDIDATES}}
        )

    def ask(self, query: Any) -> tuple[np.ndarray, np.ndarray]:
        terms, weights = (
            np.fromiter(map(int, query), np.uint32, len(query)),
            np.fromiter(query.values(), np.float32, len(query)),
        )
        numbers, far = self._index.knn_search(
            np.array([0, len(terms)], np.uint32), terms, weights, self.k, self._search
        )
        return numbers[0], -far[0]


def _sindi_options(longest: int, n_terms: int) -> str:
    """Options from VSAG's guide: the pruned index with quantised lists, which re-ranks by vectors
    in float32. `longest`: terms of a vector."""
    inner = {
        "use_reorder": True,
        "use_quantization": True,
        "term_id_limit": n_terms,
        "doc_prune_ratio": 0.4,
        "window_size": 50_000,
    }
    return json.dumps(
        {"dtype": "sparse", "dim": longest, "metric_type": "ip", "index_param": inner}
    )


class Seismic(InMemory):
    """Seismic, as its package says."""

    name = group = "seismic"

    def __init__(self, *args: Any):
        super().__init__(*args)
        from seismic import SeismicIndex, get_seismic_string

        self._index = SeismicIndex.load(str(self._path / "index.index.seismic"))
        self._type = get_seismic_string()

    def ask(self, query: Any) -> tuple[Any, np.ndarray]:
        terms, weights = (
            np.array(list(query), self._type),
            np.fromiter(query.values(), np.float32, len(query)),
        )
        hits = self._index.search(
            "q", terms, weights, k=self.k, query_cut=_SEISMIC_CUT, heap_factor=_SEISMIC_FACTOR
        )
        return [name for _, _, name in hits], np.array([score for _, score, _ in hits], np.float32)

    def numbers(self, found: Any) -> np.ndarray:
        return np.array([int(name) for name in found], np.int64)


def build_learned(name: str, folder: Path) -> None:
    """The files of a system of `LEARNED`, from ``vectors.npz`` in the folder."""
    vectors = Vectors.load(folder / "vectors.npz")
    made: Mapping[str, Callable[[Vectors, Path], None]] = {
        "splade": _build_espnx,
        "sindi": _build_sindi,
        "seismic": _build_seismic,
    }
    made[name](vectors, folder / name)


def _build_espnx(vectors: Vectors, path: Path) -> None:
    Postings.build(path, vectors=vectors.rows)


def _build_sindi(vectors: Vectors, path: Path) -> None:
    import pyvsag

    options = _sindi_options(int(np.diff(vectors.begins).max()), int(vectors.terms.max()) + 1)
    index = pyvsag.Index("sindi", options)
    index.build(
        index_pointers=vectors.begins.astype(np.uint32),
        indices=vectors.terms.astype(np.uint32),
        values=vectors.weights,
        ids=np.arange(len(vectors), dtype=np.int64),
    )
    path.mkdir()
    index.save(str(path / "index"))
    (path / "options").write_text(options)


def _build_seismic(vectors: Vectors, path: Path) -> None:
    from seismic import SeismicDataset, SeismicIndex, get_seismic_string

    dataset, kind = SeismicDataset(), get_seismic_string()
    begins = vectors.begins.tolist()
    for number in range(len(vectors)):
        part = slice(begins[number], begins[number + 1])
        dataset.add_document(str(number), vectors.terms[part].astype(kind), vectors.weights[part])
    path.mkdir()
    # with a suffix of its own
    SeismicIndex.build_from_dataset(dataset, num_threads=1).save(str(path / "index"))


def open_learned(name: str, folder: Path, *asked: Any) -> Learned:
    """Opens a system whose files are there."""
    if name in ("sindi", "seismic"):
        return (Sindi if name == "sindi" else Seismic)(folder / name, *asked)
    return EspnxLearned(name, folder / "splade", *asked)
