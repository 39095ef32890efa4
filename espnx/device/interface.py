"""What every near-storage device offers: keep rows, read them, attend over them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from .layout import RowLayout


@dataclass(eq=False, slots=True)
class Segment:
    """Rows of consecutive tokens of one sequence, for some of its heads, as a device keeps them. Immutable once written.

    Attributes:
        layout: of the blocks.
        heads: the KV heads that lie here.
        n_rows: tokens.
        place: where, in the device's own terms (bytes into its data file).
        every_sum: uint32: CRC32C of blocks, of this segment's and others': an array for each would be a small piece of memory that stays.
        first_sum: of its own among them.
        writing: the write that may still be under way, or None.
        references: how many sequences look at it.
    """

    layout: RowLayout
    heads: range
    n_rows: int
    place: int
    every_sum: np.ndarray
    first_sum: int = 0
    writing: Any = None
    references: int = 1

    @property
    def sums(self) -> np.ndarray:
        """uint32 [heads, blocks]: CRC32C of each block."""
        shape = len(self.heads), self.n_blocks
        return self.every_sum.reshape(-1)[self.first_sum : self.first_sum + shape[0] * shape[1]].reshape(shape)

    @property
    def n_blocks(self) -> int:
        return self.layout.blocks(self.n_rows)

    @property
    def size_bytes(self) -> int:
        return len(self.heads) * self.n_blocks * self.layout.block_bytes


@dataclass(frozen=True)
class Use:
    """A sequence looks at the first `n_rows` tokens of a segment; the first of them stands at `first_position`."""

    segment: Segment
    sequence: int
    n_rows: int
    first_position: int


@dataclass(frozen=True)
class Queries:
    """What attends.

    Attributes:
        q: float32 [sequences, KV heads, n, d], contiguous, multiplied by the softmax scale; n: the query heads of one KV head times their
            positions.
        dv: length of a V row.
        last_position: int64 [n]: the last position that each row of q sees, or None for all.
        first_visible: int64 [sequences]: positions before it are padding, or None.
        visible: uint8 [sequences, positions]: 0 hides a position, or None.
    """

    q: torch.Tensor
    dv: int
    last_position: torch.Tensor | None = None
    first_visible: torch.Tensor | None = None
    visible: torch.Tensor | None = None


@dataclass(frozen=True)
class Tail:
    """Rows in memory that no ticket covers: k [sequences, heads, capacity, d] and v, of which `n_rows` count, after the first `skip`."""

    k: torch.Tensor
    v: torch.Tensor
    skip: int
    n_rows: int
    first_position: int


@dataclass
class DeviceStats:
    """Counters since the device was opened.

    Attributes:
        bytes_written, write_requests: of rows, in whole blocks.
        bytes_asked: sizes of the blocks that attention and visits asked for.
        bytes_moved: what the engine moved for them, alignment and retries included.
        waiting_s, computing_s: of all threads that attended.
        stored_bytes: of segments that are kept.
    """

    bytes_written: int = 0
    write_requests: int = 0
    bytes_asked: int = 0
    bytes_moved: int = 0
    waiting_s: float = 0.0
    computing_s: float = 0.0
    stored_bytes: int = 0
    buffer_bytes: int = 0  # mapped for reads and their plans, writes, and rows that wait
    extra: dict[str, Any] = field(default_factory=dict)


class Device(Protocol):
    """A place for rows that can compute on them.

    `forget` and `stats` may be called by any thread at any time: whoever waits in `attend` or `visit` meanwhile is woken and gets
    TransferCancelledError, unless all of its rows have arrived. All other calls come from one thread at a time.
    """

    effective_path: str

    def put(self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, heads: range) -> list[Segment]:
        """Starts writing rows k [sequences, heads, n, d] and v (None: X rows); one segment for each sequence.

        Raises DiskFullError (nothing is kept then), WriteError of an earlier put, DeadlineExceededError.
        """

    def release(self, segment: Segment) -> None:
        """Forgets the rows of a segment that nobody looks at."""

    def ahead(self, layout: RowLayout, uses: Sequence[Use]) -> int:
        """Puts reads of rows in line, in the order in which `attend` or `read` will ask for them. Returns a ticket."""

    def attend(self, ticket: int, queries: Queries, tail: Tail | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over the rows of the ticket and those of `tail`: (o float32 [sequences, heads, n, dv], lse [sequences, heads, n]).

        Raises ReadError, ChecksumError, DeadlineExceededError, TransferCancelledError (see above); every ticket is void then.
        """

    def visit(self, ticket: int, see: Callable[[torch.Tensor, torch.Tensor], None]) -> None:
        """Reads the rows of the ticket without computing on them: calls `see` with each read's blocks, checked, as uint8 [bytes], and with
        int64 [pieces, 5]: sequence, head, offset_bytes, rows, first position. The bytes are void when it returns. Raises as `attend`."""

    def forget(self) -> None:
        """Makes all tickets void. From any thread."""

    def flush(self) -> None:
        """Waits for everything that is being written. Raises what a write raised."""

    def stats(self) -> DeviceStats: ...

    def close(self) -> None: ...
