"""Runs a test once per instruction set of the CPU kernels; keeps what Triton compiled."""

from __future__ import annotations

import shutil
import time
from collections.abc import Iterator

import pytest
import torch

from espnx.ops._native import load_extension

KEPT_S = 30 * 86_400
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


@pytest.fixture
def triton_cache(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are kept between runs, for a month, by the hash that Triton makes of their source,
    constants, options and compilers."""
    folder = request.config.cache.mkdir("triton")
    for kernel in folder.iterdir():
        if kernel.stat().st_mtime < time.time() - KEPT_S:
            shutil.rmtree(kernel, ignore_errors=True)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
