"""One page of result files: complete, safe to send, and the same for the same results."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import Row, make_document
from espnx.benchmarks.report.page import render_page
from espnx.cli.main import main
from tests.benchmarks.common import MACHINE, row
from tests.cli.documents import strict_json

needs_matplotlib = pytest.mark.skipif(
    importlib.util.find_spec("matplotlib") is None,
    reason="matplotlib is not installed (extra [bench])",
)
IO = {"op": "read", "pattern": "random", "queue_depth": 8}


def io_row(block: int, system: str = "espnx-uring", **changes: Any) -> Row:
    return row(params={**IO, "block_bytes": block}, system=system, **changes)


def document(rows: list[Row], **more: Any) -> dict[str, Any]:
    return make_document(
        "espnx bench io --path <b>",
        "0123456789abcdef",
        True,
        {**MACHINE, "cpu": "A & B"},
        rows,
        **more,
    )


class Tags(HTMLParser):
    """Counts what is opened, and fails where something is closed that was not."""

    VOID = frozenset({"meta", "br", "use", "path", "rect"})

    def __init__(self, text: str):
        super().__init__()
        self.open: list[str] = []
        self.seen: dict[str, int] = {}
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: Any) -> None:
        self.seen[tag] = self.seen.get(tag, 0) + 1

    def handle_endtag(self, tag: str) -> None:
        if tag not in self.VOID:
            assert self.open.pop() == tag


def test_what_stands_on_it() -> None:
    rows = [
        io_row(4096),
        io_row(4096, "fio", ratio={}),
        io_row(8192, correct=False, n=0, median_s=None, p99_s=None, iqr_s=None, ratio={}),
    ]
    page = render_page(
        {Path("x/one.json"): document(rows, note="<busy>"), Path("two.json"): document(rows[:1])}
    )
    assert "<code>espnx bench io --path &lt;b&gt;</code> at commit 0123456789, with changes" in page
    assert "A &amp; B" in page
    assert "&lt;busy&gt;" in page
    assert '<td class="bad">NO</td>' in page
    assert "random read 4 KiB QD8" in page
    assert "io: measured" in page
    tags = Tags(page)
    assert tags.open == []
    assert (tags.seen["table"], tags.seen["h2"], tags.seen["li"]) == (2, 2, 2)
    assert not re.search(r"(src|href)=\"(?!#)", page), "nothing is fetched from elsewhere"


@needs_matplotlib
def test_pictures() -> None:
    """A curve over what was swept, else a bar for each; none of wrong results, and the same for the
    same rows."""
    swept = {
        Path("s.json"): document(
            [io_row(4096 << i, system) for i in range(4) for system in ("espnx-uring", "fio")]
        )
    }
    bars = {Path("b.json"): document([io_row(4096), io_row(4096, "fio")])}
    wrong = {
        Path("w.json"): document(
            [io_row(4096, correct=False, n=0, median_s=None, p99_s=None, iqr_s=None, ratio={})]
        )
    }
    assert [render_page(each).count("<svg") for each in (swept, bars, wrong)] == [1, 1, 0]
    assert "block_bytes" in render_page(swept)
    assert render_page(swept) == render_page(swept)
    recall = [
        row(
            case="retrieval",
            params={"corpus": "B", "nprobe": probe},
            metrics={"recall": share},
            ratio={},
        )
        for probe, share in ((4, 0.9), (8, 0.95), (16, 0.99))
    ]
    assert render_page({Path("r.json"): document(recall)}).count("<svg") == 2


@needs_matplotlib
def test_no_line_is_a_single_point() -> None:
    """Where a system has one, there are bars: an axis of powers of ten around dots says nothing."""
    several = [io_row(4096 << i) for i in range(3)]
    page = render_page({Path("s.json"): document([*several, io_row(4096, "fio")])})
    assert page.count("<svg") == 1
    assert "median time of a run, s, and its interquartile range" in page, "bars"
    alone = [io_row(4096 << i, f"system-{i}") for i in range(3)]
    assert "and its interquartile range" in render_page({Path("s.json"): document(alone)})
    assert "and its interquartile range" not in render_page({Path("s.json"): document(several)})


def test_without_matplotlib(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = render_page({Path("b.json"): document([io_row(4096), io_row(4096, "fio")])})
    assert "<table" in page
    assert "pip install" in page
    assert "<svg" not in page


def test_from_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "results").mkdir()
    for name in ("b", "a"):
        (tmp_path / "results" / f"{name}.json").write_text(json.dumps(document([io_row(4096)])))
    out = tmp_path / "page.html"
    assert (
        main(
            [
                "report",
                str(tmp_path / "results"),
                str(tmp_path / "results" / "a.json"),
                "--out",
                str(out),
                "--json",
                "-",
            ]
        )
        == 0
    )
    said = capsys.readouterr()
    assert "tables and pictures of result files: 0 of 2\n" in said.err
    assert "tables and pictures of result files: 2 of 2" in said.err
    found = strict_json(said.out)
    assert (found["rows"], [Path(name).name for name in found["files"]]) == (
        2,
        ["a.json", "b.json"],
    )
    assert out.read_text().startswith("<!doctype html>")
    (tmp_path / "results" / "c.json").write_text("{}")
    for words, code, said in (
        ([str(tmp_path / "results")], 1, "c.json"),
        ([str(tmp_path)], 2, "no *.json in it"),
        ([str(tmp_path / "nowhere")], 2, "no such file or directory"),
        (
            [str(tmp_path / "results" / "a.json"), "--out", str(tmp_path / "no" / "x.html")],
            1,
            "cannot write the page",
        ),
    ):
        assert (
            main(
                [
                    "report",
                    *words,
                    *([] if "--out" in words else ["--out", str(tmp_path / "new.html")]),
                ]
            )
            == code
        )
        assert said in capsys.readouterr().err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "results"]


def test_a_page_that_is_there_is_kept(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless it is to be replaced; said before anything is drawn."""
    (tmp_path / "r.json").write_text(json.dumps(document([io_row(4096)])))
    out = tmp_path / "page.html"
    words = ["report", str(tmp_path / "r.json"), "--out", str(out)]
    out.write_text("mine")
    with monkeypatch.context() as patch:
        patch.setattr("espnx.benchmarks.report.page.render_page", None)
        assert main(words) == 2
        assert (
            "got a file that is there already; expected a new one. Fix: --replace, or name another"
            in capsys.readouterr().err
        )
        assert main([*words[:-1], str(tmp_path)]) == 1
        assert "cannot write the page" in capsys.readouterr().err
    assert out.read_text() == "mine"
    assert main([*words, "--replace"]) == 0
    assert out.read_text().startswith("<!doctype html>")
