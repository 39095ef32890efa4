"""A model as its passages see it: what their rows are like, and passes over tokens."""

from __future__ import annotations

import inspect

import numpy as np
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from .... import errors
from ....kv.passages.extent import Identity
from ..cache import KVCache
from ..cache_argument import CACHE_NAMES, cache_name
from ..enable import enable_kv_cache
from .arguments import words_of
from .rotary import rotary_rows

#: Passages are computed by so many tokens at a time, in whole blocks.
CHUNK_TOKENS = 1024


class PassageModel:
    """A decoder that computes passages.

    Args:
        model: `enable_kv_cache` is called.

    Attributes:
        module: the model.
        rows: what its passages are kept as (`rotary_rows`), as the model is now.
        vocabulary: how many token ids it has.

    Raises InvalidInputError: the model's rows cannot stand elsewhere, or it is in training mode.
    """

    def __init__(self, model: PreTrainedModel):
        self.vocabulary = words_of(model)
        if model.training:
            raise errors.InvalidInputError(
                "passages of a model", got="a model in training mode", fix="model.eval()"
            )
        self.module = enable_kv_cache(model)
        self.rows = rotary_rows(model)
        self._heads = int(self._config.num_attention_heads)
        self._parameters = sum(each.numel() for each in model.base_model.parameters())

    def look_again(self) -> None:
        """The model has changed."""
        self.rows = rotary_rows(self.module)

    @property
    def _config(self) -> PreTrainedConfig:
        return self.module.config.get_text_config(decoder=True)

    @property
    def chunk_tokens(self) -> int:
        """Tokens that are computed at a time."""
        block = self.rows.shape.layout.block_rows
        return max(CHUNK_TOKENS // block, 1) * block

    @property
    def device(self) -> torch.device:
        """The device of its first weights, which token ids go to."""
        return next(
            (each.device for each in self.module.parameters() if not each.is_meta),
            torch.device("cpu"),
        )

    @property
    def is_streamed(self) -> bool:
        """Whether layers come from disk as they are run: a pass inside another would take them
        away."""
        return any(hasattr(module, "espnx_streamed") for module in self.module.modules())

    def check_length(self, tokens: int) -> None:
        """Raises InvalidInputError for passages that leave nothing of the model's positions."""
        most = getattr(self._config, "max_position_embeddings", None)
        if most is not None and tokens >= most:
            raise errors.InvalidInputError(
                "passages and their prefix",
                got=f"{tokens} tokens",
                expected=f"fewer than the model's {most} positions",
                fix="fewer passages, or shorter ones",
            )

    def flops(self, identity: Identity) -> float:
        """Floating-point operations that computing a passage takes: of its weights, and of
        attention over what stands before each token."""
        layout = self.rows.shape.layout
        seen = identity.tokens * (identity.first_position + identity.tokens / 2)
        attention = 2.0 * self.rows.shape.layers * self._heads * (layout.d + layout.dv) * seen
        return 2.0 * self._parameters * identity.tokens + attention

    def run(self, cache: KVCache, ids: np.ndarray, positions: torch.Tensor | None = None) -> None:
        """Runs the model's body over tokens int32 [n], at positions int64 [n]; None: behind what is
        in the cache."""
        body, device = self.module.base_model, self.device
        name = cache_name(inspect.signature(body.forward).parameters) or CACHE_NAMES[-1]
        given = {"input_ids": torch.from_numpy(ids.astype(np.int64))[None].to(device)}
        if positions is not None:
            given["position_ids"] = positions[None].to(device)
        with torch.no_grad():
            body(**given, use_cache=True, **{name: cache})

    def next_words(self, cache: KVCache, ids: np.ndarray) -> torch.Tensor:
        """Log-probabilities float64 [n, words] behind each of these tokens."""
        given = torch.from_numpy(ids.astype(np.int64))[None].to(self.device)
        name = cache_name(inspect.signature(self.module.forward).parameters) or CACHE_NAMES[-1]
        with torch.no_grad():
            logits = self.module(input_ids=given, use_cache=True, **{name: cache}).logits
        return logits[0].double().log_softmax(dim=-1).cpu()
