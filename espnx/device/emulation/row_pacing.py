"""What the rows of a KV cache cost an emulated device: which bytes pass which links, and after what the accelerator may begin.

A head's rows come from flash in pieces, and their scores are computed piece by piece as they come; the values wait for the last score,
since the second pass of HILOS's softmax needs the whole denominator (section 4.4). Heads follow one another.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from ... import errors
from ...ops.accelerator import DIM
from ...ops.accelerator.checks import PAD_TO, ROW_BYTES
from .topology import Topology, Transfer

#: A head's rows come in pieces of at least so many bytes, and in so many pieces at most.
PIECE_BYTES, PIECES_MAX = 1 << 20, 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class HeadRows:
    """What a ticket reads of one head of one sequence.

    Attributes:
        n_rows: tokens.
        size_bytes: in whole blocks.
        requests: that read them. Rows that lie behind those of another head come with theirs.
    """

    n_rows: int
    size_bytes: int
    requests: int


@dataclass(eq=False, slots=True)
class PacedReads:
    """The reads of one ticket.

    Attributes:
        to_host: whether its rows go to the host, or to the device's memory.
        heads: by sequence and head.
        transfers: of each head, once they have begun.
    """

    to_host: bool
    heads: dict[tuple[int, int], HeadRows]
    transfers: dict[tuple[int, int], list[Transfer]] = field(default_factory=dict)
    has_begun: bool = False

    @property
    def size_bytes(self) -> int:
        return sum(each.size_bytes for each in self.heads.values())


@dataclass(frozen=True)
class HandOver:
    """What goes to the device with the queries of a ticket, and comes back.

    Attributes:
        n: query rows of each head.
        buffered: tokens whose scores and V go along.
        heads: of which sequences and heads they do.
        returns_lse: beside o.
    """

    n: int
    buffered: int
    heads: frozenset[tuple[int, int]]
    returns_lse: bool


class RowPacing:
    """Of one device of a topology.

    Args:
        topology, device: which.
        window_bytes: of rows that are read before they are asked for: the device's memory, or the host's.
        deadline_s: virtual seconds of each transfer.
    """

    def __init__(self, topology: Topology, device: int, window_bytes: int, deadline_s: float):
        self.topology, self._device, self._window_bytes = topology, device, window_bytes
        self._deadline_s = deadline_s * max(topology.stretch, 1.0)
        self._line, self._lock = deque[PacedReads](), threading.Lock()

    def write(self, size_bytes: int, requests: int, *, from_host: bool = True) -> Transfer:
        """Rows on their way to flash."""
        return self.topology.transfer(self._device, "host_to_flash" if from_host else "flash_write", size_bytes, requests=requests)

    def copy(self, size_bytes: int, requests: int, *, to_host: bool) -> None:
        """Waits until rows are read that are to be written elsewhere."""
        route = "flash_to_host" if to_host else "flash_read"
        self.wait([self.topology.transfer(self._device, route, size_bytes, requests=requests)])

    # --- reads ---

    def read(self, reads: PacedReads) -> None:
        """Puts reads in line. They begin in that order, as far as what has been read and not been used leaves room."""
        with self._lock:
            self._line.append(reads)
            self._begin()

    def _begin(self) -> None:
        begun_bytes = sum(reads.size_bytes for reads in self._line if reads.has_begun)
        for reads in self._line:
            if reads.has_begun:
                continue
            if begun_bytes and begun_bytes + reads.size_bytes > self._window_bytes:
                return
            begun_bytes += reads.size_bytes
            reads.has_begun = True
            route = "flash_to_host" if reads.to_host else "flash_read"
            for unit, rows in reads.heads.items():
                pieces = _pieces(rows.size_bytes)
                asked = [-(-rows.requests * i // max(len(pieces), 1)) for i in range(len(pieces) + 1)]
                reads.transfers[unit] = [
                    self.topology.transfer(self._device, route, part, requests=asked[i + 1] - asked[i]) for i, part in enumerate(pieces)
                ]

    def used(self, reads: PacedReads) -> None:
        """The first in line was computed on, or shown: its room is free."""
        with self._lock:
            if reads in self._line:
                self._line.remove(reads)
                self._begin()

    def cancel(self) -> None:
        """Nothing in line is wanted any more. Whoever waits gets TransferCancelledError. **Any thread.**"""
        with self._lock:
            line, self._line = self._line, deque()
        for reads in line:
            for transfers in reads.transfers.values():
                for each in transfers:
                    self.topology.cancel(each)

    def arrive(self, reads: PacedReads) -> list[Transfer]:
        """What has to end before a ticket's rows are on the host."""
        came = [each for transfers in reads.transfers.values() for each in transfers]
        return came if reads.to_host else [self.topology.transfer(self._device, "device_to_host", reads.size_bytes, after=came)]

    # --- attention ---

    def attend(self, reads: PacedReads, hand_over: HandOver) -> list[Transfer]:
        """The work of a ticket: queries to the device, passes over its rows, results to the host. Returns what has to end."""
        n, buffered = hand_over.n, hand_over.buffered
        heads = dict.fromkeys(hand_over.heads, HeadRows(0, 0, 0)) | reads.heads
        given_bytes = len(heads) * n * ROW_BYTES + len(hand_over.heads) * buffered * (n * _FLOAT_BYTES + ROW_BYTES)
        asked = self.topology.transfer(self._device, "host_to_device", given_bytes)
        back_bytes = n * (ROW_BYTES + (_FLOAT_BYTES if hand_over.returns_lse else 0))
        results = []
        for unit, rows in heads.items():
            done = [asked]
            for each in reads.transfers.get(unit, []):
                done = self._pass(padded(rows.n_rows) * each.size_bytes / rows.size_bytes, n, [*done, each])
            waiting = buffered if unit in hand_over.heads else 0
            done = self._pass(padded(rows.n_rows + waiting), n, done)
            results.append(self.topology.transfer(self._device, "device_to_host", back_bytes, after=done))
        return results

    def _pass(self, tokens: float, n: int, after: Sequence[Transfer]) -> list[Transfer]:
        """Scores or values of so many tokens for n queries, as many of which share a pass as there is a kernel for."""
        accelerator = self.topology.spec.accelerator
        most = accelerator.max_group if accelerator is not None else 0
        done = list(after)
        for group, passes in ((most, n // most), (n % most, 1)) if most else ():
            if group and passes:
                flop, size_bytes = 2.0 * tokens * DIM * group * passes, round(tokens * ROW_BYTES) * passes
                done = [self.topology.compute(self._device, flop, size_bytes, group=group, after=done)]
        return done

    def wait(self, transfers: Sequence[Transfer], asked_s: float | None = None) -> None:
        """Until all have ended. Raises DeadlineExceededError, TransferCancelledError, EngineClosedError."""
        self.topology.wait(transfers, asked_s=asked_s, deadline_s=self._deadline_s)


def check_memory(heads: dict[tuple[int, int], HeadRows], n: int, buffered: int, group: int, memory_bytes: int, name: str) -> None:
    """Raises OutOfMemoryError unless each head's rows, with the scores of the queries that share a pass, fit a device's memory."""
    for (sequence, head), rows in heads.items():
        tokens = padded(rows.n_rows + buffered)
        needed = 2 * tokens * ROW_BYTES + tokens * min(n, group) * _FLOAT_BYTES + 2 * n * ROW_BYTES
        if needed > memory_bytes:
            raise errors.OutOfMemoryError(
                f"attention of sequence {sequence}, KV head {head} over {rows.n_rows + buffered} tokens in the memory of device {name!r}: "
                f"{needed - memory_bytes} bytes are missing",
                needed_bytes=needed, free_bytes=memory_bytes, fix="a device with more memory, or shorter sequences",
            )  # fmt: skip


def _pieces(size_bytes: int) -> list[int]:
    each = max(PIECE_BYTES, -(-size_bytes // PIECES_MAX))
    return [min(each, size_bytes - begin) for begin in range(0, size_bytes, each)]


def padded(tokens: int) -> int:
    """As many as the accelerator takes for them."""
    return -(-tokens // PAD_TO) * PAD_TO
