"""`enable_kv_cache`: lets a model attend through espnx, after two short forward passes have shown
that it can.

Configs and classes do not tell it: a model may pass an argument, change a mask, or expand keys
after they were cached. So a few tokens, padded, go through it, and then one more, with a cache that
only looks on. It costs about two decoding steps, once for each model.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import AttentionMaskInterface

from ... import errors
from ...device.row_layout import RowLayout, format_of
from ...forks import compute_alone
from ...kv.scores import PLAIN, ScoreRules
from .cache import KVCache
from .cache_argument import cache_in, cache_name
from .forward.attention import NAME, attend_in_memory, awaited, espnx_attention, tag
from .forward.layers import StoredLayer, layers_of
from .forward.masks import Mask, padding_mask
from .forward.projections import LayerInput, Rotations, attention_modules
from .generation import watch_generation
from .graphs import outside_graphs

_TOKENS = 4
Model = TypeVar("Model", bound=torch.nn.Module)


def enable_kv_cache(model: Model) -> Model:
    """Lets a model attend through espnx; without a `KVCache` it computes what it did before.

    Two forward passes of a few tokens show whether that is so (about the time of two decoding
    steps; for a model that was enabled before, none).

    Args:
        model: a decoder whose attention goes through transformers' attention interface (Llama,
            Qwen, Mistral, Mixtral, OPT, GPT-2, ...), or a model of PEFT around one.

    Returns:
        The model itself.

    Raises:
        InvalidInputError: the model computes attention in a way that espnx does not; nothing was
            changed.
    """
    compute_alone()
    inner = model.get_base_model() if callable(getattr(model, "get_base_model", None)) else model
    if not isinstance(inner, PreTrainedModel):
        raise errors.InvalidInputError(
            "enable_kv_cache", got=type(model).__name__, expected="a model of transformers"
        )
    _enable(inner)
    return model


def _enable(model: PreTrainedModel) -> None:
    AttentionInterface.register(NAME, espnx_attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    before = _NamedAttention.of(model)
    _check_config(model)
    model.set_attn_implementation(NAME)
    try:
        _check_attention(model, before)
        if not hasattr(model, "_espnx_hooks"):
            why_no_x = _probe(model)
            # either may be called
            whole = {id(part): part for part in (model, model.base_model)}.values()
            for part in whole:
                part._espnx_why_no_x = why_no_x
            hooks = [
                module.register_forward_pre_hook(_note_input, with_kwargs=True)
                for module in attention_modules(model)
            ]
            hooks += [
                part.register_forward_pre_hook(_note_forward, with_kwargs=True) for part in whole
            ]
            model._espnx_hooks = [
                *hooks,
                *(
                    part.register_forward_hook(_note_end, with_kwargs=True, always_call=True)
                    for part in whole
                ),
            ]
            watch_generation(model)
    except BaseException:
        before.restore()
        raise


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KVCache | None:
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, KVCache)), None)


@outside_graphs
def _note_end(
    model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any
) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.passes.end(model, failed=output is None)


@outside_graphs
def _note_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_of(args, kwargs)
    cache_in(kwargs)  # raises for two
    if cache is None:
        awaited.layer = None
        return
    ids, embeddings = (
        kwargs.get("input_ids", args[0] if args else None),
        kwargs.get("inputs_embeds"),
    )
    given = ids if isinstance(ids, torch.Tensor) else embeddings
    is_ids = isinstance(ids, torch.Tensor) and not ids.is_floating_point()
    cache.passes.begin(model, ids if is_ids else None, None if given is None else given.shape[0])


@outside_graphs
def _note_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = cache_in(kwargs)
    if isinstance(cache, KVCache) and cache.store.rows.x_rows:
        layer = cache.layers[module.layer_idx]
        if isinstance(layer, StoredLayer):
            layer.input = LayerInput.of_call(module, args, kwargs)


@dataclass(frozen=True)
class _NamedAttention:
    """What the configs of a model and of its parts named as their attention."""

    named: list[tuple[PreTrainedConfig, Any]]

    @classmethod
    def of(cls, model: PreTrainedModel) -> Self:
        configs = [getattr(module, "config", None) for module in model.modules()]
        found = {id(config): config for config in configs if isinstance(config, PreTrainedConfig)}
        for config in list(found.values()):
            parts = [getattr(config, name, None) for name in config.sub_configs]
            found |= {
                id(part): part
                for part in [*parts, config.get_text_config(decoder=True)]
                if isinstance(part, PreTrainedConfig)
            }
        return cls([(config, config._attn_implementation_internal) for config in found.values()])

    def restore(self) -> None:
        """Names it again."""
        for config, name in self.named:
            config._attn_implementation_internal = name


def _check_config(model: PreTrainedModel) -> None:
    """Raises InvalidInputError for what a config tells, in words that a forward pass would not
    find."""
    config = model.config.get_text_config(decoder=True)
    what = f"{type(model).__name__} cannot attend through espnx"
    if getattr(model.config, "is_encoder_decoder", False):
        raise errors.InvalidInputError(
            what, got="an encoder-decoder", expected="a decoder-only model"
        )
    if getattr(config, "alibi", None):
        raise errors.InvalidInputError(
            what, got="alibi in its config", expected="scaled dot products"
        )
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()):
        raise errors.InvalidInputError(
            what, got="chunked_attention in its layer_types", expected="full or sliding attention"
        )


def _check_attention(model: PreTrainedModel, before: _NamedAttention) -> None:
    """Raises InvalidInputError where a model did not take the attention that it was told to:
    transformers only warns then."""
    config = model.config.get_text_config(decoder=True)
    if config._attn_implementation != NAME:
        raise errors.InvalidInputError(
            f"{type(model).__name__} cannot attend through espnx",
            got=(
                f"attention {config._attn_implementation!r} after asking for {NAME!r} (it was "
                f"{before.named[0][1]!r})"
            ),
            expected="a model class that uses transformers' attention interface",
        )


def _probe(model: PreTrainedModel) -> str | None:
    """Runs a model whose attention is espnx's.

    Returns:
        Why X rows cannot stand for the K and V of its stored layers; None: they can.

    Raises:
        InvalidInputError: it computes what espnx does not; the message names it.
        ReadError, ...: of weights that are streamed.
    """
    what = f"{type(model).__name__} cannot attend through espnx"
    name = cache_name(inspect.signature(model.forward).parameters)
    if name is None:
        raise errors.InvalidInputError(
            what,
            got="no past_key_values in its forward pass",
            expected="a decoder that takes a Cache",
        )
    training = [module for module in model.modules() if module.training]
    device = next(
        (each.device for each in model.parameters() if not each.is_meta), torch.device("cpu")
    )
    ids = torch.tensor(_plain_tokens(model)).repeat(2, 1).to(device)
    mask = torch.ones_like(ids)
    mask[0, 0] = 0
    awaited.layer = None
    hooks = list[RemovableHandle]()
    try:
        cache = _Onlooker(model)
        hooks += [
            module.register_forward_pre_hook(cache.note_input, with_kwargs=True)
            for module in attention_modules(model)
        ]
        model.eval()
        with torch.no_grad(), torch.random.fork_rng(devices=[]):
            for end, part in ((_TOKENS, ids[:, :_TOKENS]), (_TOKENS + 1, ids[:, _TOKENS:])):
                model(input_ids=part, attention_mask=mask[:, :end], use_cache=True, **{name: cache})
                cache.check(end)
    except errors.InvalidInputError as error:
        raise errors.InvalidInputError(
            what, got=f"{error.what}: {error.got}", expected=error.expected, fix=error.fix
        ) from error
    except (errors.EspnxError, MemoryError, torch.OutOfMemoryError):
        # the disk, or memory: nothing that the model could help
        raise
    except Exception as error:
        raise errors.InvalidInputError(
            what,
            got=(
                f"{type(error).__name__} in a forward pass over a few tokens: "
                f"{str(error).splitlines()[:1]}"
            ),
            expected="a decoder of text that takes input_ids and a Cache",
        ) from error
    finally:
        awaited.layer = None
        for hook in hooks:
            hook.remove()
        for module in training:
            module.training = True
    return next(
        (layer.why_no_x for layer in cache.layers if isinstance(layer, _Noted) and layer.why_no_x),
        None,
    )


def _plain_tokens(model: PreTrainedModel) -> list[int]:
    """Ids that stand for text: none that a config gives another meaning."""
    config = model.config.get_text_config(decoder=True)
    named = [vars(each) for each in (model.config, config)]
    special = {
        value
        for names in named
        for name, value in names.items()
        if name.endswith(("_id", "_index")) and isinstance(value, int)
    }
    plain = [
        number for number in range(3, min(int(config.vocab_size), 1000)) if number not in special
    ] or [0]
    return [plain[i % len(plain)] for i in range(_TOKENS + 1)]


class _Onlooker(Cache):
    """Layers as a `KVCache` has them; those that would be stored note what is done with their
    rows."""

    def __init__(self, model: PreTrainedModel):
        super().__init__(layers=layers_of(model.config.get_text_config(decoder=True), _Noted))

    def note_input(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        layer = self.layers[module.layer_idx]
        if isinstance(layer, _Noted) and cache_in(kwargs) is self:
            layer.input = LayerInput.of_call(module, args, kwargs)

    def check(self, tokens: int) -> None:
        """Checks what a pass has left in the cache. Raises InvalidInputError."""
        for layer in self.layers:
            if isinstance(layer, _Noted) and (
                layer.get_seq_length() != tokens or not layer.answered
            ):
                raise errors.InvalidInputError(
                    f"layer {layer.number}",
                    got=(
                        f"{layer.get_seq_length()} tokens cached, attended to {layer.answered} "
                        "times"
                    ),
                    expected=f"{tokens} tokens, and attention over them",
                )
        if self.get_seq_length() not in (0, tokens):
            raise errors.InvalidInputError(
                "tokens in the cache", got=self.get_seq_length(), expected=tokens
            )


class _Noted(DynamicLayer):
    """Keeps all rows in memory, under the rules of a stored layer."""

    def __init__(self, number: int, *, is_shared: bool):
        super().__init__()
        self.number, self.is_shared, self.answered = number, is_shared, 0
        self.input: LayerInput | None = None
        self.why_no_x: str | None = None

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
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
        try:
            source = (
                None if self.input is None else self.input.source(k.shape[1], Rotations(), past=0)
            )
            if source is None:
                return f"X rows of layer {self.number}: it is not known what K and V are made of"
            x, projection = source
            projection.check(x[1], k[1], v[1], 0, sequence=1)
        except (errors.InvalidInputError, TypeError, ValueError) as error:
            return str(error)
        return None

    def attend(
        self,
        query: torch.Tensor,
        visible: torch.Tensor | None,
        scale: float,
        rules: ScoreRules = PLAIN,
    ) -> torch.Tensor:
        awaited.layer, self.answered = None, self.answered + 1
        if self.answered > 1 and not self.is_shared:
            raise errors.InvalidInputError(
                f"layer {self.number}", got="attention asked twice for its rows", expected="once"
            )
        if not rules.are_plain and self.why_no_x is None:
            self.why_no_x = f"X rows of layer {self.number}: its scores are more than products"
        return attend_in_memory(
            query, self.keys, self.values, Mask(visible), scale, causal=True, rules=rules
        )
