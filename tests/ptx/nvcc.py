"""Kernels of csrc/cuda as nvcc compiles them for sm_90: their PTX executed, in place of a launch.

They are taken out of the files that a build has left, where this nvcc made them: what is tested is
what a launch would run, and nothing is compiled again. Elsewhere nvcc runs once for each source,
whatever the number of processes and sessions: what it made is kept by the source's digest.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeAlias

import numpy as np
import pytest
import torch

from espnx.ops.device_code import compiled_file
from tests.kernels.sass import TOOLS
from tests.ptx.global_memory import GlobalMemory
from tests.ptx.running import Executable

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "csrc" / "cuda"
SETUP = ROOT / "setup.py"
KEPT = ROOT / ".cache" / "nvcc"
ABSENT = "nvcc is not installed: csrc/cuda is not compiled here"
#: By kernel, the numbers of the arguments that it writes.
OUTPUTS = {
    "espnx_gather": (3,),
    "espnx_crc32c": (4,),
    "espnx_maxsim": (4,),
    "espnx_attention": (8, 9),
}
#: The number of the argument that its blocks count with; zeros before and after.
COUNTER = {"espnx_maxsim": 5}


def nvcc() -> str | None:
    return shutil.which("nvcc") or shutil.which("nvcc", path="/usr/local/cuda/bin")


needs_nvcc = pytest.mark.skipif(nvcc() is None, reason=ABSENT)


@functools.cache
def nvcc_release() -> str:
    """As nvcc says it, 13.0.88; empty where there is none."""
    if (command := nvcc()) is None:
        return ""
    text = subprocess.run([command, "--version"], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bV(\d+\.\d+\.\d+)", text)
    return found[1] if found else text.strip()


def built(name: str, kind: str, capability: int) -> bytes | None:
    """That part of what a build made of csrc/cuda/<name>.cu; None unless this nvcc made it, and
    setup.py has not changed since. Its PTX is nvcc's without comments."""
    file = compiled_file(name, ROOT / "espnx")
    if (
        file is None
        or file.stat().st_mtime_ns < SETUP.stat().st_mtime_ns
        or f", V{nvcc_release()}\0".encode() not in file.read_bytes()
    ):
        return None
    part = f".sm_{capability}.{kind}"
    command = [str(TOOLS / "cuobjdump"), "-xptx" if kind == "ptx" else "-xelf", part, str(file)]
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run(command, cwd=folder, capture_output=True)
        found = [path.read_bytes() for path in Path(folder).iterdir()]
    return found[0] if len(found) == 1 else None


@functools.cache
def compiled(name: str, kind: str = "ptx", capability: int = 90) -> bytes:
    """What nvcc makes of csrc/cuda/<name>.cu: PTX, or a cubin."""
    found = built(name, kind, capability)
    return by_nvcc(name, kind, capability) if found is None else found


def by_nvcc(name: str, kind: str, capability: int) -> bytes:
    """The same, compiled here unless it once was."""
    command = [str(nvcc()), "-std=c++17", "-O3", f"-arch=sm_{capability}", f"-{kind}"]
    source = SOURCES / f"{name}.cu"
    digest = hashlib.sha256("\0".join([nvcc_release(), *command[1:]]).encode())
    for part in (source, *sorted(SOURCES.glob("*.cuh"))):
        digest.update(part.read_bytes())
    kept = KEPT / f"{name}-{digest.hexdigest()[:20]}.{kind}"
    if not kept.is_file():
        KEPT.mkdir(parents=True, exist_ok=True)
        made = kept.with_suffix(f".{os.getpid()}")
        subprocess.run([*command, str(source), "-o", str(made)], capture_output=True, check=True)
        made.replace(kept)
    return kept.read_bytes()


@functools.cache
def executable(ptx: str, entry: str, shared_bytes: int, n_threads: int) -> Executable:
    return Executable(ptx, shared_bytes, entry, n_threads)


Argument: TypeAlias = torch.Tensor | ctypes.c_int64 | ctypes.c_uint32


class Launcher:
    """Stands in for `espnx.ops.device_code.launch`.

    Args:
        change: what is done to the PTX before it runs, as a test of the tests.
    """

    def __init__(self, change: Callable[[str], str] | None = None):
        self.change = change
        self.launches: list[str] = []
        self.n_steps = 0

    def __call__(
        self,
        name: str,
        kernel: str,
        blocks: int,
        threads: int,
        args: Sequence[Argument],
        device: torch.device,
        shared_bytes: int = 0,
    ) -> None:
        self.launches.append(kernel)
        ptx = compiled(name).decode()
        program = executable(ptx, kernel, shared_bytes, threads)
        if self.change is not None:
            program = program.like(ptx, self.change(ptx))
        self.n_steps += run(program, kernel, blocks, args)


def run(program: Executable, kernel: str, blocks: int, args: Sequence[Argument]) -> int:
    """Runs a kernel on tensors in place; the number of instructions that its blocks took."""
    memory, parameters = GlobalMemory(), {}
    outputs = next(numbers for name, numbers in OUTPUTS.items() if kernel.startswith(name))
    counter = next((number for name, number in COUNTER.items() if kernel.startswith(name)), -1)
    for i, (parameter, value) in enumerate(zip(program.program.parameters, args, strict=True)):
        if isinstance(value, torch.Tensor):
            assert value.is_contiguous()
            data = value.view(torch.uint8).reshape(-1).numpy()
            kinds = {"is_output": i in outputs, "is_counter": i == counter}
            base = memory.add(f"argument {i}", data, **kinds)
            parameters[parameter] = np.array(base, dtype=np.uint64)
        else:
            kind = np.int64 if isinstance(value, ctypes.c_int64) else np.uint32
            bits = np.array(value.value, dtype=kind)
            parameters[parameter] = bits.view(f"u{bits.itemsize}")
    n_steps = program.run((blocks, 1, 1), parameters, memory)
    assert not any(region.data.any() for region in memory.regions if region.is_counter)
    return n_steps
