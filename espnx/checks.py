"""Numbers, paths and functions that a caller gave, checked."""

from __future__ import annotations

import os
import shlex
from typing import Any

from . import errors

FLOAT32_MAX = (2 - 2**-23) * 2.0**127


def plain(value: Any) -> Any:
    """A scalar of NumPy or PyTorch as Python's own number; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def check_whole(name: str, value: object, least: int, most: int | None = None) -> None:
    """Raises InvalidInputError unless the value is a whole number within those limits."""
    if (
        not isinstance(value, int)
        or isinstance(value, bool)
        or value < least
        or (most is not None and value > most)
    ):
        expected = f"a whole number, at least {least}" + (
            "" if most is None else f", at most {most}"
        )
        raise errors.InvalidInputError(name, got=repr(value), expected=expected)


def check_finite(name: str, value: object) -> None:
    """Raises InvalidInputError unless the value is a number that float32 holds."""
    if (
        not isinstance(value, int | float)
        or isinstance(value, bool)
        or not abs(value) <= FLOAT32_MAX
    ):
        raise errors.InvalidInputError(
            name, got=repr(value), expected="a finite number that float32 can hold"
        )


def check_text(name: str, value: object) -> None:
    """Raises InvalidInputError unless the value is text that UTF-8 can hold."""
    if not isinstance(value, str):
        raise errors.InvalidInputError(name, got=repr(value)[:60], expected="a str")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise errors.InvalidInputError(
            name,
            got=f"a lone surrogate at character {error.start}",
            expected="text that UTF-8 can hold",
        ) from None


def check_callable(name: str, value: object) -> None:
    """Raises InvalidInputError unless the value can be called."""
    if not callable(value):
        raise errors.InvalidInputError(name, got=repr(value), expected="a function")


def check_path(name: str, value: object) -> str:
    """A path as text. Raises InvalidInputError for what is none, bytes too."""
    try:
        path = os.fspath(value)  # type: ignore[call-overload]
    except TypeError:
        path = None
    if not isinstance(path, str) or "\0" in path:
        raise errors.InvalidInputError(
            name, got=repr(value), expected="a str or a pathlib.Path, without NUL"
        )
    return path


def check_given_directory(path: str | os.PathLike[str]) -> None:
    """Raises InvalidInputError unless a directory that a caller named is there, or can be made in
    one that is there; for a file, too.

    A mistyped mount point, or a drive that is not mounted, would else be made as a folder, and
    gigabytes go to another disk.
    """
    where = os.path.abspath(path)
    if os.path.lexists(where) and not os.path.isdir(where):
        got = "a file" if os.path.exists(where) else "a link that leads nowhere"
        raise errors.InvalidInputError(
            f"directory {os.fspath(path)}",
            got=got,
            expected="a directory, or a new name in one that is there",
            fix="name another one",
        )
    missing = None
    above = os.path.dirname(where)
    while not os.path.isdir(where) and not os.path.lexists(above):
        missing, above = above, os.path.dirname(above)
    if missing is not None:
        raise errors.InvalidInputError(
            f"directory {os.fspath(path)}",
            got=f"no directory {missing}",
            expected="a directory, or a new name in one that is there",
            fix=(
                "is the drive mounted? If that is the right place: mkdir -p "
                f"{shlex.quote(os.path.dirname(where))}"
            ),
        )
