"""What figures of a spec cost: each that is said to pace moves some time, and no other does;
latency is as the host sees it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx import errors
from espnx.device.emulation.costs import PACING, FlashCosts, check_latency, figures_of, is_pacing
from espnx.device.emulation.links import ROUTES
from espnx.device.emulation.rows import capabilities_of
from espnx.device.emulation.topology import Topology
from espnx.device.model.reader import Figure
from espnx.device.model.spec import (
    Accelerator,
    DeviceSpec,
    Flash,
    Links,
    Memory,
    Power,
    Price,
    load_preset,
    presets,
)
from espnx.device.pages import page_reads
from tests.device.emulation.test_topology import figure

GB, US = 1e9, 1e-6


def whole() -> DeviceSpec:
    """Every figure that there is, each of them in the way of something."""
    return DeviceSpec(
        "whole",
        "a test",
        Flash(
            figure(2 * GB),
            figure(1 * GB),
            figure(4096),
            figure(8),
            figure(4),
            figure(0.5 * GB),
            figure(20 * US),
            figure(200 * US),
            figure(3000 * US),
            figure(80 * US),
            figure(30 * US),
            figure(200_000),
            figure(50_000),
        ),
        Links(figure(1.5 * GB), figure(2 * GB), figure(2), figure(4.5 * GB), figure(1 * US)),
        Memory(figure(1 << 20), figure(1.8 * GB), figure(1 << 16)),
        Accelerator(
            ("attend", "maxsim"),
            {1: figure(1 * GB), 4: figure(3 * GB)},
            figure(5 * GB),
            figure(0.9 * GB),
            figure(128),
            figure(128),
            figure(32),
            figure(-10_000),
            figure(GB),
            figure(128),
            "synchronous",
            figure(5 * US),
        ),
        figure(1e12),
        figure(1e15),
        Power(figure(10), figure(12), {1: figure(3)}, figure(1e-12)),
        Price(figure(100), figure(1)),
    )


def times_of(spec: DeviceSpec) -> list[object]:
    """Of work that comes to every part, alone and shared, and of what a device says that it can
    do."""
    found: list[object] = []
    for sizes in ([(4096, 1)], [(1 << 20, 256), (65_536, 1)], [(50_000_000, 3)]):
        for route in ROUTES:
            for devices in ([0], [0, 1, 2, 3]):
                with Topology(spec, 4, stretch=0) as topology:
                    sent = [
                        topology.transfer(device, route, size, requests=n)
                        for size, n in sizes
                        for device in devices
                    ]
                    found.append([topology.wait(each) for each in sent])
    for flop, size_bytes in ((1e6, 0), (0, 1 << 20), (1e7, 1 << 20)):
        for group in (1, 4):
            with Topology(spec, 1, stretch=0) as topology:
                found.append(topology.wait(topology.compute(0, flop, size_bytes, group=group)))
    without_kernels = replace(spec, accelerator=replace(spec.accelerator, rates={}))  # type: ignore[type-var]
    with Topology(without_kernels, 1, stretch=0) as topology:
        found.append(topology.wait(topology.compute(0, 1e9, 0)))
    found.append(spec.memory.size)
    try:
        found.append(capabilities_of(spec, near_storage=True))
    except errors.InvalidInputError as error:
        found.append(str(error))
    return found


def changed(value: Any, path: list[str]) -> Any:
    """The same spec with one figure changed by a third."""
    if isinstance(value, Figure):
        factor = 0.5 if path == ["halved"] else 0.67
        return replace(value, value=value.value * factor)
    if isinstance(value, Mapping):
        return {
            key: changed(each, path[1:]) if str(key) == path[0] else each
            for key, each in value.items()
        }
    return replace(value, **{path[0]: changed(getattr(value, path[0]), path[1:])})


def names_of(value: Any, prefix: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if isinstance(value, Figure):
        return [prefix]
    if isinstance(value, Mapping):
        return [name for key, each in value.items() for name in names_of(each, (*prefix, str(key)))]
    if is_dataclass(value):
        return [
            name
            for each in fields(value)
            for name in names_of(getattr(value, each.name), (*prefix, each.name))
        ]
    return []


@pytest.mark.parametrize("path", names_of(whole()), ids=".".join)
def test_what_paces_and_what_informs(path: tuple[str, ...]) -> None:
    """`devices_per_port` is whole: of two, one."""
    steps = [*path, "halved"] if path[-1] == "devices_per_port" else list(path)
    moves = times_of(changed(whole(), steps)) != times_of(whole())
    if path == ("flash", "cell_read_time"):
        moves |= times_of(changed(whole(), list(path))) != times_of(whole())
    assert moves == is_pacing(".".join(path))


def test_what_is_said_of_figures(tmp_path: Path) -> None:
    said = figures_of(whole())
    assert {
        ".".join(name.split(".")[:2]) for name, words in said.items() if "; paces" in words
    } == PACING
    assert said["flash.read_latency"].endswith("paces)")
    assert said["price.device"].endswith("informs)")
    assert len(said) == len(names_of(whole()))


def test_docs_name_them() -> None:
    """The table of docs/device-specs.md marks what paces with its name in bold."""
    text = (Path(__file__).parents[3] / "docs" / "device-specs.md").read_text()
    table = text[text.index("| Section | Figures |") : text.index("\\* must be given")]
    section, found = "", set[str]()
    for line in table.strip().splitlines()[2:]:
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")]
        section = cells[0].strip("`") or section
        found |= {f"{section}.{name}" for name in re.findall(r"\*\*`([a-z_]+)`\*\*", cells[1])}
    assert found == PACING


@pytest.mark.parametrize(
    "name", [each for each in presets() if load_preset(each).flash.read_latency]
)
def test_a_read_alone_is_as_the_host_sees_it(name: str) -> None:
    """4 KiB: what the spec says, links and all. Inside, the links' time is not in it; where the
    cells' time is known, that is it."""
    spec = load_preset(name)
    assert spec.flash.read_latency is not None
    costs = FlashCosts(spec)
    with Topology(spec, 1, stretch=0) as topology:
        assert topology.wait(topology.transfer(0, "flash_to_host", 4096)) == pytest.approx(
            spec.flash.read_latency.value, rel=1e-9
        )
        begun = topology.now()
        inside_s = topology.wait(topology.transfer(0, "flash_read", 4096)) - begun
    assert inside_s <= spec.flash.read_latency.value * (1 + 1e-9)
    if spec.flash.cell_read_time is not None:
        assert costs.inside_s == spec.flash.cell_read_time.value


