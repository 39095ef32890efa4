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

The salt differs from store to store and from one generation of a store to the next, and the record
carries its own number: so bytes that are intact but belong elsewhere (another store, an older
version, another record left in a recycled buffer) are found out too. CLS and tokens lie together
because they are used together (ESPN, section 4.1).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..ops.crc32c import crc32c_ranges
from ..ops.maxsim import Codebook, token_format, token_row_bytes
from ..ops.maxsim.limits import DIM_MAX, DIM_MULTIPLE
from ..ops.maxsim.residual import CODE_BYTES
from ..storage import Plan
from ..storage.engine import FileHandle
from ..storage.native import load_native

HEADER_BYTES = 16
ALIGN_BYTES = 16
_ROWS_AT_ONCE = 4096  # looked at: bounds the memory that a check takes
_ROWS_AT_ONCE_QUEUED = 1 << 17  # the same, where launches count
#: An array as a host tensor that a device copies from; see `espnx.device.gpu.staging.Tables.put`.
Put = Callable[[np.ndarray], torch.Tensor]
_MAGIC = 0xE5
#: The byte in the header. Numbers are never used again.
FORMAT_NUMBERS = {
    "fp32": 1,
    "fp16": 2,
    "bf16": 3,
    "int8": 4,
    "bit1": 5,
    "residual1": 6,
    "residual2": 7,
    "residual4": 8,
}
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_HEADER = np.dtype(
    [("crc32c", "<u4"), ("n_tokens", "<u2"), ("format", "u1"), ("magic", "u1"), ("number", "<u8")]
)
_REBUILD = "restore the store from a copy, or build it again"


