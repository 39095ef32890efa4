"""The ``uring``, ``posix`` and ``memory`` engines: one C++ engine (csrc/io) with a different queue
behind it."""

from __future__ import annotations

import errno as codes
import functools
import logging
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from types import TracebackType
from typing import TYPE_CHECKING, Self, cast

import torch

from .. import errors
from ..checks import check_whole
from ..compiled import load_compiled
from ..forks import compute_alone
from . import settings
from .engine import DEFAULT_DEADLINE_S, Engine, EngineStats, FileHandle, Plan, because

if TYPE_CHECKING:
    from .._C import Engine as CompiledEngine
    from .._C import Extension
    from .._C import Future as CompiledFuture

log = logging.getLogger(__name__)

#: Instruction sets of the kernels, as csrc/cpu/cpu_level.hpp numbers them.
CPU_LEVELS = ("portable", "AVX2", "AVX-512", "AVX-512 and VNNI", "AMX")
_DEFAULTS = {"queue_depth": 128, "threads": 32, "request_bytes": 960 << 10, "pool_bytes": 256 << 20}
#: How long at first, and how long at most, until it is asked again whether a transfer is over.
_NAP_S, _LONG_NAP_S = 0.0005, 0.02
_RETRYABLE_FIX = "check the device (dmesg, smartctl), then try again; the object is still usable"


@functools.cache
def load_native() -> Extension:
    """The compiled extension; its errors are those that `_to_error` makes. Raises
    MissingDependencyError with the way to build it."""
    native = cast("Extension", load_compiled())
    native.set_error_factory(_to_error)
    log.debug("kernels of this processor: %s", CPU_LEVELS[native.cpu_level()])
    return native


def _to_error(
    kind: str,
    errno: int,
    what: str,
    path: str,
    offset_bytes: int,
    size_bytes: int,
    needed_bytes: int,
    free_bytes: int,
    got: str,
    expected: str,
) -> errors.EspnxError:
    """Makes the typed exception of a failure that the engine reports."""
    if kind == "invalid":
        return errors.InvalidInputError(what, got=got or None, expected=expected or None)
    if kind == "unavailable":
        fix = "name another path, or `auto`, or another directory"
        return errors.PathUnavailableError(
            f"{what}{' in ' + path if path else ''}",
            got=os.strerror(errno) if errno else None,
            fix=fix,
        )
    if kind == "closed":
        return errors.EngineClosedError(what)
    if kind == "disk_full":
        return errors.DiskFullError(
            what, needed_bytes=max(needed_bytes, 0), free_bytes=free_bytes, path=path or None
        )
    if kind == "read" and errno == codes.ENOENT:
        return errors.FileMissingError(what, path=path or None, errno=errno)
    classes: dict[str, type[errors.StorageError]] = {
        "read": errors.ReadError,
        "write": errors.WriteError,
        "short_read": errors.ShortReadError,
        "truncated": errors.TruncatedFileError,
        "deadline": errors.DeadlineExceededError,
        "cancelled": errors.TransferCancelledError,
        "checksum": errors.ChecksumError,
    }
    return classes[kind](
        what,
        path=path or None,
        offset_bytes=offset_bytes if offset_bytes >= 0 else None,
        size_bytes=size_bytes if size_bytes >= 0 else None,
        errno=errno or None,
        got=got or None,
        expected=expected or None,
        fix=_RETRYABLE_FIX if kind in ("read", "short_read", "deadline") else None,
    )


class NativeFuture:
    """See `espnx.storage.engine.Future`."""

    def __init__(self, native: CompiledFuture, memory: torch.Tensor | None):
        self._native, self._memory, self._finished = native, memory, False

    @property
    def native(self) -> CompiledFuture:
        """The compiled object, for functions of the extension that take a future."""
        return self._native

    @property
    def memory(self) -> torch.Tensor:
        if self._memory is None:
            self._memory = self._native.memory
        return self._memory

    @property
    def position_bytes(self) -> torch.Tensor:
        return self._native.position_bytes

    @property
    def bytes_asked(self) -> int:
        return self._native.bytes_asked

    @property
    def bytes_moved(self) -> int:
        return self._native.bytes_moved

    @property
    def request_count(self) -> int:
        return self._native.request_count

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[torch.Tensor, bool]:
        items, self._finished = self._native.next(at_least, 1e9 if timeout_s is None else timeout_s)
        return items, self._finished

    def __iter__(self) -> Iterator[torch.Tensor]:
        while not self._finished:
            items, _ = self.next()
            if items.numel():
                yield items

    def wait(self) -> torch.Tensor:
        while not self._finished:
            self.next(at_least=2**62)
        return self.memory

    def done(self) -> bool:
        return self._finished or self._native.done()

    def cancel(self) -> None:
        self._native.cancel()

    def is_over(self) -> bool:
        """Whether it has ended, and nothing of it is with the device any more. What has failed
        (`cancel`, its deadline) may still move bytes until then."""
        return self._native.is_over()

    def wait_over(self, timeout_s: float) -> bool:
        """Waits until `is_over`; False: it is not, after so many seconds."""
        until, nap_s = time.monotonic() + timeout_s, _NAP_S
        while not self.is_over():
            left_s = until - time.monotonic()
            if left_s <= 0:
                return False
            time.sleep(min(nap_s, left_s))
            nap_s = min(2 * nap_s, _LONG_NAP_S)
        return True


