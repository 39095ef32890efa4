"""What was meant by an unknown name: a mistyped command, option or keyword argument, or a model
of a hub in place of a folder."""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_Function = TypeVar("_Function", bound=Callable[..., Any])

#: Frames that `suggests_keywords` puts between a function and its caller: for the `stacklevel` of
#: warnings.
CALL_FRAMES = 0 if sys.version_info >= (3, 13) else 1

_ON_A_HUB = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_UNEXPECTED = re.compile(r".* got an unexpected keyword argument '(\w+)'")


def nearest(word: str, known: Iterable[str]) -> str | None:
    """The one of `known` that somebody who typed `word` most likely meant, or None."""
    import difflib  # only where something has gone wrong

    return next(iter(difflib.get_close_matches(word, list(known), n=1, cutoff=0.7)), None)


def downloading(name: str) -> str | None:
    """What to do about a path that leads nowhere and could be the name of a model of the Hugging
    Face hub; None for any other."""
    if _ON_A_HUB.fullmatch(name) is None:
        return None
    folder = name.partition("/")[2]
    return (
        f"a model of the Hugging Face hub is not downloaded of itself: hf download {name} "
        f"--local-dir {folder}, then {folder}"
    )


def suggests_keywords(function: _Function) -> _Function:
    """Decorates a public function: a keyword argument that it does not have is refused with the one
    that was meant.

    Python says so itself from 3.13 on, where this returns the function as it is. Type checkers and
    `inspect` see the signature that was written.
    """
    if sys.version_info >= (3, 13):
        return function

    @functools.wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except TypeError as error:
            # Raised by the call itself, and not by anything that the function has done: no frame
            # lies below this one.
            is_of_the_call = error.__traceback__ is not None and error.__traceback__.tb_next is None
            found = _UNEXPECTED.fullmatch(str(error)) if is_of_the_call else None
            meant = nearest(found[1], _keywords(function)) if found else None
            if meant is None:
                raise
            raise TypeError(f"{error}. Did you mean '{meant}'?") from None

    return call  # type: ignore[return-value]


def _keywords(function: Callable[..., Any]) -> list[str]:
    import inspect

    by_name = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return [
        name
        for name, parameter in inspect.signature(function).parameters.items()
        if parameter.kind in by_name and name != "self"
    ]
