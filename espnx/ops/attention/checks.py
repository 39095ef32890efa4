"""What every version of attention asks of its arguments, and what a block of rows looks like."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import InvalidInputError
from .._native import load_extension
from ..ranges import changed_tables

ROW_FORMATS = {
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int8": torch.int8,
}
DIM_MULTIPLE = 8
DIM_MAX = 16384  # csrc/cpu/attention/attention.hpp has the same one
BLOCK_ROWS_MAX = 1 << 20
_QUERY_DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class BlocksFound(NamedTuple):
    """What a look at a call's blocks finds.

    Attributes:
        multiple: the largest power of two, to 16, of which the addresses of all needed blocks are
            multiples.
        rows_max: of a sequence; 0 without sequences.
    """

    multiple: int
    rows_max: int


def block_bytes(block_rows: int, d: int, dv: int, format: str) -> int:  # noqa: A002
    """Bytes of one block of K and V rows; ``dv = 0`` for blocks of X rows."""
    scales = 4 * (d + block_rows) if format == "int8" else 0
    return scales + block_rows * (d + dv) * ROW_FORMATS[format].itemsize


def check_rows(block_rows: int, d: int, dv: int, fmt: str) -> None:
    """Raises InvalidInputError unless such rows exist; ``dv = 0`` for X rows."""
    if fmt not in ROW_FORMATS:
        raise InvalidInputError(
            "attention format", got=repr(fmt), expected=f"one of {', '.join(ROW_FORMATS)}"
        )
    for name, dim in (("d", d), ("dv", dv or d)):
        if dim % DIM_MULTIPLE or not DIM_MULTIPLE <= dim <= DIM_MAX:
            raise InvalidInputError(
                f"attention {name}",
                got=dim,
                expected=f"a multiple of {DIM_MULTIPLE} from {DIM_MULTIPLE} to {DIM_MAX}",
            )
    if not 1 <= block_rows <= BLOCK_ROWS_MAX:
        raise InvalidInputError(
            "attention block_rows", got=block_rows, expected=f"1 to {BLOCK_ROWS_MAX}"
        )
    if dv == 0 and fmt == "int8":
        raise InvalidInputError(
            "attention over X rows", got="format int8", expected="fp32, fp16 or bf16"
        )


def check_query(query: torch.Tensor) -> None:
    """Raises InvalidInputError unless it has the dtype and the dimensions of a query."""
    if query.dim() != 4 or query.dtype not in _QUERY_DTYPES:
        raise _wrong("query", query, "float32, float16 or bfloat16 [B, H, q, d]")


def check_arguments(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    visible: torch.Tensor | None,
    last_position: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and devices; reads no element. Raises InvalidInputError."""
    check_query(query)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise _wrong(
            "buffer", buffer, "contiguous uint8 [bytes]", fix="buffer.view(torch.uint8).view(-1)"
        )
    batch, heads, q_len = query.shape[:3]
    if (
        block_offset_bytes.dtype != torch.int64
        or block_offset_bytes.dim() != 3
        or block_offset_bytes.shape[0] != batch
    ):
        raise _wrong("block_offset_bytes", block_offset_bytes, f"int64 [{batch}, n_kv, n_blocks]")
    n_kv = block_offset_bytes.shape[1]
    if n_kv == 0 or heads % n_kv:
        raise InvalidInputError(
            "attention heads",
            got=f"{heads} of the query and {n_kv} of K and V",
            expected="a multiple of n_kv",
        )
    if n_rows.dtype != torch.int64 or n_rows.shape != (batch,):
        raise _wrong("n_rows", n_rows, f"int64 [{batch}]")
    if visible is not None and (
        visible.dtype != torch.uint8 or visible.dim() != 2 or visible.shape[0] != batch
    ):
        raise _wrong("visible", visible, f"uint8 [{batch}, rows]")
    if last_position is not None and (
        last_position.dtype != torch.int64 or last_position.shape != (batch, q_len)
    ):
        raise _wrong("last_position", last_position, f"int64 [{batch}, {q_len}]")
    if buffer.device != query.device:
        raise InvalidInputError(
            "attention buffer",
            got=f"on {buffer.device}",
            expected=f"on {query.device}, where the query is",
        )
    tables = {
        "block_offset_bytes": block_offset_bytes,
        "n_rows": n_rows,
        "visible": visible,
        "last_position": last_position,
    }
    for name, tensor in tables.items():
        if tensor is not None and tensor.device != query.device and tensor.device.type != "cpu":
            raise InvalidInputError(
                f"attention {name}",
                got=f"on {tensor.device}",
                expected=f"on {query.device}, where the query is, or on the CPU",
            )


