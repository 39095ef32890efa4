"""Numbers with commas between, of options that may be swept."""

from __future__ import annotations

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
