"""`encode`: a model makes vectors of texts beside the storage they are looked up in (RAGX, section
3). A plain device has no processor of its own, so the host's cores do it, and the result says so;
an emulated one takes the time that its specification gives for the arithmetic.

A file of its own: plain and emulated devices share it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from ... import errors
from ...checks import check_whole

T = TypeVar("T")
HOST_CORES = "the host's cores"


@dataclass(frozen=True)
class Encoding(Generic[T]):
    """What `encode` gives.

    Attributes:
        value: what the function made of the texts.
        computed_on: what did the arithmetic.
        kind: of `seconds`: ``measured``, or ``emulated``: of the device that is stood in for.
        seconds: that it took.
        flop: floating-point operations, where that was said.
    """

    value: T
    computed_on: str
    kind: str
    seconds: float
    flop: float | None = None


def forward_flop(*, parameters: int, tokens: int) -> float:
    """Floating-point operations of a transformer's forward pass over so many tokens, as they are
    counted everywhere: a multiplication and an addition for each parameter and token. Attention
    scores, which grow with the length of a text, are left out: for texts of 512 tokens they are a
    few percent. Raises InvalidInputError."""
    check_whole("parameters of a model", parameters, 1)
    check_whole("tokens", tokens, 0)
    return 2.0 * parameters * tokens


def encode_on_host(
    encode: Callable[[Sequence[str]], T], texts: Sequence[str], *, flop: float | None = None
) -> Encoding[T]:
    """Encodes texts where the caller runs.

    Args:
        encode: makes vectors, or whatever else, of texts.
        texts: handed over as they are.
        flop: floating-point operations that this takes (`forward_flop`), for the record; the time
            is measured.

    Raises InvalidInputError; what `encode` raises.
    """
    if flop is not None and not flop >= 0:
        raise errors.InvalidInputError("flop of an encoding", got=flop, expected="0 or more")
    begun = time.perf_counter()
    value = encode(texts)
    return Encoding(value, HOST_CORES, "measured", time.perf_counter() - begun, flop)
