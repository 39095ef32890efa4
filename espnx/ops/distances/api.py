"""The distances op for callers: checks, then dispatch by device."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError
from ...forks import compute_alone
from .._native import is_direct, load_ops
from .checks import check_arguments, check_inside, vector_bytes
from .cpu import distances_cpu


def distances(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    format: str = "uint8",  # noqa: A002
    metric: str = "l2",
    threads: int | None = None,
) -> torch.Tensor:
    """Distances of a query to vectors that lie in place in an I/O buffer; the smaller, the nearer.

    The buffer is not copied, and nothing beyond a vector is read. Vectors may overlap, be named
    twice and come in any order.

    Args:
        query: ``[d]``, or ``[Q, d]`` to measure every vector from each of Q queries; of the
            vectors' own dtype where those are whole numbers, else float32. ``d`` is 1 to 32768.
        buffer: uint8 ``[bytes]``, contiguous, on the CPU. It must not be written to until the
            result is there.
        offset_bytes: int64 ``[n]``, where in the buffer each vector begins, at any alignment.
        format: of the vectors, a key of `VECTOR_FORMATS`: ``uint8``, ``int8``, ``fp16``, ``bf16``,
            ``fp32``.
        metric: ``l2``: the sum of squared differences (no root is taken); ``ip``: the inner
            product, negated.
        threads: at most so many; by default as many as torch uses, fewer where the work does not
            pay for them.

    Returns:
        float32 ``[n]``, or ``[Q, n]``. Of whole numbers the sum is exact in int32 and rounded once,
        so all versions give the same bits; of floats every operation is float32's
        (docs/tolerances.md). NaN where a NaN goes in.

    Raises:
        InvalidInputError: a wrong dtype, shape, device, format, metric or ``d``; a vector that does
            not lie inside the buffer (checked before any is read).
        MissingDependencyError: the extension is not built.
    """
    compute_alone()
    check_arguments(query, buffer, offset_bytes, format, metric)
    if threads is not None and threads < 1:
        raise InvalidInputError(
            "distances threads", got=threads, expected="1 or more, or None to leave it to the op"
        )
    try:
        if is_direct(query, buffer):
            return distances_cpu(query, buffer, offset_bytes, format, metric, threads or 0)
        load_ops()
        return torch.ops.espnx.distances(query, buffer, offset_bytes, format, metric, threads or 0)
    except IndexError:
        # C++ looks at each vector once; Python looks again only where it has found something
        check_inside(buffer.numel(), offset_bytes, vector_bytes(format, query.shape[-1]))
        raise
