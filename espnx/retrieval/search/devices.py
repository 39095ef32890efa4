"""What an index reads and scores with: an engine for its metadata, a device that keeps and scores
records, those that first stages ask, and where it computes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch

from ... import errors
from ...device.interface import RecordDevice
from ...device.near_storage import NearStorageDevice
from ...device.registry import Devices, given_devices, open_records, open_together
from ...device.wrapper import topologies_of
from ...storage import Engine, NativeEngine, open_engine
from ...storage.native import host_engine
from ..first_stage.devices import StageDevices
from ..store.manifest import data_directories
from .result import SearchResult

_GDS_PATHS = ("gds", "gds-compat")


def compute_of(name: str | torch.device, device: RecordDevice | Devices | None) -> torch.device:
    """The device that records are scored on, with the number of the GPU: `cuda` alone means another
    one in every thread. A device of records that is open has decided it. Raises InvalidInputError,
    PathUnavailableError."""
    found = _torch_device(name)
    if device is None or isinstance(device, (str, NearStorageDevice, Sequence)):
        return found
    _check_has("device", device, ("compute", "keep_records", "path_report"))
    return device.compute


def _torch_device(name: str | torch.device) -> torch.device:
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type not in ("cpu", "cuda"):
        raise errors.InvalidInputError("compute", got=repr(name), expected="cpu or cuda")
    if device.type == "cpu":
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise errors.PathUnavailableError(
            "no CUDA device here", got=str(name), fix="use compute='cpu'"
        )
    return torch.device(
        "cuda", torch.cuda.current_device() if device.index is None else device.index
    )


@dataclass(frozen=True)
class IndexDevices:
    """Attributes: native: reads what is neither records nor a first stage's. records: keeps and
    scores records. stages: what first stages ask."""

    native: NativeEngine
    records: RecordDevice
    stages: StageDevices

    @cached_property
    def topologies(self) -> Sequence[Any]:
        """The topologies in whose time emulated ones are, see `topologies_of`."""
        return topologies_of(self.records)


def open_for_index(
    path: str,
    compute: torch.device,
    engine: str | os.PathLike[str] | Engine,
    device: RecordDevice | Devices | None,
    opened: ExitStack,
) -> IndexDevices:
    """What is opened here is closed with `opened`.

    Args:
        path: the store's directory. The others: as of `Index`.
    """
    if isinstance(engine, (str, os.PathLike)):
        engine = os.fspath(engine)
        on_gpu = {"device": compute} if engine in _GDS_PATHS and compute.type == "cuda" else {}
        engine = opened.enter_context(open_engine(engine, **on_gpu))
    _check_has("engine", engine, ("open", "read", "stats"))
    # Of an engine that reads into GPU memory: manifest, metadata and first stage are read into host
    # memory all the same.
    native = host_engine(engine) or opened.enter_context(NativeEngine())
    if device is not None and not isinstance(device, (str, NearStorageDevice, Sequence)):
        return IndexDevices(native, device, StageDevices(native.requested))
    named = list[NearStorageDevice]()
    if isinstance(device, str):
        named = open_together(device, data_directories(path))
        for each in named:
            opened.callback(each.close)
    elif device is not None:
        named = given_devices(device)
    records = open_records(engine, compute, named)
    opened.callback(records.close)
    return IndexDevices(native, records, StageDevices(native.requested, named))


def _check_has(name: str, given: object, parts: tuple[str, ...]) -> None:
    """Raises InvalidInputError for an object that lacks one of its parts; None is none."""
    if given is not None and not all(hasattr(given, part) for part in parts):
        raise errors.InvalidInputError(
            name, got=repr(given), expected=f"an object with {', '.join(parts)}"
        )


def watched(devices: IndexDevices, results: Iterator[SearchResult]) -> list[SearchResult]:
    """The same, with what they take emulated devices."""
    from ...device.emulation.use import Watch  # of few programs

    with Watch(devices.topologies, "--show search") as watch:
        found = list(results)
        watch.beside_bytes = sum(each.stage_bytes - each.stage_device_bytes for each in found)
        watch.beside_why = "; ".join(dict.fromkeys(devices.stages.past.values()))
    return [replace(each, device=watch.use) for each in found]
