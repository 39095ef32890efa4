"""``espnx doctor``: the table, isolated checks, exit codes, and what it says where things are
missing."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from espnx import errors
from espnx.cli import host
from espnx.cli.checks import (
    FAIL,
    INFO,
    NA,
    PASS,
    WARN,
    Check,
    disk,
    gpu,
    run_checks,
    software,
    speed,
)
from espnx.cli.commands.machine.doctor import render_checks
from espnx.cli.main import main
from tests.cli.documents import strict_json

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def a_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Speeds are measured, but not for long."""
    monkeypatch.setattr(speed, "FILE_BYTES", 4 << 20)
    monkeypatch.setattr(speed, "RUN_S", 0.01)
    speed.measure.cache_clear()


def doctor(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    code = main(["doctor", *words])
    return code, capsys.readouterr().out


def test_this_machine_passes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = tmp_path / "report.json"
    target = tmp_path / "target"
    target.mkdir()
    code, out = doctor(capsys, "--path", str(target), "--json", str(report))
    document = strict_json(report.read_text())
    by_name = {check["name"]: check for check in document["checks"]}
    assert code == 0, out
    header = "MOUNT FS DEVICE O_DIRECT REQUESTED EFFECTIVE ALIGN READ MB/s 4K READS/s"
    assert " ".join(out.splitlines()[0].split()) == header
    assert document["mount"]["read_bytes_per_s"] > 0
    assert document["mount"]["reads_4k_per_s"] == round(
        by_name["speed"]["evidence"]["reads_4k_per_s"]
    )
    assert out.splitlines()[-1].startswith(
        f"{document['passed']} passed, {document['warnings']} warning"
    )
    assert out.splitlines()[-1].endswith(", 0 failed")
    assert document["schema_version"] == 1
    assert document["command"] == "doctor"
    assert document["mount"]["effective"].split()[0] in ("uring", "posix")
    assert by_name["probe"]["status"] == PASS
    assert by_name["probe"]["evidence"]["bytes_asked"] == disk.PROBE_BYTES
    assert by_name["probe"]["evidence"]["same"] is True
    assert "liburing is not needed" in by_name["liburing"]["says"]
    assert list(target.iterdir()) == []  # every probe file is gone


def test_without_a_gpu_nothing_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "present", lambda: False)
    assert {check.status for check in run_checks(gpu.CHECKS)} == {NA}


def test_a_path_that_is_no_directory_is_wrong_usage(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", "--path", str(tmp_path / "absent")]) == 2
    assert "existing directory" in capsys.readouterr().err


def test_a_broken_check_is_a_finding_and_stops_no_other() -> None:
    def broken_one() -> Check:
        raise RuntimeError("boom")

    found = run_checks([broken_one, software.python])
    assert [(check.status, check.name) for check in found] == [
        (FAIL, "broken-one"),
        (PASS, "python"),
    ]
    assert "boom" in found[0].says


@pytest.mark.parametrize(
    "body",
    [
        "raise OSError('libtorch_cpu.so: cannot open')",
        "raise ImportError('wrong build')",
        "x = 1 / 0",
    ],
)
def test_works_when_torch_is_broken(tmp_path: Path, body: str) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(body + "\n")
    code = (
        "import sys; sys.path.insert(0, '.'); from espnx.cli.main import main; "
        "sys.exit(main(['doctor', '--json', '-']))"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 1, done.stderr
    statuses = {check["name"]: check["status"] for check in json.loads(done.stdout)["checks"]}
    assert [statuses[name] for name in ("torch", "extension", "io-uring", "probe")] == [FAIL] * 4
    assert statuses["python"] == statuses["free-space"] == PASS
    assert "broke" not in done.stdout.split('"name": "torch"')[0]


def test_old_torch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch, "__version__", "2.10.1+cpu")
    assert software.torch().status == FAIL
    monkeypatch.setattr(torch, "__version__", "2.11.0a0+git123")
    assert software.torch().status == PASS


def test_a_missing_extension_says_how_to_build_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "espnx._C", None)
    found = software.extension()
    assert found.status == FAIL
    assert "make setup" in found.fix


def test_missing_optional_packages_warn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(software.util, "find_spec", lambda name: None)
    assert [software.faiss().status, software.triton().status, software.encoder().status] == [
        WARN,
        INFO,
        INFO,
    ]


@pytest.mark.parametrize(
    ("policy", "status"), [(None, INFO), ("ACTIVE", WARN), ("active", WARN), ("passive", PASS)]
)
def test_openmp_waiting(monkeypatch: pytest.MonkeyPatch, policy: str | None, status: str) -> None:
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if policy:
        monkeypatch.setenv("OMP_WAIT_POLICY", policy)
    assert software.openmp_waiting().status == status


class WithoutUring:
    """Stands for espnx.storage on a machine whose kernel refuses io_uring."""

    @staticmethod
    def open_engine(path: str) -> None:
        raise errors.PathUnavailableError("io_uring_setup failed", got="Operation not permitted")


