"""FlashInfer's decode attention, compiled from the headers of its package by nvcc and called by
ctypes: its Python would need a dozen packages more, for the same kernels and grids."""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

from espnx.errors import EspnxError

from .timing import Call

_SOURCE = Path(__file__).with_name("flashinfer.cu")
_HEADERS, _CCCL = "include", "cccl/libcudacxx/include"  # newer than those of CUDA 13.0
_NVCC = Path("/usr/local/cuda/bin/nvcc")  # where it is no command
_TMP_BYTES = 256 << 20  # of partial results
_DIMS, _GROUPS = (64, 128), (1, 2, 3, 4, 6, 8)


def sources() -> Path | None:
    """The folder ``data`` of an installed flashinfer-python, which is not imported."""
    try:
        spec = find_spec("flashinfer")
    except (ImportError, ValueError):
        return None
    places = [Path(each) for each in (spec.submodule_search_locations or ())] if spec else []
    found = [place / "data" for place in places]
    return next((each for each in found if (each / _HEADERS / "flashinfer").is_dir()), None)


def library_path(data: Path, folder: Path) -> Path:
    """The file in which `begin_build` leaves the library of this source and these headers."""
    headers = sorted((data / _HEADERS / "flashinfer" / "attention").glob("*.cuh"))
    text = b"".join(each.read_bytes() for each in (_SOURCE, *headers))
    return folder / f"flashinfer-{hashlib.sha256(text).hexdigest()[:16]}.so"


def begin_build(data: Path, library: Path, architecture: str) -> subprocess.Popen[bytes]:
    """A compiler at work, minutes of one core. Its output is a file beside the library. Raises
    EspnxError without nvcc."""
    nvcc = shutil.which("nvcc") or str(_NVCC)
    if not Path(nvcc).exists():
        raise EspnxError("flashinfer cannot be compiled", got="no nvcc")
    library.parent.mkdir(parents=True, exist_ok=True)
    flags = ["-O3", "-std=c++17", "--expt-relaxed-constexpr", "-shared", "-Xcompiler", "-fPIC"]
    flags += ["-DFLASHINFER_ENABLE_BF16", "-DFLASHINFER_ENABLE_F16", "--split-compile=0"]
    flags += [f"-gencode=arch=compute_{architecture},code=sm_{architecture}"]
    flags += [f"-I{data / each}" for each in (_HEADERS, _CCCL)]
    with library.with_suffix(".log").open("wb") as log:
        return subprocess.Popen(
            [nvcc, *flags, "-o", str(library.with_suffix(".part")), str(_SOURCE)],
            stdout=log,
            stderr=subprocess.STDOUT,
        )


def end_build(process: subprocess.Popen[bytes], library: Path, limit_s: float) -> str | None:
    """Waits for the compiler; why there is no library, or None."""
    try:
        code = process.wait(max(limit_s, 0.0))
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        return f"did not compile within {limit_s:.0f} s"
    if code:
        lines = library.with_suffix(".log").read_text(errors="replace").strip().splitlines()
        errors = [line for line in lines if "error" in line] or lines or ["no output"]
        return f"did not compile: {errors[0][:200]}"
    library.with_suffix(".part").replace(library)
    return None


def refusal(dtype: torch.dtype, d: int, group: int) -> str | None:
    """Why it is not for such rows."""
    if dtype == torch.float32:
        return "has no fp32 rows"
    if d not in _DIMS or group not in _GROUPS:
        return "not compiled for these rows"
    return None


@functools.cache
def _function(library: Path) -> Any:
    function = ctypes.CDLL(str(library)).espnx_flashinfer_decode
    word, number = ctypes.c_uint32, ctypes.c_int
    function.argtypes = [ctypes.c_void_p] * 5 + [word] * 4 + [ctypes.c_float, number, number]
    function.argtypes += [ctypes.c_void_p]
    function.restype = number
    return function


def calls(
    library: Path,
    query: torch.Tensor,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    scale: float,
) -> list[tuple[str, Call]]:
    """Decode of `query` [1, heads * group, 1, d] over each K and V [1, heads, n, d], on CUDA cores
    and on tensor cores."""
    function = _function(library)
    temporary = torch.empty(_TMP_BYTES, dtype=torch.uint8, device=query.device)
    query_heads, d = query.shape[1], query.shape[3]

    def decode(i: int, tensor_cores: bool) -> torch.Tensor:
        k, v = rows[i]
        out = torch.empty_like(query)
        pointers = [each.data_ptr() for each in (query, k, v, out, temporary)]
        stream = torch.cuda.current_stream(query.device).cuda_stream
        shape = (k.shape[2], query_heads, k.shape[1], d)
        is_bf16 = int(query.dtype == torch.bfloat16)
        code = function(*pointers, *shape, scale, is_bf16, int(tensor_cores), stream)
        if code:
            raise EspnxError("flashinfer failed", got=f"error {code}")
        return out

    return [("cuda-cores", lambda i: decode(i, False)), ("tensor-cores", lambda i: decode(i, True))]
