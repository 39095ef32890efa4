"""A plain device for the tests of devices, and what the conformance suite knows of rows."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from espnx.device.conformance.known_rows import (
    Kept,
    Seen,
    assert_right,
    attend,
    draw,
    kept,
    normal,
    put,
    queries,
)
from espnx.device.rows.ssd import SsdRowDevice

__all__ = [
    "Kept",
    "Seen",
    "assert_right",
    "attend",
    "draw",
    "kept",
    "normal",
    "opened",
    "put",
    "queries",
]


@contextmanager
def opened(folder: Path, **options: Any) -> Iterator[SsdRowDevice]:
    device = SsdRowDevice(folder, **options)
    try:
        yield device
    finally:
        device.close()
