"""What every near-storage device offers, and all that its users see of it.

A `RowDevice` keeps the rows of a KV cache and attends over them, a `RecordDevice` keeps embedding
records and scores them. Both are parts of a `NearStorageDevice` (near_storage.py), as are those
that measure vectors (vectors/interface.py). Handles of what a device keeps (`Segment`,
`KeptRecords`) are its own affair: whoever has one knows its public facts and gives it back.

Threads: calls marked **any thread** may come from any thread at any time, while another call is
under way. All other calls come from one thread at a time.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from typing import Literal, Protocol, Self, runtime_checkable

import numpy as np
import torch

from ..ops.attention import Queries, RowsInMemory
from ..storage import Engine, FileHandle, Future
from .record_layout import RecordLayout
from .row_layout import RowLayout

#: A piece of what `RowDevice.visit` shows: rows of one head of one sequence, in whole blocks.
#: `offset_bytes`: of the first block, in the bytes shown; `n_rows` count, the first of them at
#: `first_position`. csrc/device/row_plan.hpp has the same struct.
PIECE = np.dtype(
    [(name, np.int64) for name in ("sequence", "head", "offset_bytes", "n_rows", "first_position")]
)

#: Of rows that are read before they are asked for, unless a device is told otherwise: several
#: milliseconds of the fastest drives.
READ_AHEAD_BYTES = 48 << 20

#: Called with uint8 [bytes] and its pieces, an array of `PIECE`. One that has an attribute `native`
#: (a compiled `PageNaming`, or None) may be given the reads through that, without Python between.
Show = Callable[[torch.Tensor, np.ndarray], None]


@dataclass(frozen=True)
class Capabilities:
    """What a device does beside its rows. What it lacks, whoever uses it does: it reads the rows
    (`visit`) and computes on the host.

    Attributes:
        attends_window, attends_soft_cap, attends_slopes: `attend` takes queries with that.
        attends_unlike_widths: `attend` takes V rows of another length than K rows.
        attends_latent: `attend` takes rows that are K and V at once.
        attends_widths: of rows, in elements (head_dim), that `attend` takes; None: every one.
        attends_formats: of rows (`row_layout.DTYPES`) that `attend` takes; None: every one.
        attends_part_of_tail: `attend` takes rows in memory of which only some heads' count
            (`RowsInMemory.counts`).
        exchanges: the format in which queries cross to it and results back: results are as exact as
            that.
        keeps: its rows outlive the process (`Space.restore`).
        hands_out_records: `RecordTicket.records` can be had.
    """

    attends_window: bool = False
    attends_soft_cap: bool = False
    attends_slopes: bool = False
    attends_unlike_widths: bool = False
    attends_latent: bool = False
    attends_widths: tuple[int, ...] | None = None
    attends_formats: tuple[str, ...] | None = None
    attends_part_of_tail: bool = False
    exchanges: Literal["fp32", "fp16"] = "fp32"
    keeps: bool = False
    hands_out_records: bool = False

    def lacks(self, queries: Queries, layout: RowLayout) -> tuple[str, ...]:
        """What `attend` would need for these queries and rows, and is not there; empty: it takes
        them."""
        is_lacking = {
            "attends_window": queries.window is not None and not self.attends_window,
            "attends_soft_cap": queries.soft_cap is not None and not self.attends_soft_cap,
            "attends_slopes": queries.slopes is not None and not self.attends_slopes,
            "attends_unlike_widths": layout.d != layout.dv and not self.attends_unlike_widths,
            "attends_latent": layout.is_shared and not self.attends_latent,
            "attends_widths": self.attends_widths is not None
            and layout.d not in self.attends_widths,
            "attends_formats": self.attends_formats is not None
            and layout.format not in self.attends_formats,
        }
        return tuple(name for name, is_lacked in is_lacking.items() if is_lacked)


@dataclass(frozen=True)
class FilePath:
    """The path that the bytes of one file take.

    Attributes:
        path: the file.
        effective_path: of its reads: ``gds``, ``gds-compat``, ``uring``, ``posix`` or ``memory``,
            with what was refused.
        fallback_reason: why it is not what ``auto`` tried first; empty if it is.
    """

    path: str
    effective_path: str
    fallback_reason: str = ""


@dataclass(frozen=True)
class DeviceStats:
    """Counters since a device was opened, or of one request, in the words of docs/devices.md.

    Attributes:
        bytes_asked: what computing and visits asked for, in whole blocks.
        bytes_moved: what really crossed the device's queue for it, alignment and retries included.
        bytes_written: of rows, in whole blocks.
        read_requests, write_requests: reads that were consumed, writes that were started.
        waiting_s: for bytes, of all threads that computed.
        computing_s: on bytes that had arrived, checks included, of all threads.
        ahead_bytes: read, and not asked for yet.
        stored_bytes: kept now.
        buffer_bytes: of host memory, mapped now for reads and their plans, writes, and rows that
            wait.
    """

    bytes_asked: int = 0
    bytes_moved: int = 0
    bytes_written: int = 0
    read_requests: int = 0
    write_requests: int = 0
    waiting_s: float = 0.0
    computing_s: float = 0.0
    ahead_bytes: int = 0
    stored_bytes: int = 0
    buffer_bytes: int = 0

    def __add__(self, other: Self) -> Self:
        return type(self)(
            *(getattr(self, each.name) + getattr(other, each.name) for each in fields(self))
        )


class Device(Protocol):
    """What every device says of itself."""

    @property
    def compute(self) -> torch.device:
        """The device of torch in whose memory results are computed."""

    @property
    def capabilities(self) -> Capabilities: ...

    def path_report(self) -> Sequence[FilePath]:
        """The path of every file that is open. **Any thread.**"""

    def stats(self) -> DeviceStats:
        """**Any thread.**"""

    def forget(self) -> None:
        """Makes all tickets invalid. Whoever waits for theirs is woken and gets
        TransferCancelledError, unless all of it has arrived. **Any thread.**"""

    def close(self) -> None:
        """Ends all I/O. What was not kept is gone. May be called again."""


@dataclass(eq=False, slots=True)
class Segment:
    """Rows of consecutive tokens of one sequence, for some of its heads, as a device keeps them.
    Immutable. Devices add what they need to find it; to everybody else it is a handle with public
    facts.

    Attributes:
        layout: of the blocks.
        heads: the KV heads that lie here.
        n_rows: tokens.
    """

    layout: RowLayout
    heads: range
    n_rows: int

    @property
    def n_blocks(self) -> int:
        """Blocks of each head."""
        return -(-self.n_rows // self.layout.block_rows)

    @property
    def size_bytes(self) -> int:
        """Bytes on the device, in whole blocks."""
        return len(self.heads) * self.n_blocks * self.layout.block_bytes

    @property
    def memory_bytes(self) -> int:
        """Bytes that stay in host memory as long as the segment does."""
        return 0


@dataclass(eq=False, slots=True)
class SegmentPlace(Segment):
    """The place of a segment, in values that can be written down, and from which `Space.restore`
    makes it again.

    Attributes:
        offset_bytes: into the device's data file.
        checksums: uint32 [heads, blocks]: CRC32C of each block.
    """

    offset_bytes: int
    checksums: np.ndarray

    @property
    def memory_bytes(self) -> int:
        return int(self.checksums.nbytes)


@dataclass(frozen=True)
class SegmentView:
    """A sequence looks at the first `n_rows` tokens of a segment; the first of them stands at
    `first_position`."""

    segment: Segment
    sequence: int
    n_rows: int
    first_position: int


class Space(Protocol):
    """The room that a device has for rows, and what of it is kept from process to process."""

    @property
    def path(self) -> str:
        """The path of the data file; empty where there is none."""

    def reserve(self, size_bytes: int) -> None:
        """Makes sure that there is room for so much beside what is stored. Raises DiskFullError
        with bytes needed and free."""

    def place(self, segment: Segment) -> SegmentPlace:
        """The place of a segment. Raises InvalidInputError where nothing is kept
        (`Capabilities.keeps`)."""

    def restore(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        """The segments that a published state names, all at once, of a data file that was there
        before; they are pinned. What lies behind the last of them is cut off. Raises FormatError
        where two claim one place, WriteError."""

    def lend(self, places: Sequence[SegmentPlace]) -> list[Segment]:
        """Segments of a data file in which somebody else hands out the places: nothing is claimed,
        pinned or cut off, and releasing them gives nothing back. They are for as long as that
        somebody leaves the places alone. Raises InvalidInputError where nothing is kept
        (`Capabilities.keeps`)."""

    def pin(self, segments: Sequence[Segment], *, also: bool = False) -> None:
        """A published state names these segments: their places are not used again when they are
        released. Those pinned before are, unless they are among them or `also` says that they stay
        pinned, too."""


class RowDevice(Device, Protocol):
    """A place for the rows of a KV cache that attends over them.

    `put`, `join`, `flush`, `sync`, `ahead`, `attend` and `visit` raise EngineClosedError once the
    device is closed.
    """

    @property
    def space(self) -> Space: ...

    def memory(self, size_bytes: int) -> torch.Tensor:
        """uint8 [bytes] on the host, uninitialised, for rows that wait to be put."""

    # --- rows come and go ---

    def put(
        self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range
    ) -> Sequence[Segment]:
        """Starts writing rows k [sequences, heads, n, d] and v (None: X rows); one segment for each
        sequence. They may be changed when it returns.

        Raises DiskFullError (nothing is kept then), WriteError of an earlier put,
        DeadlineExceededError.
        """

    def join(self, segments: Sequence[Segment]) -> Segment:
        """A new segment with the rows of several of the same heads, one after the other; they stay
        as they are. All but the last are whole blocks. Raises as `put` and `visit`; nothing is kept
        then."""

    def is_written(self, segment: Segment) -> bool:
        """True once reads may ask for the segment. Raises what its write raised; the rows are
        written again then."""

    def release(self, segment: Segment) -> None:
        """Forgets the rows of a segment."""

    def flush(self) -> None:
        """Waits for everything that is being written. Raises what a write raised."""

    def sync(self) -> None:
        """What was put survives a power cut from here on. Raises as `flush`."""

    # --- rows are looked at ---

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        """Puts reads of rows in line, in the order in which `attend` or `visit` will ask for them.
        Returns a ticket, 0 or more. Waits for rows that are still being written, and raises what
        their write raised."""

    def front(self) -> int:
        """The ticket that is next, or -1. **Any thread.**"""

    def attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the rows of the ticket, which is the next one, and those of `tail`: (o
        float32 [sequences, KV heads, n, dv], lse float32 [sequences, KV heads, n]), where the
        queries are, which may be anywhere; 0 and -inf for a query that sees nothing. Every block is
        checked.

        Raises ReadError, ChecksumError, DeadlineExceededError, TransferCancelledError; every ticket
        is invalid then. InvalidInputError for another ticket, and for what `capabilities` lack.
        """

    def visit(self, ticket: int, show: Show) -> None:
        """Reads the rows of the ticket without computing on them: calls `show` with each read's
        blocks, checked, uint8 [bytes] in the memory of `compute`, and with what they are: every row
        once, reads in any order. The bytes are not valid any more when it returns. Raises as
        `attend`, and what `show` raises."""


