"""scripts/head_to_head.sh: what it installs, and that it measures nothing where only that was asked
for. The network is not needed."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "head_to_head.sh"


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One whose Python makes environments in which only PyLate can be installed, and otherwise
    writes down what it was to run."""
    python = tmp_path / ".venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.write_text(
        "#!/bin/sh\n"
        'case "$*" in\n'
        '  "-m venv "*) mkdir -p "$3/bin" "$3/lib/python3/site-packages"; cp "$0" "$3/bin/python" '
        ";;\n"
        '  "-m pip "*pylate*) ;;\n'
        '  "-m pip "*) echo no such package; exit 1 ;;\n'
        f'  *) echo "$*" >> {tmp_path}/ran ;;\n'
        "esac\n"
    )
    python.chmod(0o755)
    (tmp_path / "scripts").mkdir()
    shutil.copy(SCRIPT, tmp_path / "scripts")
    return tmp_path


def run(checkout: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [checkout / "scripts" / SCRIPT.name, *words], capture_output=True, text=True, timeout=60
    )


def test_environments_alone(checkout: Path) -> None:
    """What cannot be installed is said, and leaves none; what is there is not installed again."""
    first, second = run(checkout, "search", "--prepare"), run(checkout, "search", "--prepare")
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert "fast-plaid could not be installed: no such package" in first.stderr
    assert first.stderr.endswith("ready: pylate\n")
    assert "pylate is installed" in first.stderr
    assert "pylate is installed" not in second.stderr
    assert sorted(path.name for path in (checkout / ".cache" / "head-to-head").iterdir()) == [
        "fast-plaid.log",
        "pylate",
        "pylate.log",
    ]
    assert not (checkout / "ran").exists()


def test_options_are_those_of_the_benchmark(checkout: Path) -> None:
    assert run(checkout, "search", "--quick", "--time-limit", "5").returncode == 0
    ran = (checkout / "ran").read_text().splitlines()
    assert len(ran) == 1
    assert ran[0].startswith(
        "-m espnx bench head-to-head search --environments .cache/head-to-head "
    )
    assert ran[0].endswith(" --quick --time-limit 5")


def test_help_and_wrong_usage(checkout: Path) -> None:
    assert "--prepare" in run(checkout, "--help").stdout
    assert [run(checkout, word).returncode for word in ("--help", "sarch")] == [0, 1]
    assert not (checkout / "ran").exists()
