"""Decode attention over stored rows: K and V in every format, and rows that are both at once.

An input set holds blocks of random values, one sequence, in order: of 256 rows, and for some shapes
of as many as caches store in a block, for which espnx has another kernel. Peers get the same values
as contiguous K and V, in the rows' own dtype, and queries that this dtype holds; those of int8 rows
get the values in fp16, which are twice the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from espnx.device.row_layout import RowLayout
from espnx.ops import attention
from espnx.ops.attention import block_bytes
from espnx.ops.attention.api import attention_inside

from . import bounds, flashinfer
from .point import KernelSystem, Point, Setting, Systems, fastest
from .timing import Call

BLOCK_ROWS = 256
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
_BACKENDS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "math": SDPBackend.MATH,
}


@dataclass(frozen=True)
class Shape:
    """Attributes: fmt, d: of rows. heads: of KV. group: query heads of each. is_both: rows are K
    and V at once. block_rows: of a block."""

    fmt: str
    d: int
    heads: int
    group: int
    is_both: bool = False
    block_rows: int = BLOCK_ROWS

    @property
    def dv(self) -> int:
        """Values of a V row, 0 where a row is both: as the op takes it."""
        return 0 if self.is_both else self.d

    @property
    def block_bytes(self) -> int:
        return block_bytes(self.block_rows, self.d, self.dv, self.fmt)

    @property
    def peer_dtype(self) -> torch.dtype:
        return _DTYPES.get(self.fmt, torch.float16)

    def rows(self, setting: Setting) -> int:
        """How long a sequence is, in whole blocks."""
        return max(setting.data_bytes // (self.heads * self.block_bytes), 1) * self.block_rows

    def bytes(self, setting: Setting) -> int:
        return self.rows(setting) // self.block_rows * self.heads * self.block_bytes

    def flops(self, setting: Setting) -> float:
        """Both products."""
        return 4.0 * self.heads * self.group * self.rows(setting) * self.d


def points() -> list[Point]:
    """Each format at each head dimension and group, 16-bit rows in a cache's own blocks, then rows
    that are K and V at once."""
    found = [
        _point("attention", Shape(fmt, d, 32 if group == 1 else 8, group))
        for fmt in ("fp16", "bf16", "int8", "fp32")
        for d in (64, 128)
        for group in (1, 4, 8)
        if fmt != "fp32" or group != 8
    ]
    found += [
        _point("attention", Shape(fmt, d, 8, 4, block_rows=RowLayout(fmt, d, d).block_rows))
        for fmt in ("fp16", "bf16")
        for d in (64, 128)
    ]
    both = [(256, 16), (576, 16), (1024, 16)]
    return found + [
        _point("x", Shape(fmt, d, 1, group, is_both=True))
        for fmt in ("fp16", "bf16")
        for d, group in both
        if fmt == "fp16" or d == 576
    ]


def _point(part: str, shape: Shape) -> Point:
    kind = "rows as K and V" if shape.is_both else "decode"
    is_short = shape.block_rows != BLOCK_ROWS
    blocks = f", blocks of {shape.block_rows}" if is_short else ""
    return Point(
        part,
        f"{kind} {shape.fmt} d {shape.d}, {shape.heads} x {shape.group}{blocks}",
        {
            "format": shape.fmt,
            "d": shape.d,
            "heads": shape.heads,
            "group": shape.group,
            **({"block_rows": shape.block_rows} if is_short else {}),
        },
        shape.flops,
        shape.fmt if shape.fmt in ("bf16", "fp32") else "fp16",
        lambda setting, peers: make(shape, setting),
    )


class Exact(NamedTuple):
    """What is right for an input set, in float64, [heads, group, ...]. Attributes: o. largest: sum
    of a score's absolute products, at most. absolute: weights times ``|v|``. top: largest ``|v|``.
    """

    o: torch.Tensor
    largest: torch.Tensor
    absolute: torch.Tensor
    top: float


class Inputs:
    """The input sets of a shape, with what is right."""

    def __init__(self, shape: Shape, setting: Setting):
        self.shape, self.n = shape, shape.rows(setting)
        generator = setting.generator()
        draw = {"generator": generator, "device": setting.device}
        self.blocks = [_random_blocks(shape, self.n, draw) for _ in range(setting.clock.sets)]
        heads = shape.heads * shape.group
        # values that every dtype of a peer holds
        self.query = torch.randn(1, heads, 1, shape.d, **draw).to(shape.peer_dtype).float()
        self.scale = shape.d**-0.5
        blocks = self.n // shape.block_rows
        self.offsets = torch.arange(shape.heads * blocks).view(1, shape.heads, blocks)
        self.offsets *= shape.block_bytes

    @cached_property
    def exact(self) -> list[Exact]:
        return [self._exact(i) for i in range(len(self.blocks))]

    def stored(self, i: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V in their own dtype; int8's in `dtype`."""
        shape, d, block_rows = self.shape, self.shape.d, self.shape.block_rows
        stored = self.blocks[i].view(shape.heads, -1, shape.block_bytes)
        if shape.fmt != "int8":
            rows = stored.view(_DTYPES[shape.fmt]).view(shape.heads, stored.shape[1], -1, d)
            k, v = rows[:, :, :block_rows], rows[:, :, -block_rows:]
        else:
            sizes = (4 * d, block_rows * d, 4 * block_rows, block_rows * d)
            k_scale, k, v_scale, v = (part.contiguous() for part in stored.split(sizes, dim=-1))
            shaped = (shape.heads, stored.shape[1], block_rows, d)
            # products in fp64 are exact
            k = k.view(torch.int8).view(shaped).double() * k_scale.view(torch.float32)[:, :, None]
            v = v.view(torch.int8).view(shaped) * v_scale.view(torch.float32).double()[..., None]
            k, v = k.to(dtype), v.to(dtype)
        return k.reshape(shape.heads, self.n, d), v.reshape(shape.heads, self.n, d)

    def _exact(self, i: int) -> Exact:
        shape = self.shape
        queries = self.query.double().view(shape.heads, shape.group, shape.d) * self.scale
        outs, largest, sums, top = [], [], [], 0.0
        stored = self.stored(i, torch.float64)
        for head in range(shape.heads):
            k, v = (each[head].double() for each in stored)
            weights = (queries[head] @ k.T).softmax(-1)
            largest.append((queries[head].abs() @ k.abs().T).amax(-1, keepdim=True))
            outs.append(weights @ v)
            sums.append(weights @ v.abs())
            top = max(top, float(v.abs().max()))
        return Exact(torch.stack(outs), torch.stack(largest), torch.stack(sums), top)

    def check(self, i: int, found: torch.Tensor) -> str | None:
        exact = self.exact[i]
        allowed = bounds.attention(self.n, self.shape.d, exact.largest, exact.absolute)
        return bounds.problem(found, exact.o, allowed)

    def check_peer(self, i: int, found: torch.Tensor) -> str | None:
        """A peer may round weights and results to the dtype; of int8 rows its values, too."""
        exact, rounded = self.exact[i], bounds.ROUNDED[self.shape.peer_dtype]
        is_rounded = self.shape.fmt == "int8"
        allowed = bounds.attention(
            self.n,
            self.shape.d,
            exact.largest,
            exact.absolute,
            extra=rounded / 2 if is_rounded else 0.0,
        )
        weights = rounded * (1.5 if is_rounded else 1.0) * exact.absolute
        return bounds.problem(found, exact.o, allowed + weights + self.n * 2.0**-24 * exact.top)


