"""The indexes of all systems in a folder, built there once, and the processes that are asked: one
for each system, its memory limited."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from espnx.errors import InvalidInputError
from espnx.postings import BM25, Postings
from espnx.postings.stored.lists import read_lists
from espnx.postings.stored.terms import hashes_of

from ..harness.processes import Worker, Workers
from ..harness.registry import Say
from ..harness.runner import Sample
from ..machine.cgroup import memory_group
from .corpus import df_of, make_passages, make_queries, postings_of
from .systems import FTS5_RULE, RULE

_JOB = "job.json"


class Folder:
    """Indexes below a folder, with what was asked of them: made where they are not there.

    Args:
        folder: an empty one, or that of a run with the same job.
        job: what the content depends on.
        make: writes data and ``queries.json``, and returns what there is to say of them.

    Raises InvalidInputError for a folder of another job, or with something else.
    """

    def __init__(
        self,
        folder: Path,
        job: Mapping[str, Any],
        make: Callable[[Path], Mapping[str, float]],
        say: Say,
    ):
        self.folder, self._say = folder, say
        if not (folder / _JOB).exists():
            if any(folder.iterdir()):
                raise InvalidInputError(
                    f"--indexes {folder}",
                    got="a folder with something else",
                    expected="an empty one, or an old one",
                )
            facts = make(folder)
            (folder / _JOB).write_text(json.dumps({"job": job, "facts": facts}))
        made = json.loads((folder / _JOB).read_text())
        if made["job"] != job:
            raise InvalidInputError(
                f"--indexes {folder}", got=made["job"], expected=job, fix="name another folder"
            )
        self.facts: Mapping[str, float] = made["facts"]
        self.queries: list[Any] = json.loads((folder / "queries.json").read_text())

    def build(self, indexes: Iterable[str]) -> None:
        """Those that are not there, in a process of their own."""
        wanted = [
            name for name in dict.fromkeys(indexes) if not (self.folder / f"{name}.built").exists()
        ]
        if not wanted:
            return
        with Worker("postings", "builder") as worker:
            for index in wanted:
                for left in self.folder.glob(f"{index}*"):
                    shutil.rmtree(left) if left.is_dir() else left.unlink()
                self._say(f"building {index}")
                worker.ask("build", index=index, folder=str(self.folder))
                (self.folder / f"{index}.built").touch()


class Indexes(Folder):
    """Passages by recipe, their queries and indexes. `n`, `n_queries`, `seed`: of passages and
    queries."""

    def __init__(self, folder: Path, n: int, n_queries: int, seed: int, say: Say):
        def make(folder: Path) -> Mapping[str, float]:
            say(f"making {n:,} passages")
            passages = make_passages(n, seed)
            df = df_of(passages)
            queries = make_queries(passages, n_queries, seed, df)
            np.save(folder / "words.npy", passages.words)
            np.save(folder / "lengths.npy", passages.lengths)
            (folder / "queries.json").write_text(json.dumps(queries))
            met = postings_of(queries, df)
            return {
                "query_postings_mean": float(met.mean()),
                "query_postings_p95": float(np.percentile(met, 95)),
            }

        super().__init__(folder, {"passages": n, "queries": n_queries, "seed": seed}, make, say)

    def expect(self, k: int) -> None:
        """Writes what must be found, by each of two rules: by the lists decoded whole and summed in
        an array of all passages, without a scan, a window or a threshold."""
        for name, rule in (("expected", RULE), ("expected-fts5", FTS5_RULE)):
            numbers, scores = self._best(k, rule)
            np.savez(self.folder / name, numbers=numbers, scores=scores)

    def _best(self, k: int, rule: BM25) -> tuple[np.ndarray, np.ndarray]:
        n = len(self.queries)
        scores, numbers = np.full((n, k), -np.inf, np.float32), np.full((n, k), -1, np.int64)
        with Postings.open(self.folder / "espnx") as postings:
            (segment,) = postings.searcher.collection.segments
            lengths = segment.length_table[segment.codes.numpy()]
            norms = rule.norms(lengths, postings.searcher.collection.average_length)
            terms = sorted({term.encode() for query in self.queries for term in query})
            wanted, held = hashes_of(terms), segment.dictionary.hashes
            places = np.minimum(np.searchsorted(held, wanted), len(held) - 1)
            numbered = dict(
                zip(terms, np.where(held[places] == wanted, places, -1).tolist(), strict=True)
            )
            for row, query in enumerate(self.queries):
                sums = np.zeros(len(postings), np.float32)
                for term in (numbered[each.encode()] for each in query):
                    if term >= 0:
                        part = next(read_lists(postings.searcher.engine, segment, term, term + 1))
                        idf = np.float64(np.float32(rule.idf(len(part.records), len(postings))))
                        sums[part.records] += (
                            idf * rule.part(part.values, norms[part.records])
                        ).astype(np.float32)
                there = np.flatnonzero(sums > 0)
                best = there[np.lexsort((there, -sums[there]))[:k]]
                scores[row, : len(best)], numbers[row, : len(best)] = sums[best], best
        return numbers, scores


class Remote:
    """A system in a process of its own, as `compare` runs it."""

    def __init__(self, name: str, worker: Worker, opened: Mapping[str, Any]):
        self.name = self.group = name
        self._worker = worker
        self.requested_path, self.effective_path = (
            opened["requested_path"],
            opened["effective_path"],
        )

    def verify(self) -> str | None:
        problem: str | None = self._worker.ask("verify")["problem"]
        return problem

    def prepare(self, turn: int) -> str:
        return str(self._worker.ask("prepare", turn=turn)["cache"])

    def run(self) -> Sample:
        return Sample(**self._worker.ask("run"))

    def close(self) -> None:
        self._worker.close()


class Fleet(Workers):
    """The processes of some systems, opened. A context manager; all end with it.

    Args:
        limit_bytes: memory of each, the page cache of its reads included; None for no limit.
        unlimited: systems that have no limit.
    """

    def __init__(
        self,
        indexes: Folder,
        names: Sequence[str],
        k: int,
        limit_bytes: int | None,
        unlimited: Sequence[str] = (),
    ):
        super().__init__()
        self.systems: list[Remote] = []
        with ExitStack() as stack:
            for name in names:  # they start side by side: most of that time is Python's imports
                group = (
                    stack.enter_context(memory_group(name.replace(" ", "-"), limit_bytes))
                    if limit_bytes and name not in unlimited
                    else None
                )
                self._workers[name] = stack.enter_context(Worker("postings", name, group))
            for name, worker in self._workers.items():
                expected = "expected-fts5" if name == "fts5" else "expected"
                opened = worker.ask(
                    "open", name=name, folder=str(indexes.folder), k=k, expected=expected
                )
                self.systems.append(Remote(name, worker, opened))
            self._stack = stack.pop_all()
