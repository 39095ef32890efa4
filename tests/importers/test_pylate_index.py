"""PyLate's calls on a store: adding, removing, retrieving, re-ranking."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from espnx.errors import InvalidInputError

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")

from espnx.integrations.pylate import EspnxIndex, rerank
from espnx.retrieval.build.api import build
from espnx.retrieval.build.changes.change import compact
from tests.encoders import tiny

DOCUMENTS = tiny.clouds(40)
IDS = [f"d{n}" for n in range(40)]
QUERIES = np.stack([DOCUMENTS[n][:3] for n in (0, 7, 30)])


def maxsim(query, document):
    return float((query @ document.T).max(1).sum())


def expected(query, ids):
    scored = [(identifier, maxsim(query, DOCUMENTS[IDS.index(identifier)])) for identifier in ids]
    return sorted(scored, key=lambda pair: -pair[1])


def check(results, query, ids, atol=1e-5):
    want = expected(query, ids)
    assert [set(result) for result in results] == [{"id", "score"}] * len(results)
    assert sorted(result["id"] for result in results) == sorted(ids)
    assert [result["score"] for result in results] == pytest.approx(
        [score for _, score in want], abs=atol
    )


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    with EspnxIndex(
        tmp_path_factory.mktemp("indexes"), "mine", build_options={"format": "fp32"}
    ) as made:
        assert made.add_documents(documents_ids=IDS, documents_embeddings=DOCUMENTS) is made
        yield made


def test_every_document_exactly(index):
    for results, query in zip(index(QUERIES, k=40), QUERIES, strict=True):
        check(results, query, IDS)


def test_best_k(index):
    results = index(torch.from_numpy(QUERIES), k=3)
    assert [[hit["id"] for hit in row] for row in results] == [
        [identifier for identifier, _ in expected(q, IDS)[:3]] for q in QUERIES
    ]
    assert isinstance(results[0][0]["score"], float)


@pytest.mark.parametrize(
    "queries",
    [
        list(QUERIES),
        [torch.from_numpy(query) for query in QUERIES],
        QUERIES.tolist(),
        torch.from_numpy(QUERIES).double(),
        list(QUERIES.astype(np.float16)),
    ],
    ids=["numpy", "torch", "lists", "double", "half"],
)
def test_kinds_of_queries(index, queries):
    for results, query in zip(index(queries, k=40), QUERIES, strict=True):
        check(results, query, IDS, atol=3 * 2**-10)  # three query tokens rounded to fp16


def test_one_query(index):
    assert len(index(QUERIES[0], k=2)) == 1
    assert index([], k=2) == []
    check(index.retrieve(queries_embeddings=QUERIES[0], k=40, device="cpu")[0], QUERIES[0], IDS)


def test_subset(index):
    one = IDS[5:9]
    for results, query in zip(index(QUERIES, k=10, subset=one), QUERIES, strict=True):
        check(results, query, one)
    each = [IDS[:2], [], IDS[3:9]]
    for results, query, ids in zip(index(QUERIES, k=10, subset=each), QUERIES, each, strict=True):
        check(results, query, ids)
    assert index(QUERIES, k=10, subset=[]) == [[], [], []]
    with pytest.raises(InvalidInputError, match="2 lists; expected one for each of 3"):
        index(QUERIES, subset=[["d1"], ["d2"]])


def test_rerank_in_place(index):
    ids = [["d3", "d1", "d2"], ["d9"], ["d30", "d0", "d30"]]
    for made in (index.rerank(ids, QUERIES), rerank(ids, QUERIES, index.index)):
        check(made[0], QUERIES[0], ids[0])
        check(made[1], QUERIES[1], ids[1])
        assert [hit["id"] for hit in made[2]] == ["d30", "d30", "d0"]
    assert rerank([[], ["d1"], []], QUERIES, index)[0::2] == [[], []]
    with pytest.raises(InvalidInputError, match="'nobody'"):
        index.rerank([["d1", "nobody"]], QUERIES[0])
    with pytest.raises(InvalidInputError, match="3 queries and 1 lists"):
        index.rerank([["d1"]], QUERIES)


def test_rerank_of_given_embeddings():
    ids = [["a", "b"], ["c"], []]
    embeddings = [
        [DOCUMENTS[0], torch.from_numpy(DOCUMENTS[1])],
        [np.zeros((0, 32), np.float32)],
        [],
    ]
    made = rerank(ids, list(QUERIES), embeddings)
    want = sorted(
        [("a", maxsim(QUERIES[0], DOCUMENTS[0])), ("b", maxsim(QUERIES[0], DOCUMENTS[1]))],
        key=lambda pair: -pair[1],
    )
    assert [hit["id"] for hit in made[0]] == [identifier for identifier, _ in want]
    assert [hit["score"] for hit in made[0]] == pytest.approx(
        [score for _, score in want], abs=1e-5
    )
    assert made[1:] == [[{"id": "c", "score": 0.0}], []]
    tied = rerank([["x", "y"]], QUERIES[0], [[DOCUMENTS[3], DOCUMENTS[3]]])
    assert [hit["id"] for hit in tied[0]] == ["x", "y"]
    negative = rerank([["n", "long"]], QUERIES[0], [[-QUERIES[0][:1], DOCUMENTS[9]]])
    assert next(hit for hit in negative[0] if hit["id"] == "n")["score"] == pytest.approx(
        maxsim(QUERIES[0], -QUERIES[0][:1]), abs=1e-5
    )
    with pytest.raises(InvalidInputError, match="1 ids and 2 embeddings"):
        rerank([["x"]], QUERIES[0], [[DOCUMENTS[0], DOCUMENTS[1]]])
    with pytest.raises(InvalidInputError, match="2 lists of embeddings"):
        rerank([["x"]], QUERIES[0], [[], []])


def test_a_document_without_tokens_scores_the_same_everywhere(tmp_path):
    """0: before the documents that are less similar than nothing, and after the others."""
    empty, opposite = np.zeros((0, 32), np.float32), -QUERIES[0][:1]
    with EspnxIndex(tmp_path, "mine", build_options={"format": "fp32"}) as index:
        index.add_documents(["empty", "opposite", "like"], [empty, opposite, DOCUMENTS[0]])
        ids = [["opposite", "empty", "like"]]
        stored, given = (
            rerank(ids, QUERIES[0], index),
            rerank(ids, QUERIES[0], [[opposite, empty, DOCUMENTS[0]]]),
        )
        assert (
            [hit["id"] for hit in stored[0]]
            == [hit["id"] for hit in given[0]]
            == ["like", "empty", "opposite"]
        )
        assert [hit["score"] for hit in stored[0]] == pytest.approx(
            [hit["score"] for hit in given[0]], abs=1e-5
        )
        assert stored[0][1]["score"] == given[0][1]["score"] == 0.0
        assert [hit["id"] for hit in index(QUERIES[0], k=3)[0]] == ["like", "empty", "opposite"]


def test_add_remove_update(tmp_path):
    index = EspnxIndex(tmp_path, "mine", build_options={"format": "fp32"})
    assert not index.is_indexed
    index.add_documents(IDS[:20], DOCUMENTS[:20])
    index(QUERIES[0])
    index.add_documents(iter(IDS[20:]), DOCUMENTS[20:])
    check(index(QUERIES[0], k=100)[0], QUERIES[0], IDS)
    index.remove_documents(["d3", "d25", "nobody"])
    left = [identifier for identifier in IDS if identifier not in ("d3", "d25")]
    check(index(QUERIES[0], k=100)[0], QUERIES[0], left)
    with pytest.raises(InvalidInputError, match=r"document 'new'; got cls \[0\], tokens \[2, 8\]"):
        index.update_documents(["d4", "new"], [QUERIES[0], QUERIES[0][:2, :8]])
    assert len(index(QUERIES[0], k=100)[0]) == 38
    index.update_documents(["d4", "new"], [QUERIES[0], DOCUMENTS[3]])
    results = index(QUERIES[0], k=100)[0]
    assert {hit["id"] for hit in results} == {*left, "new"}
    assert {hit["id"]: hit["score"] for hit in results}["d4"] == pytest.approx(3.0, abs=1e-5)
    index.close()
    with EspnxIndex(tmp_path, "mine") as again:  # what is there is used
        assert len(again(QUERIES[0], k=100)[0]) == 39
    with EspnxIndex(tmp_path, "mine", override=True) as new:
        assert not new.is_indexed
        with pytest.raises(InvalidInputError, match="an empty index"):
            new(QUERIES)
        new.add_documents(["first"], DOCUMENTS[:1])
        assert [hit["id"] for hit in new(QUERIES[0])[0]] == ["first"]
        new.add_documents(["second"], DOCUMENTS[1:2])  # overrides once
        assert len(new(QUERIES[0])[0]) == 2


@pytest.mark.parametrize(
    ("ids", "embeddings"),
    [
        (["d1", "new"], [DOCUMENTS[0], np.full((2, 32), np.nan, np.float32)]),
        (["d1", "d2", "d1"], DOCUMENTS[:3]),
        (["d1", "d2"], DOCUMENTS[:1]),
        (["d1"], [DOCUMENTS[0][0]]),
        (["d1", None], DOCUMENTS[:2]),
    ],
    ids=["NaN", "twice", "too few", "no matrix", "no id"],
)
def test_an_update_that_is_refused_changes_nothing(tmp_path, ids, embeddings):
    with EspnxIndex(tmp_path, "mine", build_options={"format": "fp32"}) as index:
        index.add_documents(IDS[:5], DOCUMENTS[:5])
        with pytest.raises(InvalidInputError):
            index.update_documents(ids, embeddings)
        check(index(QUERIES[0], k=10)[0], QUERIES[0], IDS[:5])
        assert index.index.store.manifest.generation == 1
        index.update_documents(["d1", "d4"], DOCUMENTS[5:7])
        assert index.index.store.manifest.generation == 2, "an update is one version"


def test_an_index_that_was_emptied_takes_documents_again(tmp_path):
    options = {
        "format": "residual2",
        "coarse": "bit1",
        "first_stage_code": "flat",
        "pooling": "muvera",
    }
    with EspnxIndex(tmp_path, "mine", build_options=options) as index:
        index.add_documents(IDS, DOCUMENTS)
        before = index.index.store.manifest
        index.remove_documents(IDS)
        index.close()
        compact(index.path)
    with EspnxIndex(tmp_path, "mine", build_options={"memory": "2GiB"}) as index:
        assert index(QUERIES[0]) == [[]]
        index.update_documents(IDS[:30], DOCUMENTS[:30])
        assert {hit["id"] for hit in index(QUERIES[0], k=40)[0]} == set(IDS[:30])
        after = index.index.store.manifest
        for name in ("encoder", "coarse", "cls_weight", "directories"):
            assert getattr(after, name) == getattr(before, name)
        assert after.schema == before.schema
        assert [after.first_stage.describe()[name] for name in ("code", "vector")] == [
            "flat",
            "muvera",
        ]


@pytest.mark.parametrize(
    "subset",
    [
        {"d1", "d3"},
        np.array(["d1", "d3"]),
        iter(["d1", "d3"]),
        ("d1", "d3"),
        [{"d1", "d3"}] * 3,
        [np.array(["d1", "d3"])] * 3,
    ],
)
def test_kinds_of_subsets(index, subset):
    for results, query in zip(index(QUERIES, k=10, subset=subset), QUERIES, strict=True):
        check(results, query, ["d1", "d3"])


@pytest.mark.parametrize(
    "subset",
    [[["d1"], None, ["d2"]], [["d1"], "d2", ["d3"]], "d1", 5, [None], [1.5], [["d1"], [None], []]],
    ids=repr,
)
def test_what_cannot_be_a_subset(index, subset):
    with pytest.raises(InvalidInputError, match="subset"):
        index(QUERIES, subset=subset)


def test_subsets_of_numbers(tmp_path):
    with EspnxIndex(tmp_path, "ints", build_options={"format": "fp32"}) as index:
        index.add_documents(torch.arange(8), DOCUMENTS[:8])
        for subset in (
            [np.int64(0), np.int64(5)],
            np.array([0, 5]),
            torch.tensor([0, 5]),
            np.array([[0, 5]]),
        ):
            assert {hit["id"] for hit in index(QUERIES[0], subset=subset)[0]} == {0, 5}
        assert {hit["id"] for hit in index.rerank([np.array([1, 2])], QUERIES[0])[0]} == {1, 2}
        index.remove_documents(np.int64(3)).remove_documents(np.array([4, 99]))
        assert {hit["id"] for hit in index(QUERIES[0])[0]} == {0, 1, 2, 5, 6, 7}
        with pytest.raises(InvalidInputError, match="id"):
            index.remove_documents([1.0])


def test_documents_that_failed_can_be_corrected(tmp_path):
    with EspnxIndex(tmp_path, "mine") as index:
        with pytest.raises(InvalidInputError):
            index.add_documents(["a", "b"], [DOCUMENTS[0], DOCUMENTS[1][:, :16]])
        index.add_documents(["c", "b"], DOCUMENTS[:2])
        assert {hit["id"] for hit in index(QUERIES[0])[0]} == {"b", "c"}


def test_ids_of_numpy_and_one_id(tmp_path):
    with EspnxIndex(tmp_path, "ints") as index:
        index.add_documents(np.arange(5), DOCUMENTS[:5])
        index.add_documents(range(5, 8), [torch.from_numpy(d).half() for d in DOCUMENTS[5:8]])
        index.add_documents("one", DOCUMENTS[8:9])
        assert index.add_documents([], []) is index
        assert {hit["id"] for hit in index(QUERIES[0], k=20)[0]} == {*range(8), "one"}


def test_quantised_as_plaid(tmp_path):
    with EspnxIndex(tmp_path, "small", build_options={"format": "residual4"}) as index:
        index.add_documents(IDS, DOCUMENTS)
        results = index(QUERIES[0], k=40)[0]
        assert results[0]["id"] == expected(QUERIES[0], IDS)[0][0]
        assert index.index.store.full.codebook.nbits == 4


@pytest.mark.parametrize(
    ("ids", "embeddings", "says"),
    [
        (["a", "b"], DOCUMENTS[:1], "2 ids and 1 embeddings"),
        (["a"], [DOCUMENTS[0][0]], r"embeddings of document 0; got torch.float32 \[32\]"),
        (["a", "b"], [DOCUMENTS[0], DOCUMENTS[1][:, :16]], "document 'b'"),
        (["a"], [[[1.0], [1.0, 2.0]]], "embeddings of document 0"),
        (["a", "a"], DOCUMENTS[:2], "'a'"),
    ],
)
def test_wrong_documents(tmp_path, ids, embeddings, says):
    with EspnxIndex(tmp_path, "bad") as index, pytest.raises(InvalidInputError, match=says):
        index.add_documents(ids, embeddings)


def test_known_ids_are_not_added_again(index):
    with pytest.raises(InvalidInputError, match="d7"):
        index.add_documents(["d7"], DOCUMENTS[7:8])
    assert len(index(QUERIES[0], k=100)[0]) == 40


def test_nothing_to_search(tmp_path):
    with EspnxIndex(tmp_path, "none") as index:
        with pytest.raises(InvalidInputError, match="an empty index"):
            index(QUERIES)
        with pytest.raises(InvalidInputError, match="an empty index"):
            index.remove_documents(["a"])


def test_a_store_with_cls_vectors_is_refused(tmp_path):
    from espnx.retrieval.build.documents import Document
    from espnx.retrieval.encoder import Encoded

    build(
        tmp_path / "cls",
        [Document("a", "", Encoded(torch.ones(8), torch.ones(2, 32)))],
        dims=(8, 32),
    )
    with (
        EspnxIndex(tmp_path, "cls") as index,
        pytest.raises(InvalidInputError, match="with a CLS vector"),
    ):
        index(QUERIES)
