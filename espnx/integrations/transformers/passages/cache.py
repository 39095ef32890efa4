"""`PassageCache`: a `KVCache` behind passages that lie in a library."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import numpy as np
import torch
from transformers import PreTrainedConfig

from .... import errors
from ....kv.cache import SsdCache
from ....kv.options import CacheOptions
from ....kv.passages.context import Context
from ....kv.passages.store import ComposedStore, Tap
from ....kv.striping import Storage
from ..cache import KVCache


class PassageCache(KVCache):
    """What `PassageKV.compose` returns: `past_key_values` of a prompt whose first tokens are
    passages. Their rows are read from the library as they are attended to; the rows of what comes
    after them are the cache's own. A context manager.

    All sequences of a batch stand behind the same passages. A batch is padded behind them, in front
    of the question, if at all.

    Args:
        config: of the model.
        storage: where own rows go that do not wait in memory.
        context: the passages.
        ids: int32 [n], their tokens.
        reused: what came from where, see `reused`.
        tap, keeps: of `ComposedStore`.
        release: called once, when the cache is closed or gone.
        **options: of `KVCache`.

    Attributes:
        passages: tokens of each passage, in the order of the prompt.

    Raises (from the model's forward pass): as `KVCache`. A passage that turns out to be damaged is
    computed anew meanwhile, and `reused` says so.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        storage: str | os.PathLike[str],
        context: Context,
        ids: np.ndarray,
        reused: dict[str, Any],
        *,
        tap: Tap | None = None,
        keeps: bool = True,
        release: Callable[[], None] = lambda: None,
        **options: Any,
    ):
        self._context, self._tap, self._keeps, self._reused = context, tap, keeps, reused
        self._ids = torch.from_numpy(ids.astype(np.int64))[None]
        self.passages = [each.tokens for each in context.passages if each.is_counted]
        super().__init__(config, storage, x_rows=0, **options)
        self._end = weakref.finalize(self, release)
        self._set_text()

    def _make_store(
        self, directories: Storage, layers: int, options: CacheOptions, names: list[str] | None
    ) -> SsdCache:
        return ComposedStore(
            directories, layers, options, context=self._context, tap=self._tap, keeps=self._keeps
        )

    def _set_text(self) -> None:
        if self._ids.numel():
            self.passes.text.tokens = self._ids.clone()

    @property
    def composed_tokens(self) -> int:
        """Tokens of the prefix and the passages."""
        return self._context.tokens

    @property
    def reused(self) -> dict[str, Any]:
        """What this prompt's rows came from: ``tokens`` in all, of which ``reused`` were in the
        library, ``computed`` were computed for it (and are there from now on), and ``uncached`` of
        these are in memory, because there was no room; ``damaged`` passages were found damaged and
        computed anew; ``bytes`` of rows were read so far."""
        return self._reused | {"bytes": self._context.bytes_read}

    def prompt(self, input_ids: torch.Tensor) -> dict[str, torch.Tensor]:
        """The arguments of `generate` for what follows the passages.

        Args:
            input_ids: int64 [sequences, n]: the question, or its first n tokens.

        Returns:
            ``input_ids`` with the passages' tokens before them, and the ``attention_mask``.
        """
        ids = torch.cat([self._ids.expand(len(input_ids), -1).to(input_ids), input_ids], dim=1)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}

    def passage_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """Which share of their attention the tokens behind the passages paid to each of them.

        Args:
            begin, end: of these tokens, counted from the first behind the passages: the question's,
                then those that were generated and fed back. The last question token is the one that
                the first generated token comes from. Of a very long text the last tokens are known
                (`espnx.kv.passages.mass.KEPT_TOKENS`).

        Returns:
            float32 [sequences, layers, passages]: the mean over those tokens and over heads; zeros
            where there are none. The rest of each sum is what the prefix and the tokens themselves
            got. It says where the model looked, and proves nothing.
        """
        first, shares = self._context.mass.shares()
        chosen = shares[:, :, max(begin - first, 0) : None if end is None else max(end - first, 0)]
        if not chosen.numel():
            sequences, layers = max(self.store.sequences, 1), len(self.layers)
            return torch.zeros(sequences, layers, len(self.passages))
        return chosen.mean(dim=2)

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens; those of passages stay. See `KVCache.crop`.

        Raises InvalidInputError: some of them are a passage's.
        """
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
        is_behind = input_ids.shape[1] > base and bool(
            (input_ids[:, :base].cpu() == self._ids).all()
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

    def stats(self) -> dict[str, Any]:
        return super().stats() | {"passages": len(self.passages), "reused": self.reused}

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


def check_ids(what: str, ids: Sequence[int] | torch.Tensor | np.ndarray) -> np.ndarray:
    """Token ids as int32 [n]. Raises InvalidInputError."""
    try:
        found = np.asarray(ids.cpu() if isinstance(ids, torch.Tensor) else ids)
    except (TypeError, ValueError) as error:
        raise errors.InvalidInputError(what, got=repr(ids)[:60], expected="token ids") from error
    if found.ndim == 2 and found.shape[0] == 1:
        found = found[0]
    is_whole = found.size == 0 or np.issubdtype(found.dtype, np.integer)
    if found.ndim != 1 or not is_whole:
        raise errors.InvalidInputError(
            what, got=f"{found.dtype} {list(found.shape)}", expected="whole numbers [n]"
        )
    if found.size and not 0 <= int(found.min()) <= int(found.max()) < 1 << 31:
        raise errors.InvalidInputError(what, got=f"{found.min()} to {found.max()}", expected="ids")
    return found.astype(np.int32)
