"""Runs interpreted.py in a process of its own: Triton decides between interpreter and compiler when
it is imported."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

HERE = Path(__file__).parent


def test_kernels_in_the_interpreter(pytestconfig: pytest.Config, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-o",
        f"cache_dir={tmp_path}",
        str(HERE / "interpreted.py"),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONUNBUFFERED": "1"}
    finished = subprocess.run(
        command,
        cwd=pytestconfig.rootpath,
        env=environment,
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert finished.returncode == 0, finished.stdout + finished.stderr
    assert "passed" in finished.stdout
    assert "skipped" not in finished.stdout
