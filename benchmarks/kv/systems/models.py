"""Models and cached rows of the KV benchmark: random weights from a configuration, and the same
seeded K and V for every system."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from espnx.errors import FormatError, InvalidInputError
from espnx.models import DEMO, demo_model

from . import smollm2

_VOCABULARY = {"vocab_size": 50272}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "opt-125m": {
        "model_type": "opt",
        "hidden_size": 768,
        "num_hidden_layers": 12,
        "num_attention_heads": 12,
        "ffn_dim": 3072,
        "word_embed_proj_dim": 768,
        **_VOCABULARY,
    },
    "opt-1.3b": {
        "model_type": "opt",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 32,
        "ffn_dim": 8192,
        "word_embed_proj_dim": 2048,
        **_VOCABULARY,
    },
    "llama-small": {
        "model_type": "llama",
        "hidden_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "intermediate_size": 2816,
        "vocab_size": 32000,
    },
    "llama-mha": {
        "model_type": "llama",
        "hidden_size": 2048,
        "num_hidden_layers": 24,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "intermediate_size": 5504,
        "vocab_size": 32000,
    },
    "llama-rows": {
        "model_type": "llama",
        "hidden_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 8,
        "num_key_value_heads": 8,
        # many bytes of K and V, and little else to compute
        "head_dim": 128,
        "intermediate_size": 96,
        "vocab_size": 97,
    },
    smollm2.KEY: smollm2.CONFIG,  # the only one with weights that mean something
}
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
ROUNDOFF = {"fp32": 2.0**-24, "bf16": 2.0**-8, "fp16": 2.0**-11}
_POSITIONS_LEAST = 2048
_EMBEDDING_DEVIATION = 0.02
# Random K of deviation 1 would leave attention almost even over all tokens, and a result that no
# single row changes checks little.
_K_DEVIATION = 2.0


@dataclass(frozen=True)
class Task:
    """What every system does: the model, the rows that stand for a prefill, the tokens that are
    fed.

    Attributes:
        name: of the model, for the rows.
        config: of the model, as transformers writes it.
        batch, context: sequences, and tokens of each that are cached before the first step.
        steps: decode steps, all told.
        dtype: of weights and rows.
        seed: of all of them.
        of_x: whether K and V are what the model projects from random rows X (for systems that keep
            X), rather than random themselves.
    """

    name: str
    config: Mapping[str, Any]
    batch: int
    context: int
    steps: int
    dtype: str
    seed: int
    of_x: bool = False

    def words(self) -> dict[str, Any]:
        """The task as a command of the worker carries it."""
        return {**vars(self), "config": dict(self.config)}

    @property
    def row_bytes(self) -> int:
        """K and V of one token of one sequence, all layers, as the model makes them."""
        shape = KVShape.of(self.hf_config())
        return 2 * shape.layers * shape.heads * shape.d * DTYPES[self.dtype].itemsize

    def kv_bytes(self, tokens: int) -> int:
        """Bytes of K and V of that many tokens of every sequence."""
        return self.batch * tokens * self.row_bytes

    def hf_config(self) -> Any:
        """A transformers configuration; learned positions are made to reach."""
        from transformers import AutoConfig

        words = dict(self.config)
        kind = words.pop("model_type", None)
        least = max(_POSITIONS_LEAST, self.context + self.steps + 1)
        words["max_position_embeddings"] = max(words.get("max_position_embeddings", 0), least)
        try:
            return AutoConfig.for_model(kind, **words)
        except (ValueError, TypeError, KeyError) as error:
            raise InvalidInputError(
                "model configuration",
                got=str(error).split("\n")[0],
                expected="one of transformers' models",
            ) from error

    def tokens(self) -> torch.Tensor:
        """int64 [steps, batch]: what is fed, step by step."""
        generator = torch.Generator().manual_seed(self.seed)
        return torch.randint(
            2, int(self.config["vocab_size"]), (self.steps, self.batch), generator=generator
        )

    def prompt(self) -> torch.Tensor:
        """int64 [batch, context]: what would have been fed before."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randint(
            2, int(self.config["vocab_size"]), (self.batch, self.context), generator=generator
        )


