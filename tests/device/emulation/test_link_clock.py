"""The compiled clock against the plain one, and its rules one by one. But for the last tests it has
a stretch of 0, and moves by being waited for: every time is exact, and none is this machine's."""

from __future__ import annotations

import gc
import os
import random
import signal
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from espnx import errors
from espnx.storage.native import load_native
from tests.device.emulation.oracle import Work, ends
from tests.storage.common import in_child, until

if TYPE_CHECKING:
    from espnx._C import LinkClock, LinkTicket

FOREVER = 60.0


def clock(*latencies_s: float, lanes: int = 64, stretch: float = 0.0) -> LinkClock:
    """With links 0, 1, ..."""
    return load_native().LinkClock(
        [(f"link {number}", each) for number, each in enumerate(latencies_s)], lanes, stretch
    )


def send(
    on: LinkClock,
    path: Sequence[tuple[int, float]],
    size_bytes: int,
    after: Sequence[LinkTicket] = (),
    lane: int = 0,
) -> LinkTicket:
    """Bytes over (link, bytes/s) each."""
    return on.transfer(
        [(link, float(size_bytes), per_s) for link, per_s in path],
        lane,
        size_bytes,
        0.0,
        list(after),
    )


def end(on: LinkClock, ticket: LinkTicket, asked_s: float | None = None) -> float:
    found = on.wait([ticket], asked_s, FOREVER)
    assert found is not None
    return found


def drawn(rng: random.Random, n_links: int, n_works: int, n_lanes: int) -> list[Work]:
    works: list[Work] = []
    issued_s = 0.0
    per_s = [rng.choice([1e6, 5e6, rng.uniform(1e5, 1e7)]) for _ in range(n_links)]
    for number in range(n_works):
        issued_s += rng.choice([0.0, 0.0, rng.expovariate(20.0)])
        links = rng.sample(range(n_links), rng.randint(1, min(n_links, 5)))
        size_bytes = rng.choice([0, 1, 4096, 65536, rng.randrange(1, 200_000)])
        path = [
            (
                link,
                size_bytes * rng.choice([1.0, 1.0, 0.25, 3.0, 0.0])
                if size_bytes
                else rng.choice([0.0, 5e4]),
                per_s[link],
            )
            for link in links
        ]
        after = tuple(rng.sample(range(number), min(number, rng.choice([0, 0, 1, 3]))))
        works.append(
            Work(
                issued_s,
                path,
                size_bytes,
                rng.randrange(n_lanes),
                rng.choice([0.0, 0.0, 1e-3, rng.random() / 50]),
                after,
            )
        )
    return works


def sent(on: LinkClock, works: Sequence[Work]) -> list[LinkTicket]:
    """Each at its time."""
    tickets: list[LinkTicket] = []
    for work in works:
        on.advance(work.issued_s)
        before = [tickets[each] for each in work.after]
        tickets.append(on.transfer(work.path, work.lane, work.size_bytes, work.before_s, before))
    return tickets


@pytest.mark.parametrize("seed", range(40))
def test_every_end_is_the_oracles(seed: int) -> None:
    """Random links and transfers that come after one another, among them many at the same moment on
    links of the same rate."""
    rng = random.Random(seed)
    n_links = rng.choice([1, 2, 6, 40])
    latencies_s = [rng.choice([0.0, 0.0, 1e-3, rng.random() / 50]) for _ in range(n_links)]
    works = drawn(rng, n_links, rng.choice([5, 30, 60]), rng.choice([1, 3, 20]))
    expected_s, busy_s = ends(latencies_s, works)

    on = clock(*latencies_s)
    tickets = sent(on, works)
    order = list(range(len(works)))
    rng.shuffle(order)
    assert {number: end(on, tickets[number]) for number in order} == pytest.approx(
        dict(enumerate(expected_s)), rel=1e-9
    )
    assert on.now() == pytest.approx(max(expected_s))
    assert [use[2] for use in on.traffic()] == pytest.approx(busy_s, rel=1e-9)