def check_inside(
    buffer_bytes: int,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    block_rows: int,
    size_bytes: int,
    visible: torch.Tensor | None,
) -> None:
    """Raises InvalidInputError unless every needed block of ``size_bytes`` lies inside the buffer.
    Waits for the device where tables are on one; `look_inside` is the fast version."""
    n_blocks, rows_max = block_offset_bytes.shape[2], _room(block_offset_bytes, block_rows, visible)
    wrong = (n_rows < 0) | (n_rows > rows_max)
    if bool(wrong.any()):
        sequence = int(wrong.nonzero()[0])
        raise InvalidInputError(
            "attention n_rows",
            got=f"{int(n_rows[sequence])} of sequence {sequence}",
            expected=f"0 to {rows_max}, what the blocks (and visible) have room for",
        )
    needed = torch.arange(n_blocks, device=n_rows.device) * block_rows < n_rows[:, None]
    needed = needed[:, None, :].to(block_offset_bytes.device).expand_as(block_offset_bytes)
    outside = needed & ((block_offset_bytes < 0) | (block_offset_bytes > buffer_bytes - size_bytes))
    if bool(outside.any()):
        sequence, head, block = (int(index) for index in outside.nonzero()[0])
        offset = int(block_offset_bytes[sequence, head, block])
        raise InvalidInputError(
            "attention block outside the buffer",
            got=(
                f"block {block} of sequence {sequence}, head {head} (offset_bytes {offset}, "
                f"{size_bytes} bytes)"
            ),
            expected=f"a block within the buffer's {buffer_bytes} bytes",
        )


def look_inside(
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    block_rows: int,
    size_bytes: int,
    visible: torch.Tensor | None,
) -> BlocksFound:
    """`check_inside`, by one look at each entry, and what it finds besides.

    Args:
        block_offset_bytes, n_rows: contiguous, on the host.

    Raises:
        InvalidInputError: as `check_inside`.
    """
    room, buffer_bytes = _room(block_offset_bytes, block_rows, visible), buffer.numel()
    is_right, multiple, rows_max = load_extension().look_at_blocks(
        *(block_offset_bytes, n_rows, block_rows, size_bytes, room),
        *(buffer_bytes, buffer.data_ptr()),
    )
    if not is_right:
        check_inside(buffer_bytes, block_offset_bytes, n_rows, block_rows, size_bytes, visible)
        raise changed_tables("attention")
    return BlocksFound(multiple, rows_max)


def _room(block_offset_bytes: torch.Tensor, block_rows: int, visible: torch.Tensor | None) -> int:
    """Rows of a sequence, at most."""
    rows = block_offset_bytes.shape[2] * block_rows
    return rows if visible is None else min(rows, visible.shape[1])


def _wrong(
    name: str, tensor: torch.Tensor, expected: str, fix: str | None = None
) -> InvalidInputError:
    strided = "" if tensor.is_contiguous() else ", strided"
    return InvalidInputError(
        f"attention {name}",
        got=f"{tensor.dtype} {list(tensor.shape)}{strided}",
        expected=expected,
        fix=fix,
    )
