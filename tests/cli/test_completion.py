"""``espnx completion``: what bash offers for what was typed, and scripts of the other shells that know every command."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from espnx.cli.main import main
from espnx.cli.registry import COMMANDS

pytest.importorskip("shtab", reason="shtab is not installed (extra [completion])")

#: The words of a line, and what the shell is to offer for the last of them.
_ASK = """
source "$1"; shift
COMP_WORDS=("$@") COMP_CWORD=$(($# - 1))
_shtab_espnx espnx "${COMP_WORDS[COMP_CWORD]}" "${COMP_WORDS[COMP_CWORD-1]}"
printf '%s\\n' "${COMPREPLY[@]}"
"""


def script(shell: str, capsys: pytest.CaptureFixture[str]) -> str:
    assert main(["completion", shell]) == 0
    return capsys.readouterr().out


@pytest.mark.skipif(shutil.which("bash") is None, reason="there is no bash")
def test_bash_offers_commands_options_and_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "espnx.bash").write_text(script("bash", capsys))
    (tmp_path / "my.index").mkdir()
    for line, offered in (
        ("espnx sea", ["search"]),
        ("espnx index bu", ["build"]),
        ("espnx index build x --corpus-", ["--corpus-format"]),
        ("espnx index build x --encoder-dtype ", ["fp32", "bf16"]),
        ("espnx search my", ["my.index"]),
        ("espnx generate --storage my", ["my.index"]),
        ("espnx completion f", ["fish"]),
    ):
        words = ["bash", "--norc", "-c", _ASK, "bash", str(tmp_path / "espnx.bash"), *line.split(" ")]
        said = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=30)
        assert said.stdout.split() == offered, (line, said.stderr)


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_scripts_know_every_command(shell: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = script(shell, capsys)
    assert all(key.split()[-1] in text for key in COMMANDS)
    assert {"zsh": "#compdef espnx", "fish": "complete -c espnx"}[shell] in text
    if shutil.which(shell):
        assert subprocess.run([shell, "-n"], input=text, text=True, capture_output=True, timeout=30).returncode == 0


def test_without_shtab_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setitem(sys.modules, "shtab", None)
    assert main(["completion", "bash"]) == 1
    assert "pip install shtab" in capsys.readouterr().err
