"""Threads that ask emulated devices together: the same virtual time in every run, whichever thread
the machine runs first."""

from __future__ import annotations

import linecache
import os
import random
import signal
import sys
import threading
import time
from collections.abc import Callable
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import Any, Self

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device import workers as waiting_threads
from espnx.device.emulation.topology import Topology
from espnx.device.model.spec import load_preset
from espnx.device.plain import SsdDevice
from espnx.device.registry import open_device
from espnx.device.workers import Job, Workers, wait
from espnx.postings import SplitPostings, build_split
from tests.device.emulation.test_topology import figure, spec
from tests.integrations.transformers.tiny import enabled, prompt

RUNS = 10


def unsteady(run: int, number: int) -> None:
    """The machine runs threads in another order each time."""
    time.sleep(random.Random(f"{run} {number}").choice([0.0, 0.0, 1e-3, 3e-3]))


def together(topology: Topology, n: int, work: Callable[[int], float]) -> list[float]:
    with ThreadPoolExecutor(n) as pool, Workers([topology]) as workers:
        jobs = [workers.submit(pool, work, number) for number in range(n)]
        return [job.result() for job in jobs]


@pytest.mark.parametrize("n", [1, 2, 4, 8, 16])
def test_devices_that_share_nothing_take_as_long_as_one(n: int) -> None:
    def asked(topology: Topology, run: int) -> list[float]:
        def work(device: int) -> float:
            unsteady(run, device)
            for _ in range(3):
                rows = topology.transfer(device, "flash_read", 3_000_000, requests=3)
                ended_s = topology.wait(topology.compute(device, 1e6, 3_000_000, after=rows))
                unsteady(run, device + 100)
            return ended_s

        return together(topology, topology.n_devices, work)

    with Topology(load_preset("smartssd"), 1, stretch=0) as alone:
        (expected_s,) = asked(alone, 0)
    for run in range(RUNS):
        with Topology(load_preset("smartssd"), n, stretch=0) as topology:
            assert asked(topology, run) == [expected_s] * n
            assert topology.now() == expected_s


def test_sixteen_threads_on_devices_that_share_links_and_on_one() -> None:
    """Of random sizes, over what is shared, with what depends on what was found: each thread has
    its own times, the same in every run."""

    def asked(run: int) -> list[float]:
        with Topology(spec(uplink=100, memory=300), 3, stretch=0) as topology:

            def work(number: int) -> float:
                rng, last = random.Random(number), 0.0
                for _ in range(8):
                    unsteady(run, rng.randrange(1000))
                    route = rng.choice(
                        ["flash_to_host", "flash_read", "host_to_flash", "device_to_host"]
                    )
                    size_bytes = rng.choice([0, 1, 4096, 1_000_000, rng.randrange(10_000_000)])
                    last = topology.wait(
                        topology.transfer(number % 3, route, size_bytes + int(last * 1000))
                    )
                return last

            return together(topology, 16, work)

    expected = asked(0)
    assert len(set(expected)) == 16
    for run in range(1, RUNS):
        assert asked(run) == expected


def test_who_waits_for_a_job_goes_on_at_its_end() -> None:
    """And not at the end of another's that is longer: the clock stands while the first of them
    is at work again."""
    for run in range(RUNS):
        with (
            Topology(spec(), 3, stretch=0) as topology,
            ThreadPoolExecutor(2) as pool,
            Workers([topology]) as workers,
        ):
            long = workers.submit(
                pool, lambda: topology.wait(topology.transfer(0, "flash_read", 1000_000_000))
            )
            short = workers.submit(
                pool, lambda: topology.wait(topology.transfer(1, "flash_read", 100_000_000))
            )
            assert short.result() == 1.0
            unsteady(run, 0)
            assert topology.now() == 1.0
            third = topology.transfer(2, "flash_read", 100_000_000)
            assert (topology.wait(third), long.result()) == (2.0, 10.0)


def test_crews_in_crews() -> None:
    def inner(topology: Topology, number: int) -> float:
        with ThreadPoolExecutor(2) as pool, Workers([topology]) as workers:
            jobs = [
                workers.submit(
                    pool, lambda n: topology.wait(topology.transfer(number, "flash_read", n)), n
                )
                for n in (200_000_000, 100_000_000)
            ]
            wait(jobs)
            return topology.wait(topology.transfer(number, "flash_read", 100_000_000)) + sum(
                job.result() for job in jobs
            )

    for _ in range(3):
        with Topology(spec(), 4, stretch=0) as topology:
            assert (
                together(topology, 4, lambda number: inner(topology, number))
                == [4.0 + 2.0 + 3.0] * 4
            )
            # nobody is left who takes part
            assert topology.wait(topology.transfer(0, "flash_read", 100_000_000)) == 5.0


def test_one_that_never_asks_is_found_out() -> None:
    """Whoever waits gets an error that says so, and not before its deadline; afterwards time goes
    on."""
    held = threading.Event()
    with Topology(spec(), 1, stretch=0) as topology, ThreadPoolExecutor(2) as pool:
        with Workers([topology]) as workers:
            idle = workers.submit(pool, held.wait)
            asking = workers.submit(
                pool, lambda: topology.wait(topology.transfer(0, "flash_read", 1), deadline_s=0.05)
            )
            with pytest.raises(
                errors.DeadlineExceededError, match=r"1 others that take part, and ask for nothing"
            ):
                asking.result()
            held.set()
            assert idle.result()
        assert topology.wait(topology.transfer(0, "flash_read", 100_000_000)) == pytest.approx(
            1.0, abs=1e-6
        )


