"""`PassageCache`: a `KVCache` behind passages that lie in a library."""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedConfig

from .... import errors
from ....checks import check_whole
from ....kv.cache import SsdCache
from ....kv.options import CacheOptions
from ....kv.passages.context import Context
from ....kv.passages.mass import check_heads
from ....kv.passages.store import ComposedStore, Tap
from ....kv.striping import Storage
from ....storage.engine import paths_of, reasons_of
from ..cache import KVCache

#: What token ids may come as.
_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


class PassageCache(KVCache):
    """What `PassageKV.compose` returns: `past_key_values` of a prompt whose first tokens are
    passages. Their rows are read from the library as they are attended to; the rows of what comes
    after them are the cache's own. A context manager.

    All sequences of a batch stand behind the same passages, or each behind its own (`compose` of
    several prompts). Questions are padded behind passages, in front of the question, if at all;
    shorter prompts of a batch in front of the prefix (`prompt` does it).

    Args:
        config: of the model.
        storage: where own rows go that do not wait in memory.
        context: the passages.
        ids: int32 [prompts, n], their tokens, padded in front.
        is_token: bool [prompts, n]: which are not padding.
        reused: what came from where, see `reused`.
        tap, keeps: of `ComposedStore`.
        release: called once, when the cache is closed or gone.
        **options: of `KVCache`.

    Attributes:
        passages: tokens of each passage, in the order of the prompt, of several prompts those of
            each, one after the other.

    Raises (from the model's forward pass): as `KVCache`. A passage that turns out to be damaged is
    computed anew meanwhile, and `reused` says so.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        storage: Storage,
        context: Context,
        ids: np.ndarray,
        is_token: np.ndarray,
        reused: dict[str, Any],
        *,
        tap: Tap | None = None,
        keeps: bool = True,
        release: Callable[[], None] = lambda: None,
        **options: Any,
    ):
        self._context, self._tap, self._keeps, self._reused = context, tap, keeps, reused
        text = config.get_text_config(decoder=True)
        self._heads, self._words = int(text.num_attention_heads), int(text.vocab_size)
        self._ids = torch.from_numpy(ids.astype(np.int64))
        self._is_token = torch.from_numpy(is_token)
        self.passages = [each.tokens for each in context.passages if each.is_counted]
        super().__init__(config, storage, x_rows=0, **options)
        self._end = weakref.finalize(self, release)
        self._set_text()

    store: ComposedStore

    def _make_store(self, storage: Storage, n_layers: int, options: CacheOptions) -> SsdCache:
        return ComposedStore(
            storage, n_layers, options, context=self._context, tap=self._tap, keeps=self._keeps
        )

    def _set_text(self) -> None:
        if self._ids.numel():
            self.passes.text.tokens = self._ids.clone()
            self.passes.text.hidden = None if self._is_token.all() else ~self._is_token

    def forget_text(self) -> None:
        """The tokens that came so far are passages' tokens."""
        self.passes.text.clear()
        self._set_text()

    @property
    def composed_tokens(self) -> int:
        """Tokens of the prefix and the passages, of the longest prompt."""
        return self._context.tokens

    @property
    def reused(self) -> dict[str, Any]:
        """What this prompt's rows came from, those of all prompts of a batch together.

        Tokens: ``tokens`` in all, of which ``reused`` were in the library, ``computed`` were
        computed for it (and are there from now on), and ``uncached`` of these are in memory,
        because there was no room; ``repaired`` were computed anew at their place (`repair`,
        `blend`), and with `blend` ``deviation_left`` is the part of the squared deviation of layer
        1 that is left. ``damaged`` passages were found damaged and computed anew.

        Bytes: ``bytes`` of rows were read so far, of which the reads of ``prefetched`` had begun
        before the prompt was composed (`PassageKV.prefetch`), and those of ``hidden`` had ended;
        ``wasted`` were read ahead for nothing.
        """
        early = self._context.early
        found = self._reused | {"bytes": self._context.bytes_read}
        if early is not None:
            found |= {
                "prefetched": early.used_bytes,
                "hidden": early.arrived_bytes,
                "wasted": early.wasted_bytes,
            }
        return found

    def begin(self, question_tokens: int) -> None:
        """Starts reading the first layers of the passages, for a pass of so many tokens behind each
        prompt, those of all its sequences together. `prompt` does so by itself. Raises
        InvalidInputError."""
        check_whole("question_tokens", question_tokens, 1)
        self._context.begin(self._heads, question_tokens)

    def prompt(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> dict[str, torch.Tensor]:
        """The arguments of `generate` for what follows the passages, whose reads begin.

        Args:
            input_ids: int64 [sequences, n]: the questions, or their first n tokens: any number of
                them behind one prompt, as many behind each of several, one after the other.
            attention_mask: [sequences, n]: 0 where a question is padded; None: nowhere.

        Returns:
            ``input_ids`` with the passages' tokens before them, and the ``attention_mask``.

        Raises InvalidInputError: no token ids of the model, fewer sequences than prompts, or no
        multiple of them.
        """
        count = len(self._ids)
        self._check_question(input_ids, attention_mask)
        if not len(input_ids) or len(input_ids) % count:
            raise errors.InvalidInputError(
                "questions behind composed prompts",
                got=len(input_ids),
                expected=f"{count}, or a multiple of it",
            )
        repeats = len(input_ids) // count
        ids, is_token = (
            each.repeat_interleave(repeats, dim=0) for each in (self._ids, self._is_token)
        )
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        if input_ids.numel():
            self.begin(repeats * input_ids.shape[1])
        return {
            "input_ids": torch.cat([ids.to(input_ids), input_ids], dim=1),
            "attention_mask": torch.cat([is_token.to(mask), mask], dim=1),
        }

    def _check_question(self, ids: object, mask: object) -> None:
        """Raises InvalidInputError."""
        what = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, torch.Tensor) else repr(ids)[:60]
        if not isinstance(ids, torch.Tensor) or ids.dim() != 2 or ids.dtype not in _WHOLE:
            raise errors.InvalidInputError(
                "input_ids",
                got=what,
                expected="a tensor of token ids [sequences, n]",
                fix="tokenizer(question, return_tensors='pt').input_ids",
            )
        if ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < self._words:
            raise errors.InvalidInputError(
                "input_ids",
                got=f"{int(ids.min())} to {int(ids.max())}",
                expected=f"ids from 0 to {self._words - 1}",
            )
        if mask is not None and (not isinstance(mask, torch.Tensor) or mask.shape != ids.shape):
            raise errors.InvalidInputError(
                "attention_mask",
                got=f"{list(mask.shape)}" if isinstance(mask, torch.Tensor) else repr(mask)[:60],
                expected=f"a tensor {list(ids.shape)}, as input_ids",
            )

    def passage_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Which share of their attention the tokens behind the passages paid to each of them.

        Args:
            begin, end: of these tokens, counted from the first behind the passages: the question's,
                then those that were generated and fed back. The last question token is the one that
                the first generated token comes from. Of a very long text the last tokens are known
                (`espnx.kv.passages.mass.KEPT_TOKENS`).

        Returns:
            float32 [sequences, layers, passages]: the mean over those tokens and over heads; zeros
            where there are none. The rest of each sum is what the prefix, the tokens themselves and
            those that were computed anew (`repair`, `blend`) got. Of several prompts a column is
            the n-th passage of each. It says where the model looked, and proves nothing.
        """
        _check_span(begin, end)
        first, shares = self._context.mass.shares()
        chosen = shares[:, :, max(begin - first, 0) : None if end is None else max(end - first, 0)]
        if not chosen.numel():
            sequences, layers = max(self.store.rows.sequences, 1), len(self.layers)
            return torch.zeros(sequences, layers, self._context.texts.columns)
        return chosen.mean(dim=2)

    def watch_heads(self, heads: Sequence[tuple[int, int]] | None = None) -> None:
        """Keeps the attention of some heads by themselves from here on, for `head_mass`.

        Args:
            heads: (layer, query head), from 0; None: all of them, of which a few hundred tokens are
                kept where a model is large (`espnx.kv.passages.mass.KEPT_HEAD_BYTES`).

        Raises InvalidInputError for a head that the model does not have.
        """
        layers = len(self.layers)
        if heads is None:
            heads = list(itertools.product(range(layers), range(self._heads)))
        self._context.mass.watch(check_heads(heads, layers, self._heads))

    def head_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """`passage_mass` by head and by token.

        Args:
            begin, end: as of `passage_mass`.

        Returns:
            float32 [sequences, heads, tokens, passages], of the heads of `watch_heads`, in its
            order, and of those of the tokens that came since it was called and are still known.
        """
        _check_span(begin, end)
        first, shares = self._context.mass.head_shares()
        return shares[:, :, max(begin - first, 0) : None if end is None else max(end - first, 0)]

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; those of passages stay. See `KVCache.crop`.

        Raises InvalidInputError: some of them are a passage's, or this is no number of tokens.
        """
        if not isinstance(tokens_to_remove, int) or isinstance(tokens_to_remove, bool):
            raise errors.InvalidInputError(
                "crop", got=repr(tokens_to_remove)[:60], expected="minus a number of tokens"
            )
        own = self.get_seq_length() - self._context.tokens
        if -tokens_to_remove > own and tokens_to_remove > -self.get_seq_length():
            raise errors.InvalidInputError(
                f"crop by {-tokens_to_remove} tokens",
                got=f"{own} behind the passages",
                expected="these, or less",
                fix="compose other passages",
            )
        super().crop(tokens_to_remove)

    def reset(self) -> None:
        """Forgets all but the passages."""
        super().reset()
        self._set_text()

    def reuse_prefix(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> int:
        """See `KVCache.reuse_prefix`. Raises InvalidInputError where a prompt does not begin with
        the passages."""
        base = self._context.tokens
        self._check_question(input_ids, attention_mask)
        is_behind = input_ids.shape[1] > base and bool(
            len(input_ids) % len(self._ids) == 0
            and (input_ids[:, :base].cpu() == self._rows(len(input_ids))).all()
        )
        if not is_behind:
            raise errors.InvalidInputError(
                "a prompt behind composed passages",
                got=f"{list(input_ids.shape)} tokens that do not begin with them",
                expected=f"their {base} tokens, and more",
                fix="cache.prompt(question)",
            )
        if self.get_seq_length() == base:
            return base
        kept = super().reuse_prefix(input_ids, attention_mask)
        if kept < base:
            self.reset()
        return max(kept, base)

    def _rows(self, n_sequences: int) -> torch.Tensor:
        return self._ids.repeat_interleave(n_sequences // len(self._ids), dim=0)

    def stats(self) -> dict[str, Any]:
        """Counters of the cache's own rows, as `KVCache.stats` has them. The paths are those of all
        rows that it reads, the library's first; also ``passages``, how many, and `reused`."""
        files = [*self._context.files, *self.store.striped.path_report()]
        return super().stats() | {
            "effective_path": paths_of(file.effective_path for file in files),
            "fallback_reason": reasons_of(file.fallback_reason for file in files),
            "passages": len(self.passages),
            "reused": self.reused,
        }

    def close(self) -> None:
        """Ends all I/O, and leaves the passages to whoever evicts them."""
        super().close()
        self._end()

    def __enter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        if self.is_closed:
            return "<PassageCache: closed>"
        own = self.get_seq_length() - self._context.tokens
        return (
            f"<PassageCache: {own:,} tokens behind {len(self.passages)} passages of "
            f"{self._context.tokens:,} tokens>"
        )


def _check_span(begin: object, end: object) -> None:
    """Tokens behind the passages. Raises InvalidInputError."""
    check_whole("begin", begin, 0)
    if end is not None:
        check_whole("end", end, 0)