@dataclass(frozen=True)
class RecordSchema:
    """What all records of a store have in common.

    Args:
        format: how token vectors are kept, a name of `espnx.ops.maxsim.FORMATS`.
        d_cls: length of the CLS vector; 0: records hold none.
        dim: length of a token vector.

    The kernels take vectors of a multiple of 8 values. Others are stored with zeros after them, and
    queries get zeros too, so that no score is another one (`encode`, `decode`, `query_tokens` and
    `query_cls` are the only places that know).
    """

    format: str
    d_cls: int
    dim: int

    def __post_init__(self) -> None:
        if not isinstance(self.format, str) or self.format not in FORMAT_NUMBERS:
            raise errors.InvalidInputError(
                "unknown record format", got=repr(self.format), expected=" or ".join(FORMAT_NUMBERS)
            )
        for name, value, least in (("d_cls", self.d_cls, 0), ("dim", self.dim, 1)):
            if not least <= value <= DIM_MAX:
                raise errors.InvalidInputError(
                    f"{name} of a record", got=value, expected=f"{least} to {DIM_MAX}"
                )

    @property
    def stored_dim(self) -> int:
        """Values of a stored token vector, zeros included."""
        return _padded(self.dim)

    @property
    def stored_d_cls(self) -> int:
        """Values of a stored CLS vector, zeros included."""
        return _padded(self.d_cls)

    @property
    def format_number(self) -> int:
        """The number of the format in the header of a record."""
        return FORMAT_NUMBERS[self.format]

    @property
    def cls_format(self) -> str:
        """The format of the CLS vector: that of the tokens where it is a plain number, else fp16,
        since one exact CLS vector costs little."""
        return self.format if token_format(self.format).is_lossless_float else "fp16"

    @property
    def cls_bytes(self) -> int:
        return token_row_bytes(self.cls_format, self.stored_d_cls) if self.d_cls else 0

    @property
    def row_bytes(self) -> int:
        """One token."""
        return token_row_bytes(self.format, self.stored_dim)

    @property
    def largest(self) -> float:
        """The largest value that the format can hold; codes are scaled, so they hold what fp32
        does."""
        return float(torch.finfo(DTYPES[self.cls_format]).max)

    @property
    def fixed_bytes(self) -> int:
        """Header and CLS vector: where the tokens begin."""
        return HEADER_BYTES + self.cls_bytes

    def encode(self, tokens: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        """Token vectors, float32 [n, dim], as rows, uint8 [n * row_bytes]. `codebook`: padded
        (`pad_codebook`)."""
        return token_format(self.format).encode(pad(tokens, self.stored_dim), codebook)

    def decode(self, rows: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        """The opposite: what rows stand for, float32 [n, dim]."""
        values = token_format(self.format).decode(rows, self.stored_dim, codebook)
        return (
            values
            if self.stored_dim == self.dim
            else (values[:, : self.dim] * self._scale).contiguous()
        )

    def query_tokens(self, tokens: torch.Tensor) -> torch.Tensor:
        """A query's token vectors, float32 [n, dim], as the kernels score stored rows with them."""
        return tokens if self.stored_dim == self.dim else pad(tokens, self.stored_dim) * self._scale

    def query_cls(self, cls: torch.Tensor) -> torch.Tensor:
        """The same of CLS vectors, float32 [n, d_cls]."""
        return pad(cls, self.stored_d_cls)

    @property
    def _scale(self) -> float:
        """Signs are read as vectors of length 1, zeros included, which have no sign of their
        own."""
        return float((self.stored_dim / self.dim) ** 0.5) if self.format == "bit1" else 1.0

    def pad_codebook(self, codebook: Codebook) -> Codebook:
        """A codebook of `dim` values as rows need it. A code has no 0, so all zeros get the same
        one, and centroids what undoes it."""
        if self.stored_dim == codebook.d:
            return codebook
        weights, code = codebook.bucket_weights, 0
        # The code of a value that is itself the weight of that code: one that encoding gives and
        # decoding takes away, to the bit.
        while (found := int(torch.bucketize(weights[code], codebook.bucket_cutoffs))) != code:
            code = found
        rest = weights[code].neg().expand(codebook.n_centroids, self.stored_dim - codebook.d)
        return Codebook(
            torch.cat([codebook.centroids, rest], dim=1), codebook.bucket_cutoffs, weights
        )

    def sizes(self, n_tokens: np.ndarray) -> np.ndarray:
        """int64 [n]: size of each record in bytes."""
        raw = self.fixed_bytes + n_tokens.astype(np.int64) * self.row_bytes
        return (raw + ALIGN_BYTES - 1) // ALIGN_BYTES * ALIGN_BYTES

    def lay_out(self, n_tokens: np.ndarray, begin_bytes: int) -> tuple[np.ndarray, int]:
        """Offsets of consecutive records from `begin_bytes`, and the first free byte after them.

        No record touches more 4 KiB blocks than it must, and none leaves a hole unless it would.
        """
        offsets, end = load_native().lay_out_records(
            torch.from_numpy(np.ascontiguousarray(n_tokens)),
            self.fixed_bytes,
            self.row_bytes,
            begin_bytes,
        )
        return offsets.numpy(), end


def _padded(values: int) -> int:
    return -(-values // DIM_MULTIPLE) * DIM_MULTIPLE


def pad(vectors: torch.Tensor, dim: int) -> torch.Tensor:
    """Zeros after the values of each row, up to `dim`."""
    return (
        vectors
        if vectors.shape[-1] == dim
        else torch.nn.functional.pad(vectors, (0, dim - vectors.shape[-1]))
    )


def locate_records(
    numbers: np.ndarray,
    n_tokens: np.ndarray,
    group_offset_bytes: torch.Tensor,
    segment_begin: torch.Tensor,
    schema: RecordSchema,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(data file, offset_bytes, size_bytes) of record numbers, int64 [m] each. Raises
    InvalidInputError for numbers outside.

    `n_tokens`, `group_offset_bytes` and `segment_begin` as in `RecordLayout`.
    """
    wanted = torch.from_numpy(np.ascontiguousarray(numbers, dtype=np.int64))
    segment, offset_bytes, size_bytes = load_native().locate_records(
        wanted,
        torch.from_numpy(n_tokens),
        group_offset_bytes,
        segment_begin,
        schema.fixed_bytes,
        schema.row_bytes,
    )
    return segment, offset_bytes, size_bytes


class RecordLayout:
    """The places of records of one kind, and how to tell that one is whole and the right one.

    Args:
        schema: of all of them.
        n_tokens: uint16 [n], tokens of each document.
        group_offset_bytes: int64, offset of records 0, 64, 128, ... in their data files.
        segment_begin: int64, first record of each data file.
        files: the data files.
        salt: seeds the records' checksums.
        codebook: of residual formats.
    """

    def __init__(
        self,
        schema: RecordSchema,
        n_tokens: np.ndarray,
        group_offset_bytes: torch.Tensor,
        segment_begin: torch.Tensor,
        files: Sequence[FileHandle],
        *,
        salt: int,
        codebook: Codebook | None = None,
    ):
        self.schema, self.n_tokens, self.salt, self.codebook = schema, n_tokens, salt, codebook
        self.group_offset_bytes, self.segment_begin, self.files = (
            group_offset_bytes,
            segment_begin,
            files,
        )
        self.file_numbers = torch.tensor([file.number for file in files], dtype=torch.int64)

    @property
    def size_bytes(self) -> int:
        """Bytes on disk."""
        return sum(file.size_bytes for file in self.files)

    @property
    def resident_bytes(self) -> int:
        """Offsets and file numbers, beside the token counts that all kinds of records of a store
        share."""
        return self.group_offset_bytes.nbytes + self.segment_begin.nbytes + self.file_numbers.nbytes

    def locate(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(data file, offset_bytes, size_bytes) of record numbers, int64 [m] each. Raises
        InvalidInputError outside the store."""
        return locate_records(
            numbers, self.n_tokens, self.group_offset_bytes, self.segment_begin, self.schema
        )

    def plan(self, numbers: np.ndarray) -> Plan:
        """A read of whole records."""
        segment, offset_bytes, size_bytes = self.locate(numbers)
        file = self.file_numbers[segment] if len(self.file_numbers) else segment
        return Plan(file=file, offset_bytes=offset_bytes, size_bytes=size_bytes)

    def check(self, memory: torch.Tensor, positions: torch.Tensor, numbers: np.ndarray) -> None:
        """Raises ChecksumError or StaleDataError, naming file, offset and length, unless every
        record is whole and the right one; FormatError likewise where one names a centroid that the
        codebook does not have."""
        if not numbers.size:
            return
        n_tokens = self.n_tokens[numbers]
        self._refuse_damage(
            damage(memory, self.schema, positions, numbers, n_tokens, self.salt), numbers
        )
        if self.codebook is not None:
            self._refuse_unknown(
                unknown_centroid(
                    memory, self.schema, positions, n_tokens, self.codebook.n_centroids
                ),
                numbers,
            )

    def evidence(
        self, memory: torch.Tensor, positions: torch.Tensor, numbers: np.ndarray, put: Put
    ) -> Evidence:
        """What `judge` decides by, of records in an I/O buffer, where the buffer is: the host waits
        for nothing. `numbers`: at least one."""
        n_tokens = self.n_tokens[numbers]
        header, crc32c = _seen(memory, self.schema, positions, n_tokens, self.salt, put)
        unknown = []
        if self.codebook is not None:
            for items in _parts(n_tokens, _ROWS_AT_ONCE_QUEUED):
                at, counts = positions[torch.from_numpy(items)], n_tokens[items]
                n_centroids = self.codebook.n_centroids
                unknown.append(_first_unknown(memory, self.schema, at, counts, n_centroids, put))
        return Evidence(header, crc32c, torch.stack(unknown) if unknown else None)

    def judge(self, evidence: Evidence, numbers: np.ndarray) -> None:
        """Raises what `check` does, by what was seen, which is on the CPU now."""
        n_tokens = self.n_tokens[numbers]
        self._refuse_damage(_damage(evidence, self.schema, numbers, n_tokens), numbers)
        if evidence.unknown is not None:
            for items, named in zip(
                _parts(n_tokens, _ROWS_AT_ONCE_QUEUED), evidence.unknown, strict=True
            ):
                self._refuse_unknown(_record_of(named, items, n_tokens), numbers)

    def _refuse_damage(self, found: list[tuple[int, str]], numbers: np.ndarray) -> None:
        if not found:
            return
        index, what = found[0]
        expected = f"record {numbers[index]} with {self.n_tokens[numbers[index]]} tokens"
        raise (errors.ChecksumError if what.startswith("CRC32C") else errors.StaleDataError)(
            f"record {numbers[index]} is not what was written"
            + (f" (and {len(found) - 1} more)" if len(found) > 1 else ""),
            **self._where(numbers[index : index + 1]),
            got=what,
            expected=f"{expected} in format {self.schema.format_number} ({self.schema.format})",
            fix="run `espnx index verify`; " + _REBUILD,
        )

    def _refuse_unknown(self, unknown: tuple[int, int] | None, numbers: np.ndarray) -> None:
        if unknown is None or self.codebook is None:
            return
        raise errors.FormatError(
            f"record {numbers[unknown[0]]} names a centroid that is not in the codebook",
            **self._where(numbers[unknown[0] : unknown[0] + 1]),
            got=unknown[1],
            expected=f"0 to {self.codebook.n_centroids - 1}",
            fix=_REBUILD,
        )

    def _where(self, number: np.ndarray) -> dict[str, Any]:
        """The place of one record, as errors name it."""
        segment, offset_bytes, size_bytes = self.locate(number)
        path = self.files[int(segment[0])].path
        return {
            "path": path,
            "offset_bytes": int(offset_bytes[0]),
            "size_bytes": int(size_bytes[0]),
        }


def seal(
    memory: np.ndarray,
    schema: RecordSchema,
    offsets: np.ndarray,
    n_tokens: np.ndarray,
    first_number: int,
    salt: int,
) -> None:
    """Fills in the headers of records whose vectors are in place, numbered from `first_number`."""
    if not offsets.size:
        return
    header = np.zeros(offsets.size, dtype=_HEADER)
    header["n_tokens"], header["format"], header["magic"] = n_tokens, schema.format_number, _MAGIC
    header["number"] = first_number + np.arange(offsets.size)
    where = offsets[:, None] + np.arange(HEADER_BYTES)
    memory[where] = header.view(np.uint8).reshape(-1, HEADER_BYTES)
    header["crc32c"] = _checksums(
        torch.from_numpy(memory), torch.from_numpy(offsets), schema.sizes(n_tokens), salt
    )
    memory[where[:, :4]] = header["crc32c"].reshape(-1, 1).view(np.uint8)


def _checksums(
    memory: torch.Tensor, offsets: torch.Tensor, sizes: np.ndarray, salt: int
) -> np.ndarray:
    return (
        crc32c_ranges(memory, offsets + 4, torch.from_numpy(sizes) - 4, seed=salt)
        .numpy()
        .astype(np.uint32)
    )


@dataclass(frozen=True)
class Evidence:
    """What tells whether records are whole and the right ones.

    Attributes:
        header: uint8 [records, 16].
        crc32c: int64 [records]: what their checksums are.
        unknown: int64 [parts, 2], of residual records: see `_first_unknown`; None of others.
    """

    header: torch.Tensor
    crc32c: torch.Tensor
    unknown: torch.Tensor | None = None


def _seen(
    memory: torch.Tensor,
    schema: RecordSchema,
    positions: torch.Tensor,
    n_tokens: np.ndarray,
    salt: int,
    put: Put,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(header, crc32c) of `Evidence`, on the memory's device."""
    begin = positions.numpy()
    where = put(begin).to(memory.device, non_blocking=True)
    header = memory[where[:, None] + torch.arange(HEADER_BYTES, device=memory.device)]
    crc32c = crc32c_ranges(memory, put(begin + 4), put(schema.sizes(n_tokens) - 4), seed=salt)
    return header, crc32c


def damage(
    memory: torch.Tensor,
    schema: RecordSchema,
    positions: torch.Tensor,
    numbers: np.ndarray,
    n_tokens: np.ndarray,
    salt: int,
) -> list[tuple[int, str]]:
    """Checks records in an I/O buffer (CPU or GPU): (index, what is wrong) of each that is not what
    it must be."""
    if not numbers.size:
        return []
    header, crc32c = _seen(memory, schema, positions, n_tokens, salt, torch.from_numpy)
    return _damage(Evidence(header.cpu(), crc32c.cpu()), schema, numbers, n_tokens)


def _damage(
    evidence: Evidence, schema: RecordSchema, numbers: np.ndarray, n_tokens: np.ndarray
) -> list[tuple[int, str]]:
    header = evidence.header.numpy().view(_HEADER).reshape(-1)
    found = evidence.crc32c.numpy().astype(np.uint32)
    intact = found == header["crc32c"]
    right = (
        (header["number"] == numbers)
        & (header["n_tokens"] == n_tokens)
        & (header["magic"] == _MAGIC)
    )
    right &= header["format"] == schema.format_number
    bad = np.flatnonzero(~(intact & right)).tolist()
    reasons = []
    for i in bad:
        if not intact[i]:
            reasons.append(
                (i, f"CRC32C {found[i]:08x} where the record says {header['crc32c'][i]:08x}")
            )
        else:
            reasons.append((i, _in_words(header[i], schema)))
    return reasons


def _in_words(header: np.void, schema: RecordSchema) -> str:
    """What the header of a record says of it: its format only where it is another one."""
    said, names = (
        f"record {header['number']} with {header['n_tokens']} tokens",
        {known: name for name, known in FORMAT_NUMBERS.items()},
    )
    if header["format"] != schema.format_number:
        said += f" in format {header['format']} ({names.get(int(header['format']), 'unknown')})"
    return said if header["magic"] == _MAGIC else f"{said}, marked {header['magic']:#04x}"


def unknown_centroid(
    memory: torch.Tensor,
    schema: RecordSchema,
    positions: torch.Tensor,
    n_tokens: np.ndarray,
    n_centroids: int,
) -> tuple[int, int] | None:
    """(index, centroid number) of the first of residual records in an I/O buffer that names a
    centroid which the codebook does not have."""
    for items in _parts(n_tokens, _ROWS_AT_ONCE):
        at = positions[torch.from_numpy(items)]
        named = _first_unknown(
            memory, schema, at, n_tokens[items], n_centroids, torch.from_numpy
        ).cpu()
        if (found := _record_of(named, items, n_tokens)) is not None:
            return found
    return None


def _parts(n_tokens: np.ndarray, rows_at_once: int) -> Iterator[np.ndarray]:
    """The indices of records, of about so many rows at a time; only parts that have any."""
    ends = np.cumsum(n_tokens, dtype=np.int64)
    borders = np.flatnonzero(np.diff(ends // rows_at_once)) + 1
    for items in np.split(np.arange(len(ends)), borders):
        if n_tokens[items].any():
            yield items


def _first_unknown(
    memory: torch.Tensor,
    schema: RecordSchema,
    positions: torch.Tensor,
    n_tokens: np.ndarray,
    n_centroids: int,
    put: Put,
) -> torch.Tensor:
    """int64 [2] on the memory's device: which of the records' rows, one after the other, is the
    first that names a centroid which the codebook does not have (as many as there are: none), and
    which one it names."""
    counts = n_tokens.astype(np.int64)
    total = int(counts.sum())
    # Row r of record i lies r - (rows before the record) rows behind its first one.
    first = positions.numpy() + schema.fixed_bytes - (np.cumsum(counts) - counts) * schema.row_bytes
    both = put(np.stack([counts, first])).to(memory.device, non_blocking=True)
    row = torch.arange(total, device=memory.device)
    item = torch.repeat_interleave(both[0], output_size=total)
    begin = both[1].index_select(0, item) + row * schema.row_bytes
    place = begin[:, None] + torch.arange(CODE_BYTES, device=memory.device)
    codes = memory[place].view(torch.int32).view(-1)
    is_bad = (codes < 0) | (codes >= n_centroids)
    named = torch.where(is_bad, row, total).amin().view(1)
    code = codes.index_select(0, named.clamp(max=total - 1)).to(torch.int64)
    return torch.cat([named, code])


def _record_of(
    named: torch.Tensor, items: np.ndarray, n_tokens: np.ndarray
) -> tuple[int, int] | None:
    """What `_first_unknown` of the records `items` has found, as `unknown_centroid` says it."""
    row, code = named.tolist()
    which = int(np.searchsorted(np.cumsum(n_tokens[items], dtype=np.int64), row, side="right"))
    return None if which == len(items) else (int(items[which]), code)
