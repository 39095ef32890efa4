"""COSMOS+: bounds that can be computed by hand, other machines by the same mechanism, refusals."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from espnx.errors import InvalidInputError
from espnx.simulate.calibration import THREADS, WINDOW, calibrate_set_up_s
from espnx.simulate.closed_loop import Answer, ask
from espnx.simulate.cosmos import ELEMENTS, Cosmos, ranges
from espnx.simulate.figures import draw, middles
from espnx.simulate.workloads import KIB, WORKLOADS, load_workload, stress

FIGURES = middles(ranges())
PAGE = 16 * KIB


def of_stress(element: str, threads: int, set_up_s: float = 2e-4, kib: int = 16) -> Answer:
    return ask(Cosmos(element, FIGURES, set_up_s), stress(kib * KIB), threads, window=WINDOW)


@pytest.mark.parametrize("kib", [4, 8, 16])
def test_many_threads_reach_what_bounds(kib: int) -> None:
    """The channels by whole pages where elements compare, or the link by clusters."""
    channels = FIGURES["flash_bytes_per_s"] / PAGE
    fast = of_stress("asynchronous", 32, kib=kib)
    assert (fast.bound, fast.commands_per_s) == ("channel", pytest.approx(channels, rel=1e-3))
    link = FIGURES["link_bytes_per_s"] / (kib * KIB)
    plain = of_stress("conventional", 32, kib=kib)
    assert plain.commands_per_s == pytest.approx(min(link, channels), rel=1e-2)
    assert plain.bound == ("link out" if link < channels else "channel")


def test_a_synchronous_element_stands_while_it_is_set_up() -> None:
    page_s = 8 * PAGE / FIGURES["flash_bytes_per_s"]
    slow = of_stress("synchronous", 32)
    assert slow.bound == "arguments"
    assert slow.commands_per_s == pytest.approx(8 / (2e-4 + page_s), rel=1e-3)
    assert of_stress("asynchronous", 32).commands_per_s == pytest.approx(8 / page_s, rel=1e-3)
    two = of_stress("asynchronous", 32, set_up_s=2 * page_s)  # longer than a page takes
    assert two.commands_per_s == pytest.approx(8 * 2 / (3 * page_s), rel=1e-3)


@pytest.mark.parametrize("element", ELEMENTS)
def test_one_thread_waits_for_nobody(element: str) -> None:
    alone = of_stress(element, 1)
    assert alone.bound == "threads"
    assert alone.commands_per_s == pytest.approx(alone.loop_bound_per_s, rel=1e-9)
    assert sum(stage.waiting_s for stage in alone.stages) == pytest.approx(0, abs=1e-12)
    assert alone.commands_per_s == pytest.approx(1 / alone.command_s, rel=1e-9)


@pytest.mark.parametrize("element", ELEMENTS)
@pytest.mark.parametrize("workload", WORKLOADS)
@pytest.mark.parametrize("threads", [2, 7, 32, 100])
def test_accounts_add_up(element: str, workload: str, threads: int) -> None:
    """No bound is passed, shares are shares, and a command's time is all that it waits and is
    served."""
    found = ask(Cosmos(element, FIGURES, 2e-4), WORKLOADS[workload], threads, window=6000)
    bounds = [each.bound_per_s for each in found.stages if each.bound_per_s is not None]
    assert found.commands_per_s <= min(*bounds, found.loop_bound_per_s) * 1.002
    assert all(0 <= each.busy <= 1 + 1e-9 and 0 <= each.idle <= 1 for each in found.stages)
    spent_s = sum(each.service_s + each.waiting_s for each in found.stages)
    assert spent_s == pytest.approx(found.command_s, rel=0.01)
    assert found.command_s * found.commands_per_s == pytest.approx(threads, rel=0.01)


def test_more_threads_bring_no_less() -> None:
    for element in ELEMENTS:
        rates = [
            ask(Cosmos(element, FIGURES, 2e-4), WORKLOADS["sift"], threads).commands_per_s
            for threads in (1, 2, 4, 8, 16, 32)
        ]
        # what is full stays so, but for chance in the sizes of clusters
        assert all(more > 0.99 * fewer for fewer, more in itertools.pairwise(rates))
        assert rates[3] > 4 * rates[0]


def test_the_same_twice_and_another_seed() -> None:
    board = Cosmos("asynchronous", FIGURES, 2e-4)
    first, again = (ask(board, WORKLOADS["sift"], 8) for _ in range(2))
    assert first == again
    other = ask(board, WORKLOADS["sift"], 8, seed=2)
    assert other != first
    assert other.commands_per_s == pytest.approx(first.commands_per_s, rel=0.02)


def test_other_machines_by_the_same_mechanism() -> None:
    """Half the channels at the same bandwidth: each moves a page in half the time, so that a set-up
    weighs more."""
    eight, four = (
        ask(Cosmos("synchronous", FIGURES, 2e-4, n), stress(), 32, window=WINDOW).commands_per_s
        for n in (8, 4)
    )
    page_s = 4 * PAGE / FIGURES["flash_bytes_per_s"]
    assert four == pytest.approx(4 / (2e-4 + page_s), rel=1e-3)
    assert four < eight


@pytest.mark.parametrize("seed", range(5))
def test_the_calibration_finds_the_ratio(seed: int) -> None:
    figures = draw(ranges(), np.random.default_rng(seed))
    ratio = 1.2 + 0.5 * seed
    set_up_s = calibrate_set_up_s(figures, ratio)
    rates = [
        ask(Cosmos(element, figures, set_up_s), stress(), THREADS, window=WINDOW).commands_per_s
        for element in ("synchronous", "conventional")
    ]
    assert rates[0] / rates[1] == pytest.approx(ratio, rel=1e-3)


def test_what_must_not_be() -> None:
    board = Cosmos("asynchronous", FIGURES)
    for call, said in (
        (lambda: ask(board, stress(), 0), "threads"),
        (lambda: ask(board, stress(), 5000), "threads"),
        (lambda: ask(board, stress(), 1, seed=-1), "a seed"),
        (lambda: ask(board, stress(20 * KIB), 1), "a cluster"),
        (lambda: Cosmos("sync", FIGURES), "a processing element"),
        (lambda: Cosmos("synchronous", FIGURES, channels=0), "channels of flash"),
        (lambda: Cosmos("synchronous", FIGURES, without="luck"), "a mechanism"),
        (lambda: Cosmos("synchronous", FIGURES, math.nan).system(), "the latency of set-up"),
        (lambda: load_workload("shift"), r"did you mean sift\?"),
        (lambda: calibrate_set_up_s(FIGURES, 9.0), "the time of a synchronous set-up"),
        (lambda: board.system().legs("attend"), "a verb that no part of cosmos-async-pe serves"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            call()  # type: ignore[no-untyped-call]
