"""Documents for MaxSim: token rows of every format in an I/O buffer, in random order, and what is
right for them. Values are decoded here from the formats' description (docs/formats.md), not by the
library."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from espnx.ops import token_row_bytes
from espnx.ops.maxsim import Codebook

from . import bounds
from .point import Setting

TOKENS = 180  # of a document, on average: as ESPN has them
QUERY_TOKENS = 32
_CENTROIDS = 16_384
_ALIGN_BYTES = 16  # of where a document begins
_TOKENS_AT_ONCE, _DOCUMENTS_AT_ONCE = 1 << 18, 1024
_DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Shape:
    """Attributes: fmt, d: of token rows. is_ragged: documents of 1 to 359 tokens, not of 180."""

    fmt: str
    d: int
    is_ragged: bool

    @property
    def row_bytes(self) -> int:
        return token_row_bytes(self.fmt, self.d)

    @property
    def is_float(self) -> bool:
        return self.fmt in _DTYPES

    def counts(self, setting: Setting) -> torch.Tensor:
        """Tokens of each document, int64 on the CPU."""
        # compact formats are bound by arithmetic: enough that no cache holds the input sets
        is_plain = self.is_float or self.fmt == "int8"
        size = setting.data_bytes if is_plain else setting.data_bytes // 4
        n = max(size // (TOKENS * self.row_bytes), 3)
        if not self.is_ragged:
            return torch.full((n,), TOKENS)
        return torch.randint(
            1, 2 * TOKENS, (n,), generator=torch.Generator().manual_seed(setting.seed)
        )

    def flops(self, setting: Setting) -> float:
        return 2.0 * QUERY_TOKENS * self.d * int(self.counts(setting).sum())


class Documents:
    """The input sets of a shape. Documents have the same lengths and places in each of them.

    Attributes:
        buffers: uint8, one for each set.
        offsets, counts: int64 on the CPU, where a document begins and its tokens.
        query: float32 [32, d], of values that fp16 and bf16 hold.
        codebook: of residual formats.
    """

    def __init__(self, shape: Shape, setting: Setting):
        self.shape, self.device = shape, setting.device
        self.counts = shape.counts(setting)
        sizes = self.counts * shape.row_bytes
        padded = (sizes + _ALIGN_BYTES - 1) // _ALIGN_BYTES * _ALIGN_BYTES
        order = torch.randperm(len(sizes), generator=torch.Generator().manual_seed(setting.seed))
        self.offsets = torch.empty_like(sizes)
        self.offsets[order] = padded[order].cumsum(0) - padded[order]
        self.size_bytes, self.token_bytes = int(padded.sum()), int(sizes.sum())
        generator = setting.generator()
        draw = {"generator": generator, "device": setting.device}
        query = torch.nn.functional.normalize(torch.randn(QUERY_TOKENS, shape.d, **draw), dim=-1)
        self.query = query.bfloat16().float() if shape.fmt == "bf16" else query.half().float()
        self.codebook = _codebook(shape, draw) if shape.fmt.startswith("residual") else None
        self.buffers = [self._fill(draw) for _ in range(setting.clock.sets)]

    @cached_property
    def begins(self) -> torch.Tensor:
        """int64 on the device: where each token's row begins, document after document."""
        counts = self.counts.to(self.device)
        first = counts.cumsum(0) - counts
        within = torch.arange(int(self.counts.sum()), device=self.device)
        within -= first.repeat_interleave(counts)
        offsets = self.offsets.to(self.device).repeat_interleave(counts)
        return offsets + within * self.shape.row_bytes

    def _fill(self, draw: dict[str, Any]) -> torch.Tensor:
        shape, fmt = self.shape, self.shape.fmt
        if shape.is_float:
            dtype = _DTYPES[fmt]
            values = torch.empty(self.size_bytes // dtype.itemsize, dtype=dtype, device=self.device)
            for part in values.view(-1, shape.d).split(_TOKENS_AT_ONCE):
                drawn = torch.randn(part.shape, **draw)
                part.copy_(torch.nn.functional.normalize(drawn, dim=-1))
            return values.view(torch.uint8)
        buffer = torch.randint(0, 256, (self.size_bytes,), dtype=torch.uint8, **draw)
        if fmt == "bit1":
            return buffer
        if fmt == "int8":
            heads = torch.rand(len(self.begins), **draw) / 512 + 1 / 1024
        else:
            heads = torch.randint(0, _CENTROIDS, (len(self.begins),), dtype=torch.int32, **draw)
        places = self.begins[:, None] + torch.arange(4, device=self.device)
        buffer[places] = heads.view(torch.uint8).view(-1, 4)
        return buffer

    def stored(self, i: int, tokens: slice = slice(None)) -> torch.Tensor:
        """Token rows of a set, document after document: values in their own dtype of plain formats,
        else bytes."""
        begins, size = self.begins[tokens], self.shape.row_bytes
        if self.shape.is_float:
            values = self.buffers[i].view(_DTYPES[self.shape.fmt]).view(-1, self.shape.d)
            return values[begins // size]
        within = torch.arange(size, device=self.device)
        return self.buffers[i][begins[:, None] + within]

    def values(self, i: int, tokens: slice) -> torch.Tensor:
        """The values of some tokens, float64."""
        rows, fmt, d = self.stored(i, tokens), self.shape.fmt, self.shape.d
        if self.shape.is_float:
            return rows.double()
        if fmt == "bit1":
            bits = (rows[:, :, None] >> torch.arange(8, device=rows.device)) & 1
            return (2.0 * bits.reshape(len(rows), d).double() - 1) * d**-0.5
        head, codes = rows[:, :4].contiguous(), rows[:, 4:].contiguous()
        if fmt == "int8":
            return head.view(torch.float32).double() * codes.view(torch.int8).double()
        if self.codebook is None:
            raise TypeError(f"no codebook for {fmt}")
        nbits = int(fmt.removeprefix("residual"))
        # the first of eight bits is a byte's highest, a code's first bit its lowest
        bits = (codes[:, :, None] >> torch.arange(7, -1, -1, device=rows.device)) & 1
        weights = 2 ** torch.arange(nbits, device=rows.device)
        buckets = (bits.reshape(len(rows), d, nbits).long() * weights).sum(-1)
        sums = self.codebook.centroids[head.view(torch.int32).long().view(-1)]
        # one sum in fp32, as every version has it
        found = (sums + self.codebook.bucket_weights[buckets]).double()
        return found / found.norm(dim=1, keepdim=True)

    @cached_property
    def exact(self) -> list[tuple[torch.Tensor, ...]]:
        """What is right for each set, float64: scores, those of absolute values, and those with
        queries' largest values."""
        query = self.query.double()
        peaks = query.abs().amax(dim=-1, keepdim=True).expand_as(query)
        weights = torch.cat([query, query.abs(), peaks])
        return [self._exact(i, weights) for i in range(len(self.buffers))]

    def _exact(self, i: int, weights: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ends = [0, *self.counts.cumsum(0).tolist()]
        found = []
        for first in range(0, len(self.counts), _DOCUMENTS_AT_ONCE):
            last = min(first + _DOCUMENTS_AT_ONCE, len(self.counts))
            rows = self.values(i, slice(ends[first], ends[last]))
            products = torch.cat(
                [rows @ weights[:QUERY_TOKENS].T, rows.abs() @ weights[QUERY_TOKENS:].T], dim=1
            )
            lengths = self.counts[first:last].to(self.device)
            found.append(torch.segment_reduce(products, "max", lengths=lengths, axis=0))
        return torch.cat(found).view(len(self.counts), 3, QUERY_TOKENS).sum(-1).unbind(1)

    def check(self, i: int, found: torch.Tensor) -> str | None:
        scores, magnitude, peaks = self.exact[i]
        shape = self.shape
        allowed = bounds.maxsim(shape.fmt, shape.d, QUERY_TOKENS, magnitude, peaks)
        return bounds.problem(found, scores, allowed)

    def check_peer(self, i: int, found: torch.Tensor) -> str | None:
        """A peer may round similarities and their sum to the rows' dtype."""
        scores, magnitude, peaks = self.exact[i]
        shape = self.shape
        allowed = bounds.maxsim(shape.fmt, shape.d, QUERY_TOKENS, magnitude, peaks)
        rounded = bounds.ROUNDED[_DTYPES[shape.fmt]]
        return bounds.problem(found, scores, allowed + rounded * magnitude)


def _codebook(shape: Shape, draw: dict[str, Any]) -> Codebook:
    nbits = int(shape.fmt.removeprefix("residual"))
    centroids = torch.nn.functional.normalize(torch.randn(_CENTROIDS, shape.d, **draw), dim=-1)
    edges = torch.linspace(-0.1, 0.1, 2**nbits + 1, device=draw["device"])
    return Codebook(centroids, edges[1:-1].clone(), (edges[1:] + edges[:-1]) / 2)
