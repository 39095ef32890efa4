"""Answers: what does not fit, energy, wear, and X for as many sequences as pays."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.decoding.answer import Answer, answer
from espnx.simulate.decoding.machine import Machine, load_system
from espnx.simulate.decoding.schedule import SHARES, effective_s, x_share
from espnx.simulate.decoding.shape import Shape
from espnx.simulate.figures import middles
from espnx.simulate.specs.kinds import ModelSpec
from espnx.simulate.specs.load import load


def machine(name: str, **options: object) -> Machine:
    specs = load_system(name)
    return specs.machine(middles(specs.ranges), **options)  # type: ignore[arg-type]


def shape(name: str) -> Shape:
    return Shape.of(load(ModelSpec, name))


def ask(system: str, model: str, batch: int = 16, context: int = 16384, output: int = 64) -> Answer:
    return answer(machine(system), model, shape(model), batch=batch, context=context, output=output)


def test_energy_is_power_for_a_time() -> None:
    found = ask("flexgen-4ssd", "opt-30b")
    # GPU and host without work, four drives; what they do beside it
    idle_w = 50 + 120 + 4 * 13
    watts = idle_w + 200 * found.stage("gpu").busy + 220 * found.stage("cpu").busy
    assert found.watts == pytest.approx(watts)
    assert found.joules_per_token == pytest.approx(watts / found.tokens_per_s)
    near = ask("smartssd-16", "mixtral-8x7b")
    idle_w = 50 + 120 + 16 * (10 + 15.39)
    assert near.watts == pytest.approx(idle_w + 200 * near.stage("gpu").busy)
    unknown = ask("isp-1", "opt-30b")
    assert unknown.watts is None
    assert unknown.unknown == ("power of hilos-isp", "endurance of hilos-isp")


def test_tokens_a_second() -> None:
    found = ask("smartssd-16", "opt-30b")
    assert found.tokens_per_s == 16 / found.step_s
    assert found.run_tokens_per_s == 16 * 64 / (found.prefill_s + 64 * found.step_s)
    assert found.drives_dollars == 16 * 2400 + 10000
    per_dollar = found.tokens_per_s_per_drives_dollar
    assert per_dollar == pytest.approx(found.tokens_per_s / (16 * 2400 + 10000))
    longer = ask("smartssd-16", "opt-30b", output=2048)
    assert longer.run_tokens_per_s > found.run_tokens_per_s


def test_wear() -> None:
    """A token's K and V are 4 h bytes a layer; half of the sequences keep X, 2 h; rows that are
    written alone are pages of 4 KiB."""
    whole = 48 * 4 * 7168 * (16384 + 64)
    assert ask("flexgen-16ssd", "opt-30b").written_bytes == whole
    near = ask("smartssd-16", "opt-30b")
    assert near.x_share == 0.5
    assert near.written_bytes == 0.75 * whole
    assert near.sequences_until_worn == pytest.approx(16 * 7.008e15 / near.written_bytes)
    plain = answer(
        machine("smartssd-16", techniques=()),
        "opt-30b",
        shape("opt-30b"),
        batch=16,
        context=16384,
        output=64,
    )
    assert plain.written_bytes == 48 * 4 * 7168 * (16384 + 64 * 16)
    assert ask("flexgen-dram", "opt-30b").sequences_until_worn is None


@pytest.mark.parametrize("system", ["smartssd-4", "smartssd-8", "smartssd-16"])
@pytest.mark.parametrize("model", ["opt-30b", "opt-175b", "qwen2.5-32b"])
def test_x_for_as_many_as_pays(system: str, model: str) -> None:
    """Of its choices none is predicted to be faster, and where X is larger than K and V there is
    none of it."""
    known, shape_ = machine(system), shape(model)
    share = x_share(known, shape_, 16, 32768.0)
    best = min(effective_s(known, shape_, 16, 32768.0, each) for each in SHARES)
    assert effective_s(known, shape_, 16, 32768.0, share) == best
    assert (share == 0) == (model == "qwen2.5-32b")
    assert x_share(machine(system, techniques=("writeback",)), shape_, 16, 32768.0) == 0
    for batch in (1, 2, 5, 8):  # whole sequences keep X, or none does
        assert (batch * x_share(known, shape_, batch, 32768.0)).is_integer()


@pytest.mark.parametrize("n", [4, 8, 16])
@pytest.mark.parametrize(("model", "hidden"), [("opt-30b", 7168), ("opt-66b", 9216)])
def test_the_paper_s_cost_model(n: int, model: str, hidden: int) -> None:
    """HILOS section 4.2, of one token: the least max(T_GPU, T_SSD, T_PCI) of powers of two."""
    gemm, ssd, pci = 312e12 * 0.675, n * 3e9 * 0.8335, 13.35e9

    def effective_s(alpha: float) -> float:
        return max(
            alpha * 4 * hidden**2 / gemm,
            (alpha * 2 * hidden + (1 - alpha) * 4 * hidden) / ssd,
            alpha * 2 * hidden / pci,
        )

    best = min((0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1), key=effective_s)
    assert x_share(machine(f"smartssd-{n}"), shape(model), 16, 32768.0) == best


def test_x_over_a_narrow_link() -> None:
    """One device of 16 GB/s behind a link of 8: all of X would wait for the link."""
    share = x_share(machine("isp-1"), shape("opt-30b"), 16, 32768.0)
    assert share == 0.5
    half_s = (0.5 * 2 + 0.5 * 4) / (16e9 * 0.8335)
    assert half_s < 2 / 8e9


@pytest.mark.parametrize("model", ["opt-30b", "opt-66b", "opt-175b"])
def test_one_in_storage_device_is_as_good_as_four(model: str) -> None:
    """HILOS section 7.1; the page says within a tenth."""
    one, four = (ask(system, model).tokens_per_s for system in ("isp-1", "smartssd-4"))
    assert one == pytest.approx(four, rel=0.1)


def test_what_does_not_fit() -> None:
    """By how many bytes is said."""
    # 361.5 GB of K and V for 16,384 tokens; 59.2 GB of weights; 8 GiB of buffers; 550 GB there
    with pytest.raises(InvalidInputError, match=r"memory of flexgen-dram; got .*GiB too much"):
        ask("flexgen-dram", "opt-30b", context=32768)
    with pytest.raises(InvalidInputError, match="does not fit the drives of smartssd-4"):
        ask("smartssd-4", "opt-175b", batch=64, context=131072)
    for words, said in (
        ({"batch": 0}, "a batch; got 0"),
        ({"context": 0}, "a context; got 0"),
        ({"output": 1 << 25}, "tokens that are made"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            ask("smartssd-4", "opt-30b", **words)


def test_systems_that_are_none(tmp_path: Path) -> None:
    text = (
        Path(__file__).resolve().parents[3] / "espnx/simulate/specs/presets/system/smartssd-4.yaml"
    ).read_text()

    def made(old: str, new: str) -> str:
        path = tmp_path / "own.yaml"
        assert old in text
        path.write_text(text.replace(old, new))
        return str(path)

    assert load_system(made("smartssd-4", "own")).system.name == "own"
    for old, new, said in (
        ("device: smartssd", "device: pm9a3", "a verb that no part of smartssd-4 serves"),
        ("kv: drives", "kv: memory", "attends in drives"),
        ("program: hilos", "program: flexgen", "techniques of smartssd-4"),
        ("name: smartssd-4", "name: smartssd", "a name twice"),
        ("count: {value: 4,", "count: {value: 1025,", "drives of smartssd-4; got 1,025"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            load_system(made(old, new))
    with pytest.raises(
        InvalidInputError,
        match=r"a pass in the drives of isp-1; got 5.*hilos-isp has 1; expected 1 to 1. Fix: a",
    ):
        ask("isp-1", "qwen2.5-32b")
    with pytest.raises(InvalidInputError, match="a mechanism; got luck"):
        machine("smartssd-4", without="luck")


def test_what_is_not_known_of_drives() -> None:
    """Wear and fit have a reason where drives keep something, and are no matter elsewhere."""
    known = machine("smartssd-4")
    values = {
        name: value
        for name, value in known.values.items()
        if name not in ("smartssd.endurance", "smartssd.capacity")
    }
    found = answer(
        replace(known, values=values),
        "opt-30b",
        shape("opt-30b"),
        batch=16,
        context=16384,
        output=64,
    )
    assert found.sequences_until_worn is None
    assert found.unknown == (
        "endurance of smartssd",
        "capacity of smartssd, so whether it fits the drives",
    )
    assert ask("flexgen-dram", "opt-30b").unknown == ()
