"""Why a document was found: for every query token the document token that matched it best."""

from __future__ import annotations

import numpy as np
import torch

from .result import TokenMatch
from .tier import Tier


def token_matches(tier: Tier, numbers: np.ndarray, tokens: torch.Tensor, deadline_s: float) -> list[tuple[TokenMatch, ...]]:
    """Reads the records once more and matches them with a query's tokens (float32 [Lq, dim]). Among equal products the first token.

    Raises what the reads raise, and ChecksumError or StaleDataError.
    """
    if not len(tokens):
        return [()] * len(numbers)
    future = tier.read(numbers, gap_bytes=0, deadline_s=deadline_s)
    memory = future.wait()
    tier.check(memory, future.position_bytes, numbers)
    schema = tier.schema
    result: list[tuple[TokenMatch, ...]] = []
    for number, position in zip(numbers.tolist(), future.position_bytes.tolist(), strict=True):
        n_tokens = int(tier.n_tokens[number])
        begin = position + schema.fixed_bytes
        rows = memory[begin : begin + n_tokens * schema.row_bytes].cpu()
        if not n_tokens:
            result.append(())
            continue
        products = tokens.cpu() @ schema.decode(rows, tier.codebook).T
        best = products.argmax(dim=1)
        scores = products.gather(1, best[:, None])[:, 0]
        result.append(tuple(TokenMatch(q, t, s) for q, (t, s) in enumerate(zip(best.tolist(), scores.tolist(), strict=True))))
    return result
