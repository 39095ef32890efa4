"""Queues without a wall clock: parts that serve, routes over them, commands that take a route. The
walk itself is in csrc/simulate/queues.cpp."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np
import torch

from ..errors import InvalidInputError, OutOfMemoryError
from ..storage.native import load_native


@dataclass(frozen=True)
class Part:
    """What serves, first come first served.

    Attributes:
        places: commands that it serves at a time.
        latency_s: of each.
        bytes_per_s: at which it takes a command's bytes; None: they take no time.
    """

    places: int = 1
    latency_s: float = 0.0
    bytes_per_s: float | None = None


@dataclass(frozen=True)
class Step:
    """A part that a command passes.

    Attributes:
        part: its number.
        size_bytes: that the command brings there.
        until: the step of the same route whose end frees the place, such as the transfer of a page
            that a die keeps; None: this one's.
    """

    part: int
    size_bytes: float = 0.0
    until: int | None = None


@dataclass(frozen=True)
class Account:
    """What a part did in the window, in seconds times commands.

    Attributes:
        served_s: in service.
        held_s: of places taken, in service or until a later step.
        idle_s: of the part, with no place taken.
        waited_s: of commands before it.
        n_served: commands whose service began.
    """

    served_s: float
    held_s: float
    idle_s: float
    waited_s: float
    n_served: int


@dataclass(frozen=True)
class After:
    """Whom commands wait for, of many commands: those of command i are
    ``others[first[i]:first[i + 1]]``.

    Attributes:
        first: int64 [commands + 1].
        others: int64.
    """

    first: np.ndarray
    others: np.ndarray

    @staticmethod
    def of(after: Sequence[Sequence[int]]) -> After:
        others = [other for each in after for other in each]
        return After(np.array([0, *accumulate(map(len, after))]), np.array(others, dtype=np.int64))


@dataclass(frozen=True)
class Outcome:
    """Attributes:
    begun_s, ended_s: float64 [commands]; -1 of those beyond the window's end.
    begin_s, end_s: of the window.
    n_events: that were walked.
    accounts: of each part, within the window.
    """

    begun_s: np.ndarray
    ended_s: np.ndarray
    begin_s: float
    end_s: float
    n_events: int
    accounts: tuple[Account, ...]


def _numbers(given: np.ndarray | None) -> array[int]:
    """Whole numbers in as few bytes as they take, where a list has an object for each."""
    return array("q", b"" if given is None else given.astype(np.int64).tobytes())


def walk(
    parts: Sequence[Part],
    routes: Sequence[Sequence[Step]],
    route: np.ndarray,
    client: np.ndarray,
    *,
    at_s: np.ndarray | None = None,
    after: Sequence[Sequence[int]] | After | None = None,
    n_before: int = 0,
    n_until: int | None = None,
) -> Outcome:
    """Walks commands through parts until so many have ended.

    Args:
        routes: ways over the parts; `Step.part` counts in `parts`.
        route, client: int64 [commands]; a client's commands follow one another, each beginning when
            the one before has ended (a closed loop). Open arrivals: each its own client.
        at_s: float64 [commands], before which none begins; None: 0.
        after: of each command, which others must have ended before it begins, all of them before it
            in the order of commands; None: no others.
        n_before, n_until: the window that is accounted goes from the end of the first `n_before`
            commands to that of the first `n_until` (None: all).

    Raises:
        InvalidInputError: parts (a rate of 0 among them), routes or commands that are none,
            places held in a circle.
        OutOfMemoryError: more of them than memory holds.
    """
    for number, part in enumerate(parts):
        # the core takes 0 as no rate
        if part.bytes_per_s is not None and not 0 < part.bytes_per_s < math.inf:
            raise InvalidInputError(
                f"rate of part {number}",
                got=part.bytes_per_s,
                expected="bytes/s above 0, or None where bytes take no time",
            )
    waits = after if after is None or isinstance(after, After) else After.of(after)
    try:
        found = load_native().walk_queues(
            [
                (part.places, part.latency_s, 0.0 if part.bytes_per_s is None else part.bytes_per_s)
                for part in parts
            ],
            [
                [
                    (step.part, step.size_bytes, number if step.until is None else step.until)
                    for number, step in enumerate(steps)
                ]
                for steps in routes
            ],
            torch.as_tensor(np.ascontiguousarray(route, dtype=np.int64)),
            torch.as_tensor(np.ascontiguousarray(client, dtype=np.int64)),
            [] if at_s is None else np.asarray(at_s, dtype=np.float64).tolist(),
            _numbers(None if waits is None else waits.first),
            _numbers(None if waits is None else waits.others),
            n_before,
            len(route) if n_until is None else n_until,
        )
    except MemoryError as error:
        raise OutOfMemoryError(
            f"a simulation of {len(route):,} commands over {len(parts):,} parts",
            fix="a shorter window, or fewer parts",
        ) from error
    accounts = tuple(Account(**each) for each in found["accounts"])
    return Outcome(
        np.asarray(found["begun_s"]),
        np.asarray(found["ended_s"]),
        found["begin_s"],
        found["end_s"],
        found["n_events"],
        accounts,
    )
