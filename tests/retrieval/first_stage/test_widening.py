"""Filters and deletions far from a query: as many hits as may be found, and the nearest of them,
whatever lists the rest lies in."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx.retrieval.first_stage.ivf.search import LoadedIvf
from tests.retrieval.common import EVERYTHING, build

CLUSTERS, EACH, DIM = 20, 30, 16


def centre(cluster: int) -> np.ndarray:
    angle = 2 * np.pi * cluster / CLUSTERS
    return np.r_[10 * np.cos(angle), 10 * np.sin(angle), np.zeros(DIM - 2)]


def documents() -> list[espnx.Document]:
    rng = np.random.default_rng(0)
    made = []
    for i in range(CLUSTERS * EACH):
        cls = torch.from_numpy(centre(i % CLUSTERS) + 0.3 * rng.normal(size=DIM)).float()
        made.append(
            espnx.Document(
                i, "", espnx.Encoded(cls, torch.from_numpy(rng.normal(size=(2, DIM))).float())
            )
        )
    return made


DOCUMENTS = documents()
QUERY = espnx.Encoded(torch.from_numpy(centre(0)).float(), torch.ones(1, DIM))
OTHER = espnx.Encoded(torch.from_numpy(centre(7)).float(), torch.ones(1, DIM))
#: Of the clusters opposite to QUERY: its own and all near it are left out.
FAR = [document.id for document in DOCUMENTS if 7 <= int(document.id) % CLUSTERS <= 13]
NEAR = [document.id for document in DOCUMENTS if document.id not in set(FAR)]


def make(path: Path) -> Path:
    build(path, DOCUMENTS, dims=(DIM, DIM), nlist=2 * CLUSTERS)
    return path


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make(tmp_path_factory.mktemp("wide") / "s")


@pytest.fixture(scope="module")
def index(store: Path) -> Iterator[espnx.Index]:
    with espnx.open(store) as opened:
        yield opened


def ids(index: espnx.Index, query: espnx.Encoded = QUERY, **options: Any) -> list[Any]:
    return [hit.id for hit in index.search(query, **options).hits]


@pytest.mark.parametrize(
    "restricted",
    [{"include": FAR}, {"exclude": NEAR}, {"include": [*FAR, *NEAR[:50]], "exclude": NEAR}],
)
@pytest.mark.parametrize(
    ("k", "candidates"), [(10, 10), (10, 100), (100, 100), (EVERYTHING, EVERYTHING)]
)
@pytest.mark.parametrize("nprobe", [1, 3, "auto"])
def test_as_many_hits_as_may_be_found(
    index: espnx.Index, restricted: dict[str, Any], k: int, candidates: int, nprobe: Any
) -> None:
    for step in (0, 0.3):
        found = ids(
            index, k=k, candidates=candidates, nprobe=nprobe, prefetch_step=step, **restricted
        )
        assert len(set(found)) == len(found) == min(k, len(FAR))
        assert set(found) <= set(FAR)
    if k == EVERYTHING:
        assert found == ids(index, k=k, candidates=candidates, nprobe=EVERYTHING, include=FAR)


def test_lists_without_an_allowed_document_do_not_count(index: espnx.Index) -> None:
    """The candidates with nprobe = 3 are the best of the three nearest lists that hold any, not of
    whichever are nearest."""
    stage = index.first_stage
    allowed = index._versions.newest.filters.allowed(FAR, None)
    assert allowed is not None
    in_lists = stage.counts(allowed).in_lists
    assert allowed.count == int(in_lists.sum()) == len(FAR)
    _, ranked = stage.index.quantizer.search(QUERY.cls.numpy()[None], stage.nlist)
    nearest = [number for number in ranked[0].tolist() if in_lists[number]][:3]
    assert set(ranked[0][:3].tolist()).isdisjoint(nearest)
    numbers, _ = stage.start(QUERY.cls.numpy()[None], 5, 3, allowed).complete()[0]
    held = {int(i) for number in nearest for i in members(stage, number)}
    assert len(numbers) == 5
    assert set(numbers.tolist()) <= held


def members(stage: LoadedIvf, number: int) -> np.ndarray:
    import faiss

    lists = stage.index.invlists
    return faiss.rev_swig_ptr(lists.get_ids(number), lists.list_size(number))


def test_a_batch_widens_each_query_by_itself(index: espnx.Index) -> None:
    wanted = [QUERY, OTHER, QUERY, OTHER]
    options: dict[str, Any] = {"k": 40, "candidates": 40, "nprobe": 2, "include": FAR}
    together = index.search(wanted, **options)
    assert [result.hits for result in together] == [
        index.search(query, **options).hits for query in wanted
    ]
    assert {len(result.hits) for result in together} == {40}


def test_without_a_filter_lists_are_as_many_as_k_needs(
    index: espnx.Index, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who names a number of lists gets just those while they hold k documents."""
    scanned: list[tuple[int, ...]] = []
    whole = LoadedIvf.scan

    def scan(self: LoadedIvf, vectors: Any, lists: Any, *rest: Any) -> Any:
        scanned.append(lists.shape)
        return whole(self, vectors, lists, *rest)

    monkeypatch.setattr(LoadedIvf, "scan", scan)
    assert len(ids(index, k=5, nprobe=1, prefetch_step=0)) == 5
    assert scanned == [(1, 1)]
    assert len(ids(index, k=100, nprobe=1, prefetch_step=0)) == 100
    assert 100 / (2 * EACH) <= scanned[1][1] <= 10
    assert len(ids(index, k=EVERYTHING, nprobe=1, candidates=3)) == len(DOCUMENTS), (
        "at least k candidates"
    )


