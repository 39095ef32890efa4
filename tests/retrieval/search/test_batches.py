"""Batches: each query ranks as it does alone, shared records are read once, cutting bounds the
memory, faults leave nothing."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.first_stage import ties
from espnx.retrieval.search import batch as batches
from espnx.storage import FaultRule, FaultyEngine
from tests.retrieval.common import DIM, EVERYTHING, build, corpus, queries
from tests.sweeps import at_length


@pytest.mark.sampled(1)
@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 64])
@pytest.mark.parametrize(
    "options",
    [{}, {"rerank": 7}, {"rerank": 0}, {"prefetch_step": 0.3}, {"prefetch_step": (0.05, 0.2, 0.6)}],
)
def test_a_batch_ranks_as_its_queries_alone(store: Path, size: int, options: dict) -> None:
    wanted = queries(size, seed=size)
    with espnx.open(store) as index:
        together = index.search(wanted, k=40, candidates=90, **options)
        alone = [index.search(query, k=40, candidates=90, **options) for query in wanted]
    assert [result.hits for result in together] == [result.hits for result in alone]


def test_the_same_query_many_times_is_read_once(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches, "_BATCHES", 1)
    query = queries(1)[0]
    with espnx.open(store) as index:
        one = index.search(query, k=10, candidates=100, prefetch_step=0)
        many = index.search([query] * 20, k=10, candidates=100, prefetch_step=0)
    assert {result.queries_together for result in many} == {20}
    assert sum(result.bytes_asked for result in many) == one.bytes_asked
    assert sum(result.requests for result in many) == one.requests
    assert all(result.hits == one.hits for result in many)


def test_later_steps_share_what_others_read_before(
    store: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one query learns at a late step may be under way for another since an early one."""
    monkeypatch.setattr(batches, "_BATCHES", 1)
    wanted = queries(12, seed=4)
    with espnx.open(store) as index:
        options = {"k": 30, "candidates": 120, "nprobe": EVERYTHING}
        together = index.search(wanted, prefetch_step=(0.25, 0.5, 0.75), **options)
        union = {
            hit.number
            for query in wanted
            for hit in index.search(query, **{**options, "k": 120}).hits
        }
        assert [result.hits for result in together] == [
            index.search(query, **options).hits for query in wanted
        ]
        asked = sum(result.bytes_asked for result in together)
        all_of_them = int(index.store.full.schema.sizes(index.store.n_tokens).sum())
        assert (
            int(index.store.full.schema.sizes(index.store.n_tokens[sorted(union)]).sum())
            <= asked
            <= all_of_them
        )


def test_batches_bound_the_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder / "s", corpus(400, tokens=(20, 40)))
    with espnx.open(folder / "s") as index:
        one = index.search(queries(1)[0], candidates=200, prefetch_step=0)
        monkeypatch.setattr(batches, "_BATCH_BYTES", 3 * one.bytes_asked)
        results = index.search(queries(1000), k=3, candidates=200)
        assert len(results) == 1000
        assert max(result.queries_together for result in results) <= 3
        assert index.search(queries(30), rerank=0, k=1)[0].queries_together > 3


def test_batches_count_coarse_records_and_candidates(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build(folder / "s", corpus(400, tokens=(20, 40)), coarse="bit1")
    with espnx.open(folder / "s") as index:
        assert index.store.coarse is not None
        coarse_bytes = 200 * index.store.coarse.size_bytes // 400
        monkeypatch.setattr(batches, "_BATCH_BYTES", 3 * coarse_bytes)
        assert {
            result.queries_together
            for result in index.search(queries(60), k=1, candidates=200, cascade=1)
        } <= {1, 2}
        for options in ({}, {"exclude": ["doc-1"]}):
            monkeypatch.setattr(batches, "_BATCH_BYTES", 5 * 12 * (200 + ties._MORE + 4))
            results = index.search(
                queries(60), k=1, candidates=200, rerank=0, nprobe=EVERYTHING, **options
            )
            assert {result.queries_together for result in results} == {5}


@at_length("times", 40, 200)
def test_thousands_of_queries(store: Path, times: int) -> None:
    base = queries(50)
    with espnx.open(store) as index:
        results = index.search(base * times, k=1, candidates=20, rerank=4)
        alone = [index.search(query, k=1, candidates=20, rerank=4).hits for query in base]
    assert [result.hits for result in results] == alone * times


def test_a_failing_read_fails_the_batch_and_leaves_the_index_usable(store: Path) -> None:
    wanted = queries(24)
    with (
        FaultyEngine([FaultRule(operation="read", path="*segment*", nth=12, count=1)]) as engine,
        espnx.open(store, engine=engine) as index,
    ):
        with pytest.raises(errors.ReadError):
            for _ in range(40):
                index.search(wanted, k=5, candidates=60)
        assert [r.hits for r in index.search(wanted, k=5)] == [
            index.search(query, k=5).hits for query in wanted
        ]
        assert engine.stats().in_flight == 0


def test_one_bad_query_is_named_before_any_work(store: Path) -> None:
    with espnx.open(store) as index:
        bad = espnx.Encoded(torch.full((16,), torch.nan), torch.zeros(1, DIM))
        before = index._devices.native.stats().requests
        with pytest.raises(errors.InvalidInputError, match="NaN"):
            index.search([*queries(3), bad])
        assert index._devices.native.stats().requests == before


def test_costs_of_a_batch_add_up(store: Path) -> None:
    with espnx.open(store) as index:
        index.store.texts.get([0])  # its table is read once
        before = index._devices.native.stats()
        results = index.search(queries(13), candidates=70)
        after = index._devices.native.stats()
        for result in results:  # the texts of the hits, which are no record's costs
            index.store.texts.get([hit.number for hit in result.hits])
        texts = index._devices.native.stats()
    assert sum(result.requests for result in results) == (after.requests - before.requests) - (
        texts.requests - after.requests
    )
    assert sum(result.bytes_moved for result in results) == (
        after.bytes_moved - before.bytes_moved
    ) - (texts.bytes_moved - after.bytes_moved)
    assert all(np.isfinite(result.timings.total_s) for result in results)
