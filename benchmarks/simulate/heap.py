"""A plain heap in C++, compiled where it is measured: what anybody would write first.

A file of its own: it shares nothing with what it is compared with.
"""

from __future__ import annotations

import shutil
import struct
import subprocess
from pathlib import Path

import numpy as np

from espnx.errors import EspnxError, MissingDependencyError

from .work import Reads

SOURCE = Path(__file__).with_name("plain_heap.cpp")
_TIMEOUT_S = 600


def compile_heap(folder: Path) -> Path:
    """The program. Raises MissingDependencyError: there is no compiler."""
    compiler = shutil.which("g++") or shutil.which("c++")
    if compiler is None:
        raise MissingDependencyError(
            "no C++ compiler for the plain heap", fix="install the Debian package g++"
        )
    program = folder / "plain_heap"
    _run([compiler, "-std=c++20", "-O3", "-march=native", "-o", str(program), str(SOURCE)])
    return program


def write_reads(reads: Reads, path: Path) -> None:
    """What the program reads: numbers of eight bytes."""
    words = [struct.pack("<q", len(reads.parts))]
    for part in reads.parts:
        words.append(struct.pack("<qdd", part.places, part.latency_s, part.bytes_per_s or 0.0))
    words.append(struct.pack("<q", len(reads.routes)))
    for steps in reads.routes:
        words.append(struct.pack("<q", len(steps)))
        for number, step in enumerate(steps):
            until = number if step.until is None else step.until
            words.append(struct.pack("<qqd", step.part, until, step.size_bytes))
    words.append(struct.pack("<q", len(reads.route)))
    words += [each.astype("<i8").tobytes() for each in (reads.route, reads.client)]
    path.write_bytes(b"".join(words))


def walk_heap(program: Path, asked: Path, answered: Path) -> tuple[float, np.ndarray]:
    """(seconds of a processor, float64 [commands]: when each has ended)."""
    seconds = float(_run([str(program), str(asked), str(answered)]))
    return seconds, np.fromfile(answered, dtype="<f8")


def _run(words: list[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    if done.returncode:
        raise EspnxError(f"{Path(words[0]).name} failed", got=done.stderr[-500:])
    return done.stdout
