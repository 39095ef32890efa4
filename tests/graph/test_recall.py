"""What a build says of recall, beside what queries find that the graph has never seen."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import espnx.graph
from tests.graph.conftest import exact, recall_of

N, DIM, FRESH = 3000, 24, 400  # of more vectors a build measures filters, too


def drawn(kind: str, count: int, random: np.random.Generator) -> np.ndarray:
    """float16 [count, DIM]: of one cloud, or of ten that are apart."""
    centres = 2 * np.random.default_rng(0).standard_normal((10, DIM)) * (kind == "ten clusters")
    return (centres[random.integers(0, 10, count)] + random.standard_normal((count, DIM))).astype(
        np.float16
    )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["one cloud", "ten clusters"])
@pytest.mark.parametrize("codes", ["inline", "memory"])
def test_new_queries_find_what_a_build_says(kind: str, codes: str, tmp_path: Path) -> None:
    random = np.random.default_rng(1)
    base, queries = drawn(kind, N, random), drawn(kind, FRESH, random)
    # Short codes and few neighbours: where a walk goes by the query's own node makes most of a
    # difference.
    espnx.graph.build(base, tmp_path / "g", codes=codes, pq_bytes=6, max_degree=16, list_size=40)
    true = exact(base, queries, 10)
    with espnx.graph.open(tmp_path / "g") as index:
        for point in index.facts.recall:
            found = index.search(queries, 10, list_size=point.list_size, beam_width=1)
            by_chance = 0.02 + 0.1 * (1 - point.recall)  # 200 queries were measured
            assert -by_chance <= recall_of(found.ids, true) - point.recall <= by_chance + 0.03, (
                point
            )
            assert found.pages.mean() == pytest.approx(point.pages, rel=0.15)
        assert recall_of(index.search(queries, 10, recall=0.95).ids, true) >= 0.93


@pytest.mark.parametrize("num_entry_points", [1, 400])
def test_a_row_that_is_kept_from_a_walk(num_entry_points: int, tmp_path: Path) -> None:
    random = np.random.default_rng(2)
    base = np.repeat(random.standard_normal((200, 8)), 2, axis=0).astype(np.float16)  # each twice
    espnx.graph.build(base, tmp_path / "g", max_degree=16, num_entry_points=num_entry_points)
    rows = np.arange(400)
    with espnx.graph.open(tmp_path / "g") as index:
        found, pages = index.walk_without(rows, base, 3, (20, 20))
        assert pages == index.facts.layout.n_pages
        assert not (found.ids == rows[:, None]).any()
        assert (found.ids >= 0).all(), (
            "from an entry point that is kept from it a walk goes on all the same"
        )
        assert (found.ids[:, 0] == rows ^ 1).mean() > 0.99, "its double is another row"
