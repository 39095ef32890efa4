"""K and V made again from X rows, beside the bare products of the same shapes; and attention over X
rows with the projections moved to the other side (absorption), beside making K and V again.

What the library does with arrived rows (espnx/kv/x_rows.py), without a rotation, which belongs to
the model.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from espnx.kv.x_rows import Projection, absorb, release
from espnx.ops import attention
from espnx.ops.attention import block_bytes
from espnx.ops.attention.api import attention_inside

from . import bounds
from .point import KernelSystem, Point, Setting, Systems, fastest

_BLOCK_ROWS = 256
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Layer:
    """Attributes: name: of a model that has such layers. hidden: values of an X row. heads, d: of
    KV. group: query heads of each."""

    name: str
    fmt: str
    hidden: int
    heads: int
    d: int
    group: int = 1

    @property
    def dtype(self) -> torch.dtype:
        return _DTYPES[self.fmt]

    @property
    def width(self) -> int:
        return self.heads * self.d

    def rows(self, setting: Setting, most: int) -> int:
        """How many X rows, in whole blocks; at most so many."""
        size = setting.data_bytes // (self.hidden * self.dtype.itemsize)
        return max(min(size, most) // _BLOCK_ROWS, 1) * _BLOCK_ROWS


_RECOMPUTED = (
    Layer("opt-1.3b", "fp16", 2048, 32, 64),
    Layer("llama-3-8b", "fp16", 4096, 8, 128, 4),
    Layer("llama-3-8b", "bf16", 4096, 8, 128, 4),
)
_ABSORBED = (Layer("opt-350m", "fp16", 1024, 16, 64),)
_RECOMPUTED_ROWS = 16_384


def points() -> list[Point]:
    made = [
        Point(
            "projections",
            f"K and V of X rows, {layer.name} {layer.fmt}",
            _params(layer),
            lambda setting, layer=layer: (  # type: ignore[misc]
                4.0 * layer.rows(setting, _RECOMPUTED_ROWS) * layer.hidden * layer.width
            ),
            layer.fmt,
            lambda setting, peers, layer=layer: recomputed(layer, setting),  # type: ignore[misc]
        )
        for layer in _RECOMPUTED
    ]
    return made + [
        Point(
            "projections",
            f"absorbed attention over X rows, {layer.name} {layer.fmt}",
            _params(layer),
            lambda setting, layer=layer: (  # type: ignore[misc]
                4.0 * layer.rows(setting, 1 << 30) * layer.hidden * layer.heads * layer.group
            ),
            layer.fmt,
            lambda setting, peers, layer=layer: absorbed(layer, setting),  # type: ignore[misc]
        )
        for layer in _ABSORBED
    ]


def _params(layer: Layer) -> dict[str, Any]:
    return {"format": layer.fmt, "hidden": layer.hidden, "heads": layer.heads, "d": layer.d}


def _projection(layer: Layer, draw: dict[str, Any]) -> Projection:
    k, v = (
        (torch.randn(layer.width, layer.hidden, **draw) * layer.hidden**-0.5).to(layer.dtype)
        for _ in range(2)
    )
    return Projection(k, v, None, None, layer.heads, None)


def recomputed(layer: Layer, setting: Setting) -> Systems:
    """The library's projection of rows, and two products into tensors that are there."""
    draw = {"generator": setting.generator(), "device": setting.device}
    n, sets = layer.rows(setting, _RECOMPUTED_ROWS), setting.clock.sets
    xs = [torch.randn(n, layer.hidden, **draw).to(layer.dtype) for _ in range(sets)]
    projection = _projection(layer, draw)
    outs = [torch.empty(n, layer.width, dtype=layer.dtype, device=setting.device) for _ in "kv"]
    moved = layer.dtype.itemsize * (n * layer.hidden + 2 * layer.width * (layer.hidden + n))

    def whole(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        return projection.rows(xs[i], 0, 0)

    def products(i: int) -> tuple[torch.Tensor, torch.Tensor]:
        weights = (projection.k_weight, projection.v_weight)
        for weight, out in zip(weights, outs, strict=True):
            torch.mm(xs[i], weight.T, out=out)
        k, v = (each.view(n, layer.heads, layer.d).transpose(0, 1)[None] for each in outs)
        return k, v

    def check(i: int, found: tuple[torch.Tensor, torch.Tensor]) -> str | None:
        x = xs[i].double()
        weights = (projection.k_weight, projection.v_weight)
        for name, weight, made in zip("KV", weights, found, strict=True):
            exact, size = x @ weight.double().T, x.abs() @ weight.double().abs().T
            summed = bounds.gamma(layer.hidden + 1, bounds.TRUNCATED) * size
            allowed = summed + bounds.ROUNDED[layer.dtype] / 2 * exact.abs() + 2.0**-24
            rows = made[0].transpose(0, 1).reshape(n, layer.width)
            if problem := bounds.problem(rows, exact, allowed):
                return f"{name}: {problem}"
        return None

    common = (setting.clock, moved, moved)
    return Systems(
        [KernelSystem("espnx", "espnx", whole, check, *common, work=whole)],
        [KernelSystem("torch-mm", "torch-mm", products, check, *common)],
    )


def absorbed(layer: Layer, setting: Setting) -> Systems:
    """Queries absorbed, attention over X rows, sums released; and K and V of all rows made, then
    attended to by torch."""
    draw = {"generator": setting.generator(), "device": setting.device}
    n, hidden, sets = layer.rows(setting, 1 << 30), layer.hidden, setting.clock.sets
    xs = [torch.randn(n, hidden, **draw).to(layer.dtype) for _ in range(sets)]
    projection, heads = _projection(layer, draw), layer.heads * layer.group
    query = torch.randn(1, heads, 1, layer.d, **draw).to(layer.dtype)
    scale = layer.d**-0.5
    offsets = torch.arange(n // _BLOCK_ROWS).view(1, 1, -1)
    offsets *= block_bytes(_BLOCK_ROWS, hidden, 0, layer.fmt)
    n_rows = torch.tensor([n])
    there = offsets.to(setting.device), n_rows.to(setting.device)
    options: dict[str, Any] = {"block_rows": _BLOCK_ROWS, "format": layer.fmt, "dv": 0}
    size = layer.dtype.itemsize * (n * hidden + 2 * hidden * layer.width)

    def whole(i: int) -> torch.Tensor:
        rows = xs[i].view(-1).view(torch.uint8)
        moved = absorb(query, projection, scale)
        return release(
            *attention(moved, rows, offsets, n_rows, scale=1.0, **options), projection, heads
        )

    def work(i: int) -> torch.Tensor:
        rows = xs[i].view(-1).view(torch.uint8)
        moved = absorb(query, projection, scale)
        sums = attention_inside(moved, rows, *there, rows_max=n, align_bytes=16, **options)
        return release(*sums, projection, heads)

    def again(i: int) -> torch.Tensor:
        k, v = projection.rows(xs[i], 0, 0)
        return F.scaled_dot_product_attention(query, k, v, enable_gqa=layer.group > 1)

    def check(i: int, found: torch.Tensor) -> str | None:
        return _absorbed_problem(layer, projection, query, xs[i], found)

    common = (check, setting.clock, size, size)
    systems = Systems([KernelSystem("espnx", "espnx", whole, *common, work=work, is_ours=True)])
    candidates = [KernelSystem("recomputed", "recomputed", again, *common)]
    if not setting.only_ours:
        systems.peers += fastest(candidates, systems.missing, "recomputed")
    return systems


def _absorbed_problem(
    layer: Layer, projection: Projection, query: torch.Tensor, x: torch.Tensor, found: torch.Tensor
) -> str | None:
    """Against K and V in float64. Absorbed queries, and sums, are rounded to the weights' dtype;
    where K and V are made again, those are."""
    n, rounded, scale = len(x), bounds.ROUNDED[layer.dtype], layer.d**-0.5
    rows, q = x.double(), query.double().view(layer.heads, layer.group, layer.d) * scale
    weights = (
        each.double().view(layer.heads, layer.d, layer.hidden)
        for each in (projection.k_weight, projection.v_weight)
    )
    for head, (k_weight, v_weight) in enumerate(zip(*weights, strict=True)):
        scores = q[head] @ k_weight @ rows.T
        largest = (q[head].abs() @ k_weight.abs() @ rows.abs().T).amax(-1, keepdim=True)
        chances = scores.softmax(-1)
        exact = chances @ rows @ v_weight.T
        absolute = chances @ rows.abs() @ v_weight.abs().T
        extra = rounded / 2 + bounds.gamma(layer.d + layer.hidden, bounds.TRUNCATED)
        allowed = bounds.attention(n, layer.hidden, largest, absolute, extra)
        allowed = allowed + 2 * rounded * absolute + n * 2.0**-24
        heads = slice(head * layer.group, (head + 1) * layer.group)
        if problem := bounds.problem(found[0, heads, 0], exact, allowed):
            return f"head {head}: {problem}"
    return None
