"""``espnx simulate``: answers for programs and for people, and wrong usage."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from espnx.cli.main import main
from espnx.simulate import validation
from tests.cli.documents import strict_json

COSMOS = ("simulate", "--system", "cosmos")


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> dict[str, Any]:
    assert main([*COSMOS, *words, "--json", "-"]) == 0
    return strict_json(capsys.readouterr().out)


@pytest.mark.parametrize("workload", ["sift", "spacev", "stress"])
def test_an_answer(workload: str, capsys: pytest.CaptureFixture[str]) -> None:
    found = answer(capsys, "--workload", workload, "--threads", "8")
    assert list(found["elements"]) == ["asynchronous", "synchronous", "conventional"]
    for each in found["elements"].values():
        assert each["threads"] == 8
        per_query = found["clusters_per_query"]
        assert (each["queries_per_s"] is None) == (workload == "stress") == (per_query is None)
        if per_query:
            assert each["queries_per_s"] == each["commands_per_s"] / per_query
    assert found["kind"] == "modelled"


def test_the_same_bytes_twice(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COSMOS, "--workload", "sift", "--threads", "4", "--json"]
    assert main([*words, str(tmp_path / "a.json")]) == 0
    text = capsys.readouterr().out
    assert main([*words, str(tmp_path / "b.json")]) == 0
    assert capsys.readouterr().out == text
    assert (tmp_path / "a.json").read_bytes() == (tmp_path / "b.json").read_bytes()
    assert "modelled" in text
    fast = json.loads((tmp_path / "a.json").read_text())["elements"]["asynchronous"]
    assert f"{fast['commands_per_s']:,.0f}" in text


def test_channels(capsys: pytest.CaptureFixture[str]) -> None:
    eight, four = (
        answer(capsys, "--workload", "stress", "--channels", str(n))["elements"]["synchronous"]
        for n in (8, 4)
    )
    assert four["commands_per_s"] < eight["commands_per_s"]


def test_validation(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    row = validation.Prediction("a.ratio", 2.0, 1.5, 2.5, "a part", "a table", {"without": 1.0})
    none = validation.NotPredicted("b.ratio", "no figure")
    check = {"id": "c", "measured": 3, "predicted": 4.0}
    made = validation.Validation((row, none), {"set_up_s": 1e-4}, {"a": 2.36}, check)
    monkeypatch.setattr(validation, "validate", lambda draws: made)
    assert main(["simulate", "--validation", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert [each["id"] for each in found["validation"]] == ["a.ratio", "b.ratio"]
    assert main(["simulate", "--validation"]) == 0
    text = capsys.readouterr().out
    assert "a.ratio" in text
    assert "no figure" in text
    assert "measured 3, predicted 4.0" in text


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["simulate"], "no --system"),
        (["simulate", "--system", "cosmos"], "no --workload"),
        (["simulate", "--system", "cosmo", "--workload", "sift"], "did you mean cosmos?"),
        ([*COSMOS, "--workload", "sieve"], "a workload; got sieve"),
        ([*COSMOS, "--workload", "sift", "--threads", "0"], "threads; got 0"),
        ([*COSMOS, "--workload", "sift", "--channels", "0"], "channels of flash; got 0"),
        ([*COSMOS, "--workload", "sift", "--seed", "-1"], "a seed; got -1"),
        (["simulate", "--validation", "--draws", "2"], "draws; got 2"),
    ],
)
def test_wrong_usage(words: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert said in " ".join(capsys.readouterr().err.split())
