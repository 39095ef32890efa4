"""Formats of vectors, metrics, and what every version of distances asks of its arguments."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError

#: Of vectors on storage, and the dtype that holds them. ``csrc/cpu/distances/distances.hpp`` has
#: the same names.
VECTOR_FORMATS = {
    "uint8": torch.uint8,
    "int8": torch.int8,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "bf16": torch.bfloat16,
}
METRICS = ("l2", "ip")
#: Values of a vector: 255^2 in each of so many dimensions is below 2^31, so no sum of whole numbers
#: overflows int32.
DIM_MAX = 32768


def is_whole(format: str) -> bool:  # noqa: A002
    """Whether values are whole numbers, whose distances are exact until they become float32."""
    return format in ("uint8", "int8")


def check_format(format: str) -> torch.dtype:  # noqa: A002
    """The dtype of a format of vectors. Raises InvalidInputError."""
    if not isinstance(format, str) or format not in VECTOR_FORMATS:
        raise InvalidInputError(
            "format of vectors", got=repr(format), expected=", ".join(VECTOR_FORMATS)
        )
    return VECTOR_FORMATS[format]


def vector_bytes(format: str, dim: int) -> int:  # noqa: A002
    """Bytes of one vector. Raises InvalidInputError for an unknown format."""
    return dim * check_format(format).itemsize


def query_dtype(format: str) -> torch.dtype:  # noqa: A002
    """The dtype of a query against such vectors: whole numbers like theirs, else float32."""
    dtype = check_format(format)
    return dtype if is_whole(format) else torch.float32


def check_dim(dim: int) -> None:
    """Raises InvalidInputError unless vectors may be so long."""
    if isinstance(dim, bool) or not isinstance(dim, int) or not 1 <= dim <= DIM_MAX:
        raise InvalidInputError(
            "dimension of vectors",
            got=repr(dim),
            expected=f"1 to {DIM_MAX}",
            fix=(
                "sums of whole numbers of more dimensions may overflow int32: project the vectors, "
                "or cut them into parts"
            ),
        )


def check_metric(metric: str) -> None:
    """Raises InvalidInputError for an unknown one."""
    if not isinstance(metric, str) or metric not in METRICS:
        raise InvalidInputError(
            "metric of distances", got=repr(metric), expected=" or ".join(METRICS)
        )


def check_query(query: torch.Tensor, format: str, dim: int | None = None) -> None:  # noqa: A002
    """Raises InvalidInputError unless this is a query, or are queries, against vectors of that
    format (and of `dim` values)."""
    wanted = query_dtype(format)
    if not isinstance(query, torch.Tensor) or query.dtype != wanted or query.dim() not in (1, 2):
        got = (
            f"{query.dtype} {list(query.shape)}"
            if isinstance(query, torch.Tensor)
            else type(query).__name__
        )
        raise InvalidInputError(
            f"query against {format} vectors",
            got=got,
            expected=f"a tensor, {wanted} [d] or [Q, d]",
            fix=f"query.to({wanted})",
        )
    check_dim(query.shape[-1])
    if dim is not None and query.shape[-1] != dim:
        raise InvalidInputError(
            "query against vectors",
            got=f"{query.shape[-1]} values",
            expected=f"{dim}, as the vectors have",
        )


def check_arguments(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    format: str,  # noqa: A002
    metric: str,
) -> None:
    """Shapes, dtypes and devices; reads no element. Raises InvalidInputError."""
    check_metric(metric)
    check_query(query, format)
    if buffer.dtype != torch.uint8 or buffer.dim() != 1 or not buffer.is_contiguous():
        raise InvalidInputError(
            "distances buffer",
            got=(
                f"{buffer.dtype} "
                f"{list(buffer.shape)}{'' if buffer.is_contiguous() else ', strided'}"
            ),
            expected="contiguous uint8 [bytes]",
            fix="buffer.view(torch.uint8).view(-1)",
        )
    if offset_bytes.dtype != torch.int64 or offset_bytes.dim() != 1:
        raise InvalidInputError(
            "distances offset_bytes",
            got=f"{offset_bytes.dtype} {list(offset_bytes.shape)}",
            expected="int64 [n]",
        )
    if query.device.type not in ("cpu", "meta"):
        raise InvalidInputError(
            "distances",
            got=f"a query on {query.device}",
            expected="on the CPU: there is no version for others",
        )
    for name, tensor in (("buffer", buffer), ("offset_bytes", offset_bytes)):
        if tensor.device != query.device:
            raise InvalidInputError(
                f"distances {name}",
                got=f"on {tensor.device}",
                expected=f"on {query.device}, where the query is",
            )


def check_inside(buffer_bytes: int, offset_bytes: torch.Tensor, size_bytes: int) -> None:
    """Raises InvalidInputError unless every vector, of `size_bytes`, lies inside the buffer."""
    outside = (offset_bytes < 0) | (offset_bytes > buffer_bytes - size_bytes)
    if not bool(outside.any()):
        return
    i = int(outside.nonzero()[0])
    raise InvalidInputError(
        "distances vector outside the buffer",
        got=f"vector {i} at {int(offset_bytes[i])}, {size_bytes} bytes",
        expected=f"vectors within the buffer's {buffer_bytes} bytes",
        fix="offset_bytes counts from the buffer's first byte to the vector's first value",
    )
