"""What commands cost, as values: legs of bytes and of work, and what waits for what. No device, no
clock."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import torch

from espnx.device.clusters.commands import DistancesCommand
from espnx.device.cost import rows
from espnx.device.cost.distances import distances
from espnx.device.cost.rows import HandOver, HeadRows
from espnx.device.cost.scan import scan
from espnx.device.cost.search import search
from espnx.device.cost.walk import walk
from espnx.device.cost.work import COMPUTE, Leg
from espnx.device.model.spec import Accelerator, load_preset
from espnx.device.postings import LIST, WEIGHT, ScanCommand, ScanLists, Weights
from espnx.device.vectors.interface import Round, SearchCommand

PROCESSOR = load_preset("ragx").accelerator
assert PROCESSOR is not None


def test_distances() -> None:
    """Groups of about a MiB: a query for each command, pages, three operations for each value, 8
    bytes for each vector."""
    pages = np.array([4, 0, 1])
    stored: Any = SimpleNamespace(
        n_vectors=np.array([124, 0, 7]), page_bytes=4096, new_pages=lambda wanted: pages[wanted]
    )
    command = DistancesCommand(torch.zeros(128, dtype=torch.uint8), [0, 2, 1, 0])
    work = distances(command, stored, PROCESSOR)
    assert [(each.begin, each.end, each.leg) for each in work.groups or ()] == [(0, 4, 3)]
    assert work.legs == [
        Leg("host_to_device", 3 * 128),
        Leg("flash_read", 36864, (-1,), 3),
        Leg(COMPUTE, 36864, (-1,), flop=3.0 * 128 * 255),
        Leg("device_to_host", 255 * 8, (-1,)),
    ]
    assert distances(command, stored, None).legs == [Leg("flash_to_host", 36864, requests=3)]
    many = distances(DistancesCommand(command.query, [0] * 200), stored, None)
    assert sum(leg.size_bytes for leg in many.legs) == 200 * 16384
    assert [each.leg for each in many.groups or ()] == list(range(len(many.legs)))
    assert len(many.legs) > 2
    assert distances(DistancesCommand(command.query, []), stored, PROCESSOR).legs == []


def test_search() -> None:
    """Rounds come one after the other; the k nearest at the end."""
    graph: Any = SimpleNamespace(dim=24, format="uint8")
    command = SearchCommand(torch.zeros(24, dtype=torch.uint8), 10, 5)
    done = Round(np.arange(3), 12288, 3, 2)
    near, far = search(command, graph, PROCESSOR), search(command, graph, None)
    assert near.legs == [Leg("host_to_device", 24)]
    assert far.legs == [Leg("host_to_device", 0)]
    assert near.step is not None
    assert near.end is not None
    assert near.step(done) == [
        Leg("flash_read", 12288, (-1,), 2),
        Leg(COMPUTE, 72, (-1,), flop=3.0 * 24 * 3),
    ]
    assert near.end((np.arange(4), np.zeros(4))) == [Leg("device_to_host", 48, (-1,))]
    assert far.step is not None
    assert far.end is not None
    assert far.step(done) == [Leg("flash_to_host", 12288, (-1,), 2)]
    assert far.end((np.arange(4), np.zeros(4))) == []


def walked(**told: Any) -> Any:
    """What walks of two queries for three results have read."""
    none = np.zeros(2, np.int64)
    facts = {
        "ids": np.zeros((2, 3)),
        "pages": none,
        "code_pages": none,
        "measured": none,
        "page_bytes": 4096,
        "shared_pages": 0,
        "shared_requests": 0,
        "filter_bytes": 0,
        "filter_requests": 0,
    }
    return SimpleNamespace(**facts | told)


def walks(n: int, beam_width: int, accelerator: Accelerator | None, found: Any) -> list[Leg]:
    """All of their legs."""
    command: Any = SimpleNamespace(payload_bytes=99, beam_width=beam_width)
    work = walk(command, SimpleNamespace(dim=24, vector_bytes=48, walks=n), accelerator)
    assert work.end is not None
    return [*work.legs, *work.end(found)]


def test_walk() -> None:
    """Each walk in rounds of its own, as many pages in each as its beam is wide."""
    legs = walks(8, 4, None, walked(pages=np.array([6, 3])))
    assert legs == [
        Leg("host_to_device", 0),
        Leg("flash_to_host", 4 * 4096, (0,), 4),
        Leg("flash_to_host", 2 * 4096, (1,), 2),
        Leg("flash_to_host", 3 * 4096, (0,), 3),
    ]


def test_walks_in_line() -> None:
    """The second begins when the first has ended, where one is under way at a time."""
    legs = walks(1, 1, None, walked(pages=np.array([2, 1])))
    assert [leg.after for leg in legs] == [(), (0,), (1,), (2,)]
    legs = walks(1, 1, None, walked(pages=np.array([0, 1])))
    assert [leg.after for leg in legs] == [(), (0,)]


def test_walk_with_a_filter() -> None:
    """The file of rows, the pages at which walks begin, the walks."""
    found = walked(
        pages=np.array([1, 1]),
        shared_pages=5,
        shared_requests=2,
        filter_bytes=9000,
        filter_requests=3,
    )
    legs = walks(8, 1, None, found)
    assert legs[1:] == [
        Leg("flash_to_host", 12288, (0,), 3),
        Leg("flash_to_host", 5 * 4096, (1,), 2),
        Leg("flash_to_host", 4096, (2,)),
        Leg("flash_to_host", 4096, (2,)),
    ]
    legs = walks(8, 1, PROCESSOR, walked(shared_pages=5, shared_requests=2))
    assert legs[1:] == [Leg("flash_to_host", 5 * 4096, (0,), 2)], "the host measures"


def test_walk_over_pages_of_codes() -> None:
    """Those of a round are read when its nodes are there."""
    legs = walks(8, 2, None, walked(pages=np.array([3, 0]), code_pages=np.array([5, 0])))
    assert legs[1:] == [
        Leg("flash_to_host", 8192, (0,), 2),
        Leg("flash_to_host", 2 * 4096, (-1,), 2),
        Leg("flash_to_host", 4096, (2,), 1),
        Leg("flash_to_host", 3 * 4096, (-1,), 3),
    ]


def test_walk_on_a_device_that_walks() -> None:
    """Queries there, the nearest back; pages stay inside."""
    found = walked(pages=np.array([2, 1]), measured=np.array([7, 2]))
    legs = walks(8, 1, PROCESSOR, found)
    flop = 3.0 * 24
    assert legs == [
        Leg("host_to_device", 0),
        Leg("host_to_device", 99, (0,)),
        Leg("flash_read", 4096, (1,)),
        Leg(COMPUTE, 3 * 48, (-1,), flop=3 * flop),
        Leg("flash_read", 4096, (3,)),
        Leg(COMPUTE, 4 * 48, (-1,), flop=4 * flop),
        Leg("device_to_host", 36, (5,)),
        Leg("flash_read", 4096, (1,)),
        Leg(COMPUTE, 2 * 48, (-1,), flop=2 * flop),
        Leg("device_to_host", 36, (8,)),
    ]


def test_scan() -> None:
    places = np.zeros(2, LIST)
    places["offset"], places["size"], places["postings"], places["name"] = (
        (1, 100),
        (2, 70),
        (9, 40),
        (1, 2),
    )
    command = ScanCommand(ScanLists(places, b"abc"), Weights(np.zeros(2, WEIGHT)), 10)
    work = scan(command, None, PROCESSOR)  # type: ignore[arg-type]
    assert work.groups is None
    assert [leg.route for leg in work.legs] == [
        "host_to_device",
        "flash_read",
        COMPUTE,
        "device_to_host",
    ]
    assert [leg.size_bytes for leg in work.legs] == [command.payload_bytes, 3 * 4096, 72 * 64, 120]
    assert scan(command, None, None).legs == [Leg("flash_to_host", 3 * 4096, requests=2)]  # type: ignore[arg-type]


def test_rows() -> None:
    """A head comes in pieces; its scores are computed piece by piece, its values behind all of
    them; then the next head's."""
    smart = load_preset("smartssd").accelerator
    assert isinstance(smart, Accelerator)
    size = 4096 * 512
    heads = {(0, 0): HeadRows(4096, size, 1), (0, 1): HeadRows(4096, size, 0)}
    reads = rows.reads(heads, to_host=False)
    assert [(leg.route, leg.size_bytes, leg.requests) for leg in reads] == [
        ("flash_read", size // 2, count) for count in (1, 0, 0, 0)
    ]
    assert rows.shown(heads) == [Leg("device_to_host", 2 * size, (0, 1, 2, 3))]
    legs, results = rows.attend(heads, HandOver(1, 0, frozenset(), returns_lse=False), smart)
    assert [leg.route for leg in legs] == [
        "host_to_device",
        *[COMPUTE, COMPUTE, COMPUTE, "device_to_host"] * 2,
    ]
    assert [leg.after for leg in legs] == [
        (),
        (4, 0),
        (5, 1),
        (6,),
        (7,),
        (4, 2),
        (9, 3),
        (10,),
        (11,),
    ]
    assert results == [8, 12]
    assert sum(leg.flop for leg in legs) == 2 * 4 * 128 * 4096
    waiting, _ = rows.attend({}, HandOver(4, 10, frozenset({(0, 1)}), returns_lse=True), smart)
    assert [leg.size_bytes for leg in waiting if leg.route != COMPUTE] == [
        4 * 256 + 10 * (16 + 256),
        4 * (256 + 4),
    ]
