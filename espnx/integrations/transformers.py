"""Hugging Face transformers: `enable` a model, then pass a `KVCache` to `generate`.

A `KVCache` is a transformers `Cache` whose full-attention layers hand only the new K and V to attention, tagged with the layer that keeps
the rest; the attention function that `enable` registers asks that layer for the answer. The past is never one tensor in Python.
Sliding-window, linear and other layers that hold little stay the framework's own, in memory.
"""

from __future__ import annotations

import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from transformers import AttentionInterface, Cache, PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from .. import errors
from ..checks import check_whole
from ..device.layout import format_of
from ..kv.cache import SsdCache
from ..kv.folders import KeptName
from ..kv.kept import ROWS_NAME, load, save
from ..kv.library import evict
from ..kv.schedule import Decision
from ..kv.spread import Storage
from ..kv.visibility import Visibility
from ..sizes import parse_size
from ..storage.engine import paths_of, reasons_of
from . import fingerprints
from .cache_layers import bytes_of, layers_of, sequences_of, why_not_cropped
from .enabling import NAME, Attention, check_attention, check_config
from .forward_pass import ForwardPass, restore, states_of
from .hf_attention import awaited, espnx_attention
from .masks import padding_mask
from .pass_times import PassTimes
from .probe import probe
from .projections import Rotations, attention_modules
from .scheduling import schedule
from .stored_layer import Input, StoredLayer


