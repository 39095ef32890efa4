"""How rows are cut into reads, in C++ without Python: tests/cpp/row_plan_check.cpp, built here with plain g++ and the sanitizers it has."""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
FLAGS = ["-std=c++17", "-O1", "-g1", "-Wall", "-Wextra", "-Werror", "-I", str(CSRC)]
SANITIZERS = ["-fsanitize=address,undefined", "-fno-sanitize-recover=all"]


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    compiler = os.environ.get("CXX", "g++")
    if shutil.which(compiler) is None:
        pytest.skip(f"no C++ compiler ({compiler})")
    target = tmp_path_factory.mktemp("row_plan") / "row_plan_check"
    sources = [CSRC / "device" / "row_plan.cpp", CSRC / "io" / "buffer.cpp", ROOT / "tests" / "cpp" / "row_plan_check.cpp"]
    words = [compiler, *FLAGS, *map(str, sources), "-o", str(target)]
    done = subprocess.run([*words, *SANITIZERS], capture_output=True, text=True)
    if done.returncode != 0 and ("cannot find" in done.stderr or "libasan" in done.stderr or "libubsan" in done.stderr):
        done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return target


@pytest.mark.parametrize("seed", range(4))
def test_every_row_once(program: Path, seed: int) -> None:
    done = subprocess.run([program, str(seed), "400"], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
