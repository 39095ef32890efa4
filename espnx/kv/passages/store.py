"""The rows of a prompt that is composed of passages: these, which are only looked at, and the
cache's own, which come after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ... import errors
from ...device.row_layout import RowLayout
from ..attention import Step
from ..cache import SetAside, SsdCache
from ..draft.tier import MakeTier
from ..options import CacheOptions
from ..rows import LayerRows
from ..striping import Storage
from ..visibility import Visibility
from .context import Context

#: Is given each layer's new rows: its number, K and V.
Tap = Callable[[int, torch.Tensor, torch.Tensor], None]


class ComposedStore(SsdCache):
    """`SsdCache` behind passages: its lengths count their tokens, its own rows come after them.

    Args:
        storage, n_layers, options: of `SsdCache`.
        context: the passages.
        tap: is given all new rows; None: nobody is.
        keeps: own rows stay; False: one pass of at least a chunk is all there will be, and its rows
            are for `tap` alone.
    """

    def __init__(
        self,
        storage: Storage,
        n_layers: int,
        options: CacheOptions,
        *,
        context: Context,
        tap: Tap | None = None,
        keeps: bool = True,
    ):
        super().__init__(storage, n_layers, options)
        self.context, self._tap, self._keeps = context, tap, keeps
        # of the pass under way: as the framework has it, and of the own rows alone
        self._seen: tuple[Visibility, Visibility] | None = None

    def length(self, layer: int) -> int:
        return self.context.tokens + super().length(layer)

    def _attend_kv(self, layer: int, step: Step) -> torch.Tensor:
        if self._tap is not None:
            self._tap(layer, step.k, step.v)
        begin = super().length(layer)
        before = self.context.attend(layer, step, begin)
        seen = self._own(step.visibility, len(step.k), begin + step.k.shape[2])
        return super()._attend_kv(layer, replace(step, visibility=seen, before=before))

    def _own(self, seen: Visibility, n_sequences: int, own: int) -> Visibility:
        """What is seen of the cache's own rows, by what is seen of all. Raises InvalidInputError
        where a passage is hidden: the positions of what follows would be others."""
        if seen.hidden is None:
            return seen
        if self._seen is None or self._seen[0] is not seen:
            base = self.context.tokens
            if bool(seen.hidden[:, :base].any()):
                raise errors.InvalidInputError(
                    "attention mask over composed passages",
                    got="padding among them",
                    expected=f"1 for their {base} tokens, padding behind them",
                )
            own_mask = ~seen.hidden[:, base:]
            self._seen = seen, Visibility.of(own_mask, n_sequences, own)
        return self._seen[1]

    def attend_again(self, layer: int, step: Step) -> torch.Tensor:
        raise errors.InvalidInputError(
            "composed passages", got=f"layer {layer}, whose rows other layers attend to, too"
        )

    def make_rows(self, layout: RowLayout, n_heads: int, dtype: torch.dtype) -> LayerRows:
        if self._keeps:
            return super().make_rows(layout, n_heads, dtype)
        return _PassingRows(self.striped, layout, n_heads, dtype, layout.block_rows)

    def propose(self, make_tier: MakeTier | None = None) -> None:
        raise errors.InvalidInputError("drafts behind composed passages", fix="no draft")

    # --- the batch ---

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence, passages included: none of theirs
        go."""
        own = max(tokens - self.context.tokens, 0)
        self.context.mass.crop(own)
        if own:
            super().crop(own)
        else:
            super().clear()

    def select(self, sequences: Sequence[int]) -> None:
        super().select(sequences)
        self.context.mass.select(sequences)

    def set_aside(self) -> SetAside:
        raise errors.InvalidInputError("drafts behind composed passages", fix="no draft")

    def clear(self) -> None:
        """Forgets the cache's own tokens; the passages stay."""
        super().clear()
        self.context.mass.clear()


class _PassingRows(LayerRows):
    """Rows that nobody will look at: a chunk attends over itself as it comes."""

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.count += k.shape[2]
