"""Search from SSD ranks as the in-memory reference, and as the documents' own vectors say, whatever
the options."""

from __future__ import annotations

import copy
import itertools
import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from multiprocessing.reduction import ForkingPickler
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.reference import InMemoryReference
from espnx.retrieval.search.index import Index
from tests.forks import Forks
from tests.retrieval.common import (
    D_CLS,
    DIM,
    EVERYTHING,
    assert_ranking,
    build,
    corpus,
    exact_scores,
    queries,
    same,
)
from tests.storage.common import uring_refusal


@pytest.fixture(scope="module")
def index(store: Path) -> Iterator[Index]:
    with espnx.open(store) as opened:
        yield opened


@pytest.fixture(scope="module")
def reference(index: Index) -> InMemoryReference:
    return InMemoryReference(index.store, index.first_stage)


def test_every_combination_of_options(
    index: Index, reference: InMemoryReference, documents: list[espnx.Document]
) -> None:
    """Re-ranked hits are the best of the first `rerank` candidates; the others follow in
    first-stage order."""
    for number, (rerank, step, nprobe, candidates) in enumerate(
        itertools.product(
            [None, 0, 1, 64, 1000], [0, 0.05, 0.3, 1.0], [1, "auto", EVERYTHING], [1, 50, 1000]
        )
    ):
        query = queries(3)[number % 3]
        weight = [1.0, 0.0, 2.5, -1.5][number % 4]
        scores, bounds = exact_scores(documents, query, weight, "fp16")
        options = {"rerank": rerank, "nprobe": nprobe, "prefetch_step": step, "cls_weight": weight}
        result = index.search(query, k=candidates, candidates=candidates, **options)
        lists, wanted = index.default_nprobe if nprobe == "auto" else nprobe, min(candidates, 300)
        found, similarity = index.first_stage.start(
            query.cls.numpy()[None], wanted, lists, at_least=wanted
        ).complete()[0]
        depth = len(found) if rerank is None else min(rerank, len(found))
        head, tail = result.hits[:depth], result.hits[depth:]
        assert (result.candidates, result.reranked, len(result.hits)) == (
            len(found),
            depth,
            len(found),
        )
        assert [hit.reranked for hit in result.hits] == [True] * depth + [False] * (
            len(found) - depth
        )
        assert [(hit.number, hit.score) for hit in tail] == list(
            zip(found[depth:].tolist(), similarity[depth:].tolist(), strict=True)
        )
        assert {hit.number for hit in head} == set(found[:depth].tolist())
        assert_ranking(head, {hit.id: scores[hit.id] for hit in head}, bounds)
        if rerank is None:
            ranked = reference.rank(query, candidates=candidates, nprobe=lists, cls_weight=weight)
            assert [number for number, _ in ranked] == [hit.number for hit in head]


FOUND_BY_WORKER = """
import json
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from tests.retrieval.common import queries
with ForkingPickler.loads(Path("index").read_bytes()) as index:
    print(json.dumps([hit.id for hit in index.search(queries(1)[0], k=5)]))
"""


def test_a_pickle_opens_the_store_anew(
    index: Index, store: Path, tmp_path: Path, open_forks: Callable[[str], Forks]
) -> None:
    with espnx.open(
        store, None, engine="posix", hot="1MiB", threads=1, compute=torch.device("cpu")
    ) as opened:
        with copy.copy(opened) as other:  # by what a pickle is made of
            assert (other.encoder, other.hot is not None, other.store.path) == (
                None,
                True,
                str(store.resolve()),
            )
            result = other.search(queries(1)[0], k=5)
        assert result.effective_path == "posix"
    expected = [hit.id for hit in index.search(queries(1)[0], k=5)]
    assert [hit.id for hit in result] == expected
    (tmp_path / "index").write_bytes(ForkingPickler.dumps(index))  # as a worker gets it
    out, err = tmp_path / "stdout", tmp_path / "stderr"
    run = open_forks("tests.doc_examples").run
    assert run(text=FOUND_BY_WORKER, cwd=tmp_path, stdout=out, stderr=err) == 0, err.read_text()
    assert json.loads(out.read_text()) == expected


