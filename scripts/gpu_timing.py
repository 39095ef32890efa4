"""How scripts/gpu_check.py times kernels, and the rows that it writes down. Needs a CUDA device.

A kernel's own time is that of the device (events around many launches); what a call costs with its
checks and tables stands beside it. Several input sets take turns, since one might fit in the cache.
"""

from __future__ import annotations

import importlib
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

Rows = list[dict[str, Any]]
SETS = 3  # of inputs
#: Long enough that the host has queued everything that is timed before the device gets there.
_HEAD_START_CYCLES = 5_000_000
_LAUNCHES = 12


def row(
    case: str, params: dict[str, Any], system: str, times_s: Sequence[float], **fields: Any
) -> dict[str, Any]:
    """A row of `benchmarks.harness.result` from the times of its runs."""
    ordered = sorted(times_s)
    quarters = statistics.quantiles(ordered, n=4) if len(ordered) > 1 else [0.0, 0.0, 0.0]
    made: dict[str, Any] = {
        "case": case,
        "params": params,
        "system": system,
        "kind": "measured",
        "requested_path": "none",
        "effective_path": "none",
        "cache": "warm",
        "n": len(ordered),
        "median_s": statistics.median(ordered) if ordered else None,
        "p99_s": ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))] if ordered else None,
        "iqr_s": quarters[2] - quarters[0] if ordered else None,
        "bytes_asked": 0,
        "bytes_moved": 0,
        "correct": True,
        "metrics": {},
        "ratio": {},
    }
    return {**made, **fields}


def device_times_s(call: Callable[[int], Any], runs: int = 30) -> list[float]:
    """Times of ``call(i)`` on the device, from events around many of them, after a round to warm
    up.

    The device is busy with something else until all of them are queued, so that the host's time is
    not in it. ``call`` must not wait for the device.
    """
    for i in range(SETS):
        call(i)
    times = []
    for _ in range(runs):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda._sleep(_HEAD_START_CYCLES)
        begin.record()
        for i in range(_LAUNCHES):
            call(i % SETS)
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / _LAUNCHES)
    return times


@dataclass(frozen=True)
class KernelTimes:
    """Times of one op: `kernel_s` of the bare kernel on the device, `call_s` of whole calls, from
    the arguments to the result that is there."""

    kernel_s: list[float]
    call_s: list[float]


def bare_launch(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
    """The launch of ``espnx.kernels.NAME.NAME_kernel`` that ``call`` makes, to be repeated without
    what the op does around it."""
    module = importlib.import_module(f"espnx.kernels.{name}")
    kernel, seen = getattr(module, f"{name}_kernel"), list[Callable[[], Any]]()

    class Recording:
        def __getitem__(self, grid: Any) -> Callable[..., Any]:
            def launch(*args: Any, **constants: Any) -> Any:
                seen.append(lambda: kernel[grid](*args, **constants))
                return seen[-1]()

            return launch

    setattr(module, f"{name}_kernel", Recording())
    try:
        call()
    finally:
        setattr(module, f"{name}_kernel", kernel)
    return seen[-1]


def kernel_times(name: str, call: Callable[[int], Any]) -> KernelTimes:
    """Times an op: ``call(i)`` runs it on input set i, with its tables on the CPU, as callers have
    them."""
    launches = [bare_launch(name, lambda i=i: call(i)) for i in range(SETS)]
    whole = [wall_s(lambda i=i: call(i % SETS)) for i in range(23)][3:]
    return KernelTimes(device_times_s(lambda i: launches[i]()), whole)


def copy_bytes_per_s() -> float:
    """The memory's ceiling: a large copy within the device, bytes read plus bytes written."""
    source = torch.randint(0, 256, (1 << 30,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return (
        2 * source.numel() / statistics.median(device_times_s(lambda i: target.copy_(source), 10))
    )


def wall_s(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def kernel_row(
    case: str,
    params: dict[str, Any],
    times: KernelTimes | None,
    data_bytes: int,
    ceiling: float,
    correct: bool,
) -> dict[str, Any]:
    metrics, kernel_s = {}, times.kernel_s if times else []
    if times:
        rate = data_bytes / statistics.median(kernel_s)
        metrics = {
            "call_s": statistics.median(times.call_s),
            "bytes_per_s": rate,
            "copy_bytes_per_s": ceiling,
            "roofline_s": data_bytes / ceiling,
            "share_of_roofline": rate / ceiling,
        }
    return row(
        case,
        params,
        "espnx-triton",
        kernel_s,
        bytes_asked=data_bytes,
        bytes_moved=data_bytes,
        correct=correct,
        metrics=metrics,
    )
