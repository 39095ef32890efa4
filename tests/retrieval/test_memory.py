"""A build keeps to its memory budget, whatever the corpus: measured by the kernel, in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.retrieval.memory_child import DIM

ROOT = Path(__file__).resolve().parents[2]
ROOM_MIB = 112  # beside what Python, PyTorch and FAISS take; the least that a build accepts is 80
COUNT, MEAN_TOKENS = 3200, 250


@pytest.mark.parametrize("pca", [0, 64])
def test_a_build_keeps_to_its_budget(tmp_path: Path, pca: int) -> None:
    """Vectors of more than twice the room, some documents a sixth of it each; the peak of resident memory stays below the limit."""
    words = [sys.executable, "-m", "tests.retrieval.memory_child", tmp_path, ROOM_MIB, COUNT, MEAN_TOKENS, pca]
    done = subprocess.run(
        list(map(str, words)), cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr
    seen = json.loads(done.stdout)
    vectors_bytes = seen["records"] * (DIM // (pca or DIM))
    assert vectors_bytes > 2 * (ROOM_MIB << 20)
    assert seen["peak"] <= seen["budget"], f"{(seen['peak'] - seen['budget']) >> 20} MiB too much"
    assert seen["peak"] > seen["base"]
    assert seen["verified"] == COUNT
