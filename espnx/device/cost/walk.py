"""`walk`: queries that walk over the pages of a graph at the same time, each of which asks for its
next pages when those before have come. The host reads what a filter needs of the graph's files
before, and so it does with pages whose nodes are all measured. A device whose accelerator walks
takes the queries then, and gives the nearest back; of any other every page passes its link.

A walk goes on page by page, with as many under way as its beam is wide. It is charged in rounds of
so many, each behind the one before: in that time a drive that takes every read as long ends as many
pages either way. What a walk has read is known at its end: this machine walks first."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from ..model.spec import Accelerator
from ..pages import PAGE_BYTES
from ..vectors.interface import WALK_REPLY
from .work import COMPUTE, Leg, Work

#: Of a page of codes.
CODE_PAGE_BYTES = 4096


class WalksAsked(Protocol):
    """Attributes: payload_bytes: of queries, and of the filter if there is one. beam_width: pages
    of a walk that are under way at a time."""

    @property
    def payload_bytes(self) -> int: ...
    @property
    def beam_width(self) -> int: ...


class WalkedGraph(Protocol):
    """Attributes: dim: of its vectors. vector_bytes: of what a node holds of one. walks: that are
    under way at a time; the next one begins when one ends."""

    @property
    def dim(self) -> int: ...
    @property
    def vector_bytes(self) -> int: ...
    @property
    def walks(self) -> int: ...


class Walked(Protocol):
    """What walks have read; see `espnx.graph.Neighbours`."""

    @property
    def ids(self) -> np.ndarray: ...
    @property
    def pages(self) -> np.ndarray: ...
    @property
    def code_pages(self) -> np.ndarray: ...
    @property
    def measured(self) -> np.ndarray: ...
    @property
    def page_bytes(self) -> int: ...
    @property
    def shared_pages(self) -> int: ...
    @property
    def shared_requests(self) -> int: ...
    @property
    def filter_bytes(self) -> int: ...
    @property
    def filter_requests(self) -> int: ...


def walk(command: WalksAsked, graph: WalkedGraph, accelerator: Accelerator | None) -> Work:
    """Args:
    graph: that is stored.
    accelerator: that walks; None: the host does.
    """
    begun = [Leg("host_to_device", 0)]

    def end(found: Walked) -> Sequence[Leg]:
        legs = list(begun)

        def add(route: str, size_bytes: int, behind: int, requests: int = 1) -> int:
            legs.append(Leg(route, size_bytes, (behind,), requests))
            return len(legs) - 1

        before = 0
        if found.filter_bytes:
            filter_bytes = -(-found.filter_bytes // PAGE_BYTES) * PAGE_BYTES
            before = add("flash_to_host", filter_bytes, before, found.filter_requests)
        if found.shared_pages:
            shared_bytes = found.shared_pages * found.page_bytes
            before = add("flash_to_host", shared_bytes, before, found.shared_requests)
        if accelerator is not None and found.pages.any():
            before = add("host_to_device", command.payload_bytes, before)
        ends = list[int]()  # of each query, its last leg
        for query, pages in enumerate(found.pages.tolist()):
            behind = ends[query - graph.walks] if query >= graph.walks else before
            rounds = -(-pages // command.beam_width)
            for number in range(rounds):
                size = min(command.beam_width, pages - number * command.beam_width)
                behind = read_round(legs, found, query, (number, rounds, size), behind)
            if accelerator is not None and rounds:
                reply_bytes = found.ids.shape[1] * WALK_REPLY.itemsize
                behind = add("device_to_host", reply_bytes, behind)
            ends.append(behind)
        return legs[len(begun) :]

    def read_round(
        legs: list[Leg], found: Walked, query: int, place: tuple[int, int, int], behind: int
    ) -> int:
        """The number of the last leg of a round: (which, of how many, its pages of nodes)."""
        number, rounds, size = place
        route = "flash_to_host" if accelerator is None else "flash_read"
        legs.append(Leg(route, size * found.page_bytes, (behind,), size))
        codes = _share(int(found.code_pages[query]), number, rounds)
        if codes:
            legs.append(Leg(route, codes * CODE_PAGE_BYTES, (-1,), codes))
        if accelerator is not None:
            # a difference, its square, a sum
            measured, flop = _share(int(found.measured[query]), number, rounds), 3.0 * graph.dim
            size_bytes = measured * graph.vector_bytes
            legs.append(Leg(COMPUTE, size_bytes, (-1,), flop=flop * measured))
        return len(legs) - 1

    return Work(begun, end=end)


def _share(total: int, place: int, count: int) -> int:
    """The part at one place of whole things that are shared out as evenly as may be."""
    return total * (place + 1) // count - total * place // count
