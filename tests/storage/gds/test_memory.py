"""Device memory of the `gds` engine: where it comes from, when it may be used again, and what
happens when there is no more."""

from __future__ import annotations

import gc
import os
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.storage import Plan
from espnx.storage.gds import memory as gds_memory
from espnx.storage.gds.cufile import CuFile
from espnx.storage.gds.memory import Allocation, CudaMemory, EventFence
from tests.storage.gds.common import KIB, MakeEngine, items_of, make, stub_of, write_file
from tests.storage.gds.cufile_stub import HostMemory

__all__ = ["make"]  # a fixture is found by its name in this module


class Runtime:
    """``cuda.bindings.runtime`` with so much memory."""

    def __init__(self, free_bytes: int = 1 << 20, broken: int = 0):
        self.free_bytes, self.broken = free_bytes, broken
        self.held: dict[int, int] = {}
        self.device = -1

    def cudaSetDevice(self, device: int) -> tuple[int]:  # noqa: N802 - the bindings' own names
        self.device = device
        return (self.broken,)

    def cudaMalloc(self, size_bytes: int) -> tuple[int, int]:  # noqa: N802
        if size_bytes > self.free_bytes:
            return 2, 0
        pointer = 1 << 30 | len(self.held) << 24
        self.held[pointer] = size_bytes
        self.free_bytes -= size_bytes
        return 0, pointer

    def cudaFree(self, pointer: int) -> tuple[int]:  # noqa: N802
        self.free_bytes += self.held.pop(pointer)
        return (0,)

    def cudaGetErrorString(self, status: int) -> tuple[int, bytes]:  # noqa: N802
        return (0, b"too old") if status == 35 else (1, b"")

    def cudaMemGetInfo(self) -> tuple[int, int, int]:  # noqa: N802
        return 0, self.free_bytes, 1 << 20


def in_a_child(run: Any) -> int:
    """The exit code of `run` in a forked child: 0 unless it raises."""
    with warnings.catch_warnings():
        # of forks beside threads: the child does next to nothing
        warnings.simplefilter("ignore", DeprecationWarning)
        child = os.fork()
    if child == 0:
        try:
            run()
        except BaseException:
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def test_arenas_are_cuda_malloc_s_and_go_with_their_last_user() -> None:
    runtime = Runtime()
    allocation = Allocation(runtime, 3, 1000)
    assert (runtime.device, runtime.held) == (3, {allocation.pointer: 1000})
    del allocation
    gc.collect()
    assert runtime.held == {}


def test_a_child_process_frees_nothing() -> None:
    runtime = Runtime()
    allocations = [Allocation(runtime, 0, 1000)]

    def check() -> None:
        allocations.clear()
        gc.collect()
        assert len(runtime.held) == 1

    assert in_a_child(check) == 0


def test_no_memory_is_said_with_figures() -> None:
    with pytest.raises(errors.OutOfMemoryError, match="5000 bytes") as caught:
        Allocation(Runtime(4096), 0, 5000)
    assert isinstance(caught.value, MemoryError)
    assert (caught.value.needed_bytes, caught.value.free_bytes) == (5000, 4096)
    with pytest.raises(errors.PathUnavailableError, match="CUDA error 999"):
        Allocation(Runtime(broken=999), 0, 10)
    with pytest.raises(errors.PathUnavailableError, match=r"CUDA error 35, too old.*580"):
        Allocation(Runtime(broken=35), 0, 10)


