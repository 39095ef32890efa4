"""The ``gds`` and ``gds-compat`` engines: reads from files into GPU memory through cuFile
(GPUDirect Storage). Imported only when named.

``gds`` is the direct way (NVMe to GPU memory by DMA) and nothing else. In its compatibility mode
cuFile reads into host memory and copies; it does so on virtio disks, or where there is neither
nvidia-fs nor PCI P2PDMA, and does not say so. How the effective path is found:

1. An engine named ``gds`` opens cuFile with ``allow_compat_mode`` off. cuFile then refuses what it
   cannot transfer directly: opening the driver, registering the file or a first read fails, and
   that is a `PathUnavailableError`.
2. Where compatibility mode is allowed (``gds-compat``, or another library opened cuFile first), the
   head of each file is read once at open, and cuFile's statistics must show that this read was
   direct (nvidia-fs or P2P) and not through the host. Anything short of that evidence is
   ``gds-compat``: shown in `FileHandle.effective`, refused by ``gds``.

Many small reads are cuFile batches (at most 128 entries each, several in flight); items above 1 MiB
are read in pieces by threads. All of it lands in slices of memory that was registered once. Every
entry's status and byte count is looked at; only what was submitted is waited for.
"""

from __future__ import annotations

import errno
import logging
import os
import stat
from types import TracebackType
from typing import Any

import torch

from ... import errors
from ..engine import DEFAULT_DEADLINE_S, EngineStats, FileHandle, Plan, because
from ..native import load_native
from .arena import Lease, Pool
from .cufile import (
    BLOCK_BYTES,
    NOT_REGISTERED,
    UDEV,
    CallFailedError,
    CuFile,
    Properties,
    load_bindings,
)
from .file import OpenFile
from .loop import ReadLoop, left_behind
from .memory import CudaMemory, DeviceMemory
from .transfer import GdsFuture, Transfer, check, lay_out, with_own_numbers

_COMPAT_FIX = "name `gds-compat` to accept a copy through host memory, or `uring`"
_RETRY_FIX = "check the device (dmesg, smartctl), then try again; the engine is still usable"

log = logging.getLogger(__name__)


