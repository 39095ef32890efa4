"""Several micro-batches per visit of a layer: FlexGen's block schedule, for any transformers
decoder and without a change to `generate`.

One forward pass takes the whole batch as far as a layer; there the batch goes through in parts, one
after the other, while the layer's weights are there. What a layer computes with then takes a part's
memory, not the batch's. Each part sees its own rows of the cache: a `DynamicCache` layer is split
into views before and joined after; a `GroupedCache` has a cache for each part from the beginning.
"""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn
from transformers import Cache, PreTrainedModel
from transformers.cache_utils import DynamicLayer, DynamicSlidingWindowLayer

from ... import errors
from ..transformers.cache import KVCache
from ..transformers.cache_argument import CACHE_NAMES, cache_in
from .model import find_layers

_CACHES = (*CACHE_NAMES, "past_key_value", "layer_past")
#: Arguments of layers whose first dimension is the batch, or 1 for the same in all rows.
_BY_ROW = ("hidden_states", "attention_mask", "position_ids", "position_embeddings")


class GroupedCache(Cache):
    """A cache for each micro-batch, seen as one. For caches that cannot be split, such as
    `espnx.KVCache`.

    Args:
        caches: empty ones, one for each micro-batch, in the order of the batch's rows.

    What `generate` does to a batch (beams, repeats) works where it stays inside the micro-batches:
    the beams of a prompt must be in one.
    """

    def __init__(self, caches: Sequence[Cache]):
        if not caches:
            raise errors.InvalidInputError(
                "GroupedCache", got="no cache", expected="one for each micro-batch"
            )
        super().__init__(layers=caches[0].layers)
        self.caches = list(caches)
        self.sizes: list[int] = []
        self._held: list[int] = []  # tokens in each cache when the forward pass under way began

    def begin(self, model: PreTrainedModel, rows: int, ids: torch.Tensor | None) -> None:
        """A forward pass of a model begins, with this number of rows."""
        if sum(self.sizes) != rows:
            if self.get_seq_length():
                raise errors.InvalidInputError(
                    "rows of a batch", got=rows, expected=f"{sum(self.sizes)}, as in the cache"
                )
            self.sizes = _sizes(rows, len(self.caches))
        if len(self.sizes) != len(self.caches):
            raise errors.InvalidInputError(
                "rows of a batch",
                got=rows,
                expected=f"at least {len(self.caches)}, one for each cache",
            )
        self._held = [cache.get_seq_length() for cache in self.caches]
        parts = [None] * len(self.sizes) if ids is None else ids.split(self.sizes)
        for cache, part, size in zip(self.caches, parts, self.sizes, strict=True):
            if isinstance(cache, KVCache):
                cache.passes.begin(model, part, size)

    def end(self, model: nn.Module, *, failed: bool) -> None:
        """The forward pass has come to its end. Raises ChecksumError: rows that it looked at are
        damaged; it is taken out of all caches then."""
        stored = [cache for cache in self.caches if isinstance(cache, KVCache)]
        try:
            for cache in stored:
                if not failed:  # of all, before one of them takes the pass for ended
                    cache.store.striped.check()
        except BaseException:
            self.undo()
            raise
        for cache in stored:
            cache.passes.end(model, failed=failed)

    def undo(self) -> None:
        """Takes the forward pass under way out of all caches, but for layers that keep a window or
        a state."""
        for cache, held in zip(self.caches, self._held, strict=True):
            if isinstance(cache, KVCache):
                cache.passes.abort()
            else:
                for layer in cache.layers:
                    if type(layer) is DynamicLayer and layer.get_seq_length() > held:
                        layer.crop(held - layer.get_seq_length())

    def reset(self) -> None:
        self.sizes = []
        for cache in self.caches:
            cache.reset()

    def crop(self, tokens_to_remove: int) -> None:
        for cache in self.caches:
            cache.crop(tokens_to_remove)

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.sizes = [size * repeats for size in self.sizes]
        for cache in self.caches:
            cache.batch_repeat_interleave(repeats)

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        parts = self._within(beam_idx, self.sizes)
        for cache, part in zip(self.caches, parts, strict=True):
            cache.reorder_cache(part)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        rows = torch.arange(sum(self.sizes))[indices.cpu()]
        groups = torch.repeat_interleave(torch.arange(len(self.sizes)), torch.tensor(self.sizes))[
            rows
        ]
        sizes = groups.bincount(minlength=len(self.sizes)).tolist()
        parts = self._within(rows, sizes)
        for cache, part in zip(self.caches, parts, strict=True):
            cache.batch_select_indices(part)
        self.sizes = sizes

    def _within(self, rows: torch.Tensor, sizes: Sequence[int]) -> list[torch.Tensor]:
        """The rows that each cache's rows come from, counted from its own first. Raises
        InvalidInputError where one is another's."""
        parts, first = [], 0
        for part, size in zip(rows.split(list(sizes)), self.sizes, strict=True):
            if bool(((part < first) | (part >= first + size)).any()):
                raise errors.InvalidInputError(
                    "rows of a grouped cache",
                    got="a row that leaves its micro-batch",
                    expected="beams of a prompt in one micro-batch",
                    fix="fewer micro-batches, so that each holds whole prompts",
                )
            parts.append(part - first)
            first += size
        return parts


