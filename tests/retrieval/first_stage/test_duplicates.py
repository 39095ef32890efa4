"""Corpora whose documents are mostly alike: lists that k-means left empty, and one list that holds
nearly everything."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx
from espnx.retrieval.first_stage.document_vector import DocumentVector
from espnx.retrieval.first_stage.ivf import probing
from espnx.retrieval.first_stage.ivf.search import ListCounts, LoadedIvf
from espnx.retrieval.first_stage.ivf.stage import IvfStage
from tests.retrieval.common import EVERYTHING, build, corpus, queries
from tests.retrieval.stages import InMemoryDocuments, InMemoryEntries

ALIKE = corpus(1, tokens=(2, 2), seed=3)[0].vectors


def mostly_alike(count: int, others: int) -> list[espnx.Document]:
    """`others` of `count` documents differ; they lie between the rest."""
    apart = {
        i * count // max(1, others): document
        for i, document in enumerate(corpus(others, tokens=(1, 3), seed=9))
    }
    return [espnx.Document(i, "", apart[i].vectors if i in apart else ALIKE) for i in range(count)]


def exhaustive(documents: list[espnx.Document], query: espnx.Encoded, k: int) -> list[float]:
    """The k best scores, by NumPy, of vectors rounded as the store rounds them."""
    scores = []
    for document in documents:
        cls, tokens = (
            values.half().double().numpy()
            for values in (document.vectors.cls, document.vectors.tokens)
        )
        scores.append(
            float(
                (query.tokens.double().numpy() @ tokens.T).max(1).sum()
                + query.cls.double().numpy() @ cls
            )
        )
    return sorted(scores, reverse=True)[:k]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("count", "others", "nlist"),
    [(300, 0, 7), (1000, 20, 40), (700, 21, None), (1, 0, None), (9, 3, 3)],
)
@pytest.mark.parametrize("code", ["flat", "sq8"])
def test_as_many_hits_as_there_are_documents(
    folder: Path, count: int, others: int, nlist: int | None, code: str
) -> None:
    documents = mostly_alike(count, others)
    build(folder / "s", documents, nlist=nlist, first_stage_code=code)
    wanted = [*queries(6), ALIKE]
    with espnx.open(folder / "s") as index:
        options: list[dict[str, Any]] = [
            {},
            {"nprobe": 1},
            {"candidates": 1},
            {"prefetch_step": (0.1, 0.5)},
            {"rerank": 3},
        ]
        for k in (1, 10, EVERYTHING):
            for choice in options:
                for result in [
                    *index.search(wanted, k=k, **choice),
                    index.search(wanted[0], k=k, **choice),
                ]:
                    assert len({hit.id for hit in result.hits}) == len(result.hits) == min(k, count)
        far = [document.id for document in documents][-1:]
        assert [hit.id for hit in index.search(wanted[0], k=5, nprobe=1, include=far).hits] == far
        # Every document that differs is found where it is among the best: nprobe is that of
        # distinct ones.
        for query in wanted if code == "flat" else []:
            found = [hit.score for hit in index.search(query, k=5).hits]
            assert np.allclose(found, exhaustive(documents, query, 5), atol=1e-4)


def test_one_query_of_a_batch_widens_alone(folder: Path) -> None:
    build(folder / "s", mostly_alike(400, 30), nlist=24)
    with espnx.open(folder / "s") as index:
        wanted = [*queries(5), ALIKE, *queries(3, seed=5)]
        together = index.search(wanted, k=60, nprobe=1)
        assert [result.hits for result in together] == [
            index.search(query, k=60, nprobe=1).hits for query in wanted
        ]


def test_full_lists_ask_the_quantizer_once(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with espnx.open(store) as index:
        asked: list[int] = []
        stage = index.first_stage

        class Counted:
            def search(self, vectors: Any, count: int, **options: Any) -> Any:
                asked.append(count)
                assert options == {}
                return whole.quantizer.search(vectors, count)

        class Whole:
            quantizer = Counted()

            def __getattr__(self, name: str) -> Any:
                return getattr(whole, name)

        whole = stage.index
        monkeypatch.setattr(stage, "index", Whole())
        stage.start(np.stack([query.cls.numpy() for query in queries(4)]), 10, 3, at_least=10)
        assert asked == [3]


def test_no_query_needs_more_lists_than_said() -> None:
    rng = np.random.default_rng(4)
    for _ in range(200):
        sizes = rng.integers(0, 6, size=rng.integers(1, 12))
        held = ListCounts(sizes, int(sizes.sum()))
        nprobe, at_least = int(rng.integers(1, 14)), int(rng.integers(0, 40))
        most = held.lists_at_most(nprobe, at_least)
        useful = sizes[sizes > 0]
        for _ in range(5):
            order = rng.permutation(useful)
            enough = (
                int(np.searchsorted(np.cumsum(order), min(at_least, held.count)) + 1)
                if len(order)
                else 0
            )
            assert min(len(useful), max(nprobe, enough)) <= most
        assert most <= len(useful)


@pytest.fixture
def whole_sample(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many queries as a build outside of tests asks (see tests/retrieval/conftest.py)."""
    monkeypatch.setattr(probing, "_SAMPLE", 64)


def filled(vectors: np.ndarray, nlist: int) -> LoadedIvf:
    documents = InMemoryDocuments(vectors)
    stage = IvfStage(DocumentVector(None, vectors.shape[1]), "flat", wanted_lists=nlist).train(
        documents, 1 << 30
    )
    return stage.load([InMemoryEntries(stage.add(documents))])


@pytest.mark.usefixtures("whole_sample")
def test_duplicates_count_once_when_probing() -> None:
    """With 2,000 copies in one list, the share of them that is found says nothing of the 200
    others."""
    rng = np.random.default_rng(0)
    others = rng.normal(size=(200, 16)).astype("f4")
    vectors = np.concatenate([np.repeat(others[:1], 2000, axis=0), others])
    stage = filled(vectors, 40)
    sample = probing.distinct_sample(len(vectors), 16, lambda chosen: vectors[chosen])
    assert len(sample) == probing._SAMPLE == len(np.unique(sample, axis=0))
    nprobe, _ = probing.measure(stage, sample, 100, 0.98)
    found = wanted = 0
    for vector in sample:
        truth = {
            float(f"{score:.5g}") for score in stage.start(vector[None], 100, 40).complete()[0][1]
        }
        found += len(
            truth
            & {
                float(f"{score:.5g}")
                for score in stage.start(vector[None], 100, nprobe).complete()[0][1]
            }
        )
        wanted += len(truth)
    assert found >= 0.97 * wanted


@pytest.mark.usefixtures("whole_sample")
def test_a_sample_of_what_is_all_alike() -> None:
    one = np.ones((1, 8), "f4")
    assert (
        probing.distinct_sample(500, 8, lambda chosen: np.repeat(one, len(chosen), axis=0)).tolist()
        == one.tolist()
    )
    asked: list[int] = []

    def distinct(chosen: np.ndarray) -> np.ndarray:
        asked.append(len(chosen))
        return chosen[:, None].astype("f4")

    assert len(probing.distinct_sample(1000, 1, distinct)) == 64
    assert asked == [64], "an ordinary corpus is read once"
    assert len(probing.distinct_sample(5, 1, distinct)) == 5
