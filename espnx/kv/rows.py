"""The rows of one layer: what lies on devices, what waits in memory for its turn to be written (HILOS, section 4.3)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ..device.interface import Segment, Tail, Use
from ..device.layout import RowLayout
from .spread import Spread


@dataclass
class Run:
    """Consecutive tokens of all sequences, written together.

    Attributes:
        n_rows: that count; `crop` makes it less than what was written.
        parts: for each sequence, the segments that hold its heads, each with its device.
    """

    first_position: int
    n_rows: int
    parts: list[list[tuple[int, Segment]]]


class LayerRows:
    """K and V (or X) of one layer.

    Args:
        spread: the devices.
        layout: of blocks.
        n_heads: KV heads (X: 1).
        dtype: of rows in memory.
        spill_rows: so many tokens wait before they are written together.

    Attributes:
        layout, n_heads, dtype: as given.
        count: tokens, in memory and on devices.
        stored: of them, from the first on, written in whole blocks.
    """

    def __init__(self, spread: Spread, layout: RowLayout, n_heads: int, dtype: torch.dtype, spill_rows: int):
        self._spread, self.layout, self.n_heads, self.dtype = spread, layout, n_heads, dtype
        self._spill_rows = spill_rows
        self.runs: list[Run] = []
        self.count = self.stored = 0
        self._partial: Run | None = None  # of a block that is not full yet, where tokens are spilled sooner than that
        self._k = self._v = torch.empty(0)
        self._first = 0  # position of the first row in memory

    # --- rows come ---

    def append(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Adds new tokens, k [sequences, heads, n, d] and v (None: X), in memory; `spill` writes them when it is time."""
        n, held = k.shape[2], self.count - self._first
        if not self._k.numel() or held + n > self._k.shape[2]:
            room = max(2 * self._spill_rows, held + n)
            self._k = _grown(self._k, k, held, room + room // 2, self.dtype)
            self._v = self._k if v is None else _grown(self._v, v, held, room + room // 2, self.dtype)
        self._k[:, :, held : held + n] = k
        if v is not None:
            self._v[:, :, held : held + n] = v
        self.count += n

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        """Adds a chunk of new tokens and writes all whole blocks at once (prefill)."""
        rest = self.count - self.stored
        block_rows = self.layout.block_rows
        whole = (rest + k.shape[2]) // block_rows * block_rows
        if whole:
            self._keep_from(self.stored)
            taken = whole - rest
            rows_k, rows_v = k[:, :, :taken], None if v is None else v[:, :, :taken]
            if rest:  # what waited comes first
                rows_k = torch.cat([self._k[:, :, :rest], rows_k.to(self.dtype)], dim=2)
                rows_v = None if rows_v is None else torch.cat([self._v[:, :, :rest], rows_v.to(self.dtype)], dim=2)
            self._put(rows_k, rows_v)
            self.count = self._first = self.stored
            k, v = k[:, :, taken:], None if v is None else v[:, :, taken:]
        if k.shape[2]:
            self.append(k, v)

    def spill(self) -> None:
        """Writes what has waited long enough. Raises what a put raises; the rows are still in memory then."""
        waiting = self.count - self.stored
        whole = waiting // self.layout.block_rows * self.layout.block_rows
        if waiting >= self._spill_rows and whole:
            skip = self.stored - self._first
            rows = slice(skip, skip + whole)
            self._put(self._k[:, :, rows], None if self._v is self._k else self._v[:, :, rows])
        elif self._spill_rows < self.layout.block_rows and waiting % self._spill_rows == 0 and waiting:
            skip = self.stored - self._first
            rows = slice(skip, skip + waiting)
            run = self._run(self._k[:, :, rows], None if self._v is self._k else self._v[:, :, rows])
            self._drop_partial()
            self._partial = run

    def _put(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.runs.append(self._run(k, v))
        self.stored += k.shape[2]
        self._drop_partial()

    def _run(self, k: torch.Tensor, v: torch.Tensor | None) -> Run:
        return Run(self.stored, k.shape[2], self._spread.put(self.layout, k, v))

    def _drop_partial(self) -> None:
        if self._partial is not None:
            self._release(self._partial)
            self._partial = None

    # --- rows are looked at ---

    def covered(self) -> int:
        """Tokens, from the first on, that reads should ask for: those that are not in memory, and those whose write has ended."""
        end = 0
        for run in self.runs:
            if run.first_position >= self._first and not self._is_written(run):
                break
            end = run.first_position + run.n_rows
        return end

    def _is_written(self, run: Run) -> bool:
        return all(self._spread.is_written(device, segment) for parts in run.parts for device, segment in parts)

    def uses(self, end: int) -> list[list[Use]]:
        """For each device, the segments that hold the tokens before `end`."""
        found: list[list[Use]] = [[] for _ in range(len(self._spread.devices))]
        for run in self.runs:
            if run.first_position >= end:
                break
            for sequence, parts in enumerate(run.parts):
                for device, segment in parts:
                    found[device].append(Use(segment, sequence, run.n_rows, run.first_position))
        return found

    def tail(self, begin: int) -> Tail | None:
        """The tokens from `begin` on, which are in memory."""
        if begin >= self.count:
            return None
        return Tail(self._k, self._v, begin - self._first, self.count - begin, begin)

    def _keep_from(self, begin: int) -> None:
        """Forgets rows in memory before position `begin`."""
        drop = min(begin, self.count) - self._first
        if drop > 0:
            held = self.count - self._first - drop
            for rows in {id(self._k): self._k, id(self._v): self._v}.values():
                rows[:, :, :held] = rows[:, :, drop : drop + held].clone()
            self._first += drop

    def trim(self, begin: int) -> None:
        """Lets go of rows in memory before position `begin`, which must be stored."""
        self._keep_from(min(begin, self.stored))

    # --- rows are kept (see kept.py) ---

    def in_memory(self) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(k [sequences, heads, n, d], v, position of the first): copies of the rows in memory; v is k for X."""
        held = self.count - self._first
        if not self._k.numel():
            empty = torch.empty(self.sequences, self.n_heads, 0, self.layout.d, dtype=self.dtype)
            return empty, empty if self.layout.is_shared else empty.new_empty(*empty.shape[:3], self.layout.dv), self._first
        k = self._k[:, :, :held].clone()
        return k, k if self._v is self._k else self._v[:, :, :held].clone(), self._first

    def restore(self, runs: list[Run], count: int, stored: int, first: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Becomes what was kept."""
        self.runs, self.count, self.stored, self._first, self._k, self._v = runs, count, stored, first, k, v

    def to(self, device: torch.device) -> None:
        """Rows in memory wait there from now on."""
        is_shared = self._v is self._k
        self._k = self._k.to(device)
        self._v = self._k if is_shared else self._v.to(device)

    # --- rows go ---

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was: beams, repeats, a part of the batch. Stored rows are shared, not copied."""
        for run in [*self.runs, *([self._partial] if self._partial else [])]:
            old = run.parts
            run.parts = [list(old[i]) for i in sequences]
            for parts in run.parts:
                for _, segment in parts:
                    segment.references += 1
            for parts in old:
                for device, segment in parts:
                    self._drop(device, segment)
        if self._k.numel():
            index = torch.tensor(sequences, dtype=torch.int64, device=self._k.device)
            is_shared = self._v is self._k
            self._k = self._k.index_select(0, index)
            self._v = self._k if is_shared else self._v.index_select(0, index)

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
                self.runs[-1].n_rows = min(self.runs[-1].n_rows, count - self.runs[-1].first_position)
            self.stored = count
            # What is left of the last block is not written again: the next tokens begin a block of their own.

    def clear(self) -> None:
        """Forgets everything."""
        self._drop_partial()
        while self.runs:
            self._release(self.runs.pop())
        self.count = self.stored = self._first = 0
        self._k = self._v = torch.empty(0)

    def _release(self, run: Run) -> None:
        for parts in run.parts:
            for device, segment in parts:
                self._drop(device, segment)

    def _drop(self, device: int, segment: Segment) -> None:
        segment.references -= 1
        if segment.references == 0:
            self._spread.devices[device].release(segment)

    @property
    def sequences(self) -> int:
        return self._k.shape[0] if self._k.numel() else len(self.runs[0].parts) if self.runs else 0

    @property
    def memory_bytes(self) -> int:
        """Of rows in memory, and of checksums."""
        rows = {id(self._k): self._k, id(self._v): self._v}.values()
        sums = {id(segment): segment.sums.nbytes for run in self.runs for parts in run.parts for _, segment in parts}
        return sum(tensor.numel() * tensor.element_size() for tensor in rows) + sum(sums.values())


def _grown(old: torch.Tensor, like: torch.Tensor, held: int, room: int, dtype: torch.dtype) -> torch.Tensor:
    """Zeros [sequences, heads, room, width] that begin with the `held` rows of `old`."""
    new = torch.zeros((like.shape[0], like.shape[1], room, like.shape[3]), dtype=dtype, device=like.device)
    if held:
        new[:, :, :held] = old[:, :, :held]
    return new
