"""The MaxSim op for callers: checks, then dispatch by device."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError
from ...forks import compute_alone
from .._native import is_direct, load_ops
from .checks import check_arguments, check_codebook, check_inside
from .codebook import Codebook
from .cpu import maxsim_cpu
from .cuda import maxsim_cuda
from .formats import token_format
from .residual import centroid_error, first_unknown


def maxsim(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    format: str = "fp16",  # noqa: A002
    threads: int | None = None,
    codebook: Codebook | None = None,
) -> torch.Tensor:
    """Scores documents whose token rows lie in place in an I/O buffer: ``sum over query tokens of
    max over document tokens of <q, d>``.

    Products and sums are fp32 whatever the format. Nothing of size documents x tokens is stored,
    and the buffer is not copied. A document may be named twice, records may overlap and come in any
    order. A vector is a document of one token: with ``Lq = 1`` this is a dot product.

    Args:
        query: float32 ``[Lq, d]``, or ``[Q, Lq, d]`` to score every document for each of Q queries.
            ``d`` is a multiple of 8 from 8 to 65536, ``Lq`` any, 0 included.
        buffer: uint8 ``[bytes]``, contiguous, on the query's device. It must not be written to
            until the result is there.
        offset_bytes: int64 ``[n]``, where in the buffer each document's first token row begins. Any
            address on the CPU; on CUDA a multiple of the element's size (16 is fastest).
        n_tokens: int64 ``[n]``, token rows of each document, 0 to 65535. This and ``offset_bytes``
            may stay on the CPU for a CUDA query: their bounds are then checked without waiting for
            the device.
        format: of the rows, a key of `FORMATS`: ``fp16``, ``fp32``, ``bf16``, ``int8``, ``bit1``,
            ``residual1``, ``residual2``, ``residual4``.
        threads: at most so many CPU threads; by default as many as torch uses, fewer where the work
            does not pay for them. No meaning on CUDA.
        codebook: of the residual formats, on the query's device; None for all others.

    Returns:
        float32 ``[n]``, or ``[Q, n]`` for a batch, on the query's device. A document without tokens
        scores ``-inf``; otherwise ``Lq = 0`` scores 0; a NaN in a document makes its score NaN, as
        with torch's ``max``.

    Precision on CUDA: fp16 rows go through tensor cores, which want both factors in fp16. A query
    rounded to fp16 would be off by 2^-12 of each value, so it is split into two fp16 parts (after
    scaling by a power of two), which carry 22 bits and cost a second multiplication: 2 Lq
    multiply-adds for each byte of a document, which tensor cores do faster than memory brings the
    byte up to about Lq = 64. Kernels of csrc/cuda multiply int8 and bit1 rows in whole numbers, by
    a query of 24 bits beside each token's largest value, and fp32 rows in two fp16 parts, to
    within fp32's own bound; elsewhere fp32 rows are multiplied in fp32 without tensor cores.

    Raises:
        InvalidInputError: a wrong dtype, shape, device, format or ``d``; a record that does not lie
            inside the buffer (checked before any is read); on CUDA a row that is not aligned to its
            element; a codebook that is missing, unwanted or of another shape; on the CPU a row that
            names a centroid which the codebook has not (on CUDA such a document scores NaN: nothing
            outside is read, and nobody waits for the device to say so).
        MissingDependencyError: the extension is not built, or on CUDA Triton is not installed.
    """
    token = token_format(format)
    compute_alone()
    check_arguments(query, buffer, offset_bytes, n_tokens)
    check_codebook(token, query, codebook)
    if threads is not None and threads < 1:
        raise InvalidInputError(
            "maxsim threads", got=threads, expected="1 or more, or None to leave it to the op"
        )
    tables = (None, None) if codebook is None else (codebook.centroids, codebook.bucket_weights)
    given = (query, buffer, offset_bytes, n_tokens, format, threads or 0, *tables)
    try:
        if is_direct(query, buffer):
            return maxsim_cpu(*given)
        if is_direct(query, buffer, on="cuda"):
            return maxsim_cuda(*given)
        load_ops()
        return torch.ops.espnx.maxsim(*given)
    except IndexError as error:
        # C++ looks at each record once; Python looks again only where it has found something
        if buffer.device.type != "cpu":
            raise
        found = error
    row_bytes = token.token_row_bytes(query.shape[-1])
    check_inside(buffer.numel(), offset_bytes, n_tokens, row_bytes)
    if codebook is not None:
        document = first_unknown(buffer, offset_bytes, n_tokens, row_bytes, codebook.n_centroids)
        raise centroid_error(f"document {document}", codebook.n_centroids)
    raise found
