"""Opens devices by name: our own, those that other packages bring (entry points of the group ``espnx.devices``), and ``module:factory``.

A factory is called with a directory and, as keywords, with what `open_rows` is given; what it returns keeps `RowDevice`.
"""

from __future__ import annotations

import logging
import os
from importlib.metadata import EntryPoint, entry_points
from typing import Any

import torch

from .. import errors
from ..storage import Engine
from ..storage.native import host_engine
from .interface import READ_AHEAD_BYTES, RecordDevice, RowDevice

log = logging.getLogger(__name__)

GROUP = "espnx.devices"
_OWN = (
    EntryPoint("ssd", "espnx.device.ssd:SsdDevice", GROUP),
    EntryPoint("gpu", "espnx.device.gpu.device:GpuDevice", GROUP),
)  # fmt: skip
_INTO_GPU_MEMORY = ("gds", "gds-compat")


def device_names() -> list[str]:
    """Of all devices that can be opened here by name."""
    return sorted(_known())


def _known() -> dict[str, EntryPoint]:
    """By name; nobody replaces ours."""
    return {each.name: each for each in (*entry_points(group=GROUP), *_OWN)}


def default_name(engine: object, compute: torch.device | None) -> str:
    """The device of our own for rows that are computed on there, or that an engine reads into a GPU's memory."""
    return "gpu" if engine in _INTO_GPU_MEMORY or (compute is not None and compute.type != "cpu") else "ssd"


def _factory(name: str) -> Any:
    """Raises InvalidInputError, MissingDependencyError."""
    known = _known()
    if not isinstance(name, str):
        raise errors.InvalidInputError("device", got=repr(name), expected=", ".join(sorted(known)))
    entry = EntryPoint(name, name, GROUP) if ":" in name else known.get(name)
    if entry is None:
        raise errors.InvalidInputError(
            "device", got=repr(name), expected=", ".join(sorted(known)),
            fix=f"install the package that brings it (entry point group {GROUP}), or name a 'module:factory'",
        )  # fmt: skip
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise errors.MissingDependencyError(f"device {name!r} cannot be loaded", got=str(error), expected=entry.value) from error


def open_rows(
    device: str,
    directory: str | os.PathLike[str],
    *,
    compute: torch.device | None = None,
    engine: Any = "auto",
    name: str | None = None,
    read_ahead_bytes: int = READ_AHEAD_BYTES,
    threads: int | None = None,
    deadline_s: float = 30.0,
) -> RowDevice:
    """Opens a device for rows.

    Args:
        device: one of `device_names`, or ``module:factory``.
        directory: where it keeps what it is given; made where it is missing.
        compute: in whose memory rows are computed on; None: the device's own choice.
        engine: the path that bytes are to take, by name (`auto` alone may fall back), or a storage engine.
        name: of the data file, to keep it; None: its space returns when the process ends.
        read_ahead_bytes: of rows that are read before they are asked for.
        threads: that compute on the host; None: as many as PyTorch uses.
        deadline_s: of each transfer.

    Raises:
        InvalidInputError: an unknown name; something that this device cannot do.
        MissingDependencyError: the device's package cannot be loaded.
        WriteError, PathUnavailableError: the directory or the path cannot be used.
    """
    log.debug("rows in %s are kept by the device %s, computed on %s", os.fspath(directory), device, compute or "where it chooses")
    opened: RowDevice = _factory(device)(
        directory, compute=compute, engine=engine, name=name, read_ahead_bytes=read_ahead_bytes, threads=threads, deadline_s=deadline_s
    )
    return opened


def check_rows(device: str, directory: str | os.PathLike[str], *, engine: Any = "auto", name: str | None = None) -> None:
    """Whether a device could be opened there, as far as that can be told before anything is: its name, the directory, the engine's path.
    Raises as `open_rows`."""
    factory = _factory(device)
    if check := getattr(factory, "check", None):
        check(directory, engine=engine, name=name)


def open_records(engine: Engine, compute: torch.device) -> RecordDevice:
    """The device of our own for records that `engine` reads, scored on `compute`. The engine stays the caller's.

    Raises InvalidInputError where the engine reads into the memory of a GPU, and scores are computed on the CPU.
    """
    log.debug("records are read by %s and scored on %s", engine.effective, compute)
    if compute.type != "cpu":
        from .gpu.records import TensorRecordDevice

        return TensorRecordDevice(engine, compute)
    from .records import SsdRecordDevice

    native = host_engine(engine)
    if native is None:
        raise errors.InvalidInputError("records would lie in GPU memory", got="compute='cpu'", fix="open the index with compute='cuda'")
    return SsdRecordDevice(native)
