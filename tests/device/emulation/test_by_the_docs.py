"""Topologies of random specs, asked at random, beside what docs/device-specs.md says of them, in
plain Python: which links each route has, what each figure costs, what goes one after the other. Who
shares a link how is the oracle's."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from espnx.device.emulation.topology import Topology, Transfer
from espnx.device.model.reader import Figure
from espnx.device.model.spec import Accelerator, DeviceSpec, Flash, Links, Memory
from tests.device.emulation.oracle import Work, ends
from tests.device.emulation.test_topology import figure

WAYS = {
    "flash_read": ["flash read", "memory"],
    "flash_write": ["flash write"],
    "host_to_device": ["uplink in", "port in", "link in", "memory"],
    "device_to_host": ["memory", "link out", "port out", "uplink out"],
    "host_to_flash": ["uplink in", "port in", "link in", "flash write"],
    "flash_to_host": ["flash read", "link out", "port out", "uplink out"],
}
SIZES = [0, 1, 511, 4096, 65_536, 1 << 20, 1 << 30]


def drawn(rng: random.Random) -> DeviceSpec:
    def maybe(low: float, high: float) -> Figure | None:
        return figure(rng.uniform(low, high)) if rng.random() < 0.6 else None

    reads, writes = figure(rng.uniform(5e8, 8e9)), maybe(2e8, 4e9)
    flash = Flash(
        reads,
        writes,
        cell_read_time=maybe(1e-5, 1e-4),
        read_latency=maybe(2e-5, 2e-4),
        write_latency=maybe(1e-5, 1e-4),
        random_reads=maybe(2e4, 1e6),
        random_writes=maybe(1e4, 3e5),
    )
    port, uplink = maybe(1e9, 9e9), maybe(1e9, 2e10)
    links = Links(
        figure(rng.uniform(5e8, 8e9)),
        port,
        figure(rng.choice([1.0, 2.0, 3.0])) if port else None,
        uplink,
        maybe(1e-7, 5e-6),
    )
    accelerator = Accelerator(("maxsim",), peak=maybe(1e9, 1e12), stream_bandwidth=maybe(1e8, 5e9))
    return DeviceSpec(
        "drawn", "a test", flash, links, Memory(bandwidth=maybe(1e9, 2e10)), accelerator
    )


class Docs:
    """What the page says of one spec."""

    def __init__(self, spec: DeviceSpec, n: int):
        self.spec, self.latencies, self.numbers, self.rates = (
            spec,
            list[float](),
            dict[str, int](),
            dict[str, float](),
        )
        per_port = int(spec.links.devices_per_port.value) if spec.links.devices_per_port else 1
        self.port_of = [device // per_port for device in range(n)]

    def link(self, device: int, name: str) -> int | None:
        flash, links, memory = self.spec.flash, self.spec.links, self.spec.memory
        figures = {
            "flash read": flash.read_bandwidth,
            "flash write": flash.write_bandwidth or flash.read_bandwidth,
            "memory": memory.bandwidth,
            "link": links.device,
            "port": links.switch_port,
            "uplink": links.uplink,
            "accelerator": figure(1.0),
        }
        kind = name if name in figures else name.split()[0]
        if (found := figures[kind]) is None:
            return None
        whose = {"port": f"port {self.port_of[device]}", "uplink": "all"}.get(
            kind, f"device {device}"
        )
        key = f"{whose} {name}"
        if key not in self.numbers:
            self.numbers[key] = len(self.latencies)
            self.latencies.append(links.latency.value if kind == "link" and links.latency else 0.0)
            self.rates[key] = found.value
        return self.numbers[key]

    def rate(self, number: int) -> float:
        return next(self.rates[key] for key, each in self.numbers.items() if each == number)

    def flash_s(self, size: int, requests: int, *, is_read: bool) -> float:
        flash = self.spec.flash
        bandwidth = (
            flash.read_bandwidth if is_read else flash.write_bandwidth or flash.read_bandwidth
        )
        rate = flash.random_reads if is_read else flash.random_writes
        return max(size / bandwidth.value, requests / rate.value if rate else 0.0)

    def before_s(self, route: str, size: int) -> float:
        flash, links = self.spec.flash, self.spec.links
        if not size or "flash" not in route:
            return 0.0
        is_read = route in ("flash_read", "flash_to_host")
        wires = [each.value for each in (links.device, links.switch_port, links.uplink) if each]
        alone_s = max(self.flash_s(4096, 1, is_read=is_read), *(4096 / each for each in wires)) + (
            links.latency.value if links.latency else 0
        )
        latency = flash.read_latency if is_read else flash.write_latency
        seen_s = max(0.0, latency.value - alone_s) if latency else None
        cells_s = flash.cell_read_time.value if is_read and flash.cell_read_time else None
        first, second = (cells_s, seen_s) if route == "flash_read" else (seen_s, cells_s)
        return first if first is not None else second or 0.0

    def transfer(
        self,
        now_s: float,
        device: int,
        route: str,
        size: int,
        requests: int,
        after: tuple[int, ...],
    ) -> Work:
        path = []
        for name in WAYS[route]:
            if (number := self.link(device, name)) is not None:
                if name.startswith("flash") and size:
                    flash_s = self.flash_s(size, requests, is_read=name == "flash read")
                    path.append((number, flash_s, 1.0))
                else:
                    path.append((number, float(size), self.rate(number)))
        return Work(
            now_s,
            path,
            size,
            device * 10 + list(WAYS).index(route),
            self.before_s(route, size),
            after,
        )

    def compute(
        self, now_s: float, device: int, flop: float, size: int, after: tuple[int, ...]
    ) -> Work:
        accelerator = self.spec.accelerator
        assert accelerator is not None
        work_s = flop / accelerator.peak.value if accelerator.peak else 0.0
        streamed_s = (
            size / accelerator.stream_bandwidth.value if accelerator.stream_bandwidth else 0.0
        )
        path = [(self.link(device, "accelerator") or 0, max(work_s, streamed_s), 1.0)]
        if (memory := self.link(device, "memory")) is not None:
            path.insert(0, (memory, float(size), self.rate(memory)))
        return Work(now_s, path, size, device * 10 + 9, 0.0, after)


@pytest.mark.parametrize("seed", [*range(40), 1129])
def test_topologies_are_as_the_docs_say(seed: int) -> None:
    rng = random.Random(seed)
    spec, n = drawn(rng), rng.choice([1, 2, 5, 16])
    docs, works, sent = Docs(spec, n), list[Work](), list[Transfer]()
    with Topology(spec, n, stretch=0) as topology:
        now_s = 0.0
        for number in range(rng.choice([1, 10, 40])):
            now_s += rng.choice([0.0, 0.0, rng.expovariate(3000)])
            topology.advance(now_s)
            device, size, route = (
                rng.randrange(n),
                rng.choice([*SIZES, rng.randrange(10**7)]),
                rng.choice([*WAYS, "compute"]),
            )
            after = tuple(rng.sample(range(number), min(number, rng.choice([0, 0, 1, 2]))))
            before = [sent[each] for each in after]
            if route == "compute":
                flop = rng.choice([0.0, 1.0, 1e6, 1e9])
                sent.append(topology.compute(device, flop, size, after=before))
                works.append(docs.compute(now_s, device, flop, size, after))
            else:
                requests = rng.choice([1, 1, 64, max(1, size // 4096), 10**6])
                sent.append(topology.transfer(device, route, size, after=before, requests=requests))
                works.append(docs.transfer(now_s, device, route, size, requests, after))
        expected_s, _ = ends(docs.latencies, works)
        assert [topology.wait(each) for each in sent] == pytest.approx(
            expected_s, rel=1e-9, abs=1e-15
        )


@pytest.mark.parametrize("seed", range(10))
def test_a_million_small_requests_and_one_large(seed: int) -> None:
    """Both as fast as the slower of bytes and requests, and each alone."""
    spec = drawn(random.Random(seed))
    spec = replace(spec, flash=replace(spec.flash, random_reads=figure(1e5)))
    for size, requests in ((512 * 10**6, 10**6), (1 << 30, 1), (1, 1)):
        docs = Docs(spec, 1)
        expected_s, _ = ends(
            *(lambda work: (docs.latencies, [work]))(
                docs.transfer(0.0, 0, "flash_to_host", size, requests, ())
            )
        )
        with Topology(spec, 1, stretch=0) as topology:
            assert topology.wait(
                topology.transfer(0, "flash_to_host", size, requests=requests)
            ) == pytest.approx(expected_s[0], rel=1e-9)
