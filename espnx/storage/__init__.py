"""Where bytes live: engines that move them, plans that say which, and the formats they are kept in."""

from __future__ import annotations

from typing import Any

from ..errors import InvalidInputError
from .engine import DEFAULT_DEADLINE_S, PATHS, Engine, EngineStats, FileHandle, Future
from .native import FaultRule, FaultyEngine, NativeEngine
from .plan import Plan

__all__ = [
    "DEFAULT_DEADLINE_S",
    "PATHS",
    "Engine",
    "EngineStats",
    "FaultRule",
    "FaultyEngine",
    "FileHandle",
    "Future",
    "NativeEngine",
    "Plan",
    "open_engine",
]


def open_engine(path: str = "auto", **options: Any) -> Engine:
    """Opens a storage engine.

    Args:
        path: ``auto`` (io_uring, else a thread pool; says why it fell back), ``uring``, ``posix``, ``memory``, or ``gds`` or ``gds-compat``
            for reads into GPU memory. A named path never falls back.
        **options: of `NativeEngine`, or of `espnx.storage.gds.GdsEngine`.

    Raises:
        PathUnavailableError: the named path cannot be had here.
        InvalidInputError: no such path.
    """
    if path not in PATHS:
        raise InvalidInputError("unknown storage path", got=repr(path), expected=", ".join(PATHS))
    if path in ("gds", "gds-compat"):
        from .gds import GdsEngine

        return GdsEngine(path, **options)
    return NativeEngine(path, **options)
