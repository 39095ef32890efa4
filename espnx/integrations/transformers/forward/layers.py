"""The layers of a model's cache: those whose rows are stored, and what those can do that the
framework keeps in memory.

A stored layer knows the cache that it belongs to as a `LayerHost`: what the forward passes of the
cache are to a layer.
"""

from __future__ import annotations

import logging
import warnings
import weakref
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import replace
from typing import Any, Protocol

import torch
from transformers import PreTrainedConfig
from transformers.cache_utils import (
    DYNAMIC_LAYER_TYPE_MAPPING,
    CacheLayerMixin,
    LinearAttentionCacheLayerMixin,
    get_layer_types_and_kwargs,
)

from .... import errors
from ....kv.attention import Step
from ....kv.cache import SsdCache
from ....kv.scores import PLAIN, ScoreRules
from ....kv.striping import Storage
from ....suggestions import CALL_FRAMES
from ..text import Text
from .attention import awaited, tag
from .passes import PassGuard
from .projections import LayerInput, Source

log = logging.getLogger(__name__)

#: Kinds that the framework keeps in memory. Not those that attend to chosen tokens or to chunks.
_IN_MEMORY = ("sliding_attention", "linear_attention", "conv", "hybrid", "hybrid_sliding", "dummy")


class LayerHost(Protocol):
    """What a stored layer asks of its cache. All of it is for the forward pass under way."""

    store: SsdCache
    text: Text
    guard: PassGuard

    def length(self, layer: int = 0) -> int:
        """Tokens in the cache, without those of the pass."""

    def made_of(
        self, layer_input: LayerInput | None, k: torch.Tensor, v: torch.Tensor, past: int
    ) -> Source | None:
        """What these K and V of new tokens were projected from, after `past` others; None where X
        rows are not kept."""

    def fail(self, error: BaseException) -> None:
        """The pass cannot go on."""


class StoredLayer(CacheLayerMixin):
    """A full-attention layer whose rows lie on SSD: takes K and V where transformers hands them
    over, and answers when attention asks (`attention` says how the two find one another).

    Attributes:
        number: of the layer.
        input: of the layer's attention module in this pass, where X rows are kept.
        pending: K and V that attention has not asked for yet.
    """

    is_sliding = False
    is_croppable = True

    def __init__(self, number: int, *, is_shared: bool = False):
        super().__init__()
        self._host: Callable[[], LayerHost | None] = lambda: None
        self.number, self._is_shared = number, is_shared
        self.input: LayerInput | None = None
        self.pending: tuple[torch.Tensor, torch.Tensor] | None = None
        # of this pass, where other layers will ask for the same rows
        self._answered: Step | None = None

    def join(self, host: LayerHost) -> None:
        """The layer belongs to this cache from here on, which it does not keep alive."""
        self._host = weakref.ref(host)

    @property
    def host(self) -> LayerHost:
        host = self._host()
        if host is None:
            raise errors.EngineClosedError("the cache of this layer is gone")
        return host

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.dtype, self.device = key_states.dtype, key_states.device
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.check_answered()
        self.host.guard.reach()
        self.pending, self._answered, awaited.layer = (key_states, value_states), None, self
        return tag(key_states, self), tag(value_states, self)

    def check_answered(self) -> None:
        """Raises StateError where K and V wait that attention did not ask for."""
        if self.pending is not None:
            raise errors.StateError(
                "K and V went into the cache, but attention did not ask for them",
                fix="call espnx.enable_kv_cache(model) before generate",
            )

    def forget_pass(self) -> None:
        """Nothing is left of the pass."""
        self.pending = self.input = self._answered = None

    def end_pass(self) -> None:
        """The pass has come to its end; the input is replaced by the next one's."""
        self._answered = None

    def attend(
        self,
        query: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        rules: ScoreRules = PLAIN,
    ) -> torch.Tensor:
        """Attention of the new tokens over everything: [sequences, heads, n, dv]."""
        pending, host = self.pending, self.host
        self.pending = awaited.layer = None
        try:
            with torch.autocast(query.device.type, enabled=False):
                o = (
                    self._again(host, query, scale)
                    if pending is None
                    else self._first(host, query, *pending, mask, scale, rules)
                )
        except BaseException as error:
            host.fail(error)
            raise
        return (
            InferenceOnly.apply(o, query) if torch.is_grad_enabled() and query.requires_grad else o
        )

    def _first(
        self,
        host: LayerHost,
        query: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        scale: float,
        rules: ScoreRules,
    ) -> torch.Tensor:
        kept, past = torch.promote_types(k.dtype, v.dtype), host.store.rows.length(self.number)
        k, v = k.to(kept), v.to(kept)  # their dtypes differ under autocast
        visibility, source = (
            host.text.visibility(mask, k.shape[0], past + k.shape[2]),
            host.made_of(self.input, k, v, past),
        )
        x, projection = source or (None, None)
        step = Step(query, k, v, scale, visibility, x, projection, rules)
        if self._is_shared:
            self._answered = replace(step, q=query[:, :, :0])
        return host.store.attend(self.number, step)

    def _again(self, host: LayerHost, query: torch.Tensor, scale: float) -> torch.Tensor:
        if self._answered is None:
            raise errors.StateError("attention asked twice for one layer's rows")
        return host.store.attend_again(self.number, replace(self._answered, q=query, scale=scale))

    def get_seq_length(self) -> int:
        return self.host.length()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1


