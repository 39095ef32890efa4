"""The KV cache of a whole model on SSD: every layer's rows, what a forward pass adds to them, and
what becomes of the batch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from .. import errors
from ..device.row_layout import RowLayout, format_of
from ..forks import check_own
from .attention import CHUNK_TOKENS, Attention, Over, Step
from .draft.tier import Lost, MakeTier, Tier
from .options import CacheOptions
from .places import Places
from .read_ahead import ReadAhead
from .rows import LayerRows
from .striping import Storage

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


class SsdCache:
    """K and V of `n_layers` layers; of the first `x_rows` sequences the input of both projections
    instead.

    Args:
        storage: a directory, or several (one for each SSD).
        n_layers: with rows to keep.
        options: how; None: as `CacheOptions` has it by default.
        names: of the data files, to keep them; None: their space returns when the process ends.

    Attributes:
        options: as given.
        x_rows: how many sequences keep X; set before the first tokens come.
        kv, x: `LayerRows` by layer, made when their first rows come.
        places: the directories, and the devices in them.
        striped: the devices as one.
        ahead: their reads.
        attention: what attends to rows.
        ends: tokens of each sequence that stand, while those of a pass may be rejected (`propose`);
            None: they stand, and all sequences have as many.
        is_drafting: passes are drafts (`drafting`).
        lost: the sequences for whose rows for drafts there was no memory.
    """

    def __init__(
        self,
        storage: Storage,
        n_layers: int,
        options: CacheOptions | None = None,
        *,
        names: Sequence[str] | None = None,
    ):
        self.options = options = options or CacheOptions()
        self._process = os.getpid()
        self.places = Places(storage, options, names)
        self.striped = self.places.striped
        self.ahead = ReadAhead(self.striped, lambda: self.every)
        self.attention = Attention(self.striped, self.ahead, options.threads)
        self.x_rows = 0
        self.kv: list[LayerRows | None] = [None] * n_layers
        self.x: list[LayerRows | None] = [None] * n_layers
        self._begun = 0  # tokens when the forward pass under way began
        self._most_tokens = 1  # of a pass that decodes
        self.ends: list[int] | None = None
        self.is_drafting, self.lost = False, Lost()
        self._make_tier: MakeTier | None = None
        self._tiers = dict[int, Tier]()  # by layer

    def check_process(self) -> None:
        """Raises InvalidInputError in a process that was forked after the cache was made: it lacks
        threads that may hold locks."""
        check_own(self._process, "the KV cache", "make the cache in the process that uses it")

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

    def check_sequences(self, count: int) -> None:
        """Raises InvalidInputError where the next pass of so many sequences is another batch than
        the one whose rows are here."""
        held = self.sequences
        if held and held != count:
            raise errors.InvalidInputError(
                "sequences of the batch",
                got=count,
                expected=f"{held}, as in the cache",
                fix="reset()",
            )

    @property
    def memory_bytes(self) -> int:
        """Bytes of rows that wait in memory, of rows for drafts, and of checksums."""
        return sum(rows.memory_bytes for rows in self.every) + self.tier_bytes

    @property
    def tier_bytes(self) -> int:
        """Bytes of rows for drafts."""
        return sum(tier.memory_bytes for tier in self._tiers.values())

    # --- forward passes ---

    def begin(self, tokens: int) -> None:
        """A forward pass begins with so many tokens in the cache; where it fails, the cache returns
        to them. Rows in a GPU's memory are checked by the pass's `end`, all at once."""
        self._begun = tokens
        self.striped.forget_checks()
        self.striped.checks_later = True

    def end(self) -> None:
        """A forward pass has ended: what it gave counts when this has returned.

        Raises ChecksumError: rows that it looked at are damaged; its tokens are forgotten in every
        layer then, and the cache can be used as it was before.
        """
        self.striped.checks_later = False
        try:
            self.striped.check()
        except BaseException:
            self.crop(self._begun)
            raise
        if self.attention.leaves_holes:
            self.attention.leaves_holes = False
            trim_heap()

    def attend(self, layer: int, step: Step) -> torch.Tensor:
        """Adds new tokens to a layer and attends over all of them: [sequences, heads, n, dv], in
        q's dtype. A query that may see nothing gets zeros. Between `begin` and `end` the result
        counts when `end` has returned.

        Raises:
            DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: the tokens
                of this forward pass are forgotten in every layer then, and the cache can be used as
                it was before.
            InvalidInputError: rows that cannot be attended to so, or a process that was forked
                after the cache was made.
        """
        self.check_process()
        n_sequences = step.k.shape[0]
        split = min(self.x_rows, n_sequences)
        # Rows outlive the mode in which they came: tensors of inference mode could not be changed
        # outside of it.
        with torch.inference_mode(False), torch.no_grad():
            try:
                self._prepare(layer, step, split)
                parts = []
                if split:
                    parts.append(self._attend_x(layer, step.part(0, split)))
                if split < n_sequences:
                    parts.append(
                        self._attend_kv(layer, step.part(split, n_sequences) if split else step)
                    )
            except BaseException:
                self.crop(self._begun)
                raise
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prepare(self, layer: int, step: Step, split: int) -> None:
        """Devices, rows and space, for new tokens of a layer, of a batch of which `split` sequences
        keep X."""
        self.places.open_for(step.k.device)
        for rows in (self.x[layer], self.kv[layer]):
            if rows is not None:
                rows.to(step.k.device)
        if all(rows is None for rows in (*self.kv, *self.x)):
            self._reserve(step, split)

    def _cut(self, rows: LayerRows, step: Step) -> None:
        """Decides how many sequences attend at a time over a layer's rows."""
        if not self.is_drafting:  # which reads nothing
            most = 1 if self.ends is None else self._most_tokens  # passes over 1 to so many follow
            self.attention.cut(rows, step, least_tokens=most)

    def _attend_kv(self, layer: int, step: Step) -> torch.Tensor:
        rows = self.kv[layer]
        if rows is None:
            layout = self._kv_layout(step)
            # numbers are rounded when they come, not when they are written, so that they do not
            # depend on when that is; those of int8 are, by row, when they are
            dtype = step.k.dtype if layout.format == "int8" else layout.dtype
            rows = self.kv[layer] = self.make_rows(layout, step.k.shape[1], dtype)
            if self._make_tier is not None:
                rows.cover_by_position()
        self._cut(rows, step)
        over: Over = self.attention.stored
        if self._make_tier is not None:
            if layer not in self._tiers:
                self._tiers[layer] = self._make_tier(self.lost)
            tier = self._tiers[layer]
            if self.is_drafting:
                return self.attention.draft(rows, step, tier)
            over = self.attention.filling(tier)
        return self.attention.add(rows, step, step.k, step.v, over, self._settled)

    def _attend_x(self, layer: int, step: Step) -> torch.Tensor:
        if step.x is None or step.projection is None:
            raise errors.InvalidInputError(
                "X rows of this model", got="no input of its projections", fix="x_rows=0"
            )
        if not step.rules.are_plain:
            raise errors.InvalidInputError(
                "X rows of this model", got="a soft cap, slopes or a window", fix="x_rows=0"
            )
        rows = self.x[layer]
        if rows is None:
            step.projection.check(step.x[0, :8], step.k[0, :, :8], step.v[0, :, :8], 0)
            rows = self.x[layer] = self.make_rows(_x_layout(step.x), 1, step.x.dtype)
        self._cut(rows, step)
        is_absorbed = step.projection.finish is None and step.x.shape[1] < CHUNK_TOKENS
        over = self.attention.absorbed if is_absorbed else self.attention.recomputed
        return self.attention.add(rows, step, step.x.unsqueeze(1), None, over, self._settled)

    def attend_again(self, layer: int, step: Step) -> torch.Tensor:
        """Attention of other queries over what `attend` added in this forward pass: of a layer that
        shares the K and V of this one."""
        n_sequences = step.k.shape[0]
        split = min(self.x_rows, n_sequences)
        parts = []
        with torch.inference_mode(False), torch.no_grad():
            for rows, own, over in (
                (self.x[layer], step.part(0, split), self.attention.recomputed),
                (self.kv[layer], step.part(split, n_sequences), self.attention.stored),
            ):
                if rows is not None and len(own.k):
                    parts.append(self.attention.again(rows, own, over))
        return torch.cat(parts)

    # --- tokens that may be rejected ---

    @property
    def _settled(self) -> int | None:
        """The first token that some sequence may still reject; None: all stand."""
        return None if self.ends is None else min(self.ends)

    def propose(
        self, make_tier: MakeTier | None = None, *, most_tokens: int = CHUNK_TOKENS
    ) -> None:
        """Lets the new tokens of each pass wait in memory from here on until `accept` says which of
        them stand. Sequences may become of unlike lengths then: who calls hides what is behind a
        sequence's end by the mask.

        Args:
            make_tier: of each layer's rows for drafts (`drafting`); None: there are none.
            most_tokens: new tokens of a pass, mostly; one over more reads its first rows twice.
        """
        self.ends = [max(map(self.length, range(len(self.kv))))] * self.sequences
        self._most_tokens = max(most_tokens, CHUNK_TOKENS)
        self.attention.cut_ahead(self._most_tokens)
        self._make_tier = make_tier
        self.lost.sequences.clear()
        if make_tier is not None:  # what a draft says is to come again whenever writes end
            for rows in self.every:
                rows.cover_by_position()

    @property
    def has_tier(self) -> bool:
        """Whether a pass has brought rows for drafts."""
        return bool(self._tiers)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Passes inside attend to the rows for drafts and to those in memory alone;
        what they add is forgotten at the end. Reads ahead go on."""
        counts = {rows: rows.count for rows in self.every}
        self.is_drafting = True
        try:
            yield
        finally:
            self.is_drafting = False
            for rows, count in counts.items():
                rows.crop(count)

    def read_ahead(self, size_bytes: int) -> None:
        """Reads for the next pass go on, so many bytes ahead of all devices together, until that is
        said anew or nothing may be rejected any more (`settle`)."""
        self.striped.reach(size_bytes)  # first, so that what is put in line fills this window
        self.ahead.resume()

    def accept(self, n_new: int, kept: Sequence[int]) -> None:
        """Keeps the first `kept` of the last pass's `n_new` tokens of each sequence. Reads ahead
        continue: what they bring stands."""
        before, split = self.ends or [], min(self.x_rows, len(kept))
        ends = [end + n for end, n in zip(before, kept, strict=True)]
        for every, own in ((self.x, slice(split)), (self.kv, slice(split, None))):
            for rows in every:
                if rows is not None:
                    rows.accept(before[own], n_new, kept[own], max(ends))
        self.ends = ends  # the last, so that what an interrupt leaves half done does not stand
        for layer, tier in self._tiers.items():
            if (rows := self.kv[layer]) is not None:
                self.attention.settle(rows, tier, min(ends))

    def settle(self) -> None:
        """The end of `propose`: what not all sequences have is forgotten."""
        if self.ends is not None:
            end, self.ends = min(self.ends, default=0), None
            self._drop_tiers()
            self.crop(end)
            self.striped.reach(0)

    def _drop_tiers(self) -> None:
        self._make_tier = None
        self._tiers.clear()
        self.lost.sequences.clear()
        for rows in self.every:
            rows.pinned = None
            rows.cover_what_is_written()

    # --- rows ---

    def _reserve(self, step: Step, split: int) -> None:
        """Space for the declared capacity, so that a full disk shows before any work."""
        if self.options.capacity_tokens is None:
            return
        total = 0
        for layout, streams in (
            (self._kv_layout(step), (len(step.k) - split) * step.k.shape[1]),
            (_x_layout(step.x) if split and step.x is not None else None, split),
        ):
            if layout is not None:
                total += (
                    layout.blocks(self.options.capacity_tokens)
                    * layout.block_bytes
                    * streams
                    * len(self.kv)
                )
        for device in self.striped.devices:
            device.space.reserve(-(-total // self.striped.count))

    def _kv_layout(self, step: Step) -> RowLayout:
        return RowLayout(
            self.options.format or format_of(step.k.dtype), step.k.shape[-1], step.v.shape[-1]
        )

    def make_rows(self, layout: RowLayout, n_heads: int, dtype: torch.dtype) -> LayerRows:
        """Empty rows with this cache's options."""
        return LayerRows(
            self.striped, layout, n_heads, dtype, self.options.spill_interval or layout.block_rows
        )

    # --- the batch ---

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence."""
        self.ahead.forget()
        self.striped.forget_checks()
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
        self.ahead.forget()
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
        if self.ends is not None:
            self.ends = [self.ends[i] for i in sequences]
            for rows in self.every:
                rows.crop(max(self.ends))
            self.lost.select(sequences)
            for tier in self._tiers.values():
                tier.select(list(sequences))

    def set_aside(self) -> SetAside:
        """The rows as they are, to come back to by `bring_back`, whatever becomes of the batch."""
        kv, x = (
            [None if rows is None else rows.twin() for rows in every] for every in (self.kv, self.x)
        )
        return SetAside(kv, x, self.x_rows, None if self.ends is None else list(self.ends))

    def bring_back(self, aside: SetAside) -> None:
        """The rows become what they were."""
        self.clear()
        self.kv, self.x, self.x_rows, self.ends = aside.kv, aside.x, aside.x_rows, aside.ends

    def clear(self) -> None:
        """Forgets all tokens; the space is used again."""
        self.ahead.forget()
        self.striped.forget_checks()
        for rows in self.every:
            rows.clear()
        self.kv, self.x = [None] * len(self.kv), [None] * len(self.x)
        self.ends = None
        self._drop_tiers()
        self.striped.reach(0)
        self.attention.on_host.clear()

    def close(self) -> None:
        self.places.close()


@dataclass(frozen=True)
class SetAside:
    """The rows of a batch that is set aside. Attributes: as of `SsdCache`."""

    kv: list[LayerRows | None]
    x: list[LayerRows | None]
    x_rows: int
    ends: list[int] | None


def trim_heap() -> None:
    """Free memory between blocks in use returns to the system. A chunk of a prompt makes tensors of
    some MiB by the dozen, which leave a heap of holes: the next chunk would not fit all of its own
    into them, and the process would grow. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _x_layout(x: torch.Tensor) -> RowLayout:
    return RowLayout(format_of(x.dtype), x.shape[-1], x.shape[-1], is_shared=True)