def test_jobs_that_fail_leave() -> None:
    def work(number: int) -> float:
        if number % 2:
            raise errors.ReadError("a test")
        return topology.wait(topology.transfer(0, "flash_read", 100_000_000))

    with Topology(spec(), 1, stretch=0) as topology, ThreadPoolExecutor(4) as pool:
        with Workers([topology]) as workers:
            jobs = [workers.submit(pool, work, number) for number in range(4)]
            wait(jobs)
            for number, job in enumerate(jobs):
                if number % 2:
                    with pytest.raises(errors.ReadError):
                        job.result()
        assert topology.member is None
        cancelled = topology.transfer(0, "flash_read", 100)
        with Workers([topology]) as workers:
            waiting = workers.submit(pool, topology.wait, cancelled)
            workers.submit(pool, topology.cancel, cancelled).result()
            with pytest.raises(errors.TransferCancelledError):
                waiting.result()
        pool.shutdown()
        with Workers([topology]) as workers, pytest.raises(RuntimeError):
            workers.submit(pool, print)
        assert topology.wait(topology.transfer(0, "flash_read", 100_000_000)) == pytest.approx(
            3.0, abs=1e-5
        )


class InterruptedAt:
    """Ctrl-C at the nth line of `workers` that this thread comes to; at none that takes a lock, or
    gives it back, where Python does not look for signals."""

    def __init__(self, nth: int):
        self.left = nth

    def __call__(self, frame: FrameType, event: str, _: object) -> Self | None:
        if frame.f_code.co_filename != waiting_threads.__file__:
            return None
        source = linecache.getline(frame.f_code.co_filename, frame.f_lineno)
        if event == "line" and not source.lstrip().startswith("with "):
            self.left -= 1
            if self.left == 0:
                raise KeyboardInterrupt
        return self


def test_ctrl_c_at_each_line_of_a_wait() -> None:
    """It is raised, also where it comes as a job is left that has ended or failed, and the clock
    goes on."""
    nth, has_come = 0, True
    while has_come:
        nth += 1
        held, interrupted = threading.Event(), InterruptedAt(nth)
        with (
            Topology(spec(), 1, stretch=0) as topology,
            ThreadPoolExecutor(3) as pool,
            Workers([topology]) as workers,
        ):
            ended = [workers.submit(pool, abs, -1), workers.submit(pool, int, "no number")]
            wait(ended)
            release = threading.Timer(0.01, held.set)
            jobs = [*ended, workers.submit(pool, held.wait, 5.0)]
            before = sys.gettrace()
            try:
                sys.settrace(interrupted)
                wait(ended)
                if interrupted.left > 0:  # the last one is waited for where Ctrl-C has not come yet
                    release.start()
                wait(jobs)
            except KeyboardInterrupt:
                has_come = True
            else:
                has_come = False
            finally:
                sys.settrace(before)
                held.set()
            assert has_come == (interrupted.left <= 0), "it was swallowed"
            wait(jobs)
            assert topology.wait(topology.transfer(0, "flash_read", 100_000_000)) == 1.0
    assert nth > 20


def test_ctrl_c_just_as_a_wait_begins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python has looked for signals and waits from now on: none wakes it."""
    own, held = futures.wait, threading.Event()

    def deaf(*args: Any, **options: Any) -> Any:
        signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
        try:
            os.kill(os.getpid(), signal.SIGINT)  # which another thread takes note of
            return own(*args, **options)
        finally:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, [signal.SIGINT])

    with ThreadPoolExecutor(1) as pool, Workers([]) as workers:
        job = workers.submit(pool, held.wait, 5.0)
        monkeypatch.setattr(futures, "wait", deaf)
        try:
            with pytest.raises(KeyboardInterrupt):
                job.wait()
            monkeypatch.undo()
            held.set()
            assert job.result(), "the wait was as long as the job"
        finally:
            held.set()


def test_devices_without_a_clock() -> None:
    """A thread pool, and nothing else; so is one on devices that the wall moves."""
    for device in (SsdDevice("."), Topology(spec(), 1, stretch=1e-6)):
        with ThreadPoolExecutor(1) as pool, Workers([device]) as workers:
            job: Job[int] = workers.submit(pool, max, 3, 4)
            assert job.result() == 4


@pytest.mark.parametrize("n", [2, 16])
def test_a_generation(folder: Path, n: int) -> None:
    model, found = enabled("llama", torch.float16), set[float]()
    for run in range(4):
        devices = open_device(
            "smartssd", [folder / f"{run} {number}" for number in range(n)], stretch=0
        )
        with espnx.KVCache(model.config, device=devices, spill_interval=4, x_rows=0) as cache:
            model.generate(
                **prompt([40] * 4), past_key_values=cache, max_new_tokens=6, do_sample=False
            )
        found.add(devices[0].topology.now())
        for each in devices:
            each.close()
    assert len(found) == 1


def test_scans_of_several_queries(tmp_path: Path) -> None:
    """More of them than run ahead."""
    paths = [tmp_path / str(number) for number in range(3)]
    rng = np.random.default_rng(1)
    build_split(paths, terms=[[f"t{term}" for term in rng.integers(0, 30, 12)] for _ in range(600)])
    made = load_preset("ragx")
    made = replace(made, flash=replace(made.flash, read_latency=figure(50e-6)))
    found = set[float]()
    for _ in range(4):
        devices = espnx.device.emulation.device.Emulation(made).together(paths, stretch=0)  # type: ignore[attr-defined]
        with SplitPostings(paths, device=devices) as postings:
            postings.search([[f"t{query}", "t0"] for query in range(20)], 5)
        found.add(devices[0].topology.now())
    assert len(found) == 1