def test_hundreds_of_transfers() -> None:
    rng = random.Random(7)
    works = drawn(rng, 64, 400, 40)
    on = clock(*[0.0] * 64)
    tickets = sent(on, works)
    expected_s, _ = ends([0.0] * 64, works)
    assert [end(on, ticket) for ticket in tickets] == pytest.approx(expected_s, rel=1e-9)


def test_first_come_first_served() -> None:
    on = clock(0.0)
    first, second = send(on, [(0, 100.0)], 300), send(on, [(0, 100.0)], 100)
    assert not on.done(first)
    assert end(on, second) == 4.0
    assert on.done(first)
    assert end(on, first) == 3.0


def test_who_comes_to_a_link_finds_what_is_left_of_it() -> None:
    """The first is held back elsewhere: the second has the rest, and does not wait for it."""
    on = clock(0.0, 0.0)
    slow = send(on, [(0, 10.0), (1, 100.0)], 100)
    quick = send(on, [(1, 100.0)], 90, lane=1)
    assert (end(on, quick), end(on, slow)) == pytest.approx((1.0, 10.0))


def test_lanes_share_a_link_evenly() -> None:
    """Two are done at the same time, of which each alone would take half; when one has gone, the
    other has all of it."""
    on = clock(0.0, 0.0, 0.0)
    both = [send(on, [(own, 100.0), (2, 100.0)], 1000, lane=own) for own in (0, 1)]
    assert [end(on, each) for each in both] == pytest.approx([20.0, 20.0])
    long, short = send(on, [(2, 100.0)], 1000), send(on, [(2, 100.0)], 100, lane=1)
    assert [end(on, short) - 20, end(on, long) - 20] == pytest.approx([2.0, 11.0])


def test_what_one_cannot_take_the_others_share() -> None:
    """Max-min: 20 for the one that is held back, 40 each for the two others; and the whole of a
    link that nobody shares."""
    on = clock(0.0, 0.0, 0.0)
    works = [
        send(on, [(0, 20.0), (1, 100.0)], 200),
        *(send(on, [(1, 100.0)], 400, lane=lane) for lane in (1, 2)),
    ]
    alone = send(on, [(2, 50.0)], 500, lane=3)
    assert [end(on, each) for each in (*works, alone)] == pytest.approx([10.0] * 4)


@pytest.mark.parametrize("size_bytes", [1, 4096, 65_536, 1 << 20, 1 << 30, 1 << 50])
def test_links_are_cut_through(size_bytes: int) -> None:
    """In a line of links the slowest counts, and of the others nothing but their latency."""
    on = clock(1e-6, 2e-6, 3e-6, 1e-6)
    ended_s = end(on, send(on, [(0, 3e9), (1, 2e9), (2, 8e9), (3, 31e9)], size_bytes))
    assert ended_s == pytest.approx(7e-6 + size_bytes / 2e9, rel=1e-12)


def test_latency_counts_once_and_takes_no_bandwidth() -> None:
    on = clock(5.0)
    assert [end(on, send(on, [(0, 100.0)], 200)), on.traffic()[0][2]] == [7.0, 2.0]
    both = [send(on, [(0, 100.0)], 100) for _ in range(2)]
    assert [end(on, each) for each in both] == [13.0, 14.0]


def test_what_passes_before_takes_no_bandwidth() -> None:
    """Of two that begin together it passes at the same time."""
    on = clock(0.0)
    both = [on.transfer([(0, 100.0, 100.0)], 0, 100, 5.0, []) for _ in range(2)]
    between = send(on, [(0, 100.0)], 300, lane=1)
    assert [end(on, each) for each in (between, *both)] == [3.0, 6.0, 7.0]


