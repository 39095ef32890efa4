"""What prompts are composed of, for attention: passages that lie in a library or in memory, each at
its place in its prompt.

To a device a passage is a sequence of its own, with queries that were rotated back by how far the
passage stands from where it was computed (`rotation`). So one ticket of a layer holds all passages,
those of all prompts of a batch, each is read once for all that stand behind it, and what comes back
is (o, lse) passage by passage: their merging is exact, and their lse say how much attention each of
them got. Nothing is written, and no rows become one tensor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

import torch

from ... import errors
from ...device.interface import RowDevice, Segment, SegmentView
from ...device.several import files_of
from ...ops.attention import Queries, RowsInMemory, attend_rows, attention
from ..attention import CHUNK_TOKENS, Before, Step
from ..shown import ShownAttention
from .early import EarlyReads
from .extent import Extent, Rows, RowShape
from .mass import MassRecord
from .rotation import Rotation
from .texts import Spread, Texts

#: Queries of so many bytes attend at a time: those of some passages, or of one. Each thread has
#: sums of its own, of that size, which together take at most `_SUMS_BYTES`.
_PART_BYTES, _SUMS_BYTES = 4 << 20, 64 << 20


@dataclass(eq=False)
class Passage:
    """A text in a prompt.

    Attributes:
        tokens: how many rows it has in each layer.
        offset: how many positions it stands behind where it was computed.
        extent: in the library; None: its rows are in `rows`.
        rows: of each layer, where it is in memory.
        is_counted: it has a column of the attention mass.
        text: the prompt that it stands in, of those of a batch.
        hidden: bool [tokens]: which of them nobody attends to here, because their rows were
            computed anew; None: none.
    """

    tokens: int
    offset: int
    extent: Extent | None = None
    rows: Sequence[Rows] | None = None
    is_counted: bool = True
    text: int = 0
    hidden: torch.Tensor | None = None


#: Computes a passage that was found damaged anew: its number in the prompt -> what replaces it.
Renew = Callable[[int, errors.StorageError], Passage]


class Context:
    """The passages of a prompt, or of several that are a batch.

    Args:
        shape: of their rows.
        passages: prompt by prompt, in the order of each, each behind the one before.
        rotations: of each layer; None: that layer's keys are not rotated.
        devices: that have the library's data files open, for this context alone.
        threads: that compute on rows; 0: as many as PyTorch uses.
        early: reads of them that are under way; closed with the context.
        n_texts: prompts.

    Attributes:
        texts: the prompts, and which sequence of the batch is behind which.
        mass: what attention the passages got.
        early: as given.
        files: of the devices, and how they are read.
        renew: what to do about damage; None: it is raised.
        layers: attention is asked of so many, the first ones.
    """

    def __init__(
        self,
        shape: RowShape,
        passages: Sequence[Passage],
        rotations: Sequence[Rotation | None],
        devices: Sequence[RowDevice],
        threads: int = 0,
        early: EarlyReads | None = None,
        n_texts: int = 1,
    ):
        self._shape, self._rotations, self._devices = shape, rotations, list(devices)
        self.files = files_of(self._devices)
        self.passages, self._threads, self.early = list(passages), threads, early
        self.texts = Texts(
            n_texts, [(each.text, each.tokens, each.is_counted) for each in passages]
        )
        self.mass = MassRecord(shape.layers, self.texts.columns)
        self.renew: Renew | None = None
        self.layers = shape.layers
        self._bytes_before, self._bytes_after = self._asked, 0  # the latter once it is closed
        self._segments = [self._lent(each) for each in self.passages]
        self._visible: torch.Tensor | None = None
        # by layer: which device's ticket is of which passages
        self._line = dict[int, list[tuple[int, list[int], int]]]()
        # by how many attend at a time: the same, where every layer has the same passages to read
        self._shares = dict[int, list[tuple[int, list[int]]]]()

    @property
    def tokens(self) -> int:
        """Tokens of the longest prompt: the others are padded in front."""
        return self.texts.longest

    def _lent(self, passage: Passage) -> list[Segment]:
        """The segments of a passage, one for each layer; none where no blocks are to be read."""
        extent = passage.extent
        if extent is None or not self._devices or not extent.block_tokens:
            return []
        return self._devices[extent.directory].space.lend(extent.places(self._shape))

    @property
    def _asked(self) -> int:
        return sum(device.stats().bytes_asked for device in self._devices)

    @property
    def bytes_read(self) -> int:
        """Bytes of rows that attention has used or asked for, blocks as a whole."""
        read = self._asked - self._bytes_before if self._devices else self._bytes_after
        once = {each.extent.number: each.extent for each in self.passages if each.extent}
        packed = sum(each.packed_tokens for each in once.values()) * self._shape.token_bytes
        return read + packed + (0 if self.early is None else self.early.used_bytes)

    def hide(self, chosen: Sequence[torch.Tensor]) -> None:
        """Nobody attends to these tokens of each passage, bool [tokens], any more."""
        for passage, hidden in zip(self.passages, chosen, strict=True):
            passage.hidden = hidden if bool(hidden.any()) else None
        self._visible = None
        if any(each.hidden is not None for each in self.passages):
            self._visible = torch.ones(len(self.passages), self.tokens, dtype=torch.uint8)
            for number, each in enumerate(self.passages):
                if each.hidden is not None:
                    begin = self.texts.begins[number]
                    self._visible[number, begin : begin + each.tokens] = ~each.hidden

    # --- reads ---

    def begin(self, heads: int, tokens: int) -> None:
        """Starts reading the first layers, for a pass of so many tokens behind each prompt, those
        of all its sequences together. What is in line stays as it is: it is as of the last pass.
        `heads`: of queries."""
        if self._line:
            return
        each_bytes = 4 * heads * tokens * self._widest
        for layer in range(self.layers):
            self._look(layer, each_bytes)

    @property
    def _widest(self) -> int:
        return max(self._shape.layout.d, self._shape.layout.dv)

    def _most(self, each_bytes: int) -> int:
        """How many passages attend at a time, whose queries take so many bytes each."""
        threads = self._threads or torch.get_num_threads()
        return max(1, min(_PART_BYTES, _SUMS_BYTES // threads) // max(each_bytes, 1))

    def _parts(self, numbers: Sequence[int], most: int) -> list[list[int]]:
        """Passages that attend together. One that several prompts have is never in two parts, so
        that it is read once."""
        parts = list[list[int]]()
        for _, group in groupby(sorted(numbers, key=self._extent_of), key=self._extent_of):
            alike = list(group)
            if parts and len(parts[-1]) + len(alike) <= most:
                parts[-1] += alike
            else:
                parts.append(alike)
        return parts

    def _extent_of(self, number: int) -> int:
        extent = self.passages[number].extent
        return -1 if extent is None else extent.number

    def _stored(self, layer: int, taken: Sequence[int] = ()) -> list[list[int]]:
        """The passages of which blocks are to be read in a layer, by device: those of `taken` (by
        extent) and those that are on their way are not."""
        found: list[list[int]] = [[] for _ in self._devices]
        for number, segments in enumerate(self._segments):
            extent = self.passages[number].extent
            if extent is None or not segments or extent.number in taken:
                continue
            if self.early is None or not self.early.holds(extent.number, layer):
                found[extent.directory].append(number)
        return found

    def _look(self, layer: int, each_bytes: int, taken: Sequence[int] = ()) -> None:
        """Puts the reads of a layer in line."""
        layout = self._shape.layout
        self._line[layer] = [
            (number, part, self._devices[number].ahead(layout, self._views(layer, part)))
            for number, part in self._shared_out(layer, self._most(each_bytes), taken)
        ]

    def _shared_out(
        self, layer: int, most: int, taken: Sequence[int]
    ) -> list[tuple[int, list[int]]]:
        """The parts of a layer, each with its device."""
        if self.early is None and most in self._shares:
            return self._shares[most]
        found = [
            (number, part)
            for number, stored in enumerate(self._stored(layer, taken))
            for part in self._parts(stored, most)
        ]
        if self.early is None:
            self._shares[most] = found
        return found

    def _views(self, layer: int, part: Sequence[int]) -> list[SegmentView]:
        """The first position of each passage is that in its prompt, by which queries see it."""
        return [
            SegmentView(
                self._segments[number][layer],
                i,
                self._segments[number][layer].n_rows,
                self.texts.begins[number],
            )
            for i, number in enumerate(part)
        ]

    def _take(
        self, layer: int, each_bytes: int, taken: Sequence[int]
    ) -> list[tuple[int, list[int], int]]:
        """The tickets of a layer, which are next in the devices' lines."""
        line, most = self._line.get(layer), self._most(each_bytes)
        first = {number: ticket for number, _, ticket in reversed(line or [])}
        is_next = all(self._devices[number].front() == each for number, each in first.items())
        if line is None or not is_next or any(not self._fits(part, most) for _, part, _ in line):
            self.forget()
            self._look(layer, each_bytes, taken)
            for later in range(layer + 1, self.layers):
                self._look(later, each_bytes)
            line = self._line[layer]
        del self._line[layer]
        return line

    def _fits(self, part: Sequence[int], most: int) -> bool:
        return len(part) <= most or len({self._extent_of(number) for number in part}) == 1

    def forget(self) -> None:
        """Nothing that was read ahead is wanted any more."""
        self._line.clear()
        for device in self._devices:
            device.forget()

    # --- attention ---

    def attend(
        self, layer: int, step: Step, begin: int, last: torch.Tensor | None = None
    ) -> Before | None:
        """Attention of a layer's queries over all passages; None where there are none.

        Args:
            step: the pass.
            begin: how many tokens of the cache's own stand before those of the pass.
            last: int64 [n]: the last position that each token of the pass sees of the passages, of
                one prompt; None: all.

        Raises:
            ReadError, ChecksumError, DeadlineExceededError: the reads in line are forgotten.
            InvalidInputError: the sequences are no batch of these prompts.
        """
        for _ in range(len(self.passages) + 1):
            try:
                return self._attend(layer, step, begin, last)
            except (errors.ChecksumError, errors.ReadError, errors.TruncatedFileError) as error:
                self.forget()
                if not (found := self._damaged(error)):
                    raise
                self.renew_passage(found[0], error)
        raise errors.StateError("passages that are damaged again and again", got=layer)

    def _damaged(self, error: errors.StorageError) -> list[int]:
        """The passages whose bytes an error is about."""
        at, paths = error.offset_bytes, [device.space.path for device in self._devices]
        extents = [each.extent for each in self.passages if each.extent]
        found = next(
            (
                each.number
                for each in extents
                if at is not None
                and each.has(at)
                and (len(paths) == 1 or paths[each.directory] == str(error.path))
            ),
            None,
        )
        return [
            number
            for number, each in enumerate(self.passages)
            if found is not None and each.extent is not None and each.extent.number == found
        ]

    def renew_passage(self, number: int, error: errors.StorageError) -> None:
        """Puts a computation anew in the place of a passage that is damaged. Raises the error where
        nobody computes it."""
        if self.renew is None:
            raise error
        extent, made = self._extent_of(number), self.renew(number, error)
        for each in range(len(self.passages)):  # it may stand in a prompt twice
            if self._extent_of(each) == extent:
                self.replace(each, made)

    def replace(self, number: int, made: Passage) -> None:
        """Puts another computation of the same text in a passage's place."""
        self._release(number)
        self._shares.clear()
        self.passages[number] = replace(self.passages[number], extent=made.extent, rows=made.rows)
        self._segments[number] = self._lent(self.passages[number])

    def _attend(
        self, layer: int, step: Step, begin: int, last: torch.Tensor | None
    ) -> Before | None:
        if not self.tokens:
            return None
        n_sequences, heads, n, d = step.q.shape
        kv_heads, groups = self._shape.heads, heads // self._shape.heads
        spread = self.texts.spread(n_sequences, is_first=begin == 0)
        q = (
            torch.empty(step.q.shape, dtype=torch.float32, device=step.q.device)
            .copy_(step.q)
            .mul_(step.scale)
            .view(n_sequences, kv_heads, groups * n, d)
        )
        sums = _Sums(self, layer, spread.gathered(q), step, last, groups * spread.most)
        each_bytes = 4 * sums.q.shape[1] * sums.q.shape[2] * self._widest
        taken = self._attend_early(layer, sums)
        for device, part, ticket in self._take(layer, each_bytes, taken):
            sums.add(part, *self._over(device, ticket, sums.queries(part)))
        self._attend_memory(layer, sums, self._most(each_bytes))
        # A token will be followed by another, which asks for the same rows. A question may be all
        # that there is; if not, its answer's first token asks, and they come all the same.
        if n < CHUNK_TOKENS:
            self._look(layer, each_bytes)
        return self._before(layer, begin, spread, sums, (n_sequences, heads, n))

    def _before(
        self, layer: int, begin: int, spread: Spread, sums: _Sums, shape: tuple[int, int, int]
    ) -> Before:
        """What passages gave each sequence; `shape`: of its log-sum-exp."""
        kv_heads, most = self._shape.heads, spread.most
        o = sums.o.view(len(sums.o), kv_heads, most, -1, sums.o.shape[-1])
        lse = sums.lse.view(len(sums.lse), kv_heads, most, -1)
        each = sums.lse_of.view(len(sums.lse_of), kv_heads, most, -1)
        parts = each[spread.uses, :, spread.slots].masked_fill(
            (spread.uses < 0)[..., None, None].to(each.device), float("-inf")
        )
        note = partial(self._note, layer, begin, parts.reshape(len(parts), *shape))
        return Before(
            o[spread.text_of, :, spread.slots].reshape(*shape, -1),
            lse[spread.text_of, :, spread.slots].reshape(shape),
            note if sums.last is None else lambda first, whole: None,
        )

    def _attend_early(self, layer: int, sums: _Sums) -> list[int]:
        """Over what was read before the prompt was composed. Returns the extents."""
        layout, taken = self._shape.layout, list[int]()
        if self.early is None:
            return taken
        for part in self._parts([n for n, each in enumerate(self._segments) if each], 1):
            extent = self.passages[part[0]].extent
            if extent is None or not self.early.holds(extent.number, layer):
                continue
            memory = self.early.take(extent.number, layer)
            if memory is None:  # the line lacks it
                self.forget()
                continue
            taken.append(extent.number)
            queries, tokens = sums.queries(part), extent.block_tokens
            memory = memory.to(queries.q.device)
            if queries.soft_cap is None and queries.visible is None and sums.last is None:
                blocks = layout.blocks(tokens)
                offsets = torch.arange(self._shape.heads * blocks) * layout.block_bytes
                found = attention(
                    queries.q,
                    memory,
                    offsets.view(1, -1, blocks).expand(len(part), -1, -1).contiguous(),
                    torch.full((len(part),), tokens),
                    block_rows=layout.block_rows,
                    format=layout.format,
                    scale=1.0,
                    dv=layout.dv,
                    threads=self._threads or None,
                )
                sums.add(part, *found)
                continue
            k, v = layout.unpack(memory.view(1, self._shape.heads, -1, layout.block_bytes), tokens)
            for number in part:
                self._attend_rows(sums, number, (k.contiguous(), v.contiguous()), 0)
        return taken

    def _attend_memory(self, layer: int, sums: _Sums, most: int) -> None:
        """Over rows that wait in memory: those of passages for which there was no room, and what
        lies packed in front of extents, of several passages at a time."""
        packed = list[int]()
        for number, passage in enumerate(self.passages):
            extent = passage.extent
            if passage.rows is not None and passage.tokens:
                self._attend_rows(sums, number, passage.rows[layer], 0)
            elif extent is not None and extent.packed:
                if sums.last is None:
                    packed.append(number)
                else:
                    self._attend_rows(sums, number, extent.packed[layer], extent.block_tokens)
        for begin in range(0, len(packed), most):
            part = packed[begin : begin + most]
            rows, visible = self._packed(layer, part, sums.q.device)
            queries = replace(sums.queries(part), visible=visible)
            sums.add(part, *attend_rows(queries, rows, threads=self._threads))

    def _attend_rows(self, sums: _Sums, number: int, rows: Rows, skip: int) -> None:
        """Over rows in memory of a passage, which are those behind its first `skip` tokens."""
        k, v = (each.to(sums.q.device) for each in rows)
        first = self.texts.begins[number] + skip
        found = attend_rows(
            sums.queries([number]), RowsInMemory(k, v, 0, k.shape[2], first), threads=self._threads
        )
        sums.add([number], *found)

    def _packed(
        self, layer: int, part: Sequence[int], device: torch.device
    ) -> tuple[RowsInMemory, torch.Tensor]:
        """Packed rows of several passages, with zeros behind those of shorter ones, and which are
        seen: uint8 [passages, rows]."""
        extents = [extent for number in part if (extent := self.passages[number].extent)]
        most = max(each.packed_tokens for each in extents)
        layout, heads = self._shape.layout, self._shape.heads
        k, v = (
            torch.zeros(len(part), heads, most, width, dtype=layout.dtype)
            for width in (layout.d, layout.dv)
        )
        visible = torch.zeros(len(part), most, dtype=torch.uint8)
        for i, (number, extent) in enumerate(zip(part, extents, strict=True)):
            n, hidden = extent.packed_tokens, self.passages[number].hidden
            k[i, :, :n], v[i, :, :n] = (each[0] for each in extent.packed[layer])
            visible[i, :n] = 1 if hidden is None else ~hidden[extent.block_tokens :]
        return RowsInMemory(k.to(device), v.to(device), 0, most, 0), visible

    def _over(
        self, number: int, ticket: int, queries: Queries
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(o [passages, KV heads, n, dv], lse [passages, KV heads, n]) of a device's ticket. A
        device that cannot attend to these rows shows them."""
        device = self._devices[number]
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
        if len(parts):
            shares = torch.exp(parts[:, first : sequences.stop] - whole)
            self.mass.note(layer, begin, sequences, shares)

    def _release(self, number: int) -> None:
        extent = self.passages[number].extent
        for segment in self._segments[number]:
            if extent is not None:
                self._devices[extent.directory].release(segment)
        self._segments[number] = []

    def close(self) -> None:
        """Forgets the reads; nobody uses the devices here any more. May be called again."""
        if self._devices:
            self.forget()
            for number in range(len(self.passages)):
                self._release(number)
            self._bytes_after = self._asked - self._bytes_before
        if self.early is not None:
            self.early.close()
        self._devices = []


class _Sums:
    """What the queries of one layer found so far.

    Args:
        context, layer, step, last: as of `Context.attend`.
        q: float32 [prompts, KV heads, n, d]: the queries of each.
        repeats: how often the tokens of the pass stand in n.

    Attributes:
        o, lse: over all passages of each prompt, [prompts, KV heads, n, dv] and [..., n].
        lse_of: of each passage, [passages, KV heads, n].
    """

    def __init__(
        self,
        context: Context,
        layer: int,
        q: torch.Tensor,
        step: Step,
        last: torch.Tensor | None,
        repeats: int,
    ):
        self._context, self._soft_cap, self.q = context, step.rules.soft_cap, q
        self._rotation = context._rotations[layer]
        self.last = None if last is None else last.repeat(repeats)
        nothing, dv = float("-inf"), context._shape.layout.dv
        self.lse_of = torch.full((len(context.passages), *q.shape[1:3]), nothing, device=q.device)
        self.o = q.new_zeros(*q.shape[:3], dv)
        self.lse = self.o.new_full(q.shape[:3], nothing)

    def queries(self, part: Sequence[int]) -> Queries:
        """The queries for some passages, each rotated back by its passage's offset."""
        passages = [self._context.passages[number] for number in part]
        rotation, offsets = self._rotation, [-each.offset for each in passages]
        q = self.q[[each.text for each in passages]] if len(self.q) > 1 else self.q
        if rotation is None or not any(offsets):
            turned = q.expand(len(part), -1, -1, -1).contiguous()
        else:
            turned = rotation.turned(q, offsets)
        every = self._context._visible
        is_hidden = every is not None and any(each.hidden is not None for each in passages)
        return Queries(
            turned,
            self._context._shape.layout.dv,
            self.last,
            visible=every[list(part)] if every is not None and is_hidden else None,
            soft_cap=self._soft_cap,
        )

    def add(self, part: Sequence[int], o: torch.Tensor, lse: torch.Tensor) -> None:
        """Some rows of these passages gave o [passages, KV heads, n, dv], which is used up, and lse
        [passages, KV heads, n]."""
        self.lse_of[list(part)] = torch.logaddexp(self.lse_of[list(part)], lse)
        by_text = dict[int, list[int]]()
        for i, number in enumerate(part):
            by_text.setdefault(self._context.passages[number].text, []).append(i)
        for text, mine in by_text.items():
            sums = lse if len(mine) == len(part) else lse[mine]
            found = o if len(mine) == len(part) else o[mine]
            whole = torch.logaddexp(self.lse[text], sums.logsumexp(dim=0))
            peak = torch.where(whole == -torch.inf, 0.0, whole)
            self.o[text].mul_(torch.exp(self.lse[text] - peak)[..., None])
            self.o[text] += found.mul_(torch.exp(sums - peak)[..., None]).sum(dim=0)
            self.lse[text] = whole
