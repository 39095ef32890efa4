"""Sizes as people write them: ``64KiB``, ``800MB``, ``1.5GiB``."""

from __future__ import annotations

import re

from ..errors import InvalidInputError

_UNITS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgtp", start=1):
    _UNITS[_letter + "ib"] = 1024**_power
    _UNITS[_letter + "b"] = 1000**_power


def parse_size(text: str | int) -> int:
    """Bytes of a size such as ``4096``, ``64KiB`` (1024) or ``800MB`` (1000). Raises InvalidInputError."""
    if isinstance(text, int):
        return text
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    unit = match.group(2).lower() if match else None
    if match is None or unit not in _UNITS:
        raise InvalidInputError("cannot read size", got=repr(text), expected="a number with an optional unit: B, KiB, MiB, GiB, TiB, kB, MB, GB, TB")
    return int(float(match.group(1)) * _UNITS[unit])


def format_size(size_bytes: float) -> str:
    """A size for people: ``512 B``, ``1.5 MiB``."""
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if abs(size_bytes) < 1024 or unit == "TiB":
            return f"{size_bytes:.0f} B" if unit == "B" else f"{size_bytes:.1f} {unit}"
        size_bytes /= 1024
    return f"{size_bytes:.1f} TiB"
