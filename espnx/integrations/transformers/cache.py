"""`KVCache`: a transformers `Cache` whose full-attention layers keep K and V on SSD. A model takes it after `enable_kv_cache`.

Those layers hand only the new K and V to attention, tagged with the layer that keeps the rest; the attention function that is registered
with transformers asks that layer for the answer (`attention`). The past is never one tensor in Python. Sliding-window, linear and other
layers that hold little stay the framework's own, in memory.
"""

from __future__ import annotations

import logging
import os
import warnings
import weakref
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from types import TracebackType
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ... import errors
from ...checks import check_whole
from ...device.interface import READ_AHEAD_BYTES
from ...device.registry import Devices, directories_on
from ...kv.cache import SsdCache
from ...kv.options import CacheOptions
from ...kv.schedule import Decision
from ...kv.striping import Storage, directories_of
from ...kv.visibility import Visibility
from ...sizes import parse_size
from ...storage.engine import paths_of, reasons_of
from ...suggestions import CALL_FRAMES, suggests_keywords
from .attention import NAME, awaited
from .graphs import outside_graphs
from .identity import fingerprint as fingerprints
from .kept import KeptState
from .layers import StoredLayer, bytes_of, empty, layers_of, restore, sequences_of, states_of, why_not_cropped
from .passes import ForwardPass, PassGuard
from .projections import LayerInput, Rotations, Source
from .schedule import schedule
from .summary import summary

log = logging.getLogger(__name__)


