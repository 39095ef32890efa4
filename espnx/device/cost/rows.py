"""`put`, `ahead`, `visit`, `attend`: which bytes of the rows of a KV cache pass which links, and
after what the accelerator may begin.

A head's rows come from flash in pieces, and their scores are computed piece by piece as they come;
the values wait for the last score, since the second pass of HILOS's softmax needs the whole
denominator (section 4.4). Heads follow one another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ... import errors
from ...ops.accelerator import DIM
from ...ops.accelerator.checks import PAD_TO, ROW_BYTES
from ..model.spec import Accelerator
from .work import COMPUTE, Leg

#: A head's rows come in pieces of at least so many bytes, and in so many pieces at most.
PIECE_BYTES, PIECES_MAX = 1 << 20, 8
_FLOAT_BYTES = 4


@dataclass(frozen=True)
class HeadRows:
    """What a ticket reads of one head of one sequence.

    Attributes:
        n_rows: tokens.
        size_bytes: in whole blocks.
        requests: that read them. Rows that lie behind those of another head come with theirs.
    """

    n_rows: int
    size_bytes: int
    requests: int


#: By sequence and head.
Heads = Mapping[tuple[int, int], HeadRows]


@dataclass(frozen=True)
class HandOver:
    """What goes to the device with the queries of a ticket, and comes back.

    Attributes:
        n: query rows of each head.
        buffered: tokens whose scores and V go along.
        heads: of which sequences and heads they do.
        returns_lse: beside o.
    """

    n: int
    buffered: int
    heads: frozenset[tuple[int, int]]
    returns_lse: bool


def put(size_bytes: int, requests: int, *, from_host: bool = True) -> Leg:
    """Rows on their way to flash; of a copy that the device makes they are in its memory."""
    return Leg("host_to_flash" if from_host else "flash_write", size_bytes, requests=requests)


def read(size_bytes: int, requests: int, *, to_host: bool) -> Leg:
    """Rows from flash, to the host or to the device's memory."""
    return Leg("flash_to_host" if to_host else "flash_read", size_bytes, requests=requests)


def reads(heads: Heads, *, to_host: bool) -> list[Leg]:
    """Those of a ticket, head after head, each in pieces."""
    legs = list[Leg]()
    for rows in heads.values():
        pieces = _pieces(rows.size_bytes)
        asked = [-(-rows.requests * i // max(len(pieces), 1)) for i in range(len(pieces) + 1)]
        legs += [
            read(part, asked[i + 1] - asked[i], to_host=to_host) for i, part in enumerate(pieces)
        ]
    return legs


def shown(heads: Heads) -> list[Leg]:
    """Behind `reads` into the device's memory: all of it to the host."""
    legs = range(sum(len(_pieces(rows.size_bytes)) for rows in heads.values()))
    return [Leg("device_to_host", sum(rows.size_bytes for rows in heads.values()), tuple(legs))]


def attend(
    heads: Heads, hand_over: HandOver, accelerator: Accelerator | None
) -> tuple[list[Leg], list[int]]:
    """Behind `reads`: queries to the device, passes over its rows, results to the host. (the legs,
    numbers of those that have to end)."""
    n, buffered, own = (
        hand_over.n,
        hand_over.buffered,
        dict[tuple[int, int], list[tuple[int, int]]](),
    )
    first = 0
    for unit, rows in heads.items():
        pieces = _pieces(rows.size_bytes)
        own[unit] = list(zip(range(first, first + len(pieces)), pieces, strict=True))
        first += len(pieces)
    every = dict.fromkeys(hand_over.heads, HeadRows(0, 0, 0)) | dict(heads)
    given_bytes = len(every) * n * ROW_BYTES + len(hand_over.heads) * buffered * (
        n * _FLOAT_BYTES + ROW_BYTES
    )
    legs, results = [Leg("host_to_device", given_bytes)], list[int]()
    back_bytes = n * (ROW_BYTES + (_FLOAT_BYTES if hand_over.returns_lse else 0))

    def add(leg: Leg) -> int:
        legs.append(leg)
        return first + len(legs) - 1

    def over(tokens: float, after: Sequence[int]) -> Sequence[int]:
        """Scores or values of so many tokens for n queries, as many of which share a pass as there
        is a kernel for."""
        most = 0 if accelerator is None else accelerator.max_group
        for heads, passes in ((most, n // most), (n % most, 1)) if most else ():
            if heads and passes:
                flop, size_bytes = (
                    2.0 * tokens * DIM * heads * passes,
                    round(tokens * ROW_BYTES) * passes,
                )
                after = [add(Leg(COMPUTE, size_bytes, tuple(after), flop=flop, heads=heads))]
        return after

    for unit, rows in every.items():
        done: Sequence[int] = [first]
        for number, size_bytes in own.get(unit, []):
            done = over(padded(rows.n_rows) * size_bytes / rows.size_bytes, [*done, number])
        waiting = buffered if unit in hand_over.heads else 0
        done = over(padded(rows.n_rows + waiting), done)
        results.append(add(Leg("device_to_host", back_bytes, tuple(done))))
    return legs, results


def check_memory(
    heads: Heads, n: int, buffered: int, group: int, memory_bytes: int, name: str
) -> None:
    """Raises OutOfMemoryError unless each head's rows, with the scores of the queries that share a
    pass, fit a device's memory."""
    for (sequence, head), rows in heads.items():
        tokens = padded(rows.n_rows + buffered)
        needed = 2 * tokens * ROW_BYTES + tokens * min(n, group) * _FLOAT_BYTES + 2 * n * ROW_BYTES
        if needed > memory_bytes:
            raise errors.OutOfMemoryError(
                f"attention of sequence {sequence}, KV head {head} over {rows.n_rows + buffered} "
                f"tokens in the memory of device {name!r}: {needed - memory_bytes} bytes are "
                "missing",
                needed_bytes=needed,
                free_bytes=memory_bytes,
                fix="a device with more memory, or shorter sequences",
            )


def _pieces(size_bytes: int) -> list[int]:
    each = max(PIECE_BYTES, -(-size_bytes // PIECES_MAX))
    return [min(each, size_bytes - begin) for begin in range(0, size_bytes, each)]


def padded(tokens: int) -> int:
    """The tokens that the accelerator computes on for so many."""
    return -(-tokens // PAD_TO) * PAD_TO
