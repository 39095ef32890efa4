"""The systems of the KV benchmark that run transformers' models, in a process of their own: where
each keeps K and V."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest import mock

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Cache, DynamicCache, StaticCache

from espnx.device.registry import open_device
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.forward.projections import LayerInput
from espnx.kv.attention import Span, Step
from espnx.kv.cache import SsdCache
from espnx.kv.read_ahead import Arrived
from espnx.kv.rows import LayerRows
from espnx.kv.shown import unpacked

from ...harness.traces import Steps, recording
from .memmap_cache import MemmapCache
from .models import KVShape, Rows, Task, load_model

#: Of `KVCache.stats`.
COUNTERS = (
    "bytes_written",
    "write_requests",
    "bytes_asked",
    "bytes_moved",
    "waiting_s",
    "computing_s",
    "stored_bytes",
    "x_rows",
)


class Decoder(Protocol):
    """A system under measurement.

    Attributes:
        effective_path: of the bytes.
    """

    effective_path: str

    def seed(self) -> None:
        """Brings the task's rows to where a prefill would have left them."""

    def step(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Feeds one token to each sequence: (int64 [batch], the most likely next ones; the logits,
        where the system shows them)."""

    def rest(self) -> None:
        """Drops what a pause since the last run has let the system read ahead; called before a
        measured run."""

    def counters(self) -> dict[str, float]:
        """The system's own, since it was opened."""

    def files(self) -> list[Path]:
        """The files that it reads through the page cache."""

    def predicted_s(self) -> tuple[float, ...]:
        """Step times that the system foretold when it was filled, for 0, 1, ... sequences that keep
        X; none where it does not."""

    def close(self) -> None: ...


class HFDecoder:
    """A transformers model with one of its caches.

    Attributes:
        model: shared by everything this process does.
        cache: what `make_cache` made.
    """

    effective_path = "memory"

    def __init__(self, task: Task, weights: Path, storage: Path, options: Mapping[str, Any]):
        self.task, self.storage, self.options = task, storage, options
        self.model = load_model(weights, task.dtype)
        self.shape = KVShape.of(self.model.config)
        self.rows = Rows(task, self.model)
        self.cache = self.make_cache()

    def make_cache(self) -> Cache:
        return DynamicCache()

    def seed(self) -> None:
        for layer in range(self.shape.layers):
            self.seed_layer(layer)

    def seed_layer(self, number: int) -> None:
        self.cache.update(*self.rows.kv(number), number)

    @torch.inference_mode()
    def step(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        logits = self.model(
            input_ids=tokens[:, None], past_key_values=self.cache, use_cache=True, logits_to_keep=1
        ).logits[:, -1]
        return logits.argmax(dim=-1), logits

    def rest(self) -> None:
        pass

    def counters(self) -> dict[str, float]:
        return {}

    def files(self) -> list[Path]:
        return []

    def predicted_s(self) -> tuple[float, ...]:
        return ()

    def close(self) -> None:
        pass


class StaticDecoder(HFDecoder):
    def make_cache(self) -> Cache:
        return StaticCache(self.model.config, max_cache_len=self.task.context + self.task.steps)


class MemmapDecoder(HFDecoder):
    effective_path = "mmap"

    def make_cache(self) -> Cache:
        return MemmapCache(self.storage, self.shape.layers, self.task.context + self.task.steps)

    def seed_layer(self, number: int) -> None:
        self.cache.layers[number].fill(*self.rows.kv(number))

    def files(self) -> list[Path]:
        return list(self.cache.files())


class EspnxDecoder(HFDecoder):
    """Options are those of the cache, and `record`: the file of a trace."""

    cache: KVCache

    def __init__(self, *given: Any):
        self._open = ExitStack()
        self.steps = Steps()
        super().__init__(*given)

    def make_cache(self) -> Cache:
        enable_kv_cache(self.model)
        options = dict(self.options)
        if (file := options.pop("record", None)) is not None:
            devices = [open_device("ssd", self.storage)]
            options["device"] = recording(file, "espnx bench kv", devices, self._open, self.steps)
        return KVCache(self.model.config, self.storage, **options)

    @property
    def effective_path(self) -> str:  # type: ignore[override]
        return str(self.cache.stats()["effective_path"])

    def seed(self) -> None:
        # A prefill, but for the attention of its tokens over one another, which takes long and is
        # nobody's subject.
        prompt = self.task.prompt()
        self.cache.passes.begin(self.model, prompt, len(prompt))
        with mock.patch("espnx.kv.attention.chunk_attention", without_attention):
            super().seed()
        self.cache.passes.end(self.model, failed=False)
        self.cache.store.striped.flush()

    def seed_layer(self, number: int) -> None:
        layer, (k, v) = self.cache.layers[number], self.rows.kv(number)
        if self.cache.store.rows.x_rows:
            layer.input = LayerInput(
                self.rows.modules[number], self.rows.x(number), self.rows.rotations
            )
        layer.update(k, v)
        heads = self.model.config.num_attention_heads
        layer.attend(k.new_zeros(1).expand(k.shape[0], heads, k.shape[2], k.shape[3]), None, 1.0)

    def rest(self) -> None:
        self.cache.store.ahead.forget()

    def counters(self) -> dict[str, float]:
        stats = self.cache.stats()
        # Seconds are those of all threads, which wait and compute at the same time.
        threads = self.options.get("threads") or torch.get_num_threads()
        return {name: stats[name] / (threads if name.endswith("_s") else 1) for name in COUNTERS}

    def predicted_s(self) -> tuple[float, ...]:
        return () if self.cache.decision is None else self.cache.decision.predicted_s

    def close(self) -> None:
        with self._open:
            self.cache.close()


def without_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """Zeros stand for a chunk's attention over itself, where only its K and V are wanted."""
    return v.new_zeros(1).expand(*q.shape[:3], v.shape[-1]), None


class HostDecoder(EspnxDecoder):
    """The same rows on SSD, read by the same engine, as far ahead; but brought to the framework,
    which attends over them."""

    def make_cache(self) -> Cache:
        cache = super().make_cache()
        setattr(cache.store.attention, "stored", partial(attend_on_host, cache.store))  # noqa: B010 - a method, to mypy
        return cache


def attend_on_host(
    store: SsdCache, rows: LayerRows, step: Step, span: Span, arrived: Arrived
) -> tuple[torch.Tensor, torch.Tensor]:
    """What `SsdCache` asks its devices for: here the rows are gathered, then the framework's
    attention runs once over all of them."""
    k, v = (
        torch.empty((*new.shape[:2], rows.count, new.shape[3]), dtype=new.dtype)
        for new in (step.k, step.v)
    )

    def show(memory: torch.Tensor, pieces: np.ndarray) -> None:
        for sequence, head, some_k, some_v, position in unpacked(rows.layout, memory, pieces):
            end = position + len(some_k)
            k[sequence, head, position:end], v[sequence, head, position:end] = some_k, some_v

    if arrived.tickets is not None:
        store.striped.visit(arrived.tickets, show)
    if tail := arrived.tail:
        k[:, :, tail.first_position :], v[:, :, tail.first_position :] = tail.counting
    o = F.scaled_dot_product_attention(
        step.q, k, v, scale=step.scale, enable_gqa=step.q.shape[1] != k.shape[1]
    )
    return o.float(), o.new_zeros(o.shape[:3], dtype=torch.float32)


KINDS: Mapping[str, type[HFDecoder]] = {
    "espnx": EspnxDecoder,
    "host": HostDecoder,
    "dynamic": HFDecoder,
    "static": StaticDecoder,
    "memmap": MemmapDecoder,
}


def open_decoder(
    kind: str, task: Task, weights: Path, storage: Path, options: Mapping[str, Any]
) -> Decoder:
    """Raises what opening a cache raises."""
    if kind == "flexgen-disk":
        from .flexgen_disk import FlexGenDecoder

        return FlexGenDecoder(task, weights, storage)
    return KINDS[kind](task, weights, storage, options)
