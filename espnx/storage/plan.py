"""A plan: many reads or writes as a structure of arrays, so that ten thousand of them cost one call."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Sequence

    from .engine import FileHandle


@dataclass(frozen=True)
class Plan:
    """n descriptors. All fields are int64 CPU tensors of shape [n].

    Attributes:
        file: engine file numbers (`FileHandle.number`).
        offset_bytes: where each item begins in its file. Reads may be unaligned; direct writes may not.
        size_bytes: how long each item is; 0 is allowed and moves nothing.
        out_offset_bytes: where each item goes in (or comes from) the caller's memory; None lets the engine pack the items of a read into
            a buffer of its own, without a copy, and say where they lie.
        crc32c: the CRC32C each item of a read must have; None checks nothing.
    """

    file: torch.Tensor
    offset_bytes: torch.Tensor
    size_bytes: torch.Tensor
    out_offset_bytes: torch.Tensor | None = None
    crc32c: torch.Tensor | None = None

    def __len__(self) -> int:
        return self.file.numel()

    @classmethod
    def of(
        cls,
        file: FileHandle | Sequence[FileHandle],
        offset_bytes: Sequence[int] | torch.Tensor,
        size_bytes: Sequence[int] | torch.Tensor,
        out_offset_bytes: Sequence[int] | torch.Tensor | None = None,
        crc32c: Sequence[int] | torch.Tensor | None = None,
    ) -> Plan:
        """Builds a plan from sequences; one file stands for all items."""
        offsets = torch.as_tensor(offset_bytes, dtype=torch.int64)
        if isinstance(file, (list, tuple)):
            numbers = torch.tensor([f.number for f in file], dtype=torch.int64)
        else:
            numbers = torch.full_like(offsets, file.number)  # type: ignore[union-attr]
        return cls(
            file=numbers,
            offset_bytes=offsets,
            size_bytes=torch.as_tensor(size_bytes, dtype=torch.int64),
            out_offset_bytes=None if out_offset_bytes is None else torch.as_tensor(out_offset_bytes, dtype=torch.int64),
            crc32c=None if crc32c is None else torch.as_tensor(crc32c, dtype=torch.int64),
        )
