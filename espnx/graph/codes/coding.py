"""Vectors as nodes hold them: values of a format, or codes of product quantisation in their place
(DiskANN's `pq_disk_bytes`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from .codebook import Codebook


@dataclass(frozen=True, eq=False)
class VectorCoding:
    """How vectors become what a node holds, and back.

    Attributes:
        format: of `espnx.graph.layout.NODE_FORMATS`.
        book: of the codes, where they are such.
    """

    format: str
    book: Codebook | None = None

    def encode(self, rows: np.ndarray) -> np.ndarray:
        """What nodes hold, of vectors [m, dim] of `PageLayout.row_dtype`: bfloat16 as uint16, which
        NumPy has, codes as uint8 [m, disk_pq_bytes], all else as it is."""
        if self.book is not None:
            return self.book.encode(rows)
        return to_bfloat16(rows) if self.format == "bf16" else rows

    def decode(self, held: np.ndarray) -> np.ndarray:
        """Vectors [m, dim] of `PageLayout.row_dtype` of what nodes hold."""
        if self.book is not None:
            return self.book.decode(held)
        return from_bfloat16(held) if self.format == "bf16" else held


def to_bfloat16(values: np.ndarray) -> np.ndarray:
    """uint16 of float32: bits of the nearest bfloat16, of two equally near ones the even one."""
    found: np.ndarray = (
        torch.from_numpy(np.ascontiguousarray(values))
        .to(torch.bfloat16)
        .view(torch.int16)
        .numpy()
        .view(np.uint16)
    )
    return found


def from_bfloat16(bits: np.ndarray) -> np.ndarray:
    """float32 of bits of bfloat16, uint16: its upper half."""
    return (bits.astype(np.uint32) << 16).view(np.float32)