class GdsEngine:
    """See `espnx.storage.engine.Engine`. Reads only; results are CUDA tensors.

    Args:
        path: ``gds`` or ``gds-compat``.
        device: ``cuda`` or ``cuda:N``.
        batch_size: most reads in a batch; cuFile's own limit (128 unless configured) holds.
        batches: how many batches are in flight at a time.
        batch_bytes: neighbours are merged into reads of at most this size; items above it are
            large.
        large_bytes: large items are read in pieces of this size.
        threads: how many large reads are under way at a time.
        arena_bytes: device memory registered at once; more arenas are added when results in use
            fill it.
        poison: fill memory with 0xA5 before use (tests).
        bindings, memory: what to call instead of ``cuda.bindings.cufile`` and the CUDA device
            (tests).

    Raises:
        PathUnavailableError: no CUDA device, or cuFile cannot be opened, or (``gds``) cannot
            transfer directly.
        MissingDependencyError: cuda-bindings or libcufile is not installed.
        OutOfMemoryError: the GPU has no room for an arena.
        InvalidInputError: an option is out of range.
    """

    def __init__(
        self,
        path: str = "gds",
        *,
        device: str | torch.device = "cuda",
        batch_size: int = 128,
        batches: int = 4,
        batch_bytes: int = 1024 * 1024,
        large_bytes: int = 4 * 1024 * 1024,
        threads: int = 4,
        arena_bytes: int = 256 * 1024 * 1024,
        poison: bool = False,
        bindings: Any = None,
        memory: DeviceMemory | None = None,
    ):
        self._check_options(
            path,
            batch_size=batch_size,
            batches=batches,
            threads=threads,
            batch_bytes=batch_bytes,
            large_bytes=large_bytes,
        )
        if arena_bytes < BLOCK_BYTES:
            raise errors.InvalidInputError(
                "arena_bytes of a gds engine", got=arena_bytes, expected=f"at least {BLOCK_BYTES}"
            )
        self.requested = path
        self._strict = path == "gds"
        self._memory = memory if memory is not None else CudaMemory(device)
        self._cufile = CuFile(bindings if bindings is not None else load_bindings(), self._memory)
        self.properties: Properties = self._open_driver()
        self._pool = Pool(self._cufile, arena_bytes, must_register=self._strict, poison=poison)
        try:
            self._prepare()
        except BaseException:
            self._pool.close()
            self._cufile.close(abandoned=False)
            raise
        self._batch_bytes, self._large_bytes = batch_bytes, large_bytes
        self._process, self._closed = os.getpid(), False
        self._files: list[OpenFile | None] = []
        self._first_file: int = load_native().reserve_file_numbers()
        self._loop = ReadLoop(
            self._cufile,
            batch_size=min(batch_size, self.properties.batch_limit),
            batches=batches,
            threads=threads,
            # In compatibility mode threads of the library copy, as ours can; there a submission of
            # NVIDIA's 1.15 that met other batches in flight has not returned.
            batching=not self.properties.copies_all,
            release_file=self._release_file,
        )

    @staticmethod
    def _check_options(path: str, **options: int) -> None:
        if path not in ("gds", "gds-compat"):
            raise errors.InvalidInputError(
                "path of a gds engine", got=repr(path), expected="gds or gds-compat"
            )
        for name, value in options.items():
            if value < 1 or (name.endswith("_bytes") and value % BLOCK_BYTES):
                unit = (
                    f"a positive multiple of {BLOCK_BYTES}"
                    if name.endswith("_bytes")
                    else "at least 1"
                )
                raise errors.InvalidInputError(f"{name} of a gds engine", got=value, expected=unit)

    @property
    def effective(self) -> str:
        """What the driver allows; each file's own path is in its `FileHandle.effective`."""
        return (
            "gds-compat"
            if self.properties.compat_allowed or self.properties.compat_forced
            else "gds"
        )

    @property
    def fallback_reason(self) -> str:
        """What is slower than it could be, and why: memory that cannot be registered, a library
        without batches."""
        reasons = (
            [f"memory is not registered: {self._pool.unregistered}"]
            if self._pool.unregistered
            else []
        )
        if self.properties.copies_all:
            reasons.append("no read can be direct here; small ones are made one by one")
        elif not self._loop.batching:
            reasons.append(
                "this libcufile has no batches in this mode; small reads are made one by one"
            )
        return "; ".join(reasons)

    def _open_driver(self) -> Properties:
        try:
            return self._cufile.open(refuse_compat=self._strict)
        except CallFailedError as error:
            fix = _COMPAT_FIX if self._strict else "name `uring`"
            raise errors.PathUnavailableError(
                f"cuFile cannot be opened for `{self.requested}`", got=str(error), fix=fix
            ) from error

    def _prepare(self) -> None:
        if self._strict and self.properties.compat_forced:
            raise errors.PathUnavailableError(
                "no direct reads into GPU memory", got=self.properties.obstacle(), fix=_COMPAT_FIX
            )
        try:
            self._pool.take(BLOCK_BYTES)  # makes the first arena, so that what can fail, fails here
        except CallFailedError as error:
            raise errors.PathUnavailableError(
                "GPU memory cannot be registered for direct reads", got=str(error), fix=_COMPAT_FIX
            ) from error

    def open(
        self, path: str | os.PathLike[str], mode: str = "r", *, direct: bool | None = None
    ) -> FileHandle:
        """Opens a file and registers it with cuFile, once. `direct`: as in `Engine.open`; ``gds``
        needs it.

        Raises:
            PathUnavailableError: the file cannot be read the way the engine is named.
            FileMissingError, ReadError: it cannot be opened, or its first block cannot be read.
            OutOfMemoryError: as in `read`.
            InvalidInputError: another mode than ``r``.
        """
        if mode != "r":
            raise errors.InvalidInputError(
                "the gds engine reads files",
                got=f"mode {mode!r}",
                expected="r",
                fix="write with a `uring` engine",
            )
        self._check_open("open")
        name = os.fspath(path)
        descriptor, is_direct = self._open_descriptor(
            name, True if direct is None and self._strict else direct
        )
        try:
            size_bytes = os.fstat(descriptor).st_size
            handle, effective = self._register(name, descriptor, size_bytes)
        except BaseException:
            os.close(descriptor)
            raise
        alignment = BLOCK_BYTES if is_direct else 1
        with self._loop.lock:
            number = len(self._files)
            self._files.append(
                OpenFile(
                    number, name, descriptor, handle, size_bytes, is_direct, alignment, effective
                )
            )
        shown = effective + ("" if is_direct else " (buffered)")
        log.debug("%s into GPU memory by %s%s", name, shown, because(self.fallback_reason))
        return FileHandle(
            self._first_file + number, name, size_bytes, is_direct, alignment, self.requested, shown
        )

    def _open_descriptor(self, name: str, direct: bool | None) -> tuple[int, bool]:
        flags = os.O_RDONLY | os.O_CLOEXEC
        try:
            try:
                descriptor, is_direct = (
                    os.open(name, flags if direct is False else flags | os.O_DIRECT),
                    direct is not False,
                )
            except OSError as error:
                if error.errno != errno.EINVAL or direct is not None:
                    raise
                descriptor, is_direct = os.open(name, flags), False
        except OSError as error:
            if error.errno == errno.EINVAL:
                raise errors.PathUnavailableError(
                    f"cannot open {name} with O_DIRECT",
                    got=os.strerror(errno.EINVAL),
                    fix=_COMPAT_FIX,
                ) from error
            missing = error.errno == errno.ENOENT
            kind: type[errors.StorageError] = (
                errors.FileMissingError if missing else errors.ReadError
            )
            raise kind("cannot open file", path=name, errno=error.errno) from error
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            os.close(descriptor)
            raise errors.ReadError("cannot open file", path=name, errno=errno.EISDIR)
        return descriptor, is_direct

    def _register(self, name: str, descriptor: int, size_bytes: int) -> tuple[int, str]:
        """The file's handle and its effective path."""
        try:
            handle = self._cufile.register_file(descriptor)
        except CallFailedError as error:
            fix = _COMPAT_FIX if self._strict else "name `uring`"
            reason = self.properties.obstacle()
            if error.code == NOT_REGISTERED and not os.path.exists(UDEV):
                reason = f"cuFile looks up the file's device in udev's database, {UDEV}: not there"
            got = f"{error} ({reason})"
            raise errors.PathUnavailableError(
                f"cuFile cannot read {name} for `{self.requested}`", got=got, fix=fix
            ) from error
        try:
            is_direct = self._resolve(handle, name, size_bytes)
            if self._strict and not is_direct:
                got = f"compatibility mode: {self.properties.obstacle()}"
                raise errors.PathUnavailableError(
                    f"{name} cannot be read directly into GPU memory", got=got, fix=_COMPAT_FIX
                )
        except BaseException:
            self._cufile.forget_file(handle)
            raise
        return handle, "gds" if is_direct else "gds-compat"

    def _resolve(self, handle: int, name: str, size_bytes: int) -> bool:
        refused = not (self.properties.compat_allowed or self.properties.compat_forced)
        if size_bytes == 0:
            return refused
        lease = self._lease(BLOCK_BYTES)
        head_bytes = min(size_bytes, BLOCK_BYTES)
        try:
            shown = self._cufile.probe(handle, lease.base, lease.begin_bytes, head_bytes)
        except CallFailedError as error:
            left_behind.append(lease)  # it may still be written to
            if error.errno is not None or not self._strict:
                raise errors.ReadError(
                    "first read of the file failed",
                    path=name,
                    offset_bytes=0,
                    size_bytes=head_bytes,
                    errno=error.errno,
                    got=str(error),
                    fix=_RETRY_FIX,
                ) from error
            raise errors.PathUnavailableError(
                f"{name} cannot be read directly into GPU memory", got=str(error), fix=_COMPAT_FIX
            ) from error
        return shown or refused

    def close_file(self, file: FileHandle) -> None:
        """Closes a file; reads under way go on, and its descriptor goes with the last of them."""
        with self._loop.lock:
            number = file.number - self._first_file
            found = self._files[number] if 0 <= number < len(self._files) else None
            if found is None:
                raise errors.InvalidInputError(
                    "close a file",
                    got=f"file {file.number}",
                    expected="a file that is open in this engine",
                )
            self._files[number] = None
            found.closed = True
            unused = found.users == 0
        if unused:
            self._release_file(found)

    def _release_file(self, file: OpenFile) -> None:
        self._cufile.forget_file(file.handle)
        os.close(file.descriptor)

    def read(
        self,
        plan: Plan,
        out: torch.Tensor | None = None,
        *,
        gap_bytes: int = 0,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> GdsFuture:
        """Starts reading; see `Engine.read`.

        With `out` (uint8, on the engine's device) items are copied there from the registered
        memory, on the stream that is current when they are handed out. Without it, items lie in the
        registered memory itself. Its slice is used again when the last view of it is gone and the
        streams on which items were handed out, and the one current at that moment, have run: keep a
        reference while others work on it.

        Raises:
            InvalidInputError: the plan or `out` does not fit.
            TruncatedFileError: an item ends after its file.
            OutOfMemoryError: the GPU has no room for what is read, and nothing in use came back.
            PathUnavailableError: more GPU memory is needed, and cannot be registered.
        """
        self._check_open("read")
        if gap_bytes < 0 or not deadline_s > 0:
            raise errors.InvalidInputError(
                "gap_bytes must not be negative and deadline_s must be positive",
                got=f"{gap_bytes}, {deadline_s}",
            )
        self._check_out(plan, out)
        with self._loop.lock:
            files = list(self._files)
        plan = with_own_numbers(plan, self._first_file)
        check(plan, files, self._first_file)
        layout = lay_out(plan, files, gap_bytes, self._batch_bytes)
        lease = self._lease(layout.memory_bytes)
        transfer = Transfer(
            plan,
            layout,
            files,
            lease,
            batch_bytes=self._batch_bytes,
            large_bytes=self._large_bytes,
            priority=priority,
            deadline_s=deadline_s,
        )
        memory = self._memory.wrap(lease, lease.pointer, layout.memory_bytes)
        self._loop.submit(transfer)
        return GdsFuture(transfer, self._memory, memory, out)

    def _lease(self, size_bytes: int) -> Lease:
        try:
            return self._pool.take(size_bytes)
        except CallFailedError as error:
            raise errors.PathUnavailableError(
                "more GPU memory cannot be registered",
                got=str(error),
                fix="drop results in use first",
            ) from error

    def _check_out(self, plan: Plan, out: torch.Tensor | None) -> None:
        if (plan.out_offset_bytes is None) != (out is None):
            raise errors.InvalidInputError(
                "out_offset_bytes and the memory they point into come together"
            )
        if out is None or plan.out_offset_bytes is None:
            return
        if (
            out.device != self._memory.device
            or out.dtype != torch.uint8
            or not out.is_contiguous()
            or out.dim() != 1
        ):
            got = f"{out.dtype} {list(out.shape)} on {out.device}"
            raise errors.InvalidInputError(
                "the memory of a plan",
                got=got,
                expected=f"a contiguous uint8 vector on {self._memory.device}",
            )
        to, size = plan.out_offset_bytes, plan.size_bytes
        bad = torch.nonzero((to < 0) | (size < 0) | (to > out.numel() - size)).flatten()
        if bad.numel():
            i = int(bad[0])
            got, expected = (
                f"{int(size[i])} bytes at {int(to[i])}",
                f"a range inside {out.numel()} bytes",
            )
            raise errors.InvalidInputError(
                f"descriptor {i} of the plan does not fit the caller's memory",
                got=got,
                expected=expected,
            )

    def write(
        self,
        plan: Plan,
        source: torch.Tensor,
        *,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> GdsFuture:
        """Not offered: raises PathUnavailableError. Stores are written from host memory, by a
        ``uring`` engine."""
        raise errors.PathUnavailableError(
            "the gds engine only reads", fix="write with a `uring` engine"
        )

    def stats(self) -> EngineStats:
        return self._loop.stats()

    def close(self, grace_s: float = 5.0) -> None:
        """See `Engine.close`. Files, memory and driver stay registered if reads had to be
        abandoned: a thread may be inside cuFile, which the next call would wait for."""
        if self._closed or self._process != os.getpid():
            return  # in a child process there is neither the thread nor a usable cuFile
        self._closed = True
        whole = self._loop.close(grace_s)
        if whole:
            for file in self._files:
                if file is not None and file.users == 0:
                    self._release_file(file)
            self._pool.close()
        else:
            left_behind.append(self._pool)
        self._files.clear()
        self._cufile.close(abandoned=not whole)

    def __enter__(self) -> GdsEngine:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def _check_open(self, what: str) -> None:
        if self._closed or self._process != os.getpid():
            where = (
                "the engine is closed"
                if self._closed
                else "the engine belongs to the parent process: cuFile does not survive a fork"
            )
            raise errors.EngineClosedError(f"cannot {what}: {where}")
