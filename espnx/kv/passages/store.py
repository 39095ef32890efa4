"""The rows of a prompt that is composed of passages: these, which are only looked at, and the
cache's own, which come after them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from ... import errors
from ...device.row_layout import RowLayout
from ..attention import CHUNK_TOKENS, Step
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

    Some tokens of the passages may be computed anew (`context.hide`): their rows are the first of
    the cache's own, at the positions of the passages' tokens, and no length counts them again.

    Args:
        storage, n_layers, options: of `SsdCache`.
        context: the passages.
        tap: is given all new rows; None: nobody is.
        keeps: own rows stay; False: one pass of at least a chunk is all there will be, and its rows
            are for `tap` alone.

    Attributes:
        context, tap: as given.
        last: int64 [n]: while tokens of the passages are computed anew, the last position of the
            passages that each token of the pass sees; None: all.
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
        self.context, self.tap, self._keeps = context, tap, keeps
        self.last: torch.Tensor | None = None
        # tokens that were computed anew, and their rows, to come back to
        self._n_anew, self._anew = 0, None
        # of the pass under way: as the framework has it, and of the own rows alone
        self._seen: tuple[Visibility, Visibility] | None = None

    _anew: SetAside | None

    def length(self, layer: int) -> int:
        return self.context.tokens + super().length(layer) - self._n_anew

    @property
    def sequences(self) -> int:
        """See `SsdCache`. Rows that were computed anew stand before any batch."""
        is_empty = self._n_anew and not any(self._own_tokens(i) for i in range(len(self.kv)))
        return 0 if is_empty else super().sequences

    def check_sequences(self, count: int) -> None:
        super().check_sequences(count)
        self.context.texts.of(count, is_first=not self.sequences)

    def _own_tokens(self, layer: int) -> int:
        """Tokens behind the passages."""
        return super().length(layer) - self._n_anew

    def stand(self) -> None:
        """All tokens that came so far are tokens of the passages, computed anew."""
        self._n_anew, self.last = super().length(0), None
        self._anew = super().set_aside() if self._n_anew else None
        self.context.mass.clear()
        self.context.texts.clear()

    def _attend_kv(self, layer: int, step: Step) -> torch.Tensor:
        if self.tap is not None:
            self.tap(layer, step.k, step.v)
        n_sequences, begin = len(step.k), self._own_tokens(layer)
        if self._n_anew and not begin and super().sequences != n_sequences:
            super().select([0] * n_sequences)
        before = self.context.attend(layer, step, begin, self.last)
        seen = self._own(step.visibility, n_sequences, begin, step.k.shape[2])
        return super()._attend_kv(layer, replace(step, visibility=seen, before=before))

    def _own(self, seen: Visibility, n_sequences: int, begin: int, new: int) -> Visibility:
        """What is seen of the cache's own rows, by what is seen of all. Raises InvalidInputError
        where a passage is hidden, or what is no prompt's is not: positions would be others."""
        padding = self.context.texts.padding(n_sequences, is_first=begin == 0)
        if seen.hidden is None and not any(padding):
            return seen
        if self._seen is None or self._seen[0] is not seen:
            base = self.context.tokens
            wanted = torch.arange(base) < torch.tensor(padding)[:, None]
            if seen.hidden is None or not torch.equal(seen.hidden[:, :base], wanted):
                raise errors.InvalidInputError(
                    "attention mask over composed passages",
                    got="none" if seen.hidden is None else "padding among them",
                    expected="0 in front of shorter prompts, 1 for tokens of passages, any padding "
                    "of questions behind them",
                    fix="the attention_mask of cache.prompt(questions)",
                )
            own = ~seen.hidden[:, base:]
            anew = torch.ones(n_sequences, self._n_anew, dtype=torch.bool)
            mask = torch.cat([anew, own], dim=1)
            self._seen = seen, Visibility.of(mask, n_sequences, self._n_anew + begin + new)
        return self._seen[1]

    def attend_again(self, layer: int, step: Step) -> torch.Tensor:
        raise errors.InvalidInputError(
            "composed passages", got=f"layer {layer}, whose rows other layers attend to, too"
        )

    def make_rows(self, layout: RowLayout, n_heads: int, dtype: torch.dtype) -> LayerRows:
        if self._keeps:
            return super().make_rows(layout, n_heads, dtype)
        return _PassingRows(self.striped, layout, n_heads, dtype, layout.block_rows)

    def propose(
        self, make_tier: MakeTier | None = None, *, most_tokens: int = CHUNK_TOKENS
    ) -> None:
        raise errors.InvalidInputError("drafts behind composed passages", fix="draft=None")

    # --- the batch ---

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence, passages included: none of theirs
        go."""
        own = max(tokens - self.context.tokens, 0)
        self.context.mass.crop(own)
        if own:
            super().crop(own + self._n_anew)
        else:
            self._empty()

    def select(self, sequences: Sequence[int]) -> None:
        super().select(sequences)
        self.context.mass.select(sequences)
        self.context.texts.select(sequences)

    def set_aside(self) -> SetAside:
        raise errors.InvalidInputError("drafts behind composed passages", fix="draft=None")

    def clear(self) -> None:
        """Forgets the cache's own tokens; the passages stay."""
        self._empty()
        self.context.mass.clear()

    def _empty(self) -> None:
        """No tokens are left behind the passages; the next batch may have another size."""
        super().clear()
        self.context.texts.clear()
        if self._anew is not None:
            self.kv = self._anew.kv
            self._anew = super().set_aside()


class _PassingRows(LayerRows):
    """Rows that nobody will look at: a chunk attends over itself as it comes."""

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.count += k.shape[2]
