"""Whether a model can attend through espnx, shown by two short forward passes before it is said that it can.

Configs and classes do not tell it: a model may pass an argument, change a mask, or expand keys after they were cached. So a few tokens,
padded, go through it, and then one more, with a cache that only looks on. It costs about two decoding steps, once for each model.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer

from .. import errors
from ..device.layout import RowLayout, format_of
from .cache_layers import layers_of
from .hf_attention import attend_in_memory, awaited
from .masks import Mask
from .projections import Rotations, attention_modules, projection_of
from .stored_layer import tag

_TOKENS = 4


def probe(model: PreTrainedModel) -> str | None:
    """Runs a model whose attention is espnx's.

    Returns:
        Why X rows cannot stand for the K and V of its stored layers; None: they can.

    Raises:
        InvalidInputError: it computes what espnx does not; the message names it.
        ReadError, ...: of weights that are streamed.
    """
    what = f"{type(model).__name__} cannot attend through espnx"
    if "past_key_values" not in inspect.signature(model.forward).parameters:
        raise errors.InvalidInputError(what, got="no past_key_values in its forward pass", expected="a decoder that takes a Cache")
    training = [module for module in model.modules() if module.training]
    device = next((each.device for each in model.parameters() if not each.is_meta), torch.device("cpu"))
    ids = torch.tensor(_plain_tokens(model)).repeat(2, 1).to(device)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    awaited.layer = None
    hooks = list[RemovableHandle]()
    try:
        cache = _Onlooker(model)
        hooks += [module.register_forward_pre_hook(cache.note_input, with_kwargs=True) for module in attention_modules(model)]
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for end, part in ((_TOKENS, ids[:, :_TOKENS]), (_TOKENS + 1, ids[:, _TOKENS:])):
                model(input_ids=part, attention_mask=mask[:, :end], past_key_values=cache, use_cache=True)
                cache.check(end)
    except errors.InvalidInputError as error:
        raise errors.InvalidInputError(what, got=f"{error.what}: {error.got}", expected=error.expected, fix=error.fix) from error
    except (errors.EspnxError, MemoryError, torch.OutOfMemoryError):  # the disk, or memory: nothing that the model could help
        raise
    except Exception as error:
        raise errors.InvalidInputError(
            what, got=f"{type(error).__name__} in a forward pass over a few tokens: {str(error).splitlines()[:1]}",
            expected="a decoder of text that takes input_ids and a Cache",
        ) from error  # fmt: skip
    finally:
        awaited.layer = None
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return next((layer.why_no_x for layer in cache.layers if isinstance(layer, _Noted) and layer.why_no_x), None)


def _plain_tokens(model: PreTrainedModel) -> list[int]:
    """Ids that stand for text: none that a config gives another meaning."""
    config = model.config.get_text_config(decoder=True)
    named = [vars(each) for each in (model.config, config)]
    special = {value for names in named for name, value in names.items() if name.endswith(("_id", "_index")) and isinstance(value, int)}
    plain = [number for number in range(3, min(int(config.vocab_size), 1000)) if number not in special] or [0]
    return [plain[i % len(plain)] for i in range(_TOKENS + 1)]


class _Onlooker(Cache):
    """Layers as a `KVCache` has them; those that would be stored note what is done with their rows."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(layers=layers_of(model.config.get_text_config(decoder=True), _Noted))

    def note_input(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        layer = self.layers[module.layer_idx]
        if isinstance(layer, _Noted) and kwargs.get("past_key_values") is self:
            layer.made_of = module, kwargs.get("hidden_states", args[0] if args else None), kwargs.get("position_embeddings")

    def check(self, tokens: int) -> None:
        """After a pass. Raises InvalidInputError."""
        for layer in self.layers:
            if isinstance(layer, _Noted) and (layer.get_seq_length() != tokens or not layer.answered):
                raise errors.InvalidInputError(
                    f"layer {layer.number}", got=f"{layer.get_seq_length()} tokens cached, attended to {layer.answered} times",
                    expected=f"{tokens} tokens, and attention over them",
                )  # fmt: skip
        if self.get_seq_length() not in (0, tokens):
            raise errors.InvalidInputError("tokens in the cache", got=self.get_seq_length(), expected=tokens)


class _Noted(DynamicLayer):
    """Keeps all rows in memory, under the rules of a stored layer."""

    def __init__(self, number: int, *, is_shared: bool):
        super().__init__()
        self.number, self.is_shared, self.answered = number, is_shared, 0
        self.made_of: tuple[Any, Any, Any] | None = None
        self.why_no_x: str | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        if key_states.shape[:3] != value_states.shape[:3]:
            shapes = f"{list(key_states.shape)} and {list(value_states.shape)}"
            raise errors.InvalidInputError("K and V", got=shapes, expected="the same heads")
        RowLayout(format_of(key_states.dtype), key_states.shape[-1], value_states.shape[-1])
        self.answered, awaited.layer = 0, self
        if self.get_seq_length() == 0:
            self.why_no_x = self._compare(key_states, value_states)
        keys, values = super().update(key_states, value_states, *args, **kwargs)
        return tag(keys, self), tag(values, self)

    def _compare(self, k: torch.Tensor, v: torch.Tensor) -> str | None:
        """Why K and V are not what is known here to be made of the module's input."""
        if self.made_of is None:
            return f"X rows of layer {self.number}: it is not known what K and V are made of"
        module, x, rotary = self.made_of
        rotations = None if rotary is None else Rotations()
        try:
            if rotations is not None:
                cos, sin = rotary
                rotations.extend(cos, sin, past=0)
            projection_of(module, k.shape[1], rotations).check(x[1], k[1], v[1], 0, sequence=1)
        except (errors.InvalidInputError, TypeError, ValueError) as error:
            return str(error)
        return None

    def attend(self, query: torch.Tensor, visible: torch.Tensor | None, scale: float) -> torch.Tensor:
        awaited.layer, self.answered = None, self.answered + 1
        if self.answered > 1 and not self.is_shared:
            raise errors.InvalidInputError(f"layer {self.number}", got="attention asked twice for its rows", expected="once")
        return attend_in_memory(query, self.keys, self.values, Mask(visible), scale, causal=True)
