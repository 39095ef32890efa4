"""`search`: a walk's rounds wait for one another, so their times add up: each takes the latency of
a read, what it asked for is read, and its distances are measured. A device whose accelerator walks
by itself (RAGX, section 4.3) takes the query and gives the k nearest back; of any other the bytes
of every round pass its link, and the host measures and chooses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...ops.distances import vector_bytes
from ..model.spec import Accelerator
from ..vectors.interface import WALK_REPLY, Graph, Round, SearchCommand
from .work import COMPUTE, Leg, Work


def search(command: SearchCommand, graph: Graph, accelerator: Accelerator | None) -> Work:
    """Args:
    graph: that is stored.
    accelerator: that walks; None: the host does.
    """
    # a difference, its square, a sum
    flop, each_bytes = 3.0 * graph.dim, vector_bytes(graph.format, graph.dim)

    def step(done: Round) -> Sequence[Leg]:
        if accelerator is None:
            return [Leg("flash_to_host", done.bytes_moved, (-1,), done.read_requests)]
        return [
            Leg("flash_read", done.bytes_moved, (-1,), done.read_requests),
            Leg(COMPUTE, done.distances * each_bytes, (-1,), flop=flop * done.distances),
        ]

    def end(found: Any) -> Sequence[Leg]:
        return (
            []
            if accelerator is None
            else [Leg("device_to_host", len(found[0]) * WALK_REPLY.itemsize, (-1,))]
        )

    return Work(
        [Leg("host_to_device", 0 if accelerator is None else len(command.payload))],
        step=step,
        end=end,
    )
