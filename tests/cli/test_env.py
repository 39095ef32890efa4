"""``espnx env`` and the facts about the host: parsed right, redacted, and there when torch is
broken."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from espnx.cli import host
from espnx.cli.commands.machine import env

ROOT = Path(__file__).resolve().parents[2]
MOUNTINFO = r"""22 1 259:1 / / rw,relatime shared:1 - ext4 /dev/nvme0n1p1 rw
40 22 0:35 / /mnt rw - tmpfs tmpfs rw
41 40 259:2 /sub /mnt/a\040b rw,noatime - xfs /dev/nvme1n1 rw
42 40 0:36 / /mnt/a\040b/deep rw - nfs4 server:/share rw
43 22 0:37 / /mnt rw - overlay overlay rw,lowerdir=/x
"""


@pytest.fixture
def broken_torch(tmp_path: Path) -> dict[str, str]:
    """An environment in which ``import torch`` fails as a wheel with a missing library does."""
    package = tmp_path / "torch"
    package.mkdir()
    (package / "__init__.py").write_text(
        "raise OSError('libtorch_cpu.so: cannot open shared object file')\n"
    )
    return os.environ | {"PYTHONPATH": str(tmp_path)}


def run_env(
    *words: str, environment: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-c",
        (
            "import sys; sys.path.insert(0, '.'); from espnx.cli.main import main; "
            "sys.exit(main(sys.argv[1:]))"
        ),
        "env",
    ]
    return subprocess.run(
        [*command, *words], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100
    )


def test_document_and_text_say_the_same() -> None:
    facts = env.collect()
    text = env.render(facts)
    assert set(facts) >= {
        "espnx",
        "python",
        "system",
        "cpu",
        "memory_bytes",
        "mount",
        "torch",
        "packages",
        "environment",
    }
    assert facts["torch"]["version"] in text
    assert any("libtorch_cpu" in path for path in facts["torch"]["mapped_libraries"])
    json.dumps(facts, allow_nan=False)


def test_works_when_torch_is_broken(broken_torch: dict[str, str]) -> None:
    done = run_env("--json", "-", environment=broken_torch)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document["schema_version"] == 1
    assert document["torch"] == {
        "error": "OSError: libtorch_cpu.so: cannot open shared object file"
    }
    assert document["packages"]["numpy"]


def test_is_standard_library_only() -> None:
    code = (
        "import sys; import espnx.cli.commands.machine.env; "
        "print([m for m in ('torch', 'numpy', 'rich', 'faiss') if m in sys.modules])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60
    )
    assert done.stdout.strip() == "[]"


def test_environment_shows_values_of_known_harmless_names_only() -> None:
    variables = {
        "ESPNX_DEBUG": "1",
        "OMP_NUM_THREADS": "2",
        "HF_TOKEN": "secret",
        "LD_PRELOAD": "x.so",
        "AWS_SECRET": "secret",
        "PATH": "secret",
    }
    assert env.environment(variables) == {
        "ESPNX_DEBUG": "1",
        "HF_TOKEN": "(set)",
        "LD_PRELOAD": "(set)",
        "OMP_NUM_THREADS": "2",
    }


def test_home_is_written_as_a_tilde() -> None:
    facts = {"a": ["/h/me/x", "/h/meme/x"], "b": {"c": "/h/me"}, "d": 3}
    assert env.without_home(facts, "/h/me") == {"a": ["~/x", "/h/meme/x"], "b": {"c": "~"}, "d": 3}
    assert env.without_home("/x", "/") == "/x"


@pytest.mark.parametrize(
    ("path", "point", "file_system"),
    [
        ("/", "/", "ext4"),
        ("/no/such/place", "/", "ext4"),
        ("/mntx", "/", "ext4"),
        ("/mnt", "/mnt", "overlay"),  # the later mount hides the earlier
        ("/mnt/a b/file", "/mnt/a b", "xfs"),
        ("/mnt/a b/deep/x", "/mnt/a b/deep", "nfs4"),
    ],
)
def test_mount_of(monkeypatch: pytest.MonkeyPatch, path: str, point: str, file_system: str) -> None:
    monkeypatch.setattr(host, "existing", str)
    mount = host.mount_of(path, MOUNTINFO)
    assert (mount.point, mount.file_system) == (point, file_system)


def test_mount_of_nothing_readable() -> None:
    assert host.mount_of("/", "").file_system == "unknown"


def test_existing_climbs_to_a_parent(tmp_path: Path) -> None:
    assert host.existing(tmp_path / "a" / "b") == str(tmp_path.resolve())


def test_mapped_libraries_with_spaces_in_paths() -> None:
    maps = (
        "7f00-7f01 r-xp 00000000 fd:00 1   /opt/a b/libcufile.so.0\n"
        "7f01-7f02 r-xp 00000000 fd:00 2   /usr/lib/libc.so.6\n"
        "7f02-7f03 rw-p 00000000 00:00 0\n7f03-7f04 r--p 00000000 fd:00 1   /opt/a "
        "b/libcufile.so.0\n"
    )
    assert host.mapped_libraries(maps) == ["/opt/a b/libcufile.so.0"]


def test_o_direct_probe_leaves_nothing_behind(tmp_path: Path) -> None:
    supported, evidence = host.o_direct_support(tmp_path)
    assert supported in (True, False)
    assert "O_DIRECT" in evidence
    assert list(tmp_path.iterdir()) == []
    assert host.o_direct_support(tmp_path / "absent")[0] is None


def test_facts_of_this_machine_are_plausible() -> None:
    cpu, memory = host.cpu(), host.memory_bytes()
    assert 1 <= int(str(cpu["usable_cores"])) <= int(str(cpu["cores"]))
    assert 0 < memory["available"] <= memory["total"]
