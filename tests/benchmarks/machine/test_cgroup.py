"""Memory groups: where they are made, on trees of files that stand for the kernel's."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from espnx.benchmarks.machine.cgroup import (
    PREFIX,
    Hierarchy,
    MemoryGroup,
    find_hierarchy,
    memory_group,
)
from espnx.errors import PathUnavailableError

V1_MOUNTS = """tmpfs /sys/fs/cgroup tmpfs rw 0 0
cgroup /sys/fs/cgroup/cpu cgroup rw,relatime,cpu 0 0
cgroup /sys/fs/cgroup/memory cgroup rw,relatime,memory 0 0
cgroup2 /sys/fs/cgroup/unified cgroup2 rw,relatime 0 0
"""
V1_OWN = "8:cpu:/other\n4:memory:/user/one\n0::/\n"
V2_MOUNTS = "cgroup2 /sys/fs/cgroup cgroup2 rw,nsdelegate 0 0\n"
V2_OWN = "0::/user.slice/one/two\n"


def control(group: Path, *names: str) -> None:
    group.mkdir(parents=True, exist_ok=True)
    (group / "cgroup.subtree_control").write_text(" ".join(names) + "\n")


def test_version_1_takes_the_callers_own_group(tmp_path: Path) -> None:
    assert find_hierarchy(V1_MOUNTS, V1_OWN, tmp_path) == Hierarchy(
        1, tmp_path / "sys/fs/cgroup/memory/user/one"
    )


def test_version_1_without_a_group_of_its_own_takes_the_root() -> None:
    assert find_hierarchy(V1_MOUNTS, "0::/\n") == Hierarchy(1, Path("/sys/fs/cgroup/memory"))


def test_version_2_goes_up_to_where_memory_is_handed_down(tmp_path: Path) -> None:
    root = tmp_path / "sys/fs/cgroup"
    control(root / "user.slice/one/two")
    control(root / "user.slice/one", "cpu")
    control(root / "user.slice", "cpu", "memory")
    control(root, "cpu", "memory")
    assert find_hierarchy(V2_MOUNTS, V2_OWN, tmp_path) == Hierarchy(2, root / "user.slice")


def test_version_2_never_leaves_the_mount(tmp_path: Path) -> None:
    control(tmp_path / "sys/fs", "memory")
    control(tmp_path / "sys/fs/cgroup/user.slice/one/two")
    control(tmp_path / "sys/fs/cgroup")
    with pytest.raises(PathUnavailableError, match="no memory controller"):
        find_hierarchy(V2_MOUNTS, V2_OWN, tmp_path)


@pytest.mark.parametrize(
    "mounts", ["", "cgroup /sys/fs/cgroup/cpu cgroup rw,cpu 0 0\n", "proc /proc proc rw 0 0\n"]
)
def test_no_controller_is_an_error_that_says_what_to_do(mounts: str) -> None:
    with pytest.raises(PathUnavailableError, match="ample memory"):
        find_hierarchy(mounts, V1_OWN)


@pytest.mark.parametrize(("version", "name"), [(1, "memory.limit_in_bytes"), (2, "memory.max")])
def test_the_limit_is_written_where_the_version_wants_it(
    tmp_path: Path, version: int, name: str
) -> None:
    with memory_group("one", 12345, Hierarchy(version, tmp_path)) as group:
        assert (group.path / name).read_text() == "12345"
        assert group.procs.parent.name == f"{PREFIX}{os.getpid()}-one"
        # the kernel's files go with their directory; these would keep it
        (group.path / name).unlink()
    assert list(tmp_path.iterdir()) == []


def test_a_group_that_cannot_be_made_is_an_error(tmp_path: Path) -> None:
    with (
        pytest.raises(PathUnavailableError, match="cannot limit memory"),
        memory_group("one", 1, Hierarchy(1, tmp_path / "missing")),
    ):
        pass


def test_groups_of_killed_runs_are_removed_and_of_living_ones_kept(tmp_path: Path) -> None:
    dead, alive = tmp_path / f"{PREFIX}999999999-x", tmp_path / f"{PREFIX}{os.getpid()}-y"
    dead.mkdir()
    alive.mkdir()
    with memory_group("one", 1, Hierarchy(2, tmp_path)) as group:
        assert not dead.exists()
        assert alive.exists()
        (group.path / "memory.max").unlink()


def test_the_peak_is_none_where_the_kernel_does_not_say(tmp_path: Path) -> None:
    group = MemoryGroup(2, tmp_path)
    assert group.peak_bytes() is None
    (tmp_path / "memory.peak").write_text("77\n")
    assert group.peak_bytes() == 77