@contextmanager
def micro_batches(model: PreTrainedModel, n: int) -> Iterator[None]:
    """Has every layer of a model take a batch in `n` parts (or as many as there are rows), as long
    as it is open.

    Args:
        model: a decoder, streamed or not.
        n: parts; they differ by at most one row.

    Raises (from a forward pass):
        InvalidInputError: a cache or an argument that cannot be split; attention weights or router
            logits are asked for.
    """
    if n < 1:
        raise errors.InvalidInputError("micro_batches", got=n, expected="at least 1")
    _, layers = find_layers(model)
    if any("forward" in vars(layer) for layer in layers):
        raise errors.StateError(
            "micro_batches",
            got="layers whose forward is replaced already",
            expected="one use at a time",
        )
    with ExitStack() as stack:
        stack.callback(model.register_forward_pre_hook(_begin, with_kwargs=True).remove)
        stack.callback(model.register_forward_hook(_end, with_kwargs=True, always_call=True).remove)
        for number, layer in enumerate(layers):
            layer.forward = _in_parts(layer, layer.forward, number, n)
            stack.callback(vars(layer).pop, "forward")
        yield


def _begin(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Hook: the model's forward pass begins."""
    for name in ("output_attentions", "output_router_logits"):
        wanted = kwargs.get(name)
        if wanted or (wanted is None and getattr(model.config, name, False)):
            raise errors.InvalidInputError(
                "micro_batches", got=f"{name}=True", expected="hidden states and logits alone"
            )
    cache = cache_in(kwargs)
    if isinstance(cache, GroupedCache):
        ids = kwargs.get("input_ids", args[0] if args else None)
        rows = ids if ids is not None else kwargs.get("inputs_embeds")
        if rows is not None:
            cache.begin(model, rows.shape[0], ids)


def _end(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    cache = cache_in(kwargs)
    if isinstance(cache, GroupedCache):
        cache.end(model, failed=output is None)


def _in_parts(
    layer: nn.Module, forward: Callable[..., Any], number: int, n: int
) -> Callable[..., Any]:
    signature = inspect.signature(forward)

    def parts(*args: Any, **kwargs: Any) -> Any:
        bound = signature.bind(*args, **kwargs)
        flat: dict[str, Any] = {}
        for name, value in bound.arguments.items():
            flat |= (
                value
                if signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD
                else {name: value}
            )
        rows = flat["hidden_states"].shape[0]
        cache = next((flat[name] for name in _CACHES if flat.get(name) is not None), None)
        sizes = list(cache.sizes) if isinstance(cache, GroupedCache) else _sizes(rows, n)
        split = {
            name: _split(layer, name, value, rows, sizes)
            for name, value in flat.items()
            if name not in _CACHES
        }
        caches = _split_cache(cache, number, sizes)
        outputs = []
        try:
            for i, part in enumerate(caches):
                own = {name: values[i] for name, values in split.items()}
                own |= {name: part for name in _CACHES if flat.get(name) is not None}
                outputs.append(forward(**own))
        except BaseException:
            if isinstance(cache, GroupedCache):
                cache.undo()
            raise
        _join_cache(cache, number, caches)
        return _join(outputs)

    return parts


def _sizes(rows: int, n: int) -> list[int]:
    return [len(part) for part in torch.arange(rows).tensor_split(min(n, max(rows, 1)))]


def _split(layer: nn.Module, name: str, value: Any, rows: int, sizes: list[int]) -> list[Any]:
    """An argument for each part."""
    if isinstance(value, (tuple, list)):
        columns = [_split(layer, name, item, rows, sizes) for item in value]
        return [type(value)(column[i] for column in columns) for i in range(len(sizes))]
    if not isinstance(value, torch.Tensor) or value.ndim < 2 or value.shape[0] == 1:
        return [value] * len(sizes)
    if name not in _BY_ROW or value.shape[0] != rows:
        raise errors.InvalidInputError(
            f"micro_batches of {type(layer).__name__}",
            got=f"{name} of shape {list(value.shape)}",
            expected=f"{', '.join(_BY_ROW)} by row",
        )
    return list(value.split(sizes))


def _split_cache(cache: Cache | None, number: int, sizes: list[int]) -> list[Any]:
    """What each part takes for the cache: a `GroupedCache`'s own, or a copy whose layer `number`
    holds the part's rows."""
    if cache is None:
        return [None] * len(sizes)
    if isinstance(cache, GroupedCache):
        return cache.caches
    if cache.layer_class_to_replicate is not None:
        while len(cache.layers) <= number:
            cache.layers.append(cache.layer_class_to_replicate())
    layer = cache.layers[number]
    if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer) or getattr(
        cache, "offloading", False
    ):
        raise errors.InvalidInputError(
            "micro_batches",
            got=f"a {type(cache).__name__} with a {type(layer).__name__}",
            expected="a DynamicCache, or a GroupedCache",
            fix="past_key_values=GroupedCache([one cache for each micro-batch])",
        )
    parts = []
    holds = layer.is_initialized and layer.keys.numel() > 0
    columns = [layer.keys.split(sizes), layer.values.split(sizes)] if holds else None
    for i in range(len(sizes)):
        part, own = copy.copy(cache), copy.copy(layer)
        part.layers, part.layer_class_to_replicate = list(cache.layers), None
        part.layers[number] = own
        if columns is not None:
            own.keys, own.values = columns[0][i], columns[1][i]
        parts.append(part)
    return parts


def _join_cache(cache: Cache | None, number: int, parts: list[Any]) -> None:
    """Puts the parts' rows into the cache's layer. Until then it is as it was: a part that fails
    leaves no trace."""
    if cache is None or isinstance(cache, GroupedCache):
        return
    layers = [part.layers[number] for part in parts]
    if layers[0].is_initialized:
        keys, values = (
            torch.cat([getattr(layer, name) for layer in layers]) for name in ("keys", "values")
        )
        vars(cache.layers[number]).update({**vars(layers[-1]), "keys": keys, "values": values})


def _join(outputs: list[Any]) -> Any:
    first = outputs[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(outputs)
    if isinstance(first, tuple):
        return tuple(_join(list(column)) for column in zip(*outputs, strict=True))
    return first


def undo(cache: Cache, number: int, tokens: int) -> None:
    """Takes a failed forward pass of `tokens` tokens out of a cache: layers before `number` have
    them, the others do not.

    Layers that keep a window or a state have forgotten what they held before; they stay as they
    are.
    """
    if isinstance(cache, GroupedCache):
        cache.undo()
    elif isinstance(cache, KVCache):
        cache.passes.abort()
    else:
        for layer in cache.layers[:number]:
            if type(layer) is DynamicLayer:
                layer.crop(-tokens)
