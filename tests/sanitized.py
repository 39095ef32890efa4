"""Builds the C++ programs of tests/cpp with a sanitizer and plain g++. Objects are kept between runs, by the hash of all that went into
them."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
CSRC = ROOT / "csrc"
DRIVERS = ROOT / "tests" / "cpp"
SANITIZERS = ["thread", "address,undefined"]
ENGINE = [*sorted(CSRC.glob("io/*.cpp")), CSRC / "cpu" / "crc32c.cpp", CSRC / "cpu" / "cpu_level.cpp"]


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        pytest.skip(f"no C++ compiler ({name})")
    return name


def flags(sanitizer: str, *, optimise: bool = False) -> list[str]:
    level = "-O1" if optimise else "-O0"
    return ["-std=c++17", level, "-g1", "-pthread", "-Wall", "-Wextra", "-Werror", f"-fsanitize={sanitizer}", "-fno-omit-frame-pointer"]


def build(driver: str, sources: Sequence[Path], sanitizer: str, folder: Path, defines: Mapping[str, str] | None = None) -> Path:
    """The program of tests/cpp/`driver`.cpp and `sources`.

    Args:
        folder: of objects and the program; nothing else lies there.
        defines: for a source of that name, ``old=new``: a function that the driver puts itself in front of.
    """
    headers = b"".join(path.read_bytes() for path in [*sorted(CSRC.rglob("*.hpp")), *sorted(DRIVERS.glob("*.hpp"))])

    def compile_one(source: Path) -> Path:
        words = [compiler(), *flags(sanitizer, optimise=source.parent == DRIVERS), "-I", str(CSRC)]
        if sanitizer == "thread":
            words.append("-Wno-tsan")
        if source.name in (defines or {}):
            words.append(f"-D{(defines or {})[source.name]}")
        name = hashlib.sha256(repr(words).encode() + headers + source.read_bytes()).hexdigest()[:24]
        target = folder / f"{source.stem}-{name}.o"
        if not target.exists():
            done = subprocess.run([*words, "-c", str(source), "-o", f"{target}.part"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(f"{target}.part", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, [*sources, DRIVERS / f"{driver}.cpp"]))
    for old in set(folder.glob("*.o")) - set(objects):
        old.unlink()
    program = folder / driver
    done = subprocess.run([compiler(), *flags(sanitizer), *map(str, objects), "-o", str(program)], capture_output=True, text=True)
    if done.returncode != 0 and ("cannot find" in done.stderr or "libtsan" in done.stderr or "libasan" in done.stderr):
        pytest.skip(f"the compiler has no {sanitizer} sanitizer: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *words: str | os.PathLike[str]) -> None:
    """Runs it to its end. Skips the test where the kernel refuses io_uring."""
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "halt_on_error=1 detect_leaks=1 exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
    }
    done = subprocess.run([program, *words], capture_output=True, text=True, timeout=300, env=environment)
    if done.returncode == 3 and "cannot be had" in done.stderr:
        pytest.skip(f"[kernel] {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