class InferenceOnly(torch.autograd.Function):
    """The output of attention over stored rows: they keep no graph, and a backward pass that met
    them would lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise errors.InvalidInputError(
            "a backward pass through a cache on SSD",
            got="gradients",
            expected="inference",
            fix="no cache",
        )


def check_config(config: PreTrainedConfig) -> None:
    """Raises InvalidInputError where this is no config of a model."""
    if not isinstance(config, PreTrainedConfig):
        raise errors.InvalidInputError(
            "KVCache",
            got=type(config).__name__,
            expected="a config of transformers",
            fix="KVCache(model.config, ...)",
        )


def layers_on(storage: Storage, config: PreTrainedConfig, *, is_kept: bool) -> list[Any]:
    """The layers of a model's cache whose rows go to these directories. Warns where none do.

    Raises InvalidInputError: the model has layers that espnx does not know, or is to be kept and
    has some that the framework keeps in memory.
    """
    layers = layers_of(config.get_text_config(decoder=True), StoredLayer)
    n_stored = sum(isinstance(layer, StoredLayer) for layer in layers)
    if is_kept and n_stored < len(layers):
        raise errors.InvalidInputError(
            "a kept cache",
            got="layers that are not full attention",
            expected="full attention in every layer",
            fix="name=None",
        )
    log.debug(
        "%d layers go to %s, %d stay in memory (windows or states)",
        n_stored,
        storage,
        len(layers) - n_stored,
    )
    if not n_stored:
        warnings.warn(
            "no layer of this model is full attention alone: nothing of this cache goes to SSD, "
            "all of it stays in memory",
            stacklevel=3 + CALL_FRAMES,
        )
    return layers


class MakeLayer(Protocol):
    """Makes a layer whose rows are stored; `is_shared`: other layers of the model attend over them,
    too."""

    def __call__(self, number: int, *, is_shared: bool) -> Any: ...


def layers_of(config: PreTrainedConfig, stored: MakeLayer) -> list[Any]:
    """A cache layer for each layer of a decoder; `stored` makes those of full attention. Raises
    InvalidInputError."""
    what = f"the layers of {type(config).__name__}"
    try:
        kinds, arguments = get_layer_types_and_kwargs(config)
    except Exception as error:  # a config that transformers' own caches cannot read either
        raise errors.InvalidInputError(
            what, got=str(error), expected="layers that transformers' DynamicCache can be made of"
        ) from error
    layers = list[Any]()
    for number, (kind, more) in enumerate(zip(kinds, arguments, strict=True)):
        if kind == "full_attention":
            layers.append(stored(number, is_shared=_is_shared(config, kinds, number)))
        elif kind not in _IN_MEMORY:
            known = ", ".join(("full_attention", *_IN_MEMORY))
            raise errors.InvalidInputError(
                f"layer {number} of this model", got=repr(kind), expected=known
            )
        else:
            layers.append(DYNAMIC_LAYER_TYPE_MAPPING[kind](**more))
    # transformers before 5.23 names no layers that have no K and V of their own
    if getattr(config, "kv_sharing_modes", None) is None:
        layers += [
            DYNAMIC_LAYER_TYPE_MAPPING["full_attention"]()
            for _ in range(getattr(config, "num_kv_shared_layers", None) or 0)
        ]
    return layers


def _is_shared(config: PreTrainedConfig, kinds: Sequence[str], number: int) -> bool:
    """Whether later layers attend over this one's K and V. Before transformers 5.23 a config does
    not say which: the last of its kind among `kinds`, which then leave out the layers that have
    none of their own."""
    modes = getattr(config, "kv_sharing_modes", None)
    if modes is not None:
        return modes[number] == "store"
    return (
        bool(getattr(config, "num_kv_shared_layers", None))
        and kinds[number] not in kinds[number + 1 :]
    )


class LayersInMemory:
    """The layers of a cache that the framework keeps in memory, since they hold little: windows,
    states. What one pass did to them can be undone.

    Args:
        layers: without tokens.

    Attributes:
        every: as given.
    """

    def __init__(self, layers: Sequence[Any]):
        self.every = layers
        self._unused = self.states()

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors that they keep."""
        return sum(_size(value) for layer in self.every for value in vars(layer).values())

    @property
    def sequences(self) -> int:
        """How many sequences they hold; 0 before the first tokens."""
        return next((n for n in map(_sequences, self.every) if n), 0)

    def states(self) -> list[dict[str, Any]]:
        """The state of each, for `restore`. An update makes new tensors of rows that grow, which
        need no copy; what it changes in place stands in dicts, and is copied."""
        return [
            {
                name: _copied(value) if isinstance(value, dict) else value
                for name, value in vars(layer).items()
            }
            for layer in self.every
        ]

    def restore(self, before: Sequence[dict[str, Any]]) -> None:
        """They become what they were. For once: what they change in place, they change in
        `before`."""
        for layer, then in zip(self.every, before, strict=True):
            vars(layer).clear()
            vars(layer).update(then)

    def empty(self) -> None:
        """They become what they were when they were made, but remember past tokens if they were
        told to. Their own `reset` keeps states of as many sequences as there were, and another
        batch fails."""
        kept = [
            {name: value for name, value in vars(layer).items() if name == "record_past"}
            for layer in self.every
        ]
        self.restore([then | own for then, own in zip(deepcopy(self._unused), kept, strict=True)])

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        for layer in self.every:
            layer.reorder_cache(torch.tensor(sequences, dtype=torch.int64))

    def crop(self, tokens: int) -> None:
        """Forgets the last tokens, or, of none, what was recorded to forget some."""
        for layer in self.every:
            if tokens or getattr(layer, "record_past", False):
                layer.crop(-tokens)

    def why_not_cropped(self, tokens: int) -> str | None:
        """Which of them cannot forget its last `tokens` tokens, and why; None: all can."""
        for layer in self.every:
            if isinstance(layer, LinearAttentionCacheLayerMixin):
                return f"{type(layer).__name__}: its state has all tokens in it"
            window = getattr(layer, "sliding_window", None)
            if window is not None and layer.is_initialized and layer.get_seq_length() >= window:
                kept = min(layer.get_seq_length(), layer.keys.shape[-2])
                if not layer.record_past or kept - tokens < min(
                    window - 1, layer.get_seq_length() - tokens
                ):
                    return (
                        f"{type(layer).__name__}: of {layer.get_seq_length()} tokens it has the "
                        f"last {kept}, for a window of {window}"
                    )
        return None


def _size(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.numel() * value.element_size()
    if isinstance(value, dict):
        return sum(_size(each) for each in value.values())
    return sum(_size(each) for each in value) if isinstance(value, (list, tuple)) else 0


def _sequences(layer: Any) -> int:
    tensors = [
        getattr(layer, "keys", None),
        *getattr(layer, "conv_states", {}).values(),
        *getattr(layer, "recurrent_states", {}).values(),
    ]
    return next((each.shape[0] for each in tensors if each is not None and each.numel()), 0)


def _copied(states: dict[Any, Any]) -> dict[Any, Any]:
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else value
        for key, value in states.items()
    }
