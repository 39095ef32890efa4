"""The KV cache of a whole model on SSD: every layer's rows, reads that run ahead over layers and steps, attention over all of it.

Rows do not depend on the query. So the reads of the next layers, and after the last one those of the next step, are under way while this
layer computes: the device never waits for the dense layers, and decoding takes as long as the device needs for the bytes.
"""

from __future__ import annotations

import ctypes
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from .. import errors
from ..checks import check_callable, check_whole
from ..device.interface import READ_AHEAD_BYTES, RowDevice
from ..device.near_storage import NearStorageDevice
from ..device.registry import Devices, default_name, devices_in
from ..device.row_layout import DTYPES, RowLayout, format_of
from ..forks import check_own
from ..ops.attention import Queries, RowsInMemory, add_sinks, attend_rows, merge
from ..sizes import parse_size
from ..storage import NativeEngine
from .prefill import chunk_attention
from .rows import LayerRows
from .scores import PLAIN, ScoreRules
from .shown import ShownAttention
from .striping import Storage, StripedDevices, directories_of
from .visibility import Visibility
from .x_rows import Projection, Recomputer, absorb, bias_scores, release

log = logging.getLogger(__name__)

#: From so many new tokens on, their attention over one another is left to the framework's fused kernels.
CHUNK_TOKENS = 17
#: The queries of so many bytes attend at a time, or those of one sequence: what attention holds in memory does not grow with the batch.
#: Each thread has sums of its own, of that size, which together take at most `_SUMS_BYTES`.
_PART_BYTES, _SUMS_BYTES = 1 << 20, 32 << 20
#: A chunk of a prompt whose queries take so much leaves holes in the heap that are worth returning to the system.
_TRIM_BYTES = 1 << 20
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # glibc's alone


@dataclass
class _Ahead:
    """Reads that are under way: for each part of the batch its sequences and tickets; and how many tokens they bring."""

    parts: list[tuple[range, list[int]]]
    covered: int


@dataclass(frozen=True)
class Arrived:
    """What some sequences attend to.

    Attributes:
        tickets: of rows that are read, or None.
        tail: rows in memory.
    """

    sequences: range
    tickets: list[int] | None
    whole_tail: RowsInMemory | None

    @property
    def tail(self) -> RowsInMemory | None:
        return None if self.whole_tail is None else self.whole_tail.part(self.sequences.start, self.sequences.stop)


@dataclass(frozen=True)
class Step:
    """What one layer's attention is given in a forward pass.

    Attributes:
        q: [sequences, heads, n, d], the query heads of one KV head adjacent.
        k, v: [sequences, KV heads, n, d] and [..., dv]: the new tokens' rows, as they are to be kept (after RoPE).
        scale: of the scores.
        visibility: of all positions, the new ones included.
        x: [sequences, n, hidden]: what K and V were projected from; needed where X rows are stored.
        projection: how.
        rules: what the model does to scores.
    """

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    scale: float
    visibility: Visibility
    x: torch.Tensor | None = None
    projection: Projection | None = None
    rules: ScoreRules = PLAIN

    def part(self, begin: int, end: int) -> Step:
        """Of some of the sequences."""
        x = None if self.x is None else self.x[begin:end]
        q, k, v = (rows[begin:end] for rows in (self.q, self.k, self.v))
        return replace(self, q=q, k=k, v=v, visibility=self.visibility.part(begin, end), x=x)


@dataclass(frozen=True)
class _Span:
    """Where the queries of a pass stand: the first one's position; and the last position that each of them sees, int64 [n], or None for all
    that there is."""

    first: int
    last: torch.Tensor | None = None


