"""The memory that the `gds` engine reads into: what it asks of a device (`DeviceMemory`), and how a
CUDA device gives it."""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Protocol

import torch

from ... import errors
from ...streams import any_is_capturing

_CUDA_OUT_OF_MEMORY, _CUDA_OLD_DRIVER = 2, 35


class Fence(Protocol):
    """A point in the device's queues."""

    def passed(self) -> bool:
        """Whether everything queued before it has run."""


class DeviceMemory(Protocol):
    """The memory that reads land in."""

    device: torch.device

    def enter_thread(self) -> None:
        """Makes the device current in the calling thread, for good; every thread of the engine's
        own that calls cuFile needs it once."""

    def current(self) -> AbstractContextManager[object]:
        """The same for as long as it is open, in a thread of somebody else's: cuFile looks at the
        CUDA context of the thread that calls, and refuses memory of another one."""

    def allocate(self, size_bytes: int) -> torch.Tensor:
        """A uint8 tensor that nothing queued on the device still writes to. Raises
        OutOfMemoryError."""

    def wrap(self, owner: object, pointer: int, size_bytes: int) -> torch.Tensor:
        """A uint8 tensor over memory that lives as long as `owner`; keeps `owner` as long as any
        view of it lives."""

    def settle(self) -> None:
        """Waits for everything queued on the device."""

    def stream(self) -> Any:
        """The caller's current stream."""

    def fence(self, streams: Iterable[Any]) -> Fence:
        """A fence behind what is queued on `streams` now."""


class EventFence:
    """Behind what is queued on CUDA streams now; or later, when nothing records a CUDA graph on
    them any more: an event of ours must not become part of somebody's graph."""

    def __init__(self, streams: set[Any]):
        self._streams, self._events = streams, list[Any]()
        self._record()

    def _record(self) -> None:
        if not any_is_capturing(self._streams):
            self._events = [stream.record_event() for stream in self._streams]
            self._streams = set()

    def passed(self) -> bool:
        if self._streams:
            self._record()
        return not self._streams and all(event.query() for event in self._events)


class Allocation:
    """Memory of ``cudaMalloc``, freed with the last tensor over it.

    Not from torch's allocator: what that makes with expandable segments, or of CUDA's own pools,
    cannot be registered with cuFile.

    Args:
        runtime: ``cuda.bindings.runtime``.
        device: the number of the CUDA device.

    Raises:
        OutOfMemoryError: the device has no such piece.
        PathUnavailableError: the call fails for another reason.
    """

    def __init__(self, runtime: Any, device: int, size_bytes: int):
        (status,) = runtime.cudaSetDevice(device)
        if status == 0:
            status, self.pointer = runtime.cudaMalloc(size_bytes)
        if status == 0:
            weakref.finalize(
                self, self._free, runtime, int(self.pointer), os.getpid()
            ).atexit = False
            return
        if int(status) == _CUDA_OUT_OF_MEMORY:
            _, free_bytes, _ = runtime.cudaMemGetInfo()
            raise errors.OutOfMemoryError(
                "memory of the GPU for reads", needed_bytes=size_bytes, free_bytes=int(free_bytes)
            )
        is_old = int(status) == _CUDA_OLD_DRIVER
        raise errors.PathUnavailableError(
            "GPU memory cannot be allocated",
            got=f"CUDA error {int(status)}{_meaning(runtime, status)}",
            fix="a driver of CUDA 13 (580 or newer), or another path (`uring`)" if is_old else None,
        )

    @staticmethod
    def _free(runtime: Any, pointer: int, process: int) -> None:
        if process == os.getpid():  # CUDA does not survive a fork
            runtime.cudaFree(pointer)


def _meaning(runtime: Any, status: Any) -> str:
    """An error of CUDA in words, where the bindings know them."""
    try:
        failed, text = runtime.cudaGetErrorString(status)
        return "" if failed else f", {bytes(text).decode()}"
    except (AttributeError, TypeError, ValueError, UnicodeDecodeError):
        return ""


class _DeviceArray:
    """Memory of a CUDA device as an object that torch can adopt, with a reference to its owner."""

    def __init__(self, owner: object, pointer: int, size_bytes: int):
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": (size_bytes,),
            "typestr": "|u1",
            "data": (pointer, False),
            "strides": None,
            "version": 3,
        }


class CudaMemory:
    """`DeviceMemory` of a CUDA device, through torch."""

    def __init__(self, device: str | torch.device):
        device = torch.device(device)
        if device.type != "cuda":
            raise errors.InvalidInputError(
                "GPUDirect Storage reads into CUDA memory",
                got=f"device {device}",
                expected="cuda or cuda:N",
            )
        if not torch.cuda.is_available():
            built = (
                "torch sees no CUDA device"
                if torch.version.cuda
                else "this torch was built without CUDA"
            )
            raise errors.PathUnavailableError(
                "GPUDirect Storage needs a CUDA device",
                got=built,
                fix="name another path (`uring`, `posix`)",
            )
        self.device = torch.device(
            "cuda", torch.cuda.current_device() if device.index is None else device.index
        )
        try:
            self._runtime = importlib.import_module("cuda.bindings.runtime")
        except ImportError as error:
            raise errors.MissingDependencyError(
                "the `gds` path needs the Python bindings of CUDA",
                got=str(error),
                fix="pip install cuda-bindings (or espnx[gds])",
            ) from error

    def enter_thread(self) -> None:
        torch.cuda.set_device(self.device)
        self._bind()

    @contextmanager
    def current(self) -> Iterator[None]:
        with torch.cuda.device(self.device):
            self._bind()
            yield

    def _bind(self) -> None:
        # torch does nothing where a new thread has the same number, which has no context then
        self._runtime.cudaSetDevice(self.device.index)

    def allocate(self, size_bytes: int) -> torch.Tensor:
        with torch.cuda.device(self.device):
            try:
                owner = Allocation(self._runtime, self.device.index, size_bytes)
            except errors.OutOfMemoryError:
                torch.cuda.empty_cache()  # what torch's allocator keeps and nobody uses
                owner = Allocation(self._runtime, self.device.index, size_bytes)
        return self.wrap(owner, int(owner.pointer), size_bytes)

    def wrap(self, owner: object, pointer: int, size_bytes: int) -> torch.Tensor:
        if size_bytes == 0:
            return torch.empty(0, dtype=torch.uint8, device=self.device)
        return torch.as_tensor(_DeviceArray(owner, pointer, size_bytes), device=self.device)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def stream(self) -> Any:
        return torch.cuda.current_stream(self.device)

    def fence(self, streams: Iterable[Any]) -> Fence:
        return EventFence({*streams, torch.cuda.current_stream(self.device)})
