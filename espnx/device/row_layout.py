"""How the rows of K, V and X lie in blocks on a device.

A block holds `block_rows` consecutive tokens of one (sequence, KV head) and is a whole number of 4
KiB pages, so that no page is written twice. Blocks are what checksums cover; many of them make one
read::

    fp32, fp16, bf16   K rows [block_rows, d] | V rows [block_rows, dv] | zeros
    X, as K and V      X rows [block_rows, d] | zeros
    int8               K scales fp32 [d] | K int8 | V scales fp32 [block_rows] | V int8 | zeros

X is the input of the projections, kept instead of both K and V. int8 has scales of K by channel, of
V by token (KIVI, section 3.2).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from .. import errors
from ..ops.scales import scale_or_nan

PAGE_BYTES = 4096
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16, "int8": torch.int8}
_INT8_FILL = 0.9  # of a block that must be rows: scales and the last page's rest take what is left
_X_ROWS = 16


def format_of(dtype: torch.dtype) -> str:
    """The format that keeps rows of a dtype as they are. Raises InvalidInputError."""
    for name, known in DTYPES.items():
        if known == dtype and name != "int8":
            return name
    raise errors.InvalidInputError(
        "dtype of K and V", got=dtype, expected="float32, float16 or bfloat16"
    )


@dataclass(frozen=True)
class RowLayout:
    """Rows of one kind.

    Args:
        format: ``fp32``, ``fp16``, ``bf16`` or ``int8``.
        d: length of a K row (of an X row).
        dv: length of a V row.
        is_shared: X rows, which stand for K and V at once; `dv` is `d`.
        least_rows: a block holds at least so many tokens.
    """

    format: str
    d: int
    dv: int
    is_shared: bool = False
    least_rows: int = 1

    def __post_init__(self) -> None:
        if self.format not in DTYPES:
            raise errors.InvalidInputError(
                "row format", got=repr(self.format), expected=", ".join(DTYPES)
            )
        for name, value in (("d", self.d), ("dv", self.dv)):
            if value < 8 or value % 8:
                raise errors.InvalidInputError(
                    f"{name}, the length of a row", got=value, expected="a positive multiple of 8"
                )
        if self.is_shared and (self.format == "int8" or self.d != self.dv):
            raise errors.InvalidInputError(
                "X rows",
                got=f"{self.format}, {self.d} and {self.dv}",
                expected="one unscaled row for K and V",
            )

    @property
    def dtype(self) -> torch.dtype:
        return DTYPES[self.format]

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of one token: K and V, scales and padding not counted."""
        return (self.d if self.is_shared else self.d + self.dv) * self.dtype.itemsize

    @cached_property
    def block_rows(self) -> int:
        """The least number of tokens whose K rows are whole pages (HILOS, section 4.3: 4096 / row
        bytes); int8: that fill a block well."""
        if self.format == "int8":
            rows = 64
            while rows < 1024 and rows * self.row_bytes < _INT8_FILL * self._padded(rows):
                rows *= 2
            return max(rows, self.least_rows)
        unit = PAGE_BYTES // math.gcd(PAGE_BYTES, self.d * self.dtype.itemsize)
        least = max(self.least_rows, _X_ROWS if self.is_shared else 1)
        return -(-least // unit) * unit

    @property
    def k_offset_bytes(self) -> int:
        return 4 * self.d if self.format == "int8" else 0

    @property
    def v_scale_offset_bytes(self) -> int:
        return self.k_offset_bytes + self.block_rows * self.d * self.dtype.itemsize

    @property
    def v_offset_bytes(self) -> int:
        if self.is_shared:
            return 0
        return self.v_scale_offset_bytes + (4 * self.block_rows if self.format == "int8" else 0)

    @cached_property
    def block_bytes(self) -> int:
        return self._padded(self.block_rows)

    def _padded(self, rows: int) -> int:
        scales = 4 * (self.d + rows) if self.format == "int8" else 0
        return -(-(rows * self.row_bytes + scales) // PAGE_BYTES) * PAGE_BYTES

    def blocks(self, rows: int) -> int:
        """How many blocks `rows` tokens take."""
        return -(-rows // self.block_rows)

    @cached_property
    def geometry(self) -> dict[str, Any]:
        """The layout as the compiled part wants it; not to be changed."""
        return {
            "format": self.format,
            "d": self.d,
            "dv": self.dv,
            "is_shared": self.is_shared,
            "block_rows": self.block_rows,
            "block_bytes": self.block_bytes,
            "v_offset_bytes": self.v_offset_bytes,
            "k_offset_bytes": self.k_offset_bytes,
            "k_scale_offset_bytes": 0,
            "v_scale_offset_bytes": self.v_scale_offset_bytes,
        }

    def pack(
        self, k: torch.Tensor, v: torch.Tensor | None, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Blocks of rows: uint8 [..., blocks, block_bytes] from k [..., n, d] and v [..., n, dv]
        (X: v is None). The last block may be partly filled; zeros follow."""
        *lead, n, _ = k.shape
        blocks = self.blocks(n)
        if out is None:
            out = torch.empty((*lead, blocks, self.block_bytes), dtype=torch.uint8, device=k.device)
        if self.format == "int8" and v is not None:
            for offset, part in self._quantise(
                _whole(k, blocks, self.block_rows), _whole(v, blocks, self.block_rows)
            ):
                values = part.flatten(len(lead) + 1)
                end = offset + values.shape[-1] * values.element_size()
                out[..., offset:end].view(part.dtype).copy_(values)
        else:
            end = self._copy(k, out, 0)
            if v is not None:
                end = self._copy(v, out, self.v_offset_bytes)
        out[..., end:] = 0
        return out

    def _copy(self, rows: torch.Tensor, out: torch.Tensor, offset_bytes: int) -> int:
        """Rows [..., n, width] to their place in blocks, without another copy of them between.
        Returns where in a block they end."""
        n, width = rows.shape[-2:]
        end = offset_bytes + self.block_rows * width * self.dtype.itemsize
        places = out[..., offset_bytes:end].view(self.dtype).unflatten(-1, (self.block_rows, width))
        whole, rest = divmod(n, self.block_rows)
        places[..., :whole, :, :].copy_(
            rows[..., : n - rest, :].unflatten(-2, (whole, self.block_rows))
        )
        if rest:
            places[..., whole, :rest, :].copy_(rows[..., n - rest :, :])
            places[..., whole, rest:, :] = 0
        return end

    def _quantise(self, k: torch.Tensor, v: torch.Tensor) -> list[tuple[int, torch.Tensor]]:
        k, v = k.float(), v.float()
        k_scale = (k.abs().amax(dim=-2) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        v_scale = (v.abs().amax(dim=-1) / 127).clamp_min(torch.finfo(torch.float32).tiny)
        codes_k = (k / k_scale.unsqueeze(-2)).round().to(torch.int8)
        codes_v = (v / v_scale.unsqueeze(-1)).round().to(torch.int8)
        return [
            (0, k_scale),
            (self.k_offset_bytes, codes_k),
            (self.v_scale_offset_bytes, v_scale),
            (self.v_offset_bytes, codes_v),
        ]

    def unpack(self, blocks: torch.Tensor, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
        """(k [..., rows, d], v [..., rows, dv]) of blocks [..., n_blocks, block_bytes], in the
        stored dtype (int8: float32)."""
        *lead, count, _ = blocks.shape

        def part(offset: int, width: int, dtype: torch.dtype) -> torch.Tensor:
            size = self.block_rows * width * dtype.itemsize
            values = blocks[..., offset : offset + size].contiguous().view(dtype)
            return values.reshape(*lead, count, self.block_rows, width)

        k = part(self.k_offset_bytes, self.d, self.dtype)
        v = k if self.is_shared else part(self.v_offset_bytes, self.dv, self.dtype)
        if self.format == "int8":
            k_scale = blocks[..., : 4 * self.d].contiguous().view(torch.float32).unsqueeze(-2)
            k = k.float() * scale_or_nan(k_scale)
            v = v.float() * scale_or_nan(part(self.v_scale_offset_bytes, 1, torch.float32))
        n = count * self.block_rows
        return k.reshape(*lead, n, self.d)[..., :rows, :], v.reshape(*lead, n, self.dv)[
            ..., :rows, :
        ]


def _whole(rows: torch.Tensor, blocks: int, block_rows: int) -> torch.Tensor:
    """[..., blocks, block_rows, width], zeros after the last row."""
    *lead, n, width = rows.shape
    if n < blocks * block_rows:
        rows = torch.nn.functional.pad(rows, (0, 0, 0, blocks * block_rows - n))
    return rows.reshape(*lead, blocks, block_rows, width)
