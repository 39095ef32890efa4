"""``espnx postings``: built, searched, changed, shown and verified from a shell."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from espnx.cli.main import main
from tests.cli.documents import strict_json

TEXTS = ["The log is written by the device.", "A disk writes logs, and logs, and logs.", "Nothing of the kind."]


def write_corpus(path: Path) -> str:
    path.write_text("".join(json.dumps({"id": str(i), "text": text}) + "\n" for i, text in enumerate(TEXTS)))
    return str(path)


def test_build_search_change_info_verify(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("Stemmer")
    index, source = str(tmp_path / "x"), write_corpus(tmp_path / "c.jsonl")
    build = ["postings", "build", index, "--corpus", source, "--stemmer", "english", "--stop-words", "english"]
    assert main([*build, "--json", str(tmp_path / "b")]) == 0
    assert strict_json((tmp_path / "b").read_text())["n_records"] == 3
    capsys.readouterr()
    assert main(["postings", "search", index, "who writes to the log?", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert [hit["number"] for hit in found["results"][0]["hits"]] == [1, 0]
    assert main(["postings", "search", index, "log", "--variant", "bm25+", "--explain"]) == 0
    assert "log: 3 here" in capsys.readouterr().out
    assert main(["postings", "add", index, "--corpus", source]) == 0
    assert main(["postings", "delete", index, "0", "2", "2"]) == 0
    assert "2 deleted" in capsys.readouterr().out
    assert main(["postings", "compact", index, "--json", str(tmp_path / "c")]) == 0
    assert strict_json((tmp_path / "c").read_text())["changed"] is True
    assert main(["postings", "compact", index]) == 0
    assert "nothing to do" in capsys.readouterr().out
    assert main(["postings", "info", index, "--json", str(tmp_path / "i")]) == 0
    assert strict_json((tmp_path / "i").read_text())["n_records"] == 4
    assert main(["postings", "verify", index, "--json", str(tmp_path / "v")]) == 0
    assert strict_json((tmp_path / "v").read_text())["postings"] > 0
    assert main(build) == 2
    assert main(["postings", "build", str(tmp_path / "y")]) == 2
    assert main(["postings", "search", index]) == 2
    assert main(["postings", "info", str(tmp_path)]) == 1


def test_vectors_in_two_steps(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = tmp_path / "v.jsonl"
    source.write_text('{"id": "a", "vector": {"log": 1.5}}\n{"id": "b", "vector": {"disk": 2, "log": 0.5}}\n')
    index = str(tmp_path / "x")
    assert main(["postings", "build", index, "--vectors", str(source)]) == 0
    capsys.readouterr()
    assert main(["postings", "search", index, "--queries", str(source), "--two-step", "-k", "2", "--json", "-"]) == 0
    found = strict_json(capsys.readouterr().out)
    assert [[hit["number"] for hit in each["hits"]] for each in found["results"]] == [[0, 1], [1, 0]]
