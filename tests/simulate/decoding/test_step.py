"""A token's way: beside arithmetic where everything follows one another, within bounds elsewhere,
and each mechanism at the parts where it belongs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from espnx.simulate.decoding.machine import Machine, load_system
from espnx.simulate.decoding.parts import decoder_system, flash_bytes_per_s
from espnx.simulate.decoding.shape import Shape
from espnx.simulate.decoding.step import (
    PIECES,
    Load,
    Work,
    _NearStorage,
    decode,
    prefill,
    write_bytes_per_s,
)
from espnx.simulate.figures import middles
from espnx.simulate.specs.kinds import ModelSpec, NetworkSpec, SystemSpec
from espnx.simulate.specs.load import load, presets

GEMM = 312e12 * 0.675  # an A100, the middle of its range
BATCH, CONTEXT = 16, 16384


def shape(name: str) -> Shape:
    return Shape.of(load(ModelSpec, name))


def machine(
    name: str,
    techniques: tuple[str, ...] | None = None,
    without: str | None = None,
    **values: float,
) -> Machine:
    specs = load_system(name)
    known = middles(specs.ranges)
    assert all(each.replace("__", ".") in known for each in values)
    known |= {each.replace("__", "."): value for each, value in values.items()}
    return specs.machine(known, techniques=techniques, without=without)


def products_s(hidden: int, intermediate: int) -> float:
    """Of a layer of OPT for the batch: each matrix is read from the GPU's memory, or its products
    take longer."""
    found = 0.0
    for parameters in (3 * hidden**2, hidden**2 + 2 * hidden * intermediate):
        found += max(2 * parameters * BATCH / GEMM, 2 * parameters / 1555e9)
    return found


def test_attention_on_the_cpu_over_memory() -> None:
    """One thing after another; weights are ready before."""
    hidden = 7168
    rows_bytes = 4 * hidden * CONTEXT * BATCH
    result_bytes = 2 * hidden * BATCH
    layer_s = rows_bytes / 25e9 + products_s(hidden, 28672)
    layer_s += result_bytes / 204.8e9 + result_bytes / 24.5e9
    step = decode(machine("flexgen-dram"), Load(shape("opt-30b"), BATCH, CONTEXT))
    # a piece of weights may be before the result on the link
    piece_s = 24 * hidden**2 / PIECES / 24.5e9
    assert step.step_s == pytest.approx(48 * layer_s, abs=48 * piece_s)
    assert step.step_s >= 48 * layer_s * (1 - 1e-9)
    assert step.busy_s["cpu"] == pytest.approx(48 * rows_bytes / 25e9)


def test_attention_near_storage_without_any_technique() -> None:
    hidden = 9216
    rows_bytes = 4 * hidden * CONTEXT * BATCH / 16
    piece_bytes = rows_bytes / PIECES
    layer_s = 2 * 72 * BATCH * 60e-6 / 2.5  # rows that are written alone
    layer_s += 100e-6 + rows_bytes / (0.8335 * 3e9)
    layer_s += 2 * piece_bytes / 13e9 + piece_bytes / 11.9e9
    layer_s += products_s(hidden, 36864)
    step = decode(machine("smartssd-16", ()), Load(shape("opt-66b"), BATCH, CONTEXT))
    # queries go down and results up: a thousandth
    for way in ("in", "out"):
        passed_s = 64 * 2 * hidden * BATCH / 31.508e9
        assert step.busy_s[f"uplink {way}"] == pytest.approx(passed_s, rel=1e-9)
    assert step.step_s == pytest.approx(64 * layer_s, rel=2e-3)


def test_drives_are_read_and_then_attended_over() -> None:
    """FlexGen on drives: the copy threads take all rows of a layer, then the CPU."""
    rows_bytes = 4 * 7168 * CONTEXT * BATCH
    step = decode(machine("flexgen-4ssd"), Load(shape("opt-30b"), BATCH, CONTEXT))
    least_s = 48 * (rows_bytes / 10.5e9 + rows_bytes / 25e9)
    # the first piece of a drive comes from flash alone, and new rows of a token pass, too
    assert least_s < step.step_s < least_s * (1 + 2 / PIECES)
    at_once = decode(
        machine("flexgen-4ssd", without="in turn"), Load(shape("opt-30b"), BATCH, CONTEXT)
    )
    assert at_once.step_s < 48 * rows_bytes / 10.5e9 * 1.05


#: The in-storage device has no kernel for heads that share K and V.
PAIRS = [
    (system, model)
    for system in presets(SystemSpec)
    for model in ("opt-175b", "qwen2.5-32b", "glam-143b")
    if (system, model) != ("isp-1", "qwen2.5-32b")
]


@pytest.mark.parametrize(("system", "model"), PAIRS)
@pytest.mark.parametrize("share", [0.0, 0.5])
def test_no_part_does_more_than_it_can(system: str, model: str, share: float) -> None:
    known = machine(system)
    load_ = Load(shape(model), BATCH, CONTEXT, share if known.is_near_storage else 0.0)
    for step in (decode(known, load_), prefill(known, load_)):
        assert max(step.busy_s.values()) <= step.step_s * (1 + 1e-9)
        assert step.busy_s[step.bound] == max(step.busy_s.values())
        assert abs(step.residual) < 0.02


def test_weights_bound_a_small_batch() -> None:
    """All of them pass the GPU's link for each token."""
    step = decode(machine("smartssd-16"), Load(shape("opt-66b"), 1, 1024.0))
    weights_s = 64 * (4 * 9216**2 + 2 * 9216 * 36864) * 2 / 24.5e9
    assert weights_s <= step.step_s < weights_s * 1.1
    free = decode(machine("smartssd-16", without="weights"), Load(shape("opt-66b"), 1, 1024.0))
    assert free.step_s < weights_s / 2


