"""What every version of the accelerator asks of its arguments, and the numbers that its hardware
fixes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from ...errors import InvalidInputError

DIM = 128  # values of a row of K, of V, of a query
BLOCK = 128  # tokens whose statistics are taken together
PAD_TO = 32  # sequences are padded to a multiple of so many tokens (HILOS, section 5.4)
MASK = -1e4  # score of padding, and of a token that a query does not see
GROUP = 5  # queries that share one pass over K and V at most
ROW_BYTES = 2 * DIM
# those of a device's PIECE
PIECE_FIELDS = ("sequence", "head", "offset_bytes", "n_rows", "first_position")
#: A result whose lse is at least this was not touched by masked tokens: its largest score is above
#: MASK + 104 for any number of tokens below e^96, and exp(-104) is 0 in fp32.
LSE_LEAST = -9800.0


@dataclass(frozen=True)
class Buffered:
    """Rows that wait on the host, as HILOS hands them over (section 4.3). They come after the
    stored ones.

    Attributes:
        scores: float32 [B, H, n, t], as `accelerator_scores` makes them.
        v: float16 [B, H, t, 128].
        first_position: of the first of them.
    """

    scores: torch.Tensor
    v: torch.Tensor
    first_position: int


def default_scale(scale: float | None) -> float:
    return DIM**-0.5 if scale is None else float(scale)


def check_arguments(
    query: torch.Tensor,
    buffer: torch.Tensor,
    pieces: torch.Tensor,
    block_rows: int,
    scale: float,
    first_visible: torch.Tensor | None,
    visible: torch.Tensor | None,
    last_position: torch.Tensor | None,
    buffered: Buffered | None,
) -> None:
    """Shapes, dtypes, devices and numbers; reads no element of a tensor. Raises
    InvalidInputError."""
    check_halves("query", query, "[B, H, n, 128]")
    batch, heads, n = query.shape[:3]
    wanted: list[tuple[str, torch.Tensor | None, torch.dtype, tuple[int | None, ...]]] = [
        ("buffer", buffer, torch.uint8, (None,)),
        ("pieces", pieces, torch.int64, (None, len(PIECE_FIELDS))),
        ("first_visible", first_visible, torch.int64, (batch,)),
        ("visible", visible, torch.uint8, (batch, None)),
        ("last_position", last_position, torch.int64, (n,)),
    ]
    if buffered is not None:
        rows = buffered.v.shape[2] if buffered.v.dim() == 4 else None
        check_halves("buffered V rows", buffered.v, "[B, H, t, 128]")
        wanted += [
            ("buffered scores", buffered.scores, torch.float32, (batch, heads, n, rows)),
            ("buffered V rows", buffered.v, torch.float16, (batch, heads, rows, DIM)),
        ]
        end = (
            math.inf
            if visible is None or visible.dim() != 2 or rows is None
            else visible.shape[1] - rows
        )
        if not 0 <= buffered.first_position <= end:
            raise InvalidInputError(
                "position of buffered rows", got=buffered.first_position, expected=f"0 to {end}"
            )
    for name, tensor, dtype, shape in wanted:
        if tensor is None:
            continue
        fits = tensor.dim() == len(shape) and all(
            size is None or size == got for size, got in zip(shape, tensor.shape, strict=True)
        )
        if (
            not fits
            or tensor.dtype != dtype
            or tensor.device != query.device
            or not tensor.is_contiguous()
        ):
            sizes = ", ".join("any" if size is None else str(size) for size in shape)
            raise InvalidInputError(
                f"accelerator {name}",
                got=f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}",
                expected=f"contiguous {dtype} [{sizes}] on {query.device}",
            )
    if not 1 <= block_rows <= 1 << 20:
        raise InvalidInputError("accelerator block_rows", got=block_rows, expected="1 to 1048576")
    if not math.isfinite(scale):
        raise InvalidInputError("accelerator scale", got=scale, expected="a finite number")


def check_halves(name: str, tensor: torch.Tensor, shape: str) -> None:
    """Raises InvalidInputError unless a tensor holds fp16 rows of 128."""
    if (
        tensor.dtype != torch.float16
        or tensor.dim() != 4
        or tensor.shape[-1] != DIM
        or not tensor.is_contiguous()
    ):
        raise InvalidInputError(
            f"accelerator {name}",
            got=f"{tensor.dtype} {list(tensor.shape)}",
            expected=f"contiguous float16 {shape}",
        )


def check_threads(threads: int | None) -> None:
    """Raises InvalidInputError unless it is None or at least 1."""
    if threads is not None and threads < 1:
        raise InvalidInputError(
            "accelerator threads", got=threads, expected="1 or more, or None to leave it to the op"
        )


def check_inside(
    query: torch.Tensor,
    buffer: torch.Tensor,
    pieces: torch.Tensor,
    block_rows: int,
    visible: torch.Tensor | None,
) -> None:
    """Raises InvalidInputError unless every piece lies in the buffer, is of a head that there is,
    and at positions that `visible` has."""
    batch, heads = query.shape[:2]
    for number, (sequence, head, offset, n_rows, first) in enumerate(pieces.tolist()):
        end = offset + -(-n_rows // block_rows) * block_rows * 2 * ROW_BYTES
        is_there = (
            0 <= sequence < batch
            and 0 <= head < heads
            and offset >= 0
            and n_rows >= 0
            and first >= 0
            and end <= buffer.numel()
        )
        if not is_there or (visible is not None and first + n_rows > visible.shape[1]):
            raise InvalidInputError(
                "accelerator piece",
                got=(
                    f"piece {number} (sequence {sequence}, head {head}, offset_bytes {offset}, "
                    f"n_rows {n_rows}, first_position {first})"
                ),
                expected=(
                    f"one of {batch} sequences and {heads} heads, in whole blocks within "
                    f"{buffer.numel()} bytes"
                )
                + ("" if visible is None else f", of {visible.shape[1]} positions"),
            )
