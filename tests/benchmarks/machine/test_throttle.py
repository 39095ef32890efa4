"""The throttle: rates, the right disk and group, and no trace of it afterwards."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from espnx.benchmarks.machine import throttle
from espnx.benchmarks.machine.throttle import (
    blkio_group,
    disk_numbers,
    parse_rate,
    remove_stale,
    throttled,
)
from espnx.errors import InvalidInputError, PathUnavailableError

MOUNTS = (
    "proc /proc proc rw 0 0\ncgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n"
    "cgroup /sys/fs/cgroup/blkio cgroup rw,relatime,blkio 0 0\n"
)


@pytest.mark.parametrize(
    ("text", "rate"),
    [
        ("800MB/s", 800_000_000),
        ("800MB", 800_000_000),
        ("1.5 GiB/s", 3 << 29),
        (" 64KiB/s ", 65536),
        ("1000", 1000),
    ],
)
def test_rates(text: str, rate: int) -> None:
    assert parse_rate(text) == rate


@pytest.mark.parametrize("text", ["", "0", "fast", "800Mb/m", "-1MB/s", "/s"])
def test_what_is_no_rate(text: str) -> None:
    with pytest.raises(InvalidInputError):
        parse_rate(text)


@pytest.mark.parametrize(
    ("membership", "group"),
    [
        ("7:blkio:/\n0::/\n", "/sys/fs/cgroup/blkio"),
        ("3:cpu,cpuacct:/a\n7:blkio:/jobs/12\n0::/\n", "/sys/fs/cgroup/blkio/jobs/12"),
        ("7:net_cls,blkio:/b\n", "/sys/fs/cgroup/blkio/b"),
    ],
)
def test_the_group_of_this_process(membership: str, group: str) -> None:
    assert blkio_group(MOUNTS, membership) == Path(group)


@pytest.mark.parametrize(
    ("mounts", "membership"),
    [("", "7:blkio:/\n"), (MOUNTS, "0::/\n"), (MOUNTS.replace("blkio", "io"), "7:blkio:/\n")],
)
def test_machines_without_the_controller(mounts: str, membership: str) -> None:
    with pytest.raises(PathUnavailableError, match="cgroup v1"):
        blkio_group(mounts, membership)


def test_a_partition_is_throttled_through_its_disk(tmp_path: Path) -> None:
    device = os.stat(tmp_path).st_dev
    disk, partition = tmp_path / "devices/disk", tmp_path / "devices/disk/disk1"
    partition.mkdir(parents=True)
    (disk / "dev").write_text("8:0\n")
    (partition / "dev").write_text("8:1\n")
    (tmp_path / "dev/block").mkdir(parents=True)
    link = tmp_path / f"dev/block/{os.major(device)}:{os.minor(device)}"
    link.symlink_to(partition)
    assert disk_numbers(tmp_path, tmp_path) == "8:1"
    (partition / "partition").write_text("1\n")
    assert disk_numbers(tmp_path, tmp_path) == "8:0"
    link.unlink()
    with pytest.raises(PathUnavailableError, match="no block device"):
        disk_numbers(tmp_path, tmp_path)


def test_groups_of_dead_processes_are_removed(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    for process in (ended.pid, os.getpid()):
        (tmp_path / f"espnx-bench-{process}").mkdir()
    remove_stale(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [f"espnx-bench-{os.getpid()}"]


def test_without_the_right_to_make_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(throttle, "disk_numbers", lambda path: "8:0")
    monkeypatch.setattr(
        throttle, "blkio_group", lambda mounts, membership: tmp_path / "read only" / "nowhere"
    )
    with pytest.raises(PathUnavailableError, match="root"), throttled(tmp_path, 1000):
        raise AssertionError("the body must not run unthrottled")


def group_of(process: int) -> Path:
    parent = blkio_group(
        Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text()
    )
    return parent / f"espnx-bench-{process}"


@pytest.fixture
def disk(tmp_path: Path) -> Path:
    """A directory on a real disk, on a machine whose kernel throttles."""
    try:
        blkio_group(Path("/proc/self/mounts").read_text(), Path("/proc/self/cgroup").read_text())
        disk_numbers(tmp_path)
    except PathUnavailableError as error:
        pytest.skip(
            "needs cgroup v1's blkio controller and a disk under the temporary directory: "
            f"{error.what}"
        )
    return tmp_path


@pytest.mark.root
def test_reads_keep_to_the_rate_and_the_group_goes_away(disk: Path) -> None:
    path = disk / "file"
    path.write_bytes(os.urandom(4 << 20))
    with open(path, "rb") as file:
        os.fsync(file.fileno())
    group = group_of(os.getpid())
    with pytest.raises(KeyError), throttled(disk, 20_000_000):
        assert str(os.getpid()) in (group / "cgroup.procs").read_text().split()
        begin = time.perf_counter()
        subprocess.run(
            ["dd", f"if={path}", "of=/dev/null", "bs=1M", "iflag=direct"],
            check=True,
            capture_output=True,
        )
        seconds = time.perf_counter() - begin
        raise KeyError("the group must go away on errors too")
    # 4.2 MB at 20 MB/s take 210 ms; the kernel grants up to two of its 50 ms slices ahead.
    assert seconds > 0.1
    assert not group.exists()


@pytest.mark.root
def test_sigterm_leaves_no_group_behind(disk: Path) -> None:
    code = (
        "import sys, time\nfrom pathlib import Path\n"
        "from espnx.benchmarks.machine.throttle import throttled\n"
        "with throttled(Path(sys.argv[1]), 10**9):\n    print('in', flush=True)\n"
        "    time.sleep(60)\n"
    )
    root = Path(__file__).resolve().parents[3]
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(disk)], cwd=root, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    assert child.stdout.readline() == "in\n"
    child.send_signal(signal.SIGTERM)
    assert child.wait(timeout=20) == 128 + signal.SIGTERM
    child.stdout.close()
    assert not group_of(child.pid).exists()
