"""The KV cache of a whole model on SSD: every layer's rows, what a forward pass adds to them, and
what becomes of the batch."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from .. import errors
from ..device.row_layout import RowLayout, format_of
from ..forks import check_own
from .attention import CHUNK_TOKENS, Attention, Step
from .draft.tier import MakeTier
from .options import CacheOptions
from .places import Places
from .proposal import Proposal
from .read_ahead import ReadAhead
from .rows import BatchRows, LayerRows
from .striping import Storage

_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


class SsdCache:
    """K and V of `n_layers` layers; of some sequences the input of both projections instead.

    Args:
        storage: a directory, or several (one for each SSD).
        n_layers: with rows to keep.
        options: how; None: as `CacheOptions` has it by default.
        names: of the data files, to keep them; None: their space returns when the process ends.

    Attributes:
        options: as given.
        rows: of the batch.
        places: the directories, and the devices in them.
        striped: the devices as one.
        ahead: their reads.
        attention: what attends to rows.
        proposal: what the last passes brought that may still be rejected (`propose`); None: all
            tokens stand, and all sequences have as many.
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
        self.rows = BatchRows(n_layers)
        self.places = Places(storage, options, names)
        self.striped = self.places.striped
        self.ahead = ReadAhead(self.striped, lambda: self.rows.every)
        self.attention = Attention(self.striped, self.ahead, options.threads)
        self._begun = 0  # tokens when the forward pass under way began
        self.proposal: Proposal | None = None

    def check_process(self) -> None:
        """Raises InvalidInputError in a process that was forked after the cache was made: it lacks
        threads that may hold locks."""
        check_own(self._process, "the KV cache", "make the cache in the process that uses it")

    def check_sequences(self, count: int) -> None:
        """Raises InvalidInputError where the next pass of so many sequences is another batch than
        the one whose rows are here."""
        held = self.rows.sequences
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
        return sum(rows.memory_bytes for rows in self.rows.every) + self.tier_bytes

    @property
    def tier_bytes(self) -> int:
        """Bytes of rows for drafts."""
        return 0 if self.proposal is None else self.proposal.tier_bytes

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
        split = min(self.rows.x_rows, n_sequences)
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
                        self.attend_kv(layer, step.part(split, n_sequences) if split else step)
                    )
            except BaseException:
                self.crop(self._begun)
                raise
            return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _prepare(self, layer: int, step: Step, split: int) -> None:
        """Devices, rows and space, for new tokens of a layer, of a batch of which `split` sequences
        keep X."""
        self.places.open_for(step.k.device)
        for rows in (self.rows.x[layer], self.rows.kv[layer]):
            if rows is not None:
                rows.to(step.k.device)
        if not self.rows.every:
            self._reserve(step, split)

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
                    * len(self.rows.kv)
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

    def _cut(self, rows: LayerRows, step: Step) -> None:
        """Decides how many sequences attend at a time over a layer's rows."""
        if self.proposal is None:
            self.attention.cut(rows, step)
        elif not self.proposal.is_drafting:  # which reads nothing
            # passes over one token to so many follow
            self.attention.cut(rows, step, least_tokens=self.proposal.most_tokens)

    def attend_kv(self, layer: int, step: Step) -> torch.Tensor:
        """`attend` for sequences that keep K and V."""
        rows = self.rows.kv[layer]
        if rows is None:
            layout = self._kv_layout(step)
            # numbers are rounded when they come, not when they are written, so that they do not
            # depend on when that is; those of int8 are, by row, when they are
            dtype = step.k.dtype if layout.format == "int8" else layout.dtype
            rows = self.rows.kv[layer] = self.make_rows(layout, step.k.shape[1], dtype)
        self._cut(rows, step)
        if self.proposal is not None:
            return self.proposal.add(layer, rows, step)
        return self.attention.add(rows, step, step.k, step.v, self.attention.stored)

    def _attend_x(self, layer: int, step: Step) -> torch.Tensor:
        if step.x is None or step.projection is None:
            raise errors.InvalidInputError(
                "X rows of this model", got="no input of its projections", fix="x_rows=0"
            )
        if not step.rules.are_plain:
            raise errors.InvalidInputError(
                "X rows of this model", got="a soft cap, slopes or a window", fix="x_rows=0"
            )
        rows = self.rows.x[layer]
        if rows is None:
            step.projection.check(step.x[0, :8], step.k[0, :, :8], step.v[0, :, :8], 0)
            rows = self.rows.x[layer] = self.make_rows(_x_layout(step.x), 1, step.x.dtype)
        self._cut(rows, step)
        is_absorbed = step.projection.finish is None and step.x.shape[1] < CHUNK_TOKENS
        over = self.attention.absorbed if is_absorbed else self.attention.recomputed
        settled = None if self.proposal is None else self.proposal.settled
        return self.attention.add(rows, step, step.x.unsqueeze(1), None, over, settled)

    def attend_again(self, layer: int, step: Step) -> torch.Tensor:
        """Attention of other queries over what `attend` added in this forward pass: of a layer that
        shares the K and V of this one."""
        n_sequences = step.k.shape[0]
        split = min(self.rows.x_rows, n_sequences)
        parts = []
        with torch.inference_mode(False), torch.no_grad():
            for rows, own, over in (
                (self.rows.x[layer], step.part(0, split), self.attention.recomputed),
                (self.rows.kv[layer], step.part(split, n_sequences), self.attention.stored),
            ):
                if rows is not None and len(own.k):
                    parts.append(self.attention.again(rows, own, over))
        return torch.cat(parts)

    # --- tokens that may be rejected ---

    def propose(
        self, make_tier: MakeTier | None = None, *, most_tokens: int = CHUNK_TOKENS
    ) -> None:
        """Lets the new tokens of each pass wait in memory from here on until `proposal.accept` says
        which of them stand.

        Args:
            make_tier, most_tokens: of `Proposal`.
        """
        longest = max(map(self.rows.length, range(len(self.rows.kv))))
        self.proposal = Proposal(
            self.rows,
            self.attention,
            [longest] * self.rows.sequences,
            make_tier,
            max(most_tokens, CHUNK_TOKENS),
        )
        self.attention.cut_ahead(self.proposal.most_tokens)

    def read_ahead(self, size_bytes: int) -> None:
        """Reads for the next pass go on, so many bytes ahead of all devices together, until that is
        said anew or nothing may be rejected any more (`settle`)."""
        self.striped.reach(size_bytes)  # first, so that what is put in line fills this window
        self.ahead.resume()

    def settle(self) -> None:
        """The end of `propose`: what not all sequences have is forgotten."""
        if (proposal := self.proposal) is not None:
            self.proposal = None
            self.crop(proposal.end())
            self.striped.reach(0)

    # --- the batch ---

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence."""
        self.ahead.forget()
        self.striped.forget_checks()
        self.rows.crop(tokens)

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was. See `BatchRows.select`."""
        self.rows.check_select(sequences)
        self.ahead.forget()
        self.rows.select(sequences)
        if self.proposal is not None:
            self.proposal.select(sequences)

    def set_aside(self) -> SetAside:
        """The rows as they are, to come back to by `bring_back`, whatever becomes of the batch."""
        rows = self.rows.twin()
        return SetAside(rows, None if self.proposal is None else self.proposal.twin(rows))

    def bring_back(self, aside: SetAside) -> None:
        """The rows become what they were."""
        self.clear()
        self.rows, self.proposal = aside.rows, aside.proposal

    def clear(self) -> None:
        """Forgets all tokens; the space is used again."""
        self.ahead.forget()
        self.striped.forget_checks()
        self.rows.clear()
        self.proposal = None
        self.striped.reach(0)
        self.attention.on_host.clear()

    def close(self) -> None:
        self.places.close()


@dataclass(frozen=True)
class SetAside:
    """A batch that is set aside. Attributes: as of `SsdCache`."""

    rows: BatchRows
    proposal: Proposal | None


def trim_heap() -> None:
    """Free memory between blocks in use returns to the system. A chunk of a prompt makes tensors of
    some MiB by the dozen, which leave a heap of holes: the next chunk would not fit all of its own
    into them, and the process would grow. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _x_layout(x: torch.Tensor) -> RowLayout:
    return RowLayout(format_of(x.dtype), x.shape[-1], x.shape[-1], is_shared=True)
