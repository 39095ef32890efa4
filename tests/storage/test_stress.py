"""The engine without Python under the thread and the address sanitizer: tests/cpp/engine_stress.cpp, built here with plain g++.

Objects are kept between runs, by the hash of everything that went into them.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
DRIVER = ROOT / "tests" / "cpp"
SOURCES = [*sorted(CSRC.glob("io/*.cpp")), CSRC / "cpu" / "crc32c.cpp", CSRC / "cpu" / "cpu_level.cpp", DRIVER / "engine_stress.cpp"]
HEADERS = [*sorted(CSRC.glob("io/*.hpp")), *sorted(CSRC.glob("cpu/*.hpp")), *sorted(DRIVER.glob("*.hpp"))]
SANITIZERS = ["thread", "address,undefined"]
PATHS = ["uring", "posix", "memory", "hostile"]


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        pytest.skip(f"no C++ compiler ({name})")
    return name


def flags(sanitizer: str, *, optimise: bool = False) -> list[str]:
    return [
        "-std=c++17",
        "-O1" if optimise else "-O0",
        "-g1",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        f"-fsanitize={sanitizer}",
        "-fno-omit-frame-pointer",
    ]


def build(sanitizer: str, folder: Path) -> Path:
    headers = b"".join(path.read_bytes() for path in HEADERS)

    def compile_one(source: Path) -> Path:
        words = [compiler(), *flags(sanitizer, optimise=source.parent == DRIVER), "-I", str(CSRC)]
        if sanitizer == "thread":
            words.append("-Wno-tsan")
        if source.name == "posix_queue.cpp":
            words.append("-Dmake_posix_queue=make_real_posix_queue")  # the driver puts its own in front
        name = hashlib.sha256(repr(words).encode() + headers + source.read_bytes()).hexdigest()[:24]
        target = folder / f"{source.stem}-{name}.o"
        if not target.exists():
            done = subprocess.run([*words, "-c", str(source), "-o", f"{target}.part"], capture_output=True, text=True)
            assert done.returncode == 0, done.stderr
            os.replace(f"{target}.part", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_one, SOURCES))
    for old in set(folder.glob("*.o")) - set(objects):
        old.unlink()
    program = folder / "engine_stress"
    done = subprocess.run([compiler(), *flags(sanitizer), *map(str, objects), "-o", str(program)], capture_output=True, text=True)
    if done.returncode != 0 and ("cannot find" in done.stderr or "libtsan" in done.stderr or "libasan" in done.stderr):
        pytest.skip(f"the compiler has no {sanitizer} sanitizer: {done.stderr.strip().splitlines()[-1]}")
    assert done.returncode == 0, done.stderr
    return program


@pytest.fixture(scope="module", params=SANITIZERS)
def stress(request: pytest.FixtureRequest) -> Path:
    folder = request.config.cache.mkdir(f"engine_stress-{request.param}")
    return build(request.param, folder)


@pytest.mark.slow
@pytest.mark.parametrize("path", PATHS)
def test_stress(stress: Path, path: str, tmp_path: Path) -> None:
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "halt_on_error=1 detect_leaks=1 exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
    }
    done = subprocess.run([stress, path, "1", "15", tmp_path], capture_output=True, text=True, timeout=100, env=environment)
    if path == "uring" and done.returncode == 3 and "cannot be had" in done.stderr:
        pytest.skip(f"[kernel] {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
