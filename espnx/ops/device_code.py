"""Kernels of csrc/cuda, which a build compiles where nvcc is, launched through CUDA's driver.

A build leaves ``espnx/kernels/<name>-<digest>.fatbin``: machine code for sm_80 and sm_90 (and what
runs it: 8.x and 9.x), and PTX that the driver compiles for later GPUs. Without such a file, or with
a driver that cannot take it, ops have another version: `is_there` says which.

The driver's own library is called, ``libcuda.so.1``, which every machine with a GPU has; no other
package is needed. Code is loaded once for all devices (cuLibraryLoadData, CUDA 12.0).
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeAlias

import torch

from ..errors import EspnxError
from ._native import on_current

log = logging.getLogger("espnx")
LIBRARY = "libcuda.so.1"
_PACKAGE = Path(__file__).resolve().parents[1]
_SHARED_BYTES_MAX = 8  # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
_SHARED_BYTES_FREE = 48 * 1024  # of a block without asking
_CAPABILITY_MIN = (8, 0)

Argument: TypeAlias = torch.Tensor | ctypes.c_int64 | ctypes.c_uint32


class LaunchError(EspnxError):
    """The driver refused code of csrc/cuda, or its launch."""


def source_digest(source: Path) -> str:
    """The part of a compiled file's name that says of which source it is, with the headers beside
    it."""
    texts = [path.read_bytes() for path in (source, *sorted(source.parent.glob("*.cuh")))]
    return hashlib.sha256(b"".join(texts)).hexdigest()[:16]


def compiled_file(name: str, package: Path = _PACKAGE) -> Path | None:
    """What a build has made of ``csrc/cuda/<name>.cu``; in a clone: as that file is now."""
    source = package.parent / "csrc" / "cuda" / f"{name}.cu"
    kernels = package / "kernels"
    if source.is_file():
        found = kernels / f"{name}-{source_digest(source)}.fatbin"
        return found if found.is_file() else None
    return next(iter(sorted(kernels.glob(f"{name}-*.fatbin"))), None)


class Driver:
    """The functions of CUDA's driver that a launch takes.

    Args:
        library: a loaded ``libcuda.so.1``, or what stands in for it.
    """

    def __init__(self, library: Any):
        self._library = library

    def call(self, name: str, *args: Any) -> None:
        """Raises LaunchError for any result but CUDA_SUCCESS."""
        code = getattr(self._library, name)(*args)
        if code:
            raise LaunchError(f"CUDA's {name} failed", got=self._name_of(code))

    def _name_of(self, code: int) -> str:
        text = ctypes.c_char_p()
        known = self._library.cuGetErrorName(ctypes.c_int(code), ctypes.byref(text)) == 0
        return f"{text.value.decode()} ({code})" if known and text.value else f"error {code}"

    def load(self, code: bytes) -> ctypes.c_void_p:
        """A library of kernels, good on every device."""
        library = ctypes.c_void_p()
        nothing = (None, None, ctypes.c_uint(0))
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuLibraryLoadData", ctypes.byref(library), code, *nothing, *nothing)
        return library

    def kernel(self, library: ctypes.c_void_p, name: str) -> ctypes.c_void_p:
        found = ctypes.c_void_p()
        self.call("cuLibraryGetKernel", ctypes.byref(found), library, name.encode())
        return found

    def allow_shared(self, kernel: ctypes.c_void_p, n_bytes: int, device: int) -> None:
        """A block of this kernel may have that much of a multiprocessor's shared memory."""
        size, where = ctypes.c_int(n_bytes), ctypes.c_int(device)
        self.call("cuKernelSetAttribute", ctypes.c_int(_SHARED_BYTES_MAX), size, kernel, where)

    def load_on(self, kernel: ctypes.c_void_p, device: int) -> None:
        """Loads a kernel's code for a device, which the driver else does at the first launch: only
        then it finds out that it cannot compile PTX of a later CUDA, or has nothing that runs
        there."""
        context, function = ctypes.c_void_p(), ctypes.c_void_p()
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
        self.call("cuCtxPushCurrent_v2", context)
        try:
            self.call("cuKernelGetFunction", ctypes.byref(function), kernel)
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(context))

    def ensure_context(self, device: int) -> None:
        """A thread that has not yet used CUDA has no context."""
        context = ctypes.c_void_p()
        self.call("cuCtxGetCurrent", ctypes.byref(context))
        if context.value is None:
            self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), ctypes.c_int(device))
            self.call("cuCtxSetCurrent", context)

    def launch(
        self,
        kernel: ctypes.c_void_p,
        blocks: int,
        threads: int,
        shared_bytes: int,
        stream: int,
        args: Sequence[Any],
    ) -> None:
        """``args``: of ctypes; the driver copies them before it returns."""
        # addresses keep nothing alive: the caller has the arguments until then
        pointers = (ctypes.c_void_p * len(args))(*map(ctypes.addressof, args))
        sizes = (ctypes.c_uint(each) for each in (blocks, 1, 1, threads, 1, 1, shared_bytes))
        self.call("cuLaunchKernel", kernel, *sizes, ctypes.c_void_p(stream), pointers, None)


