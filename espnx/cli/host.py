"""Facts about this machine, read from the kernel with the standard library alone, so that they can
be had when torch is broken."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path

# What the kernels of espnx choose their variants by.
CPU_FLAGS = (
    "sse4_2",
    "avx2",
    "f16c",
    "fma",
    "avx512f",
    "avx512bw",
    "avx512vl",
    "avx512_vnni",
    "avx512_bf16",
    "avx512_fp16",
    "amx_bf16",
    "amx_int8",
)
# Copies of these in one process decide what a GPU read really does; two copies of an OpenMP runtime
# fight for the cores.
LIBRARIES = (
    "libcufile",
    "libcuda.so",
    "libcudart",
    "libgomp",
    "libiomp",
    "libomp",
    "libfaiss",
    "liburing",
    "libtorch_cpu",
)


@dataclass(frozen=True)
class Mount:
    """The file system a path lies on.

    Attributes:
        point: where it is mounted.
        file_system: its type (``ext4``, ``overlay``, ...).
        source: what is mounted (a device, or a name).
        options: of the mount, comma-separated.
        device: the block device behind it, as in /sys/block, or None.
    """

    point: str
    file_system: str
    source: str
    options: str
    device: str | None


def read_text(path: str | os.PathLike[str]) -> str | None:
    """A small kernel file without the space around it; None when it cannot be read."""
    try:
        return Path(path).read_text(errors="replace").strip()
    except OSError:
        return None


def unescape(field: str) -> str:
    r"""A field of /proc/self/mountinfo: ``\040`` is a space."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match.group(1), 8)), field)


def mount_of(path: str | os.PathLike[str], mountinfo: str | None = None) -> Mount:
    """The mount that holds `path` (which may not exist yet: then its nearest parent that does)."""
    where = existing(path)
    text = read_text("/proc/self/mountinfo") if mountinfo is None else mountinfo
    best = Mount("?", "unknown", "?", "", None)
    for line in (text or "").splitlines():
        left, separator, right = line.partition(" - ")
        if not separator:
            continue
        fields, tail = left.split(), right.split()
        point = unescape(fields[4])
        # The last line wins among equals: a later mount hides an earlier one at the same place.
        inside = point == "/" or where == point or where.startswith(point + "/")
        if inside and (len(point) >= len(best.point) or best.point == "?"):
            best = Mount(point, tail[0], unescape(tail[1]), fields[5], block_device(fields[2]))
    return best


def existing(path: str | os.PathLike[str]) -> str:
    """The path with its links resolved, or the nearest parent that exists."""
    place = Path(path).resolve()
    while not place.exists() and place != place.parent:
        place = place.parent
    return str(place)


def block_device(numbers: str) -> str | None:
    """``259:1`` -> ``nvme0n1p1``; None for what has no block device (tmpfs, overlay, network file
    systems)."""
    link = Path("/sys/dev/block", numbers)
    return link.resolve().name if link.exists() else None


def disk_of(device: str) -> dict[str, str | None]:
    """Model, queue and sizes of the disk under a block device (of the whole disk, for a
    partition)."""
    folder = Path("/sys/class/block", device).resolve()
    if (folder / "partition").exists():
        folder = folder.parent
    return {
        "disk": folder.name,
        "model": read_text(folder / "device/model"),
        "rotational": read_text(folder / "queue/rotational"),
        "scheduler": read_text(folder / "queue/scheduler"),
        "logical_block_bytes": read_text(folder / "queue/logical_block_size"),
        "max_request_kib": read_text(folder / "queue/max_sectors_kb"),
    }


def o_direct_support(directory: str | os.PathLike[str]) -> tuple[bool | None, str]:
    """Whether files in `directory` open with O_DIRECT, and how we know. None: cannot be tried,
    because no file can be made there."""
    try:
        descriptor, name = tempfile.mkstemp(prefix=".espnx-probe-", dir=directory)
    except OSError as error:
        return None, f"no file can be made in {os.fspath(directory)}: {error.strerror}"
    os.close(descriptor)
    try:
        os.close(os.open(name, os.O_RDWR | os.O_DIRECT))
        return True, "open with O_DIRECT succeeded"
    except OSError as error:
        return (
            False,
            f"open with O_DIRECT failed: {errno.errorcode.get(error.errno or 0, error.errno)}",
        )
    finally:
        os.unlink(name)


def cpu() -> dict[str, object]:
    """Model name, cores, the cores this process may use, and the instruction sets that espnx looks
    at."""
    text = read_text("/proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.*)$", text, re.MULTILINE)
    flags = re.search(r"^flags\s*:\s*(.*)$", text, re.MULTILINE)
    present = set(flags.group(1).split()) if flags else set()
    return {
        "model": model.group(1) if model else None,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)),
        "flags": [flag for flag in CPU_FLAGS if flag in present],
    }


def memory_bytes() -> dict[str, int]:
    """Total, available and swap memory."""
    values = dict(
        re.findall(r"^(\w+):\s+(\d+) kB$", read_text("/proc/meminfo") or "", re.MULTILINE)
    )
    names = {"MemTotal": "total", "MemAvailable": "available", "SwapTotal": "swap"}
    return {name: int(values[key]) * 1024 for key, name in names.items() if key in values}


def cgroup_limits() -> dict[str, str | None]:
    """Memory, CPU and I/O limits of the control group that we see at the top (version 2 or 1); None
    where there is none."""
    files = {
        "memory": ("memory.max", "memory/memory.limit_in_bytes"),
        "cpu": ("cpu.max", "cpu/cpu.cfs_quota_us"),
        "io": ("io.max", "blkio/blkio.throttle.read_bps_device"),
    }
    top = Path("/sys/fs/cgroup")
    return {
        name: next((text for file in choices if (text := read_text(top / file))), None)
        for name, choices in files.items()
    }


def usable_memory_bytes() -> int | None:
    """What programs may take now: memory that is available, and no more than the control group
    allows. None where nothing says so."""
    limit = cgroup_limits()["memory"]
    known = [
        memory_bytes().get("available"),
        int(limit) if limit is not None and limit.isdigit() else None,
    ]
    return min((size for size in known if size is not None), default=None)


def mapped_libraries(maps: str | None = None) -> list[str]:
    """Paths of the libraries of interest that are mapped into a process (this one, or the text of a
    /proc/PID/maps)."""
    text = (read_text("/proc/self/maps") if maps is None else maps) or ""
    paths = {
        line.split(maxsplit=5)[5] for line in text.splitlines() if len(line.split(maxsplit=5)) == 6
    }
    return sorted(
        path for path in paths if any(Path(path).name.startswith(name) for name in LIBRARIES)
    )
