"""How the work of a device is timed, and launches of kernels recorded, to be repeated without what
an op does around them.

The device is kept busy until everything that is timed has been queued, so that the host's time is
not in it; whether that was so is looked at, and a sample that the host was too late for is taken
again, behind a longer wait. Several input sets take turns, since one might fit in the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

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


class Launch(NamedTuple):
    """Attributes: again: makes it once more. storages: where the memory that it is given begins."""

    again: Callable[[], Any]
    storages: set[int]


@contextmanager
def recorded_launches() -> Iterator[list[Launch]]:
    """Every launch of a kernel that is made meanwhile, of any module of Triton's and of any file of
    csrc/cuda."""
    seen: list[Launch] = []
    compiled_launch = device_code.launch

    def launch(*args: Any) -> None:
        seen.append(Launch(lambda: compiled_launch(*args), storages(args)))
        compiled_launch(*args)

    with _recorded_triton(seen):
        device_code.launch = launch  # type: ignore[assignment]
        try:
            yield seen
        finally:
            device_code.launch = compiled_launch


@contextmanager
def _recorded_triton(seen: list[Launch]) -> Iterator[None]:
    try:
        from triton.runtime.jit import JITFunction
    except ImportError:  # no Triton, so nobody launches by it
        yield
        return
    run = JITFunction.run

    def record(kernel: Any, *args: Any, **options: Any) -> Any:
        seen.append(Launch(lambda: run(kernel, *args, **options), storages(args)))
        return run(kernel, *args, **options)

    JITFunction.run = record
    try:
        yield
    finally:
        JITFunction.run = run


class Launches:
    """Launches of kernels, to be made again: of each input set, without what was done around them.

    Attributes:
        results: what the call that made them returned, for each input set.
    """

    def __init__(self, launches: Sequence[Sequence[Launch]], results: Sequence[Any]):
        self._launches, self.results = launches, results

    def __call__(self, i: int) -> None:
        for launch in self._launches[i]:
            launch.again()

    def fills(self, i: int) -> bool:
        """Whether a launch was given the memory of the results: then they are its own."""
        given = {place for launch in self._launches[i] for place in launch.storages}
        found = storages([self.results[i]])
        return bool(found) and found <= given


def bare_launches(call: Call, sets: int = SETS) -> Launches | None:
    """The launches that `call` makes for each input set; None where it makes none."""
    launches, results = [], []
    for i in range(sets):
        with recorded_launches() as seen:
            results.append(call(i))
        launches.append(list(seen))
    return Launches(launches, results) if all(launches) else None


def storages(values: Iterable[Any]) -> set[int]:
    """Addresses at which the memory of tensors begins: those among these values, and in tuples."""
    found: set[int] = set()
    for value in values:
        if isinstance(value, torch.Tensor):
            found.add(value.untyped_storage().data_ptr())
        elif isinstance(value, tuple | list):
            found |= storages(value)
    return found


def spoil(found: Any) -> None:
    """Writes over results: NaN, or the other bits of what is there."""
    for each in found if isinstance(found, tuple | list) else [found]:
        if each.is_floating_point():
            each.fill_(torch.nan)
        else:
            each.bitwise_not_()


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
