"""A first stage's own options: the fields of the `Settings` of its class, given as values, or as
words of a command line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from types import NoneType
from typing import Any, get_args, get_type_hints

from ... import errors
from ...checks import plain
from .interface import NoSettings
from .registry import kind_named, stage_class

_WHAT = "option of a first stage"


def settings_class(kind: str) -> Any:
    """The class of a kind's options: a frozen dataclass, each field with a default. Raises
    InvalidInputError for an unknown kind."""
    return getattr(stage_class(kind), "Settings", NoSettings)


def make_settings(kind: str, options: Mapping[str, Any]) -> Any:
    """The options of a stage, checked. Raises InvalidInputError for one that the stage does not
    have, and what its `Settings` raises."""
    made = settings_class(kind)
    known = {field.name: field.default for field in fields(made)}
    if unknown := [str(name) for name in options if name not in known]:
        said = (
            ", ".join(f"{name} (default {default!r})" for name, default in known.items())
            or "none: it has no options"
        )
        raise errors.InvalidInputError(
            f"options of first stage {kind!r}", got=", ".join(unknown), expected=said
        )
    # NumPy's numbers are numbers
    return made(**{name: plain(value) for name, value in options.items()})


def settings_of_words(words: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Options by kind from words such as ``near.rows=8``; each value of the type that its field
    has. Raises InvalidInputError."""
    found: dict[str, dict[str, Any]] = {}
    for word in words:
        place, is_given, value = word.partition("=")
        kind, _, name = place.rpartition(".")
        if not (kind and name and is_given):
            raise errors.InvalidInputError(
                _WHAT, got=repr(word), expected="STAGE.OPTION=VALUE, such as bm25.language=german"
            )
        # an unknown option is refused where all are made
        hint = get_type_hints(settings_class(kind_named(kind))).get(name, str)
        found.setdefault(kind, {})[name] = _value(word, value, get_args(hint) or (hint,))
    return found


def _value(word: str, value: str, types: tuple[Any, ...]) -> Any:
    if NoneType in types and value in ("", "none"):
        return None
    if bool in types:
        if value in ("true", "false"):
            return value == "true"
        raise errors.InvalidInputError(_WHAT, got=repr(word), expected="true or false")
    for kind in (int, float):
        if kind in types:
            try:
                return kind(value)
            except ValueError:
                if str not in types and not (kind is int and float in types):
                    raise errors.InvalidInputError(
                        _WHAT, got=repr(word), expected="a number"
                    ) from None
    return value