class Code:
    """The kernels of one compiled file."""

    def __init__(self, driver: Driver, file: Path):
        self._driver = driver
        self._library = driver.load(file.read_bytes())
        self._kernels: dict[str, ctypes.c_void_p] = {}
        self._allowed: dict[tuple[str, int], int] = {}
        self._allowing = threading.Lock()  # what one thread has been allowed no other takes back

    def load_on(self, name: str, device: int) -> None:
        """Finds out whether a kernel runs on a device. Raises LaunchError."""
        self._driver.load_on(self.kernel(name, device, 0), device)

    def kernel(self, name: str, device: int, shared_bytes: int) -> ctypes.c_void_p:
        """One that may be launched with that much shared memory."""
        with self._allowing:
            if name not in self._kernels:
                self._kernels[name] = self._driver.kernel(self._library, name)
            wanted = max(shared_bytes, _SHARED_BYTES_FREE)
            if self._allowed.get((name, device), _SHARED_BYTES_FREE) < wanted:
                self._driver.allow_shared(self._kernels[name], shared_bytes, device)
                self._allowed[name, device] = shared_bytes
            return self._kernels[name]


@functools.cache
def _driver() -> Driver:
    return Driver(ctypes.CDLL(LIBRARY))


@functools.cache
def _code(name: str) -> Code | None:
    file = compiled_file(name)
    if file is None:
        return None
    try:
        return Code(_driver(), file)
    except (OSError, AttributeError, LaunchError) as error:
        # no driver, one before 12.0, or one that is older than the nvcc that compiled the file
        log.info("%s is not used: %s", file.name, error)
        return None


@functools.cache
def is_there(name: str, kernel: str, device: torch.device, shared_bytes: int = 0) -> bool:
    """Whether a kernel of ``csrc/cuda/<name>.cu`` can be launched on a device, with that much
    shared memory for a block."""
    code = _code(name) if device.type == "cuda" else None
    if code is None or _is_older(device):
        return False
    try:
        code.kernel(kernel, _index(device), shared_bytes)
        code.load_on(kernel, _index(device))
    except LaunchError as error:
        log.info("%s is not used on %s: %s", kernel, device, error)
        return False
    return True


def _is_older(device: torch.device) -> bool:
    """A driver may find out at the launch that it has no code for a GPU."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability(device) < _CAPABILITY_MIN


def _index(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


def launch(
    name: str,
    kernel: str,
    blocks: int,
    threads: int,
    args: Sequence[Argument],
    device: torch.device,
    shared_bytes: int = 0,
) -> None:
    """Launches a kernel of ``csrc/cuda/<name>.cu`` on torch's current stream of a device.

    Args:
        blocks, threads: of the grid, and of a block.
        args: tensors, of which the kernel gets the addresses, and numbers of ctypes.
        shared_bytes: of a block, beside what the kernel itself declares.

    Raises:
        LaunchError: the code cannot be loaded, or the driver refuses the launch.
    """
    code = _code(name)
    if code is None:
        raise LaunchError(
            f"csrc/cuda/{name}.cu is not compiled for this machine",
            fix="build espnx where nvcc is installed",
        )
    values = [
        ctypes.c_uint64(each.data_ptr()) if isinstance(each, torch.Tensor) else each
        for each in args
    ]
    index = _index(device)
    with on_current(device):
        _driver().ensure_context(index)
        stream = torch.cuda.current_stream(index).cuda_stream
        found = code.kernel(kernel, index, shared_bytes)
        _driver().launch(found, blocks, threads, shared_bytes, stream, values)
