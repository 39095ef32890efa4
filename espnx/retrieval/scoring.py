"""Scores of the records of one tier for the queries of one wave, asked for bit by bit while the first stage goes on.

A record that several queries want is read once. What was asked for before is not asked for again, whatever the first stage says later.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future as Task
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import dataclass, field

import numpy as np
import torch

from ..storage.engine import Future
from .hot import HotDocuments
from .rerank import Pairs, QueryVectors, Scored, score_arrivals, score_pairs
from .tier import Tier


@dataclass
class _Read:
    """One read under way: its records, and who wants them."""

    future: Future
    numbers: np.ndarray
    pairs: Pairs
    task: Task[Scored] | None
    later: list[Pairs] = field(default_factory=list)  # wanted by further queries after it had begun


@dataclass
class Costs:
    """What the reads of a wave cost."""

    bytes_asked: int = 0
    bytes_moved: int = 0
    requests: int = 0
    maxsim_s: float = 0.0
    waited_s: float = 0.0
    hot: int = 0
    finished_at: float = 0.0

    def add(self, other: Costs) -> None:
        self.bytes_asked += other.bytes_asked
        self.bytes_moved += other.bytes_moved
        self.requests += other.requests
        self.maxsim_s += other.maxsim_s
        self.waited_s += other.waited_s
        self.hot += other.hot
        self.finished_at = max(self.finished_at, other.finished_at)


class TierScoring:
    """See the module. `ask` as often as wanted, then `finish` once; `cancel` instead of it after a failure.

    Args:
        tier: whose records are scored.
        queries: of the wave.
        workers: score the reads that are not urgent.
        gap_bytes, deadline_s: of the reads.
        hot: records in memory that need no read.
    """

    def __init__(
        self,
        tier: Tier,
        queries: list[QueryVectors],
        workers: ThreadPoolExecutor,
        device: torch.device,
        *,
        gap_bytes: int,
        deadline_s: float,
        hot: HotDocuments | None = None,
    ):
        self._tier, self._queries, self._workers, self._device, self._hot = tier, queries, workers, device, hot
        self._gap_bytes, self._deadline_s = gap_bytes, deadline_s
        self._asked = [np.empty(0, dtype=np.int64) for _ in queries]
        self._known: list[list[tuple[np.ndarray, np.ndarray]]] = [[] for _ in queries]
        self._reads: list[_Read] = []
        # Workers have current streams of their own: what the caller's has still to do on the queries must come first.
        self._stream = torch.cuda.current_stream(device) if device.type == "cuda" else None
        self.costs = Costs()

    def ask(self, wanted: Sequence[np.ndarray], *, urgent: bool = False) -> list[int]:
        """Starts what is needed to score `wanted[q]` (record numbers) for every query q. Returns how many of them were new, per query.

        `urgent`: ahead of everything asked before; scored by the thread that calls `finish`, not by a worker.
        """
        new = [_without(np.sort(numbers), asked) for numbers, asked in zip(wanted, self._asked, strict=True)]
        count = [len(numbers) for numbers in new]
        if not any(count):
            return count
        self._asked = [np.sort(np.concatenate(both)) if len(both[0]) else both[1] for both in zip(self._asked, new, strict=True)]
        if self._hot is not None:
            new = [self._score_hot(q, numbers) for q, numbers in enumerate(new)]
        if len(new) == 1:
            number, query = new[0], np.zeros(len(new[0]), dtype=np.int64)
        else:
            number, query = self._join_reads(np.concatenate(new), np.repeat(np.arange(len(new)), [len(numbers) for numbers in new]))
        if len(number):
            self._read(number, query, urgent)
        return count

    def _score_hot(self, q: int, numbers: np.ndarray) -> np.ndarray:
        """Scores what lies in memory; returns the rest."""
        if self._hot is None or not len(numbers):
            return numbers
        found, scores = self._hot.score(numbers, self._queries[q])
        self._known[q].append((numbers[found], scores))
        self.costs.hot += int(found.sum())
        return numbers[~found]

    def _join_reads(self, number: np.ndarray, query: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Leaves what reads under way will bring anyway to them; returns the rest."""
        for read in self._reads:
            at = np.searchsorted(read.numbers, number)
            at[at == len(read.numbers)] = 0
            comes = read.numbers[at] == number
            if comes.any():
                order = np.argsort(at[comes], kind="stable")
                read.later.append(Pairs(at[comes][order], query[comes][order]))
                number, query = number[~comes], query[~comes]
        return number, query

    def _read(self, number: np.ndarray, query: np.ndarray, urgent: bool) -> None:
        if len(self._queries) == 1:
            numbers, pairs = number, Pairs(np.arange(len(number)), query)
        else:
            numbers, item = np.unique(number, return_inverse=True)
            order = np.argsort(item, kind="stable")
            pairs = Pairs(item[order], query[order])
        future = self._tier.read(numbers, gap_bytes=self._gap_bytes, priority=int(urgent), deadline_s=self._deadline_s, device=self._device)
        read = _Read(future, numbers, pairs, None)
        self._reads.append(read)  # before the task, so that a failure to start it still cancels the read
        if not urgent:
            read.task = self._workers.submit(self._score, future, numbers, pairs)

    def _score(self, future: Future, numbers: np.ndarray, pairs: Pairs) -> Scored:
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            return score_arrivals(self._tier, future, numbers, pairs, self._queries, self._device)

    def finish(self) -> list[tuple[np.ndarray, np.ndarray]]:
        """Waits. For each query: the numbers it asked for, ascending, and their scores. Raises what a read or a check raised."""
        # Urgent ones first: this thread scores them. Popped, so that no frame of a traceback refers to a task that holds the error.
        self._reads.sort(key=lambda read: read.task is None)
        while self._reads:
            self._finish_read(self._reads[-1])
            self._reads.pop()
        return [self._of_query(q) for q in range(len(self._queries))]

    def _finish_read(self, read: _Read) -> None:
        scored = self._scored(read)
        self._note(read.numbers, read.pairs, scored.scores)
        for pairs in read.later:
            self._score_later(read, scored.memory, pairs)
        future = read.future
        waited_s = 0.0 if read.task else scored.waited_s  # by a worker, which nobody waits for
        self.costs.add(
            Costs(future.bytes_asked, future.bytes_moved, future.request_count, scored.maxsim_s, waited_s, 0, scored.finished_at)
        )
        if self._hot is not None:
            self._hot.admit(read.numbers, future.memory, future.position_bytes)

    def _scored(self, read: _Read) -> Scored:
        if read.task is None:
            return self._score(read.future, read.numbers, read.pairs)
        try:
            return read.task.result()
        except BaseException:
            read.task = None  # it holds the error, whose traceback holds this frame
            raise

    def _score_later(self, read: _Read, memory: torch.Tensor, pairs: Pairs) -> None:
        scores = np.empty(len(pairs), dtype=np.float32)
        chosen = np.argsort(pairs.query, kind="stable")
        score_pairs(self._tier, memory, read.future.position_bytes, read.numbers, pairs, chosen, self._queries, scores)
        self._note(read.numbers, pairs, scores)

    def _note(self, numbers: np.ndarray, pairs: Pairs, scores: np.ndarray) -> None:
        if len(self._queries) == 1:
            self._known[0].append((numbers[pairs.item], scores))
            return
        order = np.argsort(pairs.query, kind="stable")
        borders = np.searchsorted(pairs.query[order], np.arange(len(self._queries) + 1))
        for q in range(len(self._queries)):
            part = order[borders[q] : borders[q + 1]]
            if len(part):
                self._known[q].append((numbers[pairs.item[part]], scores[part]))

    def _of_query(self, q: int) -> tuple[np.ndarray, np.ndarray]:
        if not self._known[q]:
            return np.empty(0, np.int64), np.empty(0, np.float32)
        numbers, scores = (np.concatenate(parts) for parts in zip(*self._known[q], strict=True))
        order = np.argsort(numbers)
        return numbers[order], scores[order]

    def cancel(self) -> None:
        """Ends the reads under way. Their errors are not the ones to tell."""
        for read in self._reads:
            read.future.cancel()
        # A task holds its error, whose traceback holds these frames: a cycle that would keep buffers and files until a collection.
        self._reads = []


def _without(numbers: np.ndarray, known: np.ndarray) -> np.ndarray:
    """Those of `numbers` that are not in `known`; both ascending. Faster than NumPy's setdiff1d, which sorts."""
    if not len(known) or not len(numbers):
        return numbers
    at = np.searchsorted(known, numbers)
    at[at == len(known)] = 0
    return numbers[known[at] != numbers]
