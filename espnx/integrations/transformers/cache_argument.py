"""The cache among the arguments of models, their layers and `generate`: called `cache` from
transformers 5.24 on, `past_key_values` before.

Callers may use the old name with newer models until 5.40; layers and prepared inputs have the one
that the installed transformers uses.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

from ... import errors

CACHE_NAMES = ("cache", "past_key_values")


def cache_name(names: Container[str]) -> str | None:
    """Which of the two names is among these; None: neither."""
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache of a call with these keyword arguments; None without one. Raises InvalidInputError
    for two, of which a model takes one."""
    found = [kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None]
    if len({id(each) for each in found}) > 1:
        given = (
            f"{type(each).__name__} as {name}"
            for name, each in zip(CACHE_NAMES, found, strict=True)
        )
        raise errors.InvalidInputError(
            "two caches at once",
            got=" and ".join(given),
            expected="one",
            fix=(
                "without prompts or prefixes that PEFT learned, until PEFT knows this transformers "
                "(peft>=0.22)"
            ),
        )
    return found[0] if found else None
