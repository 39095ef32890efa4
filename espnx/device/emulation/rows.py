"""Rows on an emulated device: they lie in a file of this machine and are really read; HILOS's
accelerator computes on them, bit by bit; and all of it counts as done when the device of a spec
would have done it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, get_args

import numpy as np
import torch

from ... import errors
from ...ops.accelerator import DIM, LSE_LEAST, Buffered, accelerator, accelerator_scores
from ...ops.accelerator.checks import BLOCK, MASK, PAD_TO
from ...ops.attention import Queries, RowsInMemory, attend_rows, merge
from ...storage import Plan
from ..command import Part
from ..cost import rows as cost
from ..cost.rows import HandOver, HeadRows, check_memory
from ..interface import PIECE, READ_AHEAD_BYTES, Capabilities, Segment, SegmentView, Show
from ..model.spec import Accelerator, DeviceSpec
from ..pages import page_reads
from ..row_layout import RowLayout
from ..rows.file import SEGMENT_READ
from ..rows.ssd import SsdRowDevice
from ..rows.writes import Writing
from ..workers import Clock
from ..wrapper import Wrapper
from .faults import Faults, Guard
from .row_line import PacedReads, RowLine
from .topology import Topology, Transfer

#: How rows that wait on the host reach the result: as scores and V, which go to the device (HILOS,
#: section 4.3), or attended to on the host and merged by log-sum-exp.
HandedOver = Literal["scores", "lse"]
HAND_OVERS: tuple[HandedOver, ...] = get_args(HandedOver)
SCALE = DIM**-0.5
#: Heads are read and computed on together up to so many bytes, so that threads share them.
TOGETHER_BYTES = 16 << 20
_NOTHING = frozenset[tuple[int, int]]()


@dataclass(eq=False, slots=True)
class _Ticket:
    """Reads in line: those of the real file, some heads each, and those of the emulated device."""

    layout: RowLayout
    parts: list[tuple[int, np.ndarray]]  # a ticket of the file's, and what it reads: `SEGMENT_READ`
    paced: PacedReads


class EmulatedRowDevice(Part, Wrapper):
    """See `espnx.device.interface.RowDevice`. What it attends over are fp16 rows of 128 values, by
    a plain softmax; results are those of `espnx.ops.accelerator`. Rows of a head that lie on one
    device give the same bits however many devices there are.

    Args:
        directory: of the data file.
        topology, number: the hardware, and which device of it this is.
        hand_over: of rows that wait on the host.
        near_storage: whether it computes. If not, or if its spec does not attend, it is a disk:
            rows go to the host, which attends.
        read_ahead_bytes: of host memory, for rows read before they are asked for. What the emulated
            device reads ahead is bounded by its memory.
        compute: anything: results go where the queries are.
        faults: what goes wrong on it.
        **options: of the `SsdRowDevice` in whose file the rows lie.

    Raises:
        InvalidInputError: the spec's accelerator is not the one that is emulated.
    """

    compute = torch.device("cpu")

    def __init__(
        self,
        directory: str | os.PathLike[str],
        *,
        topology: Topology,
        number: int,
        hand_over: HandedOver = "scores",
        near_storage: bool = True,
        read_ahead_bytes: int = READ_AHEAD_BYTES,
        deadline_s: float = 30.0,
        threads: int | None = None,
        compute: torch.device | None = None,
        faults: Faults | None = None,
        **options: Any,
    ):
        self._guard = Guard(topology, number, os.fspath(directory), faults or Faults())
        self.capabilities = capabilities_of(topology.spec, near_storage=near_storage)
        self._attends = near_storage and topology.spec.has("attend")
        memory = topology.spec.memory.size
        #: None: not known, and no bound.
        self._memory_bytes = None if memory is None else int(memory.value)
        window_bytes = (
            read_ahead_bytes
            if not self._attends or self._memory_bytes is None
            else self._memory_bytes
        )
        self._topology, self._line = topology, RowLine(topology, number, window_bytes, deadline_s)
        self._hand_over, self._threads = hand_over, threads or 0
        self._tickets: dict[int, _Ticket] = {}
        options |= {
            "read_ahead_bytes": read_ahead_bytes,
            "deadline_s": deadline_s,
            "threads": threads,
        }
        super().__init__(SsdRowDevice(directory, starts=self._start_write, **options))

    # --- rows come ---

    def _start_write(self, start: Callable[[], Writing], plan: Plan, is_copy: bool) -> Writing:
        fault = self._guard.begin("put")
        leg = cost.put(
            int(plan.size_bytes.sum()),
            len(plan.size_bytes),
            from_host=not (is_copy and self._attends),
        )
        paced = self._line.start(leg)
        if fault is not None and fault.kind in ("stall", "drop"):
            return _HeldWrite(
                start(),
                self._line,
                paced,
                partial(self._guard.wait, fault, "put", self._line.deadline_s),
            )
        return _PacedWrite(start(), self._line, paced)

    def join(self, segments: Sequence[Segment]) -> Segment:
        """See `RowDevice`."""
        self._inner.check_open()
        parts = [self._inner.written(segment) for segment in segments]
        copied = cost.read(
            sum(each.size_bytes for each in parts), len(parts), to_host=not self._attends
        )
        self._line.wait([self._line.start(copied)])
        found: Segment = self._inner.join(parts)
        return found

    # --- rows are looked at ---

    def ahead(self, layout: RowLayout, views: Sequence[SegmentView]) -> int:
        """See `RowDevice`."""
        self._inner.check_open()
        table, sums = self._inner.table(views)
        heads = dict[tuple[int, int], HeadRows]()
        by_head = _by_head(layout, table)
        sizes = -(-by_head["n_rows"] // layout.block_rows) * layout.block_bytes
        begins, _ = page_reads(by_head["file"], by_head["offset_bytes"], sizes)
        for row, size_bytes, is_first in zip(by_head, sizes.tolist(), begins.tolist(), strict=True):
            unit = int(row["sequence"]), int(row["first_head"])
            before = heads.get(unit, HeadRows(0, 0, 0))
            heads[unit] = HeadRows(
                before.n_rows + int(row["n_rows"]),
                before.size_bytes + size_bytes,
                before.requests + int(is_first),
            )
        is_for_host = not self._attends or bool(
            self.capabilities.lacks(Queries(torch.empty(0, 0, 0, layout.d), layout.dv), layout)
        )
        parts = [
            (self._inner.push(layout, part, sums), part)
            for part in ([table] if is_for_host else _parts(layout, by_head))
        ]
        self._tickets[parts[0][0]] = _Ticket(
            layout, parts, self._line.read(heads, to_host=is_for_host)
        )
        return parts[0][0]

    def forget(self) -> None:
        """See `RowDevice`."""
        self._inner.forget()
        self._line.cancel()
        self._tickets.clear()

    def visit(self, ticket: int, show: Show) -> None:
        """See `RowDevice`."""
        mine, asked_s = self._front(ticket), self._topology.now()
        try:
            self._guard.wait(self._guard.begin("visit"), "visit", self._line.deadline_s)
            for part, _ in mine.parts:
                self._inner.visit(part, show)
            self._line.wait(mine.paced.arrive(), asked_s)
        except BaseException:
            self.forget()
            raise
        self._end(ticket, mine)

    def attend(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None = None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RowDevice`.

        Raises also:
            OutOfMemoryError: the rows of a head, with their scores, do not fit the device's memory.
            InvalidInputError: scores are so low that the accelerator's mask is not below them.
        """
        mine, there = self._front(ticket), queries.q.device
        if missing := self.capabilities.lacks(queries, mine.layout):
            raise errors.InvalidInputError(
                f"attention on device {self._name!r}",
                got=", ".join(missing),
                expected="what its capabilities say",
            )
        if there != self.compute:
            queries, tail = (
                queries.to(self.compute),
                tail if tail is None else tail.to(self.compute),
            )
        try:
            fault = self._guard.begin("attend")
            attend = self._attend if self._attends else self._attend_on_host
            o, lse = attend(mine, queries, tail if tail is not None and tail.n_rows else None)
            self._guard.wait(fault, "attend", self._line.deadline_s)
            # of what is no number nothing else can come
            if fault is not None or bool(torch.isfinite(queries.q).all()):
                o = torch.from_numpy(self._guard.reply(fault, "attend", o.numpy(), _is_number))
        except BaseException:
            self.forget()
            raise
        self._end(ticket, mine)
        return o.to(there), lse.to(there)

    def _attend(
        self, mine: _Ticket, queries: Queries, tail: RowsInMemory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        topology, n = self._topology, queries.q.shape[2]
        asked_s = topology.now()
        hands_scores = tail is not None and self._hand_over == "scores"
        units = _counting(queries, tail) if tail is not None and hands_scores else _NOTHING
        buffered = tail.n_rows if tail is not None and hands_scores else 0
        accelerator_spec = topology.spec.accelerator
        if self._memory_bytes is not None and accelerator_spec is not None:
            check_memory(
                mine.paced.heads,
                n,
                buffered,
                accelerator_spec.max_group,
                self._memory_bytes,
                self._name,
            )
        results = (
            mine.paced.attend(HandOver(n, buffered, units, returns_lse=self._hand_over == "lse"))
            if n
            else []
        )
        work = _Attention(queries, tail if hands_scores else None, self._threads)
        for ticket, table in mine.parts:
            self._compute(work, ticket, table, mine.layout)
        work.add_unseen(units - work.units)
        o, lse = work.result(self._name)
        if tail is not None and not hands_scores:
            o, lse = merge(o, lse, *_attend_tail(queries, tail, self._threads))
        self._line.wait(results, asked_s)
        return o, lse

    def _attend_on_host(
        self, mine: _Ticket, queries: Queries, tail: RowsInMemory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attends without an accelerator: the rows pass the links, and the host attends as it does
        beside a plain SSD."""
        asked_s = self._topology.now()
        ((ticket, _),) = mine.parts
        o, lse = self._inner.attend(ticket, queries, tail)
        self._line.wait(mine.paced.arrive(), asked_s)
        return o, lse

    def _compute(self, work: _Attention, ticket: int, table: np.ndarray, layout: RowLayout) -> None:
        """Reads some heads into the device's memory and computes on them."""
        blocks = -(-table["n_rows"] // layout.block_rows)
        memory = torch.empty(int(blocks.sum()) * layout.block_bytes, dtype=torch.uint8)
        pieces, end = list[np.ndarray](), 0

        def take(shown: torch.Tensor, some: np.ndarray) -> None:
            nonlocal end
            some = some.copy()
            sizes = -(-some["n_rows"] // layout.block_rows) * layout.block_bytes
            for piece, size_bytes in zip(some, sizes.tolist(), strict=True):
                begin = int(piece["offset_bytes"])
                memory[end : end + size_bytes] = shown[begin : begin + size_bytes]
                piece["offset_bytes"] = end
                end += size_bytes
            pieces.append(some)

        self._inner.visit(ticket, take)
        if pieces:
            work.add(memory, np.concatenate(pieces), layout.block_rows)

    def _front(self, ticket: int) -> _Ticket:
        self._inner.check_open()
        mine = self._tickets.get(ticket)
        if mine is None or ticket != self._inner.front():
            raise errors.InvalidInputError(
                "rows are consumed in the order in which they were asked for",
                got=ticket,
                expected=self._inner.front(),
            )
        return mine

    def _end(self, ticket: int, mine: _Ticket) -> None:
        self._tickets.pop(ticket, None)
        self._line.used(mine.paced)

    @property
    def clock(self) -> Clock | None:
        """See `Topology.clock`."""
        return self._topology.clock

    def close(self) -> None:
        """See `RowDevice`."""
        self._line.cancel()
        self._tickets.clear()
        self._inner.close()

    @property
    def _name(self) -> str:
        return self._topology.spec.name


class _Attention:
    """The accelerator's work for one ticket: each head of each sequence by itself, some of them at
    a time."""

    def __init__(self, queries: Queries, tail: RowsInMemory | None, threads: int):
        self._queries, self._threads = queries, threads
        self._q = (queries.q / SCALE).half()
        if bool((self._q.isinf() & queries.q.isfinite()).any()):
            largest = float(queries.q.abs().max()) / SCALE
            raise errors.InvalidInputError(
                "queries for the accelerator",
                got=f"values up to {largest:g}",
                expected="at most 65504 (fp16)",
            )
        self._o = torch.zeros(*queries.q.shape[:3], queries.dv)
        self._lse = torch.full(queries.q.shape[:3], -torch.inf)
        self._buffered: Buffered | None = None
        self._counting = _NOTHING if tail is None else _counting(queries, tail)
        if tail is not None:
            k, v = (rows.half().contiguous() for rows in tail.counting)
            self._buffered = Buffered(
                accelerator_scores(self._q, k, threads=threads or None), v, tail.first_position
            )
        self.units = set[tuple[int, int]]()

    def add(self, memory: torch.Tensor, pieces: np.ndarray, block_rows: int) -> None:
        """All rows of some heads, in `memory`: pieces of `PIECE`, in any order."""
        pieces = pieces[np.lexsort((pieces["first_position"], pieces["head"], pieces["sequence"]))]
        units = list(
            dict.fromkeys(zip(pieces["sequence"].tolist(), pieces["head"].tolist(), strict=True))
        )
        for with_tail in (True, False):
            chosen = [unit for unit in units if (unit in self._counting) == with_tail]
            self._run(chosen, memory, pieces, block_rows, with_tail=with_tail)

    def add_unseen(self, units: frozenset[tuple[int, int]]) -> None:
        """Heads without rows on the device."""
        self._run(
            sorted(units), torch.empty(0, dtype=torch.uint8), np.empty(0, PIECE), 1, with_tail=True
        )

    def _run(
        self,
        units: list[tuple[int, int]],
        memory: torch.Tensor,
        pieces: np.ndarray,
        block_rows: int,
        *,
        with_tail: bool,
    ) -> None:
        """Each unit as a sequence of one head."""
        if not units or not self._q.shape[2]:
            return
        queries, number = self._queries, {unit: i for i, unit in enumerate(units)}
        sequence, head = (torch.tensor(each) for each in zip(*units, strict=True))
        rows = [
            (number[s, h], 0, offset, n_rows, first)
            for s, h, offset, n_rows, first in pieces.tolist()
            if (s, h) in number
        ]
        buffered = self._buffered
        if buffered is not None and with_tail:
            scores, v = (
                each[sequence, head].unsqueeze(1) for each in (buffered.scores, buffered.v)
            )
            buffered = replace(buffered, scores=scores, v=v)
        first_visible, visible = (
            None if each is None else each[sequence].contiguous()
            for each in (queries.first_visible, queries.visible)
        )
        o, lse = accelerator(
            self._q[sequence, head].unsqueeze(1),
            memory,
            torch.tensor(rows, dtype=torch.int64).reshape(-1, 5),
            block_rows=block_rows,
            first_visible=first_visible,
            visible=visible,
            last_position=queries.last_position,
            buffered=buffered if with_tail else None,
            threads=self._threads or None,
        )
        self._o[sequence, head], self._lse[sequence, head] = o.squeeze(1).float(), lse.squeeze(1)
        self.units.update(units)

    def result(self, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32, lse), of all heads. Raises InvalidInputError where masked rows may have
        counted."""
        if bool(((self._lse < LSE_LEAST) & (self._lse > -torch.inf)).any()):
            lowest = float(self._lse[self._lse > -torch.inf].min())
            raise errors.InvalidInputError(
                f"scores on device {name!r}",
                got=f"a log-sum-exp of {lowest:g}",
                fix="device='ssd'",
                expected=f"at least {LSE_LEAST:g}: its accelerator scores hidden rows {MASK:g}",
            )
        return self._o, self._lse


class _PacedWrite:
    """Rows under way to the file, and to the emulated flash: written when both are done. See
    `Writing`."""

    def __init__(self, real: Writing, line: RowLine, paced: Transfer):
        self._real, self._line, self._paced = real, line, paced

    def done(self) -> bool:
        topology = self._line.topology
        if topology.stretch:
            return self._real.done() and topology.done(self._paced)
        if not topology.done(self._paced):
            return False
        # what this machine takes must not show where the wall has no part in time
        self._real.wait()
        return True

    def wait(self) -> None:
        """See `Writing`."""
        asked_s = self._line.topology.now()
        self._real.wait()
        self._line.wait([self._paced], asked_s)

    def end(self) -> bool:
        """See `Writing`: what a place is used for next does not depend on emulated time."""
        return self._real.end()

    def is_over(self) -> bool:
        """See `Writing`."""
        return self._real.is_over()

    def cancel(self) -> None:
        self._real.cancel()
        self._line.topology.cancel(self._paced)


class _HeldWrite(_PacedWrite):
    """One whose completion a fault holds up: whoever waits for it waits for that."""

    def __init__(self, real: Writing, line: RowLine, paced: Transfer, hold: Callable[[], None]):
        super().__init__(real, line, paced)
        self._hold = hold

    def done(self) -> bool:
        return False

    def wait(self) -> None:
        """See `Writing`."""
        self._hold()
        super().wait()


def capabilities_of(spec: DeviceSpec, *, near_storage: bool) -> Capabilities:
    """The capabilities of rows on a device: without an accelerator that attends, those of a plain
    SSD.

    Raises InvalidInputError where it attends, and not as `espnx.ops.accelerator` does."""
    if not near_storage or spec.accelerator is None or not spec.has("attend"):
        return SsdRowDevice.capabilities
    check_accelerator(spec.accelerator, spec.name)
    return Capabilities(
        attends_widths=(DIM,),
        attends_formats=("fp16",),
        exchanges="fp16",
        attends_part_of_tail=True,
        keeps=True,
    )


def check_accelerator(accelerator: Accelerator, name: str) -> None:
    """Raises InvalidInputError unless it is the one that is emulated."""
    emulated = {"block_tokens": BLOCK, "head_dim": DIM, "pad_tokens": PAD_TO, "mask_value": MASK}
    for field, wanted in emulated.items():
        figure = getattr(accelerator, field)
        if figure is None or figure.value != wanted:
            raise errors.InvalidInputError(
                f"accelerator.{field} of device {name!r}",
                got=figure,
                expected=f"{wanted:g}: results are those of this accelerator alone",
            )


def _is_number(values: np.ndarray) -> np.ndarray:
    """fp16 results may be infinite; none is NaN."""
    return ~np.isnan(values)


def _counting(queries: Queries, tail: RowsInMemory) -> frozenset[tuple[int, int]]:
    """The sequences and heads whose rows in memory count."""
    counts = (
        torch.ones(queries.q.shape[:2], dtype=torch.bool) if tail.counts is None else tail.counts
    )
    return frozenset((sequence, head) for sequence, head in counts.nonzero().tolist())


def _attend_tail(
    queries: Queries, tail: RowsInMemory, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends over the tail on the host, for the heads whose rows count."""
    o, lse = attend_rows(queries, replace(tail, counts=None), threads=threads)
    if tail.counts is not None:
        o, lse = (
            o.masked_fill(~tail.counts[..., None, None], 0.0),
            lse.masked_fill(~tail.counts[..., None], -torch.inf),
        )
    return o, lse


def _by_head(layout: RowLayout, table: np.ndarray) -> np.ndarray:
    """A table of reads with one head in each row, those of a sequence's head together, in the order
    of `table`."""
    rows = []
    for row in table:
        for i in range(int(row["n_heads"])):
            own = row.copy()
            blocks = int(row["n_blocks"])
            own["first_head"], own["head_step"], own["n_heads"] = (
                row["first_head"] + i * row["head_step"],
                1,
                1,
            )
            own["offset_bytes"] += i * blocks * layout.block_bytes
            own["first_sum"] += i * blocks
            rows.append(own)
    found = np.array(rows, SEGMENT_READ) if rows else np.empty(0, SEGMENT_READ)
    return found[np.lexsort((np.arange(len(found)), found["first_head"], found["sequence"]))]


def _parts(layout: RowLayout, by_head: np.ndarray) -> list[np.ndarray]:
    """Whole heads together, up to `TOGETHER_BYTES`; at least one part."""
    if not len(by_head):
        return [by_head]
    starts = np.flatnonzero(
        np.r_[True, (np.diff(by_head["sequence"]) != 0) | (np.diff(by_head["first_head"]) != 0)]
    )
    sizes = np.add.reduceat(-(-by_head["n_rows"] // layout.block_rows) * layout.block_bytes, starts)
    cuts, held = list[int](), 0
    for start, size_bytes in zip(starts.tolist(), sizes.tolist(), strict=True):
        if held and held + size_bytes > TOGETHER_BYTES:
            cuts.append(start)
            held = 0
        held += size_bytes
    return np.split(by_head, cuts)