@runtime_checkable
class ChecksLater(Protocol):
    """A `RowDevice` whose checksums are computed beside what is computed of rows: whoever looks at
    several tickets waits for all their checksums once, not for each.

    Nothing that was made of rows may leave before `check_looked_at` has returned.
    """

    def attend_unchecked(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Does what `RowDevice.attend` does, but may check blocks later. Raises as it."""

    def visit_unchecked(self, ticket: int, show: Show) -> None:
        """Does what `RowDevice.visit` does, but may check blocks later. Raises as it."""

    def check_looked_at(self) -> None:
        """Every block that the calls above have looked at is checked when this returns.

        Raises ChecksumError; every ticket is invalid then.
        """

    def forget_checks(self) -> None:
        """What was made of rows so far is thrown away: `check_looked_at` is not about it."""


@runtime_checkable
class Reaches(Protocol):
    """A `RowDevice` that can read more rows before they are asked for, for a while."""

    def reach(self, size_bytes: int) -> None:
        """Lets so many bytes of rows be read before they are asked for, until it is called again,
        but no fewer than the device reads ahead of itself; 0: just these. What is read stays.
        **Any thread.**"""


@dataclass(frozen=True)
class RecordQuery:
    """What scores embedding records: ``cls_weight * CLS + MaxSim`` (ESPN, section 3.1). MaxSim of a
    document without tokens is 0, and records without a CLS vector are scored by MaxSim alone.

    Attributes:
        cls: float32 [1, d_cls].
        tokens: float32 [n, dim].
        cls_weight: of the CLS similarity.
    """

    cls: torch.Tensor
    tokens: torch.Tensor
    cls_weight: float


@dataclass(frozen=True)
class Pairs:
    """Which query wants which record of a request: places among its numbers and its queries, int64
    [p] each, ordered by item.

    One record may be wanted by several queries.
    """

    item: np.ndarray
    query: np.ndarray

    def __len__(self) -> int:
        return len(self.item)


class RecordTicket(Protocol):
    """A request for scores. `cancel` may come from any thread at any time; the other calls from one
    thread at a time.

    Errors are raised from `next` and `finish`, in the caller's thread: what reading raises,
    ChecksumError, StaleDataError, FormatError (no score of a record that is not the right one is
    handed out), DeadlineExceededError, TransferCancelledError.
    """

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """Waits until at least so many more records are scored (or all, or the timeout): their
        places among the numbers asked for, int64 [m], in the order of arrival, and whether that was
        all."""

    @property
    def scores(self) -> np.ndarray:
        """float32 [pairs], or of each record where one query asked for all; those of records that
        `next` named are there."""

    def add(self, pairs: Pairs) -> None:
        """Further queries of the same request want some of its records. Before `finish`."""

    def finish(self) -> np.ndarray:
        """Waits for all scores: float32, those of the pairs asked for, then those that were
        added."""

    def cancel(self) -> None: ...

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(uint8 memory, int64 where each record begins in it) of a ticket that is finished, while
        it lives; only of devices that hand out records."""

    @property
    def stats(self) -> DeviceStats:
        """What this request moved and took; it waited where the thread that asks did."""

    @property
    def finished_at(self) -> float:
        """When the last record was scored, by `time.perf_counter`."""


class KeptRecords(Protocol):
    """Records of one kind on a device. Every call may come from any thread at any time."""

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        *,
        gap_bytes: int = 0,
        is_urgent: bool = True,
        deadline_s: float = 30.0,
    ) -> RecordTicket:
        """Starts reading, checking and scoring records.

        Args:
            numbers: int64 [m], which records.
            queries: that want them. Several need `pairs`; one without wants them all.
            gap_bytes: holes up to this size between records are read rather than skipped.
            is_urgent: goes ahead of all else, for somebody will wait for it now; else it runs
                beside what the caller does next.
            deadline_s: of the reads.
        """

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """Starts reading whole records, unchecked; item i is record ``numbers[i]``."""

    def release(self) -> None:
        """Nobody will ask for them again. Their files stay."""


class RecordDevice(Device, Protocol):
    """A place for embedding records that can score them. Every call may come from any thread at any
    time; queries lie in the memory of `compute`. Its `path_report` is of the files whose records
    are kept."""

    @property
    def engine(self) -> Engine | None:
        """The engine that its files are opened by, where others may share them; else None."""

    def open(self, path: str) -> FileHandle:
        """A data file of records."""

    def close_file(self, file: FileHandle) -> None: ...

    def keep_records(self, layout: RecordLayout) -> KeptRecords:
        """Records of files that this device has opened."""