def test_deleted_and_compacted(folder: Path) -> None:
    path = make(folder / "s")
    assert espnx.delete(path, NEAR[:-1]) == len(NEAR) - 1
    left = {*FAR, NEAR[-1]}
    for change in (lambda: None, lambda: espnx.compact(path)):
        change()
        with espnx.open(path) as index:
            assert index.store.verify() == len(left)
            for options in ({}, {"candidates": 100}, {"nprobe": 1, "exclude": []}):
                assert len(ids(index, k=10, **options)) == 10
            assert set(ids(index, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING)) == left
            assert len(ids(index, k=150)) == 150
            assert len(ids(index, k=EVERYTHING, include=FAR)) == len(FAR)
    with espnx.open(path) as index:
        allowed = index._versions.newest.filters.allowed(None, [])
        assert allowed is not None
        assert index.first_stage.counts(allowed).in_lists.min() > 0, "an empty list is left"


def test_added_parts_and_deletions_from_all(folder: Path) -> None:
    """Records of a list lie in several places; the count of each list is that of a look at every
    entry."""
    path = folder / "s"
    build(path, DOCUMENTS[:101], dims=(DIM, DIM), nlist=7)
    espnx.add(path, DOCUMENTS[101:300])
    espnx.add(path, DOCUMENTS[300:330])
    espnx.delete(path, range(0, 330, 3))
    with espnx.open(path) as index:
        for include, exclude in (
            (None, None),
            (None, range(50)),
            (range(40, 320), range(100, 130)),
            ([], None),
            (None, range(330)),
        ):
            allowed = index._versions.newest.filters.allowed(include, exclude)
            assert allowed is not None
            bits = np.unpackbits(allowed.bitmap, bitorder="little")
            wanted = [int(bits[members(index.first_stage, number)].sum()) for number in range(7)]
            assert index.first_stage.counts(allowed).in_lists.tolist() == wanted
            assert allowed.count == sum(wanted)
            alive = {
                i
                for i in range(330)
                if i % 3 and i in (include or range(330)) and i not in (exclude or ())
            }
            assert allowed.count == (0 if include == [] else len(alive))
