"""What a search says beside its ranking. Explanations: the matches of a hit add up to its MaxSim.
While it is under way: every step of every query, the hits last and once; whoever raises there ends
the search, and nothing of it stays."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.search import batch as batches
from espnx.storage import FaultRule, FaultyEngine
from tests.retrieval.common import DIM, EVERYTHING, build, corpus, queries

STEPS = (0.25, 0.5)


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
def test_matches_are_the_sum_of_the_score(folder: Path, fmt: str) -> None:
    documents = {d.id: d for d in corpus(60, tokens=(0, 9))}
    build(folder / "s", documents.values(), format=fmt)
    with espnx.open(folder / "s") as index:
        for query in queries(3):
            result = index.search(
                query, k=60, candidates=60, nprobe=EVERYTHING, cls_weight=0.0, explain=True
            )
            for hit in result.hits:
                tokens = (
                    documents[hit.id].vectors.tokens.half().float()
                    if fmt == "fp16"
                    else documents[hit.id].vectors.tokens
                )
                if not len(tokens):
                    assert hit.matches == ()
                    continue
                products = query.tokens @ tokens.T
                assert [match.query_token for match in hit.matches] == list(
                    range(len(query.tokens))
                )
                assert [match.document_token for match in hit.matches] == products.argmax(
                    dim=1
                ).tolist()
                assert sum(match.score for match in hit.matches) == pytest.approx(
                    hit.score, abs=1e-4
                )
            assert index.search(query, k=3).hits[0].matches is None


def test_nothing_to_explain(folder: Path) -> None:
    build(folder / "s", corpus(5))
    with espnx.open(folder / "s") as index:
        empty = espnx.Encoded(queries(1)[0].cls, torch.empty(0, DIM))
        assert all(hit.matches == () for hit in index.search(empty, explain=True).hits)
        assert index.search(queries(1)[0], explain=True, include=[]).hits == []


@pytest.mark.parametrize("count", [1, 5, 23])
def test_every_step_is_told_and_the_hits_last(
    store: Path, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_TOGETHER", 2)  # several batches
    told: list[espnx.KnownCandidates] = []
    options = {"candidates": 60, "nprobe": EVERYTHING, "prefetch_step": STEPS}
    with espnx.open(store) as index:
        wanted = queries(count)
        results = index.search(wanted, k=7, on_candidates=told.append, **options)
        assert [each.hits for each in results] == [
            each.hits for each in index.search(wanted, k=7, **options)
        ]
        for q, query in enumerate(wanted):
            mine = [each for each in told if each.query == q]
            assert [(each.share, each.is_ranked) for each in mine] == [
                *((step, False) for step in STEPS),
                (1.0, False),
                (1.0, True),
            ]
            found = [(hit.id, hit.text) for hit in results[q]]
            assert list(mine[-1].documents) == found
            first = index.search(query, k=7, rerank=0, **{**options, "prefetch_step": 0})
            assert {name for name, _ in mine[2].documents} == {hit.id for hit in first}
            assert all(text == index.get(name) for each in mine for name, text in each.documents)
    assert len(told) == count * (len(STEPS) + 2)


def test_a_search_without_records_tells_too(store: Path) -> None:
    told: list[espnx.KnownCandidates] = []
    with espnx.open(store) as index:
        found = index.search(queries(1)[0], k=3, rerank=0, on_candidates=told.append)
    assert [each.is_ranked for each in told] == [False, True]
    assert [name for name, _ in told[-1].documents] == [hit.id for hit in found]


@pytest.mark.parametrize("at", range(4))
def test_who_raises_ends_the_search(store: Path, at: int) -> None:
    told: list[espnx.KnownCandidates] = []

    def stop(known: espnx.KnownCandidates) -> None:
        if len(told) == at:
            raise KeyboardInterrupt
        told.append(known)

    threads = set(threading.enumerate())
    with espnx.open(store) as index:
        for _ in range(3):
            told.clear()
            with pytest.raises(KeyboardInterrupt):
                index.search(queries(1)[0], k=5, prefetch_step=STEPS, on_candidates=stop)
        assert index._gate.active == 0
        assert len(index.search(queries(1)[0], k=5)) == 5
    assert {each for each in threading.enumerate() if each.is_alive()} <= threads


def test_a_failed_search_tells_no_hits(store: Path) -> None:
    told: list[espnx.KnownCandidates] = []
    with (
        FaultyEngine([FaultRule(operation="read", path="*segment*", nth=12, count=1)]) as engine,
        espnx.open(store, engine=engine) as index,
        pytest.raises(errors.ReadError),
    ):
        for query in queries(40):
            told.clear()
            index.search(query, k=5, on_candidates=told.append)
    assert told
    assert not any(each.is_ranked for each in told)


def test_only_a_function_is_told(store: Path) -> None:
    with espnx.open(store) as index, pytest.raises(errors.InvalidInputError, match="on_candidates"):
        index.search(queries(1)[0], on_candidates=3)  # type: ignore[arg-type]
