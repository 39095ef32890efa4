"""Where bytes live: engines that move them, plans that say which, and the formats they are kept
in."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from ..errors import InvalidInputError
from ..suggestions import suggests_keywords
from .engine import DEFAULT_DEADLINE_S, PATHS, Engine, EngineStats, FileHandle, Future, Plan
from .native import FaultRule, FaultyEngine, NativeEngine
from .settings import EngineSettings, is_file

if TYPE_CHECKING:
    import torch

__all__ = [
    "DEFAULT_DEADLINE_S",
    "PATHS",
    "Engine",
    "EngineSettings",
    "EngineStats",
    "FaultRule",
    "FaultyEngine",
    "FileHandle",
    "Future",
    "NativeEngine",
    "Plan",
    "open_engine",
]


@suggests_keywords
def open_engine(
    path: str | os.PathLike[str] = "auto",
    *,
    threads: int | None = None,
    queue_depth: int | None = None,
    request_bytes: int | None = None,
    pool_bytes: int | None = None,
    device: str | torch.device | None = None,
    batch_size: int | None = None,
    batches: int | None = None,
    batch_bytes: int | None = None,
    large_bytes: int | None = None,
    arena_bytes: int | None = None,
) -> Engine:
    """Opens a storage engine.

    Args:
        path: ``auto`` (io_uring, else a thread pool; says why it fell back), ``uring``, ``posix``,
            ``memory``, or ``gds`` or ``gds-compat`` for reads into GPU memory. A named path never
            falls back. A file of settings, such as ``nvme.toml`` (`espnx bench io --tune` writes
            it), stands for a path and the options that are not given.
        threads, queue_depth, request_bytes, pool_bytes: of `NativeEngine`; None: its default.
        threads, device, batch_size, batches, batch_bytes, large_bytes, arena_bytes: of
            `espnx.storage.gds.engine.GdsEngine`; None: its default.

    Raises:
        PathUnavailableError: the named path cannot be had here.
        InvalidInputError: no such path; an option that is not the path's, or is out of range.
    """
    if path not in PATHS and not is_file(path):
        raise InvalidInputError(
            "unknown storage path",
            got=repr(path),
            expected=f"{', '.join(PATHS)}, or a file of settings (.toml)",
        )
    of_host = {"queue_depth": queue_depth, "request_bytes": request_bytes, "pool_bytes": pool_bytes}
    of_gpu = {
        "device": device,
        "batch_size": batch_size,
        "batches": batches,
        "batch_bytes": batch_bytes,
        "large_bytes": large_bytes,
        "arena_bytes": arena_bytes,
    }
    own, other = (of_gpu, of_host) if path in ("gds", "gds-compat") else (of_host, of_gpu)
    if foreign := [name for name, value in other.items() if value is not None]:
        raise InvalidInputError(
            f"option {foreign[0]} of path {path}",
            got=other[foreign[0]],
            expected=", ".join(("threads", *own)),
        )
    given: dict[str, Any] = {
        name: value for name, value in {"threads": threads, **own}.items() if value is not None
    }
    if own is of_gpu:
        from .gds.engine import GdsEngine

        return GdsEngine(str(path), **given)
    return NativeEngine(path, **given)
