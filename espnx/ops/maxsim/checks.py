"""What every version of MaxSim asks of its arguments."""

from __future__ import annotations

from typing import NamedTuple

import torch

from ...errors import InvalidInputError
from .._native import load_extension
from ..ranges import changed_tables
from .codebook import Codebook
from .limits import TOKENS_MAX, check_dim
from .token import TokenFormat


class RecordsFound(NamedTuple):
    """What a look at records finds.

    Attributes:
        multiple: the largest power of two, to 16, of which all addresses are multiples.
        tokens_max: of a document; 0 without documents.
    """

    multiple: int
    tokens_max: int


def check_arguments(
    query: torch.Tensor, buffer: torch.Tensor, offset_bytes: torch.Tensor, n_tokens: torch.Tensor
) -> None:
    """Shapes, dtypes and devices; reads no element. Raises InvalidInputError."""
    if query.dtype != torch.float32 or query.dim() not in (2, 3):
        raise InvalidInputError(
            "maxsim query",
            got=f"{query.dtype} {list(query.shape)}",
            expected="float32 [Lq, d] or [Q, Lq, d]",
            fix="query.float()",
        )
    check_dim(query.shape[-1])
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidInputError(
            "maxsim buffer",
            got=(
                f"{buffer.dtype} "
                f"{list(buffer.shape)}{'' if buffer.is_contiguous() else ', strided'}"
            ),
            expected="contiguous uint8 [bytes]",
            fix="buffer.view(torch.uint8).view(-1)",
        )
    for name, tensor in (("offset_bytes", offset_bytes), ("n_tokens", n_tokens)):
        if tensor.dtype != torch.int64 or tensor.dim() != 1 or tensor.shape != offset_bytes.shape:
            raise InvalidInputError(
                f"maxsim {name}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                expected="int64 [n], as many entries in offset_bytes and n_tokens",
            )
        if tensor.device != query.device and tensor.device.type != "cpu":
            raise InvalidInputError(
                f"maxsim {name}",
                got=f"on {tensor.device}",
                expected=f"on {query.device}, where the query is, or on the CPU",
            )
    if buffer.device != query.device:
        raise InvalidInputError(
            "maxsim buffer",
            got=f"on {buffer.device}",
            expected=f"on {query.device}, where the query is",
        )


def check_codebook(token: TokenFormat, query: torch.Tensor, codebook: Codebook | None) -> None:
    """Raises InvalidInputError unless there is a codebook exactly where the format needs one, it
    fits, and lies where the query does."""
    token.check_codebook(query.shape[-1], codebook)
    if codebook is not None and codebook.centroids.device != query.device:
        raise InvalidInputError(
            "maxsim codebook",
            got=f"on {codebook.centroids.device}",
            expected=f"on {query.device}, where the query is",
            fix="codebook.to(device)",
        )


def check_inside(
    buffer_bytes: int, offset_bytes: torch.Tensor, n_tokens: torch.Tensor, row_bytes: int
) -> None:
    """Raises InvalidInputError unless every record lies inside the buffer. Waits for the device
    where the tensors are on one; `look_inside` is the fast version."""
    # n_tokens is judged before it is multiplied, and the room left is a difference, so nothing
    # overflows.
    n_tokens_ok = (n_tokens >= 0) & (n_tokens <= TOKENS_MAX)
    room_bytes = buffer_bytes - offset_bytes.clamp(0, buffer_bytes)
    inside = (
        n_tokens_ok
        & (offset_bytes >= 0)
        & (offset_bytes <= buffer_bytes)
        & (n_tokens.clamp(0, TOKENS_MAX) * row_bytes <= room_bytes)
    )
    if bool(inside.all()):
        return
    i = int((~inside).nonzero()[0])
    raise InvalidInputError(
        "maxsim record outside the buffer",
        got=(
            f"document {i} (offset_bytes {int(offset_bytes[i])}, n_tokens {int(n_tokens[i])}, "
            f"{row_bytes} bytes a token)"
        ),
        expected=f"0 to {TOKENS_MAX} token rows that lie within the buffer's {buffer_bytes} bytes",
        fix="offset_bytes counts from the buffer's first byte to the document's first token row",
    )


def look_inside(
    buffer: torch.Tensor, offset_bytes: torch.Tensor, n_tokens: torch.Tensor, row_bytes: int
) -> RecordsFound:
    """`check_inside`, by one look at each entry, and what it finds besides.

    Args:
        offset_bytes, n_tokens: contiguous, on the host.

    Raises:
        InvalidInputError: as `check_inside`.
    """
    buffer_bytes = buffer.numel()
    outside, multiple, _, tokens_max, _ = load_extension().look_at_records(
        offset_bytes, n_tokens, row_bytes, TOKENS_MAX, buffer_bytes, buffer.data_ptr(), None
    )
    if outside >= 0:
        check_inside(buffer_bytes, offset_bytes, n_tokens, row_bytes)
        raise changed_tables("maxsim")
    return RecordsFound(multiple, tokens_max)


def is_aligned(
    found: RecordsFound, buffer: torch.Tensor, offset_bytes: torch.Tensor, token: TokenFormat
) -> bool:
    """`check_aligned` of records that were looked at. Raises as it does."""
    if found.multiple < token.alignment_bytes:
        check_aligned(buffer.data_ptr(), offset_bytes, token)
        raise changed_tables("maxsim")
    return found.multiple % 16 == 0 and buffer.data_ptr() % 16 == 0


def check_aligned(address: int, offset_bytes: torch.Tensor, token: TokenFormat) -> bool:
    """True when the buffer and every offset are multiples of 16 bytes, which the CUDA kernel loads
    fastest.

    Args:
        address: of the buffer's first byte.
        offset_bytes: int64 ``[n]``.
        token: the format.

    Raises:
        InvalidInputError: a row is not even aligned to its element; a GPU cannot load from there.
    """
    if offset_bytes.numel() == 0:
        return True
    misalignment = (offset_bytes + address % 16) % 16
    if not bool(misalignment.any()):
        return address % 16 == 0  # the kernel is told about the offsets
    bad = misalignment % token.alignment_bytes != 0
    if bool(bad.any()):
        i = int(bad.nonzero()[0])
        raise InvalidInputError(
            f"maxsim on CUDA reads {token.name} rows at multiples of {token.alignment_bytes} bytes",
            got=f"document {i} at address {address} + {int(offset_bytes[i])}",
            expected=f"a multiple of {token.alignment_bytes}",
            fix=(
                "lay records out at 16-byte boundaries, or score on the CPU, which takes any "
                "address"
            ),
        )
    return False