def test_work_of_another_unit_than_bytes() -> None:
    """FLOPs beside bytes, each leg with its own amount; nothing of a size is work all the same."""
    on = clock(0.0, 0.0)
    assert end(
        on, on.transfer([(0, 100.0, 10.0), (1, 5000.0, 100.0)], 0, 100, 0.0, [])
    ) == pytest.approx(50.0)
    assert [use[1] for use in on.traffic()] == [100.0, 5000.0]
    assert end(on, on.transfer([(0, 30.0, 10.0)], 0, 0, 0.0, [])) == pytest.approx(53.0)
    assert end(on, on.transfer([(0, 0.0, 10.0)], 0, 0, 0.0, [])) == pytest.approx(53.0)


def test_traffic_is_what_has_passed() -> None:
    on = clock(0.0)
    ticket = send(on, [(0, 10.0)], 100)
    on.advance(2.5)
    assert on.traffic() == [("link 0", 25.0, 2.5, 0)]
    end(on, ticket)
    assert on.traffic() == [("link 0", 100.0, 10.0, 1)]


def test_one_after_another() -> None:
    """It begins when all before it have ended, without anybody looking; what has ended long ago
    counts as now."""
    on = clock(0.0, 0.0)
    slow, quick = send(on, [(0, 10.0)], 100), send(on, [(1, 10.0)], 10, lane=1)
    last = send(on, [(1, 10.0)], 10, after=[slow, quick])
    assert end(on, last) == 11.0
    on.advance(100.0)
    assert end(on, send(on, [(1, 10.0)], 10, after=[slow])) == 101.0
    on.advance(50.0)  # never back
    assert on.now() == 101.0


def test_a_line_of_a_hundred_thousand() -> None:
    on = clock(0.0)
    line = [send(on, [(0, 1.0)], 1)]
    for _ in range(10_000):
        line.append(send(on, [(0, 1.0)], 1, after=[line[-1]]))
    assert end(on, line[-1]) == 10_001.0
    before = send(on, [(0, 1.0)], 1)
    for _ in range(100_000):
        before = send(on, [(0, 1.0)], 1, after=[before])
    del on, line, before  # freed without as deep a recursion
    gc.collect()


def test_cancelled() -> None:
    """What comes after it is, too; what is in line passes all the same; whoever has its result
    already keeps it."""
    on = clock(0.0)
    ended = send(on, [(0, 1.0)], 1)
    end(on, ended)
    first = send(on, [(0, 1.0)], 10)
    after = send(on, [(0, 1.0)], 10, after=[first])
    last = send(on, [(0, 1.0)], 10, after=[after])
    for each in (ended, first, first):
        on.cancel(each)
    for each in (first, after, last):
        with pytest.raises(errors.TransferCancelledError):
            on.wait([each], None, FOREVER)
        with pytest.raises(errors.TransferCancelledError):
            on.done(each)
        with pytest.raises(errors.TransferCancelledError):
            send(on, [(0, 1.0)], 1, after=[each])
    assert end(on, ended) == 1.0
    assert end(on, send(on, [(0, 1.0)], 1)) == 12.0


def test_closed() -> None:
    on = clock(0.0)
    ended, going = send(on, [(0, 1.0)], 1), send(on, [(0, 1.0)], 1)
    end(on, ended)
    on.close()
    on.close()
    assert end(on, ended) == 1.0
    with pytest.raises(errors.EngineClosedError):
        on.wait([going], None, FOREVER)
    with pytest.raises(errors.EngineClosedError):
        send(on, [(0, 1.0)], 1)


@pytest.mark.parametrize(
    ("path", "lane", "size_bytes", "before_s"),
    [
        ([], 0, 1, 0.0),
        ([(1, 1.0, 1.0)], 0, 1, 0.0),
        ([(-1, 1.0, 1.0)], 0, 1, 0.0),
        ([(0, -1.0, 1.0)], 0, 1, 0.0),
        ([(0, 1.0, 0.0)], 0, 1, 0.0),
        ([(0, float("nan"), 1.0)], 0, 1, 0.0),
        ([(0, 1.0, float("inf"))], 0, 1, 0.0),
        ([(0, 1.0, 1.0)], 0, -1, 0.0),
        ([(0, 1.0, 1.0)], -1, 1, 0.0),
        ([(0, 1.0, 1.0)], 64, 1, 0.0),
        ([(0, 1.0, 1.0)], 0, 1, -1.0),
        ([(0, 1.0, 1.0)], 0, 1, float("nan")),
    ],
)
def test_transfers_that_are_none(
    path: list[tuple[int, float, float]], lane: int, size_bytes: int, before_s: float
) -> None:
    with pytest.raises(errors.InvalidInputError):
        clock(0.0).transfer(path, lane, size_bytes, before_s, [])


