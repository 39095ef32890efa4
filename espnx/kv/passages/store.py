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
from ..rows import BatchRows, LayerRows
from ..striping import Storage
from ..visibility import Visibility
from .context import Context

#: Is given each layer's new rows: its number, K and V.
Tap = Callable[[int, torch.Tensor, torch.Tensor], None]


class RowsBehind(BatchRows):
    """A cache's own rows, which come after those of passages: lengths count these, too.

    Some tokens of the passages may have been computed anew: their rows are the first of the own
    ones, at the positions of the passages' tokens. They stand before any batch, and no length
    counts them again.

    Args:
        n_layers: with rows to keep.
        base: tokens of the passages.

    Attributes:
        n_anew: tokens that were computed anew.
    """

    def __init__(self, n_layers: int, base: int):
        super().__init__(n_layers)
        self._base, self.n_anew = base, 0
        self._anew: list[LayerRows | None] = []  # of K and V, to come back to

    def length(self, layer: int) -> int:
        return self._base + self.behind(layer)

    def behind(self, layer: int) -> int:
        """Tokens of a layer behind the passages."""
        return super().length(layer) - self.n_anew

    @property
    def sequences(self) -> int:
        is_empty = self.n_anew and not any(self.behind(i) for i in range(len(self.kv)))
        return 0 if is_empty else super().sequences

    @property
    def held(self) -> int:
        """Sequences, also where all there is was computed anew."""
        return super().sequences

    def stand(self) -> None:
        """All tokens that came so far are tokens of the passages, computed anew."""
        self.n_anew = super().length(0)
        self._anew = super().twin().kv if self.n_anew else []

    def clear(self) -> None:
        """Forgets the tokens behind the passages; the next batch may have another size."""
        super().clear()
        if self._anew:
            self.kv = self._anew
            self._anew = super().twin().kv


class ComposedStore(SsdCache):
    """`SsdCache` behind passages. Some tokens of these may be computed anew (`context.hide`).

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

    rows: RowsBehind

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
        self.rows = RowsBehind(n_layers, context.tokens)
        self.context, self.tap, self._keeps = context, tap, keeps
        self.last: torch.Tensor | None = None
        # of the pass under way: as the framework has it, and of the own rows alone
        self._seen: tuple[Visibility, Visibility] | None = None

    def check_sequences(self, count: int) -> None:
        super().check_sequences(count)
        self.context.texts.of(count, is_first=not self.rows.sequences)

    def stand(self) -> None:
        """All tokens that came so far are tokens of the passages, computed anew."""
        self.rows.stand()
        self.last = None
        self.context.mass.clear()
        self.context.texts.clear()

    def attend_kv(self, layer: int, step: Step) -> torch.Tensor:
        if self.tap is not None:
            self.tap(layer, step.k, step.v)
        n_sequences, begin = len(step.k), self.rows.behind(layer)
        if self.rows.n_anew and not begin and self.rows.held != n_sequences:
            super().select([0] * n_sequences)
        before = self.context.attend(layer, step, begin, self.last)
        seen = self._own(step.visibility, n_sequences, begin, step.k.shape[2])
        return super().attend_kv(layer, replace(step, visibility=seen, before=before))

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
            n_anew = self.rows.n_anew
            anew = torch.ones(n_sequences, n_anew, dtype=torch.bool)
            mask = torch.cat([anew, own], dim=1)
            self._seen = seen, Visibility.of(mask, n_sequences, n_anew + begin + new)
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
            super().crop(own + self.rows.n_anew)
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


class _PassingRows(LayerRows):
    """Rows that nobody will look at: a chunk attends over itself as it comes."""

    def write(self, k: torch.Tensor, v: torch.Tensor | None) -> None:
        self.count += k.shape[2]
