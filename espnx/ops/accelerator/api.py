"""HILOS's accelerator for callers: checks, then the compiled version."""

from __future__ import annotations

import torch

from .._native import is_direct, load_ops
from .checks import (
    Buffered,
    check_arguments,
    check_halves,
    check_inside,
    check_threads,
    default_scale,
)
from .cpu import accelerator_cpu, accelerator_scores_cpu


def accelerator(
    query: torch.Tensor,
    buffer: torch.Tensor,
    pieces: torch.Tensor,
    *,
    block_rows: int,
    scale: float | None = None,
    first_visible: torch.Tensor | None = None,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    buffered: Buffered | None = None,
    threads: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention as HILOS's accelerator computes it (sections 4.4 and 5.4), with the same bits on
    every machine and for every number of threads: K, V, queries and results in fp16, all else in
    fp32, in this order.

    A score is the sum of 128 rounded products, dimension by dimension, times ``scale``. Tokens are
    taken in the order of ``pieces``, then the buffered ones, padded to a multiple of 32; padding
    and tokens that a query does not see have the score -1e4. The first pass finds, for each block
    of 128 tokens, its largest score and the sum of exponentials (both by a balanced binary tree),
    and brings the running ones up to date (algorithm 1). The second pass adds ``exp(x - m) / Z``
    times V, token by token.

    Three things differ from the paper's text. A query that sees nothing gives 0 and -inf, where the
    masks alone would give the mean of V. What a hidden row of V holds has no effect where its
    weight is 0, where hardware would multiply 0 by it. And lse is a result, so that results over
    other rows can be merged.

    Scores of finite fp16 values stay below 6e11: nothing overflows on the way. An infinity or NaN
    in K or V of a row that a query sees makes its results infinite or NaN; where a whole block's
    scores are -inf, NaN. Where the largest score that a query sees is below -9896, masked tokens
    have a weight that is not 0, as in the hardware: ``lse`` is below `LSE_LEAST` then.

    Args:
        query: float16 ``[B, H, n, 128]``, not multiplied by ``scale``: the n query rows that look
            at KV head H. Results do not depend on n; the hardware takes 5 of them in a pass.
        buffer: uint8 ``[bytes]``, on the CPU.
        pieces: int64 ``[pieces, 5]``, fields `PIECE_FIELDS`: rows of consecutive tokens in whole
            blocks, those of a head in order. A block holds K rows ``[block_rows, 128]`` and then V
            rows ``[block_rows, 128]``, float16, at any address.
        block_rows: tokens of a block.
        scale: by default ``128 ** -0.5``.
        first_visible: int64 ``[B]``: positions before it are hidden.
        visible: uint8 ``[B, positions]``: 0 hides a position.
        last_position: int64 ``[n]``: a query row sees positions up to this one.
        buffered: rows that wait on the host.
        threads: at most so many; by default as many as torch uses.

    Returns:
        ``o`` float16 ``[B, H, n, 128]`` and ``lse`` float32 ``[B, H, n]``.

    Raises:
        InvalidInputError: a wrong dtype, shape, device or number; a piece outside the buffer
            (checked before any is read).
        MissingDependencyError: the extension is not built.
    """
    factor = default_scale(scale)
    check_arguments(
        query, buffer, pieces, block_rows, factor, first_visible, visible, last_position, buffered
    )
    check_threads(threads)
    scores, v, first = (
        (None, None, 0)
        if buffered is None
        else (buffered.scores, buffered.v, buffered.first_position)
    )
    given = (
        query,
        buffer,
        pieces,
        block_rows,
        factor,
        first_visible,
        visible,
        last_position,
        scores,
        v,
        first,
        threads or 0,
    )
    try:
        if is_direct(query, buffer):
            return accelerator_cpu(*given)
        load_ops()
        return torch.ops.espnx.accelerator(*given)
    except IndexError as error:
        # C++ looks at each piece once; Python looks again only where it has found a wrong one
        found = error
    check_inside(query, buffer, pieces, block_rows, visible)
    raise found


def accelerator_scores(
    query: torch.Tensor,
    rows: torch.Tensor,
    *,
    scale: float | None = None,
    threads: int | None = None,
) -> torch.Tensor:
    """Scores of rows that wait on the host, as the accelerator would make them: what the host hands
    over with their V (section 4.3).

    Args:
        query: float16 ``[B, H, n, 128]``, not multiplied by ``scale``.
        rows: float16 ``[B, H, t, 128]``, of K.
        scale: by default ``128 ** -0.5``.
        threads: as `accelerator`.

    Returns:
        float32 ``[B, H, n, t]``.

    Raises:
        InvalidInputError: a wrong dtype or shape.
    """
    check_halves("query", query, "[B, H, n, 128]")
    check_halves("K rows", rows, f"[{query.shape[0]}, {query.shape[1]}, t, 128]")
    check_threads(threads)
    given = (query, rows, default_scale(scale), threads or 0)
    if is_direct(query, rows):
        return accelerator_scores_cpu(*given)
    load_ops()
    return torch.ops.espnx.accelerator_scores(*given)