def test_a_pickle_takes_no_open_things_along(store: Path) -> None:
    engine = espnx.open_engine("posix")
    opened = espnx.open(store, engine=engine)
    with pytest.raises(
        errors.InvalidInputError, match=r"a pickled index; its engine; got NativeEngine.*espnx.open"
    ):
        copy.copy(opened)
    opened.close()
    engine.close()
    with pytest.raises(errors.EngineClosedError, match="closed"):
        copy.copy(opened)


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
@pytest.mark.parametrize(("d_cls", "dim"), [(8, 8), (384, 24), (24, 32), (32, 128)])
def test_formats_and_dimensions(folder: Path, fmt: str, d_cls: int, dim: int) -> None:
    documents = corpus(90, d_cls=d_cls, dim=dim, tokens=(0, 40))
    build(folder / "s", documents, dims=(d_cls, dim), format=fmt)
    with espnx.open(folder / "s") as index:
        for query in queries(4, d_cls=d_cls, dim=dim):
            result = index.search(query, k=90, candidates=90, nprobe=EVERYTHING)
            assert len(result.hits) == 90
            assert_ranking(result.hits, *exact_scores(documents, query, 1.0, fmt))


def test_projection_to_as_many_dimensions(folder: Path) -> None:
    """Would only turn the vectors: they stay as they are."""
    documents = corpus(80, dim=32)
    build(folder / "s", documents, dims=(D_CLS, 32), pca=32, format="fp32")
    with espnx.open(folder / "s") as index:
        assert index.store.projection is None
        for query in queries(3, dim=32):
            result = index.search(query, k=80, candidates=80, nprobe=EVERYTHING)
            assert_ranking(result.hits, *exact_scores(documents, query, 1.0, "fp32"))


@pytest.mark.parametrize("fmt", ["fp16", "fp32"])
@pytest.mark.parametrize("kept", [8, 16, 31])
def test_projection(folder: Path, fmt: str, kept: int) -> None:
    """Documents are projected before they are rounded to the stored format; queries by the same
    matrix."""
    documents = corpus(80, dim=32)
    build(folder / "s", documents, dims=(D_CLS, 32), pca=kept, format=fmt)
    with espnx.open(folder / "s") as index:
        assert index.store.projection is not None
        matrix = index.store.projection.components
        assert torch.allclose(matrix.T @ matrix, torch.eye(kept), atol=1e-5)
        assert not index.store.projection.is_normalised  # these tokens are of any length
        shown = [
            espnx.Document(d.id, d.text, espnx.Encoded(d.vectors.cls, d.vectors.tokens @ matrix))
            for d in documents
            if d.vectors
        ]
        reference = InMemoryReference(index.store, index.first_stage)
        for query in queries(3, dim=32):
            result = index.search(query, k=80, candidates=80, nprobe=EVERYTHING)
            ranked = reference.rank(query, candidates=80, nprobe=EVERYTHING, cls_weight=1.0)
            assert [number for number, _ in ranked] == [hit.number for hit in result.hits]
            scores, bounds = exact_scores(
                shown, espnx.Encoded(query.cls, query.tokens @ matrix), 1.0, fmt
            )
            # The projection's own sums may be taken in another order, which can move a stored value
            # by one unit in its last place.
            unit = {"fp16": 2.0**-10, "fp32": 2.0**-22}[fmt]
            bounds = {
                key: bound + unit * float(query.tokens.norm(dim=1).sum()) * 3
                for key, bound in bounds.items()
            }
            for hit in result.hits:
                assert same(hit.score, scores[hit.id], bounds[hit.id])


@pytest.mark.parametrize("k", [1, 10, 299, 300, 301, 10**6])
def test_k(index: Index, documents: list[espnx.Document], k: int) -> None:
    query = queries(1)[0]
    result = index.search(query, k=k, candidates=EVERYTHING, nprobe=EVERYTHING)
    assert len(result.hits) == min(k, 300)
    assert_ranking(result.hits, *exact_scores(documents, query, 1.0, "fp16"))
    assert len(index.search(query, k=k, candidates=7).hits) == min(k, 300), "at least k candidates"