def test_latency_inside_is_without_the_links() -> None:
    made = replace(whole(), flash=replace(whole().flash, cell_read_time=None))
    with Topology(made, 1, stretch=0) as topology:
        assert topology.wait(topology.transfer(0, "flash_to_host", 4096)) == pytest.approx(80 * US)
        begun = topology.now()
        inside_s = topology.wait(topology.transfer(0, "flash_read", 4096)) - begun
    before_s = 80 * US - 1 * US - max(4096 / (1.5 * GB), 1 / 200_000)
    assert inside_s == pytest.approx(before_s + max(1 / 200_000, 4096 / (1.8 * GB)))


@pytest.mark.parametrize(
    ("size_bytes", "requests", "seconds"),
    [
        (0, 1, 0.0),
        (1, 1, 1e-5),
        (512 * 10**6, 10**6, 10.0),
        (1 << 30, 1, (1 << 30) / 1e8),
        (1 << 20, 1048, (1 << 20) / 1e8),
        (1 << 20, 1049, 1.049e-2),
    ],
)
def test_bytes_or_requests_whichever_take_longer(
    size_bytes: int, requests: int, seconds: float
) -> None:
    made = DeviceSpec(
        "made", "a test", Flash(figure(1e8), random_reads=figure(1e5)), Links(figure(1e9))
    )
    for route in ("flash_to_host", "flash_read"):
        with Topology(made, 1, stretch=0) as topology:
            assert topology.wait(
                topology.transfer(0, route, size_bytes, requests=requests)
            ) == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("depth", [1, 4, 64])
def test_a_queue_is_as_fast_as_its_depth_lets_it(depth: int) -> None:
    """Each read begins when the one `depth` before it has come: depth over latency, or what flash
    reads in a second, whichever is less."""
    made = DeviceSpec(
        "made",
        "a test",
        Flash(figure(1e9), read_latency=figure(1e-4), random_reads=figure(1e5)),
        Links(figure(2e9)),
    )
    with Topology(made, 1, stretch=0) as topology:
        reads = [topology.transfer(0, "flash_to_host", 4096) for _ in range(depth)]
        for i in range(2000):
            reads.append(topology.transfer(0, "flash_to_host", 4096, after=reads[i]))
        taken_s = topology.wait(reads)
    assert len(reads) / taken_s == pytest.approx(min(depth / 1e-4, 1e5), rel=0.05)


def test_specs_without_latency() -> None:
    without = {name for name in presets() if not FlashCosts(load_preset(name)).has_latency}
    assert without == {
        "cosmos-conventional",
        "cosmos-sync-pe",
        "cosmos-async-pe",
        "ragx",
        "hilos-isp",
        "pm9a3",
        "cd8p",
        "cpu-dram",
    }
    for name in without:
        with pytest.raises(
            errors.InvalidInputError, match=r"flash\.read_latency.*flash\.cell_read_time"
        ):
            check_latency(load_preset(name))


@pytest.mark.parametrize("seed", range(20))
def test_reads_that_are_made_of_places(seed: int) -> None:
    """As many as there are runs of pages, gaps below a limit included, and each page once."""
    rng = np.random.default_rng(seed)
    n, gap_pages = int(rng.integers(0, 40)), int(rng.integers(0, 3))
    file, begin, size = rng.integers(0, 3, n), rng.integers(0, 200_000, n), rng.integers(0, 9000, n)
    size[begin % 7 == 0] = 0
    begins, moved_bytes = page_reads(file, begin, size, gap_pages * 4096)
    runs = read = 0
    for each in range(3):
        covered = np.zeros(100, dtype=bool)
        for b, s in zip(begin[file == each], size[file == each], strict=True):
            if s:
                covered[b // 4096 : -(-(b + s) // 4096)] = True
        pages = np.flatnonzero(covered)
        between = np.diff(pages) - 1
        runs += int(len(pages) > 0) + int((between > gap_pages).sum())
        read += len(pages) + int(between[between <= gap_pages].sum())
    assert int(begins.sum()) == runs
    assert int(moved_bytes.sum()) == read * 4096
    assert (moved_bytes >= 0).all()
    assert not begins[size == 0].any()
    assert not moved_bytes[size == 0].any()
