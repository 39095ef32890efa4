"""``espnx index import`` from the outside, and the commands of the page on importing."""

from __future__ import annotations

import json
import re
import shlex
import shutil
from pathlib import Path
from typing import Any

import pytest

from espnx.cli.main import main

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
pytest.importorskip("transformers", reason="transformers is not installed (extra [dev])")

from tests.encoders import tiny

PAGE = Path(__file__).parents[2] / "docs" / "import.md"
INDEX = tiny.DATA / "colbert-index-2"


def run(capsys: pytest.CaptureFixture[str], *words: Any) -> tuple[int, str, str]:
    code = main([str(word) for word in words])
    return code, *capsys.readouterr()


def test_the_commands_of_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    tiny.restore("colbert", tmp_path / "colbertv2.0")
    shutil.copytree(INDEX, tmp_path / "indexes" / "mine")
    texts = tiny.collection()
    (tmp_path / "collection.tsv").write_text(
        "".join(f"{n}\t{text}\n" for n, text in enumerate(texts))
    )
    (tmp_path / "corpus.jsonl").write_text(
        "".join(json.dumps({"id": n, "text": text}) + "\n" for n, text in enumerate(texts))
    )
    monkeypatch.chdir(tmp_path)
    commands = re.findall(r"^\$ espnx (.*)$", PAGE.read_text(), re.MULTILINE)
    assert len(commands) == 4
    outs = []
    for command in commands:
        if command.startswith("index build"):
            shutil.rmtree("my.store")
        code, out, err = run(capsys, *shlex.split(command))
        assert code == 0, err
        outs.append(out)
    assert "436 x 32 residual2, 256 centroids" in outs[0]
    assert "50 records and all metadata are intact" in outs[1]
    best = texts[27]  # what ColBERT's own Searcher ranked first
    assert best in outs[2]


def test_report(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(
        capsys,
        "index",
        "import",
        INDEX,
        tmp_path / "store",
        "--nlist",
        4,
        "--pooling",
        "muvera",
        "--first-stage-code",
        "flat",
        "--json",
        "-",
    )
    assert code == 0
    document = json.loads(out)
    assert document["command"] == "index import"
    assert document["index"] == {
        "documents": 50,
        "tokens": 436,
        "dim": 32,
        "format": "residual2",
        "centroids": 256,
    }
    assert (document["report"]["documents"], document["report"]["first_stage"]["nlist"]) == (50, 4)
    assert "importing 50 documents" in err
    assert "write: 50 of 50" in err
    assert "vector muvera" in run(capsys, "index", "info", tmp_path / "store")[1]
    code, _, err = run(capsys, "index", "import", INDEX, tmp_path / "store")
    assert code == 2
    assert "--replace" in err
    assert run(capsys, "index", "import", INDEX, tmp_path / "store", "--replace")[0] == 0


def test_what_is_wrong_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, "index", "import", tmp_path, tmp_path / "store")
    assert (code, out) == (2, "")
    assert "an empty directory" in err
    broken = shutil.copytree(INDEX, tmp_path / "broken")
    (broken / "1.residuals.pt").unlink()
    code, out, err = run(capsys, "index", "import", broken, tmp_path / "store")
    assert (code, out) == (1, "")
    assert "1.residuals.pt" in err
    code, _, err = run(
        capsys,
        "index",
        "import",
        INDEX,
        tmp_path / "store",
        "--restart",
        "--texts",
        tmp_path / "none.tsv",
    )
    assert code == 2
    assert "cannot read texts" in err
    code, _, err = run(capsys, "index", "import", INDEX, tmp_path / "store", "--encoder", tmp_path)
    assert code == 2
    assert "config.json" in err
    assert run(capsys, "index", "info", tmp_path / "store")[0] == 1
