"""Opens devices by name: our own, those of specs (presets, YAML files), which are emulated, those
that other packages bring (entry points of the group ``espnx.devices``), and ``module:class``.

What a name stands for is a class derived from `NearStorageDevice`, or anything else that has its
`together`.
"""

from __future__ import annotations

import inspect
import logging
import os
from collections.abc import Sequence
from difflib import get_close_matches
from importlib.metadata import EntryPoint, entry_points
from typing import Any, overload

import torch

from .. import errors
from ..storage import Engine
from .interface import RecordDevice
from .model.reader import SUFFIXES
from .model.spec import presets
from .near_storage import NearStorageDevice
from .plain import PlainDevice
from .several import SeveralRecordDevices, is_in

log = logging.getLogger(__name__)

GROUP = "espnx.devices"
_OWN = (
    EntryPoint("ssd", "espnx.device.plain:SsdDevice", GROUP),
    EntryPoint("gpu", "espnx.device.plain:GpuDevice", GROUP),
)
_EMULATION = "espnx.device.emulation.device"
_INTO_GPU_MEMORY = ("gds", "gds-compat")

#: One device, several, or the name of what to open in each directory.
Devices = str | NearStorageDevice | Sequence[NearStorageDevice]


def device_names() -> list[str]:
    """The names of all devices that can be opened here."""
    return sorted(_known())


def _known() -> dict[str, EntryPoint]:
    """All devices by name; a plug-in does not replace one of ours."""
    emulated = (EntryPoint(name, _EMULATION, GROUP) for name in presets())
    return {each.name: each for each in (*entry_points(group=GROUP), *emulated, *_OWN)}


def described_names() -> list[dict[str, str]]:
    """``name``, ``from`` (the package that brings it) and ``what`` (the first line of its docs) of
    each, or why it cannot be loaded."""
    found = []
    for name, entry in sorted(_known().items()):
        package = entry.dist.name if entry.dist is not None else "espnx"
        try:
            what = (inspect.getdoc(_factory(name)) or "").partition("\n")[0]
        except errors.EspnxError as error:
            what = f"cannot be opened: {error.got}"
        found.append({"name": name, "from": package, "what": what})
    return found


def default_name(engine: object, compute: torch.device | None) -> str:
    """The device of our own for rows that are computed on there, or that an engine reads into a
    GPU's memory."""
    return (
        "gpu"
        if engine in _INTO_GPU_MEMORY or (compute is not None and compute.type != "cpu")
        else "ssd"
    )


def is_emulated(name: str) -> bool:
    """Whether a name is that of a spec."""
    known = _known().get(name)
    return name.endswith(SUFFIXES) or (known is not None and known.value == _EMULATION)


def _factory(name: str) -> Any:
    """Raises InvalidInputError, MissingDependencyError."""
    own = next((each for each in _OWN if each.name == name), None)
    if own is not None:
        # The names of all others stand with every package that is installed: reading these takes
        # longer than a cache takes to open.
        return _loaded(own)
    known = _known()
    if not isinstance(name, str):
        raise errors.InvalidInputError(
            "device", got=repr(name), expected=f"a device, or one of {', '.join(sorted(known))}"
        )
    if is_emulated(name):
        from .emulation.device import Emulation  # what it computes is not for every program

        return Emulation(name)
    entry = EntryPoint(name, name, GROUP) if ":" in name else known.get(name)
    if entry is None:
        nearest = "".join(f"{each!r}? Or " for each in get_close_matches(name, known, n=1))
        raise errors.InvalidInputError(
            "device",
            got=repr(name),
            expected=", ".join(sorted(known)),
            fix=(
                f"{nearest}install the package that brings it (entry point group {GROUP}), name a "
                "spec (drive.yaml), or a 'module:class'"
            ),
        )
    return _loaded(entry)


def _loaded(entry: EntryPoint) -> Any:
    """Raises InvalidInputError, MissingDependencyError."""
    try:
        found = entry.load()
    except (ImportError, AttributeError) as error:
        raise errors.MissingDependencyError(
            f"device {entry.name!r} cannot be loaded", got=str(error), expected=entry.value
        ) from error
    if not callable(getattr(found, "together", None)):
        raise errors.InvalidInputError(
            f"device {entry.name!r}",
            got=f"{entry.value}, a {type(found).__name__}",
            expected="a class derived from espnx.device.NearStorageDevice",
        )
    return found