def enable(model: PreTrainedModel) -> PreTrainedModel:
    """Lets a model attend through espnx; without a `KVCache` it computes what it did before.

    Two forward passes of a few tokens show whether that is so (about the time of two decoding steps; for a model that was enabled before,
    none).

    Args:
        model: a decoder whose attention goes through transformers' attention interface (Llama, Qwen, Mistral, Mixtral, OPT, GPT-2, ...).

    Returns:
        The model itself.

    Raises:
        InvalidInputError: the model computes attention in a way that espnx does not; nothing was changed.
    """
    if not isinstance(model, PreTrainedModel):
        raise errors.InvalidInputError("enable", got=type(model).__name__, expected="a model of transformers")
    AttentionInterface.register(NAME, espnx_attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    before = Attention.of(model)
    check_config(model)
    model.set_attn_implementation(NAME)
    try:
        check_attention(model, NAME, before)
        if not hasattr(model, "_espnx_hooks"):
            why_no_x = probe(model)
            whole = {id(part): part for part in (model, model.base_model)}.values()  # either may be called
            for part in whole:
                part._espnx_why_no_x = why_no_x
            hooks = [module.register_forward_pre_hook(_note_input, with_kwargs=True) for module in attention_modules(model)]
            hooks += [part.register_forward_pre_hook(_note_forward, with_kwargs=True) for part in whole]
            model._espnx_hooks = [*hooks, *(part.register_forward_hook(_note_end, with_kwargs=True, always_call=True) for part in whole)]
    except BaseException:
        before.restore()
        raise
    return model


class KVCache(Cache):
    """K and V on SSD for one batch of sequences. A context manager.

    Args:
        config: of the model, or the model's text config.
        storage: a directory on the SSD; several: one for each SSD.
        x_rows: of how many sequences of the batch the projections' input is kept instead of K and V; None: as many as a short measurement
            says is fastest (see `decision`).
        name: keeps the cache in `storage` under this name: it is saved when it is closed, and continued when it is opened again, by this
            process or another. None: nothing of it outlives the process.
        library_bytes: a size (``50GiB``): when this cache is saved, others that are kept in `storage` and that no process has open are
            removed, the least recently used first, until all together take at most so much. None: nothing is removed.
        fingerprint: of the model, which a kept cache carries: ``whole``: every byte of its weights counts; ``sampled``: about 4,096 values
            of each tensor, which is quicker for models of many GB and does not see every change.
        **options: of `espnx.kv.cache.SsdCache`: format, spill_interval, read_ahead_bytes, capacity_tokens, engine, device, threads,
            deadline_s. With a model on a GPU rows are computed on there.

    Attributes:
        store: the `SsdCache`.
        tokens: int64 [sequences, n]: what the model was fed since the cache was empty, or None where it was fed no ids.

    Raises (from the model's forward pass, as `generate` runs it):
        DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: with `sequences`, the tokens so far; the cache is as it
            was before that forward pass, and can go on.
    """

    def __init__(
        self,
        config: PreTrainedConfig,
        storage: Storage,
        *,
        x_rows: int | None = None,
        name: str | None = None,
        library_bytes: int | str | None = None,
        fingerprint: str = "whole",
        **options: Any,
    ):
        if fingerprint not in fingerprints.KINDS:
            raise errors.InvalidInputError("fingerprint", got=repr(fingerprint), expected=" or ".join(fingerprints.KINDS))
        self._fingerprint_kind = fingerprint
        if not isinstance(config, PreTrainedConfig):
            raise errors.InvalidInputError(
                "KVCache", got=type(config).__name__, expected="a config of transformers", fix="KVCache(model.config, ...)"
            )
        layers = layers_of(config.get_text_config(decoder=True), partial(StoredLayer, self))
        if x_rows is not None:
            check_whole("x_rows", x_rows, 0)
        self._library_bytes = None if library_bytes is None else parse_size(library_bytes)
        if library_bytes is not None and name is None:
            raise errors.InvalidInputError("library_bytes of a cache without a name", got=library_bytes, fix="KVCache(..., name=...)")
        self._kept = None if name is None else KeptName(storage, name)
        try:
            self.store = SsdCache(storage if self._kept is None else self._kept.directories, len(layers), **self._names(), **options)
        except BaseException:
            if self._kept is not None:
                self._kept.abandon()
            raise
        self.tokens: torch.Tensor | None = None
        self.rotations = Rotations()
        self.decision: Decision | None = None
        self._x_rows, self._threads = x_rows, int(options.get("threads") or 0)
        self._times = PassTimes()
        self._masks: tuple[torch.Tensor | None, int, Visibility] | None = None
        self._hidden: torch.Tensor | None = None
        self._fingerprint: dict[str, Any] | None = None
        self._closed = self._unconfirmed = False
        self._pass: ForwardPass | None = None
        self._turn = threading.RLock()
        self._core: Callable[[], torch.nn.Module | None] = lambda: None  # of the model that was checked last
        super().__init__(layers=layers)
        if not self._stored:
            warnings.warn(
                "no layer of this model is full attention alone: nothing of this cache goes to SSD, all of it stays in memory", stacklevel=2
            )
        if self._kept is not None:
            self._open_kept()

    def _names(self) -> dict[str, Any]:
        return {} if self._kept is None else {"names": [ROWS_NAME] * len(self._kept.directories)}

    def _open_kept(self) -> None:
        """Continues what was saved under the name, if anything was."""
        kept = self._kept
        if kept is None:
            return
        if self._in_memory:
            self._drop()
            raise errors.InvalidInputError(
                "a kept cache", got="layers that are not full attention", expected="full attention in every layer", fix="name=None"
            )
        try:
            found = load(self.store, kept.directories[0]) if kept.exists else None
            if found is not None:
                self._check_kept()
        except BaseException:
            self._drop()
            raise
        if found is not None:
            self._fingerprint, tensors = found
            self.tokens = tensors.get("tokens")
            self._hidden = tensors["hidden"].bool() if "hidden" in tensors else None
            self.rotations.restore(tensors)
            self._x_rows = self.store.x_rows
            for layer in self._stored:
                layer.is_initialized = True

    def _check_kept(self) -> None:
        """What was kept lossily is not continued by who did not ask for that, nor the other way round."""
        if self._x_rows not in (None, self.store.x_rows):
            raise errors.InvalidInputError("x_rows of a kept cache", got=self._x_rows, expected=f"{self.store.x_rows}, or None")
        asked = self.store.format
        for rows in self.store.kv:
            if rows is not None and rows.layout.format != (asked or format_of(rows.dtype)):
                raise errors.InvalidInputError(
                    "format of a kept cache", got=asked or "none: rows as they are", expected=repr(rows.layout.format),
                    fix="open it as it was made, or choose another name",
                )  # fmt: skip

    def _drop(self) -> None:
        """It could not be opened."""
        self.store.close()
        if self._kept is not None:
            self._kept.abandon()

    @property
    def _stored(self) -> list[StoredLayer]:
        return [layer for layer in self.layers if isinstance(layer, StoredLayer)]

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer on SSD."""
        return [self.store.length(layer.number) for layer in self._stored]

    @property
    def _in_memory(self) -> list[Any]:
        return [layer for layer in self.layers if not isinstance(layer, StoredLayer)]

    @property
    def _sequences(self) -> int:
        """In the batch, by stored layers, or where there are none by those in memory; 0 while nothing is cached."""
        return self.store.sequences or next((n for n in map(sequences_of, self._in_memory) if n), 0)

    def visibility(self, mask: torch.Tensor | None, n_sequences: int, positions: int) -> Visibility:
        """Of a forward pass: computed for its first layer, and used by all."""
        known = self._masks
        if known is None or known[0] is not mask or known[1] != positions:
            known = self._masks = (mask, positions, Visibility.of(mask, n_sequences, positions))
            self._hidden = known[2].hidden
        return known[2]

    # --- forward passes ---

    def begin_pass(self, model: PreTrainedModel, ids: torch.Tensor | None, sequences: int | None) -> None:
        """A forward pass of a model begins, over these new tokens of so many sequences (None: not known).

        Raises:
            InvalidInputError: the model does not attend through espnx, or has other layers; the cache holds another batch, or is being
                used by another thread.
            ForeignFileError: a kept cache is of another model.
        """
        with self._turn:
            under_way = self._pass
            if under_way is not None and not under_way.reached and under_way.model is not model:
                under_way.check_thread()
                return  # the model around this one has begun the pass
            self.abort_pass()
            self._check_model(model, sequences)
            held = self.get_seq_length()
            if held == 0:
                if self._x_rows is None:
                    numbers = [layer.number for layer in self._stored]
                    self.decision = None if ids is None else schedule(model, ids, self.store, numbers, self._threads)
                self.store.x_rows = self.decision.x_rows if self.decision else self._x_rows or 0
                self._unconfirmed = self._x_rows is None and self.store.x_rows > 0
            self._times.begin(ids, is_first=held == 0)
            self.store.begin(held)
            self._pass = ForwardPass(model, held, self._hidden, states_of(self._in_memory))
            self.rotations.crop(held)
            if ids is None:
                self.tokens = None
            elif held == 0 or self.tokens is None:
                self.tokens = ids.detach().cpu().clone() if held == 0 else None
            else:
                self.tokens = torch.cat([self.tokens[:, :held], ids.detach().cpu()], dim=1)

    def _check_model(self, model: PreTrainedModel, sequences: int | None) -> None:
        text = model.config.get_text_config(decoder=True)
        if text._attn_implementation != NAME:
            raise errors.InvalidInputError(
                f"attention of {type(model).__name__}", got=repr(text._attn_implementation), expected=repr(NAME), fix="espnx.enable(model)"
            )
        held = self.store.sequences if self.get_seq_length() else 0
        if held and sequences not in (None, held):
            raise errors.InvalidInputError("sequences of the batch", got=sequences, expected=f"{held}, as in the cache", fix="reset()")
        core = model.base_model
        if core is self._core():
            return
        if (got := len(text.per_layer_config)) != len(self.layers):
            raise errors.InvalidInputError(
                f"layers of {type(model).__name__}", got=got, expected=f"{len(self.layers)}, as in the config that the cache was made with"
            )
        if self._kept is not None:
            now = fingerprints.fingerprint(model, self._fingerprint_kind)
            if self._fingerprint is not None:
                fingerprints.compare(self._fingerprint, now, self._kept.directories[0])
            self._fingerprint = now
        self._core = weakref.ref(core)

    def reach(self) -> None:
        """A layer is given K and V in the pass that was begun."""
        if self._pass is None:
            raise errors.InvalidInputError("a cache on SSD", got="a model that is not enabled", fix="espnx.enable(model)")
        self._pass.reached = True

    def end_pass(self, model: torch.nn.Module, *, failed: bool) -> None:
        """The model has returned, or an error ended it; where one is inside another, the outer one's end counts."""
        if self._pass is None or self._pass.model is not model or self._pass.thread != threading.get_ident():
            return
        is_unanswered = any(layer.pending is not None for layer in self._stored)
        if failed or is_unanswered:
            self.abort_pass()
        if is_unanswered and not failed:
            raise errors.InvalidInputError(
                "K and V went into the cache, but attention did not ask for them", fix="call espnx.enable(model) before generate"
            )
        for layer in self._stored:
            layer.answered = None
        self._times.end()
        self._pass = None

    def abort_pass(self) -> None:
        """Takes a pass that has not come to its end out of all layers. Raises InvalidInputError while another thread runs it."""
        with self._turn:
            if self._pass is None:
                return
            self._pass.check_thread()
            under_way, self._pass = self._pass, None
            for layer in self._stored:
                layer.pending = layer.inputs = layer.answered = awaited.layer = None
            if under_way.held:
                self.store.crop(under_way.held)
            else:
                self.store.clear()
            restore(self._in_memory, under_way.before)
            self._hidden, self._masks = under_way.hidden, None

    def confirmed(self, find: Callable[[], Input], k: torch.Tensor, v: torch.Tensor) -> Input:
        """What a layer's K and V were made of. Where X rows were this cache's own idea, its first layer shows whether the model makes K and
        V as is known here; if it does not, K and V are kept."""
        if not self._unconfirmed:
            return find()
        self._unconfirmed = False
        try:
            x, projection = find()
            if x is None or projection is None:
                raise errors.InvalidInputError("X rows of this model", got="no input of its projections")
            projection.check(x[0, :8], k[0, :, :8], v[0, :, :8], 0)
        except errors.InvalidInputError as error:
            self.decision, self.store.x_rows = Decision(0, str(error)), 0
            return None, None
        return x, projection

    def get_seq_length(self, layer_idx: int = 0) -> int:
        if self._pass is not None:  # what it has added to some of its layers counts when it ends
            return self._pass.held
        return min(self.lengths) if self._stored else super().get_seq_length(layer_idx)

    # --- what generate does to a batch; the framework would do it layer by layer ---

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self._select(beam_idx.tolist(), lambda layer: layer.reorder_cache(beam_idx))

    def batch_repeat_interleave(self, repeats: int) -> None:
        self._select(
            [i for i in range(self._sequences) for _ in range(repeats)],
            lambda layer: layer.reorder_cache(torch.arange(self._sequences).repeat_interleave(repeats)),
        )

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        chosen = torch.arange(self._sequences)[indices.cpu()]
        self._select(chosen.tolist(), lambda layer: layer.reorder_cache(chosen))

    def _select(self, sequences: list[int], in_memory: Callable[[Any], None]) -> None:
        """Sequence i becomes what `sequences[i]` was, in every layer or, whatever raises, in none."""
        self.abort_pass()
        if sequences == list(range(self._sequences)):
            return
        self.store.check_select(sequences)
        with self._all_or_none():
            for layer in self._in_memory:
                in_memory(layer)
            self.store.select(sequences)
        self.rotations.select(sequences)
        self._masks = None
        if self._hidden is not None:
            self._hidden = self._hidden[sequences]
        if self.tokens is not None:
            self.tokens = self.tokens[sequences]

    @contextmanager
    def _all_or_none(self) -> Iterator[None]:
        """A change of every layer. What is half changed where an error comes is forgotten: no layer goes on with another's tokens."""
        before = states_of(self._in_memory)
        try:
            yield
        except errors.InvalidInputError:  # refused: stored rows are as they were
            restore(self._in_memory, before)
            raise
        except BaseException:
            self.reset()
            raise

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens.

        Args:
            tokens_to_remove: a negative number: so many go.

        Raises:
            InvalidInputError: a layer in memory cannot go back (a window that has passed its first tokens, a state); nothing was changed.
        """
        if tokens_to_remove > 0:
            raise errors.InvalidInputError("crop", got=tokens_to_remove, expected="a negative number: so many tokens go")
        self.abort_pass()
        held = self.get_seq_length()
        if -tokens_to_remove >= held:
            if tokens_to_remove:
                self.reset()
            return
        if not tokens_to_remove:
            for layer in self._in_memory:
                if getattr(layer, "record_past", False):
                    layer.crop(0)  # what it recorded is wanted no more
            return
        if why := why_not_cropped(self._in_memory, -tokens_to_remove):
            raise errors.InvalidInputError(
                f"crop by {-tokens_to_remove} of {held} tokens", got=why, expected="layers that can forget tokens",
                fix="reset(), and compute the prompt again",
            )  # fmt: skip
        with self._all_or_none():
            for layer in self._in_memory:
                layer.crop(tokens_to_remove)
            self.store.crop(held + tokens_to_remove)

    def reset(self) -> None:
        self.abort_pass()
        self.store.clear()
        self.rotations = Rotations()
        self.tokens = self._masks = self._hidden = None
        for layer in self._in_memory:
            layer.reset()

    def stats(self) -> dict[str, Any]:
        """Counters: tokens, bytes written and read, seconds of waiting and computing, the paths that the bytes took; how many layers are
        stored, how many the framework keeps in memory (windows, states) and how many bytes these take; how many sequences keep X, what was
        predicted when that was decided, and the measured mean time of a decoding step."""
        devices = [device.stats() for device in self.store.spread.devices]
        totals = {
            name: sum(getattr(device, name) for device in devices)
            for name, value in asdict(devices[0]).items()
            if isinstance(value, (int, float))
        }
        return {
            "tokens": self.get_seq_length(), "sequences": self.store.sequences, **totals, "memory_bytes": self.store.memory_bytes,
            "effective_path": paths_of(device.effective_path for device in self.store.spread.devices),
            "fallback_reason": reasons_of(device.fallback_reason for device in self.store.spread.devices),
            "layers_on_ssd": len(self._stored), "layers_in_memory": len(self._in_memory),
            "layers_in_memory_bytes": bytes_of(self._in_memory), "x_rows": min(self.store.x_rows, self.store.sequences),
            "decision": None if self.decision is None else self.decision.as_dict(),
            **self._times.totals(),
        }  # fmt: skip

    def match(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Keeps as much of the cache as a new prompt begins with, forgets the rest, and returns the number of tokens kept: call it before
        `generate`, which then reads only what is new. At least the prompt's last token is left to be read. Where layers with windows or
        states cannot go back to what is common, nothing is kept.

        Args:
            input_ids: int64 [sequences, n].
            attention_mask: [sequences, n], or None.
        """
        self.abort_pass()
        held, input_ids = self.get_seq_length(), input_ids.cpu()
        keep = 0
        if held and self.tokens is not None and len(input_ids) == self._sequences:
            n = min(held, input_ids.shape[1] - 1)
            same = (self.tokens[:, :n] == input_ids[:, :n]).all(dim=0)
            hidden = torch.zeros_like(input_ids, dtype=torch.bool) if attention_mask is None else ~attention_mask.bool().cpu()
            before = torch.zeros_like(hidden[:, :n]) if self._hidden is None else self._hidden[:, :n]
            same &= (hidden[:, :n] == before).all(dim=0)
            keep = int(same.to(torch.int64).cumprod(0).sum())
        if held and not keep:
            self.reset()  # the next batch may have another size
        elif keep < held:
            if why_not_cropped(self._in_memory, held - keep):
                self.reset()
                return 0
            self.crop(keep - held)
        return keep

    def save(self) -> None:
        """Publishes the state of a kept cache: from here on another process can continue it. Raises WriteError, DiskFullError."""
        if self._kept is None:
            raise errors.InvalidInputError("save of a cache without a name", fix="KVCache(..., name=...)")
        self.abort_pass()
        held = self.get_seq_length()
        if self._fingerprint is not None:
            tensors = {} if self.tokens is None or not held else {"tokens": self.tokens[:, :held]}
            if self._hidden is not None:
                tensors["hidden"] = self._hidden[:, :held].to(torch.uint8)
            save(self.store, self._kept.directories[0], self._fingerprint, tensors | self.rotations.tensors())
            self._kept.touch()
            if self._library_bytes is not None:
                evict(self._kept.roots, self._library_bytes)

    def close(self) -> None:
        """Ends all I/O. A kept cache is saved first; of any other the space returns and nothing is left.

        Raises WriteError, DiskFullError: a kept cache could not be saved. It stays open then, so that `close` may be called again.
        """
        if self._kept is not None and not self._closed:
            self.save()
        self._closed = True
        self.store.close()
        if self._kept is not None:
            self._kept.unlock()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise errors.InvalidInputError("a copy of a cache on SSD", fix="keep it (name=...) and use match() to go on from a common prefix")

    def __reduce__(self) -> Any:
        raise errors.InvalidInputError("a pickled cache on SSD", fix="keep it (name=...), and open it by that name in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def _cache_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> KVCache | None:
    return next((value for value in (*kwargs.values(), *args) if isinstance(value, KVCache)), None)


def _note_end(model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
    if (cache := _cache_of(args, kwargs)) is not None:
        cache.end_pass(model, failed=output is None)


def _note_forward(model: PreTrainedModel, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = _cache_of(args, kwargs)
    if cache is None:
        awaited.layer = None
        return
    ids, embeddings = kwargs.get("input_ids", args[0] if args else None), kwargs.get("inputs_embeds")
    given = ids if isinstance(ids, torch.Tensor) else embeddings
    is_ids = isinstance(ids, torch.Tensor) and not ids.is_floating_point()
    cache.begin_pass(model, ids if is_ids else None, None if given is None else given.shape[0])


def _note_input(module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    cache = kwargs.get("past_key_values")
    if isinstance(cache, KVCache) and cache.store.x_rows:
        layer = cache.layers[module.layer_idx]
        if isinstance(layer, StoredLayer):
            layer.inputs = module, kwargs.get("hidden_states", args[0] if args else None), kwargs.get("position_embeddings")