@dataclass(frozen=True)
class FaultRule:
    """Makes matching operations fail; see `FaultyEngine`.

    Attributes:
        fault: ``error`` (value = errno), ``short`` (value = bytes moved), ``flip`` (value = bit),
            ``stale`` (success reported, nothing moved), ``delay`` (value = nanoseconds; of a
            write, before its bytes move), ``never`` (does not complete).
        operation: glob over read, write, open_read, open_write, allocate, truncate, sync,
            sync_directory, rename, unlink.
        path: glob over the file's path.
        begin_bytes, end_bytes: the request must overlap this range of the file.
        nth, count: fires from the nth match on (from 1), `count` times (-1: forever).
        probability: of firing, per match, from the engine's seed.
    """

    fault: str = "error"
    operation: str = "*"
    path: str = "*"
    begin_bytes: int = 0
    end_bytes: int = 2**62
    nth: int = 1
    count: int = -1
    probability: float = 1.0
    value: int = 5


class NativeEngine:
    """See `espnx.storage.engine.Engine`.

    Args:
        path: ``auto``, ``uring``, ``posix`` or ``memory``; or a file of settings (``nvme.toml``,
            see `espnx.storage.settings`), which names one of them, and of the next four those that
            are None.
        queue_depth: requests with the device at a time; None: 128.
        threads: of the ``posix`` path; None: 32.
        request_bytes: longer transfers are cut into requests of this size; None: 960 KiB.
        pool_bytes: unused buffer memory kept for the next read; None: 256 MiB.
        poison: fills buffers with 0xA5 before use (tests).
        rules, seed: injected faults; use `FaultyEngine`.

    Raises:
        PathUnavailableError: a named path cannot be had here.
        InvalidInputError: an option is out of range.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] = "auto",
        *,
        queue_depth: int | None = None,
        threads: int | None = None,
        request_bytes: int | None = None,
        pool_bytes: int | None = None,
        poison: bool = False,
        rules: Sequence[FaultRule] = (),
        seed: int = 0,
    ):
        compute_alone()  # where a child opens things, it computes with them next
        given = {
            "queue_depth": queue_depth,
            "threads": threads,
            "request_bytes": request_bytes,
            "pool_bytes": pool_bytes,
        }
        stored = settings.load(path) if settings.is_file(path) else None
        if stored is not None:
            given = {
                name: getattr(stored, name) if value is None else value
                for name, value in given.items()
            }
        for name, value in given.items():
            if value is not None:
                check_whole(f"{name} of an engine", value, 0)
        self.requested = str(path) if stored is None else stored.path
        if self.requested not in settings.PATHS:
            raise errors.InvalidInputError(
                "path of an engine",
                got=repr(self.requested),
                expected=f"{', '.join(settings.PATHS)}, or a file of settings (nvme.toml)",
            )
        self._native = load_native().Engine(
            path=self.requested,
            **{name: _DEFAULTS[name] if value is None else value for name, value in given.items()},
            poison=poison,
            rules=[asdict(rule) for rule in rules],
            seed=seed,
        )
        self.effective: str = self._native.effective
        self.fallback_reason: str = self._native.fallback_reason
        log.debug("engine %s takes %s%s", path, self.effective, because(self.fallback_reason))

    def __repr__(self) -> str:
        reason = f", {self.fallback_reason}" if self.fallback_reason else ""
        return f"<{type(self).__name__}: {self.requested} -> {self.effective}{reason}>"

    @property
    def native(self) -> CompiledEngine:
        """The compiled object, for functions of the extension that take an engine."""
        return self._native

    def open(
        self, path: str | os.PathLike[str], mode: str = "r", *, direct: bool | None = None
    ) -> FileHandle:
        name = os.fsdecode(path)
        number = self._native.open(os.fsencode(name), mode, direct)
        size_bytes, is_direct, alignment_bytes = self._native.file_info(number)
        buffered = self.effective != "memory" and not is_direct
        log.debug("%s (%s) by %s%s", name, mode, self.effective, _how(buffered, direct))
        return FileHandle(
            number=number,
            path=name,
            size_bytes=size_bytes,
            direct=is_direct,
            alignment_bytes=alignment_bytes,
            requested=self.requested,
            effective=self.effective + (" (buffered)" if buffered else ""),
        )

    def close_file(self, file: FileHandle) -> None:
        self._native.close_file(file.number)

    def read(
        self,
        plan: Plan,
        out: torch.Tensor | None = None,
        *,
        gap_bytes: int = 0,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> NativeFuture:
        return self._submit(
            True, plan, out, gap_bytes=gap_bytes, priority=priority, deadline_s=deadline_s
        )

    def write(
        self,
        plan: Plan,
        source: torch.Tensor,
        *,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> NativeFuture:
        return self._submit(
            False, plan, source, gap_bytes=0, priority=priority, deadline_s=deadline_s
        )

    def _submit(
        self,
        reading: bool,
        plan: Plan,
        memory: torch.Tensor | None,
        *,
        gap_bytes: int,
        priority: int,
        deadline_s: float,
    ) -> NativeFuture:
        native = self._native.submit(
            reading=reading,
            file=plan.file,
            offset_bytes=plan.offset_bytes,
            size_bytes=plan.size_bytes,
            out_offset_bytes=plan.out_offset_bytes,
            crc32c=plan.crc32c,
            memory=memory,
            gap_bytes=gap_bytes,
            priority=priority,
            deadline_s=deadline_s,
        )
        return NativeFuture(native, memory)

    def allocate(self, file: FileHandle, size_bytes: int) -> bool:
        """Reserves space for the first `size_bytes`. False where the file system cannot. Raises
        DiskFullError with needed and free."""
        return self._native.allocate(file.number, size_bytes)

    def truncate(self, file: FileHandle, size_bytes: int) -> None:
        self._native.truncate(file.number, size_bytes)

    def sync(self, file: FileHandle) -> None:
        """Flushes a file to the device (fsync)."""
        self._native.sync(file.number)

    def sync_directory(self, path: str | os.PathLike[str]) -> None:
        """Flushes a directory's entries to the device; without it a new or renamed file can be gone
        after a power cut."""
        self._native.sync_directory(os.fsencode(path))

    def rename(self, source: str | os.PathLike[str], target: str | os.PathLike[str]) -> None:
        """Atomically puts `source` in the place of `target`."""
        self._native.before("rename", os.fsencode(source))
        try:
            os.replace(source, target)
        except OSError as error:
            if error.errno in (codes.ENOSPC, codes.EDQUOT):
                free_bytes = load_native().free_bytes(os.fsencode(target))
                raise errors.DiskFullError(
                    "cannot rename file", needed_bytes=4096, free_bytes=free_bytes, path=target
                ) from error
            raise errors.WriteError("cannot rename file", path=source, errno=error.errno) from error

    def memory(self, size_bytes: int) -> torch.Tensor:
        """uint8 [size_bytes], uninitialised, of the engine's own mapped memory, which direct I/O
        can use. It returns to the engine when the last tensor over it goes; nothing is left in the
        allocator's heap."""
        return self._native.memory(size_bytes)

    @property
    def mapped_bytes(self) -> int:
        """Bytes of memory that is mapped for reads, writes and `memory`: in use, or kept for the
        next."""
        return self._native.mapped_bytes

    def stats(self) -> EngineStats:
        return EngineStats(**self._native.stats())

    def close(self, grace_s: float = 5.0) -> None:
        self._native.close(grace_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class FaultyEngine(NativeEngine):
    """A native engine in which chosen operations fail, per request. For tests of everything above
    storage."""

    def __init__(
        self,
        rules: Sequence[FaultRule],
        path: str = "auto",
        *,
        seed: int = 0,
        queue_depth: int | None = None,
        threads: int | None = None,
        request_bytes: int | None = None,
        pool_bytes: int | None = None,
        poison: bool = False,
    ):
        super().__init__(
            path,
            queue_depth=queue_depth,
            threads=threads,
            request_bytes=request_bytes,
            pool_bytes=pool_bytes,
            poison=poison,
            rules=rules,
            seed=seed,
        )


def _how(is_buffered: bool, direct: bool | None) -> str:
    """How a file is read, in words, and why it is buffered where it is."""
    if not is_buffered:
        return ""
    return ", buffered: " + ("as asked" if direct is False else "the file system refuses O_DIRECT")


@contextmanager
def given_engine(given: NativeEngine | None) -> Iterator[NativeEngine]:
    """The engine that a caller gave, or one of our own for as long as it is wanted. Raises
    InvalidInputError for what is none."""
    if given is not None:
        if not isinstance(given, NativeEngine):
            raise errors.InvalidInputError(
                "engine",
                got=repr(given),
                expected="None, or an engine such as NativeEngine('uring')",
            )
        yield given
        return
    with NativeEngine(pool_bytes=64 << 20) as own:
        yield own


def host_engine(engine: Engine) -> NativeEngine | None:
    """The engine itself where its reads arrive in host memory and it does all that files need; None
    where they arrive elsewhere."""
    return engine if isinstance(engine, NativeEngine) else None


def free_bytes(path: str | os.PathLike[str]) -> int:
    """Room on the file system of a path that exists."""
    return int(load_native().free_bytes(os.fsencode(path)))
