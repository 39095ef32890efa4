"""Whose time it was, and when it is refused."""

from __future__ import annotations

import math

import pytest

from espnx import errors
from espnx.device.emulation.report import HOST_SHARE_MAX, Report, report
from espnx.device.emulation.topology import Times, Topology
from espnx.device.model.spec import load_preset


def test_shares() -> None:
    found = Report(stretch=50.0, wall_s=10.0, waited_s=8.5, late_s=0.5)
    assert (found.virtual_s, found.host_s, found.host_share) == (0.2, 1.5, pytest.approx(0.15))
    assert found.is_valid
    assert found.refusal is None
    assert found.stretch_to_use == 50.0
    found.check()


@pytest.mark.parametrize(("host_s", "waited_s"), [(3.0, 7.0), (9.9, 0.1), (1.0, 3.9), (20.0, 1.0)])
def test_the_stretch_to_use_is_enough_and_not_much_more(host_s: float, waited_s: float) -> None:
    """With it the devices' time is longer and the host's the same; to two figures, so up to a tenth
    more than is needed."""
    found = Report(stretch=10.0, wall_s=host_s + waited_s, waited_s=waited_s, late_s=0.0)
    assert not found.is_valid
    more = found.stretch_to_use / found.stretch
    assert Report(found.stretch_to_use, host_s + waited_s * more, waited_s * more, 0.0).is_valid
    assert not Report(
        found.stretch_to_use, host_s + waited_s * more * 0.9, waited_s * more * 0.9, 0.0
    ).is_valid
    assert float(f"{found.stretch_to_use:.2g}") == found.stretch_to_use


def test_the_limit_is_in() -> None:
    assert Report(1.0, 10.0, 10.0 * (1 - HOST_SHARE_MAX), 0.0).is_valid


def test_the_refusal_says_what_to_do() -> None:
    with pytest.raises(
        errors.TimesNotValidError,
        match=(
            r"30% of 10 s .* stretch of 100; expected at most 20%\. Fix: run it again .* 180, for "
            r"about 16 s"
        ),
    ) as raised:
        Report(100.0, 10.0, 7.0, 0.0).check()
    assert raised.value.stretch_to_use == 180.0


def test_devices_that_nobody_waited_for() -> None:
    """No stretch helps a run that never used them."""
    found = Report(100.0, 10.0, 0.0, 0.0)
    assert found.stretch_to_use == math.inf
    with pytest.raises(errors.TimesNotValidError, match="nobody waited"):
        found.check()


@pytest.mark.parametrize(
    ("waited_s", "is_finite"), [(0.4, True), (0.39, False), (1e-5, False), (1e-9, False)]
)
def test_no_stretch_is_made_of_chance(waited_s: float, is_finite: bool) -> None:
    """A stretch of 10,000 at most is proposed, never millions; beyond, the refusal says why there
    is none."""
    found = Report(100.0, 10.0 + waited_s, waited_s, 0.0)
    assert math.isfinite(found.stretch_to_use) is is_finite
    with pytest.raises(
        errors.TimesNotValidError, match="a stretch of 10000" if is_finite else "too little to say"
    ):
        found.check()


def test_a_run_that_took_no_time() -> None:
    assert Report(100.0, 0.0, 0.0, 0.0).is_valid


def test_of_a_topology() -> None:
    """The wall is all of it; a part is what came since."""
    with Topology(load_preset("smartssd"), 1, stretch=1e3) as topology:
        topology.wait(topology.transfer(0, "flash_read", 30_000))  # 10 us of 3 GB/s: 10 ms here
        before = topology.times()
        found = report(topology)
        topology.wait(topology.transfer(0, "flash_read", 60_000))
        assert 0.01 - 1e-4 <= found.waited_s <= found.wall_s
        part = report(topology, since=before)
        assert 0.02 - 1e-4 <= part.waited_s <= part.wall_s
        assert part.late_s <= part.host_s
        assert report(topology, since=Times(0.0, 0.0, 0.0)).wall_s >= found.wall_s + part.waited_s


def test_a_clock_that_the_wall_does_not_move() -> None:
    with pytest.raises(errors.StateError):
        report(Topology(load_preset("smartssd"), 1, stretch=0.0))
