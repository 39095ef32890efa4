"""The embedding record: one document's vectors as they lie on SSD, packed and checked.

Layout (little-endian; the written specification is docs/store-format.md)::

    0   uint32  CRC32C of everything after this field, seeded with the store's salt
    4   uint16  number of tokens
    6   uint8   format
    7   uint8   0xE5
    8   uint64  record number
    16  CLS vector, d_cls values
    ..  token vectors, n_tokens x dim values
    ..  zeros up to a multiple of 16 bytes

The salt differs from store to store and from one generation of a store to the next, and the record carries its own number: so bytes that
are intact but belong elsewhere (another store, an older version, another record left in a recycled buffer) are found out too.
CLS and tokens lie together because they are used together (ESPN, section 4.1).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from .. import errors
from ..ops.crc32c import crc32c_ranges
from ..storage.native import load_native
from .encoder import Encoded

HEADER_BYTES = 16
ALIGN_BYTES = 16
MAX_TOKENS = 65535
_MAGIC = 0xE5
_FORMATS: dict[str, tuple[int, np.dtype]] = {"fp32": (1, np.dtype("<f4")), "fp16": (2, np.dtype("<f2"))}
_HEADER = np.dtype([("crc32c", "<u4"), ("n_tokens", "<u2"), ("format", "u1"), ("magic", "u1"), ("number", "<u8")])


@dataclass(frozen=True)
class RecordSchema:
    """What all records of a store have in common.

    Args:
        format: ``fp16`` or ``fp32``: how vectors are kept.
        d_cls: length of the CLS vector, a multiple of 8.
        dim: length of a token vector, a multiple of 8.
    """

    format: str
    d_cls: int
    dim: int

    def __post_init__(self) -> None:
        if self.format not in _FORMATS:
            raise errors.InvalidInputError("unknown record format", got=repr(self.format), expected=" or ".join(_FORMATS))
        for name, value in (("d_cls", self.d_cls), ("dim", self.dim)):
            if value <= 0 or value % 8 or value > 65536:
                raise errors.InvalidInputError(
                    f"{name} of a record", got=value, expected="a positive multiple of 8", fix="pad the vectors with zeros"
                )

    @property
    def format_number(self) -> int:
        """As the header of a record names it."""
        return _FORMATS[self.format][0]

    @property
    def cls_format(self) -> str:
        """Of the CLS vector."""
        return self.format

    @property
    def dtype(self) -> np.dtype:
        return _FORMATS[self.format][1]

    @property
    def cls_bytes(self) -> int:
        return self.d_cls * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """One token."""
        return self.dim * self.dtype.itemsize

    @property
    def fixed_bytes(self) -> int:
        """Header and CLS vector: where the tokens begin."""
        return HEADER_BYTES + self.cls_bytes

    def sizes(self, n_tokens: np.ndarray) -> np.ndarray:
        """int64 [n]: size of each record in bytes."""
        raw = self.fixed_bytes + n_tokens.astype(np.int64) * self.row_bytes
        return (raw + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES

    def lay_out(self, n_tokens: np.ndarray, begin_bytes: int) -> tuple[np.ndarray, int]:
        """Offsets of consecutive records from `begin_bytes`, and the first free byte after them.

        No record touches more 4 KiB blocks than it must, and none leaves a hole unless it would.
        """
        offsets, end = load_native().lay_out_records(
            torch.from_numpy(np.ascontiguousarray(n_tokens)), self.fixed_bytes, self.row_bytes, begin_bytes
        )
        return offsets.numpy(), end


def check_document(document: Encoded, schema: RecordSchema, name: object) -> None:
    """Raises InvalidInputError where a document does not fit the schema or holds NaN or infinity in the stored format."""
    for part in (document.cls, document.tokens):
        if not isinstance(part, torch.Tensor) or part.dtype != torch.float32 or part.device.type != "cpu" or part.requires_grad:
            got = f"{part.dtype} on {part.device}" if isinstance(part, torch.Tensor) else type(part).__name__
            raise errors.InvalidInputError(
                f"vectors of document {name!r}", got=got, expected="float32 tensors on the CPU", fix=".detach().float().cpu()"
            )
    if tuple(document.cls.shape) != (schema.d_cls,) or document.tokens.dim() != 2 or document.tokens.shape[1] != schema.dim:
        raise errors.InvalidInputError(
            f"vectors of document {name!r}",
            got=f"cls {list(document.cls.shape)}, tokens {list(document.tokens.shape)}",
            expected=f"cls [{schema.d_cls}], tokens [n, {schema.dim}]",
        )
    if document.tokens.shape[0] > MAX_TOKENS:
        raise errors.InvalidInputError(
            f"document {name!r} is too long",
            got=f"{document.tokens.shape[0]} tokens",
            expected=f"at most {MAX_TOKENS}",
            fix="split it into passages",
        )
    limit = float(np.finfo(schema.dtype).max)
    for part in (document.cls, document.tokens):
        # abs().max() is NaN where there is one, and the comparison then fails as it should.
        if part.numel() and not bool(part.abs().max() <= limit):
            raise errors.InvalidInputError(
                f"vectors of document {name!r}", got="NaN, infinity or a value too large", expected=f"finite {schema.format}"
            )


def pack(documents: Sequence[Encoded], schema: RecordSchema, out: np.ndarray, offsets: np.ndarray) -> None:
    """Writes the vectors of documents at `offsets` of `out` (uint8, zeroed). `seal` makes records of them."""
    cls_end = HEADER_BYTES + schema.cls_bytes
    for document, offset in zip(documents, offsets.tolist(), strict=True):
        out[offset + HEADER_BYTES : offset + cls_end] = document.cls.numpy().astype(schema.dtype).view(np.uint8)
        tokens = document.tokens.numpy().astype(schema.dtype).reshape(-1).view(np.uint8)
        out[offset + cls_end : offset + cls_end + tokens.size] = tokens


def _headers(memory: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return memory[offsets[:, None] + np.arange(HEADER_BYTES)].view(_HEADER).reshape(-1)


def seal(memory: np.ndarray, schema: RecordSchema, offsets: np.ndarray, n_tokens: np.ndarray, first_number: int, salt: int) -> None:
    """Fills in the headers of records whose vectors are in place, numbered from `first_number`."""
    if not offsets.size:
        return
    header = np.zeros(offsets.size, dtype=_HEADER)
    header["n_tokens"], header["format"], header["magic"] = n_tokens, _FORMATS[schema.format][0], _MAGIC
    header["number"] = first_number + np.arange(offsets.size)
    where = offsets[:, None] + np.arange(HEADER_BYTES)
    memory[where] = header.view(np.uint8).reshape(-1, HEADER_BYTES)
    header["crc32c"] = _checksums(torch.from_numpy(memory), torch.from_numpy(offsets), schema.sizes(n_tokens), salt)
    memory[where[:, :4]] = header["crc32c"].reshape(-1, 1).view(np.uint8)


def _checksums(memory: torch.Tensor, offsets: torch.Tensor, sizes: np.ndarray, salt: int) -> np.ndarray:
    return crc32c_ranges(memory, offsets + 4, torch.from_numpy(sizes) - 4, seed=salt).cpu().numpy().astype(np.uint32)


def damage(
    memory: torch.Tensor, schema: RecordSchema, positions: torch.Tensor, numbers: np.ndarray, n_tokens: np.ndarray, salt: int
) -> list[tuple[int, str]]:
    """Checks records in an I/O buffer (CPU or GPU): (index, what is wrong) of each that is not what it must be."""
    if not numbers.size:
        return []
    if memory.is_cuda:
        where = (positions[:, None] + torch.arange(HEADER_BYTES)).to(memory.device)
        header = memory[where].cpu().numpy().view(_HEADER).reshape(-1)
    else:
        header = _headers(memory.numpy(), positions.numpy())
    found = _checksums(memory, positions, schema.sizes(n_tokens), salt)
    intact = found == header["crc32c"]
    right = (header["number"] == numbers) & (header["n_tokens"] == n_tokens) & (header["magic"] == _MAGIC)
    right &= header["format"] == _FORMATS[schema.format][0]
    bad = np.flatnonzero(~(intact & right)).tolist()
    reasons = []
    for i in bad:
        if not intact[i]:
            reasons.append((i, f"CRC32C {found[i]:08x} where the record says {header['crc32c'][i]:08x}"))
        else:
            reasons.append((i, f"record {header['number'][i]} with {header['n_tokens'][i]} tokens"))
    return reasons
