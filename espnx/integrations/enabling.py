"""Which attention a model has, and whether its config names what espnx does not compute."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

from transformers import PreTrainedConfig, PreTrainedModel

from .. import errors

NAME = "espnx"


@dataclass(frozen=True)
class Attention:
    """What the configs of a model and of its parts named as their attention."""

    named: list[tuple[PreTrainedConfig, Any]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        configs = [getattr(module, "config", None) for module in model.modules()]
        found = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
        for config in list(found.values()):
            parts = [getattr(config, name, None) for name in config.sub_configs]
            found |= {id(part): part for part in [*parts, config.get_text_config(decoder=True)] if isinstance(part, PreTrainedConfig)}
        return cls([(config, config._attn_implementation_internal) for config in found.values()])

    def restore(self) -> None:
        """They are as they were."""
        for config, name in self.named:
            config._attn_implementation_internal = name


def check_config(model: PreTrainedModel) -> None:
    """Raises InvalidInputError for what a config tells, in words that a forward pass would not find."""
    config = model.config.get_text_config(decoder=True)
    what = f"{type(model).__name__} cannot attend through espnx"
    if getattr(model.config, "is_encoder_decoder", False):
        raise errors.InvalidInputError(what, got="an encoder-decoder", expected="a decoder-only model")
    for name in ("attn_logit_softcapping", "alibi"):
        if getattr(config, name, None):
            raise errors.InvalidInputError(what, got=f"{name} in its config", expected="plain scaled dot products")
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise errors.InvalidInputError(what, got="chunked_attention in its layer_types", expected="full or sliding attention")


def check_attention(model: PreTrainedModel, asked: str, before: Attention) -> None:
    """Raises InvalidInputError where a model did not take the attention that was asked for: transformers only warns then."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != asked:
        raise errors.InvalidInputError(
            f"{type(model).__name__} cannot attend through espnx",
            got=f"attention {config._attn_implementation!r} after asking for {asked!r} (it was {before.named[0][1]!r})",
            expected="a model class that uses transformers' attention interface",
        )
