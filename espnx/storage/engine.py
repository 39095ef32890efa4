"""The contract of storage: files, plans of many reads or writes, futures, the engine that carries
them out; the names of its paths."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

import torch

#: What a caller may name. ``auto`` is the only one that falls back, and `Engine.fallback_reason`
#: then says why.
PATHS = ("auto", "uring", "posix", "memory", "gds", "gds-compat")

DEFAULT_DEADLINE_S = 30.0


def paths_of(paths: Iterable[str]) -> str:
    """The path that the bytes of several files or devices take, in one text: ``uring`` where all
    take it, else every path with how many take it, the most used first: ``mixed: uring 3, posix
    (buffered) 1``. Empty for nothing.

    Args:
        paths: `FileHandle.effective` of each file, or ``effective_path`` of each device.
    """
    counts = Counter(paths).most_common()
    if len(counts) <= 1:
        return counts[0][0] if counts else ""
    return "mixed: " + ", ".join(f"{path} {count}" for path, count in counts)


def reasons_of(reasons: Iterable[str]) -> str:
    """Why paths are not what was tried first, of several engines or devices, in one text: each
    reason once; empty if there is none.

    Args:
        reasons: ``fallback_reason`` of each; empty ones do not count.
    """
    return "; ".join(dict.fromkeys(filter(None, reasons)))


def because(reason: str) -> str:
    """A reason behind what it is the reason of; nothing for none."""
    return f" ({reason})" if reason else ""


@dataclass(frozen=True)
class FileHandle:
    """An open file and the path its bytes take, resolved once, at open.

    Attributes:
        number: what plans call this file.
        path: the file.
        size_bytes: at open.
        direct: whether the page cache is bypassed (O_DIRECT).
        alignment_bytes: of offset, size and memory in direct transfers; 1 where they are buffered.
        requested: the path the caller asked the engine for.
        effective: the path in use: ``gds``, ``gds-compat``, ``uring``, ``posix`` or ``memory``,
            with `` (buffered)`` where O_DIRECT was refused.
    """

    number: int
    path: str
    size_bytes: int
    direct: bool
    alignment_bytes: int
    requested: str
    effective: str


@dataclass(frozen=True)
class Plan:
    """Many reads or writes as a structure of arrays, so that ten thousand of them cost one call.
    All fields are int64 CPU tensors [n].

    Attributes:
        file: engine file numbers (`FileHandle.number`).
        offset_bytes: where each item begins in its file. Reads may be unaligned; direct writes may
            not.
        size_bytes: how long each item is; 0 is allowed and moves nothing.
        out_offset_bytes: where each item goes in (or comes from) the caller's memory; None lets the
            engine pack the items of a read into a buffer of its own, without a copy, and say where
            they lie.
        crc32c: the CRC32C each item of a read must have; None checks nothing.
    """

    file: torch.Tensor
    offset_bytes: torch.Tensor
    size_bytes: torch.Tensor
    out_offset_bytes: torch.Tensor | None = None
    crc32c: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.file.numel()

    @classmethod
    def of(
        cls,
        file: FileHandle | Sequence[FileHandle],
        offset_bytes: Sequence[int] | torch.Tensor,
        size_bytes: Sequence[int] | torch.Tensor,
        out_offset_bytes: Sequence[int] | torch.Tensor | None = None,
        crc32c: Sequence[int] | torch.Tensor | None = None,
    ) -> Plan:
        """Builds a plan from sequences; one file stands for all items."""
        offsets = torch.as_tensor(offset_bytes, dtype=torch.int64)
        if isinstance(file, (list, tuple)):
            numbers = torch.tensor([f.number for f in file], dtype=torch.int64)
        else:
            numbers = torch.full_like(offsets, file.number)  # type: ignore[union-attr]
        return cls(
            file=numbers,
            offset_bytes=offsets,
            size_bytes=torch.as_tensor(size_bytes, dtype=torch.int64),
            out_offset_bytes=None
            if out_offset_bytes is None
            else torch.as_tensor(out_offset_bytes, dtype=torch.int64),
            crc32c=None if crc32c is None else torch.as_tensor(crc32c, dtype=torch.int64),
        )


@dataclass(frozen=True)
class EngineStats:
    """Counters since the engine was opened.

    Attributes:
        bytes_asked: sum of the items' sizes.
        bytes_moved: what really crossed the queue, widening, gaps and retries included.
        requests: what was handed to the queue, after merging.
        retries: short or interrupted requests that were continued.
        failures: transfers that ended with an error.
        in_flight: requests with the device now.
        quarantined_buffers, quarantined_bytes: memory of ended transfers that the device may still
            write to.
        fault_hits: injected faults that fired.
    """

    bytes_asked: int = 0
    bytes_moved: int = 0
    requests: int = 0
    retries: int = 0
    failures: int = 0
    in_flight: int = 0
    quarantined_buffers: int = 0
    quarantined_bytes: int = 0
    fault_hits: int = 0


class Future(Protocol):
    """A submitted plan. Errors of the transfer are raised from `next`, `wait` and iteration, in the
    caller's thread."""

    @property
    def memory(self) -> torch.Tensor:
        """uint8 [bytes]: where the items land: the caller's tensor, or the engine's buffer
        (recycled when the last reference goes)."""

    @property
    def position_bytes(self) -> torch.Tensor:
        """int64 [n]: where each item begins in `memory`; -1 for items of size 0."""

    @property
    def bytes_asked(self) -> int: ...

    @property
    def bytes_moved(self) -> int: ...

    @property
    def request_count(self) -> int: ...

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[torch.Tensor, bool]:
        """Waits for at least `at_least` more items (or the end, or the timeout): their numbers,
        int64 [m], and whether that was all."""

    def __iter__(self) -> Iterator[torch.Tensor]:
        """Item numbers in batches, as they arrive."""

    def wait(self) -> torch.Tensor:
        """Waits for everything that `next` has not handed out and returns `memory`."""

    def done(self) -> bool:
        """Whether everything has arrived (or the transfer has failed). Never blocks."""

    def cancel(self) -> None:
        """Ends the transfer: what waits is dropped, what is with the device keeps its memory until
        it completes."""


class Engine(Protocol):
    """Moves bytes between files and memory. Safe to use from several threads. A context manager."""

    @property
    def requested(self) -> str: ...

    @property
    def effective(self) -> str: ...

    @property
    def fallback_reason(self) -> str:
        """Why `effective` is not what ``auto`` tried first; empty if it is."""

    def open(
        self, path: str | os.PathLike[str], mode: str = "r", *, direct: bool | None = None
    ) -> FileHandle:
        """Opens a file: ``r``, ``w`` (create or truncate) or ``r+``. `direct`: O_DIRECT demanded,
        refused, or (None) where possible."""

    def close_file(self, file: FileHandle) -> None: ...

    def read(
        self,
        plan: Plan,
        out: torch.Tensor | None = None,
        *,
        gap_bytes: int = 0,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Future:
        """Starts reading. Neighbours no more than `gap_bytes` apart become one request; higher
        `priority` goes first."""

    def write(
        self,
        plan: Plan,
        source: torch.Tensor,
        *,
        priority: int = 0,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> Future:
        """Starts writing items at `plan.out_offset_bytes` of `source`, which must not change until
        the future is done."""

    def stats(self) -> EngineStats: ...

    def close(self, grace_s: float = 5.0) -> None:
        """Fails what is outstanding and waits up to `grace_s` for the device; buffers it still
        holds are abandoned, never freed."""

    def __enter__(self) -> Self: ...

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None: ...
