"""Documents as embedding records: what fits, and the bytes of their vectors. The record's format
stands in device/record_layout.py."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ... import errors
from ...device.record_layout import DTYPES, HEADER_BYTES, RecordSchema, pad
from ..encoder import Encoded

MAX_TOKENS = 65535
_ROWS_AT_ONCE = 4096  # encoded: bounds the memory that a batch takes beside its vectors


def check_document(document: Encoded, schema: RecordSchema, name: object) -> None:
    """Raises InvalidInputError where a document does not fit the schema or holds NaN or infinity in
    the stored format."""
    for part in (document.cls, document.tokens):
        if (
            not isinstance(part, torch.Tensor)
            or part.dtype != torch.float32
            or part.device.type != "cpu"
            or part.requires_grad
        ):
            got = (
                f"{part.dtype} on {part.device}"
                if isinstance(part, torch.Tensor)
                else type(part).__name__
            )
            raise errors.InvalidInputError(
                f"vectors of document {name!r}",
                got=got,
                expected="float32 tensors on the CPU",
                fix=".detach().float().cpu()",
            )
    if (
        tuple(document.cls.shape) != (schema.d_cls,)
        or document.tokens.dim() != 2
        or document.tokens.shape[1] != schema.dim
    ):
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
    limit = schema.largest
    for part in (document.cls, document.tokens):
        # Both are NaN where one value is, and the comparisons then fail as they should; abs() would
        # copy a long document.
        least, most = part.aminmax() if part.numel() else (0.0, 0.0)
        if not bool(least >= -limit) or not bool(most <= limit):
            raise errors.InvalidInputError(
                f"vectors of document {name!r}",
                got="NaN, infinity or a value too large",
                expected=f"finite {schema.format}",
            )


def pack(
    documents: Sequence[Encoded],
    schema: RecordSchema,
    out: np.ndarray,
    offsets: np.ndarray,
    rows: Sequence[np.ndarray | None] = (),
) -> None:
    """Writes the vectors of documents at `offsets` of `out` (uint8, zeroed). `seal` makes records
    of them.

    `rows`: of each document, its token rows in the schema's format already; residual formats are
    packed from those alone.
    """
    if not documents:
        return
    given = list(rows) or [None] * len(documents)
    cls = cls_rows(torch.stack([document.cls for document in documents]), schema)
    cls_end = HEADER_BYTES + schema.cls_bytes
    fresh: list[tuple[torch.Tensor, int]] = []
    for i, offset in enumerate(offsets.tolist()):
        begin, known = offset + cls_end, given[i]
        out[offset + HEADER_BYTES : begin] = cls[i]
        if known is None:
            fresh.append((documents[i].tokens, begin))
        else:
            out[begin : begin + known.size] = known.reshape(-1)
    _encode_into(out, fresh, schema)


def cls_rows(cls: torch.Tensor, schema: RecordSchema) -> np.ndarray:
    """CLS vectors, float32 [n, d_cls], as records hold them: uint8 [n, cls_bytes]."""
    return pad(cls, schema.stored_d_cls).to(DTYPES[schema.cls_format]).view(torch.uint8).numpy()


def cls_values(rows: np.ndarray, schema: RecordSchema) -> torch.Tensor:
    """The opposite of `cls_rows`."""
    return torch.from_numpy(rows).view(DTYPES[schema.cls_format]).float()[:, : schema.d_cls]


def _encode_into(
    out: np.ndarray, fresh: Sequence[tuple[torch.Tensor, int]], schema: RecordSchema
) -> None:
    """Rows of documents, each where it belongs. Several are encoded at once, for a document alone
    costs more in calls than in bytes, and a long one in parts, so that its rows are in memory
    once."""
    group, held = list[tuple[torch.Tensor, int]](), 0
    for tokens, begin in fresh:
        for part in tokens.split(_ROWS_AT_ONCE):
            group.append((part, begin))
            begin += len(part) * schema.row_bytes
            held += len(part)
            if held >= _ROWS_AT_ONCE:
                _encode_group(out, group, schema)
                group, held = [], 0
    if group:
        _encode_group(out, group, schema)


def _encode_group(
    out: np.ndarray, group: Sequence[tuple[torch.Tensor, int]], schema: RecordSchema
) -> None:
    rows, done = schema.encode(torch.cat([part for part, _ in group])).numpy(), 0
    for part, begin in group:
        size = len(part) * schema.row_bytes
        out[begin : begin + size] = rows[done : done + size]
        done += size
