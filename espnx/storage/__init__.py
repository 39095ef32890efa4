"""Where bytes live: engines that move them, plans that say which, and the formats they are kept in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypedDict, Unpack

from ..errors import InvalidInputError
from .engine import DEFAULT_DEADLINE_S, PATHS, Engine, EngineStats, FileHandle, Future, Plan
from .native import FaultRule, FaultyEngine, NativeEngine

if TYPE_CHECKING:
    import torch

    from .gds.memory import DeviceMemory

__all__ = [
    "DEFAULT_DEADLINE_S",
    "PATHS",
    "Engine",
    "EngineOptions",
    "EngineStats",
    "FaultRule",
    "FaultyEngine",
    "FileHandle",
    "Future",
    "NativeEngine",
    "Plan",
    "open_engine",
]


class EngineOptions(TypedDict, total=False):
    """Keyword arguments of `open_engine`: those of `NativeEngine`, then those of `GdsEngine`; threads and poison are of both."""

    threads: int
    poison: bool
    queue_depth: int
    request_bytes: int
    pool_bytes: int
    rules: Sequence[FaultRule]
    seed: int
    device: str | torch.device
    batch_size: int
    batches: int
    batch_bytes: int
    large_bytes: int
    arena_bytes: int
    bindings: Any
    memory: DeviceMemory | None


def open_engine(path: str = "auto", **options: Unpack[EngineOptions]) -> Engine:
    """Opens a storage engine.

    Args:
        path: ``auto`` (io_uring, else a thread pool; says why it fell back), ``uring``, ``posix``, ``memory``, or ``gds`` or ``gds-compat``
            for reads into GPU memory. A named path never falls back.
        **options: of `NativeEngine`, or of `espnx.storage.gds.engine.GdsEngine`.

    Raises:
        PathUnavailableError: the named path cannot be had here.
        InvalidInputError: no such path.
    """
    if path not in PATHS:
        raise InvalidInputError("unknown storage path", got=repr(path), expected=", ".join(PATHS))
    own: dict[str, Any] = {**options}
    if path in ("gds", "gds-compat"):
        from .gds.engine import GdsEngine

        return GdsEngine(path, **own)
    return NativeEngine(path, **own)
