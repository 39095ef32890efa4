"""Around the engine: Ctrl-C, fork(), the GIL, interpreters that end, kernels that refuse. In
children, because these can hang."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import signal
import struct
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, NativeEngine, Plan
from espnx.storage import open_engine as open_by_name
from tests.storage.common import (
    BLOCK,
    OpenEngine,
    in_child,
    make_file,
    patiently,
    raw,
    read_bytes,
    until,
    uring_refusal,
)

MS = 1_000_000
ROOT = Path(__file__).resolve().parents[2]


def test_ctrl_c_during_a_long_wait(path: str, tmp_path: Path) -> None:
    """KeyboardInterrupt, and not the deadline of the read; the engine is usable afterwards."""
    data = make_file(tmp_path / "a", 4 * BLOCK)

    def work() -> list[bool]:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        interrupted = False
        engine = NativeEngine(path, rules=[FaultRule("never", operation="read", count=1)])
        file = engine.open(tmp_path / "a")
        future = engine.read(Plan.of(file, [0], [10]))
        assert until(lambda: engine.stats().in_flight == 1)
        try:
            (tmp_path / f"ready-{path}").touch()
            future.wait()
        except KeyboardInterrupt:
            interrupted = True
        after = read_bytes(engine, file, 2 * BLOCK, 10) == data[2 * BLOCK : 2 * BLOCK + 10]
        engine.close(grace_s=0.05)
        return [interrupted, after]

    def interrupt(pid: int) -> None:
        assert until((tmp_path / f"ready-{path}").exists)
        os.kill(pid, signal.SIGINT)

    assert in_child(work, meanwhile=interrupt) == [True, True]


def test_descriptors_closed_under_the_engine(tmp_path: Path) -> None:
    """As a program that becomes a daemon does: the I/O thread cannot be woken, but looks for
    itself; nothing aborts, nothing hangs."""
    if (refusal := uring_refusal()) is not None:
        pytest.skip(f"[kernel] {refusal}")
    data = make_file(tmp_path / "a", BLOCK)

    def work() -> list[bool]:
        before = set(os.listdir("/proc/self/fd"))
        engine = NativeEngine("uring")
        file = engine.open(tmp_path / "a")
        closed = 0
        for name in set(os.listdir("/proc/self/fd")) - before:
            if os.path.lexists(f"/proc/self/fd/{name}") and "eventfd" in os.readlink(
                f"/proc/self/fd/{name}"
            ):
                os.close(int(name))
                closed += 1
        right = read_bytes(engine, file, 0, BLOCK) == data
        engine.close()
        return [closed == 1, right]

    assert in_child(work) == [True, True]


def test_a_forked_child_is_told(path: str, tmp_path: Path) -> None:
    """The child has the engine's memory and not its thread: every call is refused at once, and
    letting go of it does not hang."""
    data = make_file(tmp_path / "a", 4 * BLOCK)
    engine = NativeEngine(
        path, rules=[FaultRule("delay", operation="read", nth=2, count=1, value=200 * MS)]
    )
    file = engine.open(tmp_path / "a", "r+", direct=False)
    assert read_bytes(engine, file, 0, 10) == data[:10]
    futures = [engine.read(Plan.of(file, [0], [10]))]
    waiter = threading.Thread(target=futures[0].wait)
    waiter.start()
    time.sleep(0.05)
    engines = [engine]
    del engine

    def work() -> list[str]:
        found = []
        memory = torch.zeros(10, dtype=torch.uint8)
        for call in (
            lambda: engines[0].read(Plan.of(file, [0], [10])),
            lambda: engines[0].write(Plan.of(file, [0], [10], [0]), memory),
            lambda: engines[0].open(tmp_path / "a"),
            lambda: engines[0].sync(file),
            lambda: engines[0].close_file(file),
            lambda: engines[0].stats(),
            lambda: futures[0].next(),
            lambda: futures[0].done(),
            lambda: futures[0].cancel(),
        ):
            try:
                call()
                found.append("allowed")
            except errors.InvalidInputError as error:
                found.append("refused" if "fork" in str(error) else str(error))
        engines[0].close()
        futures.clear()
        engines.clear()
        gc.collect()
        fresh = NativeEngine(path)
        found.append(
            "fresh " + str(read_bytes(fresh, fresh.open(tmp_path / "a"), 5, 10) == data[5:15])
        )
        return found

    assert in_child(work) == ["refused"] * 9 + ["fresh True"]
    waiter.join()
    # the parent's engine did not notice
    assert futures[0].wait()[:10].numpy().tobytes() == data[:10]
    assert read_bytes(engines[0], file, 20, 10) == data[20:30]
    engines[0].close()


def test_a_forked_child_lets_go_of_an_idle_engine(path: str, tmp_path: Path) -> None:
    """The engine's thread sleeps on a condition variable of the copy: destroying that would wait
    for it forever."""
    engines = [NativeEngine(path)]
    time.sleep(0.05)

    def work() -> str:
        engines.clear()
        gc.collect()
        return "gone"

    assert in_child(work) == "gone"
    engines[0].close()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("how", ["close", "drop", "stats"])
def test_freeing_memory_that_needs_the_gil(disk_path: str, how: str, tmp_path: Path) -> None:
    """The caller forgets a write from NumPy's memory: freeing it takes the GIL, which may be held
    by the thread that waits for that."""

    def work() -> str:
        rules = [FaultRule("delay", operation="write", value=(2 if how == "stats" else 150) * MS)]
        engine = NativeEngine(disk_path, rules=rules)
        file = engine.open(tmp_path / f"w-{disk_path}-{how}", "w", direct=False)
        for _ in range(30 if how == "stats" else 1):
            engine.write(
                Plan.of(file, [0], [BLOCK], [0]), torch.from_numpy(np.zeros(BLOCK, dtype=np.uint8))
            )
            for _ in range(50 if how == "stats" else 0):
                engine.stats()
        if how == "close":
            engine.close()
        del engine
        return "ended"

    assert in_child(work) == "ended"


def test_other_threads_run_while_an_engine_is_dropped(disk_path: str, tmp_path: Path) -> None:
    make_file(tmp_path / "a", BLOCK)
    ticks, stop = [0], threading.Event()

    def tick() -> None:
        while not stop.is_set():
            ticks[0] += 1
            time.sleep(0.002)

    def ticks_while_dropped(delay_s: float) -> int | None:
        engines = [
            NativeEngine(
                disk_path,
                rules=[FaultRule("delay", operation="read", value=int(delay_s * 1000) * MS)],
            )
        ]
        engines[0].read(Plan.of(engines[0].open(tmp_path / "a"), [0], [10]))
        assert until(lambda: engines[0].stats().requests == 1)
        before = ticks[0]
        engines.clear()  # ends when the read does
        during = ticks[0] - before
        # at most one, at the end, where closing holds the interpreter, or the machine is busy
        return during if during > 2 else None

    thread = threading.Thread(target=tick)
    thread.start()
    try:
        patiently(ticks_while_dropped, 0.1)
    finally:
        stop.set()
        thread.join()


def test_an_interpreter_that_ends_with_reads_under_way(tmp_path: Path) -> None:
    """Engines left open, one with a request that never completes and one with NumPy's memory in
    use: exit code 0, soon."""
    make_file(tmp_path / "a", 4 * BLOCK)
    script = f"""
