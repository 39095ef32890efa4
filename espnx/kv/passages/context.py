"""What a prompt is composed of, for attention: passages that lie in a library or in memory, each at
its place in the prompt.

To a device a passage is a sequence of its own, with queries that were rotated back by how far the
passage stands from where it was computed (`rotation`). So one ticket of a layer holds all passages,
each is read once for all sequences of a batch, and what comes back is (o, lse) passage by passage:
their merging is exact, and their lse say how much attention each of them got. Nothing is written,
and no rows become one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from ... import errors
from ...device.interface import RowDevice, Segment, SegmentView
from ...ops.attention import Queries, RowsInMemory, attend_rows, merge
from ..attention import Before, Step
from ..shown import ShownAttention
from .extent import Extent, RowShape
from .mass import MassRecord
from .rotation import Rotation

#: Queries of so many bytes attend at a time: those of some passages, or of one. Each thread has
#: sums of its own, of that size, which together take at most `_SUMS_BYTES`.
_PART_BYTES, _SUMS_BYTES = 4 << 20, 64 << 20
#: Reads begin before it is known how many queries come: as for a question of so many tokens.
_EXPECTED_TOKENS = 64

#: K and V of a layer in memory: [1, heads, n, d] and [1, heads, n, dv].
Rows = tuple[torch.Tensor, torch.Tensor]


@dataclass(eq=False)
class Passage:
    """A text in a prompt.

    Attributes:
        tokens: how many rows it has in each layer.
        offset: how many positions it stands behind where it was computed.
        extent: in the library; None: its rows are in `rows`.
        rows: of each layer, where it is in memory.
        is_counted: it has a column of the attention mass.
    """

    tokens: int
    offset: int
    extent: Extent | None = None
    rows: Sequence[Rows] | None = None
    is_counted: bool = True


#: Computes a passage that was found damaged anew: its number in the prompt -> what replaces it.
Repair = Callable[[int, errors.StorageError], Passage]


class Context:
    """The passages of one prompt.

    Args:
        shape: of their rows.
        passages: in the order of the prompt, each behind the one before.
        rotations: of each layer; None: that layer's keys are not rotated.
        device: that has the library's data file open, for this context alone.
        threads: that compute on rows; 0: as many as PyTorch uses.

    Attributes:
        tokens: of all passages.
        mass: what attention they got.
        repair: what to do about damage; None: it is raised.
    """

    def __init__(
        self,
        shape: RowShape,
        passages: Sequence[Passage],
        rotations: Sequence[Rotation | None],
        device: RowDevice | None,
        threads: int = 0,
    ):
        self._shape, self._rotations, self._device = shape, rotations, device
        self.passages, self._threads = list(passages), threads
        self.tokens = sum(each.tokens for each in passages)
        self._counted = [number for number, each in enumerate(passages) if each.is_counted]
        self.mass = MassRecord(shape.layers, len(self._counted))
        self.repair: Repair | None = None
        self._bytes_before = 0 if device is None else device.stats().bytes_asked
        self._bytes_after = 0  # once it is closed
        self._segments = [self._lent(each) for each in self.passages]
        # by layer: which passages each ticket is of
        self._line = dict[int, list[tuple[list[int], int]]]()

    def _lent(self, passage: Passage) -> list[Segment]:
        """The segments of a passage, one for each layer; none where it is in memory."""
        if passage.extent is None or self._device is None:
            return []
        return self._device.space.lend(passage.extent.places(self._shape))

    @property
    def _stored(self) -> list[int]:
        """The passages that are read."""
        return [number for number, segments in enumerate(self._segments) if segments]

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that attention has asked for, in whole blocks."""
        if self._device is None:
            return self._bytes_after
        return self._device.stats().bytes_asked - self._bytes_before

    # --- reads ---

    def begin(self, heads: int) -> None:
        """Starts reading the first layers, for a question that will come. `heads`: of queries."""
        each_bytes = 4 * heads * _EXPECTED_TOKENS * self._widest
        for layer in range(self._shape.layers):
            self._look(layer, each_bytes)

    @property
    def _widest(self) -> int:
        return max(self._shape.layout.d, self._shape.layout.dv)

    def _most(self, each_bytes: int) -> int:
        """How many passages attend at a time, whose queries take so many bytes each."""
        threads = self._threads or torch.get_num_threads()
        return max(1, min(_PART_BYTES, _SUMS_BYTES // threads) // max(each_bytes, 1))

    def _look(self, layer: int, each_bytes: int) -> None:
        """Puts the reads of a layer in line."""
        stored, most = self._stored, self._most(each_bytes)
        if self._device is not None and stored:
            parts = [stored[i : i + most] for i in range(0, len(stored), most)]
            self._line[layer] = [
                (part, self._device.ahead(self._shape.layout, self._views(layer, part)))
                for part in parts
            ]

    def _views(self, layer: int, part: Sequence[int]) -> list[SegmentView]:
        return [
            SegmentView(self._segments[number][layer], i, self.passages[number].tokens, 0)
            for i, number in enumerate(part)
        ]

    def _take(self, layer: int, each_bytes: int) -> list[tuple[list[int], int]]:
        """The tickets of a layer, which are next in the device's line."""
        if self._device is None or not self._stored:
            return []
        line, most = self._line.get(layer), self._most(each_bytes)
        is_next = line is not None and self._device.front() == line[0][1]
        if line is None or not is_next or any(len(part) > most for part, _ in line):
            self.forget()
            for later in range(layer, self._shape.layers):
                self._look(later, each_bytes)
            line = self._line[layer]
        del self._line[layer]
        return line

    def forget(self) -> None:
        """Nothing that was read ahead is wanted any more."""
        self._line.clear()
        if self._device is not None:
            self._device.forget()

    # --- attention ---

    def attend(self, layer: int, step: Step, begin: int) -> Before | None:
        """Attention of a layer's queries over all passages; None where there are none.

        Args:
            step: the pass; its queries see all passages.
            begin: how many tokens of the cache's own stand before those of the pass.

        Raises:
            ReadError, ChecksumError, DeadlineExceededError: the reads in line are forgotten.
        """
        for _ in range(len(self.passages) + 1):
            try:
                return self._attend(layer, step, begin)
            except (errors.ChecksumError, errors.ReadError, errors.TruncatedFileError) as error:
                self.forget()
                found = self._damaged(error)
                if self.repair is None or not found:
                    raise
                made = self.repair(found[0], error)
                for number in found:  # a passage may stand in a prompt twice
                    self.replace(number, made)
        raise errors.StateError("passages that are damaged again and again", got=layer)

    def _damaged(self, error: errors.StorageError) -> list[int]:
        """The passages whose bytes an error is about."""
        at = error.offset_bytes
        hit = [] if at is None else [each.extent for each in self.passages if each.extent]
        found = next((extent for extent in hit if extent.has(at or 0)), None)
        return [
            number
            for number, each in enumerate(self.passages)
            if found is not None and each.extent is not None and each.extent.number == found.number
        ]

    def replace(self, number: int, made: Passage) -> None:
        """Puts another computation of the same text in a passage's place."""
        old = self.passages[number]
        self._release(number)
        self.passages[number] = Passage(
            old.tokens, old.offset, made.extent, made.rows, old.is_counted
        )
        self._segments[number] = self._lent(self.passages[number])

    def _attend(self, layer: int, step: Step, begin: int) -> Before | None:
        if not self.tokens:
            return None
        n_sequences, heads, n, d = step.q.shape
        groups = heads // self._shape.heads
        # [1, KV heads, sequences x group x n, d]: every query sees every passage, so that those of
        # a whole batch are the queries of one sequence
        q = (
            torch.empty(step.q.shape, dtype=torch.float32, device=step.q.device)
            .copy_(step.q)
            .mul_(step.scale)
            .view(n_sequences, self._shape.heads, groups, n, d)
            .transpose(0, 1)
            .reshape(1, self._shape.heads, n_sequences * groups * n, d)
        )
        each_bytes = 4 * q.shape[1] * q.shape[2] * self._widest
        lse_of = torch.full((len(self.passages), *q.shape[1:3]), float("-inf"), device=q.device)
        o = q.new_zeros(*q.shape[1:3], self._shape.layout.dv)
        lse = lse_of.new_full(q.shape[1:3], float("-inf"))
        for part, ticket in self._take(layer, each_bytes):
            found, sums = self._over(ticket, self._queries(layer, q, part, step))
            lse_of[part] = sums
            whole = sums.logsumexp(dim=0)
            weights = torch.exp(sums - whole)[..., None]
            o, lse = merge(o, lse, (weights * found).sum(dim=0), whole)
        for number, passage in enumerate(self.passages):
            if passage.rows is not None and passage.tokens:
                k, v = passage.rows[layer]
                rows = RowsInMemory(k.to(q.device), v.to(q.device), 0, passage.tokens, 0)
                queries = self._queries(layer, q, [number], step)
                part_o, part_lse = attend_rows(queries, rows, threads=self._threads)
                lse_of[number] = part_lse[0]
                o, lse = merge(o, lse, part_o[0], part_lse[0])
        if self._device is not None:
            self._look(layer, each_bytes)

        def by_sequence(values: torch.Tensor, lead: int) -> torch.Tensor:
            """[..., KV heads, sequences x group x n, ...] as [..., sequences, heads, n, ...]."""
            shape = (*values.shape[: lead + 1], n_sequences, groups, n, *values.shape[lead + 2 :])
            found = values.reshape(shape).transpose(lead, lead + 1)
            return found.reshape(
                *values.shape[:lead], n_sequences, heads, n, *values.shape[lead + 2 :]
            )

        parts = by_sequence(lse_of[self._counted], 1)
        return Before(
            by_sequence(o, 0), by_sequence(lse, 0), partial(self._note, layer, begin, parts)
        )

    def _queries(self, layer: int, q: torch.Tensor, part: Sequence[int], step: Step) -> Queries:
        """The queries for some passages, each rotated back by its passage's offset."""
        rotation, offsets = self._rotations[layer], [-self.passages[i].offset for i in part]
        if rotation is None or not any(offsets):
            turned = q.expand(len(part), -1, -1, -1).contiguous()
        else:
            turned = rotation.turned(q, offsets)
        return Queries(turned, self._shape.layout.dv, soft_cap=step.rules.soft_cap)

    def _over(self, ticket: int, queries: Queries) -> tuple[torch.Tensor, torch.Tensor]:
        """(o [passages, KV heads, n, dv], lse [passages, KV heads, n]) of a ticket. A device that
        cannot attend to these rows shows them."""
        device = self._device
        if device is None:
            raise errors.EngineClosedError("the passages of this cache are closed")
        if device.capabilities.lacks(queries, self._shape.layout):
            shown = ShownAttention(queries, self._threads)
            device.visit(ticket, partial(shown.show, self._shape.layout))
            return shown.o, shown.lse
        return device.attend(ticket, queries)

    def _note(
        self, layer: int, begin: int, parts: torch.Tensor, first: int, whole: torch.Tensor
    ) -> None:
        """Notes what share of attention each passage got. `parts`: the lse of each, float32
        [passages, sequences, heads, n]; `whole`: that over all rows, of some sequences."""
        sequences = range(first, first + len(whole))
        if len(self._counted):
            shares = torch.exp(parts[:, first : sequences.stop] - whole).mean(dim=2)
            self.mass.note(layer, begin, sequences, shares)

    def _release(self, number: int) -> None:
        if self._device is not None:
            for segment in self._segments[number]:
                self._device.release(segment)
        self._segments[number] = []

    def close(self) -> RowDevice | None:
        """Forgets the reads; returns the device, which nobody uses here any more."""
        if self._device is not None:
            self.forget()
            for number in range(len(self.passages)):
                self._release(number)
        self._bytes_after = self.bytes_read
        device, self._device = self._device, None
        return device