def open_together(
    name: str, paths: Sequence[str | os.PathLike[str]], **options: Any
) -> list[NearStorageDevice]:
    """One device for each directory; they share what such devices share: a switch, the link to the
    host.

    Args:
        name: one of `device_names`, a spec (``drive.yaml``), or ``module:class``.
        paths: directories; made where they are missing.
        options: of the device.

    Raises:
        InvalidInputError: an unknown name, or option of this device.
        MissingDependencyError: the device's package cannot be loaded.
    """
    factory = _factory(name)
    try:
        opened: list[NearStorageDevice] = list(
            factory.together([os.fspath(path) for path in paths], **options)
        )
    except TypeError as error:
        if not options or "argument" not in str(error):
            raise
        raise errors.InvalidInputError(
            f"options of device {name!r}", got=", ".join(options), expected=str(error)
        ) from error
    for each in opened:
        each.name = name
        log.debug("device %s in %s: %s", name, each.path, each.kind)
    return opened


@overload
def open_device(name: str, path: str | os.PathLike[str], **options: Any) -> NearStorageDevice: ...
@overload
def open_device(
    name: str, path: Sequence[str | os.PathLike[str]], **options: Any
) -> list[NearStorageDevice]: ...
def open_device(
    name: str, path: str | os.PathLike[str] | Sequence[str | os.PathLike[str]], **options: Any
) -> NearStorageDevice | list[NearStorageDevice]:
    """Opens a near-storage device, or one in each of several directories, to be given to `KVCache`
    or to `espnx.open`.

    Args:
        name: one of `device_names`, a spec (``drive.yaml``), or ``module:class``.
        path: the directory in which it keeps what it is given, or several: their devices share what
            such devices share (a switch, the link to the host).
        options: of the device.

    Raises as `open_together`.
    """
    if isinstance(path, (str, os.PathLike)):
        return open_together(name, [path], **options)[0]
    return open_together(name, list(path), **options)


def devices_in(device: Devices, directories: Sequence[str]) -> list[NearStorageDevice]:
    """A device for each directory: opened by name, or as given. Raises InvalidInputError where they
    are not as many, or lie elsewhere."""
    if isinstance(device, str):
        return open_together(device, directories)
    found = given_devices(device)
    if len(found) != len(directories) or not all(
        is_in(directory, each.path) for each, directory in zip(found, directories, strict=True)
    ):
        raise errors.InvalidInputError(
            "directories on several devices",
            got=list(directories),
            expected=f"one in each of {[each.path for each in found]}",
            fix="leave the directories out: those of the devices are taken",
        )
    return found


def check_device(device: Devices) -> None:
    """Raises InvalidInputError, MissingDependencyError for what is neither the name of a device nor
    open ones. Opens nothing."""
    if isinstance(device, str):
        _factory(device)
    else:
        given_devices(device)


def given_devices(
    device: NearStorageDevice | Sequence[NearStorageDevice],
) -> list[NearStorageDevice]:
    """One or several devices that are open. Raises InvalidInputError for anything else."""
    found = (
        [device]
        if isinstance(device, NearStorageDevice)
        else list(device)
        if isinstance(device, Sequence)
        else []
    )
    if not found or not all(isinstance(each, NearStorageDevice) for each in found):
        raise errors.InvalidInputError(
            "device",
            got=repr(device),
            expected="a name, a device or several",
            fix="espnx.device.open(name, path)",
        )
    return found


def directories_on(device: Devices | None) -> list[str]:
    """The directories in which devices keep what they are given. Raises InvalidInputError unless
    they are open."""
    if device is None or isinstance(device, str):
        raise errors.InvalidInputError(
            "storage",
            got="no directory",
            expected="a directory on the SSD, several, or an open device",
        )
    return [each.path for each in given_devices(device)]


def open_records(
    engine: Engine, compute: torch.device, devices: Sequence[NearStorageDevice] = ()
) -> RecordDevice:
    """What keeps records that `engine` reads, which stays the caller's, as the devices do.

    Args:
        compute: where they are scored, unless a device scores them itself.
        devices: in whose directories the data files lie; none: this machine's SSD.

    Raises InvalidInputError where the engine reads into the memory of a GPU, and scores are
    computed on the CPU.
    """
    records: RecordDevice = (
        SeveralRecordDevices(engine, compute, devices)
        if devices
        else PlainDevice("/").open_records(engine, compute)
    )
    log.debug(
        "records are read by %s and scored on %s%s",
        engine.effective,
        compute,
        f", by {devices[0].name}" if devices else "",
    )
    return records
