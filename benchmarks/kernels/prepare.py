"""Kernels compiled before anything is measured, in processes beside each other: compilers leave
their results in caches on the disk, from which the measuring process takes them.

What is fastest is chosen by the measuring process alone, when nobody else is on the device: choices
that are made here are not kept. torch.compile keeps its own beside its code, and so compiles in the
measuring process, into a folder that is empty when it begins (`own_choices`).
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor, wait
from contextlib import contextmanager
from pathlib import Path

import torch

from ..harness.registry import Say
from .catalogue import points
from .point import Setting
from .timing import Clock

ALONE = frozenset({"torch-compile"})  # peers that are not compiled here
Job = tuple[str, str]  # name of a point, name of a peer or "" for our own

_WORKERS_MAX = 12


def prepare(
    names: Mapping[str, Sequence[str]], setting: Setting, limit_s: float, say: Say
) -> dict[Job, str]:
    """Compiles what points need, for at most so many seconds.

    Args:
        names: of points, and for each its peers that take long to compile.
        setting: of the points, whose shapes kernels are compiled for.

    Returns:
        The peers that cannot be measured, and why.
    """
    jobs: list[Job] = [
        (name, peer) for name, peers in names.items() for peer in peers if peer not in ALONE
    ]
    jobs += [(name, "") for name in names]
    begin, failed = time.monotonic(), dict[Job, str]()
    context = multiprocessing.get_context("spawn")
    workers = min(_WORKERS_MAX, len(os.sched_getaffinity(0)), len(jobs))
    pool = ProcessPoolExecutor(workers, mp_context=context)
    try:
        futures: dict[Future[str | None], Job] = {
            pool.submit(_compile, *job, setting.device.type, setting.data_bytes, setting.seed): job
            for job in jobs
        }
        done, late = wait(futures, max(limit_s, 0.0))
        for future in done:
            error = future.exception()
            why = future.result() if error is None else f"{type(error).__name__}: {error}"
            if why is not None:
                failed[futures[future]] = why
        for future in late:
            failed[futures[future]] = f"did not compile within {limit_s:g} s"
    finally:
        for process in list((pool._processes or {}).values()):
            process.kill()
        pool.shutdown(wait=True, cancel_futures=True)
    say(
        f"compiled beside each other: {len(jobs) - len(failed)} of {len(jobs)} in "
        f"{time.monotonic() - begin:.0f} s"
    )
    for (name, peer), why in failed.items():
        say(f"    {name}, {peer or 'espnx'}: {why}")
    return {job: why for job, why in failed.items() if job[1]}


@contextmanager
def own_choices() -> Iterator[None]:
    """Whatever torch.compile chooses meanwhile, it has measured meanwhile. Triton's own cache, of
    code alone, stays where it is."""
    triton = os.environ.get("TRITON_CACHE_DIR") or str(Path.home() / ".triton" / "cache")
    with tempfile.TemporaryDirectory(prefix="espnx-inductor-") as folder:
        meant = {"TORCHINDUCTOR_CACHE_DIR": folder, "TRITON_CACHE_DIR": triton}
        before = {name: os.environ.get(name) for name in meant}
        os.environ.update(meant)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@functools.cache
def _keep_no_choice() -> None:
    """Triton's tuner measures here beside others; its results must not be found on the disk."""
    from triton.runtime.autotuner import Autotuner

    def measure(self, key, configs, bench):  # type: ignore[no-untyped-def]
        bench()
        return False

    Autotuner.check_disk_cache = measure


def _compile(name: str, peer: str, device: str, data_bytes: int, seed: int) -> str | None:
    """What a worker does: returns what is wrong, or None."""
    _keep_no_choice()
    setting = Setting(Clock(torch.device(device), 1), data_bytes, seed, only_ours=True)
    point = next(each for each in points() if each.name == name)
    systems = point.make(setting, frozenset([peer]) if peer else frozenset())
    for system in systems.ours if not peer else systems.peers:
        system.whole(0)
        if system.work is not None:
            system.work(0)
    setting.clock.wait()
    return systems.missing.get(peer) if peer else None