import numpy as np, torch
from espnx.storage import *
kept = []
for path in ("auto", "posix", "memory"):
    for fault in ("never", "delay"):
        engine = NativeEngine(path, rules=[FaultRule(fault, value=10_000_000)])
        file = engine.open({str(tmp_path / "a")!r}, "r+", direct=False)
        kept += [engine, engine.read(Plan.of(file, [0], [10]), deadline_s=0.1)]
        engine.write(Plan.of(file, [0], [10], [0]), torch.from_numpy(np.zeros(10, dtype=np.uint8)))
        if fault == "never":
            engine.close(0.01)
loop = [kept[0]]
loop.append(loop)
print("end")
"""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=60,
        env=environment,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "end\n", "")


def refuse_system_calls(*numbers: int) -> None:
    """Lets this process's kernel answer EPERM to these calls, as a container's seccomp profile
    does. Needs no root."""
    libc = ctypes.CDLL(None, use_errno=True)
    load, jump_equal, give = 0x20, 0x15, 0x06
    program = struct.pack("HBBI", load, 0, 0, 0)
    for i, number in enumerate(numbers):
        program += struct.pack("HBBI", jump_equal, len(numbers) - i, 0, number)
    program += struct.pack("HBBI", give, 0, 0, 0x7FFF0000) + struct.pack(
        "HBBI", give, 0, 0, 0x00050000 | 1
    )
    buffer = ctypes.create_string_buffer(program, len(program))
    head = ctypes.create_string_buffer(
        struct.pack("HxxxxxxP", len(program) // 8, ctypes.addressof(buffer))
    )
    if libc.prctl(38, 1, 0, 0, 0) != 0 or libc.prctl(22, 2, head, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "seccomp")


def test_io_uring_is_refused(tmp_path: Path) -> None:
    """A named path never falls back; `auto` does, and says why."""
    data = make_file(tmp_path / "a", 10_000)

    def work() -> list[object]:
        refuse_system_calls(425)
        try:
            open_by_name("uring")
            named = "opened"
        except errors.PathUnavailableError as error:
            named = str(error)
        engine = open_by_name("auto")
        file = engine.open(tmp_path / "a")
        same = read_bytes(engine, file, 3, 9000) == data[3:9003]
        return [
            named,
            engine.requested,
            engine.effective,
            engine.fallback_reason,
            file.effective.split()[0],
            same,
        ]

    named, requested, effective, reason, file_effective, same = in_child(work)
    assert "uring" in named
    assert "seccomp" in named
    assert (requested, effective, file_effective, same) == ("auto", "posix", "posix", True)
    assert "not permitted" in reason


def test_auto_says_what_it_took(open_engine: OpenEngine) -> None:
    engine = open_engine("auto")
    assert (engine.effective, engine.fallback_reason == "") == (
        ("uring", True) if uring_refusal() is None else ("posix", False)
    )


def test_a_ring_that_breaks(tmp_path: Path) -> None:
    """io_uring_enter fails for good while the engine is open: a typed error, no hang, and the
    engine says it is closed."""
    if reason := uring_refusal():
        pytest.skip(f"[kernel] io_uring: {reason}")
    make_file(tmp_path / "a", BLOCK)

    def work() -> list[str]:
        engine = NativeEngine("uring")
        file = engine.open(tmp_path / "a")
        found = []
        # The filter reaches the engine's thread only if it is there before; so the ring's
        # descriptor is taken away instead.
        for name in os.listdir("/proc/self/fd"):
            try:
                if "io_uring" in os.readlink(f"/proc/self/fd/{name}"):
                    os.dup2(os.open(tmp_path / "a", os.O_RDONLY), int(name))
            except FileNotFoundError:
                continue
        for _ in range(3):
            try:
                read_bytes(engine, file, 0, 10, deadline_s=30)
                found.append("read")
            except errors.DeadlineExceededError:
                found.append("late")
            except errors.EspnxError as error:
                found.append(type(error).__name__)
        engine.close()
        return found

    first, *others = in_child(work)
    assert first in ("ReadError", "EngineClosedError")
    assert others == ["EngineClosedError"] * 2


@pytest.mark.parametrize("running", [0, 1])
def test_no_memory_for_a_thread(running: int, tmp_path: Path) -> None:
    """The pool cannot start a thread: those that run do all the work; without any the caller is
    told. Never the end of the process."""
    data = make_file(tmp_path / "a", 64 * BLOCK)

    def work() -> str:
        engine = NativeEngine("posix")
        file = engine.open(tmp_path / "a")
        if running:
            read_bytes(engine, file, 0, 10)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(
            resource.RLIMIT_AS, (used + (2 << 20), resource.getrlimit(resource.RLIMIT_AS)[1])
        )
        offsets = list(range(0, 64 * BLOCK, 2 * BLOCK))
        try:
            future = engine.read(Plan.of(file, offsets, [10] * len(offsets)))
            memory = future.wait()
        except (errors.ReadError, errors.EngineClosedError) as error:
            return type(error).__name__
        places = future.position_bytes.tolist()
        right = all(
            raw(memory[at : at + 10]) == data[o : o + 10]
            for at, o in zip(places, offsets, strict=True)
        )
        return f"read {right}"

    assert in_child(work) in (
        ["read True"] if running else ["ReadError", "EngineClosedError", "read True"]
    )


def test_no_memory_for_a_buffer(path: str, tmp_path: Path) -> None:
    """A read larger than the process may hold: MemoryError, and smaller ones go on."""
    with open(tmp_path / "a", "wb") as stream:
        stream.truncate(8 << 30)

    def work() -> list[object]:
        engine = NativeEngine("posix" if path == "memory" else path)
        file = engine.open(tmp_path / "a")
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(
            resource.RLIMIT_AS, (used + (512 << 20), resource.getrlimit(resource.RLIMIT_AS)[1])
        )
        try:
            engine.read(Plan.of(file, [0], [8 << 30]))
            outcome = "read"
        except MemoryError:
            outcome = "MemoryError"
        return [
            outcome,
            read_bytes(engine, file, 7 << 30, 100) == bytes(100),
            engine.stats().requests,
        ]

    assert in_child(work) == ["MemoryError", True, 1]


def test_no_descriptors_left(path: str, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)

    def work() -> list[str]:
        engine = NativeEngine(path)
        file = engine.open(tmp_path / "a")
        highest = max(int(name) for name in os.listdir("/proc/self/fd"))
        resource.setrlimit(
            resource.RLIMIT_NOFILE, (highest, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
        )
        taken = []
        try:
            while True:
                taken.append(os.open("/dev/null", os.O_RDONLY))
        except OSError:
            pass
        found = []
        for call in (
            lambda: engine.open(tmp_path / "a"),
            lambda: NativeEngine("uring"),
            lambda: engine.sync_directory(tmp_path),
        ):
            try:
                call()
                found.append("opened")
            except errors.EspnxError as error:
                found.append(type(error).__name__)
        found.append(str(len(read_bytes(engine, file, 0, 10))))
        return found

    opened, ring, folder, read = in_child(work)
    assert opened in ("ReadError", "WriteError")
    assert (ring, folder, read) == ("PathUnavailableError", "WriteError", "10")
