"""The disk of a directory as a device spec, every figure with how it was measured (`espnx device
calibrate`). A file of its own: what a check says of a disk is one line."""

from __future__ import annotations

import datetime
import os

from ...device.model.disk import FILE_BYTES, RUN_S, disk_spec, measure_disk
from ...device.model.spec import DeviceSpec
from ...errors import InvalidInputError
from .. import host

_TITLE_MOST = 100


def spec_of(name: str, directory: str) -> tuple[DeviceSpec, bool]:
    """(the spec of that name, whether the page cache stood between). Takes some seconds and 256
    MiB, which are gone afterwards.

    Raises InvalidInputError where there is no such directory; OSError, ImportError, EspnxError:
    what measuring raises.
    """
    if not os.path.isdir(directory):
        raise InvalidInputError(
            "device calibrate",
            got=repr(directory),
            expected="an existing directory",
            fix="--path DIR",
        )
    found = measure_disk(directory, file_bytes=FILE_BYTES, run_s=RUN_S)
    measured = f"espnx device calibrate on {datetime.date.today().isoformat()}"
    size = os.statvfs(directory)
    spec = disk_spec(
        name,
        _title(directory),
        found,
        measured=measured,
        capacity_bytes=size.f_blocks * size.f_frsize,
    )
    return spec, "buffered" in found.effective_path


def _title(directory: str) -> str:
    mount = host.mount_of(directory)
    model = (host.disk_of(mount.device).get("model") or mount.device) if mount.device else None
    return f"this machine's disk: {model or 'no block device'}, {mount.file_system}"[:_TITLE_MOST]
