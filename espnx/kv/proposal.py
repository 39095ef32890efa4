"""Tokens that may be rejected: several are proposed for each sequence of a batch, one pass over the
stored rows decides on all of them, and each sequence keeps its own number."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch

from .attention import Attention, Over, Step
from .draft.tier import Lost, MakeTier, Tier
from .rows import BatchRows, LayerRows


class Proposal:
    """A batch whose last tokens may be rejected: there is one from `SsdCache.propose` to `settle`.

    What passes add waits in memory until `accept` says which of it stands; nothing behind `settled`
    is written. Sequences may become of unlike lengths: who calls hides what is behind a sequence's
    end by the mask.

    Args:
        rows: of the batch.
        attention: over them.
        ends: tokens of each sequence.
        make_tier: of each layer's rows for drafts (`drafting`); None: there are none.
        most_tokens: new tokens of a pass, mostly; one over more reads its first rows twice.

    Attributes:
        ends: tokens of each sequence that stand.
        most_tokens: as given.
        is_drafting: passes are drafts (`drafting`).
        lost: the sequences for whose rows for drafts there was no memory.
    """

    def __init__(
        self,
        rows: BatchRows,
        attention: Attention,
        ends: list[int],
        make_tier: MakeTier | None,
        most_tokens: int,
    ):
        self._rows, self._attention, self._make_tier = rows, attention, make_tier
        self.ends, self.most_tokens = ends, most_tokens
        self.is_drafting, self.lost = False, Lost()
        self._tiers = dict[int, Tier]()  # by layer
        if make_tier is not None:  # what a draft says is to come again whenever writes end
            for each in rows.every:
                each.cover_by_position()

    @property
    def settled(self) -> int:
        """The first position that some sequence may still reject."""
        return min(self.ends)

    @property
    def has_tier(self) -> bool:
        """Whether a pass has brought rows for drafts."""
        return bool(self._tiers)

    @property
    def tier_bytes(self) -> int:
        """Bytes of rows for drafts."""
        return sum(tier.memory_bytes for tier in self._tiers.values())

    def add(self, layer: int, rows: LayerRows, step: Step) -> torch.Tensor:
        """Adds new tokens to a layer's K and V, and attends over all of them, in a draft over its
        rows for drafts instead: [sequences, heads, n, dv], in q's dtype. Raises what a device
        raises."""
        over: Over = self._attention.stored
        if self._make_tier is not None:
            rows.cover_by_position()  # those of a layer that has had none before
            if layer not in self._tiers:
                self._tiers[layer] = self._make_tier(self.lost)
            tier = self._tiers[layer]
            if self.is_drafting:
                return self._attention.draft(rows, step, tier)
            over = self._attention.filling(tier)
        return self._attention.add(rows, step, step.k, step.v, over, self.settled)

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Passes inside attend to the rows for drafts and to those in memory alone; what they add
        is forgotten at the end. Reads ahead go on."""
        counts = {rows: rows.count for rows in self._rows.every}
        self.is_drafting = True
        try:
            yield
        finally:
            self.is_drafting = False
            for rows, count in counts.items():
                rows.crop(count)

    def accept(self, n_new: int, kept: Sequence[int]) -> None:
        """Keeps the first `kept` of the last pass's `n_new` tokens of each sequence. Reads ahead
        continue: what they bring stands."""
        split = min(self._rows.x_rows, len(kept))
        ends = [end + n for end, n in zip(self.ends, kept, strict=True)]
        for every, own in ((self._rows.x, slice(split)), (self._rows.kv, slice(split, None))):
            for rows in every:
                if rows is not None:
                    rows.accept(self.ends[own], n_new, kept[own], max(ends))
        self.ends = ends  # the last, so that what an interrupt leaves half done does not stand
        for layer, tier in self._tiers.items():
            if (rows := self._rows.kv[layer]) is not None:
                self._attention.settle(rows, tier, min(ends))

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i of the batch has become what `sequences[i]` was."""
        self.ends = [self.ends[i] for i in sequences]
        self._rows.crop(max(self.ends))
        self.lost.select(sequences)
        for tier in self._tiers.values():
            tier.select(list(sequences))

    def twin(self, rows: BatchRows) -> Proposal:
        """The same for a twin of the batch's rows, without rows for drafts."""
        return Proposal(rows, self._attention, list(self.ends), None, self.most_tokens)

    def end(self) -> int:
        """Nothing may be rejected any more, and nothing stays in memory for drafts. Returns how
        many tokens all sequences have."""
        for rows in self._rows.every:
            rows.pinned = None
            rows.cover_what_is_written()
        return min(self.ends, default=0)
