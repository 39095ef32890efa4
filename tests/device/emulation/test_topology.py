"""Devices, ports and the uplink of a spec: what passes them takes as long as its bytes over the
narrowest of them, for 1 to 16 devices."""

from __future__ import annotations

from dataclasses import replace

import pytest

from espnx import errors
from espnx.device.emulation.topology import Topology, Transfer
from espnx.device.model.reader import Figure
from espnx.device.model.spec import Accelerator, DeviceSpec, Flash, Links, Memory, load_preset

MB = 1_000_000
COUNTS = (1, 2, 4, 8, 16)


def figure(value: float) -> Figure:
    return Figure(value, value, "1", "a test", "assumed")


def spec(
    *,
    flash: float = 100,
    link: float = 100,
    port: float | None = None,
    uplink: float | None = None,
    memory: float | None = None,
) -> DeviceSpec:
    """Of MB/s."""
    given = {
        name: None if rate is None else figure(rate * MB)
        for name, rate in (("port", port), ("uplink", uplink), ("memory", memory))
    }
    return DeviceSpec(
        "made",
        "made for a test",
        Flash(figure(flash * MB), figure(flash / 4 * MB)),
        Links(figure(link * MB), given["port"], figure(2), given["uplink"]),
        Memory(bandwidth=given["memory"]),
        Accelerator(("attend", "encode"), {1: figure(10 * MB), 4: figure(40 * MB)}),
    )


def last_end(topology: Topology, tickets: list[Transfer]) -> float:
    return max(topology.wait(each) for each in tickets)


