"""The rows that scripts/gpu_check.py writes down, and kernels' times, which `espnx bench kernels`
takes. Needs a CUDA device."""

from __future__ import annotations

import dataclasses
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

Rows = list[dict[str, Any]]
_DATA_BYTES = 512 << 20  # of an input set: several times the device's cache
_PAIRS = 15


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


def wall_s(call: Callable[[], Any]) -> float:
    torch.cuda.synchronize()
    begun = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - begun


def time_kernels(
    names: Sequence[str], rows: Rows, failures: list[str], device: str = "cuda"
) -> None:
    """Verifies and times these points of `espnx bench kernels`, without peers."""
    from espnx.benchmarks.kernels.catalogue import points
    from espnx.benchmarks.kernels.point import Setting, measure, measure_rates
    from espnx.benchmarks.kernels.timing import Clock

    is_gpu = device == "cuda"
    clock = Clock(torch.device(device))
    setting = Setting(clock, _DATA_BYTES if is_gpu else 1 << 16, seed=1, only_ours=True)
    rates = measure_rates(clock, small=not is_gpu)
    known = {point.name: point for point in points()}
    pairs = _PAIRS if is_gpu else 1
    for name in names:
        found = measure(known[name], setting, frozenset(), {}, rates, pairs, say)
        rows += [
            dataclasses.asdict(dataclasses.replace(each, case="gpu-kernels")) for each in found
        ]
        failures += [
            f"{name}: {each.params.get('why', 'a wrong result')}"
            for each in found
            if not each.correct
        ]


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
