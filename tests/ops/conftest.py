"""Runs a test once per instruction set of the CPU kernels."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from espnx.ops._native import load_extension

LEVELS = {"portable": 0, "avx2": 1, "avx512": 2, "vnni": 3, "amx": 4}


@pytest.fixture(params=LEVELS)
def cpu_level(request: pytest.FixtureRequest) -> Iterator[str]:
    """Puts one level in force for the test, and one thread for torch's own operators: on a busy
    machine those of a second one spin."""
    best = load_extension().set_cpu_level(-1)
    if LEVELS[request.param] > best:
        pytest.skip(f"[{request.param}] this processor has no {request.param}")
    load_extension().set_cpu_level(LEVELS[request.param])
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield request.param
    torch.set_num_threads(threads)
    load_extension().set_cpu_level(-1)
