"""The clock of GPU kernels with a device that is played, and launches of every kind recorded."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pytest
import torch

from espnx.benchmarks.kernels.timing import Clock, bare_launches, recorded_launches, spoil
from espnx.errors import EspnxError
from espnx.ops import device_code
from espnx.ops.crc32c import cuda as crc32c_cuda


class Device:
    """Says what was asked of it, in order, and whether the host came too late for a sample."""

    def __init__(self, late: list[bool]):
        self.done: list[Any] = []
        self.late = late

    def sleep(self, cycles: int) -> None:
        self.done.append(cycles)

    def event(self, enable_timing: bool) -> Any:
        assert enable_timing
        device = self

        class Event:
            def record(self) -> None:
                device.done.append("event")

            def query(self) -> bool:
                return device.late.pop(0) if device.late else False

            def synchronize(self) -> None:
                pass

            def elapsed_time(self, end: Any) -> float:
                return 24.0  # ms

        return Event()


@pytest.fixture
def play(monkeypatch: pytest.MonkeyPatch) -> Callable[[list[bool]], Device]:
    def start(late: list[bool]) -> Device:
        device = Device(late)
        monkeypatch.setattr(torch.cuda, "Event", device.event)
        monkeypatch.setattr(torch.cuda, "_sleep", device.sleep)
        return device

    return start


def test_the_device_is_busy_until_all_is_queued(play: Callable[[list[bool]], Device]) -> None:
    device = play([])
    clock = Clock(torch.device("cuda"))
    assert clock.work_s(device.done.append) == pytest.approx(24e-3 / 12)
    sleep, *rest = device.done
    assert sleep > 1_000_000
    assert rest == ["event", *(i % 3 for i in range(12)), "event"]


def test_a_sample_that_the_host_was_late_for_is_taken_again(
    play: Callable[[list[bool]], Device],
) -> None:
    device = play([True, True, False])
    clock = Clock(torch.device("cuda"), 1)

    def call(i: int) -> None:
        pass

    assert clock.work_s(call, 2) == pytest.approx(24e-3 / 2)
    first, *others = [each for each in device.done if each != "event"]
    assert others == [2 * first, 4 * first]
    device.done.clear()
    clock.work_s(call, 2)  # is known to need it
    assert device.done[0] == 4 * first


def test_a_call_that_waits_for_the_device_is_refused(play: Callable[[list[bool]], Device]) -> None:
    play([True] * 100)
    with pytest.raises(EspnxError, match="waits for the device"):
        Clock(torch.device("cuda")).work_s(lambda i: None)


def test_launches_of_csrc_cuda_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    launched: list[Any] = []
    monkeypatch.setattr(device_code, "launch", lambda *args: launched.append(args))
    plain = device_code.launch
    buffer = torch.zeros(4096, dtype=torch.uint8)
    ranges = torch.tensor([0, 1024]), torch.tensor([1024, 512])
    with recorded_launches() as seen:
        crc32c_cuda._launch_compiled(buffer, *ranges, 0)
    assert device_code.launch is plain
    assert len(seen) == len(launched) == 1
    assert buffer.untyped_storage().data_ptr() in seen[0].storages
    seen[0].again()
    assert launched[0] is not launched[1]
    assert launched[0][:4] == launched[1][:4]
    assert isinstance(launched[1][4][-1], ctypes.c_uint32)
    assert launched[1][4][0] is buffer


def test_launches_of_any_module_of_tritons_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    jit = pytest.importorskip("triton.runtime.jit")
    launched: list[Any] = []

    def run(kernel: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> None:
        launched.append((kernel, args, grid, warmup, options))

    monkeypatch.setattr(jit.JITFunction, "run", run)
    kernel = jit.JITFunction.__new__(jit.JITFunction)

    def call(i: int) -> None:
        launched.append("host")
        kernel[(7,)](i, LANES=128)
        kernel[(8,)](i)

    again = bare_launches(call)
    assert again is not None
    assert jit.JITFunction.run is run
    launched.clear()
    again(2)
    assert launched == [
        (kernel, (2,), (7,), False, {"LANES": 128}),
        (kernel, (2,), (8,), False, {}),
    ]


def test_results_that_launches_fill_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the memory that a launch was given; those that are made of it later are not its own."""
    monkeypatch.setattr(device_code, "launch", lambda *args: None)

    def call(i: int) -> tuple[torch.Tensor, torch.Tensor] | torch.Tensor:
        made = torch.ones(8)
        device_code.launch("x", "y", 1, 1, (made, ctypes.c_int64(8)), made.device, 0)
        return (made[4:], made[:4].view(2, 2)) if i == 0 else made + 1

    again = bare_launches(call, 2)
    assert again is not None
    assert [again.fills(0), again.fills(1)] == [True, False]
    spoil(again.results[0])
    assert all(each.isnan().all() for each in again.results[0])
    bits = torch.tensor([0, 5], dtype=torch.int64)
    spoil(bits)
    assert bits.tolist() == [-1, -6]


def test_what_launches_nothing_has_no_bare_launch() -> None:
    assert bare_launches(lambda i: None) is None
