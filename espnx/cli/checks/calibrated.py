"""The disk of a directory as a device spec, every figure with how it was measured (`espnx device calibrate`). A file of its own: what
a check says of a disk is one line."""

from __future__ import annotations

import datetime
import os

from ...device.model.spec import DeviceSpec, Figure, Flash, Links
from ...errors import InvalidInputError
from .. import host
from .speed import measure

_FILE_BYTES, _RUN_S = 256 << 20, 1.0
_FIGURES = 3  # of a number: two runs do not agree in more
_TITLE_MOST = 100


def spec_of(name: str, directory: str) -> tuple[DeviceSpec, bool]:
    """(the spec of that name, whether the page cache stood between). Takes some seconds and 256 MiB, which are gone afterwards.

    Raises InvalidInputError where there is no such directory; OSError, ImportError, EspnxError: what measuring raises.
    """
    if not os.path.isdir(directory):
        raise InvalidInputError("device calibrate", got=repr(directory), expected="an existing directory", fix="--path DIR")
    found = measure(directory, file_bytes=_FILE_BYTES, run_s=_RUN_S)
    today = datetime.date.today().isoformat()

    def figure(value: float, unit: str, per_unit: float, how: str) -> Figure:
        number = float(f"{value / per_unit:.{_FIGURES}g}")
        return Figure(number * per_unit, number, unit, f"espnx device calibrate on {today}: {how}", "measured")

    by = f"by {found.effective_path}"
    size = os.statvfs(directory)
    read = figure(found.read_bytes_per_s, "MB/s", 1e6, f"reads of 960 KiB at random places, 8 at a time, {by}")
    write = figure(found.write_bytes_per_s, "MB/s", 1e6, f"a file of 256 MiB, written and synced, {by}")
    flash = Flash(
        read_bandwidth=read,
        write_bandwidth=write,
        read_latency=figure(found.read_4k_s, "us", 1e-6, f"reads of 4 KiB at random places, one at a time, {by}"),
        random_reads=figure(found.reads_4k_per_s, "IOPS", 1.0, f"reads of 4 KiB at random places, 1,024 at a time, {by}"),
    )
    faster = max(read, write, key=lambda each: each.value)
    link = Figure(faster.value, faster.number, faster.unit, "what passed it when the disk was measured; it may be wider", "derived")
    capacity = figure(size.f_blocks * size.f_frsize, "GB", 1e9, "the size of the file system") if size.f_blocks else None
    return DeviceSpec(name, _title(directory), flash, Links(device=link), capacity=capacity), "buffered" in found.effective_path


def _title(directory: str) -> str:
    mount = host.mount_of(directory)
    model = (host.disk_of(mount.device).get("model") or mount.device) if mount.device else None
    return f"this machine's disk: {model or 'no block device'}, {mount.file_system}"[:_TITLE_MOST]