class SsdCache:
    """K and V of `n_layers` layers; of the first `x_rows` sequences the input of both projections instead.

    Args:
        storage: a directory, or several (one for each SSD).
        n_layers: with rows to keep.
        format: of stored rows: None keeps the dtype of K and V; ``int8`` is lossy (X rows are kept as they are).
        spill_interval: new tokens wait in memory until there are so many; None: as many as fill whole pages.
        read_ahead_bytes: of rows read before they are asked for, on each device; a size (``48MiB``).
        capacity_tokens: of each sequence: space for as many is reserved when the first rows come, so that a full disk shows then.
        engine: ``auto``, ``uring``, ``posix``, ``gds``, ``gds-compat``, a file of settings (``nvme.toml``, see docs/engine.md), or how to
            make an engine (tests inject faults so).
        device: what keeps the rows and attends over them: a name (`espnx.device.names`), or an open device for each directory, which stays
            the caller's; None: ``ssd``, or ``gpu`` where rows are computed on in a GPU's memory.
        compute: where rows are computed on: ``cpu``, ``cuda``; None: where the model's K and V turn out to be. The devices are opened when
            that is known.
        threads: that compute on rows; None: as many as PyTorch uses.
        deadline_s: of each transfer.
        names: of the data files, to keep them; None: their space returns when the process ends.

    Attributes:
        format: as given.
        x_rows: how many sequences keep X; set before the first tokens come.
        kv, x: `LayerRows` by layer, made when their first rows come.
    """

    def __init__(
        self,
        storage: Storage,
        n_layers: int,
        *,
        format: str | None = None,  # noqa: A002 - what it is called wherever rows are stored
        spill_interval: int | None = None,
        read_ahead_bytes: int | str = READ_AHEAD_BYTES,
        capacity_tokens: int | None = None,
        engine: str | os.PathLike[str] | Callable[[], Any] = "auto",
        device: Devices | None = None,
        compute: str | torch.device | None = None,
        threads: int | None = None,
        deadline_s: float = 30.0,
        names: Sequence[str] | None = None,
    ):
        for option, value in (("spill_interval", spill_interval), ("capacity_tokens", capacity_tokens), ("threads", threads)):
            if value is not None:
                check_whole(option, value, 1)
        read_ahead_bytes = parse_size(read_ahead_bytes)
        if not read_ahead_bytes:
            raise errors.InvalidInputError("read_ahead_bytes", got=0, expected="at least 1: rows are read in pieces of it")
        if not isinstance(deadline_s, (int, float)) or isinstance(deadline_s, bool) or not deadline_s > 0:
            raise errors.InvalidInputError("deadline_s", got=repr(deadline_s), expected="a number of seconds above 0")
        if format not in (None, *DTYPES):
            raise errors.InvalidInputError("format of stored rows", got=repr(format), expected=f"None, {', '.join(DTYPES)}")
        self.format, self._spill_interval, self._threads = format, spill_interval, threads or 0
        self.capacity_tokens = capacity_tokens
        self._places = [(directory, names[i] if names else None) for i, directory in enumerate(directories_of(storage))]
        self._options: dict[str, Any] = {"read_ahead_bytes": read_ahead_bytes, "threads": threads, "deadline_s": deadline_s}
        self._compute = None if compute is None else _device_of(compute)
        self._process = os.getpid()
        self._has_heap_to_trim = False
        if isinstance(engine, os.PathLike):
            engine = os.fspath(engine)
        if not isinstance(engine, str):
            check_callable("engine", engine)
        self._engines = [engine if isinstance(engine, str) else engine() for _ in self._places]
        self._is_chosen = self._compute is not None or device is not None
        self._is_named_gpu = device == "gpu"
        self._owns_devices = device is None or isinstance(device, str)
        #: None: it depends on where K and V turn out to be.
        self._devices = None if device is None else self._devices_named(device)
        self.striped = StripedDevices(len(self._places), self._open_rows)
        # What is wrong with a place shows now, also where the devices wait for the first rows.
        if self._compute is not None or default_name(engine, None) != "ssd":
            self.open(self._compute or torch.device("cuda"))
        else:
            checking = self._devices or self._devices_named("ssd")
            for (directory, name), own, near in zip(self._places, self._engines, checking, strict=True):
                near.check(directory, engine=own, name=name)
        self.x_rows = 0
        self.kv: list[LayerRows | None] = [None] * n_layers
        self.x: list[LayerRows | None] = [None] * n_layers
        self._ahead: dict[LayerRows, _Ahead] = {}
        self._on_host: dict[LayerRows, tuple[str, ...]] = {}  # layers that the devices could not attend to, and what they lack
        self._begun = 0  # tokens when the forward pass under way began
        self._together = 1  # sequences that attend at a time

    def _devices_named(self, device: Devices) -> list[NearStorageDevice]:
        return devices_in(device, [directory for directory, _ in self._places])

    def _open_rows(self, number: int, compute: torch.device) -> RowDevice:
        if self._devices is None:
            self._devices = self._devices_named(default_name(self._engines[number], compute))
        (directory, name), near = self._places[number], self._devices[number]
        log.debug("rows in %s are kept by the device %s, computed on %s", directory, near.name, compute)
        if self._is_named_gpu and self._compute is None and compute.type == "cpu":
            raise errors.PathUnavailableError(
                "device 'gpu' for K and V in the CPU's memory", got="no GPU to compute on", expected="a model on a GPU",
                fix="model.to('cuda'), KVCache(..., compute='cuda'), or device='ssd'",
            )  # fmt: skip
        opened = near.open_rows(directory, compute=compute, engine=self._engines[number], name=name, **self._options)
        if name is not None and not opened.capabilities.keeps:
            opened.close()
            raise errors.InvalidInputError("a kept cache", got=f"device {near.name!r}, whose rows end with the process", fix="name=None")
        return opened

    def open(self, compute: torch.device) -> None:
        """Opens the devices, unless they are open: rows are computed on in the memory of `compute`, unless the cache was told where.

        Raises what a device raises when it is opened.
        """
        self.striped.open(self._compute or compute)

    def check_process(self) -> None:
        """Raises InvalidInputError in a process that was forked after the cache was made: it lacks threads that may hold locks."""
        check_own(self._process, "the KV cache", "make the cache in the process that uses it")

    @property
    def data_files(self) -> list[str]:
        """Of a kept cache: one for each directory."""
        return [os.path.join(directory, name) for directory, name in self._places if name is not None]

    @contextmanager
    def files(self) -> Iterator[NativeEngine]:
        """An engine for what a kept cache has beside its rows."""
        engine = self._engines[0]
        if not isinstance(engine, str):
            yield engine
            return
        with NativeEngine("auto" if engine in ("gds", "gds-compat") else engine, pool_bytes=1 << 20) as own:
            yield own

    def _open_for(self, device: torch.device) -> None:
        """The first K and V have come, and show where the model is."""
        if not self.striped.is_open:
            self.open(device)
        if device.type != "cpu" and not self._is_chosen and self.striped.devices[0].compute.type == "cpu":
            raise errors.InvalidInputError(
                "a model on several devices", got="its first layer on the CPU", fix="KVCache(..., compute='cuda')"
            )
        for rows in self.every:
            rows.to(device)

    @property
    def every(self) -> list[LayerRows]:
        """All rows there are, in the order in which a forward pass asks for them."""
        return [rows for pair in zip(self.x, self.kv, strict=True) for rows in pair if rows is not None]

    def length(self, layer: int) -> int:
        """Tokens of a layer."""
        return max((rows.count for rows in (self.x[layer], self.kv[layer]) if rows is not None), default=0)

    @property
    def sequences(self) -> int:
        """In the batch; 0 while nothing is cached."""
        for pair in zip(self.x, self.kv, strict=True):
            if count := sum(rows.sequences for rows in pair if rows is not None):
                return count
        return 0

    @property
    def memory_bytes(self) -> int:
        """Of rows that wait in memory, and of checksums."""
        return sum(rows.memory_bytes for rows in self.every)

    # --- attention ---

    def attend(self, layer: int, step: Step) -> torch.Tensor:
        """Adds new tokens to a layer and attends over all of them: [sequences, heads, n, dv], in q's dtype. A query that may see nothing
        gets zeros.

        Raises:
            DiskFullError, WriteError, ReadError, ChecksumError, DeadlineExceededError: the tokens of this forward pass are forgotten in
                every layer then, and the cache can be used as it was before.
            InvalidInputError: rows that cannot be attended to so, or a process that was forked after the cache was made.
        """
        self.check_process()
        n_sequences = step.k.shape[0]
        split = min(self.x_rows, n_sequences)
        # Rows outlive the mode in which they came: tensors of inference mode could not be changed outside of it.
        with torch.inference_mode(False), torch.no_grad():
            return self._attend(layer, step, n_sequences, split)

    def _attend(self, layer: int, step: Step, n_sequences: int, split: int) -> torch.Tensor:
        try:
            self._open_for(step.k.device)
            if not self.every:
                self._reserve(step, split)
            heads, n, width = step.q.shape[1], step.k.shape[2], max(step.q.shape[-1], step.v.shape[-1])
            if split and step.x is not None:
                width = max(width, step.x.shape[-1])
            threads = self._threads or torch.get_num_threads()
            self._together = max(1, min(_PART_BYTES, _SUMS_BYTES // threads) // (4 * heads * n * width))
            parts = []
            if split:
                parts.append(self._attend_x(layer, step.part(0, split)))
            if split < n_sequences:
                parts.append(self._attend_kv(layer, step.part(split, n_sequences) if split else step))
        except BaseException:
            self.crop(self._begun)
            raise
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _attend_kv(self, layer: int, step: Step) -> torch.Tensor:
        rows = self.kv[layer]
        if rows is None:
            rows = self.kv[layer] = self._new_rows(self._kv_layout(step), step.k)
        past, n = rows.count, step.k.shape[2]
        if n >= CHUNK_TOKENS:
            o = self._attend_chunk(rows, step, past, self._attend_stored)
            rows.write(step.k, step.v)
            return o
        rows.append(step.k, step.v)
        span = _Span(past, past + torch.arange(n) if n > 1 else None)
        o = self._by_parts(rows, step, lambda part, arrived: _with_sinks(part, *self._attend_stored(rows, part, span, arrived)))
        self._after_step(rows)
        return o

    def _attend_x(self, layer: int, step: Step) -> torch.Tensor:
        if step.x is None or step.projection is None:
            raise errors.InvalidInputError("X rows of this model", got="no input of its projections", fix="x_rows=0")
        if not step.rules.are_plain:
            raise errors.InvalidInputError("X rows of this model", got="a soft cap, slopes or a window", fix="x_rows=0")
        rows = self.x[layer]
        x = step.x.unsqueeze(1)
        if rows is None:
            step.projection.check(step.x[0, :8], step.k[0, :, :8], step.v[0, :, :8], 0)
            rows = self.x[layer] = self._new_rows(_x_layout(step.x), x)
        past, n = rows.count, x.shape[2]
        if n >= CHUNK_TOKENS:
            o = self._attend_chunk(rows, step, past, self._recompute)
            rows.write(x, None)
            return o
        rows.append(x, None)
        span = _Span(past, past + torch.arange(n) if n > 1 else None)
        attend = self._absorb if step.projection.finish is None else self._recompute
        o = self._by_parts(rows, step, lambda part, arrived: _with_sinks(part, *attend(rows, part, span, arrived)))
        self._after_step(rows)
        return o

    def _attend_chunk(
        self, rows: LayerRows, step: Step, past: int, over: Callable[..., tuple[torch.Tensor, torch.Tensor]],
        last: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """New tokens over one another, and (by `over`, up to position `last`) over what came before."""
        self._has_heap_to_trim |= step.q.nbytes >= _TRIM_BYTES
        span = _Span(past, last)

        def look(part: Step, arrived: Arrived) -> torch.Tensor:
            o, lse = self._attend_new(part, past)
            if past and lse is not None:
                o, lse = merge(o.float(), lse, *over(rows, part, span, arrived))
            return _with_sinks(part, o, lse)

        return self._by_parts(rows, step, look)

    def _by_parts(self, rows: LayerRows, step: Step, look: Callable[[Step, Arrived], torch.Tensor]) -> torch.Tensor:
        """Attention of some sequences at a time: [sequences, heads, n, dv], in q's dtype."""
        ahead = self._arriving(rows)
        self._ahead.pop(rows, None)
        if ahead is None:
            everything = rows.tail(0)
            parts = [(part, Arrived(part, None, everything)) for part in self._parts(len(step.q))]
        else:
            parts = [(part, Arrived(part, tickets, rows.tail(ahead.covered))) for part, tickets in ahead.parts]
        if len(parts) == 1:
            return look(step, parts[0][1]).to(step.q.dtype)
        n_sequences, heads, n, _ = step.q.shape
        o = step.q.new_empty(n_sequences, heads, n, step.v.shape[-1])
        for part, arrived in parts:
            o[part.start : part.stop] = look(step.part(part.start, part.stop), arrived)
        return o

    def attend_again(self, layer: int, step: Step) -> torch.Tensor:
        """Attention of other queries over what `attend` added in this forward pass: of a layer that shares the K and V of this one."""
        n_sequences, n = step.k.shape[0], step.k.shape[2]
        split = min(self.x_rows, n_sequences)
        parts = []
        with torch.inference_mode(False), torch.no_grad():
            for rows, own in ((self.x[layer], step.part(0, split)), (self.kv[layer], step.part(split, n_sequences))):
                if rows is not None and len(own.k):
                    o = self._attend_again(rows, own, rows.count - n)
                    self._look_ahead(rows)
                    parts.append(o)
        return torch.cat(parts)

    def _attend_again(self, rows: LayerRows, step: Step, past: int) -> torch.Tensor:
        n, over = step.q.shape[2], self._attend_stored if rows in self.kv else self._recompute
        if CHUNK_TOKENS <= n == step.k.shape[2]:
            return self._attend_chunk(rows, step, past, over, torch.full((n,), past - 1))
        first = rows.count - n  # some ask for the last positions alone
        span = _Span(first, first + torch.arange(n) if n > 1 else None)
        return self._by_parts(rows, step, lambda part, arrived: _with_sinks(part, *over(rows, part, span, arrived)))

    def _attend_new(self, step: Step, past: int) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The new tokens of a chunk over one another."""
        hidden = step.visibility.hidden
        own = None if hidden is None else hidden[:, past : past + step.k.shape[2]].to(step.q.device)
        wants_lse = past > 0 or step.rules.sinks is not None
        return chunk_attention(step.q, step.k, step.v, step.scale, own, wants_lse=wants_lse, rules=step.rules)

    def _attend_stored(self, rows: LayerRows, step: Step, span: _Span, arrived: Arrived) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [sequences, heads, n, dv], lse) over what is stored and what waits in memory."""
        n_sequences, heads, n, _ = step.q.shape
        queries = _queries(step, rows.n_heads, rows.layout.dv, span)
        o, lse = self._gather(rows, arrived, queries)
        return o.reshape(n_sequences, heads, n, -1), lse.reshape(n_sequences, heads, n)

    @property
    def attended_on_host(self) -> dict[str, Any]:
        """How many layers were attended to on the host, from rows that the devices read, and what these lack for it."""
        return {
            "layers_attended_on_host": len(self._on_host),
            "devices_lack": ", ".join(dict.fromkeys(name for missing in self._on_host.values() for name in missing)),
        }

    def _absorb(self, rows: LayerRows, step: Step, span: _Span, arrived: Arrived) -> tuple[torch.Tensor, torch.Tensor]:
        projection, heads = step.projection, step.q.shape[1]
        if projection is None:
            raise errors.InvalidInputError("X rows without projections")
        seen = step.visibility
        every = None if span.last is None else span.last.repeat(heads)
        queries = Queries(absorb(step.q, projection, step.scale), projection.hidden, every, seen.first_visible, seen.visible)
        o, lse = self._gather(rows, arrived, queries)
        sums = lse.reshape(step.q.shape[:3])
        if step.rules.sinks is not None:  # which have to be compared with whole scores
            sums = sums + bias_scores(step.q, projection, step.scale)
        return release(o, lse, projection, heads), sums

    def _recompute(self, rows: LayerRows, step: Step, span: _Span, arrived: Arrived) -> tuple[torch.Tensor, torch.Tensor]:
        projection = step.projection
        if projection is None:
            raise errors.InvalidInputError("X rows without projections")
        n_sequences, heads, n, _ = step.q.shape
        queries = _queries(step, projection.n_heads, step.v.shape[-1], span)
        made = Recomputer(queries, projection, rows.layout, self._threads, arrived.sequences.start)
        tail = arrived.tail
        if arrived.tickets is not None:
            self.striped.visit(arrived.tickets, made.show)
        if tail is not None:
            for sequence in range(n_sequences):
                made.add(sequence, tail.counting[0][sequence, 0], tail.first_position)
        return made.over.o.reshape(n_sequences, heads, n, -1), made.over.lse.reshape(n_sequences, heads, n)

    def _gather(self, rows: LayerRows, arrived: Arrived, queries: Queries) -> tuple[torch.Tensor, torch.Tensor]:
        """Over what is stored and what waits in memory. Devices that cannot attend to these rows show them."""
        if arrived.tickets is None:
            return attend_rows(queries, arrived.tail, threads=self._threads)
        if missing := self.striped.lacks(queries, rows.layout):
            self._on_host[rows] = missing
            shown = ShownAttention(queries, self._threads)
            self.striped.visit(arrived.tickets, partial(shown.show, rows.layout))
            return merge(shown.o, shown.lse, *attend_rows(queries, arrived.tail, threads=self._threads))
        return self.striped.attend(arrived.tickets, queries, arrived.tail)

    # --- reads and writes ---

    def _arriving(self, rows: LayerRows) -> _Ahead | None:
        """The reads of some rows, at the front of every device's line; None where nothing needs to be read."""
        if not rows.runs:
            return None
        ahead = self._ahead.get(rows)
        fits = ahead is not None and [part for part, _ in ahead.parts] == self._parts(rows.sequences)
        if ahead is None or not fits or not self.striped.are_next(ahead.parts[0][1]):
            self.forget_ahead()
            every = self.every
            for later in every[every.index(rows) :]:
                self._look_ahead(later)
            ahead = self._ahead.get(rows)  # None: the first write is still under way, and all rows are in memory
        return ahead

    def _look_ahead(self, rows: LayerRows) -> None:
        """Puts the reads for the next time in line."""
        covered = rows.covered()
        if covered:
            parts = [(part, self.striped.ahead(rows.layout, rows.views(covered, part))) for part in self._parts(rows.sequences)]
            self._ahead[rows] = _Ahead(parts, covered)
            rows.trim(covered)

    def _parts(self, n_sequences: int) -> list[range]:
        """The sequences that attend together in this forward pass."""
        return [range(begin, min(begin + self._together, n_sequences)) for begin in range(0, n_sequences, self._together)]

    def _after_step(self, rows: LayerRows) -> None:
        rows.spill()
        self._look_ahead(rows)

    def forget_ahead(self) -> None:
        """Nothing that was read ahead is wanted any more."""
        self.striped.forget()
        self._ahead.clear()

    def begin(self, tokens: int) -> None:
        """A forward pass begins with so many tokens in the cache; where it fails, the cache returns to them."""
        self._begun = tokens

    def end(self) -> None:
        """A forward pass has ended."""
        if self._has_heap_to_trim:
            self._has_heap_to_trim = False
            trim_heap()

    # --- the batch ---

    def _reserve(self, step: Step, split: int) -> None:
        """Space for the declared capacity, so that a full disk shows before any work."""
        if self.capacity_tokens is None:
            return
        total = 0
        for layout, streams in (
            (self._kv_layout(step), (len(step.k) - split) * step.k.shape[1]),
            (_x_layout(step.x) if split and step.x is not None else None, split),
        ):
            if layout is not None:
                total += layout.blocks(self.capacity_tokens) * layout.block_bytes * streams * len(self.kv)
        for device in self.striped.devices:
            device.space.reserve(-(-total // self.striped.count))

    def _kv_layout(self, step: Step) -> RowLayout:
        return RowLayout(self.format or format_of(step.k.dtype), step.k.shape[-1], step.v.shape[-1])

    def _new_rows(self, layout: RowLayout, like: torch.Tensor) -> LayerRows:
        return self.make_rows(layout, like.shape[1], like.dtype)

    def make_rows(self, layout: RowLayout, n_heads: int, dtype: torch.dtype) -> LayerRows:
        """Empty rows with this cache's options."""
        return LayerRows(self.striped, layout, n_heads, dtype, self._spill_interval or layout.block_rows)

    def crop(self, tokens: int) -> None:
        """Keeps the first `tokens` tokens of every sequence."""
        self.forget_ahead()
        for rows in self.every:
            rows.crop(tokens)

    def check_select(self, sequences: Sequence[int]) -> list[int]:
        """Those of a selection that keep X. Raises InvalidInputError for a selection that `select` refuses."""
        kept = [i for i in sequences if i < self.x_rows]
        if list(sequences[: len(kept)]) != kept:
            raise errors.InvalidInputError("beams that mix sequences kept as X with others", got=self.x_rows, fix="x_rows=0")
        return kept

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was (beams, repeats, a part of the batch); stored rows are shared, not copied.

        Raises InvalidInputError where a sequence kept as X would become one kept as K and V: then use x_rows=0.
        """
        kept = self.check_select(sequences)
        self.forget_ahead()
        for every, chosen in ((self.x, kept), (self.kv, [i - self.x_rows for i in sequences[len(kept) :]])):
            for number, rows in enumerate(every):
                if rows is not None and chosen:
                    rows.select(chosen)
                elif rows is not None:
                    rows.clear()
                    every[number] = None
        self.x_rows = len(kept)

    def clear(self) -> None:
        """Forgets all tokens; the space is used again."""
        self.forget_ahead()
        for rows in self.every:
            rows.clear()
        self.kv, self.x = [None] * len(self.kv), [None] * len(self.x)
        self._on_host.clear()

    def close(self) -> None:
        self.striped.close()
        for near in self._devices or [] if self._owns_devices else []:
            near.close()


def _device_of(compute: str | torch.device) -> torch.device:
    """Raises InvalidInputError for what names none."""
    try:
        return torch.device(compute)
    except (RuntimeError, TypeError) as error:
        raise errors.InvalidInputError("compute", got=repr(compute), expected="cpu or cuda") from error


def trim_heap() -> None:
    """Free memory between blocks in use returns to the system. A chunk of a prompt makes tensors of some MiB by the dozen, which leave a
    heap of holes: the next chunk would not fit all of its own into them, and the process would grow. Takes milliseconds."""
    if _malloc_trim is not None:
        _malloc_trim(0)


def _x_layout(x: torch.Tensor) -> RowLayout:
    return RowLayout(format_of(x.dtype), x.shape[-1], x.shape[-1], is_shared=True)


def _with_sinks(step: Step, o: torch.Tensor, lse: torch.Tensor | None) -> torch.Tensor:
    """What all parts together gave, corrected where the model has sinks."""
    if step.rules.sinks is None or lse is None:
        return o
    return add_sinks(o.float(), lse, step.rules.sinks[:, None])[0]


def _queries(step: Step, n_heads: int, dv: int, span: _Span) -> Queries:
    """The query heads of one KV head together."""
    n_sequences, heads, n, d = step.q.shape
    groups = heads // n_heads
    q = torch.empty(step.q.shape, dtype=torch.float32, device=step.q.device).copy_(step.q).mul_(step.scale)
    q = q.view(n_sequences, n_heads, groups * n, d)
    seen, rules = step.visibility, step.rules
    found = Queries(q, dv, None if span.last is None else span.last.repeat(groups), seen.first_visible, seen.visible)
    if rules.are_plain:
        return found
    slopes = None if rules.slopes is None else rules.slopes.float().view(n_heads, groups, 1).expand(-1, -1, n).reshape(n_heads, -1)
    position = (span.first + torch.arange(n)).repeat(groups)
    return replace(found, position=position, window=rules.window, soft_cap=rules.soft_cap, slopes=slopes)
