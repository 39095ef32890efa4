"""Hot documents: the same ranking with any budget, never more memory than that, and fewer reads for
what is wanted often."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from tests.retrieval.common import queries


@pytest.mark.parametrize("hot", [0, 1, 100, 700, "4KiB", "1MiB", "64MiB"])
def test_any_budget_ranks_alike(store: Path, hot: int | str) -> None:
    with espnx.open(store) as plain, espnx.open(store, hot=hot) as index:
        for query in queries(8) * 3:
            assert (
                index.search(query, k=300, candidates=200).hits
                == plain.search(query, k=300, candidates=200).hits
            )
        together = index.search(queries(8), k=50, candidates=200)
        assert [result.hits for result in together] == [
            plain.search(query, k=50, candidates=200).hits for query in queries(8)
        ]


def test_enough_memory_means_no_reads(store: Path) -> None:
    with espnx.open(store, hot="16MiB") as index:
        query = queries(1)[0]
        first, second, third = (
            index.search(query, k=10, candidates=100, prefetch_step=0) for _ in range(3)
        )
        assert first.requests > 0
        assert second.requests > 0
        assert (third.requests, third.bytes_moved, third.hot, third.hits) == (0, 0, 100, first.hits)
        records = int(index.store.full.schema.sizes(index.store.n_tokens).sum())
        assert index.resident_bytes["hot"] == records + 9 * 300, "no more than all records need"


def test_more_memory_than_there_is(store: Path) -> None:
    with espnx.open(store, hot="900TiB") as index:
        assert index.resident_bytes["hot"] < 1 << 20


def test_memory_that_cannot_be_had(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any, **options: Any) -> None:
        raise RuntimeError("DefaultCPUAllocator: can't allocate memory")

    monkeypatch.setattr("espnx.retrieval.search.opened.hot_records.torch.empty", fail)
    with pytest.raises(errors.InvalidInputError, match="hot"):
        espnx.open(store, hot="1KiB")


def test_no_budget_takes_no_memory(store: Path) -> None:
    with espnx.open(store) as index:
        assert index.hot is None
        assert index.resident_bytes["hot"] == 0


def test_threads_on_a_ring_that_comes_round_all_the_time(store: Path) -> None:
    wanted = queries(16, seed=3)
    with espnx.open(store) as plain, espnx.open(store, hot=3000) as index:
        alone = [plain.search(query, k=60, candidates=80).hits for query in wanted]
        with ThreadPoolExecutor(8) as pool:
            for _ in range(6):
                assert [
                    result.hits
                    for result in pool.map(
                        lambda query: index.search(query, k=60, candidates=80), wanted
                    )
                ] == alone


@pytest.mark.parametrize("hot", [-1, "many", None, 1.5, True])
def test_budget_must_be_a_size(store: Path, hot: Any) -> None:
    with pytest.raises(errors.InvalidInputError):
        espnx.open(store, hot=hot)
