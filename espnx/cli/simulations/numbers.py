"""Words of options with commas between: numbers that are swept, systems beside one another; and
ratios of what they bring."""

from __future__ import annotations

import os
from argparse import Namespace
from collections.abc import Mapping, Sequence

from ...errors import InvalidInputError


def numbers(name: str, text: str) -> list[int]:
    """Raises InvalidInputError: words that are none, or one twice."""
    try:
        found = [int(each) for each in text.split(",")]
    except ValueError:
        raise InvalidInputError(
            f"--{name}", got=text, expected="a whole number, or several with commas between"
        ) from None
    if len(set(found)) != len(found):
        raise InvalidInputError(f"--{name}", got=text, expected="each number once")
    return found


def systems(args: Namespace) -> list[str]:
    """Those that are asked for: ``--system``, then all of ``--vs``. Raises InvalidInputError: a
    name or a file twice."""
    from ...device.model.reader import SUFFIXES

    found = [args.system, *(args.vs.split(",") if args.vs is not None else ())]
    places = {os.path.realpath(each) if each.endswith(SUFFIXES) else each for each in found}
    if len(places) != len(found):
        raise InvalidInputError("--vs", got=args.vs, expected="each system once")
    return found


def ratios(rates: Sequence[float], n_systems: int) -> list[list[float]]:
    """The first system's over each other's, one list for each of them.

    Args:
        rates: of whatever is asked, one after another; each of all systems.
    """
    return [
        [ours / other for ours, other in zip(rates[::n_systems], rates[at::n_systems], strict=True)]
        for at in range(1, n_systems)
    ]


def flat(found: Sequence[Sequence[float]]) -> list[float] | None:
    """Those ratios as documents have them: one thing that was asked after another. None: there is
    one system alone."""
    return [each for asked in zip(*found, strict=True) for each in asked] if found else None


def lines(names: Sequence[str], found: Sequence[Sequence[float]], what: str) -> list[str]:
    """A line for each system beside the first."""
    return [
        f"{names[0]} over {name}, {what}: {', '.join(f'{each:.2f}' for each in own)}"
        for name, own in zip(names[1:], found, strict=True)
    ]


def unwritten(written_bytes: Mapping[str, float]) -> str | None:
    """Why there is no wear, of the systems to whose drives nothing is written; None: of none."""
    names = [name for name, size_bytes in written_bytes.items() if not size_bytes]
    return f"nothing is written to drives, so none wears: {', '.join(names)}" if names else None