@pytest.mark.parametrize("n", COUNTS)
@pytest.mark.parametrize(
    ("bound", "made", "devices_per_link"),
    [
        ("device", spec(flash=50, link=400, port=1000, uplink=10_000), 1),
        ("link", spec(flash=100, link=50, port=1000, uplink=10_000), 1),
        ("port", spec(flash=100, link=100, port=50, uplink=10_000), 2),
        ("uplink", spec(flash=100, link=100, port=200, uplink=50), 16),
    ],
)
def test_the_narrowest_link_counts(
    bound: str, made: DeviceSpec, devices_per_link: int, n: int
) -> None:
    """Each of the narrow ones has 50 MB/s."""
    size_bytes = 100 * MB
    topology = Topology(made, n, stretch=0.0)
    pieces = [
        topology.transfer(device, "flash_to_host", size_bytes // 20)
        for _ in range(20)
        for device in range(n)
    ]
    bytes_over_rate = size_bytes * min(n, devices_per_link) / (50 * MB)
    assert last_end(topology, pieces) == pytest.approx(bytes_over_rate, rel=1e-9)
    moved = topology.traffic()
    for name in ("uplink out", "port 0 out", "device 0 link out", "device 0 flash read"):
        carried = {"uplink out": n, "port 0 out": min(n, 2)}.get(name, 1)
        assert moved[name].amount == pytest.approx(size_bytes * carried)
    assert moved["uplink in"].amount == 0


@pytest.mark.parametrize("n", COUNTS)
def test_devices_do_not_share_what_is_their_own(n: int) -> None:
    topology = Topology(spec(memory=1000, port=50, uplink=20), n, stretch=0.0)
    assert last_end(
        topology, [topology.transfer(each, "flash_read", 100 * MB) for each in range(n)]
    ) == pytest.approx(1.0, rel=0.01)


def test_both_ways_at_once() -> None:
    topology = Topology(spec(uplink=100), 1, stretch=0.0)
    ways = [
        topology.transfer(0, "host_to_device", 100 * MB),
        topology.transfer(0, "device_to_host", 100 * MB),
    ]
    assert last_end(topology, ways) == pytest.approx(1.0, rel=0.01)


def test_flash_is_read_and_programmed_at_rates_of_their_own() -> None:
    topology = Topology(spec(), 1, stretch=0.0)
    read, written = (
        topology.transfer(0, "flash_read", 100 * MB),
        topology.transfer(0, "flash_write", 100 * MB),
    )
    assert (topology.wait(read), topology.wait(written)) == pytest.approx((1.0, 4.0))
    assert topology.wait(topology.transfer(0, "host_to_flash", 100 * MB)) == pytest.approx(
        8.0, rel=0.01
    )


def test_a_spec_without_writes_programs_as_it_reads() -> None:
    made = spec()
    topology = Topology(
        replace(made, flash=replace(made.flash, write_bandwidth=None)), 1, stretch=0.0
    )
    assert topology.wait(topology.transfer(0, "flash_write", 100 * MB)) == pytest.approx(1.0)


def test_attention_beside_the_rows() -> None:
    """Rows come from flash, the accelerator takes them in, the result goes to the host: one after
    the other, in one line of calls."""
    topology = Topology(spec(memory=1000), 2, stretch=0.0)
    rows = topology.transfer(1, "flash_read", 100 * MB)
    query = topology.transfer(1, "host_to_device", 512)
    done = topology.compute(1, 100 * MB, 100 * MB, group=4, after=[rows, query])
    out = topology.transfer(1, "device_to_host", 512, after=done)
    assert topology.wait(out) == pytest.approx(1.0 + 2.5, rel=0.01)
    assert topology.wait(rows) == pytest.approx(1.0, rel=0.01)
    assert topology.traffic()["device 1 accelerator"].amount == pytest.approx(100 * MB)
    assert topology.traffic()["device 0 accelerator"].amount == 0


@pytest.mark.parametrize(("group", "seconds"), [(1, 10.0), (2, 5.0), (3, 100 / 30), (4, 2.5)])
def test_kernels_of_a_group(group: int, seconds: float) -> None:
    """Two or three heads run on the kernel for four, which takes as long as with four."""
    topology = Topology(spec(), 1, stretch=0.0)
    assert topology.wait(topology.compute(0, 100 * MB, 0, group=group)) == pytest.approx(seconds)


def test_what_computes_as_bytes_pass() -> None:
    made = spec()
    pe = Accelerator(("distances",), stream_bandwidth=figure(50 * MB))
    topology = Topology(replace(made, accelerator=pe), 1, stretch=0.0)
    assert topology.wait(topology.compute(0, 0, 100 * MB)) == pytest.approx(2.0)
    assert topology.wait(topology.compute(0, 1e9, 100 * MB)) == pytest.approx(4.0)
    peak = Topology(replace(made, accelerator=replace(pe, peak=figure(10 * MB))), 1, stretch=0.0)
    assert peak.wait(peak.compute(0, 100 * MB, 100 * MB)) == pytest.approx(10.0)


def test_what_the_spec_does_not_know_bounds_nothing() -> None:
    """A processing element of which no rate is published; a device without ports, an uplink or
    memory."""
    topology = Topology(load_preset("cosmos-sync-pe"), 1, stretch=0.0)
    assert topology.wait(topology.compute(0, 1e12, 1 << 30)) == pytest.approx(0.0)
    assert topology.wait(topology.transfer(0, "flash_to_host", 133 * MB)) == pytest.approx(
        1.0, rel=0.01
    )
    assert set(topology.links) == {
        f"device 0 {name}"
        for name in ("flash read", "flash write", "accelerator", "link in", "link out")
    }


def test_links_of_a_preset() -> None:
    topology = Topology(load_preset("smartssd"), 16, stretch=0.0)
    assert len(topology.links) == 16 * 6 + 8 * 2 + 2
    assert topology.links["port 7 in"] == 7.877e9
    out = [topology.transfer(each, "flash_to_host", 1 << 28) for each in range(16)]
    # the uplink, and not 16 drives of 3 GB/s
    assert last_end(topology, out) == pytest.approx(16 * (1 << 28) / 31.508e9, rel=0.03)


def test_latency_of_a_link() -> None:
    made = spec()
    topology = Topology(
        replace(made, links=replace(made.links, latency=figure(2.0))), 1, stretch=0.0
    )
    assert topology.wait(topology.transfer(0, "device_to_host", 0)) == 2.0


@pytest.mark.parametrize(
    "call",
    [
        lambda it: it.transfer(2, "flash_read", 1),
        lambda it: it.transfer(-1, "flash_read", 1),
        lambda it: it.transfer(0, "flash", 1),
        lambda it: it.transfer(0, "compute", 1),
        lambda it: it.transfer(0, "flash_read", -1),
        lambda it: it.transfer(0, "flash_read", 1.5),
        lambda it: it.transfer(0, "flash_read", 2**63),
        lambda it: it.transfer(0, "flash_read", 1, requests=-1),
        lambda it: it.compute(0, 1.0, 2**63),
        lambda it: it.compute(0, -1.0, 1),
        lambda it: it.compute(0, float("nan"), 1),
        lambda it: it.compute(0, 1, 1, group=5),
        lambda it: it.compute(0, 1, 1, group=0),
        lambda it: it.compute(2, 1, 1),
    ],
)
def test_calls_that_are_wrong(call) -> None:
    with pytest.raises(errors.InvalidInputError):
        call(Topology(spec(), 2, stretch=0.0))


def test_arguments_that_are_wrong() -> None:
    for n, options in ((0, {}), (1.0, {}), (1, {"stretch": -1.0}), (1, {"stretch": float("nan")})):
        with pytest.raises(errors.InvalidInputError):
            Topology(spec(), n, **options)
    drive = Topology(load_preset("pm983"), 1, stretch=0.0)
    with pytest.raises(errors.InvalidInputError, match="no accelerator"):
        drive.compute(0, 1, 1)


def test_a_deadline_says_what_of() -> None:
    with (
        Topology(spec(), 1, stretch=1e9) as topology,
        pytest.raises(errors.DeadlineExceededError, match=r"flash_read of 1000 bytes on device 0"),
    ):
        topology.wait(topology.transfer(0, "flash_read", 1000), deadline_s=0.01)


def test_cancelled_and_closed() -> None:
    topology = Topology(spec(), 1, stretch=0.0)
    ticket = topology.transfer(0, "flash_read", 1000)
    topology.cancel(ticket)
    with pytest.raises(errors.TransferCancelledError):
        topology.wait(ticket)
    topology.close()
    with pytest.raises(errors.EngineClosedError):
        topology.transfer(0, "flash_read", 1000)
