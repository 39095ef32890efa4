"""Queues without a wall clock: known answers, a plain walk and SimPy as oracles, refusals."""

from __future__ import annotations

import signal
import time
from typing import Any

import numpy as np
import pytest

from espnx.errors import InvalidInputError, OutOfMemoryError
from espnx.simulate import queues
from espnx.simulate.queues import Outcome, Part, Step, walk
from tests.simulate.plain_queues import plain_walk

STAGES_S = (0.0011, 0.0007, 0.0023, 0.0005)


def tandem(stages_s: tuple[float, ...], in_flight: int, n: int = 4000) -> Outcome:
    return walk(
        [Part(1, each) for each in stages_s],
        [[Step(number) for number in range(len(stages_s))]],
        np.zeros(n),
        np.arange(n) % in_flight,
        n_before=in_flight * 20,
        n_until=in_flight * (n // in_flight - 20),
    )


@pytest.mark.parametrize("in_flight", [1, 2, 3, 5, 32])
def test_a_tandem_with_so_many_in_flight(in_flight: int) -> None:
    """N over the sum of the stages, or one over the longest, whichever is less."""
    done = tandem(STAGES_S, in_flight)
    n = np.count_nonzero((done.ended_s > done.begin_s) & (done.ended_s <= done.end_s))
    expected = min(in_flight / sum(STAGES_S), 1 / max(STAGES_S))
    assert n / (done.end_s - done.begin_s) == pytest.approx(expected, rel=1e-9)


def test_the_account_of_a_tandem() -> None:
    done = tandem(STAGES_S, 2)
    window_s = done.end_s - done.begin_s
    for stage_s, account in zip(STAGES_S, done.accounts, strict=True):
        assert account.served_s / window_s == pytest.approx(stage_s / sum(STAGES_S) * 2, rel=1e-3)
        assert account.held_s == account.served_s
        assert account.idle_s == pytest.approx(window_s - account.served_s, rel=1e-9)


@pytest.mark.parametrize("places", [1, 3])
def test_bytes_take_their_time(places: int) -> None:
    done = walk(
        [Part(places, 0.25, 1000.0)], [[Step(0, 500)], [Step(0, 2000)]], [0, 1, 0], [0, 1, 2]
    )
    assert done.ended_s.tolist() == ([0.75, 3.0, 3.75] if places == 1 else [0.75, 2.25, 0.75])


def test_arrivals_are_waited_for() -> None:
    done = walk([Part(1, 1.0)], [[Step(0)]], [0, 0, 0], [0, 0, 1], at_s=np.array([2.0, 2.5, 5.5]))
    assert done.begun_s.tolist() == [2.0, 3.0, 5.5]
    assert done.ended_s.tolist() == [3.0, 4.0, 6.5]


def test_a_place_is_kept_until_a_later_step() -> None:
    """A die with a page in it reads no other, though it is at work no more."""
    die, bus = Part(1, 1.0), Part(1, 0.5)
    kept = walk([die, bus], [[Step(0, until=1), Step(1)]], [0, 0], [0, 1])
    assert kept.ended_s.tolist() == [1.5, 3.0]
    assert (kept.accounts[0].served_s, kept.accounts[0].held_s) == (2.0, 3.0)
    free = walk([die, bus], [[Step(0), Step(1)]], [0, 0], [0, 1])
    assert free.ended_s.tolist() == [1.5, 2.5]


def random_case(seed: int) -> dict[str, Any]:
    """Parts, routes that keep places in the order of the parts, clients and arrivals."""
    rng = np.random.default_rng(seed)
    n_parts, n_routes, n = rng.integers(1, 9), rng.integers(1, 6), int(rng.integers(2, 400))
    parts = [
        Part(
            int(rng.integers(1, 4)),
            float(rng.choice([0, rng.random()])),
            None if rng.random() < 0.3 else float(rng.uniform(1, 100)),
        )
        for _ in range(n_parts)
    ]
    routes = []
    for _ in range(n_routes):
        way = sorted(rng.choice(n_parts, rng.integers(1, n_parts + 1), replace=False).tolist())
        routes.append(
            [
                Step(part, float(rng.integers(0, 50)), int(rng.integers(number, len(way))))
                for number, part in enumerate(way)
            ]
        )
    open_arrivals = rng.random() < 0.5
    client = np.arange(n) if open_arrivals else rng.integers(0, rng.integers(1, n + 1), n)
    n_before = int(rng.integers(0, n))
    after = [
        rng.choice(i, min(i, int(rng.integers(0, 3))), replace=False).tolist() if i else []
        for i in range(n)
    ]
    return {
        "parts": parts,
        "routes": routes,
        "route": rng.integers(0, n_routes, n).tolist(),
        "client": client.tolist(),
        "at_s": np.round(np.cumsum(rng.exponential(0.2, n)), 1).tolist(),
        "after": after if rng.random() < 0.5 else None,
        "n_before": n_before,
        "n_until": int(rng.integers(n_before + 1, n + 1)),
    }


@pytest.mark.parametrize("seed", range(60))
def test_random_systems_as_plain_python_has_them(seed: int) -> None:
    """To the bit, where several events share a moment, too."""
    case = random_case(seed)
    ended_s, begin_s, end_s, accounts = plain_walk(**case)
    done = walk(**case)
    assert done.ended_s.tolist() == ended_s
    assert (done.begin_s, done.end_s) == (begin_s, end_s)
    assert list(done.accounts) == accounts


@pytest.mark.parametrize("seed", range(20))
def test_random_systems_as_simpy_has_them(seed: int) -> None:
    """All arrivals differ here: SimPy has an order of its own within a moment."""
    simpy = pytest.importorskip("simpy", reason="SimPy is not installed (extra [dev])")
    case = random_case(1000 + seed)
    case |= {"n_before": 0, "n_until": len(case["route"]), "client": range(len(case["route"]))}
    rng = np.random.default_rng(seed)
    case["at_s"] = np.cumsum(rng.exponential(0.3, len(case["route"]))).tolist()
    case["after"] = case["after"] or [[]] * len(case["route"])
    env = simpy.Environment()
    done = [env.event() for _ in case["route"]]
    servers = [simpy.Resource(env, part.places) for part in case["parts"]]
    ended_s = [0.0] * len(case["route"])

    def command(number: int) -> Any:
        yield env.timeout(case["at_s"][number])
        yield env.all_of([done[other] for other in case["after"][number]])
        steps, held = case["routes"][case["route"][number]], []
        for at, step in enumerate(steps):
            part, request = case["parts"][step.part], servers[step.part].request()
            yield request
            held.append((step.until, step.part, request))
            takes_s = step.size_bytes / part.bytes_per_s if part.bytes_per_s else 0.0
            yield env.timeout(part.latency_s + takes_s)
            for until, place, taken in held:
                if until == at:
                    servers[place].release(taken)
        ended_s[number] = env.now
        done[number].succeed()

    for number in range(len(case["route"])):
        env.process(command(number))
    env.run()
    assert walk(**case).ended_s == pytest.approx(ended_s, rel=1e-12)


def test_who_waits_for_others() -> None:
    """A fork and a join: the last begins when both have ended, and not before its arrival."""
    parts, routes = [Part(4, 1.0), Part(1, 3.0)], [[Step(0)], [Step(1)]]
    done = walk(
        parts, routes, [0, 0, 1, 0], [0, 1, 2, 3], after=[[], [0], [0], [1, 2]], at_s=[0, 0, 0, 2]
    )
    assert done.ended_s.tolist() == [1.0, 2.0, 4.0, 5.0]
    late = walk(parts, routes, [0, 0], [0, 1], after=[[], [0]], at_s=np.array([0.0, 7.0]))
    assert late.begun_s.tolist() == [0.0, 7.0]


def test_poisson_arrivals_wait_as_queueing_theory_says() -> None:
    """M/D/1: rho s / 2 (1 - rho). The mean of n waits that hang together over about 1 / (1 - rho)^2
    of them."""
    n, rho = 400_000, 0.6
    rng = np.random.default_rng(3)
    at_s = np.cumsum(rng.exponential(1 / rho, n))
    done = walk([Part(1, 1.0)], [[Step(0)]], np.zeros(n), np.arange(n), at_s=at_s)
    waits_s = done.ended_s - done.begun_s - 1.0
    error_s = 5 * waits_s.std() / np.sqrt(n * (1 - rho) ** 2)
    assert waits_s.mean() == pytest.approx(rho / (2 * (1 - rho)), abs=error_s)
    assert error_s < 0.03


def test_ctrl_c_ends_a_walk() -> None:
    """Of 40 million events, long before they have happened."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    begin = time.process_time()
    signal.setitimer(signal.ITIMER_REAL, 0.3)
    try:
        with pytest.raises(KeyboardInterrupt):
            walk([Part(4, 1.0)], [[Step(0)] * 2000], np.zeros(20_000), np.arange(20_000) % 4)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - begin < 2


def test_more_than_memory_holds(monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        @staticmethod
        def walk_queues(*_: object) -> None:
            raise MemoryError

    monkeypatch.setattr(queues, "load_native", Full)
    with pytest.raises(OutOfMemoryError, match="a simulation of 2 commands over 1 parts"):
        walk([Part(1, 1.0)], [[Step(0)]], np.zeros(2), np.zeros(2))


def test_what_must_not_be() -> None:
    """Nothing is walked."""
    fine = {"parts": [Part(1, 1.0), Part()], "routes": [[Step(0)]], "route": [0], "client": [0]}
    circle = [[Step(0, until=1), Step(1)], [Step(1, until=1), Step(0)]]
    for wrong, said in (
        ({"parts": [Part(0, 1.0)]}, "places of part 0"),
        ({"parts": [Part(1, -1.0)]}, "latency of part 0"),
        ({"parts": [Part(1, float("nan"))]}, "latency of part 0"),
        ({"parts": [Part(1, 0.0, -5.0)]}, "rate of part 0"),
        ({"parts": [Part(1, 0.0, 0.0)]}, "rate of part 0; got 0"),
        ({"parts": [Part(1, 0.0, float("nan"))]}, "rate of part 0"),
        ({"parts": [Part(1), Part(1, 0.0, float("inf"))]}, "rate of part 1"),
        ({"routes": [[Step(2)]]}, "step 0 of route 0"),
        ({"routes": [[]]}, "route 0"),
        ({"routes": [[Step(0, -1.0)]]}, "bytes of step 0"),
        ({"routes": [[Step(0, until=1)]]}, "keeps its place"),
        ({"routes": [circle[0], [Step(1, until=1), Step(0)]]}, "a circle"),
        ({"route": [1]}, "a command's route"),
        ({"client": [0, 1]}, "clients of commands"),
        ({"client": [1]}, "a command's client"),
        ({"at_s": np.array([-1.0])}, "a command's arrival"),
        ({"at_s": np.array([0.0, 1.0])}, "arrivals of commands"),
        ({"after": [[0]]}, "what command 0 waits for"),
        ({"after": [[-1]]}, "what command 0 waits for"),
        ({"after": [[], []]}, "where commands begin"),
        ({"n_before": 1}, "commands before the window"),
        ({"n_until": 2}, "commands until the window's end"),
        ({"route": [], "client": []}, "commands before the window"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            walk(**fine | wrong)  # type: ignore[arg-type]
    assert walk(**fine).ended_s.tolist() == [1.0]  # type: ignore[arg-type]
