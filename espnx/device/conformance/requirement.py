"""How a check says what it found: nothing where a device does what it must, an error where it does
not, and `Found` of the rest."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

from ... import errors


@dataclass(frozen=True)
class Found:
    """What a check that did not fail has to say.

    Attributes:
        outcome: ``ok``; ``not offered``: the device has no such verb, and need not have it; ``not
            made``: it has the verb, and whether it does this of it right could not be found out.
        message: why, or how much was looked at.
    """

    outcome: Literal["ok", "not offered", "not made"]
    message: str


def require(holds: bool, what: str, *, got: object = None, expected: object = None) -> None:
    """Raises NotConformingError unless something holds."""
    if not holds:
        raise errors.NotConformingError(what, got=got, expected=expected)


@contextmanager
def raises(*kinds: type[Exception]) -> Iterator[None]:
    """Raises NotConformingError unless one of these is raised inside."""
    names = " or ".join(kind.__name__ for kind in kinds)
    try:
        yield
    except kinds:
        return
    except errors.EspnxError as error:
        raise errors.NotConformingError(
            "the wrong error", got=f"{type(error).__name__}: {error}", expected=names
        ) from error
    raise errors.NotConformingError("no error", got="a result", expected=names)


def in_threads(ask: Callable[[int], object], seeds: Sequence[int]) -> None:
    """Calls it with each seed in a thread of its own, at the same time. Raises what one of them
    raised, once all have ended."""
    with ThreadPoolExecutor(len(seeds)) as pool:
        jobs = [pool.submit(ask, seed) for seed in seeds]
    for job in jobs:
        job.result()
