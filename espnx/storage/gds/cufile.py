"""The thin layer under the `gds` engine: cuFile's C structures and the calls we make.

`CuFile` works on anything with the functions of ``cuda.bindings.cufile`` and on any `DeviceMemory`,
so that all of it runs without a GPU on emulated bindings. Structures are written here by their
layout in cufile.h (the same from 1.15 to 1.20): the bindings' own classes change.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from .memory import DeviceMemory

BLOCK_BYTES = 4096
DEFAULT_BATCH_LIMIT = 128

_DESCRIPTOR = np.dtype(
    {
        "names": ["type", "fd", "fs_ops"],
        "formats": ["<i4", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
_PARAMS = np.dtype(
    {
        "names": [
            "mode",
            "base",
            "file_offset",
            "base_offset",
            "size",
            "handle",
            "opcode",
            "cookie",
        ],
        "formats": ["<i4", "<i8", "<i8", "<i8", "<u8", "<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16, 24, 32, 40, 48, 56],
        "itemsize": 64,
    }
)
EVENTS = np.dtype(
    {
        "names": ["cookie", "status", "ret"],
        "formats": ["<i8", "<i4", "<i8"],
        "offsets": [0, 8, 16],
        "itemsize": 24,
    }
)
_TIMESPEC = np.dtype([("seconds", "<i8"), ("nanoseconds", "<i8")])

# CUfileStatus_t
WAITING, PENDING, INVALID, CANCELED, COMPLETE, TIMEOUT, FAILED = (1 << bit for bit in range(7))
# CUfileOpError
DRIVER_ALREADY_OPEN = 5026
# also what registering a file ends with where udev does not know its device (seen with 1.15)
NOT_REGISTERED = 5027
UDEV = "/run/udev/data"
# IO_NOT_SUPPORTED, BATCH_NOCOMPAT_ERROR: older libraries have no batches in compatibility mode
NO_BATCHES = (5008, 5049)
# A full batch, no memory for its entries, "internal error, try again later" of its four calls, and
# what system calls say of the kind. The call has done nothing then, and may do it a moment later.
PASSING = (5037, 5039, 5040, 5041, 5042, 5043, errno.EINTR, errno.EAGAIN)
_FIRST_CUFILE_CODE = 5000
# CUFileBoolConfigParameter_t
_ALLOW_COMPAT_MODE, _FORCE_COMPAT_MODE = 1, 2
# Where CUfileStatsLevel1_t counts the entries of batches, by the path they took; versions differ
# only behind these.
_NVFS_AT, _P2P_AT, _POSIX_AT, _AIO_AT, _IO_URING_AT = 320, 336, 272, 352, 368
_STATS_BYTES = 64 * 1024  # many times what any version writes

_PAUSE_S = 0.0005
_OPEN_LIMIT_S = 60.0
_PROBE_LIMIT_S = 30.0


class CallFailedError(Exception):
    """A call of cuFile failed. Never leaves the engine: it becomes a class of espnx.errors there.

    Attributes:
        call: the function.
        code: an errno, a CUfileOpError (5001 and up), or 0 where the call could not even be made.
    """

    def __init__(self, call: str, code: int, text: str):
        super().__init__(f"{call}: {text}")
        self.call, self.code, self.text = call, code, text

    @property
    def errno(self) -> int | None:
        return self.code if 0 < self.code < _FIRST_CUFILE_CODE else None


def load_bindings() -> Any:
    """``cuda.bindings.cufile`` with its library. Raises MissingDependencyError."""
    try:
        bindings = importlib.import_module("cuda.bindings.cufile")
        bindings.get_version()
    except ImportError as error:
        raise errors.MissingDependencyError(
            "the `gds` path needs the Python bindings of cuFile",
            got=str(error),
            fix="pip install cuda-bindings (or espnx[gds])",
        ) from error
    except RuntimeError as error:
        # what the bindings raise when the library or a function in it is missing
        raise errors.MissingDependencyError(
            "the `gds` path needs libcufile 1.15 or newer",
            got=str(error).strip().splitlines()[0],
            fix="pip install nvidia-cufile",
        ) from error
    return bindings


@dataclass(frozen=True)
class Properties:
    """What cuFile says of itself once it is open.

    Attributes:
        version: of libcufile, 1000 * major + 10 * minor.
        nvfs_version: of the nvidia-fs kernel driver; (0, 0) where it is not loaded.
        p2pdma: whether cuFile can use the kernel's own PCI P2PDMA.
        compat_allowed: whether cuFile may go through host memory where it cannot transfer directly.
        compat_forced: whether it always does.
        batch_limit: most entries in a batch.
    """

    version: int
    nvfs_version: tuple[int, int]
    p2pdma: bool
    compat_allowed: bool
    compat_forced: bool
    batch_limit: int

    @property
    def copies_all(self) -> bool:
        """Whether no read can be direct, whatever the file."""
        return self.compat_forced or (self.nvfs_version == (0, 0) and not self.p2pdma)

    def obstacle(self) -> str:
        """The likely reason why a file is not read directly."""
        if self.compat_forced:
            return "cuFile is configured to force compatibility mode"
        if self.copies_all:
            return "the nvidia-fs driver is not loaded and cuFile has no PCI P2PDMA here"
        return (
            "cuFile does not support the file's device or file system (it needs NVMe or an RDMA "
            "file system; virtio disks are neither)"
        )


class Batch:
    """A batch context of cuFile: one submission at a time, completions in any order.

    Attributes:
        was_cancelled: what was in it at some time was cancelled.
    """

    def __init__(self, cufile: CuFile, capacity: int):
        self._cufile = cufile
        self.was_cancelled = False
        self._params = np.zeros(capacity, dtype=_PARAMS)
        self._events = np.zeros(capacity, dtype=EVENTS)
        self._count = np.zeros(1, dtype=np.uint32)
        self._timeout = np.zeros(1, dtype=_TIMESPEC)
        self._first, self._next = 0, 1
        self._id: int = cufile.call("batch_io_set_up", capacity)

    def submit(
        self,
        handle: np.ndarray,
        file_offset: np.ndarray,
        base: int,
        base_offset: np.ndarray,
        size: np.ndarray,
    ) -> None:
        """Starts reads. cuFile may look at the parameters until the last completion: they stay
        here.

        Each entry of each submission has a cookie of its own, so that late news of an earlier
        submission is told apart.
        """
        count = handle.size
        params = self._params[:count]
        params["mode"], params["opcode"] = 1, 0  # CUFILE_BATCH, CUFILE_READ
        params["base"], params["base_offset"] = base, base_offset
        params["handle"], params["file_offset"], params["size"] = handle, file_offset, size
        self._first, self._next = self._next, self._next + count
        params["cookie"] = np.arange(self._first, self._next)
        self._cufile.call("batch_io_submit", self._id, count, self._params.ctypes.data, 0)

    def poll(self, at_least: int, timeout_s: float) -> np.ndarray:
        """Finished entries, `EVENTS` [m], valid until the next call. Waits for `at_least` or the
        timeout.

        ``cookie`` is the entry's index in the latest submission; no such index where the event is
        of an earlier one.
        """
        self._count[0] = self._events.size
        # The bindings take an errno of this call for success: then nothing has been written here.
        self._events["status"] = WAITING
        self._timeout[0] = divmod(int(timeout_s * 1e9), 1_000_000_000)
        self._cufile.call(
            "batch_io_get_status",
            self._id,
            at_least,
            self._count.ctypes.data,
            self._events.ctypes.data,
            self._timeout.ctypes.data,
        )
        events = self._events[: int(self._count[0])]
        events["cookie"] -= self._first
        return events[(events["status"] & (WAITING | PENDING)) == 0]

    def cancel(self) -> None:
        """Asks for what has not begun to be dropped. Completions still have to be polled."""
        self._cufile.call("batch_io_cancel", self._id)

    def destroy(self) -> None:
        """Only when nothing is outstanding."""
        self._cufile.call("batch_io_destroy", self._id)


@dataclass
class _Opened:
    bindings: Any
    users: int = 0
    counted: bool = True
    allowed_compat: bool | None = None  # before we said what we want; None: nobody was asked


_opened: dict[int, _Opened] = {}
_opened_lock = threading.Lock()
_stats_lock = threading.Lock()


class CuFile:
    """The calls of cuFile that a read engine makes, with failures as `CallFailedError`.

    The driver is one per process: the first engine opens it, the last one closes it.
    """

    def __init__(self, bindings: Any, memory: DeviceMemory):
        self._bindings, self.memory = bindings, memory
        self._unfinished: list[Batch] = []

    def call(self, name: str, *arguments: Any) -> Any:
        try:
            return getattr(self._bindings, name)(*arguments)
        except self._bindings.cuFileError as error:
            code = int(error.status)
            raise CallFailedError(name, code, self.describe(code)) from error
        except ValueError as error:
            # the bindings cannot make their own exception of an errno: "5 is not a valid OpError"
            found = re.match(r"\d+", str(error))
            code = int(found.group()) if found else 0
            raise CallFailedError(
                name, code, self.describe(code) if found else str(error)
            ) from error
        except (RuntimeError, AttributeError) as error:  # the library lacks the function
            raise CallFailedError(name, 0, str(error)) from error

    def describe(self, code: int) -> str:
        """An errno or CUfileOpError in words."""
        if code < _FIRST_CUFILE_CODE:
            return os.strerror(code)
        try:
            return f"{self._bindings.op_status_error(code)} ({code})"
        except (RuntimeError, ValueError):
            return f"cuFile error {code}"

    def open(self, *, refuse_compat: bool) -> Properties:
        """Opens the driver, or joins the one that is open.

        Args:
            refuse_compat: tells cuFile to fail rather than go through host memory. Has an effect
                only if nobody opened the driver before.
        """
        with _opened_lock:
            opened = _opened.setdefault(id(self._bindings), _Opened(self._bindings))
            if opened.users == 0:
                try:
                    opened.counted = self._open_first(opened, refuse_compat)
                except BaseException as error:
                    del _opened[id(self._bindings)]
                    if isinstance(error, CallFailedError) and error.code:  # else it may be inside
                        self._restore(opened)
                    raise
            opened.users += 1
        try:
            return self._properties()
        except CallFailedError:
            self.close(abandoned=False)
            raise

    def close(self, *, abandoned: bool) -> None:
        """Leaves the driver; the last one closes it, unless I/O was abandoned: then it stays open
        for good."""
        with _opened_lock:
            opened = _opened[id(self._bindings)]
            opened.users -= 0 if abandoned else 1
            if opened.users > 0:
                return
            del _opened[id(self._bindings)]
            try:
                if opened.counted:
                    self._limited("driver_close", _OPEN_LIMIT_S)
            except CallFailedError:
                return
            self._restore(opened)

    def _restore(self, opened: _Opened) -> None:
        """Leaves the driver as if we had never been there: what we have set would refuse other
        libraries of the process their compatibility mode. Does nothing where it is still open."""
        before = opened.allowed_compat
        if before is not None:
            self.attempt(lambda: self.call("set_parameter_bool", _ALLOW_COMPAT_MODE, before))

    def _open_first(self, opened: _Opened, refuse_compat: bool) -> bool:
        """True where cuFile has counted us among its users, and must be told when we leave."""
        before = self.attempt(lambda: self.call("get_parameter_bool", _ALLOW_COMPAT_MODE))
        try:
            self.call("set_parameter_bool", _ALLOW_COMPAT_MODE, not refuse_compat)
            opened.allowed_compat = None if before is None else bool(before)
        except CallFailedError as error:
            if error.code != DRIVER_ALREADY_OPEN:  # by another library: with its parameters then
                raise
        try:
            # also where it is open: it stays so when the other library leaves
            self._limited("driver_open", _OPEN_LIMIT_S, undo="driver_close")
        except CallFailedError as error:
            if error.code != DRIVER_ALREADY_OPEN:
                raise
            return False
        return True

    def _limited(self, name: str, limit_s: float, *, undo: str = "") -> None:
        """A call that is known to hang on some machines (no libcuda, no udev), with a limit; the
        hung thread is left behind. If it comes back after all, it calls `undo`."""
        failures: list[CallFailedError] = []
        lock, is_over, is_late = threading.Lock(), False, False

        def run() -> None:
            nonlocal is_over
            try:
                self.memory.enter_thread()
                self.call(name)
            except CallFailedError as error:
                failures.append(error)
            with lock:
                is_over = True
            if is_late and undo and not failures:
                self.attempt(lambda: self.call(undo))

        thread = threading.Thread(target=run, daemon=True, name=f"espnx-{name}")
        thread.start()
        thread.join(limit_s)
        with lock:
            is_late = not is_over
        if is_late:
            raise CallFailedError(
                name,
                0,
                f"did not return within {limit_s:.0f} s (cuFile needs libcuda, and /run/udev in "
                "containers)",
            )
        thread.join()
        if failures:
            raise failures[0]

    def _properties(self) -> Properties:
        raw = np.zeros(64, dtype=np.uint32)
        self.call("driver_get_properties", raw.ctypes.data)
        # The bit of `features` that speaks of batches is no use: the header calls it unsupported.
        # They are tried instead.
        status, control, features, limit = int(raw[6]), int(raw[7]), int(raw[8]), int(raw[12])
        return Properties(
            version=int(self.call("get_version")),
            nvfs_version=(int(raw[0]), int(raw[1])),
            p2pdma=bool((status >> 11 | features >> 4) & 1),  # the former from 1.15 on
            compat_allowed=bool(control >> 1 & 1),
            compat_forced=bool(self.call("get_parameter_bool", _FORCE_COMPAT_MODE)),
            batch_limit=limit or DEFAULT_BATCH_LIMIT,
        )

    def register_file(self, descriptor: int) -> int:
        raw = np.zeros(1, dtype=_DESCRIPTOR)
        raw["type"], raw["fd"] = 1, descriptor  # CU_FILE_HANDLE_TYPE_OPAQUE_FD
        with self.memory.current():
            return int(self.call("handle_register", raw.ctypes.data))

    def forget_file(self, handle: int) -> None:
        """Refused, it stays registered; its descriptor can be closed all the same."""
        with self.memory.current():
            self.attempt(lambda: self.call("handle_deregister", handle))

    def register_memory(self, pointer: int, size_bytes: int) -> None:
        with self.memory.current():
            self.call("buf_register", pointer, size_bytes, 0)

    def forget_memory(self, pointer: int) -> bool:
        """Whether cuFile let go of it."""
        with self.memory.current():
            try:
                self.call("buf_deregister", pointer)
            except CallFailedError:
                return False
            return True

    def read(
        self, handle: int, base: int, base_offset: int, file_offset: int, size_bytes: int
    ) -> int:
        """One read, waited for: the bytes read. Raises CallFailedError, also for negative returns,
        which the bindings let through."""
        moved = self.call("read", handle, base, size_bytes, file_offset, base_offset)
        if moved is None:
            raise CallFailedError(
                "read",
                0,
                "these bindings do not return how many bytes were read; cuda-bindings 13.0.3 or "
                "newer does",
            )
        if moved < 0:
            raise CallFailedError("read", -moved, self.describe(-moved))
        return int(moved)

    def probe(self, handle: int, base: int, base_offset: int, size_bytes: int) -> bool:
        """Reads the head of a file and asks cuFile's statistics which way it went. True only where
        they show a direct transfer.

        cuFile does not tell how it will read a file; its counters of batch entries by path are the
        evidence that it offers. They count for the whole process, so another library's transfer in
        the same moment can make the answer False; a file is then taken for indirect.
        """
        with _stats_lock, self.memory.current():
            counting = self.attempt(self._start_stats)
            before = self.attempt(self._path_counts) if counting else None
            self._read_head(handle, base, base_offset, size_bytes)
            after = self.attempt(self._path_counts) if counting else None
            if counting == "started":
                self.attempt(lambda: self.call("stats_stop"))
                self.attempt(lambda: self.call("set_stats_level", 0))
        if before is None or after is None:
            return False
        return after[0] > before[0] and after[1] == before[1]

    def attempt(self, call: Callable[[], Any]) -> Any:
        """What it returns; None if it fails, for calls that nothing depends on (statistics of a
        library without, giving back)."""
        try:
            return call()
        except CallFailedError:
            return None

    def patiently(self, call: Callable[[], Any], until: float) -> Any:
        """A call that is repeated while cuFile asks for patience."""
        while True:
            try:
                return call()
            except CallFailedError as error:
                if error.code not in PASSING or time.monotonic() >= until:
                    raise
                time.sleep(_PAUSE_S)

    def _start_stats(self) -> str:
        if int(self.call("get_stats_level")) > 0:
            return "running"
        self.call("set_stats_level", 1)
        self.call("stats_start")
        return "started"

    def _path_counts(self) -> tuple[int, int]:
        raw = np.zeros(_STATS_BYTES // 8, dtype=np.uint64)
        self.call("get_stats_l1", raw.ctypes.data)
        direct, through_host = (_NVFS_AT, _P2P_AT), (_POSIX_AT, _AIO_AT, _IO_URING_AT)
        return sum(int(raw[at // 8]) for at in direct), sum(
            int(raw[at // 8]) for at in through_host
        )

    def _read_head(self, handle: int, base: int, base_offset: int, size_bytes: int) -> None:
        until = time.monotonic() + _PROBE_LIMIT_S
        try:
            batch: Batch = self.patiently(lambda: Batch(self, 1), until)
            # its parameters must outlive the read, whatever happens below
            self._unfinished.append(batch)
            self.patiently(
                lambda: batch.submit(
                    np.array([handle]),
                    np.array([0]),
                    base,
                    np.array([base_offset]),
                    np.array([size_bytes]),
                ),
                until,
            )
        except CallFailedError as error:
            if error.code not in NO_BATCHES:
                raise
            self.read(handle, base, base_offset, 0, size_bytes)
            return
        events = self.patiently(lambda: batch.poll(0, 0.0), until)
        while events.size == 0 and time.monotonic() < until:
            time.sleep(_PAUSE_S)
            events = self.patiently(lambda: batch.poll(0, 0.0), until)
        if events.size == 0:
            raise CallFailedError(
                "batch_io_get_status",
                0,
                f"a first read did not complete within {_PROBE_LIMIT_S:.0f} s",
            )
        status, moved = int(events["status"][0]), int(events["ret"][0])
        self._unfinished.remove(batch)
        self.attempt(batch.destroy)
        if status != COMPLETE or moved < 0:
            code = -moved if moved < 0 else 0
            raise CallFailedError(
                "batch_io_submit",
                code,
                self.describe(code) if code else f"entry ended with status {status}",
            )
