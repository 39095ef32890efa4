"""Candidates from the lists of a store's parts: the nearest lists of every part, all of a query's
in one request, and small parts looked at in memory."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch

from .... import errors
from ....clusters.facts import check_ids
from ....device.clusters.nearest import nearest
from ....device.vectors.interface import REPLY, DistanceTicket
from ....storage import NativeEngine
from ...encoder import Encoded
from ..flat import FlatPart
from ..interface import Allowed, Candidates, StageReads
from ..ties import merged, top
from .part import ClusterPart

#: Of a search whose caller names no number: each costs a share of a list.
DEFAULT_CANDIDATES = 100
#: Of a part, in one request; what a query wants beyond comes in further ones.
_LISTS_AT_ONCE = 512
#: Requests that are under way at a time, of all queries of a search.
_IN_FLIGHT = 32
#: Replies of a request are held once as they came, and once as what may be found.
_REPLY_BYTES = 2 * REPLY.itemsize
_FOUND_BYTES = 12
_WHAT = "vectors of lists"


class Reading:
    """What one query reads of one part.

    Args:
        query: as the device takes it. wide: float32 [1, head_dim].
        lists: int64 [m]: those that it wants to begin with.
        mask: bool [count]: rows that may be found; None: all.
        candidates: that are wanted.

    Attributes:
        ids, far: of the nearest so far, int32 and float32 [m], the nearest first.
        asked: lists that were read, or are being read. useful: of those that were, how many hold a
            row that may be found.
        reads, rounds: of what has ended.
    """

    def __init__(
        self,
        part: ClusterPart,
        query: torch.Tensor,
        wide: np.ndarray,
        lists: np.ndarray,
        mask: np.ndarray | None,
        candidates: int,
        deadline_s: float,
    ):
        self.part, self._query, self._wide, self._mask = part, query, wide, mask
        self._candidates, self._deadline_s = candidates, deadline_s
        self._waiting, self._wanted = lists[lists >= 0], int((lists >= 0).sum())
        self.ids, self.far = np.empty(0, np.int32), np.empty(0, np.float32)
        self.asked, self.useful, self.rounds = np.empty(0, np.int64), 0, 0
        self.reads = StageReads()
        self._ticket: DistanceTicket | None = None
        self._lists = self.asked
        self._early: list[np.ndarray] = []
        self._n_early, self._is_known = 0, False

    @property
    def has_more(self) -> bool:
        """Whether there are lists that were not read."""
        return len(self.asked) < self.part.n_lists

    @property
    def lacks_lists(self) -> bool:
        """Whether there are lists to read yet of those that were wanted, or in place of those that
        hold no row that may be found."""
        done = len(self.asked) if self._mask is None else self.useful
        return self.has_more and done < self._wanted

    def start(self) -> None:
        """Sends the next request, where one is due and none is under way."""
        if self._ticket is None and len(self._waiting):
            lists, self._waiting = np.split(self._waiting, [_LISTS_AT_ONCE])
            self._ticket = self.part.start(self._query, lists, self._deadline_s)
            self._lists, self.asked = lists, np.concatenate([self.asked, lists])
            self._early, self._n_early = [], 0

    def partial(self, share: float) -> Candidates:
        """What is known once that share of the first request's lists is there, similarities
        descending."""
        ticket = self._ticket
        if ticket is None:
            return self.found()
        if not self._is_known:
            wanted = max(1, math.ceil(share * len(self._lists))) - self._n_early
            if wanted > 0:
                items, self._is_known = ticket.next(wanted)
                self._early += [ticket.reply(item) for item in np.asarray(items).tolist()]
                self._n_early += len(items)
        replies = np.concatenate([np.empty(0, REPLY), *self._early])
        check_ids(self.part.facts, _WHAT, replies["id"])
        may_be = slice(None) if self._mask is None else self._mask[replies["id"]]
        return self._candidates_of(*nearest(replies[may_be], self._candidates))

    def finish(self) -> None:
        """Waits for the request that is under way."""
        ticket = self._ticket
        if ticket is None:
            return
        replies = ticket.finish()
        stats, self._ticket, self._early = ticket.stats, None, []
        on_device = stats.bytes_moved if self.part.is_on_device else 0
        self.reads += StageReads(
            stats.read_requests, stats.bytes_asked, stats.bytes_moved, on_device
        )
        self.rounds += 1
        self._is_known = False
        check_ids(self.part.facts, _WHAT, replies["id"])
        if self._mask is not None:
            may_be = self._mask[replies["id"]]
            counts = self.part.n_vectors(self._lists)
            of_lists = np.add.reduceat(may_be.astype(np.int64), np.cumsum(counts) - counts)
            self.useful += int(np.count_nonzero(of_lists))
            replies = replies[may_be]
        if len(self.ids):
            before = np.empty(len(self.ids), REPLY)
            before["id"], before["distance"] = self.ids, self.far
            replies = np.concatenate([before, replies])
        self.ids, self.far = nearest(replies, self._candidates)

    def extend(self, *, is_short: bool) -> None:
        """Wants further lists: as many as it has read again, or, unless it is short of rows, as
        many as seem to hold what it lacks of useful ones."""
        if len(self._waiting):
            return
        have = len(self.asked)
        target = 2 * have
        if not is_short:
            lacking = self._wanted - self.useful
            target = min(target, have + math.ceil(lacking * have / max(1, self.useful)))
        target = max(1, target)
        while not len(self._waiting):
            found, reads, rounds = self.part.find(self._wide, target, self._deadline_s)
            self.reads += reads
            self.rounds += rounds
            lists = found[0][found[0] >= 0]
            self._waiting = lists[~np.isin(lists, self.asked)]
            if target >= self.part.n_lists:
                break
            target *= 2

    def found(self) -> Candidates:
        """The nearest so far."""
        return self._candidates_of(self.ids, self.far)

    def cancel(self) -> None:
        """Ends what is under way."""
        ticket, self._ticket = self._ticket, None
        if ticket is not None:
            with suppress(errors.EspnxError):
                ticket.cancel()

    def _candidates_of(self, ids: np.ndarray, far: np.ndarray) -> Candidates:
        return ids.astype(np.int64) + self.part.first_number, far


class ClusterStageSearch:
    """See `StageSearch`. Reads begin when it is made, of `_IN_FLIGHT` requests at a time.

    Attributes:
        reads: see `StageSearch`.
    """

    def __init__(
        self,
        parts: Sequence[ClusterPart | FlatPart],
        queries: np.ndarray,
        candidates: int,
        lists: int,
        allowed: Allowed | None,
        at_least: int,
        deadline_s: float,
    ):
        self._candidates, self.reads = candidates, StageReads()
        most = sum(part.count for part in parts) if allowed is None else allowed.count
        self._at_least = min(at_least, candidates, most)
        self._readings: list[list[tuple[Reading, float, float]]] = [[] for _ in queries]
        self._flat: list[list[Candidates]] = [[] for _ in queries]
        self._final: list[Candidates] | None = None
        self._head_rounds = self._next = self._done = 0
        if not candidates or not len(queries):
            return
        for part in parts:
            if isinstance(part, ClusterPart):
                self._prepare(part, queries, lists, allowed, deadline_s)
        self._queue = [each for of_query in self._readings for each, _, _ in of_query]
        try:
            self._start_more()  # they are read while the small parts are looked at
            for part in parts:
                if isinstance(part, FlatPart):
                    found = part.search(queries, candidates, allowed)
                    for own, each in zip(self._flat, found, strict=True):
                        own.append(each)
        except BaseException:
            self._cancel()
            raise

    def _prepare(
        self,
        part: ClusterPart,
        queries: np.ndarray,
        lists: int,
        allowed: Allowed | None,
        deadline_s: float,
    ) -> None:
        asked = part.coding.queries(queries)
        mask = None if allowed is None else part.mask(allowed)
        if mask is not None and not mask.any():
            return
        found, reads, rounds = part.find(asked.wide, lists, deadline_s)
        self._head_rounds = max(self._head_rounds, rounds)
        self.reads += reads
        for number, own in enumerate(self._readings):
            wide = asked.wide[number : number + 1]
            reading = Reading(
                part, asked.native[number], wide, found[number], mask, self._candidates, deadline_s
            )
            own.append((reading, float(asked.worth[number]), float(asked.shift[number])))

    def _start_more(self) -> None:
        """Sends requests of the queries that come next, as long as few enough are under way."""
        while self._next < min(len(self._queue), self._done + _IN_FLIGHT):
            self._queue[self._next].start()
            self._next += 1

    def advance(self, share: float) -> list[Candidates]:
        if self._final is not None:
            return self._final
        try:
            return [self._early(number, share) for number in range(len(self._readings))]
        except BaseException:
            self._cancel()
            raise

    def _early(self, number: int, share: float) -> Candidates:
        found = list(self._flat[number])
        for reading, worth, shift in self._readings[number]:
            if not len(reading.asked):
                reading.start()
            found.append(_similar(reading.partial(share), worth, shift))
        return merged(found, self._candidates)

    def complete(self) -> list[Candidates]:
        if self._final is None:
            try:
                self._final = [self._whole(number) for number in range(len(self._readings))]
            except BaseException:
                self._cancel()
                raise
            for of_query in self._readings:
                self.reads = sum((each.reads for each, _, _ in of_query), self.reads)
        return self._final

    def _whole(self, number: int) -> Candidates:
        readings = [each for each, _, _ in self._readings[number]]
        for reading in readings:
            if not len(reading.asked):
                reading.start()
            reading.finish()
            self._done += 1
            self._start_more()
        n_flat = sum(len(numbers) for numbers, _ in self._flat[number])
        while True:
            is_short = n_flat + sum(len(each.ids) for each in readings) < self._at_least
            going = [each for each in readings if each.lacks_lists or (is_short and each.has_more)]
            before = sum(len(each.asked) for each in going)
            for reading in going:
                reading.extend(is_short=is_short and not reading.lacks_lists)
                reading.start()
            for reading in going:
                reading.finish()
            if sum(len(each.asked) for each in going) == before:
                break
        found = [_similar(each.found(), *scale) for each, *scale in self._readings[number]]
        return merged([*self._flat[number], *found], self._candidates)

    def _cancel(self) -> None:
        for of_query in self._readings:
            for reading, _, _ in of_query:
                reading.cancel()

    @property
    def pages(self) -> int:
        """Pages of 4096 bytes that all queries' lists lie on, each counted once a query; of a
        complete search."""
        return sum(
            each.part.pages_of(each.asked) for of_query in self._readings for each, _, _ in of_query
        )

    @property
    def lists(self) -> int:
        """Lists that all queries have read; of a complete search."""
        return sum(len(each.asked) for of_query in self._readings for each, _, _ in of_query)

    @property
    def rounds(self) -> list[int]:
        """How many reads of each query waited for one another; of a complete search. Parts are
        read beside one another."""
        return [
            self._head_rounds + max((each.rounds for each, _, _ in of_query), default=0)
            for of_query in self._readings
        ]


def _similar(found: Candidates, worth: float, shift: float) -> Candidates:
    """Similarities of what has these distances on a device: by inner product the distance is the
    product, negated; see `espnx.clusters.coding.Asked`."""
    numbers, far = found
    return numbers, -(far * np.float32(worth) + np.float32(shift))


class LoadedClusters:
    """See `LoadedStage`; effort is the number of lists that are read of each part.

    Args:
        parts: ascending by record number; closed with this, as the engine is.
        engine: of the reads.
        vector: makes the first-stage vector of a query, float32 [dim].
        probed: lists, measured for `DEFAULT_CANDIDATES`; a search for more takes as many times as
            many.
        hit_rates: as measured.
    """

    default_candidates = DEFAULT_CANDIDATES
    needs_vectors = True
    finds_equals = False

    def __init__(
        self,
        parts: Sequence[ClusterPart | FlatPart],
        engine: NativeEngine,
        vector: Callable[[Encoded], np.ndarray],
        probed: int,
        hit_rates: Mapping[float, float],
    ):
        self.parts, self.auto_effort, self.hit_rates = list(parts), max(1, probed), hit_rates
        self._engine, self._vector = engine, vector

    @property
    def count(self) -> int:
        """Records, deleted ones too."""
        return sum(part.count for part in self.parts)

    @property
    def lists(self) -> list[ClusterPart]:
        """The parts that have lists."""
        return [part for part in self.parts if isinstance(part, ClusterPart)]

    @property
    def n_lists(self) -> int:
        """Lists of the part that has most; 0: there are none."""
        return max((part.n_lists for part in self.lists), default=0)

    @property
    def memory_bytes(self) -> int:
        """What the parts keep in memory."""
        return sum(part.memory_bytes for part in self.parts)

    def prepare(self, query: Encoded, text: str | None = None) -> np.ndarray:
        return self._vector(query)

    def start(
        self,
        queries: Sequence[Any],
        candidates: int,
        effort: int | None = None,
        allowed: Allowed | None = None,
        at_least: int = 0,
        deadline_s: float = 30.0,
    ) -> ClusterStageSearch:
        """`queries`: float32 [dim] each."""
        wide = np.ascontiguousarray(queries, dtype=np.float32)
        return ClusterStageSearch(
            self.parts,
            wide,
            candidates,
            self._probed(candidates, effort),
            allowed,
            at_least,
            deadline_s,
        )

    def _probed(self, candidates: int, effort: int | None) -> int:
        if effort is None:
            effort = math.ceil(self.auto_effort * max(1.0, candidates / DEFAULT_CANDIDATES))
        return effort

    def search_bytes(
        self, candidates: int, effort: int | None, allowed: Allowed | None, at_least: int
    ) -> int:
        total = _FOUND_BYTES * candidates
        for part in self.lists:
            at_once = min(self._probed(candidates, effort), part.n_lists, _LISTS_AT_ONCE)
            total += _REPLY_BYTES * at_once * part.facts.list_vectors[2]
            total += _FOUND_BYTES * (2 * candidates + part.n_lists)
        return total

    def exhaustive(self, queries: np.ndarray, candidates: int) -> list[Candidates]:
        """The best of all vectors, as searches measure them: every list is read."""
        best: list[Candidates] = [(np.empty(0, np.int64), np.empty(0, np.float32))] * len(queries)
        for part in self.parts:
            if isinstance(part, FlatPart):
                scored = iter([(np.arange(part.count), queries @ part.wide.T)])
            else:
                scored = part.scored(self._engine, part.coding.queries(queries))
            for rows, scores in scored:
                found = [top(rows + part.first_number, each, candidates) for each in scores]
                best = [merged([a, b], candidates) for a, b in zip(best, found, strict=True)]
        return best

    def vectors(self, numbers: np.ndarray) -> np.ndarray:
        """float32 [m, dim]: of records by number counted over all parts, without what lies between
        them; ascending."""
        found, first = list[np.ndarray](), 0
        for part in self.parts:
            inside = numbers[(numbers >= first) & (numbers < first + part.count)] - first
            first += part.count
            if not len(inside):
                continue
            if isinstance(part, FlatPart):
                found.append(part.wide[inside])
                continue
            chosen = np.empty((len(inside), part.facts.dim), np.float32)
            for rows, vectors in part.all_vectors(self._engine):
                at = np.searchsorted(inside, rows)
                here = inside[np.minimum(at, len(inside) - 1)] == rows
                chosen[at[here]] = vectors[here]
            found.append(chosen)
        return np.concatenate(found)

    def close(self) -> None:
        for part in self.parts:
            part.close()
        self._engine.close()
