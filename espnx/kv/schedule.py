"""How many sequences keep X rows instead of K and V: the number with the least predicted step time
(HILOS, section 4.2, generalised).

HILOS balances two links; here the cores count too, since recomputing K and V can cost more than
reading them. A decode step reads every stored byte once while the cores compute, so it takes the
longer of the two::

    T_ssd(x)     = layers * tokens * (x * hidden + (b - x) * 2 * n_kv * d) * item / B_ssd
    T_compute(x) = dense + layers * tokens * ((b - x) * attend + x * (absorb or recompute))

For r = hidden / (2 n_kv d) >= 1 (most models with grouped queries) X rows are no smaller than K and
V: the answer is 0 without measuring.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from itertools import cycle
from typing import Any

import torch

from ..device.interface import RowDevice, Segment, SegmentView
from ..device.row_layout import RowLayout, format_of
from ..ops.attention import Queries, RowsInMemory, attend_rows
from ..ops.crc32c import crc32c
from .x_rows import Projection, Recomputer

_PROBE_BYTES, _SEGMENT_BYTES = 384 << 20, 32 << 20
_PROBE_S, _UNSTEADY = 0.5, 0.4  # and the part of it that does not count
_ROWS_BYTES = 24 << 20
_SHOWN_BYTES = 960 << 10  # that a device shows at a time
#: Below so many bytes of K and V a step takes milliseconds whatever is stored.
SMALL_BYTES = 256 << 20


@dataclass(frozen=True)
class Shape:
    """What a cache will hold.

    Attributes:
        layers: with rows on SSD.
        sequences, tokens: of the batch.
        hidden, heads, n_kv, d: of the model.
        dtype: of rows.
        is_rotary: K must be recomputed (rotation or k-norm), not absorbed.
    """

    layers: int
    sequences: int
    tokens: int
    hidden: int
    heads: int
    n_kv: int
    d: int
    dtype: torch.dtype
    is_rotary: bool

    @property
    def ratio(self) -> float:
        """r: bytes of an X row over those of a K and a V row."""
        return self.hidden / (2 * self.n_kv * self.d)

    @property
    def kv_bytes(self) -> int:
        """K and V of one sequence, all layers."""
        return self.layers * self.tokens * 2 * self.n_kv * self.d * self.dtype.itemsize


@dataclass(frozen=True)
class Costs:
    """Rates of this machine, measured.

    Attributes:
        ssd_bytes_per_s: reads, all devices together.
        attend_bytes_per_s: attention over K and V rows in memory and their checksums, all threads.
        x_s_per_token: of one X row: absorbed attention, or recomputing and attending; and its part
            in a checksum.
        dense_s: a step's other work.
    """

    ssd_bytes_per_s: float
    attend_bytes_per_s: float
    x_s_per_token: float
    dense_s: float


@dataclass(frozen=True)
class Decision:
    """Attributes: x_rows; why; predicted_s: step time for each number of X rows from 0 on (empty:
    nothing was predicted); the costs."""

    x_rows: int
    why: str
    predicted_s: tuple[float, ...] = ()
    costs: Costs | None = None

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def predict(shape: Shape, costs: Costs, x_rows: int) -> float:
    """Seconds of a decode step with `x_rows` sequences kept as X."""
    kv, x = shape.sequences - x_rows, x_rows
    ssd_s = shape.kv_bytes * (kv + x * shape.ratio) / costs.ssd_bytes_per_s
    x_s = x * shape.layers * shape.tokens * costs.x_s_per_token
    return max(ssd_s, costs.dense_s + kv * shape.kv_bytes / costs.attend_bytes_per_s + x_s)


def choose(shape: Shape, costs: Costs, group: int = 1) -> Decision:
    """The number of X rows, a multiple of `group`, with the least predicted time; the smaller of
    equals."""
    times = tuple(predict(shape, costs, x) for x in range(shape.sequences + 1))
    best = min(range(0, shape.sequences + 1, group), key=lambda x: (times[x], x))
    return Decision(best, "the least predicted step time", times, costs)


def decide(
    shape: Shape,
    devices: Callable[[], Sequence[RowDevice]],
    dense_s: Callable[[], float],
    group: int = 1,
    threads: int = 0,
) -> Decision:
    """Measures what must be known, and chooses. `devices` opens them and `dense_s` measures a step
    without attention only where something can be won."""
    if shape.ratio >= 1:
        return Decision(0, f"X rows take {shape.ratio:.2f} of the bytes of K and V")
    if shape.sequences * shape.kv_bytes < SMALL_BYTES:
        return Decision(0, "too few bytes to matter")
    return choose(shape, measure(shape, devices(), dense_s, threads), group)


def measure(
    shape: Shape, devices: Sequence[RowDevice], dense_s: Callable[[], float], threads: int = 0
) -> Costs:
    """Rates of these devices, and of what computes on their rows: about two seconds."""
    compute = devices[0].compute
    # on a GPU a kernel does it, beside others
    check_s = _check_seconds(threads) if compute.type == "cpu" else 0.0
    attend_s = _attend_seconds(
        shape, compute, shape.n_kv, shape.d, shape.heads // shape.n_kv, threads, is_shared=False
    )
    if shape.is_rotary:
        x_s = _recompute_seconds(shape, compute, threads)
    else:
        x_s = _attend_seconds(shape, compute, 1, shape.hidden, shape.heads, threads, is_shared=True)
    row_bytes = 2 * shape.n_kv * shape.d * shape.dtype.itemsize
    attend_s += row_bytes * check_s
    x_s += shape.hidden * shape.dtype.itemsize * check_s
    return Costs(sum(read_rate(device) for device in devices), row_bytes / attend_s, x_s, dense_s())


def read_rate(device: RowDevice) -> float:
    """Bytes a second of the reads of attention, caches of no kind in the way: of the later part of
    half a second, since a full queue and a drive that is limited (which lends bytes at first) make
    the beginning faster than what lasts.

    What is read is random, since a drive may keep zeros as a note, and a good deal, since what was
    read a moment ago may lie in a cache of whatever the drive really is."""
    layout = RowLayout("fp16", 128, 128)
    n = _SEGMENT_BYTES // (16 * layout.row_bytes)
    rows = torch.randint(-(1 << 15), 1 << 15, (1, 16, n, 128), dtype=torch.int16).view(
        torch.float16
    )
    segments: list[Segment] = []
    seen: list[tuple[float, int]] = []
    try:
        for _ in range(_PROBE_BYTES // _SEGMENT_BYTES):
            segments += device.put(layout, rows, rows, range(16))
        device.flush()
        waiting = cycle(segments)
        begun = time.perf_counter()
        tickets = deque(
            device.ahead(layout, [SegmentView(next(waiting), 0, n, 0)]) for _ in range(4)
        )
        while not seen or seen[-1][0] < _PROBE_S:
            device.visit(
                tickets.popleft(),
                lambda memory, _: seen.append((time.perf_counter() - begun, memory.numel())),
            )
            tickets.append(device.ahead(layout, [SegmentView(next(waiting), 0, n, 0)]))
        late = [(at_s, size) for at_s, size in seen if at_s >= _PROBE_S * _UNSTEADY]
        late = late if len(late) > 1 else [(0.0, 0), *seen]
        return sum(size for _, size in late[1:]) / max(late[-1][0] - late[0][0], 1e-6)
    finally:
        device.forget()
        for segment in segments:
            device.release(segment)


def _recompute_seconds(shape: Shape, compute: torch.device, threads: int) -> float:
    """Seconds for one token's X row: both projections, a rotation, attention, as rows of one read
    are treated."""
    layout = RowLayout(format_of(shape.dtype), shape.hidden, shape.hidden, is_shared=True)
    made_as: dict[str, Any] = {"dtype": shape.dtype, "device": compute}
    n = max(16, _SHOWN_BYTES // layout.row_bytes)
    x, turn = torch.zeros(n, shape.hidden, **made_as), torch.ones(1, 1, n, shape.d, **made_as)
    weight = torch.zeros(shape.n_kv * shape.d, shape.hidden, **made_as)

    def rotate(k: torch.Tensor, _sequence: int, _first: int) -> torch.Tensor:
        a, b = k.chunk(2, dim=-1)
        return k * turn + torch.cat([-b, a], dim=-1) * turn

    look = Queries(
        torch.zeros(1, shape.n_kv, shape.heads // shape.n_kv, shape.d, device=compute), shape.d
    )
    made = Recomputer(
        look, Projection(weight, weight, None, None, shape.n_kv, rotate), layout, threads
    )
    return _best(lambda: made.add(0, x, 0), compute) / n


def _attend_seconds(
    shape: Shape,
    compute: torch.device,
    heads: int,
    d: int,
    queries: int,
    threads: int,
    *,
    is_shared: bool,
) -> float:
    """Seconds for one token's rows, all heads: attention from memory."""
    n = max(64, _ROWS_BYTES // (heads * d * shape.dtype.itemsize * (1 if is_shared else 2)))
    k = torch.zeros(1, heads, n, d, dtype=shape.dtype, device=compute)
    v = k if is_shared else torch.zeros_like(k)
    look = Queries(torch.zeros(1, heads, queries, d, device=compute), d)
    return (
        _best(lambda: attend_rows(look, RowsInMemory(k, v, 0, n, 0), threads=threads), compute) / n
    )


def _check_seconds(threads: int) -> float:
    """Seconds for one byte's part in the checksum of its block, which every thread computes of what
    it attends to."""
    block = torch.zeros(_SHOWN_BYTES, dtype=torch.uint8)
    return (
        _best(lambda: crc32c(block), block.device)
        / _SHOWN_BYTES
        / (threads or torch.get_num_threads())
    )


def _best(work: Callable[[], Any], compute: torch.device, times: int = 3) -> float:
    """Seconds of the fastest of some runs, after one that does not count: on a GPU it compiles."""
    found = []
    for _ in range(1 + times):
        begun = time.perf_counter()
        work()
        if compute.type == "cuda":
            torch.cuda.synchronize(compute)
        found.append(time.perf_counter() - begun)
    return min(found[1:])
