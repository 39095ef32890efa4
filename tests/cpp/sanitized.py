"""Builds the C++ programs of tests/cpp with a sanitizer and plain g++. Objects are kept between
runs, by the hash of all that went into them, and shared by the programs: of two test processes that
want the same one, the second waits for the first. The files of a room are compiled as one: what the
language's headers are made into is so made once."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.cpp.includes import CSRC, ROOT, own_text, standard_headers

DRIVERS = ROOT / "tests" / "cpp"
SANITIZERS = ["thread", "address,undefined"]
KEPT = {".o", ".lock", ".hpp", ".gch", ".cpp"}
KEPT_S = 30 * 86_400  # what nobody has asked for
#: Rooms of csrc/ whose files are compiled as one where a program has all of them. What chooses
#: among queues is apart from them: a driver may put itself between the two.
CHOICE = CSRC / "io" / "queue" / "queue.cpp"
TOGETHER = [
    sorted(path for path in CSRC.glob("io/**/*.cpp") if path != CHOICE),
    sorted(CSRC.glob("graph/**/*.cpp")),
]
ENGINE = [
    *sorted(CSRC.glob("io/**/*.cpp")),
    CSRC / "cpu" / "crc32c.cpp",
    CSRC / "cpu" / "cpu_level.cpp",
]


def compiler() -> str:
    name = os.environ.get("CXX", "g++")
    if shutil.which(name) is None:
        pytest.skip(f"no C++ compiler ({name})")
    return name


def flags(sanitizer: str, *, is_driver: bool = False) -> list[str]:
    # With the thread sanitizer -O1 compiles as fast as -O0, and runs in half the time; with the
    # address sanitizer it takes twice as long, and only drivers, which check every value, gain.
    level = "-O1" if is_driver or sanitizer == "thread" else "-O0"
    always = [
        "-std=c++17",
        "-g1",
        "-pthread",
        "-Wall",
        "-Wextra",
        "-Werror",
        "-fno-omit-frame-pointer",
        "-fno-sanitize-recover=all",
    ]
    return [*always, level, *([f"-fsanitize={sanitizer}"] if sanitizer else [])]


@contextmanager
def only_one(target: Path) -> Iterator[None]:
    """One process, and one thread, at a time makes that file."""
    with open(target.with_suffix(".lock"), "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def make(command: Sequence[str], target: Path) -> None:
    """A file that is there whole or not at all."""
    part = target.with_suffix(f".{os.getpid()}.part")
    done = subprocess.run([*command, "-o", str(part)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    os.replace(part, target)


def precompiled_header(command: Sequence[str], text: str, folder: Path) -> Path:
    """A header for ``-include`` of later calls of that command, which has been compiled: what most
    of the time of compiling a small file goes to."""
    name = hashlib.sha256(repr((command, text)).encode()).hexdigest()[:24]
    header = folder / f"first-{name}.hpp"
    compiled = header.with_suffix(".hpp.gch")
    with only_one(header):
        if not compiled.exists():
            header.write_text(text)
            make([*command, "-x", "c++-header", str(header)], compiled)
        for path in (header, compiled):
            os.utime(path)
    return header


def units(sources: Sequence[Path]) -> list[list[Path]]:
    """What is compiled as one."""
    rooms = [room for room in TOGETHER if set(room) <= set(sources)]
    return [*rooms, *([path] for path in sources if not any(path in room for room in rooms))]


def build(
    driver: str, sources: Sequence[Path], sanitizer: str, folder: Path, wrapped: Sequence[str] = ()
) -> Path:
    """The program of tests/cpp/`driver`.cpp and `sources`.

    Args:
        sanitizer: one or more of them, or "" for none.
        folder: of objects and programs; nothing else lies there. Several test processes may build
            in it at once.
        wrapped: functions, as the linker names them, that the driver puts itself in front of.
    """

    def words(*, is_driver: bool) -> list[str]:
        tsan = ["-Wno-tsan"] if sanitizer == "thread" else []
        return [compiler(), *flags(sanitizer, is_driver=is_driver), "-I", str(CSRC), *tsan]

    common, precompiled = words(is_driver=False), standard_headers()

    def compile_unit(unit: list[Path]) -> Path:
        source = unit[0]
        command = words(is_driver=source.parent == DRIVERS)
        first = precompiled if command == common else None
        what = repr((command, first)).encode() + b"".join(map(own_text, unit))
        target = folder / f"{source.stem}-{hashlib.sha256(what).hexdigest()[:24]}.o"
        with only_one(target):
            if not target.exists():
                if len(unit) > 1:
                    source = target.with_suffix(".cpp")
                    source.write_text("".join(f'#include "{path}"\n' for path in unit))
                if first is not None:
                    command += ["-include", str(precompiled_header(common, first, folder))]
                make([*command, "-c", str(source)], target)
            os.utime(target)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(compile_unit, [*units(sources), [DRIVERS / f"{driver}.cpp"]]))
    for old in folder.iterdir():
        if old.suffix in KEPT and old.stat().st_mtime < time.time() - KEPT_S:
            old.unlink(missing_ok=True)
    program = folder / driver
    done = subprocess.run(
        [
            compiler(),
            *flags(sanitizer),
            *(f"-Wl,--wrap={name}" for name in wrapped),
            *map(str, objects),
            "-o",
            str(program),
        ],
        capture_output=True,
        text=True,
    )
    if done.returncode != 0 and (
        "cannot find" in done.stderr or "libtsan" in done.stderr or "libasan" in done.stderr
    ):
        pytest.skip(
            f"the compiler has no {sanitizer} sanitizer: {done.stderr.strip().splitlines()[-1]}"
        )
    assert done.returncode == 0, done.stderr
    return program


def run(program: Path, *words: str | os.PathLike[str]) -> str:
    """Runs it to its end and returns what it printed. Skips the test where the kernel refuses
    io_uring."""
    environment = {
        **os.environ,
        "TSAN_OPTIONS": "halt_on_error=1 exitcode=66",
        "ASAN_OPTIONS": "halt_on_error=1 detect_leaks=1 exitcode=66",
        "UBSAN_OPTIONS": "halt_on_error=1 print_stacktrace=1",
    }
    done = subprocess.run(
        [program, *words], capture_output=True, text=True, timeout=300, env=environment
    )
    if done.returncode == 3 and "cannot be had" in done.stderr:
        pytest.skip(f"[kernel] {done.stderr.strip()}")
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stderr == ""
    return done.stdout
