"""Machines: what is wrong with one is said before anything is walked."""

from __future__ import annotations

from typing import Any

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.queues import Part, Step
from espnx.simulate.system import Leg, PartGroup, System

HOST = PartGroup("host", None, 1, 8, 1e-6)
LINK = PartGroup("link", "host", 1, 1, 0.0, 1e9)
DIE = PartGroup("die", "link", 4, 1, 5e-5)
READ = (Leg("host"), Leg("die", until="link"), Leg("link", "page"))


def system(*groups: PartGroup, legs: tuple[Leg, ...] = READ) -> System:
    return System("drive", groups or (HOST, LINK, DIE), {"read": legs})


def test_a_route_over_it() -> None:
    drive = system()
    assert drive.parts() == [Part(8, 1e-6), Part(1, 0.0, 1e9), *[Part(1, 5e-5)] * 4]
    assert drive.names() == ["host", "link", *["die"] * 4]
    assert drive.route("read", {"page": 4096}, {"die": 2}) == (
        Step(0),
        Step(4, until=2),
        Step(1, 4096),
    )


def changed(group: PartGroup, **fields: Any) -> PartGroup:
    return PartGroup(**{**vars(group), **fields})


@pytest.mark.parametrize(
    ("groups", "said"),
    [
        ((HOST, changed(LINK, bytes_per_s=0.0), DIE), "the rate of link"),
        ((HOST, changed(LINK, bytes_per_s=-1e9), DIE), "the rate of link"),
        ((HOST, changed(LINK, bytes_per_s=float("inf")), DIE), "the rate of link"),
        ((HOST, LINK, changed(DIE, latency_s=-1.0)), "the latency of die"),
        ((HOST, LINK, changed(DIE, count=0)), "how many die"),
        ((HOST, LINK, changed(DIE, places=0)), "how many die"),
        ((HOST, changed(LINK, behind="die"), DIE), "a circle: link behind die behind link"),
        ((HOST, changed(LINK, behind="switch"), DIE), "link of drive is not connected"),
        ((HOST, LINK, changed(DIE, behind=None)), "die of drive is not connected"),
        ((HOST, LINK, DIE, DIE), "a name twice"),
    ],
)
def test_parts_that_are_wrong(groups: tuple[PartGroup, ...], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        system(*groups)


@pytest.mark.parametrize(
    ("legs", "said"),
    [
        ((), "no leg"),
        ((Leg("host"), Leg("host")), "a part twice"),
        ((Leg("lnk"),), r"did you mean link\?"),
        ((Leg("link"), Leg("die", until="link")), "until when read on drive keeps die"),
        ((Leg("die", until="die"),), "a later leg"),
    ],
)
def test_ways_that_are_wrong(legs: tuple[Leg, ...], said: str) -> None:
    with pytest.raises(InvalidInputError, match=said):
        system(legs=legs)


def test_a_verb_that_no_part_serves() -> None:
    with pytest.raises(InvalidInputError, match="a verb that no part of drive serves; got reed"):
        system().route("reed", {}, {})
