"""How the work of a device is timed, and launches of kernels recorded, to be repeated without what
an op does around them.

The device is kept busy until everything that is timed has been queued, so that the host's time is
not in it; whether that was so is looked at, and a sample that the host was too late for is taken
again, behind a longer wait. Several input sets take turns, since one might fit in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from espnx.errors import EspnxError
from espnx.ops import device_code

SETS = 3  # of inputs
LAUNCHES = 12  # timed in a row
_HEAD_START_CYCLES = 5_000_000  # of the device's clock, about 3 ms
_HEAD_START_CYCLES_MAX = _HEAD_START_CYCLES << 6
_COPY_BYTES = 1 << 30
_MATMUL_SIDES = {"fp16": 8192, "bf16": 8192, "fp32": 4096}
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}

Call = Callable[[int], Any]  # of the number of an input set


class Clock:
    """Times calls whose work is done by a device: a GPU, or the CPU (to try programs, where the
    whole call is timed).

    Args:
        device: where the tensors are.
        sets: of inputs that take turns.
    """

    def __init__(self, device: torch.device, sets: int = SETS):
        self.device, self.sets = device, sets
        # by the code of calls, which, unlike calls, hold no tensors
        self._head_starts: dict[Any, int] = {}

    def work_s(self, call: Call, launches: int = LAUNCHES) -> float:
        """Mean seconds of the device's own work for one call, of so many in a row, which must not
        wait for the device. Raises EspnxError where they do."""
        if self.device.type == "cpu":
            return self.whole_s(call)
        key = getattr(call, "__code__", None)
        cycles = self._head_starts.get(key, _HEAD_START_CYCLES)
        while cycles <= _HEAD_START_CYCLES_MAX:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda._sleep(cycles)
            begin.record()
            for i in range(launches):
                call(i % self.sets)
            was_late = begin.query()
            end.record()
            end.synchronize()
            if not was_late:
                return begin.elapsed_time(end) / 1e3 / launches
            cycles *= 2
            self._head_starts[key] = min(cycles, _HEAD_START_CYCLES_MAX)
        raise EspnxError(
            "the device's work cannot be timed", got="a call that waits for the device"
        )

    def whole_s(self, call: Call, i: int = 0) -> float:
        """Seconds of one call, from its arguments to the result that is there."""
        self.wait()
        begin = time.perf_counter()
        call(i % self.sets)
        self.wait()
        return time.perf_counter() - begin

    def wait(self) -> None:
        if self.device.type != "cpu":
            torch.cuda.synchronize()


@contextmanager
def recorded_launches() -> Iterator[list[Callable[[], Any]]]:
    """Every launch of a kernel that is made meanwhile, of any module of Triton's and of any file of
    csrc/cuda, each as a call that makes it again."""
    seen: list[Callable[[], Any]] = []
    compiled_launch = device_code.launch

    def launch(*args: Any) -> None:
        seen.append(lambda: compiled_launch(*args))
        compiled_launch(*args)

    with _recorded_triton(seen):
        device_code.launch = launch  # type: ignore[assignment]
        try:
            yield seen
        finally:
            device_code.launch = compiled_launch


@contextmanager
def _recorded_triton(seen: list[Callable[[], Any]]) -> Iterator[None]:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton, so nobody launches by it
        yield
        return
    run = JITFunction.run

    def record(kernel: Any, *args: Any, **options: Any) -> Any:
        seen.append(lambda: run(kernel, *args, **options))
        return run(kernel, *args, **options)

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


def bare_launches(call: Call, sets: int = SETS) -> Call | None:
    """The launches that `call` makes for each input set, without what it does around them; None
    where it makes none."""
    launches: list[list[Callable[[], Any]]] = []
    for i in range(sets):
        with recorded_launches() as seen:
            call(i)
        launches.append(list(seen))
    if not all(launches):
        return None

    def again(i: int) -> None:
        for launch in launches[i]:
            launch()

    return again


def copy_bytes_per_s(clock: Clock, size_bytes: int = _COPY_BYTES, runs: int = 10) -> float:
    """The memory's ceiling: a large copy within the device, bytes read plus bytes written."""
    source = torch.randint(0, 256, (size_bytes,), dtype=torch.uint8, device=clock.device)
    target = torch.empty_like(source)
    target.copy_(source)
    seconds = [clock.work_s(lambda i: target.copy_(source)) for _ in range(runs)]
    return 2 * size_bytes / statistics.median(seconds)


def matmul_flops_per_s(clock: Clock, kind: str, side: int = 0, runs: int = 5) -> float:
    """The arithmetic's ceiling: a large product of square matrices of this kind (``fp16``,
    ``bf16``, ``fp32`` without tensor cores) by torch, a multiply-add as two."""
    side = side or _MATMUL_SIDES[kind]
    a, b = (torch.randn(side, side, device=clock.device).to(_DTYPES[kind]) for _ in range(2))
    out = torch.empty_like(a)
    torch.mm(a, b, out=out)
    seconds = [clock.work_s(lambda i: torch.mm(a, b, out=out), 6) for _ in range(runs)]
    return 2 * side**3 / statistics.median(seconds)