def _random_blocks(shape: Shape, n: int, draw: dict[str, Any]) -> torch.Tensor:
    count = shape.heads * (n // shape.block_rows)
    if shape.fmt != "int8":
        dtype = _DTYPES[shape.fmt]
        values = torch.randn(count * shape.block_bytes // dtype.itemsize, dtype=dtype, **draw)
        return values.view(torch.uint8)
    blocks = torch.randint(0, 256, (count, shape.block_bytes), dtype=torch.uint8, **draw)
    v_scales = 4 * shape.d + shape.block_rows * shape.d
    for begin, scales in ((0, shape.d), (v_scales, shape.block_rows)):
        drawn = torch.rand(count, scales, **draw) / 64
        blocks[:, begin : begin + 4 * scales] = drawn.view(torch.uint8)
    return blocks.view(-1)


def make(shape: Shape, setting: Setting) -> Systems:
    """The op, and what others do with the same rows."""
    inputs, size = Inputs(shape, setting), shape.bytes(setting)
    n_rows = torch.tensor([inputs.n])
    there = inputs.offsets.to(setting.device), n_rows.to(setting.device)
    scaled = inputs.query * inputs.scale
    options: dict[str, Any] = {"block_rows": shape.block_rows, "format": shape.fmt, "dv": shape.dv}

    def whole(i: int) -> torch.Tensor:
        blocks = inputs.blocks[i]
        return attention(inputs.query, blocks, inputs.offsets, n_rows, **options)[0]

    def work(i: int) -> torch.Tensor:
        blocks, most = inputs.blocks[i], inputs.n
        return attention_inside(scaled, blocks, *there, rows_max=most, align_bytes=16, **options)[0]

    systems = Systems(
        [
            KernelSystem(
                *("espnx", "espnx", whole, inputs.check, setting.clock, size, size),
                work=work,
                is_ours=True,
            )
        ]
    )
    if not setting.only_ours:
        _add_peers(systems, inputs, setting, size)
    return systems


def _add_peers(systems: Systems, inputs: Inputs, setting: Setting, size: int) -> None:
    shape, dtype = inputs.shape, inputs.shape.peer_dtype
    stored = [inputs.stored(i, dtype) for i in range(setting.clock.sets)]
    rows = [
        (k.contiguous()[None], (k if shape.is_both else v).contiguous()[None]) for k, v in stored
    ]
    if shape.is_both:
        rows = [(k, k) for k, _ in rows]
    moved = sum(each.numel() for each in set(rows[0])) * dtype.itemsize
    suffix = "-fp16" if shape.fmt == "int8" else ""

    def system(name: str, group: str, call: Call) -> KernelSystem:
        return KernelSystem(
            f"{name}{suffix}",
            f"{group}{suffix}",
            call,
            inputs.check_peer,
            setting.clock,
            size,
            moved,
        )

    calls = _sdpa_calls(shape, inputs.query.to(dtype), rows, setting.device.type == "cuda")
    candidates = [system(f"torch-sdpa-{name}", "torch-sdpa", call) for name, call in calls]
    systems.peers += fastest(candidates, systems.missing, f"torch-sdpa{suffix}")
    name = f"flashinfer{suffix}"
    if setting.flashinfer is None:
        systems.missing[name] = setting.why_no_flashinfer
    elif why := flashinfer.refusal(dtype, shape.d, shape.group):
        systems.missing[name] = why
    else:
        made = flashinfer.calls(setting.flashinfer, inputs.query.to(dtype), rows, inputs.scale)
        candidates = [system(f"flashinfer-{kind}", "flashinfer", call) for kind, call in made]
        systems.peers += fastest(candidates, systems.missing, name)


def _sdpa_calls(
    shape: Shape,
    query: torch.Tensor,
    rows: Sequence[tuple[torch.Tensor, torch.Tensor]],
    on_gpu: bool,
) -> list[tuple[str, Call]]:
    """Calls of each backend: query heads of a KV head as heads, and as a query of several rows; and
    the plain products of such queries, which split long rows as cuBLAS sees fit."""
    heads = query.view(1, shape.heads * shape.group, 1, shape.d)
    grouped = query.view(1, shape.heads, shape.group, shape.d)

    def plain(i: int) -> torch.Tensor:
        k, v = rows[i]
        return F.scaled_dot_product_attention(heads, k, v, enable_gqa=shape.group > 1)

    def packed(i: int) -> torch.Tensor:
        return F.scaled_dot_product_attention(grouped, *rows[i])

    def products(i: int) -> torch.Tensor:
        k, v = rows[i]
        scores = (grouped @ k.mT).float() * shape.d**-0.5
        return scores.softmax(-1).to(v.dtype) @ v

    def by(backend: SDPBackend, call: Call) -> Callable[[int], torch.Tensor]:
        def run(i: int) -> torch.Tensor:
            with sdpa_kernel(backend):
                found: torch.Tensor = call(i)
            return found

        return run

    if not on_gpu:
        return [("packed", packed)]
    found = [(name, by(backend, plain)) for name, backend in _BACKENDS.items()]
    if shape.group > 1:
        found += [(f"{name}-packed", by(backend, packed)) for name, backend in _BACKENDS.items()]
    return [*found, ("products", products)]
