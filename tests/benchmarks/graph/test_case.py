"""``espnx bench graph`` at toy size: all systems right, wrong ones noticed, what is missing said;
values at a recall."""

from __future__ import annotations

import contextlib
import os
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from espnx.benchmarks.graph import rows
from espnx.benchmarks.graph.data import Data, by_recipe, from_files
from espnx.benchmarks.graph.names import LANCE, OURS, PEER, SYSTEMS
from espnx.benchmarks.graph.rows import Built, Point
from espnx.benchmarks.graph.service import Setting
from espnx.benchmarks.graph.session import EspnxGraph, Session
from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.report import graph_plots
from espnx.benchmarks.report.found import Found
from espnx.cli.main import main
from espnx.errors import InvalidInputError

pytestmark = pytest.mark.usefixtures("here")
TOY = ["bench", "graph", "--quick", "--pairs", "2", "--pq-bytes", "16", "--threads", "2"]
# A stand-in for the package, which tests do not need: an exact search that says it has read.
STAND_IN = """
from types import SimpleNamespace
import numpy as np
def build_disk_index(data, index_directory, **options):
    print("a library that prints")
    np.save(index_directory + "/data.npy", data)
class StaticDiskIndex:
    def __init__(self, index_directory, **options):
        self.data = np.load(index_directory + "/data.npy")
    def batch_search(self, queries, k_neighbors, complexity, num_threads):
        far = np.square(queries[:, None].astype(float) - self.data).sum(axis=-1)
        ids = far.argsort(axis=1)[:, :k_neighbors]
        stats = {"mean_ios": complexity + 8.0}
        near = np.take_along_axis(far, ids, 1)
        return SimpleNamespace(identifiers=np.uint32(ids), distances=near, search_stats=stats)
    def search(self, query, k_neighbors, complexity):
        found = self.batch_search(query[None], k_neighbors, complexity, 1)
        return SimpleNamespace(identifiers=found.identifiers[0], distances=found.distances[0])
"""


@pytest.fixture
def peer(tmp_path: Path) -> str:
    """A Python that has diskannpy."""
    (tmp_path / "diskannpy.py").write_text(STAND_IN)
    program = tmp_path / "python"
    program.write_text(
        f"#!/bin/sh\nPYTHONPATH={shlex.quote(str(tmp_path))} exec {shlex.quote(sys.executable)} "
        '"$@"\n'
    )
    program.chmod(0o755)
    return str(program)


def quick(folder: Path, *more: str) -> tuple[int, list[Any]]:
    result = folder / "r.json"
    code = main([*TOY, "--path", str(folder), "--json", str(result), *more])
    return code, rows_of(load(result))