def test_a_thread_has_the_device_s_context(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch does nothing where the number is a new thread's already, which leaves it without one;
    and who calls from a thread of its own finds its current device as it was."""
    memory = object.__new__(CudaMemory)
    current = [1]
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: current.append(device.index))
    monkeypatch.setattr(torch.cuda, "device", nullcontext)
    for use in (memory.enter_thread, lambda: memory.current().__enter__()):
        memory.device, memory._runtime = torch.device("cuda", 0), Runtime()
        use()
        assert memory._runtime.device == 0
    assert current == [1, 0]


#: Calls that say nothing of files or memory.
ANYWHERE = ("driver_", "get_", "set_parameter", "set_stats", "stats_")


def test_cufile_is_called_on_the_device_of_the_memory(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the caller's own is: memory of another one's context is refused (5015)."""
    path, data = write_file(tmp_path, 400_000)
    memory, elsewhere, made = HostMemory(), set[str](), set[str]()
    call = CuFile.call

    def seen(cufile: CuFile, name: str, *arguments: Any) -> Any:
        if not name.startswith(ANYWHERE):
            made.add(name)
            elsewhere.update(() if memory.is_current() else (name,))
        return call(cufile, name, *arguments)

    monkeypatch.setattr(CuFile, "call", seen)
    engine = make(memory=memory, arena_bytes=64 * KIB, batch_bytes=64 * KIB)
    file = engine.open(path)
    future = engine.read(Plan.of(file, [1, 5000, 0], [10, 70, 300_000]))
    assert items_of(future.wait(), future.position_bytes, [10, 70, 300_000])[0] == data[1:11]
    engine.close_file(file)
    engine.open(path)
    engine.close()
    assert {"buf_register", "buf_deregister", "handle_register", "batch_io_submit", "read"} <= made
    assert elsewhere == set()


def test_torch_s_own_allocator_is_not_asked_but_for_what_it_keeps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its memory may be of a kind that cannot be registered (expandable segments). What it keeps
    for later is free memory, though."""
    memory = object.__new__(CudaMemory)
    memory.device, memory._runtime = torch.device("cuda", 2), Runtime(1000)
    monkeypatch.setattr(torch.cuda, "device", lambda device: torch.no_grad())
    cached = [7500]
    monkeypatch.setattr(
        torch.cuda,
        "empty_cache",
        lambda: setattr(memory._runtime, "free_bytes", 1000 + cached.pop()),
    )
    monkeypatch.setattr(
        torch, "empty", lambda *args, **options: pytest.fail("memory of torch's allocator")
    )
    seen: list[tuple[Any, int, int]] = []
    monkeypatch.setattr(
        memory, "wrap", lambda owner, pointer, size_bytes: seen.append((owner, pointer, size_bytes))
    )
    memory.allocate(8000)
    owner, pointer, size_bytes = seen.pop()
    assert (owner.pointer, size_bytes, memory._runtime.device) == (pointer, 8000, 2)
    cached.append(0)
    with pytest.raises(errors.OutOfMemoryError):
        memory.allocate(8000)
    assert cached == []


class Stream:
    def __init__(self) -> None:
        self.capturing, self.done, self.recorded = False, False, 0

    def record_event(self) -> Stream:
        assert not self.capturing, "an event of ours in somebody's graph"
        self.recorded += 1
        return self

    def query(self) -> bool:
        assert not self.capturing, "a question that breaks the capture"
        return self.done


def test_no_event_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        gds_memory, "any_is_capturing", lambda some: any(stream.capturing for stream in some)
    )
    streams = [Stream(), Stream()]
    streams[1].capturing = True
    fence = EventFence(set(streams))
    assert not fence.passed()
    assert [stream.recorded for stream in streams] == [0, 0]
    streams[1].capturing = False
    assert not fence.passed()
    assert [stream.recorded for stream in streams] == [1, 1]
    streams[0].done = streams[1].done = True
    assert fence.passed()
    assert [stream.recorded for stream in streams] == [1, 1]


def test_results_that_go_in_a_child_process_touch_no_device(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, _ = write_file(tmp_path, 100_000)
    memory = HostMemory()
    engine = make(memory=memory)
    held = [engine.read(Plan.of(engine.open(path), [0], [60_000])).wait()]
    fenced: list[object] = []
    monkeypatch.setattr(memory, "fence", lambda streams: fenced.append(streams))

    def check() -> None:
        held.clear()
        gc.collect()
        assert fenced == []

    assert in_a_child(check) == 0


def test_memory_that_kernels_still_read_is_waited_for_before_more_is_taken(
    make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # five looks, on a machine that has other work
    monkeypatch.setattr("espnx.storage.gds.arena._KERNELS_LIMIT_S", 30.0)
    path, data = write_file(tmp_path, 100_000)
    memory = HostMemory()
    engine = make(memory=memory, arena_bytes=64 * KIB)
    file = engine.open(path)
    for _ in range(3):
        memory.busy, memory.looks, memory.done_at_look = {"default"}, 0, 5
        future = engine.read(Plan.of(file, [1], [60_000]))
        assert items_of(future.wait(), future.position_bytes, [60_000]) == [data[1:60_001]]
        del future
        gc.collect()
    assert len(memory.allocated) == stub_of(engine).count("buf_register") == 1


def test_out_of_memory(make: MakeEngine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, data = write_file(tmp_path, 100_000)
    monkeypatch.setattr("espnx.storage.gds.arena._KERNELS_LIMIT_S", 0.0)
    memory = HostMemory(limit_bytes=130 * KIB)  # an arena, and what aligns it
    engine = make(memory=memory, arena_bytes=64 * KIB)
    file = engine.open(path)
    held = engine.read(Plan.of(file, [1], [60_000]))
    held.wait()
    with pytest.raises(errors.OutOfMemoryError) as caught:
        engine.read(Plan.of(file, [1], [60_000]))
    assert caught.value.needed_bytes == 128 * KIB
    assert engine.stats().in_flight == 0
    del held, caught  # the traceback would keep it alive
    # kernels read it still: there is no other memory to wait for
    memory.busy, memory.looks, memory.done_at_look = {"default"}, 0, 50
    gc.collect()
    future = engine.read(Plan.of(file, [1], [60_000]))
    assert items_of(future.wait(), future.position_bytes, [60_000]) == [data[1:60_001]]
    assert len(memory.allocated) == 1
    with pytest.raises(errors.OutOfMemoryError):
        make(memory=HostMemory(limit_bytes=KIB))