def test_io_uring_refused_is_a_warning_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(disk, "storage_module", WithoutUring)
    found = disk.io_uring()
    assert found.status == WARN
    assert "seccomp" in found.fix
    monkeypatch.setattr(host, "read_text", lambda path: "2")
    assert "sysctl -w kernel.io_uring_disabled=0" in disk.io_uring().fix


@pytest.mark.parametrize(
    ("answer", "status"),
    [((True, "ok"), PASS), ((False, "EINVAL"), WARN), ((None, "read-only"), FAIL)],
)
def test_o_direct(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, answer: tuple[bool | None, str], status: str
) -> None:
    monkeypatch.setattr(host, "o_direct_support", lambda directory: answer)
    assert disk.o_direct(str(tmp_path)).status == status


@pytest.mark.parametrize(
    ("kind", "status", "said"),
    [
        ("ext4", PASS, "ext4 on nvme0n1"),
        ("tmpfs", WARN, "tmpfs is memory"),
        ("overlay", WARN, "overlay is a container's own"),
        ("nfs4", WARN, "not a disk of this machine"),
        ("fuse.sshfs", WARN, "not a disk of this machine"),
    ],
)
def test_file_systems(monkeypatch: pytest.MonkeyPatch, kind: str, status: str, said: str) -> None:
    monkeypatch.setattr(
        host,
        "mount_of",
        lambda path: host.Mount(
            "/mnt", kind, "source", "rw", "nvme0n1" if kind == "ext4" else None
        ),
    )
    found = disk.file_system("/mnt")
    assert (found.status, bool(found.fix)) == (status, status == WARN)
    assert said in found.says


@pytest.mark.parametrize(("value", "status"), [("0", PASS), ("1", WARN), (None, NA)])
def test_disks_that_say_that_they_rotate(
    monkeypatch: pytest.MonkeyPatch, value: str | None, status: str
) -> None:
    monkeypatch.setattr(
        host, "mount_of", lambda path: host.Mount("/mnt", "ext4", "/dev/sda1", "rw", "sda1")
    )
    monkeypatch.setattr(host, "disk_of", lambda device: {"disk": "sda", "rotational": value})
    found = disk.rotational("/mnt")
    assert found.status == status
    assert ("/sys/block/sda/queue/rotational" in found.fix) == (status == WARN)


@pytest.mark.parametrize(("rate", "status"), [(150.0, WARN), (40_000.0, PASS)])
def test_slow_disks_warn(monkeypatch: pytest.MonkeyPatch, rate: float, status: str) -> None:
    monkeypatch.setattr(
        speed, "measure", lambda directory: speed.DiskSpeed(2e8, 1e8, rate, 1e-4, "uring")
    )
    found = speed.speed("/mnt")
    assert (found.status, found.says) == (
        status,
        f"200 MB/s read, {rate:,.0f} random reads of 4 KiB a second, by uring",
    )


def test_a_disk_that_cannot_be_measured(tmp_path: Path) -> None:
    found = speed.speed(str(tmp_path / "absent"))
    assert (found.status, "could not be measured" in found.says) == (WARN, True)


def test_little_space_and_little_locked_memory_warn(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(disk, "FREE_BYTES_LOW", 1 << 62)
    assert disk.free_space(str(tmp_path)).status == WARN
    for soft, status in ((64 << 10, WARN), (8 << 20, PASS), (resource.RLIM_INFINITY, PASS)):
        monkeypatch.setattr(resource, "getrlimit", lambda which, soft=soft: (soft, soft))
        assert disk.locked_memory().status == status


def test_a_probe_in_an_impossible_place_fails() -> None:
    assert disk.probe("/proc").status == FAIL
    assert disk.effective_path("/proc")["engine"] is None


def test_a_flipped_bit_is_seen_by_the_probe(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from espnx import storage

    class Flipping:
        """espnx.storage with an engine that flips one bit of the first read."""

        Plan = storage.Plan

        @staticmethod
        def open_engine(path: str) -> storage.NativeEngine:
            return storage.FaultyEngine(
                [storage.FaultRule(fault="flip", operation="read", value=12345, count=1)], path
            )

    monkeypatch.setattr(disk, "storage_module", Flipping)
    found = disk.probe(str(tmp_path))
    assert found.status == FAIL
    assert "not what was written" in found.says


def test_why_fix_and_evidence_are_printed_where_they_help() -> None:
    text = render_checks(
        [
            Check(PASS, "good", "fine", evidence={"a": 1}),
            Check(WARN, "slow", "so so", "because", "do that", {"b": 2}),
        ]
    )
    assert text.splitlines() == [
        "PASS  good                 fine",
        "WARN  slow                 so so",
        "      why: because",
        "      fix: do that",
        "      evidence: b=2",
    ]
