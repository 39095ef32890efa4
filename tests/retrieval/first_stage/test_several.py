"""Several first stages in one store: each alone, fused, and what a hit says of them."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.retrieval.first_stage.graph import stage as graph
from espnx.retrieval.first_stage.several import LoadedSeveral
from tests.retrieval.common import build, corpus, queries

DOCUMENTS = corpus(300, tokens=(1, 6))


@pytest.fixture
def index(folder: Path, monkeypatch: pytest.MonkeyPatch) -> espnx.Index:
    monkeypatch.setattr(graph, "FLAT_MAX", 40)
    build(folder / "s", DOCUMENTS[:250], first_stages=("graph", "ivf"), nlist=16)
    espnx.add(folder / "s", DOCUMENTS[250:])
    espnx.delete(folder / "s", [f"doc-{i}" for i in range(0, 300, 7)])
    return espnx.open(folder / "s")


def candidates_of(
    index: espnx.Index, kind: str, query: espnx.Encoded, count: int
) -> tuple[list[int], list[float]]:
    assert isinstance(index.first_stage, LoadedSeveral)
    stage = index.first_stage.stages[kind]
    allowed = index._versions.newest.filters.allowed(None, None)
    numbers, scores = stage.start([stage.prepare(query)], count, None, allowed, count).complete()[0]
    return numbers.tolist(), scores.tolist()


@pytest.mark.parametrize("named", [("graph", "ivf"), ("ivf", "graph")])
def test_fused_is_what_the_rankings_say(index: espnx.Index, named: tuple[str, str]) -> None:
    """Reciprocal ranks by hand; the hits say where each stage had them."""
    with index:
        for query in queries(4):
            found = index.search(query, k=20, candidates=20, rerank=0, first_stage=named)
            rankings = {kind: candidates_of(index, kind, query, 20) for kind in named}
            sums: dict[int, float] = {}
            for numbers, _ in rankings.values():
                for rank, number in enumerate(numbers, start=1):
                    sums[number] = sums.get(number, 0.0) + 1 / (60 + rank)
            wanted = sorted(sums, key=lambda number: (-sums[number], number))[:20]
            assert sorted(hit.number for hit in found) == sorted(wanted)
            assert [hit.score for hit in found] == pytest.approx(
                [sums[number] for number in wanted], rel=1e-6
            )
            for hit in found:
                said = {
                    kind: numbers.index(hit.number) + 1
                    for kind, (numbers, _) in rankings.items()
                    if hit.number in numbers
                }
                assert {kind: place.rank for kind, place in hit.found_by.items()} == said
                for kind, place in hit.found_by.items():
                    assert place.score == pytest.approx(rankings[kind][1][place.rank - 1])


def test_one_of_them(index: espnx.Index) -> None:
    """The first that was named at build, unless another one is asked for; their own numbers of
    candidates."""
    with index:
        query = queries(1)[0]
        assert index.search(query, k=3).candidates == 100  # of a graph
        assert index.search(query, k=3, first_stage="ivf").candidates > 100
        assert index.search(query, k=3, first_stage=("ivf", "graph")).candidates == 100
        assert set(index.search(query, k=3, first_stage="ivf").hits[0].found_by) == {"ivf"}
        for steps in (0, 0.3, (0.1, 0.5)):
            hits = index.search(
                [query, *queries(3)],
                k=10,
                candidates=60,
                first_stage=("ivf", "graph"),
                prefetch_step=steps,
            )
            assert [[hit.id for hit in each] for each in hits] == [
                [hit.id for hit in each]
                for each in index.search(
                    [query, *queries(3)], k=10, candidates=60, first_stage=("ivf", "graph")
                )
            ]


def test_what_the_stages_have_read_is_said(index: espnx.Index) -> None:
    """Of a graph pages, of inverted lists nothing; of a batch shares that add up."""
    with index:
        query = queries(1)[0]
        first = index.search(query, k=3, first_stage="graph", prefetch_step=0.5)
        one = index.search(query, k=3, first_stage="graph", prefetch_step=0.5)
        assert first.stage_bytes > one.stage_bytes, (
            "where the rows that are not deleted lie is read once"
        )
        assert one.stage_requests > 0
        assert one.stage_bytes == 4096 * one.stage_requests
        assert "graph: " in one.summary()
        none = index.search(query, k=3, first_stage="ivf")
        assert (none.stage_requests, none.stage_bytes) == (0, 0)
        both = index.search([query, query], k=3, first_stage=("ivf", "graph"), candidates=100)
        assert sum(each.stage_bytes for each in both) % 4096 == 0
        assert both[0].stages == ("ivf", "graph")


@pytest.mark.parametrize("wrong", ["bm26", ("ivf", "ivf"), 7, ("ivf", 3), ""])
def test_stages_that_are_not_there(index: espnx.Index, wrong: object) -> None:
    with index, pytest.raises(errors.InvalidInputError, match="first_stage"):
        index.search(queries(1)[0], first_stage=wrong)  # type: ignore[arg-type]


def test_fusions_that_are_unknown(index: espnx.Index) -> None:
    with index, pytest.raises(errors.InvalidInputError, match=r"fuse.*rrf"):
        index.search(queries(1)[0], first_stage=("ivf", "graph"), fuse="max")


def test_what_cannot_be_built(folder: Path) -> None:
    for named, said in (
        (("ivf", "ivf"), "each once"),
        ((), "one or several"),
        (("several",), "first-stage kind|one or several"),
    ):
        with pytest.raises(errors.InvalidInputError, match=said):
            build(folder / "s", DOCUMENTS[:5], first_stages=named)


def test_long_walks_are_told(
    folder: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By the report of a build, by `index info`, and in the log."""
    monkeypatch.setattr(graph, "DEFAULT_CANDIDATES", 10)
    for times, is_long in ((1.0, False), (8.0, True)):
        monkeypatch.setattr(graph, "_EFFORTS", (times,))
        caplog.clear()
        report = build(folder / str(times), corpus(200, tokens=(1, 2)), first_stages=("graph",))
        with espnx.open(folder / str(times)) as index:
            facts, measured = (
                dict(index.store.facts())["first stage"],
                index.store.manifest.first_stage.describe(),
            )
        pages = math.ceil(measured["list_size"] * measured["pages_per_candidate"])
        assert f"candidates keep {10 * times:.0f} and read about {pages} pages" in facts
        assert facts in report.summary()
        assert ("almost the same vector" in facts) == is_long
        assert [record.message for record in caplog.records] == (
            [f"first stage: {facts}"] if is_long else []
        )