def test_clocks_that_are_none() -> None:
    for latency_s, stretch in (
        (-1.0, 0.0),
        (float("nan"), 0.0),
        (0.0, -1.0),
        (0.0, float("inf")),
        (0.0, float("nan")),
    ):
        with pytest.raises(errors.InvalidInputError):
            clock(latency_s, stretch=stretch)
    with pytest.raises(errors.InvalidInputError):
        clock(0.0).advance(float("inf"))
    with pytest.raises(errors.InvalidInputError):
        clock(0.0, stretch=1.0).advance(1.0)


def test_tickets_of_another_clock() -> None:
    ticket = send(clock(0.0), [(0, 1.0)], 1)
    on = clock(0.0)
    for call in (
        lambda: on.wait([ticket], None, 1.0),
        lambda: on.done(ticket),
        lambda: on.cancel(ticket),
        lambda: send(on, [(0, 1.0)], 1, [ticket]),
    ):
        with pytest.raises(errors.InvalidInputError):
            call()


def test_time_that_somebody_waited() -> None:
    """Moments that two wait count once, what nobody waits for not at all; a wait may have begun
    before its call. Where one is late, it does not matter that another waits."""
    on = clock(0.0, 0.0)
    long, short = send(on, [(0, 1.0)], 10), send(on, [(1, 1.0)], 4, lane=1)
    on.advance(1.0)
    end(on, short)  # 1 to 4
    on.advance(6.0)
    end(on, long, asked_s=3.0)  # 3 to 10
    on.advance(20.0)
    end(on, send(on, [(0, 1.0)], 1), asked_s=15.0)  # 15 to 21
    assert on.times() == pytest.approx((21.0, 9.0 + 6.0, 0.0))
    end(on, long, asked_s=8.0)  # it has ended at 10: 10 to 21 are late
    assert on.times() == pytest.approx((21.0, 9.0, 11.0))
    end(on, long, asked_s=30.0)  # not before it is
    assert on.times() == pytest.approx((21.0, 9.0, 11.0))


def test_who_waits_for_several_is_late_for_the_last_alone() -> None:
    """One that ended while another was still waited for was not late."""
    on = clock(0.0)
    slow, fast = send(on, [(0, 1.0)], 10), send(on, [(0, 1.0)], 2)
    assert on.wait([slow, fast], 0.0, FOREVER) == on.wait([fast, slow], 0.0, FOREVER) == 12.0
    assert on.times() == (12.0, 12.0, 0.0)
    on.advance(20.0)
    assert on.wait([fast, slow], 5.0, FOREVER) == 12.0
    assert on.times() == (20.0, 12.0, 8.0)
    assert on.wait([], 20.0, FOREVER) == 20.0
    assert on.times() == (20.0, 12.0, 8.0)


def test_many_waits_take_no_memory_each() -> None:
    """They are added up; what is long past does not count twice."""
    on = clock(0.0)
    for number in range(10_000):
        end(on, send(on, [(0, 1.0)], 1))
        on.advance(2.0 * number + 2)
    assert on.times()[:2] == (20_000.0, 10_000.0)
    end(on, send(on, [(0, 1.0)], 1), asked_s=0.0)
    assert on.times()[1] <= 20_001.0


