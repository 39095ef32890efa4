"""Any Hugging Face encoder in a folder, through transformers. Nothing is downloaded, and no code or
pickle from the folder is run."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from ..errors import InvalidInputError
from .checkpoints import (
    fingerprint,
    load_transformer,
    positions,
    special_ids,
    weight_files,
    wordpieces,
)
from .windows import WindowedEncoder, named, torch_dtype

WINDOW_TOKENS_DEFAULT = 512


class HuggingFaceEncoder(WindowedEncoder):
    """Token vectors (last hidden state) and a pooled vector of an encoder that ``AutoModel`` and
    ``AutoTokenizer`` can load, L2-normalised.

    Args:
        folder: with ``config.json``, the tokenizer's files and ``*.safetensors``.
        pooling: where ``cls`` comes from: ``"mean"`` of all last hidden states (special tokens
            included, as sentence-transformers does), or ``"cls"``, the first one. What the model
            was trained for stands on its card.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Results are on the CPU in any case.
        dtype: of the forward pass: ``"fp32"``, or ``"bf16"``, which differs, and is faster on
            hardware for it (docs/encoders.md).
        window_tokens: positions of a window, special tokens included. Default: what the model can
            hold, but at most 512. A longer text is encoded in windows and never truncated, see
            :class:`espnx.encoders.minilm.MiniLM`.
        batch_tokens: most positions in one forward pass.

    The tokens that the tokenizer adds of itself give no token vectors. ``name`` is made from a hash
    of the folder's config, tokenizer and weights (read once more for it) and the pooling: it does
    not change when the folder moves.

    Raises:
        MissingDependencyError: transformers is not installed.
        InvalidInputError: not such a folder, an encoder-decoder, or an argument out of range.
        FormatError: the files are damaged, or do not hold all of the model's weights.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        pooling: str = "mean",
        device: str = "cpu",
        dtype: str = "fp32",
        window_tokens: int | None = None,
        batch_tokens: int = 4096,
    ):
        if pooling not in ("mean", "cls"):
            raise InvalidInputError(
                "encoder: pooling", got=repr(pooling), expected='"mean" or "cls"'
            )
        if batch_tokens < 1:
            raise InvalidInputError(
                "encoder: batch_tokens", got=batch_tokens, expected="at least 1"
            )
        self.folder, self.pooling, self.batch_tokens = Path(folder), pooling, batch_tokens
        self.device, self.dtype = torch.device(device), torch_dtype(dtype)
        weights = weight_files(self.folder)
        self._model, self._tokenizer = load_transformer(self.folder, self.dtype)
        self._model.to(self.device).eval()
        config = self._model.config
        self.d_cls = self.dim = config.hidden_size
        self.name = named(
            f"hf-{config.model_type}@{fingerprint(self.folder, weights)[:12]}/{pooling}", self.dtype
        )
        self.pad_id = self._tokenizer.pad_token_id or 0
        self.prefix, self.suffix = special_ids(self._tokenizer, self.folder)
        if pooling == "cls" and not self.prefix:
            raise InvalidInputError(
                'encoder: pooling "cls"',
                got="a tokenizer that adds no first token",
                expected="one that does",
                fix='pooling="mean"',
            )
        limit = positions(config, self._tokenizer)
        self.window_tokens = (
            min(limit, WINDOW_TOKENS_DEFAULT) if window_tokens is None else window_tokens
        )
        least = len(self.prefix) + len(self.suffix) + 1
        if not least <= self.window_tokens <= limit:
            raise InvalidInputError(
                "encoder: window_tokens", got=self.window_tokens, expected=f"{least} to {limit}"
            )

    def wordpieces(self, texts: list[str]) -> Iterator[list[int]]:
        return wordpieces(self._tokenizer, texts)

    def hidden(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        if int(ids.max()) >= self._model.config.vocab_size:
            raise InvalidInputError(
                f"encode with {self.folder}",
                got=f"token id {int(ids.max())}",
                expected=f"ids below the model's {self._model.config.vocab_size}",
                fix="use the tokenizer that belongs to the model",
            )
        attended = torch.ones_like(ids) if mask is None else mask.to(torch.int64)
        output = self._model(input_ids=ids.to(self.device), attention_mask=attended.to(self.device))
        hidden: Tensor = output.last_hidden_state
        return hidden.to("cpu", torch.float32)