def test_a_graph_alone_of_a_few_thousand(folder: Path) -> None:
    """With the limit as it is: a graph for the base, none for what is added; both are found, and
    what was measured is kept."""
    rng = np.random.default_rng(0)
    documents = corpus(1500, tokens=(1, 2), seed=3)
    build(folder / "s", documents[:1400], first_stages="graph")
    espnx.add(folder / "s", documents[1400:])
    with espnx.open(folder / "s") as index:
        assert index.store.manifest.first_stage.describe()["list_size"] >= 100
        vectors = np.stack(
            [document.vectors.cls.numpy() for document in documents if document.vectors]
        )
        ids = [document.id for document in documents]
        hits = total = 0
        for query in queries(20):
            best = {ids[i] for i in np.argsort(-(vectors @ query.cls.numpy()))[:100]}
            found = index.search(query, k=100, rerank=0)
            hits, total = hits + len(best & {hit.id for hit in found}), total + 100
        assert hits / total > 0.93
        some = [ids[i] for i in rng.permutation(1500)[:70]]
        assert {hit.id for hit in index.search(queries(1)[0], k=100, include=some)} == set(some)
    assert espnx.compact(folder / "s").documents == 1500
    with espnx.open(folder / "s") as index:
        assert index.search(queries(1)[0], k=5).candidates == 100
        assert index.store.verify() == 1500


def test_vectors_that_float16_cannot_hold(folder: Path) -> None:
    import torch

    huge = [espnx.Document("a", "a", espnx.Encoded(torch.full((16,), 7e4), torch.zeros(1, 8)))]
    with pytest.raises(errors.InvalidInputError, match="first-stage vector"):
        build(folder / "s", huge, first_stages="graph", format="fp32")
