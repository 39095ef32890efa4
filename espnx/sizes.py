"""Sizes in bytes as people write them, ``64KiB``, ``800MB``, ``1.5GiB``; rates as drives are sold,
``3.00 GB/s``."""

from __future__ import annotations

import re

from .errors import InvalidInputError

_UNITS = {"": 1, "B": 1, "byte": 1, "bytes": 1}
for _power, _letter in enumerate("KMGTP", 1):
    _UNITS |= {f"{_letter}iB": 1024**_power, f"{_letter}B": 1000**_power, _letter: 1024**_power}
_BY_LOWER_CASE = {unit.lower(): factor for unit, factor in _UNITS.items()}
#: What a build takes beside what the process holds, unless it is told otherwise.
BUILD_BYTES = 512 << 20
_MOST_BYTES = 1 << 62  # what is added to one still fits the 64 bits in which C++ counts


def parse_size(text: str | int) -> int:
    """Bytes from ``4096``, ``64KiB`` (1024), ``64K`` (1024), ``64kB`` (1000), ``1.5 GiB``. Case
    does not matter.

    Raises:
        InvalidInputError: not a size, negative, not a whole number of bytes, or more than 4 EiB.
    """
    size_bytes = _parsed(text)
    if size_bytes > _MOST_BYTES:
        raise InvalidInputError("a size", got=repr(text), expected="at most 4 EiB")
    return size_bytes


def _parsed(text: str | int) -> int:
    if isinstance(text, int) and not isinstance(text, bool):
        if text < 0:
            raise InvalidInputError(
                "a size cannot be negative", got=text, expected="bytes, at least 0"
            )
        return text
    if not isinstance(text, str):
        raise InvalidInputError(
            "cannot read a size",
            got=repr(text),
            expected="bytes, or a text such as 64KiB or 1.5GiB",
        )
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-zA-Z]*)\s*", text)
    if match is None or match.group(2).lower() not in _BY_LOWER_CASE:
        raise InvalidInputError(
            "cannot read a size",
            got=repr(text),
            expected="a number and a unit, such as 4096, 64KiB or 1.5GiB",
        )
    number, factor = match.group(1), _BY_LOWER_CASE[match.group(2).lower()]
    if "." not in number:
        return int(number) * factor
    whole, fraction = number.split(".")
    scaled, rest = divmod(int(whole + fraction) * factor, 10 ** len(fraction))
    if rest and factor == 1:
        raise InvalidInputError("a size is a whole number of bytes", got=repr(text))
    return scaled


def format_rate(bytes_per_s: float) -> str:
    """``3.0e9`` -> ``3.00 GB/s``: in powers of 1000 and three digits, as drives and links are
    sold."""
    value, unit = float(bytes_per_s), "B/s"
    for larger in ("kB/s", "MB/s", "GB/s", "TB/s"):
        if abs(value) < 999.5:
            break
        value, unit = value / 1000, larger
    return f"{f'{value:#.3g}'.rstrip('.')} {unit}"


def format_size(size_bytes: int | float, *, digits: int = 4) -> str:
    """``67108864`` -> ``64 MiB``; ``1536`` -> ``1.5 KiB``. At most ``digits`` significant
    digits."""
    value, unit = float(size_bytes), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if abs(value) < 1023.5:
            break
        value, unit = value / 1024, larger
    return f"{value:.{digits}g} {unit}"
