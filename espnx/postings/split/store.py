"""A collection that lies on several devices: each scans its own lists, the host asks them all at
once and merges what they give back.

Placed by passages, each gives its best records, and the best of all are among them. Placed by
terms, no device knows a record's score: each gives every posting's part of it, and the host adds
them up in the order of the query's terms, as one index does.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from ...checks import check_whole, plain
from ...device.emulation.use import DeviceUse, watch
from ...device.interface import DeviceStats
from ...device.postings import PostingsDevice, ScanTicket
from ...device.registry import Devices, devices_in
from ...device.workers import Job, Workers
from ...storage import NativeEngine
from ...suggestions import suggests_keywords
from ..devices.commands import ScanCommands, scan_commands
from ..inspection import VerifyReport, verify
from ..queries import Query, directories_of, mask_of, rule_of, terms_of
from ..search.plan import QueryPlan
from ..search.search import K_MAX, Found
from .merging import best_of, best_of_partial
from .parts import collection_of, read_parts

_QUERIES_AHEAD = 8  # whose lists are being read while one is scored


@dataclass(frozen=True, eq=False, repr=False)
class SplitFound(Found):
    """What a search of q queries on n devices found. See `espnx.postings.Found`.

    Attributes:
        command_bytes, reply_bytes: int64 [q, n]: to and from each device that scans by itself, of
            its commands (`espnx.device.postings.ScanCommand`); 0 where a device has no list of a
            query, and is not asked.
        flash_bytes: int64 [q, n]: that each reads of its flash, in pages of 4096 bytes. From a
            device that does not scan, these cross the link instead.
        device: what all queries together took emulated devices; None of others.
    """

    command_bytes: np.ndarray
    reply_bytes: np.ndarray
    flash_bytes: np.ndarray
    device: DeviceUse | None = field(default=None, kw_only=True)


class SplitPostings:
    """The parts of a collection, open together. Every method may be called from any thread. A
    context manager.

    >>> import espnx.postings                                               # doctest: +SKIP
    >>> espnx.postings.build_split(["/mnt/a/my.bm25", "/mnt/b/my.bm25"], texts)
    >>> with espnx.postings.SplitPostings(["/mnt/a/my.bm25", "/mnt/b/my.bm25"]) as postings:
    ...     found = postings.search("who writes to the log?", k=10)

    Args:
        paths: the directories of `build_split`, in any order.
        device: the name of what to open in each directory (`espnx.device.open`), or open devices,
            one for each directory, which stay the caller's.
        engine: path of the reads, or a storage engine, which stays the caller's.

    Raises:
        InvalidInputError: directories that are not all parts of one collection; devices that lie
            elsewhere, or keep no posting lists.
        StoreNotFoundError, FormatError, ChecksumError, TruncatedFileError, FileMissingError: no
            postings, or damaged ones.
        PathUnavailableError: the named path cannot be had here.
    """

    @suggests_keywords
    def __init__(
        self,
        paths: Iterable[str | os.PathLike[str]],
        *,
        device: Devices = "ssd",
        engine: NativeEngine | str = "auto",
    ):
        given = directories_of(paths)
        self._parts, self.facts, self.split = read_parts(given)
        self.directories = [each.directory for each in self._parts]
        with ExitStack() as opened:
            devices = dict(zip(given, devices_in(device, given), strict=True))
            if isinstance(device, str):
                for each in devices.values():
                    opened.callback(each.close)
            self._devices: list[PostingsDevice] = []
            for part in self._parts:
                self._devices.append(devices[part.directory].open_postings(part, engine=engine))
                opened.callback(self._devices[-1].close)
            self._collection = collection_of(self._parts, self.split)
            # A thread for each command under way: a clock that waits for them all waits for none
            # that is in line for a thread.
            self._pool = ThreadPoolExecutor(
                len(self._devices) * _QUERIES_AHEAD, thread_name_prefix="espnx-postings"
            )
            opened.callback(self._pool.shutdown)
            self._opened = opened.pop_all()

    def __len__(self) -> int:
        return self.split.n_records

    def __repr__(self) -> str:
        kind, placement = self.facts.kind, self.split.placement
        return (
            f"<SplitPostings: {len(self):,} records, {kind}, {len(self._devices)} parts by "
            f"{placement}>"
        )

    @property
    def placement(self) -> str:
        """``passages`` or ``terms``."""
        return self.split.placement

    @property
    def devices(self) -> Sequence[PostingsDevice]:
        """The devices of the parts, in their order."""
        return self._devices

    @property
    def memory_bytes(self) -> Sequence[int]:
        """Bytes of the dictionary and the lengths of each part."""
        return [each.segment.memory_bytes for each in self._parts]

    def search(
        self,
        queries: Query | Sequence[Query],
        k: int = 10,
        *,
        variant: str | None = None,
        k1: float | None = None,
        b: float | None = None,
        delta: float | None = None,
        include: Any = None,
        exclude: Any = None,
        deadline_s: float = 30.0,
    ) -> SplitFound:
        """The k best records of each query: those of one index of the whole collection, scores to
        the bit.

        Args:
            queries, k, variant, k1, b, delta, include, exclude: see `espnx.Postings.search`.
            deadline_s: of each device's reads for a query.

        Raises as `espnx.Postings.search`; what a device raises names its directory. No result is
        given then.
        """
        check_whole("k", k := plain(k), 1, K_MAX)
        k, deadline_s = min(k, len(self)), plain(deadline_s)
        rule = rule_of(self.facts.bm25, variant=variant, k1=k1, b=b, delta=delta)
        plan = QueryPlan(self._collection, terms_of(queries, self.facts.analyzer), rule, None)
        allowed = mask_of(include, exclude, len(self))
        with watch(*self._devices, bench="--show postings") as watched:
            for _ in range(len(self._devices) + 1):
                asked = self._asked(plan, max(1, k), allowed)
                found, others = self._run(asked, k, allowed, deadline_s)
                if not len(others):
                    break
                plan.leave_out(others)  # of another term with the same hash: the totals change, too
        return found if watched.use is None else replace(found, device=watched.use)

    def _asked(self, plan: QueryPlan, k: int, allowed: np.ndarray | None) -> ScanCommands:
        """`allowed`: bool [records of the collection], or None. Of terms, the host applies it: no
        device knows which records are found."""
        n = len(self._parts)
        if self.placement != "passages":
            return scan_commands(plan, 0, [None] * n)
        filters = [
            None if allowed is None else np.packbits(allowed[part::n], bitorder="little")
            for part in range(n)
        ]
        return scan_commands(plan, k, filters)

    def _run(
        self, asked: ScanCommands, k: int, allowed: np.ndarray | None, deadline_s: float
    ) -> tuple[SplitFound, np.ndarray]:
        """What the devices gave back, and places of lists of other terms."""
        q, n = asked.n_queries, len(self._devices)
        numbers, scores = np.full((q, k), -1, np.int64), np.full((q, k), -np.inf, np.float32)
        link, costs, others = np.zeros((3, q, n), np.int64), np.zeros((3, q), np.int64), list[int]()
        for query, replies in self._replies(asked, deadline_s):
            for part, (ticket, _) in replies.items():
                command = ticket.command
                link[:, query, part] = command.payload_bytes, command.data_len, command.flash_bytes
                costs[:, query] += _read_costs(ticket.stats)
                others += asked.rows(query, part)[ticket.other_terms].tolist()
            if self.placement == "passages":
                best = best_of({part: reply for part, (_, reply) in replies.items()}, n, k)
            else:
                parts = {
                    part: (asked.order(query, part), ticket.command.lists, reply)
                    for part, (ticket, reply) in replies.items()
                }
                best = best_of_partial(parts, asked.constants[query], k, allowed)
            numbers[query, : len(best)], scores[query, : len(best)] = (
                best["number"][:k],
                best["score"][:k],
            )
        return SplitFound(numbers, scores, *costs, *link), np.array(others, np.int64)

    def _replies(
        self, asked: ScanCommands, deadline_s: float
    ) -> Iterator[tuple[int, dict[int, tuple[ScanTicket, np.ndarray]]]]:
        """Yields what every device that has a list of a query gave back, query by query. Reads of
        several queries run ahead."""
        under_way = deque[tuple[int, dict[int, tuple[ScanTicket, Job[np.ndarray]]]]]()
        following = 0
        with Workers(self._devices) as workers:
            try:
                for query in range(asked.n_queries):
                    while following < min(asked.n_queries, query + _QUERIES_AHEAD):
                        under_way.append((following, {}))
                        for part, command in asked.commands(following, deadline_s).items():
                            ticket = command.ask(self._devices[part])
                            under_way[-1][1][part] = (
                                ticket,
                                workers.submit(self._pool, ticket.finish),
                            )
                        following += 1
                    replies = {
                        part: (ticket, reply.result())
                        for part, (ticket, reply) in under_way[0][1].items()
                    }
                    under_way.popleft()
                    yield query, replies
            finally:
                for _, tickets in under_way:
                    for ticket, _ in tickets.values():
                        ticket.cancel()

    def verify(self) -> list[VerifyReport]:
        """Reads all that there is on every device, and checks it. Raises as
        `espnx.Postings.verify`; the error names the directory."""
        with NativeEngine("auto") as engine:
            return [verify(engine, [each.open_segment(engine)]) for each in self._parts]

    def close(self) -> None:
        """Ends the reads, and closes the devices that were opened by name; may be called twice."""
        self._opened.close()

    def __enter__(self) -> SplitPostings:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _read_costs(stats: DeviceStats) -> tuple[int, int, int]:
    return stats.read_requests, stats.bytes_asked, stats.bytes_moved
