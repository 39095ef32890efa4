"""Memory limits for a benchmark's processes: control groups, version 1 or 2 (root)."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from espnx.errors import PathUnavailableError

PREFIX = "espnx-bench-memory-"
_FIX = "run as root on a machine with memory control groups, or measure with ample memory"
_LIMIT = {1: "memory.limit_in_bytes", 2: "memory.max"}
_PEAK = {1: "memory.max_usage_in_bytes", 2: "memory.peak"}


@dataclass(frozen=True)
class Hierarchy:
    """A version of the interface, and a directory in which a group of ours can be made."""

    version: int
    parent: Path


def find_hierarchy(mounts: str, own: str, root: Path = Path("/")) -> Hierarchy:
    """Finds it in the text of /proc/self/mounts and /proc/self/cgroup; `root` is put before every
    path (for tests).

    Version 1: the caller's own group, whose limits go on to hold. Version 2: the nearest group
    above the caller that hands the memory controller down, because a group with processes may not.

    Raises PathUnavailableError.
    """
    mounted = [line.split() for line in mounts.splitlines()]
    groups = [line.split(":", 2) for line in own.splitlines() if line.count(":") >= 2]
    for _, place, kind, options, *_ in mounted:
        if kind == "cgroup" and "memory" in options.split(","):
            path = next((group for _, names, group in groups if "memory" in names.split(",")), "/")
            return Hierarchy(1, _inside(root, place, path))
    for _, place, kind, *_ in mounted:
        if kind != "cgroup2":
            continue
        path = next((group for number, _, group in groups if number == "0"), "/")
        for candidate in (group := _inside(root, place, path), *group.parents):
            if _hands_memory_down(candidate):
                return Hierarchy(2, candidate)
            if candidate == _inside(root, place, "/"):
                break
    raise PathUnavailableError(
        "cannot limit memory: no memory controller", got="no usable control group", fix=_FIX
    )


def _inside(root: Path, place: str, path: str) -> Path:
    return root / place.lstrip("/") / path.lstrip("/")


def _hands_memory_down(group: Path) -> bool:
    try:
        return "memory" in (group / "cgroup.subtree_control").read_text().split()
    except OSError:
        return False


@dataclass(frozen=True)
class MemoryGroup:
    """A group with a limit. A process that writes its number to `procs` is limited from then on,
    page cache of its reads included."""

    version: int
    path: Path

    @property
    def procs(self) -> Path:
        return self.path / "cgroup.procs"

    @property
    def limit(self) -> Path:
        return self.path / _LIMIT[self.version]

    def peak_bytes(self) -> int | None:
        """The most that was charged, None where the kernel does not say."""
        try:
            return int((self.path / _PEAK[self.version]).read_text())
        except (OSError, ValueError):
            return None


@contextlib.contextmanager
def memory_group(
    name: str, limit_bytes: int, hierarchy: Hierarchy | None = None
) -> Iterator[MemoryGroup]:
    """A new group, removed at the end; its processes must have ended by then.

    Raises PathUnavailableError: not root, or no such controller.
    """
    if hierarchy is None:
        hierarchy = find_hierarchy(
            Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
        )
    _remove_stale(hierarchy.parent)
    group = MemoryGroup(hierarchy.version, hierarchy.parent / f"{PREFIX}{os.getpid()}-{name}")
    try:
        group.path.mkdir()
        group.limit.write_text(str(limit_bytes))
    except OSError as error:
        _remove(group.path)
        raise PathUnavailableError(
            "cannot limit memory", got=f"{error.strerror} in {group.path.parent}", fix=_FIX
        ) from error
    try:
        yield group
    finally:
        _remove(group.path)


def check_limit_possible(limit_bytes: int) -> None:
    """Raises PathUnavailableError now, rather than after minutes of building, where memory cannot
    be limited."""
    with memory_group("check", limit_bytes):
        pass


def _remove(path: Path) -> None:
    for _ in range(50):  # a process that has just ended is still in it for a moment
        try:
            path.rmdir()
            return
        except FileNotFoundError:
            return
        except OSError:
            time.sleep(0.02)


def _remove_stale(parent: Path) -> None:
    """Removes groups of runs that were killed."""
    for path in parent.glob(f"{PREFIX}*"):
        if not Path("/proc", path.name.removeprefix(PREFIX).split("-")[0]).exists():
            _remove(path)
