"""MaxSim in plain PyTorch: what the fast versions are tested against, and what the op means."""

from __future__ import annotations

import torch

from .checks import check_arguments, check_codebook, check_inside
from .codebook import Codebook
from .formats import token_format


def maxsim_reference(
    query: torch.Tensor,
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    format: str = "fp16",  # noqa: A002
    codebook: Codebook | None = None,
) -> torch.Tensor:
    """One document after the other: decode to fp32, multiply, take the maximum over its tokens, sum
    over the query's.

    Arguments, result and errors are those of `espnx.ops.maxsim`; any device, no compiled code. The
    score is ColBERT's (Khattab and Zaharia, 2020, section 3.3, equation 3), which ESPN (section 4)
    re-ranks by.
    """
    check_arguments(query, buffer, offset_bytes, n_tokens)
    token = token_format(format)
    d = query.shape[-1]
    check_codebook(token, query, codebook)
    row_bytes = token.token_row_bytes(d)
    check_inside(buffer.numel(), offset_bytes, n_tokens, row_bytes)
    scores = query.new_empty((*query.shape[:-2], offset_bytes.numel()))
    for i, (begin, count) in enumerate(zip(offset_bytes.tolist(), n_tokens.tolist(), strict=True)):
        if count == 0:
            scores[..., i] = -torch.inf
            continue
        tokens = token.decode(buffer[begin : begin + count * row_bytes], d, codebook)
        scores[..., i] = (query @ tokens.T).amax(dim=-1).sum(dim=-1)
    return scores
