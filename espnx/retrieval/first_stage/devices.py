"""What first stages ask for their sections on storage: for each file the device that it lies on."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ...device.kinds import PartKind
from ...device.near_storage import NearStorageDevice
from ...device.plain import PlainDevice
from ...device.several import innermost


class StageDevices:
    """The devices of a store, as its first stages see them. A stage opens a part of a device for
    each section that its searches read, and closes it.

    Args:
        engine: the path of the reads: ``auto``, ``uring``, ``posix`` or ``memory``.
        devices: that somebody has named; they stay the caller's. None: this machine's SSD.

    Attributes:
        engine: as given.
        past: by the file that is not read by a device that was named, why.
    """

    def __init__(self, engine: str = "auto", devices: Sequence[NearStorageDevice] = ()):
        self.engine, self._devices, self.past = engine, list(devices), dict[str, str]()

    def of(self, kind: PartKind, path: str) -> NearStorageDevice | None:
        """The device that opens a part of this kind for a file. None: none was named; or the one
        that was cannot, and then `past` says why this machine's SSD has to."""
        if not self._devices:
            return None
        number = innermost(path, [each.path for each in self._devices])
        if number is None:
            why = "it lies on none of the devices"
        elif not (device := self._devices[number]).offers(kind):
            why = f"device {device.name} keeps no {kind.keeps}"
        elif not (why := device.refuses(kind)):
            return device
        self.past[path] = why
        return None

    def open(self, kind: PartKind, path: str, *what: Any, **options: Any) -> Any:
        """A part for a file: of the device that it lies on, else of this machine's SSD. Raises what
        opening it does."""
        device = self.of(kind, path) or PlainDevice("/")
        return kind.open_on(device, *what, **{"engine": self.engine, **options})


def asked_of_devices(stage: Any, parts: Sequence[Any]) -> dict[PartKind, list[Any]]:
    """What a first stage opens on devices for the entries of some parts of a store, by the kind of
    part: what a replay of its searches has to be given. Nothing, of a stage in memory."""
    found: dict[PartKind, list[Any]] = (
        stage.on_devices(parts) if hasattr(stage, "on_devices") else {}
    )
    return found
