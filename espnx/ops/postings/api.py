"""The postings op for callers: checks, then dispatch by device."""

from __future__ import annotations

import torch

from ...errors import InvalidInputError
from ...forks import compute_alone
from .._native import is_direct, load_ops
from .checks import KINDS, VARIANTS, Rules, check_arguments
from .cpu import postings_cpu


def postings(
    buffer: torch.Tensor,
    lists: torch.Tensor,
    weights: torch.Tensor,
    rules: Rules,
    k: int,
    *,
    lengths: torch.Tensor | None = None,
    norms: torch.Tensor | None = None,
    allowed: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The k best records by posting lists that lie in place in an I/O buffer, as
    docs/postings-format.md has them.

    A record's score is the sum over its postings, in the order of the lists, in float32: of counts
    ``float32(weight * part - absent)``, where the part of BM25 is float64's; of impacts and floats
    ``float32(weight) * value``. Records without any posting are not found.

    Args:
        buffer: uint8 ``[bytes]``.
        lists: int64 ``[n, 4]``: where in the buffer each list begins, its size, the size of its
            first layer (0: it has one), its term's number.
        weights: float64 ``[n, 2]``: weight and absent of each list.
        rules: of the segment and the query.
        k: 1 or more.
        lengths: uint16 ``[n_records]``, of counts: a code for the length of each record.
        norms: float64 ``[codes]``, of counts: what a length adds below BM25's fraction.
        allowed: uint8 ``[ceil(n_records / 8)]``: bit i % 8 of byte i / 8 says whether record i may
            be found; None: all may.

    Returns:
        Numbers, int64 ``[k]``, best first, of equal scores the lower first, -1 where there are
        fewer; and scores, float32 ``[k]``, minus infinity there. All versions give the same bits.

    Raises:
        InvalidInputError: dtypes, shapes, devices, rules; a list that is damaged or does not lie in
            the buffer.
        MissingDependencyError: the extension is not built.
    """
    compute_alone()
    check_arguments(buffer, lists, weights, rules, k, lengths, norms, allowed)
    numbers = (
        rules.salt,
        KINDS.index(rules.kind),
        rules.n_records,
        k,
        VARIANTS.index(rules.variant),
        rules.k1,
        rules.delta,
        rules.constant,
    )
    try:
        if is_direct(buffer, lists, weights):
            return postings_cpu(buffer, lists, weights, lengths, norms, allowed, *numbers)
        load_ops()
        numbers_, scores = torch.ops.espnx.postings(
            buffer, lists, weights, lengths, norms, allowed, *numbers
        )
        return numbers_, scores
    except IndexError as error:
        raise InvalidInputError(
            "a posting list", got=str(error), expected="one that was written and is whole"
        ) from error
