"""Real devices that misbehave, for tests as root: loop devices over files, small file systems, a
throttled disk. Always taken down."""

from __future__ import annotations

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

MIB = 1 << 20


def command(*words: str | os.PathLike[str]) -> str:
    """Runs a system command; skips the test, with its complaint, where this machine refuses."""
    try:
        done = subprocess.run(
            [os.fspath(word) for word in words], capture_output=True, text=True, timeout=30
        )
    except FileNotFoundError:
        pytest.skip(f"[root] {words[0]} is not installed")
    if done.returncode != 0:
        pytest.skip(f"[root] {words[0]}: {done.stderr.strip().splitlines()[-1:]}")
    return done.stdout.strip()


def quietly(*words: str | os.PathLike[str]) -> None:
    subprocess.run([os.fspath(word) for word in words], capture_output=True, timeout=30)


@contextlib.contextmanager
def loop_device(backing: Path, size_bytes: int) -> Iterator[str]:
    with open(backing, "wb") as stream:
        stream.truncate(size_bytes)
    device = command("losetup", "--find", "--show", backing)
    try:
        yield device
    finally:
        quietly("losetup", "--detach", device)
        backing.unlink(missing_ok=True)


@contextlib.contextmanager
def mounted(kind: str, source: str, where: Path, options: str = "") -> Iterator[Path]:
    where.mkdir(exist_ok=True)
    command("mount", "-t", kind, *(["-o", options] if options else []), source, where)
    try:
        yield where
    finally:
        quietly("umount", where)
        quietly("umount", "--lazy", where)


@contextlib.contextmanager
def small_ext4(folder: Path, size_bytes: int) -> Iterator[tuple[Path, str]]:
    """A mounted ext4 of that size, and its loop device."""
    with loop_device(folder / "ext4.image", size_bytes) as device:
        command("mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-m", "0", device)
        with mounted("ext4", device, folder / "ext4") as where:
            yield where, device


@contextlib.contextmanager
def file_system(kind: str, folder: Path, size_bytes: int) -> Iterator[Path]:
    """A mounted ext4 or tmpfs of that size, empty."""
    if kind == "ext4":
        with small_ext4(folder, size_bytes) as (where, _):
            (where / "lost+found").rmdir()
            yield where
    else:
        with mounted("tmpfs", "espnx", folder / "tmpfs", f"size={size_bytes}") as where:
            yield where


def free_bytes(where: Path) -> int:
    found = os.statvfs(where)
    return found.f_bavail * found.f_frsize


def fill(where: Path, leave_bytes: int) -> Path:
    """A file that takes all but so many bytes; it grows when it is there."""
    ballast = where / "ballast"
    with open(ballast, "ab") as file:
        while free_bytes(where) > leave_bytes:
            try:
                file.write(bytes(min(MIB, max(4096, free_bytes(where) - leave_bytes))))
                file.flush()
                os.fsync(file.fileno())
            except OSError:
                break
    return ballast


@contextlib.contextmanager
def throttled(device: str, bytes_per_second: int) -> Iterator[tuple[Path, Path]]:
    """A control group whose members read that slowly from the device, and the file that sets (or,
    with 0, lifts) the limit."""
    group = Path("/sys/fs/cgroup/blkio") / f"espnx-test-{os.getpid()}"
    limit = group / "blkio.throttle.read_bps_device"
    number = os.stat(device).st_rdev
    try:
        group.mkdir()
        limit.write_text(f"{os.major(number)}:{os.minor(number)} {bytes_per_second}")
    except OSError as error:
        with contextlib.suppress(OSError):
            group.rmdir()
        pytest.skip(f"[root] no cgroup v1 blkio throttle: {error}")
    try:
        yield group, limit
    finally:
        with contextlib.suppress(OSError):
            limit.write_text(f"{os.major(number)}:{os.minor(number)} 0")
        with contextlib.suppress(OSError):
            group.rmdir()
