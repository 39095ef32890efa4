"""`KVCache`: a transformers `Cache` whose full-attention layers keep K and V on SSD. A model takes
it after `enable_kv_cache`.

Those layers hand only the new K and V to attention, tagged with the layer that keeps the rest; the
attention function that is registered with transformers asks that layer for the answer
(`attention`). The past is never one tensor in Python. Sliding-window, linear and other layers that
hold little stay the framework's own, in memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any, Self

import torch
from transformers import Cache, PreTrainedConfig, PreTrainedModel

from ... import errors
from ...checks import check_whole
from ...device.interface import READ_AHEAD_BYTES
from ...device.registry import Devices, directories_on
from ...kv.cache import SsdCache
from ...kv.draft.rows import tier_of
from ...kv.options import CacheOptions
from ...kv.schedule import Decision
from ...kv.striping import Storage, directories_of
from ...suggestions import suggests_keywords
from .draft_option import draft_of
from .forward.layers import check_config, layers_on
from .forward.state import PassState
from .graphs import outside_graphs
from .kept import KeptAs
from .summary import counters, summary


class KVCache(Cache):
    """K and V on SSD for one batch of sequences. A context manager.

    Args:
        config: of the model, or the model's text config.
        storage: a directory on the SSD; several: one for each SSD; None: those of the devices that
            are given.
        x_rows: of how many sequences of the batch the projections' input is kept instead of K and
            V; None: as many as a short measurement says is fastest (see `decision`).
        name: keeps the cache in `storage` under this name: it is saved when it is closed, and
            continued when it is opened again, by this process or another. None: nothing of it
            outlives the process.
        library_bytes: a size (``50GiB``): when this cache is saved, others that are kept in
            `storage` and that no process has open are removed, the least recently used first, until
            all together fit into that size. None: nothing is removed.
        fingerprint: of the model, which a kept cache carries: ``whole``: every byte of its weights
            counts; ``sampled``: about 4,096 values of each tensor, which is quicker for models of
            many GB and does not see every change.
        format: of stored rows; None: as the model computes them; ``int8``: half the bytes of fp16,
            lossy; ``fp16``, ``bf16``: rounded.
        spill_interval: how many new tokens wait in memory before they are written; None: as many as
            fill whole pages.
        read_ahead_bytes: of rows read before they are asked for, on each device; a size
            (``48MiB``).
        capacity_tokens: of each sequence: space for as many is reserved when the first rows come,
            so that a full disk shows then.
        engine: ``auto``, ``uring``, ``posix``, ``gds``, ``gds-compat``, a file of settings
            (``nvme.toml``, see docs/engine.md), or how to make an engine (tests inject faults so).
        device: what keeps the rows and attends over them: a name (`espnx.device.names`), or a
            device for each directory (`espnx.device.open`), which stays the caller's; None:
            ``ssd``, or ``gpu`` where rows are computed on in a GPU's memory.
        compute: where rows are computed on: ``cpu``, ``cuda``; None: where the model's K and V turn
            out to be.
        threads: that compute on rows; None: as many as PyTorch uses.
        deadline_s: of each transfer.
        draft: how `espnx.generate` proposes several tokens for each pass over the rows: ``lookup``:
            what followed the text's last tokens where they stood before; ``pages``: what the model
            says of the pages of rows that the last pass found to weigh most, which stay in memory;
            ``4bit``: what it says of all rows in four bits, which stay in memory (.3 of fp16); a
            smaller model of transformers with the same vocabulary: what that says. All of them ask
            lookup first where that brings more. None: not at all.
        draft_memory: with ``pages``: the part of K and V that stays in memory for that; None: 1/16.
        draft_read_ahead_bytes: of rows read for the pass while a model drafts, of all devices
            together, at most, in memory; a size; None: as many as the rows for drafts take, and no
            more than a quarter of the memory that is free.

    Attributes:
        store: the `SsdCache`.
        passes: the forward passes.
        draft: what drafts brought so far; None: the cache has none.
        assistant: the smaller model that proposes; None: there is none.
        is_closed: nothing can be added to it any more.

    Raises:
        InvalidInputError: an option is out of range, or the model has layers that espnx does not
            know.
        StoreBusyError, ForeignFileError, FormatError, ChecksumError: what is kept under the name
            cannot be continued.

    Raises (from the model's forward pass, as `generate` runs it):
        StateError: the model was not enabled, or another thread is using the cache.
        DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: with
            `sequences`, the tokens so far; the cache is as it was before that forward pass, and can
            go on.
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
        draft: str | PreTrainedModel | None = None,
        draft_memory: float | None = None,
        draft_read_ahead_bytes: int | str | None = None,
    ):
        options = CacheOptions(
            format=format,
            spill_interval=spill_interval,
            read_ahead_bytes=read_ahead_bytes,
            capacity_tokens=capacity_tokens,
            engine=engine,
            device=device,
            compute=compute,
            threads=threads,
            deadline_s=deadline_s,
        )
        kept_as = KeptAs(name, fingerprint, library_bytes)
        check_config(config)
        storage = directories_on(device) if storage is None else storage
        if x_rows is not None:
            check_whole("x_rows", x_rows, 0)
        self.draft = draft_of(draft, draft_memory, draft_read_ahead_bytes, x_rows, config)
        self.assistant = None if draft is None or isinstance(draft, str) else draft
        if tier_of(self.draft) is not None:
            x_rows = 0
        super().__init__(layers=layers_on(storage, config, is_kept=name is not None))
        self._name, self._storage, self.is_closed = name, directories_of(storage), False
        self._kept = kept_as.lock(storage)
        with ExitStack() as undo:  # an error leaves nothing open
            if self._kept is not None:
                undo.callback(self._kept.name.abandon)
            self.store = self._make_store(storage, len(self.layers), options)
            undo.callback(self.store.close)
            self.passes = PassState(self.layers, self.store, self._kept, x_rows, threads)
            self.passes.resume()
            undo.pop_all()

    def _make_store(self, storage: Storage, n_layers: int, options: CacheOptions) -> SsdCache:
        """The rows of the layers."""
        if self._kept is None:
            return SsdCache(storage, n_layers, options)
        return SsdCache(self._kept.directories, n_layers, options, names=self._kept.names)

    @property
    def tokens(self) -> torch.Tensor | None:
        """int64 [sequences, n]: what the model was fed since the cache was empty, or None where it
        was fed no ids."""
        return self.passes.text.tokens

    @property
    def decision(self) -> Decision | None:
        """How many sequences keep X, and why; None: it was not asked for, or nothing has come
        yet."""
        return self.passes.x.decision

    @property
    def lengths(self) -> list[int]:
        """Tokens of each layer on SSD."""
        return [self.store.rows.length(layer.number) for layer in self.passes.stored]

    # --- what a model asks and tells as it runs ---

    @outside_graphs
    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    @outside_graphs
    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        return super().get_mask_sizes(query_length, layer_idx)

    @outside_graphs
    def get_seq_length(self, layer_idx: int = 0) -> int:
        return self.passes.length(layer_idx)

    @property
    def max_cache_len(self) -> int:
        """What PEFT asks of a cache before it puts one of its own in its place. Raises
        InvalidInputError."""
        raise errors.InvalidInputError(
            "a KVCache and prefix tuning",
            got="a cache that PEFT makes of the prefix, in place of this one",
            expected="no other cache",
            fix="past_key_values=None, or an adapter that leaves the cache alone (LoRA, prompt "
            "tuning)",
        )

    # --- what generate does to a batch; the framework would do it layer by layer ---

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.passes.select(beam_idx.tolist())

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.passes.select([i for i in range(self.passes.sequences) for _ in range(repeats)])

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        self.passes.select(torch.arange(self.passes.sequences)[indices.cpu()].tolist())

    def crop(self, tokens_to_remove: int) -> None:
        """Forgets the last tokens.

        Args:
            tokens_to_remove: a negative number, minus the number of tokens.

        Raises:
            InvalidInputError: a layer in memory cannot go back (a window that has passed its first
                tokens, a state); nothing was changed.
        """
        if tokens_to_remove > 0:
            raise errors.InvalidInputError(
                "crop",
                got=tokens_to_remove,
                expected="a negative number: minus the number of tokens that go",
            )
        self.passes.abort()
        if -tokens_to_remove < self.get_seq_length():
            self.passes.crop(-tokens_to_remove)
        elif tokens_to_remove:
            self.reset()

    def reset(self) -> None:
        self.passes.abort()
        self.passes.clear()

    def __repr__(self) -> str:
        if self.is_closed:
            return "<KVCache: closed>"
        name = "" if self._name is None else f" {self._name!r}"
        return (
            f"<KVCache{name}: {self.store.rows.sequences} sequences of "
            f"{self.get_seq_length():,} tokens in {', '.join(self._storage)}>"
        )

    def summary(self) -> str:
        """What is stored and where, and where the time and the bytes went since the start: a table
        of several lines."""
        return summary(self.stats(), self._storage)

    def stats(self) -> dict[str, Any]:
        """Counters: tokens, bytes written and read, seconds of waiting and computing, the paths
        that the bytes took; how many layers are stored, how many the framework keeps in memory
        (windows, states) and how many bytes these take; how many devices could not attend to, and
        why; how many sequences keep X, what was predicted when that was decided, and the measured
        mean time of a decoding step; what drafts brought."""
        return counters(self.passes, self.draft)

    def reuse_prefix(
        self, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
    ) -> int:
        """Keeps as much of the cache as a new prompt begins with, forgets the rest, and returns the
        number of tokens kept: call it before `generate`, which then reads only what is new. At
        least the prompt's last token is left to be read. Where layers with windows or states cannot
        go back to what is common, nothing is kept.

        Args:
            input_ids: int64 [sequences, n].
            attention_mask: [sequences, n], or None.
        """
        self.passes.abort()
        held, keep = self.get_seq_length(), self.passes.reusable(input_ids.cpu(), attention_mask)
        if held and not keep:
            self.reset()  # the next batch may have another size
        elif keep < held:
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
        self.passes.save()

    def close(self) -> None:
        """Ends all I/O. A kept cache is saved first; of any other the space returns and nothing is
        left. Where a write to a kept cache that was given up is in flight even then, its name stays
        locked until the process ends: what it wrote would land in the next one's rows.

        Raises WriteError, DiskFullError: a kept cache could not be saved. It stays open then, so
        that `close` may be called again.
        """
        if self._kept is not None and not self.is_closed:
            self.save()
        self.is_closed = True
        try:
            self.store.close()
        finally:
            if self._kept is not None:
                self._kept.close(may_land=self.store.striped.may_land)

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        raise errors.InvalidInputError(
            "a copy of a cache on SSD", fix="keep it (name=...), and reuse_prefix() in it"
        )

    def __reduce__(self) -> Any:
        raise errors.InvalidInputError(
            "a pickled cache on SSD",
            fix="keep it (name=...), and open it by that name in the other process",
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
