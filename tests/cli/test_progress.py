"""Lines and bars of progress: something from the first moment, rates of what was done here, totals
that may be wrong."""

from __future__ import annotations

import io
import sys
import time

import pytest

from espnx.cli.progress import ProgressLine


class Clock:
    """Stands for `time.monotonic`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr("espnx.cli.progress.time.monotonic", made)
    return made


def test_lines(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    with ProgressLine() as progress:
        with progress.loading("encoder minilm"):
            pass
        for at, done in ((0, 256), (2, 300), (9, 320), (11, 366), (12, 400), (21, 456)):
            clock.now = 1000.0 + at
            progress.update("spool", done, 600)
        clock.now = 1030.0
        progress.update("write", 0, None)
        clock.now = 1041.0
        progress.update("write", 3, None)
    assert capsys.readouterr().err.splitlines() == [
        "loading encoder minilm ...",
        "spool: 256 of 600",
        "spool: 366 of 600, 10/s, 23 s left",
        "spool: 456 of 600, 9.5/s, 15 s left",
        "write: 0",
        "write: 3, 0.27/s",
    ]


def test_the_end_of_a_phase_is_said(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where it is another one than was expected."""
    with ProgressLine() as progress:
        progress.update("spool", 0, 3)
        clock.now += 1
        progress.update("spool", 5, 3)
        progress.update("arrange", 0, 5)
        clock.now += 1
        progress.update("arrange", 4, 5)
    assert capsys.readouterr().err.splitlines() == [
        "spool: 0 of 3",
        "spool: 5 of 5, 5/s",
        "arrange: 0 of 5",
        "arrange: 4 of 5, 4/s, 0 s left",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_says_the_time_left_after_the_first_piece(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("rich", reason="rich is not installed (extra [bench])")
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressLine() as progress:
        progress.update("spool", 0, 3000)
        clock.now += 1
        progress.update("spool", 16, 3000)
    assert "0:03:06 left" in shown.getvalue()
    assert "-:--:--" not in shown.getvalue()


def test_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a terminal; without a known end there is none that could look full."""
    pytest.importorskip("rich", reason="rich is not installed (extra [bench])")

    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "100")
    with ProgressLine() as progress:
        with progress.loading("encoder minilm"):
            time.sleep(0.15)
        progress.update("spool", 0, None)
        progress.update("spool", 171, None)
        time.sleep(0.15)
        assert "171" in shown.getvalue()
        assert "━" not in shown.getvalue()
        progress.update("write", 10, 20)
        time.sleep(0.15)
    text = shown.getvalue()
    assert "loading encoder minilm" in text
    assert "━" in text
    assert "10/20" in text
