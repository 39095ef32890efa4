"""What is said of work on emulated devices: times by hand, and none where there is none to be
said."""

from __future__ import annotations

import time
from dataclasses import replace

import pytest

import espnx.device
from espnx.device.emulation.topology import Topology
from espnx.device.emulation.use import DeviceUse, watch
from espnx.device.model.spec import load_spec

SMART = load_spec("smartssd")


def used(topology: Topology, work_s: float = 0.0, size_bytes: int = 4096) -> DeviceUse:
    with watch(Of(topology), bench="--show search") as watched:
        topology.wait(topology.transfer(0, "flash_to_host", size_bytes))
        time.sleep(work_s)
    assert watched.use is not None
    return watched.use


class Of:
    """What stands on devices of that topology."""

    def __init__(self, *topologies: Topology):
        self.topologies = topologies


def test_nobody_waits() -> None:
    """Modelled: the clock of the devices alone, the same every time; what came before is not in
    it."""
    with Topology(SMART, 2, stretch=0) as topology:
        topology.wait(topology.transfer(1, "flash_write", 1 << 20))
        found = used(topology)
        assert found.modelled_s == pytest.approx(82e-6)
        assert (found.virtual_s, found.host_share, found.devices, found.stretch) == (
            None,
            None,
            2,
            0,
        )
        assert (
            found.flash_bytes,
            found.flash_written_bytes,
            found.to_devices_bytes,
            found.to_host_bytes,
        ) == (4096, 0, 0, 4096)
        assert found.summary().startswith(
            "2 x smartssd, emulated: 82 us modelled | 4 KiB from flash | links: 0 B to devices, 4 "
            "KiB to"
        )
        assert "espnx bench device --show search --device smartssd" in found.why


def test_the_devices_are_waited_for() -> None:
    """30 MB take 10 ms, and half a second here."""
    with Topology(SMART, 1, stretch=50) as topology:
        # something else may have the cores
        runs = (used(topology, size_bytes=30_000_000) for _ in range(9))
        found = next(run for run in runs if run.time != "untimed")
        assert found.virtual_s == pytest.approx(10.1e-3, rel=0.25)
        assert found.host_share is not None
        assert (found.modelled_s, found.why) == (None, "")
        assert 0 <= found.host_share <= 0.2


def test_this_machine_took_too_long() -> None:
    """No time at all, and no stretch in millions."""
    with Topology(SMART, 1, stretch=1) as topology:
        found = used(topology, work_s=0.05)
        assert (found.virtual_s, found.modelled_s, found.time) == (None, None, "untimed")
        assert found.host_share is not None
        assert found.host_share > 0.9
        assert "of which 20% may be" in found.why
        assert "espnx bench device" in found.why


def test_a_spec_without_latency() -> None:
    """Large reads may be paced all the same: it is said to be modelled."""
    spec = replace(SMART, flash=replace(SMART.flash, read_latency=None))
    for stretch in (0, 50):
        with Topology(spec, 1, stretch=stretch) as topology:
            runs = (used(topology, size_bytes=30_000_000) for _ in range(9))
            found = next(run for run in runs if run.time != "untimed")
            assert found.modelled_s == pytest.approx(10e-3, rel=0.25 if stretch else 1e-6)
            assert found.virtual_s is None
            assert "flash.read_latency" in found.why


def test_others_meanwhile_and_several_clocks() -> None:
    with Topology(SMART, 1, stretch=0) as one, Topology(SMART, 3, stretch=0) as other:
        with watch(Of(one)) as outer:
            inner = used(one)
        assert outer.use is not None
        for found in (outer.use, inner):
            assert (found.virtual_s, found.modelled_s) == (None, None)
            assert "others asked the same devices" in found.why
        assert used(one).modelled_s == pytest.approx(82e-6), "they have gone"
        with watch(Of(one, other)) as watched:
            for each in (one, other):
                each.wait(each.transfer(0, "flash_to_host", 4096))
        assert watched.use is not None
        assert (watched.use.devices, watched.use.flash_bytes, watched.use.modelled_s) == (
            4,
            8192,
            None,
        )
        assert "opened apart" in watched.use.why


def test_nothing_was_asked() -> None:
    with Topology(SMART, 1, stretch=0) as topology, watch(Of(topology)) as watched:
        pass
    assert watched.use is not None
    assert (watched.use.modelled_s, watched.use.why) == (
        None,
        "untimed: nothing was asked of the devices",
    )


def test_devices_without_a_spec() -> None:
    with watch(espnx.device.open("ssd", "."), None) as watched:
        pass
    assert watched.use is None
