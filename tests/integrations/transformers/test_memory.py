"""What a cache holds in memory does not grow with what it has stored."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from espnx.benchmarks.machine.cgroup import memory_group
from espnx.errors import PathUnavailableError

LIMIT_BYTES = 190 << 20


@pytest.mark.slow
@pytest.mark.parametrize(
    "size_bytes", [288 << 20, pytest.param(768 << 20, marks=pytest.mark.sweep)]
)
def test_a_long_prompt_in_little_memory(tmp_path: Path, size_bytes: int) -> None:
    """One and a half times and four times what the process may add to its memory; where memory
    cannot be limited, what it has added is looked at alone.

    On a disk: files in memory would count."""
    with contextlib.ExitStack() as stack:
        try:
            group = str(stack.enter_context(memory_group("growth", LIMIT_BYTES)).procs)
        except PathUnavailableError:
            group = ""
        command = [
            sys.executable,
            "-m",
            "tests.integrations.transformers.growth",
            str(tmp_path),
            group,
            str(size_bytes),
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "2", "OMP_WAIT_POLICY": "passive"}
        ran = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert ran.returncode == 0, f"ended by {ran.returncode}: {ran.stderr[-2000:]}"
    found = json.loads(ran.stdout)
    assert found["stored"] >= size_bytes
    assert max(found["prefill"]) < LIMIT_BYTES
    # buffers, and rows that wait: what chunks of the prompt left in the heap has gone back
    assert found["decode"] < 96 << 20
    # Once reads and writes have filled their buffers, only checksums come, 1 byte for 2 KiB; the
    # model's own tensors move in its heap.
    assert found["prefill"][-1] - max(found["prefill"][:4]) < 48 << 20
    # 48 MiB read ahead and 8 MiB written, in buffers at most a quarter larger; 16 MiB of rows that
    # wait; checksums and sums.
    assert 0 < found["stats"]["buffer_bytes"] < 100 << 20