@dataclass(frozen=True)
class KVShape:
    """The shape of a model's cache."""

    layers: int
    heads: int
    d: int

    @classmethod
    def of(cls, config: Any) -> KVShape:
        heads = config.num_attention_heads
        d = getattr(config, "head_dim", None) or config.hidden_size // heads
        return cls(
            config.num_hidden_layers, getattr(config, "num_key_value_heads", None) or heads, d
        )


class Rows:
    """The rows that stand for a prefill, layer by layer.

    Args:
        model: of the task, for rows that are projected from X.

    Attributes:
        modules: the attention of each layer.
    """

    def __init__(self, task: Task, model: Any):
        self.task, self.shape = task, KVShape.of(model.config)
        self.modules = [
            module
            for module in model.modules()
            if hasattr(module, "k_proj") and hasattr(module, "layer_idx")
        ]
        rotary = getattr(model.model, "rotary_emb", None)
        positions = torch.arange(task.context)[None]
        # As the model hands them down: (cosines, sines) [1, context, d] in its dtype, or None where
        # positions are not rotary.
        self.rotations = (
            rotary(torch.empty(1, 1, dtype=DTYPES[task.dtype]), positions)
            if rotary is not None
            else None
        )

    def x(self, layer: int) -> torch.Tensor:
        """[batch, context, hidden]: as they come out of a norm, of deviation 1."""
        size = (self.task.batch, self.task.context, self.modules[layer].k_proj.in_features)
        return torch.randn(size, generator=self._generator(layer)).to(DTYPES[self.task.dtype])

    @torch.inference_mode()
    def kv(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V [batch, KV heads, context, d]."""
        task, shape, dtype = self.task, self.shape, DTYPES[self.task.dtype]
        if not task.of_x:
            size, generator = (
                (task.batch, shape.heads, task.context, shape.d),
                self._generator(layer),
            )
            k, v = (torch.randn(size, generator=generator) for _ in range(2))
            return k.mul_(_K_DEVIATION).to(dtype), v.to(dtype)
        x, module = self.x(layer), self.modules[layer]
        k, v = (
            part(x).unflatten(-1, (shape.heads, shape.d)).transpose(1, 2)
            for part in (module.k_proj, module.v_proj)
        )
        return k if self.rotations is None else _rotated(k, *self.rotations), v

    def _generator(self, layer: int) -> torch.Generator:
        return torch.Generator().manual_seed(self.task.seed * 1_000_003 + layer + 1)


def _rotated(k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Halves are the two coordinates of each rotation, as Llama's weights have them."""
    first, second = k.chunk(2, dim=-1)
    return k * cos[:, None] + torch.cat([-second, first], dim=-1) * sin[:, None]


def read_config(name: str) -> tuple[str, Mapping[str, Any]]:
    """(name, configuration) of a known model or of a JSON file. Raises InvalidInputError,
    FormatError."""
    if name in CONFIGS:
        return name, CONFIGS[name]
    if name == DEMO:
        return name, json.loads((demo_model() / "config.json").read_bytes())
    path = Path(name)
    if not path.is_file():
        raise InvalidInputError(
            "model",
            got=repr(name),
            expected=f"{', '.join(CONFIGS)}, or a JSON file with a model's configuration",
        )
    try:
        words = json.loads(path.read_bytes())
    except ValueError as error:
        raise FormatError(
            "cannot read a model's configuration", path=path, got=str(error), expected="JSON"
        ) from error
    if not isinstance(words, dict) or "model_type" not in words or "vocab_size" not in words:
        raise FormatError(
            "cannot read a model's configuration",
            path=path,
            got="no model_type or no vocab_size",
            expected="both",
        )
    return path.stem, words


def has_random_weights(task: Task) -> bool:
    """Whether a task's model comes from a configuration alone, as all do but SmolLM2 and the
    demo's."""
    return task.name != DEMO and (task.name, task.config) != (smollm2.KEY, smollm2.CONFIG)


def write_weights(task: Task, folder: Path) -> None:
    """Weights as a transformers folder: SmolLM2's own, or the demo's, else random ones, the same
    for the same seed. Raises MissingDependencyError."""
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    if task.name == DEMO:
        shutil.copytree(demo_model(), folder)
        return
    if not has_random_weights(task):
        _silently(lambda: smollm2.write_folder(folder, DTYPES[task.dtype]))
        return
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(task.hf_config(), dtype=DTYPES[task.dtype])
    generator = torch.Generator().manual_seed(task.seed)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            # In single precision: drawing half-precision numbers one by one takes ten times as
            # long.
            is_product = weights.dim() == 2 and "embed" not in name
            # Each product keeps the deviation, so that attention has as much of a say in the result
            # in small models as in large ones.
            values = torch.randn(weights.shape, generator=generator)
            values *= weights.shape[1] ** -0.5 if is_product else _EMBEDDING_DEVIATION
            weights.copy_(values + 1 if "norm" in name and name.endswith("weight") else values)
    model.tie_weights()
    _silently(lambda: model.save_pretrained(folder))


def load_model(folder: Path, dtype: str) -> Any:
    """The model of `write_weights`, ready to decode; its weights are mapped, so that processes
    share them."""
    from transformers import AutoModelForCausalLM

    return _silently(
        lambda: AutoModelForCausalLM.from_pretrained(
            folder, dtype=DTYPES[dtype], local_files_only=True
        )
    ).eval()


def _silently(work: Any) -> Any:
    from transformers.utils import logging

    was_shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        return work()
    finally:
        if was_shown:
            logging.enable_progress_bar()


def logit_tolerance(task: Task, lossy: str | None) -> float:
    """How far two right results may lie apart, in standard deviations of the logits (see
    `rounding`).

    Beside the sums of the projections there are those of a score over d terms, whose K have
    deviation 2 (so 4 d, halved, since partial sums grow), and of an attention's output over the
    context. int8 rows add an error of about 1.5 % to an attention's output (a row's largest value,
    3.3 deviations, over 127 steps, K and V).
    """
    config, roundoff = task.hf_config(), ROUNDOFF[task.dtype]
    shape = KVShape.of(config)
    summed = _terms_of_projections(config) + 2 * shape.d + task.context
    return rounding(shape.layers, max(roundoff, 2.0**-6) if lossy == "int8" else roundoff, summed)


def rounding(layers: int, roundoff: float, summed: int) -> float:
    """How far the logits of one token may lie apart in two right computations, in standard
    deviations of all logits of that token.

    A layer rounds about twelve times on the way into the residual stream (norms, projections,
    scores, weights, sums), each by up to one unit roundoff and independent of the others: sqrt(12 x
    layers) of them. Five deviations hold for the largest of a million logits.

    Args:
        summed: terms in the sums of a layer, which the two add in different orders: each term
            rounds once more, in fp32 whatever the dtype.
    """
    return 5 * math.sqrt(layers * (12 * roundoff**2 + summed * ROUNDOFF["fp32"] ** 2))


def tolerance_of_other_shapes(config: Any, dtype: str) -> float:
    """`rounding` between a prompt that was computed at once and one that was computed in two
    parts."""
    return rounding(config.num_hidden_layers, ROUNDOFF[dtype], _terms_of_projections(config))


def tolerance_of_rounded_rows(config: Any, dtype: str, rows: str) -> float:
    """`tolerance_of_other_shapes` where K and V of new tokens are rounded to `rows` when they come,
    and the model computes in more.

    What two right computations make of a value lies d apart (of deviation, relative to it). The
    stored values then mostly are the same, but a d-th of the spacing s of rounded ones lie on two
    sides of a place where rounding changes, and are s apart: an error of sqrt(d s), of K and of V,
    in every layer.
    """
    close = tolerance_of_other_shapes(config, dtype)
    if ROUNDOFF[rows] <= ROUNDOFF[dtype]:
        return close
    apart, spacing = close / 5, 2 * ROUNDOFF[rows]
    return close + 5 * math.sqrt(2 * config.num_hidden_layers * apart * spacing)


def _terms_of_projections(config: Any) -> int:
    """Each layer sums over the hidden size in its projections to Q, K and V, from attention, and
    into the feed-forward part, and over that part's width on the way back."""
    wide = (
        getattr(config, "intermediate_size", None)
        or getattr(config, "ffn_dim", None)
        or 4 * config.hidden_size
    )
    return int(3 * config.hidden_size + wide)
