"""What posting lists may carry, how BM25 may weigh it, and what every version of the op asks of its
arguments."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInputError

#: What a posting carries, in the order of ``csrc/cpu/postings/list.hpp``.
KINDS = ("count", "impact", "float")
#: Of BM25, in the order of ``csrc/cpu/postings/kernels.hpp``.
VARIANTS = ("robertson", "lucene", "atire", "bm25l", "bm25+")
RECORDS_MAX, K_MAX = 2**31 - 1, 1 << 24


@dataclass(frozen=True)
class Rules:
    """What is known of a segment and of a query beside the lists.

    Attributes:
        salt: of the segment.
        kind: of `KINDS`.
        n_records: of the segment.
        variant, k1, delta: of BM25, of counts.
        constant: added to every score.
    """

    salt: int
    kind: str
    n_records: int
    variant: str = "lucene"
    k1: float = 1.5
    delta: float = 0.5
    constant: float = 0.0


def check_arguments(
    buffer: torch.Tensor,
    lists: torch.Tensor,
    weights: torch.Tensor,
    rules: Rules,
    k: int,
    lengths: torch.Tensor | None,
    norms: torch.Tensor | None,
    allowed: torch.Tensor | None,
) -> None:
    """Shapes, dtypes and ranges; reads no list. Raises InvalidInputError."""
    if rules.kind not in KINDS or rules.variant not in VARIANTS:
        raise InvalidInputError(
            "postings rules",
            got=f"{rules.kind}, {rules.variant}",
            expected=f"one of {KINDS} and one of {VARIANTS}",
        )
    if not 0 <= rules.n_records <= RECORDS_MAX or not 1 <= k <= K_MAX:
        raise InvalidInputError(
            "postings",
            got=f"{rules.n_records} records, k {k}",
            expected=f"at most {RECORDS_MAX}, k from 1 to {K_MAX}",
        )
    wanted: list[tuple[str, torch.Tensor, torch.dtype, tuple[int, ...]]] = [
        ("buffer", buffer, torch.uint8, (buffer.numel(),)),
        ("lists", lists, torch.int64, (len(weights), 4)),
        ("weights", weights, torch.float64, (len(weights), 2)),
    ]
    if rules.kind == "count":
        if lengths is None or norms is None:
            raise InvalidInputError(
                "postings of counts", got="no lengths, or no norms", expected="both"
            )
        wanted += [
            ("lengths", lengths, torch.uint16, (rules.n_records,)),
            ("norms", norms, torch.float64, (norms.numel(),)),
        ]
    if allowed is not None:
        wanted.append(("allowed", allowed, torch.uint8, (-(-rules.n_records // 8),)))
    for name, tensor, dtype, shape in wanted:
        if tensor.dtype != dtype or tuple(tensor.shape) != shape or not tensor.is_contiguous():
            raise InvalidInputError(
                f"postings {name}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                expected=f"contiguous {dtype} {list(shape)}",
            )
        if tensor.device.type not in ("cpu", "meta"):
            raise InvalidInputError(
                f"postings {name}",
                got=f"on {tensor.device}",
                expected="on the CPU: there is no version for others",
            )