def test_x_passes_the_gpu() -> None:
    """Half of K and V's bytes, at the rate at which the GPU reads drives, and its products."""
    load_ = Load(shape("opt-30b"), BATCH, CONTEXT, 1.0)
    step = decode(machine("smartssd-16"), load_)
    x_bytes = 48 * 2 * 7168 * CONTEXT * BATCH
    assert step.busy_s["gpu reads"] == pytest.approx(x_bytes / 13.35e9)
    made_s = 48 * CONTEXT * BATCH * (4 * 7168**2 / GEMM + 8 * 7168 / 1555e9)
    assert made_s < step.busy_s["gpu"] < made_s + 48 * 2 * products_s(7168, 28672)
    assert "accelerator" not in step.busy_s
    none = decode(machine("smartssd-16", without="regeneration"), load_)
    assert none.busy_s["gpu"] < 0.01 * step.busy_s["gpu"]


def test_what_comes_by_a_network_is_bound_by_it() -> None:
    specs = replace(load_system("smartssd-16"), network=load(NetworkSpec, "ethernet-100g"))
    known = specs.machine(middles(specs.ranges))
    load_ = Load(shape("opt-30b"), BATCH, CONTEXT, 1.0)
    step = decode(known, load_)
    assert step.busy_s["network out"] == pytest.approx(48 * 2 * 7168 * CONTEXT * BATCH / 12.5e9)
    assert step.step_s > decode(machine("smartssd-16"), load_).step_s


def test_prefill_is_products_or_writes() -> None:
    """One of them, the other meanwhile."""
    known, shape_ = machine("smartssd-16"), shape("opt-30b")
    step = prefill(known, Load(shape_, BATCH, CONTEXT))
    tokens = BATCH * CONTEXT
    flops = 48 * tokens * (24 * 7168**2 + 4 * 7168 * CONTEXT / 2)
    written_s = 48 * 4 * 7168 * tokens / 16 / 1.04e9
    assert max(flops / GEMM, written_s) <= step.step_s * (1 + 1e-9)
    assert step.step_s < (flops / GEMM + written_s) * 0.9
    slow = prefill(
        machine("smartssd-16", None, None, smartssd__flash__write_bandwidth=0.05e9),
        Load(shape_, BATCH, CONTEXT),
    )
    assert slow.bound == "flash"


@pytest.mark.parametrize("system", ["flexgen-dram", "smartssd-4"])
def test_layers_that_are_left_over(system: str) -> None:
    """Every fifth of 32 layers has experts: as 30 layers, and two without experts."""
    known, mixtral = machine(system), shape("mixtral-8x7b")
    whole, all_, plain = (
        decode(known, Load(replace(mixtral, **more), BATCH, CONTEXT))
        for more in (
            {"layers": 30, "expert_every": 5},
            {"layers": 32, "expert_every": 5},
            {"layers": 2, "experts": 1, "active_experts": 1},
        )
    )
    assert all_.step_s == pytest.approx(whole.step_s + plain.step_s, rel=0.05)
    assert all_.busy_s.keys() == whole.busy_s.keys()
    for name, each in all_.busy_s.items():
        assert each == pytest.approx(whole.busy_s[name] + plain.busy_s.get(name, 0.0)), name


def test_drives_are_written_in_turn() -> None:
    """All are done as soon as what reaches them and their flash allow, not one after another."""
    known = machine("smartssd-16")
    work = Work(decoder_system(known, 1))
    size_bytes = 16e9
    layers = _NearStorage(known, Load(shape("opt-30b"), BATCH, CONTEXT), work)
    layers.write(size_bytes, [], PIECES)
    took_s = float(work.walked().ended_s.max())
    slower = flash_bytes_per_s(known) / write_bytes_per_s(known)
    flash_s = size_bytes / 16 * slower / flash_bytes_per_s(known)
    link_s = size_bytes / known.need("gpu.link")
    # in turn the last drive has its first piece after a sixteenth of the link's time
    assert took_s < max(flash_s, link_s) + link_s / 16 + flash_s / 16
    assert took_s >= max(flash_s, link_s)


def test_a_network_s_latency_holds_nobody_up() -> None:
    """It is passed by many at once: of what takes a second at its bandwidth, pieces do not add
    theirs up."""
    specs = replace(load_system("smartssd-16"), network=load(NetworkSpec, "ethernet-100g"))
    known = middles(specs.ranges)
    slow = specs.machine(known | {"ethernet-100g.latency": 0.01})
    fast = specs.machine(known)
    load_ = Load(shape("opt-30b"), BATCH, CONTEXT)
    by_latency = decode(slow, load_).step_s - decode(fast, load_).step_s
    # a layer waits for it there and back, and for rows that it makes again
    assert 48 * 0.005 < by_latency < 48 * 8 * 0.01
