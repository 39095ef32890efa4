"""Runs interpreted.py, and what of attention/test_kernel.py is interpreted, in a process of their
own: Triton decides between interpreter and compiler when it is imported. In the sweep alone: the
same problems are run by tests/ptx, as the kernels are compiled."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

from tests.ops.attention.test_attention import ROW_FORMATS
from tests.ops.attention.test_kernel import PARTS

HERE = Path(__file__).parent


@pytest.mark.sweep
@pytest.mark.parametrize("marked", ["not sweep", "sweep"])
def test_kernels_in_the_interpreter(
    pytestconfig: pytest.Config, tmp_path: Path, marked: str
) -> None:
    command = [
        sys.executable,
        *("-m", "pytest", "-q", "-rp", "-p", "no:xdist", "-o", f"cache_dir={tmp_path}"),
        *("-m", marked, "-k", "interpreted", str(HERE / "interpreted.py")),
        str(HERE / "attention" / "test_kernel.py"),
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
    assert "skipped" not in finished.stdout
    passed = [line for line in finished.stdout.splitlines() if line.startswith("PASSED")]
    of_attention = sum(len(formats.split()) for formats in PARTS.values())
    if marked == "sweep":
        of_attention = len(PARTS) * len(ROW_FORMATS) - of_attention
    assert sum("::test_interpreted[" in line for line in passed) == of_attention
    assert (len(passed) > of_attention) is (marked == "not sweep")
