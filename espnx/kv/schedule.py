"""How many sequences keep X rows instead of K and V: the number with the least predicted step time (HILOS, section 4.2, generalised).

HILOS balances two links; here the cores count too, since recomputing K and V can cost more than reading them. A decode step reads every
stored byte once while the cores compute, so it takes the longer of the two::

    T_ssd(x)     = layers * tokens * (x * hidden + (b - x) * 2 * n_kv * d) * item / B_ssd
    T_compute(x) = dense + layers * tokens * ((b - x) * attend + x * (absorb or recompute))

For r = hidden / (2 n_kv d) >= 1 (most models with grouped queries) X rows are no smaller than K and V: the answer is 0 without measuring.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch

from ..device.interface import Queries, Tail, Use
from ..device.layout import RowLayout, format_of
from ..device.store import UNIT_BYTES, RowStore
from .xrows import Projection, Recomputer

_PROBE_BYTES = 96 << 20
_PROBE_S, _UNSTEADY = 0.5, 0.4  # and the part of it that does not count
_ROWS_BYTES = 24 << 20
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
        attend_bytes_per_s: attention over K and V rows in memory, all threads.
        x_s_per_token: of one X row: absorbed attention, or recomputing and attending.
        dense_s: a step's other work.
    """

    ssd_bytes_per_s: float
    attend_bytes_per_s: float
    x_s_per_token: float
    dense_s: float


@dataclass(frozen=True)
class Decision:
    """Attributes: x_rows; why; predicted_s: step time for each number of X rows from 0 on (empty: nothing was predicted); the costs."""

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
    """The number of X rows, a multiple of `group`, with the least predicted time; the smaller of equals."""
    times = tuple(predict(shape, costs, x) for x in range(shape.sequences + 1))
    best = min(range(0, shape.sequences + 1, group), key=lambda x: (times[x], x))
    return Decision(best, "the least predicted step time", times, costs)


def decide(shape: Shape, devices: list[RowStore], dense_s: Callable[[], float], group: int = 1, threads: int = 0) -> Decision:
    """Measures what must be known, and chooses. `dense_s` measures a step without attention, and only where something can be won."""
    if shape.ratio >= 1:
        return Decision(0, f"X rows take {shape.ratio:.2f} of the bytes of K and V")
    if shape.sequences * shape.kv_bytes < SMALL_BYTES:
        return Decision(0, "too few bytes to matter")
    return choose(shape, measure(shape, devices, dense_s, threads), group)


def measure(shape: Shape, devices: list[RowStore], dense_s: Callable[[], float], threads: int = 0) -> Costs:
    """Rates of these devices, and of what computes on their rows: about a second."""
    attend_s = _attend_seconds(shape, devices[0], shape.n_kv, shape.d, shape.heads // shape.n_kv, is_shared=False)
    if shape.is_rotary:
        x_s = _recompute_seconds(shape, devices[0], threads)
    else:
        x_s = _attend_seconds(shape, devices[0], 1, shape.hidden, shape.heads, is_shared=True)
    row_bytes = 2 * shape.n_kv * shape.d * shape.dtype.itemsize
    return Costs(sum(read_rate(device) for device in devices), row_bytes / attend_s, x_s, dense_s())


def read_rate(device: RowStore) -> float:
    """Bytes a second of the reads of attention, caches of no kind in the way: of the later part of half a second, since a full queue and
    a drive that is limited (which lends bytes at first) make the beginning faster than what lasts."""
    layout = RowLayout("fp16", 128, 128)
    n = _PROBE_BYTES // (16 * layout.row_bytes)
    rows = torch.zeros(1, 16, n, 128, dtype=torch.float16)
    segment = device.put(layout, rows, rows, range(16))[0]
    seen: list[tuple[float, int]] = []
    try:
        device.flush()
        begun = time.perf_counter()
        tickets = deque(device.ahead(layout, [Use(segment, 0, n, 0)]) for _ in range(2))
        while not seen or seen[-1][0] < _PROBE_S:
            device.visit(tickets.popleft(), lambda memory, _: seen.append((time.perf_counter() - begun, memory.numel())))
            tickets.append(device.ahead(layout, [Use(segment, 0, n, 0)]))
        late = [(at_s, size) for at_s, size in seen if at_s >= _PROBE_S * _UNSTEADY]
        late = late if len(late) > 1 else [(0.0, 0), *seen]
        return sum(size for _, size in late[1:]) / max(late[-1][0] - late[0][0], 1e-6)
    finally:
        device.forget()
        device.release(segment)


def _recompute_seconds(shape: Shape, device: RowStore, threads: int) -> float:
    """Of one token's X row: both projections, a rotation, attention, as rows of one read are treated."""
    layout = RowLayout(format_of(shape.dtype), shape.hidden, shape.hidden, is_shared=True)
    made_as: dict[str, Any] = {"dtype": shape.dtype, "device": device.device}
    n = max(16, UNIT_BYTES // layout.row_bytes)
    x, turn = torch.zeros(n, shape.hidden, **made_as), torch.ones(1, 1, n, shape.d, **made_as)
    weight = torch.zeros(shape.n_kv * shape.d, shape.hidden, **made_as)

    def rotate(k: torch.Tensor, _sequence: int, _first: int) -> torch.Tensor:
        a, b = k.chunk(2, dim=-1)
        return k * turn + torch.cat([-b, a], dim=-1) * turn

    look = Queries(torch.zeros(1, shape.n_kv, shape.heads // shape.n_kv, shape.d, device=device.device), shape.d)
    attend = partial(device.attend, -1)
    made = Recomputer(look, Projection(weight, weight, None, None, shape.n_kv, rotate), layout, threads, attend)
    return _best(lambda: made.add(0, x, 0), device.device) / n


def _attend_seconds(shape: Shape, device: RowStore, heads: int, d: int, queries: int, *, is_shared: bool) -> float:
    """Of one token's rows, all heads: attention from memory."""
    n = max(64, _ROWS_BYTES // (heads * d * shape.dtype.itemsize * (1 if is_shared else 2)))
    k = torch.zeros(1, heads, n, d, dtype=shape.dtype, device=device.device)
    v = k if is_shared else torch.zeros_like(k)
    look = Queries(torch.zeros(1, heads, queries, d, device=device.device), d)
    return _best(lambda: device.attend(-1, look, Tail(k, v, 0, n, 0)), device.device) / n


def _best(work: Callable[[], Any], device: torch.device, times: int = 3) -> float:
    """Seconds of the fastest of some runs, after one that does not count: on a GPU it compiles."""
    found = []
    for _ in range(1 + times):
        begun = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        found.append(time.perf_counter() - begun)
    return min(found[1:])
