"""Words of the command line, read and checked."""

from __future__ import annotations

import threading
from argparse import ArgumentTypeError
from collections.abc import Sequence

from espnx.errors import InvalidInputError


def words(text: str) -> list[str]:
    """What stands between commas."""
    return [word.strip() for word in text.split(",") if word.strip()]


def choices(text: str, known: Sequence[str], what: str) -> list[str]:
    """Words that are all known. Raises InvalidInputError."""
    found = words(text)
    if unknown := [word for word in found if word not in known]:
        raise InvalidInputError(
            f"unknown {what}", got=", ".join(unknown), expected=", ".join(known)
        )
    return found


def positive(name: str, value: object) -> int:
    """Raises InvalidInputError."""
    text = str(value)
    if not text.isdigit() or int(text) < 1:
        raise InvalidInputError(name, got=repr(value), expected="a whole number, at least 1")
    return int(text)


def seconds(text: str) -> float:
    """A time, for a parser of arguments: at most what a wait can take."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < threading.TIMEOUT_MAX:
        raise ArgumentTypeError(f"got {text!r}, expected seconds, above 0")
    return value
