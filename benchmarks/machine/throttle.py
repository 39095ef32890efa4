"""Slows a disk to a known rate for this process and its children: cgroup v1 ``blkio.throttle``,
which makes long reads repeat to 1 %."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

from espnx.errors import InvalidInputError, PathUnavailableError
from espnx.sizes import parse_size

PREFIX = "espnx-bench-"
_FIX = "run as root on a machine with cgroup v1's blkio controller, or leave --throttle out"


def parse_rate(text: str) -> int:
    """Bytes per second from ``800MB/s`` (the ``/s`` may be left out). Raises InvalidInputError."""
    rate = parse_size(text.strip().removesuffix("/s"))
    if rate <= 0:
        raise InvalidInputError(
            "the rate of a throttle", got=repr(text), expected="more than 0, such as 800MB/s"
        )
    return rate


def disk_numbers(path: Path, sys_root: Path = Path("/sys")) -> str:
    """``major:minor`` of the whole disk that holds `path` (a partition cannot be throttled). Raises
    PathUnavailableError."""
    device = os.stat(path).st_dev
    numbers = f"{os.major(device)}:{os.minor(device)}"
    folder = sys_root / "dev/block" / numbers
    if not folder.exists():
        raise PathUnavailableError(
            "cannot throttle: no block device behind the directory",
            got=f"device {numbers}",
            fix="name another directory with --path",
        )
    folder = folder.resolve()
    return (
        ((folder.parent if (folder / "partition").exists() else folder) / "dev").read_text().strip()
    )


def blkio_group(mounts: str, membership: str) -> Path:
    """This process's group of the blkio controller, from the texts of /proc/self/mounts and
    /proc/self/cgroup."""
    mount = re.search(r"^\S+ (\S+) cgroup \S*\bblkio\b", mounts, re.MULTILINE)
    group = re.search(r"^\d+:(?:\S*,)?blkio(?:,\S*)?:(/.*)$", membership, re.MULTILINE)
    if mount is None or group is None:
        raise PathUnavailableError(
            "cannot throttle: cgroup v1's blkio controller is not mounted", fix=_FIX
        )
    return Path(mount.group(1) + group.group(1).rstrip("/"))


@contextlib.contextmanager
def throttled(path: Path, bytes_per_s: int, process: int | None = None) -> Iterator[None]:
    """Limits reads and writes of this process, and of those that it starts meanwhile, to
    `bytes_per_s` on the disk of `path`. The group goes away on every way out but SIGKILL; what a
    killed run left is removed by the next one.

    Args:
        process: the number of one that is slowed down instead.

    Raises:
        PathUnavailableError: not root, no such controller, or no block device.
    """
    slowed = str(os.getpid() if process is None else process)
    numbers = disk_numbers(path)
    parent = blkio_group(
        Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
    )
    remove_stale(parent)
    group = parent / f"{PREFIX}{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        raise PathUnavailableError(
            "cannot throttle: no group can be made", got=error.strerror, fix=_FIX
        ) from error
    with _sigterm_unwinds():
        try:
            for operation in ("read", "write"):
                _tell_kernel(
                    group / f"blkio.throttle.{operation}_bps_device", f"{numbers} {bytes_per_s}"
                )
            _tell_kernel(group / "cgroup.procs", slowed)
            yield
        finally:
            with contextlib.suppress(ProcessLookupError):  # it has ended
                (parent / "cgroup.procs").write_text(slowed)
            group.rmdir()


def _tell_kernel(file: Path, text: str) -> None:
    try:
        file.write_text(text)
    except OSError as error:
        raise PathUnavailableError(
            "cannot throttle: the kernel refused",
            got=f"{error.strerror} for {text!r} in {file.name}",
            fix=_FIX,
        ) from error


def remove_stale(parent: Path) -> None:
    """Removes groups of runs that were killed."""
    for group in parent.glob(f"{PREFIX}*"):
        if not Path("/proc", group.name.removeprefix(PREFIX)).exists():
            with contextlib.suppress(OSError):  # a child of the killed run may still be in it
                group.rmdir()


@contextlib.contextmanager
def _sigterm_unwinds() -> Iterator[None]:
    """Makes SIGTERM run the cleaning up on its way out, where handlers can be set (the main
    thread)."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def leave(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
