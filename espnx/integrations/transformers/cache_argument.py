"""The cache among the arguments of models, their layers and `generate`: called `cache` from transformers 5.24 on, `past_key_values` before.

Callers may use the old name with newer models until 5.40; layers and prepared inputs have the one that the installed transformers uses.
"""

from __future__ import annotations

from collections.abc import Container, Mapping
from typing import Any

CACHE_NAMES = ("cache", "past_key_values")


def cache_name(names: Container[str]) -> str | None:
    """Which of the two names is among these; None: neither."""
    return next((name for name in CACHE_NAMES if name in names), None)


def cache_in(kwargs: Mapping[str, Any]) -> Any:
    """The cache of a call with these keyword arguments; None without one."""
    return next((kwargs[name] for name in CACHE_NAMES if kwargs.get(name) is not None), None)