class KVCache(Cache):
    """K and V on SSD for one batch of sequences. A context manager.

    Args:
        config: of the model, or the model's text config.
        storage: a directory on the SSD; several: one for each SSD; None: those of the devices that are given.
        x_rows: of how many sequences of the batch the projections' input is kept instead of K and V; None: as many as a short measurement
            says is fastest (see `decision`).
        name: keeps the cache in `storage` under this name: it is saved when it is closed, and continued when it is opened again, by this
            process or another. None: nothing of it outlives the process.
        library_bytes: a size (``50GiB``): when this cache is saved, others that are kept in `storage` and that no process has open are
            removed, the least recently used first, until all together fit into that size. None: nothing is removed.
        fingerprint: of the model, which a kept cache carries: ``whole``: every byte of its weights counts; ``sampled``: about 4,096 values
            of each tensor, which is quicker for models of many GB and does not see every change.
        format: of stored rows; None: as the model computes them; ``int8``: half the bytes of fp16, lossy; ``fp16``, ``bf16``: rounded.
        spill_interval: how many new tokens wait in memory before they are written; None: as many as fill whole pages.
        read_ahead_bytes: of rows read before they are asked for, on each device; a size (``48MiB``).
        capacity_tokens: of each sequence: space for as many is reserved when the first rows come, so that a full disk shows then.
        engine: ``auto``, ``uring``, ``posix``, ``gds``, ``gds-compat``, a file of settings (``nvme.toml``, see docs/engine.md), or how to
            make an engine (tests inject faults so).
        device: what keeps the rows and attends over them: a name (`espnx.device.names`), or a device for each directory
            (`espnx.device.open`), which stays the caller's; None: ``ssd``, or ``gpu`` where rows are computed on in a GPU's memory.
        compute: where rows are computed on: ``cpu``, ``cuda``; None: where the model's K and V turn out to be.
        threads: that compute on rows; None: as many as PyTorch uses.
        deadline_s: of each transfer.

    Attributes:
        store: the `SsdCache`.
        tokens: int64 [sequences, n]: what the model was fed since the cache was empty, or None where it was fed no ids.
        decision: how many sequences keep X, and why; None: it was not asked for, or nothing has come yet.

    Raises:
        InvalidInputError: an option is out of range, or the model has layers that espnx does not know.
        StoreBusyError, ForeignFileError, FormatError, ChecksumError: what is kept under the name cannot be continued.

    Raises (from the model's forward pass, as `generate` runs it):
        StateError: the model was not enabled, or another thread is using the cache.
        DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: with `sequences`, the tokens so far; the cache is as it
            was before that forward pass, and can go on.
    """

    @suggests_keywords
    def __init__(
        self,
        config: PreTrainedConfig,
        storage: Storage | None = None,
        *,
        x_rows: int | None = None,
        name: str | None = None,
        library_bytes: int | str | None = None,
        fingerprint: str = "whole",
        format: str | None = None,  # noqa: A002 - what it is called wherever rows are stored
        spill_interval: int | None = None,
        read_ahead_bytes: int | str = READ_AHEAD_BYTES,
        capacity_tokens: int | None = None,
        engine: str | os.PathLike[str] | Callable[[], Any] = "auto",
        device: Devices | None = None,
        compute: str | torch.device | None = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
    ):
        options = CacheOptions(
            format=format, spill_interval=spill_interval, read_ahead_bytes=read_ahead_bytes, capacity_tokens=capacity_tokens, engine=engine,
            device=device, compute=compute, threads=threads, deadline_s=deadline_s,
        )  # fmt: skip
        if fingerprint not in fingerprints.KINDS:
            raise errors.InvalidInputError("fingerprint", got=repr(fingerprint), expected=" or ".join(fingerprints.KINDS))
        if not isinstance(config, PreTrainedConfig):
            raise errors.InvalidInputError(
                "KVCache", got=type(config).__name__, expected="a config of transformers", fix="KVCache(model.config, ...)"
            )
        if storage is None:
            storage = directories_on(device)
        layers = layers_of(config.get_text_config(decoder=True), partial(StoredLayer, self))
        if x_rows is not None:
            check_whole("x_rows", x_rows, 0)
        limit_bytes = None if library_bytes is None else parse_size(library_bytes)
        if library_bytes is not None and name is None:
            raise errors.InvalidInputError("library_bytes of a cache without a name", got=library_bytes, fix="KVCache(..., name=...)")
        self._stored = [layer for layer in layers if isinstance(layer, StoredLayer)]
        self._in_memory = [layer for layer in layers if not isinstance(layer, StoredLayer)]
        self._unused = states_of(self._in_memory)
        if name is not None and self._in_memory:
            raise errors.InvalidInputError(
                "a kept cache", got="layers that are not full attention", expected="full attention in every layer", fix="name=None"
            )
        log.debug("%d layers go to %s, %d stay in memory (windows or states)", len(self._stored), storage, len(self._in_memory))
        if not self._stored:
            warnings.warn(
                "no layer of this model is full attention alone: nothing of this cache goes to SSD, all of it stays in memory",
                stacklevel=2 + CALL_FRAMES,
            )
        super().__init__(layers=layers)
        self.tokens: torch.Tensor | None = None
        self.decision: Decision | None = None
        self._x_rows, self._threads = x_rows, threads or 0
        self._name, self._storage = name, directories_of(storage)
        self._rotations = Rotations()
        self._passes = PassGuard()
        self._masks: tuple[torch.Tensor | None, int, Visibility] | None = None  # of the pass under way
        self._hidden: torch.Tensor | None = None  # which tokens are padding: bool [sequences, n]
        self._is_closed = self._is_unconfirmed = False
        self._core: Callable[[], torch.nn.Module | None] = lambda: None  # of the model that was checked last
        self._kept = None if name is None else KeptState(storage, name, fingerprint, limit_bytes)
        with ExitStack() as undo:  # an error leaves nothing open
            if self._kept is not None:
                undo.callback(self._kept.abandon)
            directories, names = (storage, None) if self._kept is None else (self._kept.directories, self._kept.names)
            self.store = SsdCache(directories, len(layers), options, names=names)
            undo.callback(self.store.close)
            self._continue()
            undo.pop_all()

    def _continue(self) -> None:
        """Goes on from what was kept under the name, if anything was."""
        tensors = None if self._kept is None else self._kept.open(self.store, self._x_rows)
        if tensors is not None:
            self.tokens = tensors.get("tokens")
            self._hidden = tensors["hidden"].bool() if "hidden" in tensors else None
            self._rotations.restore(tensors)
            self._x_rows = self.store.x_rows
            for layer in self._stored:
                layer.is_initialized = True

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer on SSD."""
        return [self.store.length(layer.number) for layer in self._stored]

    @property
    def _sequences(self) -> int:
        """In the batch, by stored layers, or where there are none by those in memory; 0 while nothing is cached."""
        return self.store.sequences or next((n for n in map(sequences_of, self._in_memory) if n), 0)

    # --- forward passes, as the hooks of an enabled model tell of them ---

    def _begin_pass(self, model: PreTrainedModel, ids: torch.Tensor | None, sequences: int | None) -> None:
        """A forward pass of a model begins, over these new tokens (None: not known) of this many sequences (None: not known).

        Raises:
            StateError: the model does not attend through espnx, or the cache is being used by another thread.
            InvalidInputError: the model has other layers, the cache holds another batch, or another process made it.
            ForeignFileError: a kept cache is of another model.
        """
        self.store.check_process()  # before anything waits for a thread or a lock of the parent's
        with self._passes.lock:
            if self._passes.is_inside(model):
                return
            self._abort_pass()
            self._check_model(model, sequences)
            held = self.get_seq_length()
            if held == 0:
                self._choose_x_rows(model, ids)
            self.store.begin(held)
            self._rotations.crop(held)
            self._passes.begin(ForwardPass(model, held, self._hidden, states_of(self._in_memory)), ids)
            if ids is None:
                self.tokens = None
            elif held == 0 or self.tokens is None:
                self.tokens = ids.detach().cpu().clone() if held == 0 else None
            else:
                self.tokens = torch.cat([self.tokens[:, :held], ids.detach().cpu()], dim=1)

    def _choose_x_rows(self, model: PreTrainedModel, ids: torch.Tensor | None) -> None:
        """For a batch that begins with these tokens. Raises InvalidInputError where X rows are asked for and the model allows none."""
        if self._x_rows and (why := getattr(model, "_espnx_why_no_x", None)):
            raise errors.InvalidInputError("x_rows", got=f"{self._x_rows}, and {why}", expected="0 for this model", fix="x_rows=0")
        if self._x_rows is None:
            numbers = [layer.number for layer in self._stored]
            self.decision = None if ids is None else schedule(model, ids, self.store, numbers, self._threads)
        self.store.x_rows = self.decision.x_rows if self.decision else self._x_rows or 0
        log.debug("%d sequences keep X instead of K and V: %s", self.store.x_rows, self.decision.why if self.decision else "as asked")
        self._is_unconfirmed = self._x_rows is None and self.store.x_rows > 0

    def _check_model(self, model: PreTrainedModel, sequences: int | None) -> None:
        text = model.config.get_text_config(decoder=True)
        if text._attn_implementation != NAME:
            raise errors.StateError(
                f"attention of {type(model).__name__}",
                got=repr(text._attn_implementation),
                expected=repr(NAME),
                fix="espnx.enable_kv_cache(model)",
            )
        held = self.store.sequences if self.get_seq_length() else 0
        if held and sequences not in (None, held):
            raise errors.InvalidInputError("sequences of the batch", got=sequences, expected=f"{held}, as in the cache", fix="reset()")
        core = model.base_model
        if core is not self._core() and (got := len(text.per_layer_config)) != len(self.layers):
            raise errors.InvalidInputError(
                f"layers of {type(model).__name__}", got=got, expected=f"{len(self.layers)}, as in the config that the cache was made with"
            )
        if self._kept is not None:
            self._kept.check(model)
        self._core = weakref.ref(core)

    def _end_pass(self, model: torch.nn.Module, *, failed: bool) -> None:
        """The model has returned, or an error ended it; where one is inside another, the outer one's end counts.

        Raises StateError: attention did not ask for the K and V of a layer.
        """
        if not self._passes.is_of(model):
            return
        unanswered = next((layer for layer in self._stored if layer.pending is not None), None)
        try:
            if unanswered is not None and not failed:
                unanswered.check_answered()
        finally:
            if failed or unanswered is not None:
                self._abort_pass()
        for layer in self._stored:
            layer.end_pass()
        self.store.end()
        self._passes.end()

    def _abort_pass(self) -> None:
        """Takes a pass that has not come to its end out of all layers. Raises StateError while another thread runs it."""
        with self._passes.lock:
            if (begun := self._passes.abort()) is not None:
                self._undo(begun)

    def _undo(self, begun: ForwardPass) -> None:
        awaited.layer = None
        for layer in self._stored:
            layer.forget_pass()
        if begun.held:
            self.store.crop(begun.held)
        else:
            self.store.clear()
        restore(self._in_memory, begun.in_memory)
        self._hidden, self._masks = begun.hidden, None

    # --- what a model asks and tells as it runs ---

    @outside_graphs
    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @outside_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, layer_idx)

    @outside_graphs
    def get_seq_length(self, layer_idx: int = 0) -> int:
        if (held := self._passes.held) is not None:  # what the pass has added to some of its layers counts when it ends
            return held
        return min(self.lengths) if self._stored else super().get_seq_length(layer_idx)

    @property
    def max_cache_len(self) -> int:
        """What PEFT asks of a cache before it puts one of its own in its place. Raises InvalidInputError."""
        raise errors.InvalidInputError(
            "a KVCache and prefix tuning", got="a cache that PEFT makes of the prefix, in place of this one", expected="no other cache",
            fix="past_key_values=None, or an adapter that leaves the cache alone (LoRA, prompt tuning)",
        )  # fmt: skip

    def _check_text(self, model: PreTrainedModel, input_ids: torch.Tensor) -> None:
        """Whether a text [sequences, n], which a model is to go on with, begins with what is cached, and is longer.

        Raises InvalidInputError; where the model is another one, what `_begin_pass` raises.
        """
        held, n = self.get_seq_length(), input_ids.shape[-1]
        if not held or self._is_closed or (n > held and self._is_begin_of(input_ids) is not False):
            return
        self._check_model(model, None)
        raise errors.InvalidInputError(
            "a prompt and a cache that is in use", got="another text than the cache holds" if n > held else f"{n} tokens",
            expected=f"the whole text: the {held} tokens that the cache holds, and more",
            fix="cache.reuse_prefix(input_ids) before generate, or cache.reset()",
        )  # fmt: skip

    def _is_begin_of(self, input_ids: torch.Tensor) -> bool | None:
        """Whether a text [sequences, n] begins with the tokens that are cached, padding aside; each sequence of it may have become several
        in the cache (beams, samples). None: the tokens are not known, or are another batch's."""
        held = self.get_seq_length()
        if self.tokens is None or not len(input_ids) or len(self.tokens) % len(input_ids):
            return None
        given = input_ids[:, :held].cpu().repeat_interleave(len(self.tokens) // len(input_ids), dim=0)
        same = given == self.tokens[:, : given.shape[1]]
        return bool((same if self._hidden is None else same | self._hidden[:, : same.shape[1]]).all())

    # --- what a stored layer asks (`layers.LayerHost`): no part of what users see ---

    def _reach(self) -> None:
        self._passes.reach()

    def _visibility(self, mask: torch.Tensor | None, n_sequences: int, positions: int) -> Visibility:
        known = self._masks
        if known is None or known[0] is not mask or known[1] != positions:  # the first layer of the pass; all others have the same
            known = self._masks = (mask, positions, Visibility.of(mask, n_sequences, positions))
            self._hidden = known[2].hidden
        return known[2]

    def _made_of(self, layer_input: LayerInput | None, k: torch.Tensor, v: torch.Tensor, past: int) -> Source | None:
        """Where X rows were this cache's own idea, the first layer shows whether the model makes K and V as is known here; if it does not,
        K and V are kept."""
        if not self.store.x_rows:
            return None
        try:
            source = None if layer_input is None else layer_input.source(k.shape[1], self._rotations, past)
            if self._is_unconfirmed:
                if source is None:
                    raise errors.InvalidInputError("X rows of this model", got="no input of its projections")
                x, projection = source
                projection.check(x[0, :8], k[0, :, :8], v[0, :, :8], 0)
        except errors.InvalidInputError as error:
            if not self._is_unconfirmed:
                raise
            self.decision, self.store.x_rows = Decision(0, str(error)), 0
            source = None
        self._is_unconfirmed = False
        return source

    def _fail(self, error: BaseException) -> None:
        self._abort_pass()
        if self.tokens is not None:
            error.sequences = self.tokens  # type: ignore[attr-defined]

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
        self._abort_pass()
        if sequences == list(range(self._sequences)):
            return
        self.store.check_select(sequences)
        with self._all_or_none():
            for layer in self._in_memory:
                in_memory(layer)
            self.store.select(sequences)
        self._rotations.select(sequences)
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
            tokens_to_remove: a negative number, minus the number of tokens.

        Raises:
            InvalidInputError: a layer in memory cannot go back (a window that has passed its first tokens, a state); nothing was changed.
        """
        if tokens_to_remove > 0:
            raise errors.InvalidInputError("crop", got=tokens_to_remove, expected="a negative number: minus the number of tokens that go")
        self._abort_pass()
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
        self._abort_pass()
        self.store.clear()
        self._rotations = Rotations()
        self.tokens = self._masks = self._hidden = None
        empty(self._in_memory, self._unused)

    def __repr__(self) -> str:
        if self._is_closed:
            return "<KVCache: closed>"
        name = "" if self._name is None else f" {self._name!r}"
        return f"<KVCache{name}: {self.store.sequences} sequences of {self.get_seq_length():,} tokens in {', '.join(self._storage)}>"

    def summary(self) -> str:
        """What is stored and where, and where the time and the bytes went since the start: a table of several lines."""
        return summary(self.stats(), self._storage)

    def stats(self) -> dict[str, Any]:
        """Counters: tokens, bytes written and read, seconds of waiting and computing, the paths that the bytes took; how many layers are
        stored, how many the framework keeps in memory (windows, states) and how many bytes these take; how many devices could not attend
        to, and why; how many sequences keep X, what was predicted when that was decided, and the measured mean time of a decoding step."""
        files = self.store.striped.path_report()
        return {
            "tokens": self.get_seq_length(), "sequences": self.store.sequences, **asdict(self.store.striped.stats()),
            **self.store.attention.stats(), "memory_bytes": self.store.memory_bytes,
            "effective_path": paths_of(file.effective_path for file in files),
            "fallback_reason": reasons_of(file.fallback_reason for file in files),
            "layers_on_ssd": len(self._stored), "layers_in_memory": len(self._in_memory),
            "layers_in_memory_bytes": bytes_of(self._in_memory), "x_rows": min(self.store.x_rows, self.store.sequences),
            "decision": None if self.decision is None else self.decision.as_dict(),
            **self._passes.times.totals(),
        }  # fmt: skip

    def reuse_prefix(self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None) -> int:
        """Keeps as much of the cache as a new prompt begins with, forgets the rest, and returns the number of tokens kept: call it before
        `generate`, which then reads only what is new. At least the prompt's last token is left to be read. Where layers with windows or
        states cannot go back to what is common, nothing is kept.

        Args:
            input_ids: int64 [sequences, n].
            attention_mask: [sequences, n], or None.
        """
        self._abort_pass()
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
        """Publishes the state of a kept cache: from here on another process can continue it.

        Raises:
            StateError: the cache has no name.
            WriteError, DiskFullError: what was published before stays.
        """
        if self._kept is None:
            raise errors.StateError("save of a cache without a name", fix="KVCache(..., name=...)")
        self._abort_pass()
        held = self.get_seq_length()
        tensors = {} if self.tokens is None or not held else {"tokens": self.tokens[:, :held]}
        if self._hidden is not None:
            tensors["hidden"] = self._hidden[:, :held].to(torch.uint8)
        if self.store.x_rows:  # without X rows nothing is computed again, and rotations do not grow with the text
            tensors |= self._rotations.tensors()
        self._kept.save(self.store, tensors)

    def close(self) -> None:
        """Ends all I/O. A kept cache is saved first; of any other the space returns and nothing is left.

        Raises WriteError, DiskFullError: a kept cache could not be saved. It stays open then, so that `close` may be called again.
        """
        if self._kept is not None and not self._is_closed:
            self.save()
        self._is_closed = True
        self.store.close()
        if self._kept is not None:
            self._kept.close()

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise errors.InvalidInputError("a copy of a cache on SSD", fix="keep it (name=...), and reuse_prefix() in it")

    def __reduce__(self) -> Any:
        raise errors.InvalidInputError("a pickled cache on SSD", fix="keep it (name=...), and open it by that name in the other process")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
