"""How a cache stores rows, reads them and computes on them: the options of `SsdCache` and of every
cache that has one inside."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from .. import errors
from ..checks import check_callable, check_whole
from ..device.interface import READ_AHEAD_BYTES
from ..device.registry import Devices
from ..device.row_layout import DTYPES
from ..sizes import parse_size


@dataclass(frozen=True, kw_only=True)
class CacheOptions:
    """Checked when they are made: raises InvalidInputError.

    Attributes:
        format: of stored rows: None keeps the dtype of K and V; ``int8`` is lossy (X rows are kept
            as they are).
        spill_interval: new tokens wait in memory until there are so many; None: as many as fill
            whole pages.
        read_ahead_bytes: of rows read before they are asked for, on each device; a size
            (``48MiB``).
        capacity_tokens: of each sequence: space for as many is reserved when the first rows come,
            so that a full disk shows then.
        engine: ``auto``, ``uring``, ``posix``, ``gds``, ``gds-compat``, a file of settings
            (``nvme.toml``, see docs/engine.md), or how to make an engine (tests inject faults so).
        device: what keeps the rows and attends over them: a name (`espnx.device.names`), or an open
            device for each directory, which stays the caller's; None: ``ssd``, or ``gpu`` where
            rows are computed on in a GPU's memory.
        compute: where rows are computed on: ``cpu``, ``cuda``; None: where the model's K and V turn
            out to be. The devices are opened when that is known.
        threads: that compute on rows; None: as many as PyTorch uses.
        deadline_s: of each transfer, in seconds.
    """

    format: str | None = None
    spill_interval: int | None = None
    read_ahead_bytes: int | str = READ_AHEAD_BYTES
    capacity_tokens: int | None = None
    engine: str | os.PathLike[str] | Callable[[], Any] = "auto"
    device: Devices | None = None
    compute: str | torch.device | None = None
    threads: int | None = None
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        for option in ("spill_interval", "capacity_tokens", "threads"):
            if (value := getattr(self, option)) is not None:
                check_whole(option, value, 1)
        if not parse_size(self.read_ahead_bytes):
            raise errors.InvalidInputError(
                "read_ahead_bytes", got=0, expected="at least 1: rows are read in pieces of it"
            )
        if (
            not isinstance(self.deadline_s, (int, float))
            or isinstance(self.deadline_s, bool)
            or not self.deadline_s > 0
        ):
            raise errors.InvalidInputError(
                "deadline_s", got=repr(self.deadline_s), expected="a number of seconds above 0"
            )
        if self.format not in (None, *DTYPES):
            raise errors.InvalidInputError(
                "format of stored rows",
                got=repr(self.format),
                expected=f"None, {', '.join(DTYPES)}",
            )
        try:
            torch.device("cpu" if self.compute is None else self.compute)
        except (RuntimeError, TypeError) as error:
            raise errors.InvalidInputError(
                "compute", got=repr(self.compute), expected="cpu or cuda"
            ) from error
        if not isinstance(self.engine, (str, os.PathLike)):
            check_callable("engine", self.engine)