def test_the_wall_moves_a_stretched_clock() -> None:
    """Nothing ends before the wall has come so far; the virtual end is the links' all the same."""
    on = clock(0.0, stretch=0.5)
    begun, virtual_s = time.monotonic(), on.now()
    ended_s = end(on, send(on, [(0, 10.0)], 1))
    assert ended_s - virtual_s >= 0.1
    assert time.monotonic() - begun >= 0.05 - 1e-4
    assert on.now() >= ended_s
    now_s, waited_s, late_s = on.times()
    assert 0 < waited_s <= ended_s
    assert waited_s + late_s <= now_s


def test_chains_do_not_wait_for_the_wall() -> None:
    """However late somebody looks, each link of a chain begins when the one before has ended."""
    on = clock(0.0, stretch=1e-3)
    first = send(on, [(0, 10.0)], 100)
    last = send(on, [(0, 10.0)], 100, after=[first])
    assert until(lambda: on.done(last))
    assert end(on, last) - end(on, first) == pytest.approx(10.0)


def test_a_deadline() -> None:
    on = clock(0.0, stretch=1e6)
    assert on.wait([send(on, [(0, 1.0)], 1)], None, 0.01) is None
    for deadline_s, asked_s in ((0.0, None), (float("nan"), None), (1.0, float("nan"))):
        with pytest.raises(errors.InvalidInputError):
            on.wait([send(on, [(0, 1.0)], 1)], asked_s, deadline_s)


@pytest.mark.parametrize("closing", [False, True])
def test_waiting_threads_are_woken(closing: bool) -> None:
    on = clock(0.0, stretch=1e9)
    going = send(on, [(0, 1.0)], 1)
    after = send(on, [(0, 1.0)], 1, after=[going])
    raised: list[type[Exception]] = []
    begun = threading.Barrier(3)

    def work(ticket: LinkTicket) -> None:
        begun.wait()
        try:
            on.wait([ticket], None, FOREVER)
        except errors.EspnxError as error:
            raised.append(type(error))

    threads = [threading.Thread(target=work, args=(each,)) for each in (going, after)]
    for thread in threads:
        thread.start()
    begun.wait()
    on.close() if closing else on.cancel(going)
    for thread in threads:
        thread.join()
    assert raised == [errors.EngineClosedError if closing else errors.TransferCancelledError] * 2


@pytest.mark.parametrize("stretch", [0.0, 1e-4])
def test_any_thread_may_call(stretch: float) -> None:
    """All that is sent comes through, once, whoever waits for it."""
    on = clock(0.0, 1e-3, 0.0, stretch=stretch)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        own: list[LinkTicket] = []
        for _ in range(200):
            own.append(
                send(
                    on,
                    [(rng.randrange(2), 1e6), (2, 1e6)],
                    rng.randrange(10_000),
                    after=own[-1:],
                    lane=seed,
                )
            )
            if rng.random() < 0.3:
                end(on, rng.choice(own))
        times = [end(on, each) for each in own]
        if times != sorted(times):
            wrong.append(times)

    wrong: list[list[float]] = []
    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert [use[3] for use in on.traffic()][2] == 8 * 200


def test_ctrl_c(tmp_path: Path) -> None:
    def work() -> bool:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        on = clock(0.0, stretch=1e9)
        ticket = send(on, [(0, 1.0)], 1)
        try:
            (tmp_path / "ready").touch()
            on.wait([ticket], None, FOREVER)
        except KeyboardInterrupt:
            return not on.done(ticket)
        return False

    def interrupt(pid: int) -> None:
        assert until((tmp_path / "ready").exists)
        os.kill(pid, signal.SIGINT)

    assert in_child(work, meanwhile=interrupt) is True


def test_a_child_has_none() -> None:
    on = clock(0.0)
    ticket = send(on, [(0, 1.0)], 1)

    def work() -> list[bool]:
        refused = []
        for call in (
            on.now,
            on.traffic,
            on.times,
            on.close,
            lambda: on.done(ticket),
            lambda: on.wait([ticket], None, 1.0),
        ):
            try:
                call()
            except errors.InvalidInputError:
                refused.append(True)
        return refused

    assert in_child(work) == [True] * 6
    assert end(on, ticket) == 1.0
