"""What decoding with drafts needs and brings, before anything runs: the memory of the rows that
drafts attend to, and, where speeds were measured, seconds of drafts and passes.

How many tokens a pass brings depends on model and text. What is said is what a small model brought
(`MEASURED`), beside the number from which on drafts are worth their time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import torch

from ... import errors
from ...device.row_layout import RowLayout, format_of
from ...kv.draft.packed import planned_bytes
from ...kv.draft.pages import PAGE_ROWS, kept_pages, page_bytes
from ...kv.draft.rows import tier_of
from ...kv.draft.tally import Tally
from ...weights.speed import gemm_speed

#: Tokens that are proposed.
GAMMA = 8
#: Tokens that a pass brought with so much of K and V in memory: the demo's model, over
#: 1,700 tokens of text that it had not seen (docs/measured/kv.md).
MEASURED = {1 / 16: 4.8, 1 / 8: 5.9, 1 / 4: 6.5}
#: And with all of it in four bits.
MEASURED_PACKED = 8.0


@dataclass(frozen=True)
class Shape:
    """How many layers keep rows on SSD; KV heads of a layer, query heads of each of them, and the
    lengths of a row of K and of V."""

    layers: int
    n_kv: int
    groups: int
    d: int
    dv: int


def plan_draft(
    kind: str,
    share: float | None,
    ahead_bytes: int | None,
    shape: Shape,
    step: dict[str, Any],
    *,
    batch: int,
    tokens: int,
    dtype: torch.dtype,
    streams_weights: bool,
) -> dict[str, Any]:
    """Bytes and operations of a draft step and of the pass that decides on `GAMMA` tokens.

    Args:
        kind, share, ahead_bytes: `draft`, `draft_memory` and `draft_read_ahead_bytes` of `KVCache`.
        step: of decoding one by one (`ModelPlan.step`).
        streams_weights: some layers' weights are read in each pass.

    Raises InvalidInputError: no such draft, or one that would read weights for each token.
    """
    tally = Tally(kind, share, ahead_bytes)
    is_of_model = tier_of(tally) is not None
    if is_of_model and streams_weights:
        raise errors.InvalidInputError(
            f"draft {kind!r} of a model whose weights are streamed",
            got="weights that every draft would read again",
            fix="--draft lookup, or more --memory",
        )
    heads = batch * shape.layers * shape.n_kv
    row_bytes = (shape.d + shape.dv) * dtype.itemsize
    pages = 0 if tally.share is None else kept_pages(tokens, tally.share)
    rows = min(pages * PAGE_ROWS, tokens)
    memory: float = pages * page_bytes(shape.d, shape.dv, dtype, shape.groups * (GAMMA + 1))
    read = 0.0
    if is_of_model and tally.share is None:
        block_rows = RowLayout(format_of(dtype), shape.d, shape.dv).block_rows
        rows, memory = tokens, planned_bytes(tokens, shape.d, shape.dv, block_rows, row_bytes)
        read = memory - tokens * row_bytes  # of a KV head, more than its rows as they are
    elif is_of_model:
        read = (rows - tokens) * row_bytes
    attention = 2 * heads * shape.groups * (shape.d + shape.dv)
    return {
        "kind": kind,
        "share": tally.share,
        "gamma": GAMMA,
        "memory_bytes": round(heads * memory),
        "read_ahead_bytes": min(
            round(heads * memory) if ahead_bytes is None else ahead_bytes, step["read_kv_bytes"]
        )
        if is_of_model
        else 0,
        "pass_operations": (GAMMA + 1) * step["operations"],
        "draft_memory_bytes": step["memory_bytes"] + heads * read if is_of_model else 0,
        "draft_operations": step["operations"] - attention * (tokens - rows) if is_of_model else 0,
        "tokens_a_pass": measured_tokens(tally.share)
        if tally.share is not None
        else MEASURED_PACKED
        if is_of_model
        else None,
    }


def add_seconds(
    draft: dict[str, Any],
    seconds: dict[str, float],
    speeds: dict[str, Any],
    *,
    batch: int,
    dtype: torch.dtype,
) -> None:
    """Seconds of a draft step and of a pass, by measured speeds, and of the pass's reads that go on
    during drafts; from how many tokens a pass on all of it takes less than one by one; and seconds
    a token with as many as are known."""
    rate = gemm_speed(dtype, batch * (GAMMA + 1))
    compute = draft["pass_operations"] / rate
    draft["pass_s"] = max([compute, *(s for name, s in seconds.items() if name != "compute")])
    draft["draft_s"] = max(
        draft["draft_memory_bytes"] / speeds["memory_bytes_per_s"],
        draft["draft_operations"] / speeds["gemm_operations_per_s"],
    )
    drafts_s = GAMMA * draft["draft_s"]
    # a model that drafts has its weights in memory: the disk reads nothing else
    while_drafting_s = min(draft["read_ahead_bytes"] / speeds["storage_bytes_per_s"], drafts_s)
    others = [s for name, s in seconds.items() if name not in ("compute", "disk")]
    left_s = max([compute, *others, seconds.get("disk", 0.0) - while_drafting_s])
    draft["hidden_s"] = draft["pass_s"] - left_s
    whole = left_s + drafts_s
    draft["least_tokens_a_pass"] = whole / max(seconds.values())
    known = draft["tokens_a_pass"]
    draft["token_s"] = None if known is None else whole / known


def measured_tokens(share: float) -> float | None:
    """Tokens a pass with that part of K and V in memory, between what was measured; None where
    nothing was near it."""
    shares = sorted(MEASURED)
    for low, high in itertools.pairwise(shares):
        if low <= share <= high:
            at = math.log(share / low) / math.log(high / low)
            return MEASURED[low] + at * (MEASURED[high] - MEASURED[low])
    return None