def test_a_quick_run(
    folder: Path, peer: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(folder)  # the processes start elsewhere
    systems = [name for name in SYSTEMS if name != LANCE]
    code, found = quick(
        Path(), "--diskann-python", os.path.relpath(peer), "--system", ",".join(systems)
    )
    assert code == 0
    assert [path.name for path in folder.iterdir()] == ["r.json"]
    swept = [row for row in found if row.params["show"] == "sweep"]
    assert {row.system for row in swept} == set(systems)
    assert sorted(
        (row.params["beamwidth"], row.params["list_size"]) for row in swept if row.system == PEER
    ) == [(1, 10), (1, 80), (2, 10), (2, 80)]
    for row in swept:
        assert (row.correct, row.n) == (True, 2)
        assert row.metrics["queries_per_s"] == pytest.approx(20 / row.median_s)
        assert row.metrics["alone_p50_s"] <= row.metrics["alone_p99_s"]
        if row.system in OURS:
            assert row.bytes_asked == pytest.approx(20 * 4096 * row.metrics["reads"])
    for system in OURS:
        short, long = (
            row.metrics for row in swept if (row.system, row.params["beamwidth"]) == (system, None)
        )
        assert short["recall"] < long["recall"]
        assert short["reads"] < long["reads"]
    summed = [row for row in found if row.params["show"] == "summary"]
    assert [(row.params["recall"], row.system) for row in summed] == [
        (recall, name) for recall in rows.TARGETS for name in systems
    ]
    sizes = {row.system: row.metrics["pq_bytes"] for row in summed if "pq_bytes" in row.metrics}
    equal = {
        sizes[name]
        for name in ("espnx-inline", "espnx-inline-pq", "espnx-memory", "espnx-paged", PEER)
    }
    assert equal == {16}
    assert sizes["espnx-inline-full"] > 16
    for row in summed:
        if row.n:  # a toy graph need not reach every recall
            assert (PEER in row.ratio) == ("reads_over_peer" in row.metrics) == (row.system in OURS)
    assert f"vs {PEER} [IQR]" in capsys.readouterr().out
    for show, make in (("sweep", rows.sweep_table), ("summary", rows.summary_table)):
        headers, cells = make([row for row in found if row.params["show"] == show])
        assert {len(line) for line in cells} == {len(headers)}


def test_without_the_peer_its_rows_say_so(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, found = quick(folder, "--system", "diskann")
    assert code == 0
    assert all(row.n == 0 for row in found)
    assert {row.params["why"] for row in found} == {"no --diskann-python"}
    assert found[0].params["why"] in capsys.readouterr().out


@pytest.mark.parametrize(
    ("python", "problem"),
    [("no-such-python", "No such file"), (sys.executable, "No module named 'diskannpy'")],
)
def test_a_peer_that_is_named_and_not_there_is_refused_before_any_build(
    folder: Path, python: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*TOY, "--path", str(folder), "--diskann-python", python]) == 2
    captured = capsys.readouterr()
    assert "--diskann-python" in captured.err
    assert problem in captured.err
    assert "building" not in captured.out + captured.err


def test_lancedb(folder: Path) -> None:
    pytest.importorskip("lancedb", reason="lancedb is not installed: pip install lancedb")
    code, found = quick(folder, "--system", LANCE)
    assert code == 0
    short, long = (row.metrics for row in found if row.params["show"] == "sweep")
    assert short["recall"] < long["recall"]
    assert all(row.correct for row in found)


def test_lancedb_that_is_not_there_is_said(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "lancedb", None)
    code, found = quick(folder, "--system", LANCE)
    assert code == 0
    assert all(row.n == 0 and row.params["why"].startswith("not installed") for row in found)
    assert found[0].params["why"] in capsys.readouterr().out


def test_reads_of_code_pages_count(folder: Path) -> None:
    """A cache that holds all of them after the first pass still has to read each once."""
    rng = np.random.default_rng(0)
    base = folder / "base.npy"
    np.save(base, rng.standard_normal((600, 16), np.float32))
    session = Session()
    session.build("espnx-paged", str(base), str(folder / "graph"), 8, 2)
    session.load("espnx-paged", 1)
    with contextlib.closing(session.open("espnx-paged", str(folder / "graph"), 1, 1)) as opened:
        queries = rng.standard_normal((8, 16), np.float32)
        first, second = (opened.search(queries, 10, Setting(20, 1, None)) for _ in range(2))
    n_code_pages = -(-600 // ((4096 - 16) // 8))
    assert first.reads is not None
    assert second.reads is not None
    assert first.reads - second.reads == n_code_pages
    assert np.array_equal(first.ids, second.ids)


def test_a_wrong_system_is_not_measured(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = EspnxGraph.search

    def wrong(self: Any, *given: Any) -> Any:
        found = right(self, *given)
        return type(found)(found.ids, found.distances * 1.1, found.reads, found.bytes_read)

    monkeypatch.setattr(EspnxGraph, "search", wrong)
    code, found = quick(folder, "--system", "espnx-memory")
    assert code == 1
    assert [(row.correct, row.n) for row in found] == [(False, 0)] * 2


def test_memory(folder: Path) -> None:
    code, found = quick(folder, "--show", "memory", "--system", "espnx-inline,espnx-memory")
    assert code == 0
    assert [(row.system, row.params["in_flight"], row.params["n"]) for row in found] == [
        (name, 64, 700) for name in ("espnx-inline", "espnx-memory")
    ]
    # Not how much: what this process holds may be less than before, where the kernel reclaims pages
    # of idle ones.
    assert all("more_bytes" in row.metrics and row.metrics["folder_bytes"] > 0 for row in found)
    headers, cells = rows.memory_table(found)
    assert {len(line) for line in cells} == {len(headers)}


@pytest.mark.parametrize(
    "words",
    [
        ["--list-sizes", "9"],
        ["--pq-bytes", "0"],
        ["--system", "x"],
        ["--base", "a.npy"],
        ["--n", "x"],
    ],
)
def test_options_that_make_no_sense(
    folder: Path, words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([part for part in TOY if part != "--quick"] + ["--path", str(folder), *words]) != 0
    assert "expected" in capsys.readouterr().err


def test_vectors_from_files(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    base, queries = (rng.integers(0, 255, (n, 8), dtype=np.uint8) for n in (30, 5))
    np.save(tmp_path / "b.npy", base)
    np.save(tmp_path / "q.npy", queries)
    found = from_files(str(tmp_path / "b.npy"), str(tmp_path / "q.npy"), 4, 10)
    assert found.name == "b.npy, 30 x 8 uint8"
    assert np.array_equal(found.base, base)
    assert np.array_equal(found.queries, queries[:4])
    np.save(tmp_path / "q.npy", queries[:, :4])
    with pytest.raises(InvalidInputError, match="one dimension"):
        from_files(str(tmp_path / "b.npy"), str(tmp_path / "q.npy"), 4, 10)


# --- what is right ---


def test_a_recipe_is_its_seed() -> None:
    first, again, other = (by_recipe(50, 5, 3, seed) for seed in (1, 1, 2))
    assert np.array_equal(first.base, again.base)
    assert not np.array_equal(first.base, other.base)
    apart = np.square(first.base[None].astype(float) - first.queries[:, None]).sum(axis=-1)
    assert first.farthest == pytest.approx(np.sort(apart, axis=1)[:, 2])


def test_of_equally_near_ones_any_will_do() -> None:
    data = Data(
        "d", np.array([[1.0], [-1.0], [3.0], [5.0]], np.float32), np.zeros((1, 1), np.float32), 1
    )
    assert [data.recall(np.array([[i]])) for i in range(4)] == [1.0, 1.0, 0.0, 0.0]


@pytest.mark.parametrize(
    ("ids", "far", "problem"),
    [
        ([[0, 1]], [[1.0, 1.0]], None),
        ([[0, 0]], [[1.0, 1.0]], "twice"),
        ([[0, 4]], [[1.0, 1.0]], "ids"),
        ([[0, -1]], [[1.0, 1.0]], "ids"),
        ([[0]], [[1.0]], "ids"),
        ([[0, 2]], [[1.0, 1.0]], "1 instead of 9"),
        ([[0, 1]], [[1.0, np.nan]], "nan instead of 1"),
    ],
)
def test_wrong_results_are_noticed(ids: Any, far: Any, problem: str | None) -> None:
    data = Data(
        "d", np.array([[1.0], [-1.0], [3.0], [5.0]], np.float32), np.zeros((1, 1), np.float32), 2
    )
    said = data.problem(np.array(ids), np.array(far))
    assert said is None if problem is None else problem in str(said)


# --- at a recall ---


def test_at_recall() -> None:
    points = [(0.8, 10.0), (0.9, 20.0), (0.9, 25.0), (1.0, 40.0)]
    assert [rows.at_recall(points, recall) for recall in (0.5, 0.8, 0.85, 0.9, 1.0)] == [
        10,
        10,
        pytest.approx(15),
        20,
        40,
    ]
    assert rows.at_recall(points[:2], 0.95) is None
    assert rows.at_recall([], 0.9) is None


def curve(*points: tuple[float, float, float, tuple[float, ...]]) -> dict[int, list[Point]]:
    """Of (recall, reads, seconds alone, seconds of each pass) by list size."""
    return {
        size: [Point(seconds, recall, {"reads": reads}, [alone], "cold") for seconds in passes]
        for size, (recall, reads, alone, passes) in enumerate(points)
    }


def test_a_summary_takes_the_peers_best() -> None:
    said = {"folder_bytes": 10.0}
    ours = Built(
        "espnx-memory",
        "",
        said=said,
        curves={(2, None): curve((0.9, 10, 0.1, (1, 1)), (1.0, 20, 0.2, (2, 2)))},
    )
    slow, fast = (
        curve((0.9, 20, 0.3, (4, 4)), (1.0, 40, 0.3, (4, 4))),
        curve((0.9, 30, 0.2, (2, 8)), (1.0, 50, 0.4, (2, 2))),
    )
    theirs = Built(PEER, "", said=said, curves={(16, 1): slow, (16, 2): fast})
    params = {"queries": 6, "n": 3, "data": "d"}
    first, second = rows.summaries(params, [ours, theirs], vectors_bytes=5)[:2]
    assert first.metrics["queries_per_s"] == pytest.approx(4.5)  # between 6 and 3
    assert (second.metrics["best_threads"], second.metrics["best_beamwidth"]) == (16, 2)
    assert second.metrics["reads"] == pytest.approx(30), "with the fewest pages at a time"
    assert first.metrics["reads_over_peer"] == pytest.approx(0.5)
    assert first.ratio[PEER] == pytest.approx((4.5 / 3 + 4.5 / 1.875) / 2)
    assert (first.metrics["alone_p50_s"], second.metrics["alone_p50_s"]) == (
        pytest.approx(0.15),
        pytest.approx(0.3),
    )
    assert first.metrics["folder_over_vectors"] == 2
    ours.curves[2, None] = curve((0.5, 1, 1, (1, 1)))
    assert rows.summaries(params, [ours], vectors_bytes=5)[0].n == 0, "no list finds that much"


def test_plots() -> None:
    """Of each list size the best that was measured, over what is missed; a recall that nobody wants
    is left out."""
    pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra [bench])")
    slow = curve((0.7, 1, 1, (1,)), (0.9, 10, 1, (2,)), (0.95, 20, 1, (3,)))
    fast = curve((0.7, 1, 1, (1,)), (0.9, 12, 1, (1,)), (0.95, 24, 1, (2,)))
    found = rows.sweep(
        {"queries": 6, "n": 3, "data": "d"}, [Built(PEER, "", curves={(2, 1): slow, (2, 2): fast})]
    )
    for draw, expected in ((graph_plots.rates, (6, 3)), (graph_plots.reads, (10, 20))):
        [axes] = draw([Found(row, 1) for row in found]).axes
        drawn = [[(pytest.approx(0.1), expected[0]), (pytest.approx(0.05), expected[1])]]
        assert [
            [tuple(point) for point in line.get_xydata().tolist()] for line in axes.lines
        ] == drawn
    assert graph_plots.rates([Found(found[0], 1)]) is None
