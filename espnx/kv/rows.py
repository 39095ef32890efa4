"""The rows of a batch of sequences, and of one layer of it: what lies on devices, what waits in
memory for its turn to be written (HILOS, section 4.3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import errors
from ..device.interface import SegmentView
from ..device.row_layout import RowLayout
from ..ops.attention import RowsInMemory
from .striping import StripedDevices, StripedSegment

#: So many bytes of rows are put together, or one sequence's: what a write holds in memory does not
#: grow with the batch.
PUT_BYTES = 2 << 20
#: Runs of fewer tokens, as generated ones come, are joined to one of at least so many: each run is
#: planned and attended to by itself.
JOIN_ROWS = 128
#: Memory is taken for so many waiting rows at once; for more, as they come: an interval may be
#: longer than any text.
_ROOM_ROWS = 1024


@dataclass
class StoredRun:
    """Consecutive tokens of all sequences, written together.

    Attributes:
        n_rows: that count; `crop` makes it less than what was written.
        parts: for each sequence, the segments that hold its heads.
        turn: the turn of `LayerRows.spill` in which it was put; -1: long ago.
    """

    first_position: int
    n_rows: int
    parts: list[list[StripedSegment]]
    turn: int = -1


class LayerRows:
    """K and V (or X) of one layer.

    Args:
        striped: the devices.
        layout: of blocks.
        n_heads: KV heads (X: 1).
        dtype: of rows in memory.
        spill_rows: so many tokens wait before they are written together.

    Attributes:
        layout, n_heads, dtype: as given.
        count: tokens, in memory and on devices.
        stored: of them, from the first on, written in whole blocks.
        pinned: what is stored from this position on stays in memory, too; None: nothing.
        query_heads: of the model's last pass over them; 0: there was none.
        is_by_position: which rows reads ask for depends on positions alone (`cover_by_position`).
    """

    def __init__(
        self,
        striped: StripedDevices,
        layout: RowLayout,
        n_heads: int,
        dtype: torch.dtype,
        spill_rows: int,
    ):
        self._striped, self.layout, self.n_heads, self.dtype = striped, layout, n_heads, dtype
        self._spill_rows = spill_rows
        self.runs: list[StoredRun] = []
        self.count = self.stored = 0
        self.pinned: int | None = None
        # of a block that is not full yet, where tokens are spilled sooner than that
        self._partial: StoredRun | None = None
        self._k = self._v = torch.empty(0)
        self._first = 0  # position of the first row in memory
        self._turn = 0  # of spilling, once a pass
        self.query_heads = 0
        # rows in memory are not those that are stored: which of them a pass sees must not depend on
        # when writes end
        self.is_by_position = self._is_rounded = layout.format == "int8"

    # --- rows come ---

    def append(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Adds new tokens, k [sequences, heads, n, d] and v (None: X), in memory; `spill` writes
        them when it is time."""
        n, held = k.shape[2], self.count - self._first
        if not self._k.numel() or held + n > self._k.shape[2]:
            room = max(2 * min(self._spill_rows, max(held + n, _ROOM_ROWS)), held + n)
            self._k = self._grown(self._k, k, held, room + room // 2)
            self._v = self._k if v is None else self._grown(self._v, v, held, room + room // 2)
        self._k[:, :, held : held + n] = k
        if v is not None:
            self._v[:, :, held : held + n] = v
        self.count += n

    def _grown(self, old: torch.Tensor, like: torch.Tensor, held: int, room: int) -> torch.Tensor:
        """Memory [sequences, heads, room, width] that begins with the `held` rows of `old`."""
        new = self._striped.memory(
            (like.shape[0], like.shape[1], room, like.shape[3]), self.dtype, like.device
        )
        if held:
            new[:, :, :held] = old[:, :, :held]
        return new

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Adds a chunk of new tokens and writes all whole blocks at once (prefill)."""
        rest = self.count - self.stored
        block_rows = self.layout.block_rows
        whole = (rest + k.shape[2]) // block_rows * block_rows
        if whole:
            self._keep_from(self.stored)
            taken = whole - rest
            self._put(slice(0, rest), k[:, :, :taken], None if v is None else v[:, :, :taken])
            self.count = self._first = self.stored
            k, v = k[:, :, taken:], None if v is None else v[:, :, taken:]
        if k.shape[2]:
            self.append(k, v)

    def spill(self, end: int | None = None) -> None:
        """Writes what has waited long enough, of the tokens before `end` (None: of all). Raises
        what a put raises; the rows are still in memory then."""
        self._turn += 1
        waiting = (self.count if end is None else end) - self.stored
        whole = waiting // self.layout.block_rows * self.layout.block_rows
        if waiting >= self._spill_rows and whole:
            skip = self.stored - self._first
            self._put(slice(skip, skip + whole))
            self._join()
        elif (
            self._spill_rows < self.layout.block_rows
            and waiting % self._spill_rows == 0
            and waiting
        ):
            skip = self.stored - self._first
            run = self._run(slice(skip, skip + waiting))
            self._drop_partial()
            self._partial = run

    def _put(
        self, waiting: slice, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> None:
        run = self._run(waiting, k, v)
        self.runs.append(run)
        self.stored += run.n_rows
        self._drop_partial()

    def _run(
        self, waiting: slice, k: torch.Tensor | None = None, v: torch.Tensor | None = None
    ) -> StoredRun:
        """Writes rows that wait, and after them those of k and v, some sequences at a time."""
        n_rows = waiting.stop - waiting.start + (0 if k is None else k.shape[2])
        n_sequences = len(self._k) if k is None else len(k)
        each_bytes = self.n_heads * self.layout.blocks(n_rows) * self.layout.block_bytes
        run = StoredRun(self.stored, n_rows, [], self._turn)
        step = max(1, PUT_BYTES // each_bytes)
        try:
            for begin in range(0, n_sequences, step):
                some = slice(begin, begin + step)
                rows_k = self._joined(self._k, waiting, k, some)
                rows_v = None if self.layout.is_shared else self._joined(self._v, waiting, v, some)
                run.parts += self._striped.put(self.layout, rows_k, rows_v, begin)
        except BaseException:
            self._release(run)
            raise
        return run

    def _joined(
        self, held: torch.Tensor, waiting: slice, new: torch.Tensor | None, some: slice
    ) -> torch.Tensor:
        """What waited, then what is new, of some sequences."""
        if new is None:
            return held[some, :, waiting]
        return (
            torch.cat([held[some, :, waiting], new[some].to(self.dtype)], dim=2)
            if waiting.stop > waiting.start
            else new[some]
        )

    def _join(self) -> None:
        """Makes one run of short ones behind which another has come, once they have enough tokens;
        only what is whole and lies alike. Which these are does not depend on when writes end: they
        were put in turns before, and what has not come to the disk by now is waited for."""
        end = begin = len(self.runs) - 1
        while (
            begin > 0
            and self._is_short(self.runs[begin - 1])
            and _places(self.runs[begin - 1]) == _places(self.runs[end - 1])
        ):
            begin -= 1
        short = self.runs[begin:end]
        n_rows = sum(run.n_rows for run in short)
        if len(short) < 2 or n_rows < JOIN_ROWS:
            return
        for run in short:
            self._wait(run)
        joined, made = (
            StoredRun(short[0].first_position, n_rows, [], self._turn),
            dict[tuple[int, ...], StripedSegment](),
        )
        try:
            for every in zip(*(run.parts for run in short), strict=True):
                parts = list[StripedSegment]()
                joined.parts.append(parts)
                for column in zip(*every, strict=True):
                    key = tuple(map(id, column))
                    if key in made:  # beams share it
                        made[key].references += 1
                    else:
                        made[key] = self._striped.join(column)
                    parts.append(made[key])
        except BaseException as error:
            self._release(joined)
            if isinstance(error, errors.DiskFullError):
                return  # they are read as they are
            raise
        self.runs[begin:end] = [joined]
        for run in short:
            self._release(run)

    def _is_short(self, run: StoredRun) -> bool:
        return run.n_rows < JOIN_ROWS and all(
            each.segment.n_rows == run.n_rows for parts in run.parts for each in parts
        )

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._release(self._partial)
            self._partial = None

    # --- rows are looked at ---

    def covered(self) -> int:
        """Tokens, from the first on, that reads should ask for: those that are not in memory, and
        those whose write has ended. By position, those that were not put in this turn: a write that
        takes longer than that is waited for. Raises what a write raises."""
        end = 0
        for run in self.runs:
            if run.first_position >= self._first:
                if self.is_by_position and run.turn != self._turn:
                    self._wait(run)
                elif self.is_by_position or not self._is_written(run):
                    break
            end = run.first_position + run.n_rows
        return end

    def cover_by_position(self) -> None:
        """Which rows reads ask for depends on positions alone from here on, and not on when writes
        end, and with it what is made of these rows, as a draft is."""
        if not self.is_by_position:
            self.is_by_position = True
            self._turn += 1  # of what was put so far, all: some of it may have left memory

    def cover_what_is_written(self) -> None:
        """The end of `cover_by_position`, but for rows that are not stored as they came."""
        self.is_by_position = self._is_rounded

    def _wait(self, run: StoredRun) -> None:
        """Waits until a run is on the devices, and with it all others."""
        if not self._is_written(run):
            self._striped.flush()

    def _is_written(self, run: StoredRun) -> bool:
        return all(self._striped.is_written(each) for parts in run.parts for each in parts)

    def views(self, end: int, sequences: range) -> list[list[SegmentView]]:
        """The segments on each device that hold the tokens before `end` of some sequences, which
        are numbered from 0."""
        found: list[list[SegmentView]] = [[] for _ in range(self._striped.count)]
        for run in self.runs:
            if run.first_position >= end:
                break
            for sequence, parts in enumerate(run.parts[sequences.start : sequences.stop]):
                for each in parts:
                    found[each.device].append(
                        SegmentView(each.segment, sequence, run.n_rows, run.first_position)
                    )
        return found

    def tail(self, begin: int) -> RowsInMemory | None:
        """The tokens from `begin` on, which are in memory."""
        if begin >= self.count:
            return None
        return RowsInMemory(self._k, self._v, begin - self._first, self.count - begin, begin)

    def _keep_from(self, begin: int) -> None:
        """Forgets rows in memory before position `begin`."""
        drop = min(begin, self.count) - self._first
        if drop > 0:
            held = self.count - self._first - drop
            for rows in {id(self._k): self._k, id(self._v): self._v}.values():
                kept = rows[:, :, drop : drop + held]
                rows[:, :, :held] = kept.clone() if held > drop else kept
            self._first += drop

    def trim(self, begin: int) -> None:
        """Lets go of rows in memory before position `begin` that are stored and not pinned."""
        self._keep_from(min(begin, self.stored, begin if self.pinned is None else self.pinned))

    # --- rows are kept (see kept/state.py) ---

    def in_memory(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(k [sequences, heads, n, d], v, position of the first): copies of the rows in memory; v
        is k for X."""
        held = self.count - self._first
        if not self._k.numel():
            empty = torch.empty(self.sequences, self.n_heads, 0, self.layout.d, dtype=self.dtype)
            return (
                empty,
                empty
                if self.layout.is_shared
                else empty.new_empty(*empty.shape[:3], self.layout.dv),
                self._first,
            )
        k = self._k[:, :, :held].clone()
        return k, k if self._v is self._k else self._v[:, :, :held].clone(), self._first

    def restore(
        self,
        runs: list[StoredRun],
        count: int,
        stored: int,
        first: int,
        k: torch.Tensor,
        v: torch.Tensor,
    ) -> None:
        """Becomes what was kept."""
        self.runs, self.count, self.stored, self._first = runs, count, stored, first
        self._k, self._v = k, v
        if k.numel():
            self._k = self._grown(k, k, k.shape[2], k.shape[2])
            self._v = self._k if v is k else self._grown(v, v, v.shape[2], v.shape[2])

    def to(self, device: torch.device) -> None:
        """Rows in memory wait there from now on."""
        if self._k.numel() and self._k.device != device:
            is_shared = self._v is self._k
            self._k = self._k.to(device)
            self._v = self._k if is_shared else self._v.to(device)

    # --- rows go ---

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was: beams, repeats, a part of the batch. Stored
        rows are shared, not copied."""
        for run in [*self.runs, *([self._partial] if self._partial else [])]:
            old = run.parts
            run.parts = [list(old[i]) for i in sequences]
            for parts in run.parts:
                for each in parts:
                    each.references += 1
            for parts in old:
                for each in parts:
                    self._striped.release(each)
        if self._k.numel():
            is_shared = self._v is self._k
            self._k = self._chosen(self._k, sequences)
            self._v = self._k if is_shared else self._chosen(self._v, sequences)

    def _chosen(self, rows: torch.Tensor, sequences: list[int]) -> torch.Tensor:
        chosen = self._striped.memory((len(sequences), *rows.shape[1:]), rows.dtype, rows.device)
        for i, sequence in enumerate(sequences):
            chosen[i] = rows[sequence]
        return chosen

    def crop(self, count: int) -> None:
        """Keeps the first `count` tokens."""
        if count >= self.count:
            return
        if count <= self._first:
            self._first = count
        self.count = count
        if count < self.stored:
            self._drop_partial()
            while self.runs and self.runs[-1].first_position >= count:
                self._release(self.runs.pop())
            if self.runs:
                self.runs[-1].n_rows = min(
                    self.runs[-1].n_rows, count - self.runs[-1].first_position
                )
            self.stored = count
            # What is left of the last block is not written again: the next tokens begin a block of
            # their own.

    def accept(self, ends: Sequence[int], n_new: int, kept: Sequence[int], count: int) -> None:
        """Keeps the first `kept` of the last `n_new` tokens of each sequence: they move to its end.

        Args:
            ends: tokens of each sequence before those; none of what comes after is stored.
            n_new: tokens of the pass.
            kept: how many of them each sequence keeps.
            count: tokens of the longest sequence of the batch then.
        """
        begin = self.count - n_new - self._first
        for sequence, (end, n) in enumerate(zip(ends, kept, strict=True)):
            to = end - self._first
            if to < begin:
                for rows in {id(self._k): self._k, id(self._v): self._v}.values():
                    # a copy, since the two may overlap
                    rows[sequence, :, to : to + n] = rows[sequence, :, begin : begin + n].clone()
        self.count = count

    def twin(self) -> LayerRows:
        """The same rows once more, those on devices shared."""
        other = LayerRows(self._striped, self.layout, self.n_heads, self.dtype, self._spill_rows)
        runs = [
            StoredRun(
                run.first_position, run.n_rows, [list(parts) for parts in run.parts], run.turn
            )
            for run in self.runs
        ]
        other._turn = self._turn  # which the turns of runs are compared with
        for run in runs:
            for parts in run.parts:
                for each in parts:
                    each.references += 1
        k, v, first = self.in_memory()
        other.restore(runs, self.count, self.stored, first, k, v)
        return other

    def clear(self) -> None:
        """Forgets everything."""
        self._drop_partial()
        while self.runs:
            self._release(self.runs.pop())
        self.count = self.stored = self._first = 0
        self._k = self._v = torch.empty(0)

    def _release(self, run: StoredRun) -> None:
        for parts in run.parts:
            for each in parts:
                self._striped.release(each)

    @property
    def sequences(self) -> int:
        return self._k.shape[0] if self._k.numel() else len(self.runs[0].parts) if self.runs else 0

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows in memory, and of checksums."""
        rows = {id(self._k): self._k, id(self._v): self._v}.values()
        sums = {
            id(each): each.segment.memory_bytes
            for run in self.runs
            for parts in run.parts
            for each in parts
        }
        return sum(tensor.numel() * tensor.element_size() for tensor in rows) + sum(sums.values())


class BatchRows:
    """The rows of a batch of sequences, in all layers: K and V; of the first `x_rows` sequences the
    input of both projections (X) instead. Between passes, all layers have the same sequences, and
    of each as many tokens.

    Args:
        n_layers: with rows to keep.

    Attributes:
        x_rows: how many sequences keep X; set before the first tokens come.
        kv, x: `LayerRows` by layer, made when their first rows come.
    """

    def __init__(self, n_layers: int):
        self.x_rows = 0
        self.kv: list[LayerRows | None] = [None] * n_layers
        self.x: list[LayerRows | None] = [None] * n_layers

    @property
    def every(self) -> list[LayerRows]:
        """All rows there are, in the order in which a forward pass asks for them."""
        return [
            rows for pair in zip(self.x, self.kv, strict=True) for rows in pair if rows is not None
        ]

    def length(self, layer: int) -> int:
        """Tokens of a layer."""
        return max(
            (rows.count for rows in (self.x[layer], self.kv[layer]) if rows is not None), default=0
        )

    @property
    def sequences(self) -> int:
        """Sequences of the batch; 0 while nothing is cached."""
        for pair in zip(self.x, self.kv, strict=True):
            if count := sum(rows.sequences for rows in pair if rows is not None):
                return count
        return 0

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence."""
        for rows in self.every:
            rows.crop(tokens)

    def check_select(self, sequences: Sequence[int]) -> list[int]:
        """Those of a selection that keep X. Raises InvalidInputError for a selection that `select`
        refuses."""
        kept = [i for i in sequences if i < self.x_rows]
        if list(sequences[: len(kept)]) != kept:
            raise errors.InvalidInputError(
                "beams that mix sequences kept as X with others", got=self.x_rows, fix="x_rows=0"
            )
        return kept

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was (beams, repeats, a part of the batch); stored
        rows are shared, not copied.

        Raises InvalidInputError where a sequence kept as X would become one kept as K and V: then
        use x_rows=0.
        """
        kept = self.check_select(sequences)
        for every, chosen in (
            (self.x, kept),
            (self.kv, [i - self.x_rows for i in sequences[len(kept) :]]),
        ):
            for number, rows in enumerate(every):
                if rows is not None and chosen:
                    rows.select(chosen)
                elif rows is not None:
                    rows.clear()
                    every[number] = None
        self.x_rows = len(kept)

    def twin(self) -> BatchRows:
        """The same rows once more, those on devices shared."""
        other = BatchRows(len(self.kv))
        other.x_rows = self.x_rows
        other.kv, other.x = (
            [None if rows is None else rows.twin() for rows in every] for every in (self.kv, self.x)
        )
        return other

    def clear(self) -> None:
        """Forgets all tokens; their space is used again."""
        for rows in self.every:
            rows.clear()
        self.kv, self.x = [None] * len(self.kv), [None] * len(self.x)


def _places(run: StoredRun) -> list[list[tuple[int, range]]]:
    """The device and the heads of each part, by sequence."""
    return [[(each.device, each.segment.heads) for each in parts] for parts in run.parts]