def test_one_query_or_several(index: Index) -> None:
    wanted = queries(5)
    together = index.search(wanted, k=20)
    assert isinstance(together, list)
    assert [result.hits for result in together] == [
        index.search(query, k=20).hits for query in wanted
    ]
    assert index.search([], k=20) == []


def test_a_query_without_tokens(index: Index, documents: list[espnx.Document]) -> None:
    """MaxSim is an empty sum: the CLS similarity alone ranks, and no record is read for it."""
    query = espnx.Encoded(queries(1)[0].cls, torch.empty(0, DIM))
    result = index.search(
        query, k=300, candidates=300, nprobe=EVERYTHING, prefetch_step=0.3, explain=True
    )
    assert (result.requests, result.bytes_moved, result.reranked, len(result)) == (0, 0, 0, 300)
    similar = {
        document.id: float(query.cls @ document.vectors.cls)
        for document in documents
        if document.vectors
    }
    assert [hit.id for hit in result] == sorted(
        similar, key=lambda identifier: -similar[identifier]
    )
    assert all(
        hit.matches == () and hit.score == pytest.approx(similar[hit.id], abs=1e-4)
        for hit in result
    )
    together = index.search([query, queries(1)[0], query], k=5)
    assert [len(each) for each in together] == [5, 5, 5]
    assert (
        together[0].hits
        == [replace(hit, matches=None) for hit in result.hits[:5]]
        == together[2].hits
    )
    assert together[1].hits == index.search(queries(1)[0], k=5).hits


def test_documents_without_tokens_rank_by_cls(
    index: Index, documents: list[espnx.Document]
) -> None:
    """MaxSim of no tokens is 0, so that a document's CLS vector places it, and every score is a
    number."""
    query = queries(1)[0]
    empty = {
        document.id: document
        for document in documents
        if document.vectors and not len(document.vectors.tokens)
    }
    assert len(empty) > 3
    for options in ({}, {"prefetch_step": 0.3}):
        result = index.search(query, k=300, nprobe=EVERYTHING, **options)
        found = {hit.id: hit.score for hit in result if hit.id in empty}
        assert found.keys() == empty.keys()
        for identifier, score in found.items():
            assert score == pytest.approx(
                float(query.cls @ empty[identifier].vectors.cls), abs=2e-2
            )
    assert {hit.id for hit in result.hits[-len(empty) :]} != set(empty)
    alone = index.search([query, queries(2)[1]], k=300, nprobe=EVERYTHING, cls_weight=0)[0]
    assert {hit.score for hit in alone if hit.id in empty} == {0.0}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("code", ["flat", "sq8", "pq8"])
@pytest.mark.parametrize("step", [0.05, 0.3, 0.7, 1.0])
def test_hit_rate_and_two_steps_equal_faiss(folder: Path, code: str, step: float) -> None:
    """The first stage in two steps is FAISS's own search; the hit rate is the share of its result
    known after the first step."""
    import faiss

    build(folder / "s", corpus(400), first_stage_code=code, nlist=9)
    with espnx.open(folder / "s") as index:
        ivf = index.first_stage.index
        for query, count, nprobe in itertools.product(queries(6), [1, 40, 400], [1, 4, 9]):
            vector = query.cls.numpy().reshape(1, -1)
            scores, numbers = (
                row[0]
                for row in ivf.search(
                    vector, count, params=faiss.SearchParametersIVF(nprobe=nprobe)
                )
            )
            scores, numbers = scores[numbers >= 0], numbers[numbers >= 0]
            stage = index.first_stage.start(vector, count, nprobe)
            early, known = stage.advance(step)[0]
            ours, similarity = stage.complete()[0]
            assert np.array_equal(similarity, scores)
            # equal codes have equal scores: at the last place which one stays is anyone's choice
            settled = scores > scores[-1]
            assert set(ours[settled].tolist()) == set(numbers[settled].tolist())
            assert len(set(ours.tolist())) == len(ours)
            delta = max(1, round(step * nprobe))
            first, _ = (
                row[0]
                for row in ivf.search(vector, count, params=faiss.SearchParametersIVF(nprobe=delta))
            )
            assert np.array_equal(np.sort(known), np.sort(first[first > -3e38]))
            result = index.search(query, k=1, candidates=count, nprobe=nprobe, prefetch_step=step)
            assert (
                abs(result.hit_rate - len(set(ours.tolist()) & set(early.tolist())) / len(ours))
                < 1e-3
            )


def test_hit_rate_at_both_ends(index: Index) -> None:
    query = queries(1)[0]
    assert index.search(query, prefetch_step=0, nprobe=8).hit_rate == 0
    assert index.search(query, prefetch_step=1.0, nprobe=8).hit_rate == 1
    assert 0 < index.search(query, prefetch_step=0.3, nprobe=8, candidates=300).hit_rate < 1


def test_equal_scores_have_one_order(folder: Path) -> None:
    """Fifty times the same vectors: by record number, for any prefetch step, every time."""
    twin = corpus(1, tokens=(3, 3))[0].vectors
    build(folder / "s", [(espnx.Document(i, f"{i}", twin)) for i in range(50)])
    with espnx.open(folder / "s") as index:
        for step, k in itertools.product([0, 0.3, 1.0], [1, 7, 50]):
            result = index.search(
                queries(1)[0], k=k, candidates=50, nprobe=EVERYTHING, prefetch_step=step
            )
            assert [hit.number for hit in result.hits] == list(range(k))


@pytest.mark.parametrize("engine", ["uring", "posix", "memory"])
def test_engines(store: Path, documents: list[espnx.Document], engine: str) -> None:
    if engine == "uring" and (reason := uring_refusal()):
        pytest.skip(f"[kernel] io_uring: {reason}")
    with espnx.open(store, engine=engine) as index:
        for query in queries(3):
            result = index.search(query, k=300, candidates=300, nprobe=EVERYTHING)
            assert_ranking(result.hits, *exact_scores(documents, query, 1.0, "fp16"))
            assert result.effective_path == engine
            assert result.bytes_moved >= result.bytes_asked > 0
            assert result.requests > 0


def test_threads_get_what_one_gets(index: Index) -> None:
    wanted = queries(24, seed=8)
    options = {"k": 50, "candidates": 120}
    alone = [index.search(query, **options).hits for query in wanted]
    with ThreadPoolExecutor(4) as pool:
        for _ in range(3):
            assert [
                result.hits
                for result in pool.map(lambda query: index.search(query, **options), wanted)
            ] == alone


def test_bytes_and_times_add_up(index: Index) -> None:
    """Without a prefetch exactly the candidates are read; with one, at least those."""
    query = queries(1)[0]
    result = index.search(query, k=5, candidates=60, prefetch_step=0, nprobe=EVERYTHING)
    numbers = index.first_stage.start(query.cls.numpy()[None], 60, EVERYTHING).complete()[0][0]
    wanted = int(index.store.full.schema.sizes(index.store.n_tokens[numbers]).sum())
    assert result.bytes_asked == wanted
    assert (
        index.search(query, k=5, candidates=60, prefetch_step=0.3, nprobe=EVERYTHING).bytes_asked
        >= wanted
    )
    assert index.search(query, k=5, rerank=0).bytes_asked == 0
    times = result.timings
    for part in (times.first_stage_s, times.critical_io_s, times.merge_s):
        assert 0 <= part <= times.total_s
    assert 0 <= times.maxsim_s <= 2 * times.total_s  # two threads


def test_what_it_says_of_itself(store: Path) -> None:
    with Index(store, hot="1MiB") as index:
        assert repr(index) == f"<Index {str(store)!r}: {len(index):,} documents, generation 1>"
        rows = dict(line.split("  ", 1) for line in index.summary().splitlines())
        assert rows["path"].strip() == str(store)
        assert {
            "documents",
            "token vectors",
            "first stage",
            "in memory: metadata",
            "in memory: hot",
            "scored on",
        } <= set(rows)
    assert repr(index) == f"<Index {str(store)!r}: closed>"
    with pytest.raises(errors.EngineClosedError):
        index.summary()
