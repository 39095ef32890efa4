"""Arguments that do not fit are refused, with a message that says which and what would do; encoders
that misbehave do no harm."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.build.documents import Document, batches, encode
from espnx.retrieval.search.index import Index
from tests.retrieval.common import D_CLS, DIM, build, check_store, corpus, queries


@pytest.fixture(scope="module")
def index(store: Path) -> Iterator[Index]:
    with espnx.open(store) as opened:
        yield opened


def query(cls: Any = None, tokens: Any = None) -> espnx.Encoded:
    return espnx.Encoded(
        torch.ones(D_CLS) if cls is None else cls, torch.ones(2, DIM) if tokens is None else tokens
    )


@pytest.mark.parametrize(
    ("bad", "said"),
    [
        (query(cls=torch.ones(D_CLS + 8)), r"cls \[24\].*expected cls \[16\]"),
        (query(cls=torch.ones(1, D_CLS)), r"cls \[1, 16\]"),
        (query(tokens=torch.ones(2, DIM + 8)), r"tokens \[2, 16\]"),
        (query(tokens=torch.ones(DIM)), r"tokens \[8\]"),
        (query(cls=torch.full((D_CLS,), torch.nan)), "NaN"),
        (query(tokens=torch.full((2, DIM), torch.inf)), "NaN or infinity"),
        (query(tokens=-torch.full((2, DIM), torch.inf)), "NaN or infinity"),
        ("text", "no encoder"),
        (["text"], "no encoder"),
        ([query(), "text"], "no encoder"),
        ([5], "a query; got int"),
        (b"text", "a query; got int"),
        ([query(), torch.ones(D_CLS)], "a query; got Tensor"),
        (
            torch.ones(3, DIM),
            (
                rf"a query; got Tensor of shape \[3, {DIM}\].*Fix: espnx.Encoded\(cls=..., "
                rf"tokens=...\), cls of shape \[{D_CLS}\]"
            ),
        ),
        (
            np.ones((3, DIM)),
            rf"a query; got ndarray of shape \[3, {DIM}\].*tokens of shape \[n, {DIM}\]",
        ),
        (None, "a query; got NoneType"),
        (5, "a query; got int"),
        (espnx.Encoded(None, torch.ones(2, DIM)), "query vectors"),  # type: ignore[arg-type]
        (espnx.Encoded(torch.ones(D_CLS), [[1.0], [1.0, 2.0]]), "query vectors"),  # type: ignore[arg-type]
        (query(tokens=torch.full((2, DIM), 3e38)), "score"),
        (query(cls=torch.full((D_CLS,), 3e38)), "score"),
    ],
)
def test_queries_that_do_not_fit(index: Index, bad: Any, said: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=said):
        index.search(bad)
    assert index.search(query(), k=3).hits


@pytest.mark.parametrize(
    "options",
    [
        {"k": 0},
        {"k": -1},
        {"candidates": 0},
        {"candidates": -5},
        {"rerank": -1},
        {"nprobe": 0},
        {"nprobe": -1},
        {"nprobe": "all"},
        {"nprobe": 1.5},
        {"prefetch_step": -0.1},
        {"prefetch_step": 1.1},
        {"prefetch_step": float("nan")},
        {"cls_weight": float("nan")},
        {"cls_weight": float("inf")},
        {"cls_weight": "1"},
        {"cls_weight": 1e300},
        {"cls_weight": True},
        {"deadline_s": "1"},
        {"deadline_s": None},
        {"deadline_s": 0},
        {"deadline_s": float("inf")},
    ],
)
def test_search_options_out_of_range(index: Index, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError) as caught:
        index.search(query(), **options)
    name, value = next(iter(options.items()))
    assert name in str(caught.value)
    assert str(value) in str(caught.value)


@pytest.mark.parametrize(
    "options",
    [
        {"threads": "2"},
        {"threads": 0},
        {"threads": 1.5},
        {"threads": 10**6},
        {"threads": True},
        {"compute": None},
        {"compute": 1.5},
        {"cost": 3},
        {"coarse": "disk"},
        {"first_stage_on": None},
    ],
    ids=repr,
)
def test_what_an_index_is_not_opened_with(store: Path, options: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError, match=next(iter(options))):
        espnx.open(store, **options)


def test_a_coarse_tier_in_memory_that_is_not_there(store: Path) -> None:
    with pytest.raises(
        errors.InvalidInputError, match=r"coarse='ram'; got a store without a coarse tier.*bit1"
    ):
        espnx.open(store, coarse="ram")


def test_a_weight_for_cls_vectors_that_are_not_there(folder: Path) -> None:
    """It would weigh the pooled vectors of the first stage in a cascade, and nothing elsewhere."""
    build(folder / "s", corpus(30, d_cls=0), dims=(0, DIM), coarse="bit1")
    wanted = espnx.Encoded(torch.empty(0), torch.ones(2, DIM))
    with espnx.open(folder / "s") as index:
        for options in ({}, {"cascade": 5}):
            with pytest.raises(errors.InvalidInputError, match="cls_weight; got 2"):
                index.search(wanted, cls_weight=2.0, **options)
            assert (
                index.search(wanted, cls_weight=0.0, **options).hits
                == index.search(wanted, **options).hits
            )


def test_an_index_that_is_closed(store: Path) -> None:
    index = espnx.open(store)
    index.close()
    with pytest.raises(errors.EngineClosedError, match="closed"):
        index.search(query())
    index.close()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"format": "fp8"}, "unknown record format; got 'fp8'"),
        ({"first_stage_code": "hnsw"}, "first-stage code.*'hnsw'"),
        ({"first_stage_code": "pq"}, "first-stage code"),
        ({"first_stage_code": "pq0"}, "M divides"),
        ({"first_stage_code": "pq5"}, "M divides"),
        ({"first_stage_code": "pq8"}, "at least 256 documents; got 50"),
        ({"nlist": 0}, "nlist"),
        ({"nlist": -3}, "nlist"),
        ({"nlist": "4"}, "nlist"),
        ({"nlist": True}, "nlist"),
        ({"centroids": 1.5}, "centroids"),
        ({"memory": 1.5}, "memory"),
        ({"cls_weight": "x"}, "cls_weight"),
        ({"cls_weight": 1e300}, "cls_weight"),
        ({"directories": 5}, "directories"),
        ({"directories": [""]}, "directories"),
        ({"directories": [3]}, "directories"),
        ({"pca": 0}, "pca; got 0"),
        ({"pca": 12}, "at most 8"),
        ({"pca": 16}, "at most 8"),
        ({"cls_weight": float("nan")}, "cls_weight"),
        ({"cls_weight": float("-inf")}, "cls_weight"),
        ({"memory": "1 gigabyte"}, "cannot read a size"),
        ({"memory": "64MiB"}, r"memory budget too small.*expected at least.*iB"),
        ({"directories": "/somewhere"}, r"directories.*\['/somewhere'\]"),
        ({"dims": None}, "needs an encoder"),
        ({"dims": (-1, 8)}, "d_cls.*at least 0"),
        ({"dims": (16, 0)}, "dim of a record.*at least 1"),
        ({"dims": (16, 65537)}, "dim of a record; got 65537"),
        ({"dims": 5}, "dims; got 5"),
    ],
)
def test_build_options_that_do_not_fit(folder: Path, options: dict[str, Any], said: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=said):
        build(folder / "s", corpus(50), **options)
    assert not (folder / "s" / "MANIFEST.json").exists()
    build(folder / "s", corpus(50), restart=True)  # and the directory is of use afterwards
    check_store(folder / "s", corpus(50))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 7e4])
@pytest.mark.parametrize("part", ["cls", "tokens"])
def test_documents_that_do_not_fit(folder: Path, part: str, value: float) -> None:
    documents = corpus(40, tokens=(2, 3))
    getattr(documents[30].vectors, part).view(-1)[3] = value
    with pytest.raises(errors.InvalidInputError, match="'doc-30'"):
        build(folder / "s", documents)


@pytest.mark.parametrize(
    ("documents", "said"),
    [
        (None, "documents; got NoneType"),
        (5, "documents; got int"),
        (
            [espnx.Document(1, "", (torch.ones(D_CLS), torch.ones(2, DIM)))],
            "vectors of document 1; got tuple",
        ),  # type: ignore[arg-type]
        (
            [espnx.Document(1, "", espnx.Encoded(torch.ones(D_CLS), None))],
            "vectors of document 1; got NoneType",
        ),  # type: ignore[arg-type]
        (
            [espnx.Document(1, "", espnx.Encoded(None, torch.ones(2, DIM)))],
            "vectors of document 1; got NoneType",
        ),  # type: ignore[arg-type]
        (
            [espnx.Document(1, "", espnx.Encoded(torch.ones(D_CLS), torch.tensor(1.0)))],
            "vectors of document 1",
        ),
    ],
)
def test_what_is_no_document(folder: Path, documents: Any, said: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=said):
        build(folder / "s", documents)
    build(folder / "t", corpus(5))
    with pytest.raises(errors.InvalidInputError, match=said):
        espnx.add(folder / "t", documents)


class Scripted:
    """An encoder that does as a test says."""

    name, d_cls, dim = "scripted@1", D_CLS, DIM

    def __init__(self, encode: Any = None, encode_queries: Any = None):
        self._encode, self._queries = encode or self.right, encode_queries or self.right

    @staticmethod
    def right(texts: list[str]) -> list[espnx.Encoded]:
        made = []
        for text in texts:
            vectors = corpus(1, seed=len(text))[0].vectors
            assert vectors is not None
            made.append(vectors)
        return made

    def encode_documents(self, texts: list[str]) -> list[espnx.Encoded]:
        return self._encode(texts)

    def encode_queries(self, texts: list[str]) -> list[espnx.Encoded]:
        return self._queries(texts)


TEXTS = [(i, "x" * (i % 50)) for i in range(600)]


class OddError(Exception):
    pass


def test_what_an_encoder_raises_passes_through(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unchanged. Nothing is left to continue: once mended, the encoder may make other vectors
    under the same name."""
    monkeypatch.setattr("espnx.retrieval.build.builder.CHECKPOINT_S", 0.0)
    calls = 0

    def fail_third(texts: list[str]) -> list[espnx.Encoded]:
        nonlocal calls
        calls += 1
        if calls == 3:
            raise OddError("of its own")
        return Scripted.right(texts)

    with pytest.raises(OddError, match="of its own"):
        build(folder / "s", TEXTS, encoder=Scripted(fail_third), dims=None)
    report = build(folder / "s", TEXTS, encoder=Scripted(), dims=None)
    assert report.resumed_documents == 0
    with espnx.open(folder / "s", Scripted()) as index:
        assert index.store.verify() == 600


def test_a_generator_that_raises_midway(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espnx.retrieval.build.builder.CHECKPOINT_S", 0.0)
    documents = corpus(600)

    def stops() -> Iterator[espnx.Document]:
        yield from documents[:300]
        raise OddError("the source is gone")

    with pytest.raises(OddError):
        build(folder / "s", stops())
    assert build(folder / "s", iter(documents)).resumed_documents == 256
    check_store(folder / "s", documents)


@pytest.mark.parametrize(
    "change", [lambda made: made[:-1], lambda made: [*made, made[0]], lambda made: []]
)
def test_an_encoder_that_returns_another_number(folder: Path, change: Any) -> None:
    """Pairing off would give texts the vectors of their neighbours."""
    with pytest.raises(errors.InvalidInputError, match=r"scripted@1: encode .* results"):
        build(
            folder / "s",
            TEXTS,
            encoder=Scripted(lambda texts: change(Scripted.right(texts))),
            dims=None,
        )
    build(folder / "s", TEXTS[:50], encoder=Scripted(), dims=None)
    with (
        espnx.open(
            folder / "s", Scripted(encode_queries=lambda texts: change(Scripted.right(texts)))
        ) as index,
        pytest.raises(errors.InvalidInputError, match="encode 2 texts"),
    ):
        index.search(["a", "bb"])


def test_another_encoder_than_the_stores(folder: Path) -> None:
    build(folder / "s", TEXTS[:50], encoder=Scripted(), dims=None)
    other = Scripted()
    other.name = "scripted@2"
    with pytest.raises(
        errors.InvalidInputError, match="another encoder; got scripted@2; expected scripted@1"
    ):
        espnx.open(folder / "s", other)
    with espnx.open(folder / "s", Scripted()) as index:
        assert len(index.search(["xx", queries(1)[0]], k=4)) == 2


@pytest.mark.parametrize("given", [list, tuple, iter])
def test_texts_alone_are_numbered(folder: Path, given: Any) -> None:
    texts = ["red", "green", "blue"]
    build(folder / "s", given(texts), encoder=Scripted(), dims=None)
    with espnx.open(folder / "s", Scripted()) as index:
        assert index.get([0, 1, 2]) == texts
        assert set(index) == {0, 1, 2}
    with pytest.raises(
        errors.InvalidInputError, match="text of document 1; got tuple; expected a str"
    ):
        build(folder / "t", given(["red", ("b", "green")]), encoder=Scripted(), dims=None)
    with pytest.raises(
        errors.InvalidInputError, match=r"document 0; got str.*Fix: enumerate\(texts\)"
    ):
        espnx.add(folder / "s", ["a fourth"], Scripted())
    with espnx.open(folder / "s", Scripted()) as index:
        assert len(index) == 3


@pytest.mark.parametrize("given", [dict.fromkeys(["a", "b"], "text"), {"a", "b"}])
def test_what_yields_ids_is_no_list_of_texts(folder: Path, given: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="document 0; got str"):
        build(folder / "s", given, encoder=Scripted(), dims=None)
    assert not (folder / "s").exists()


def test_progress_is_told_of_the_first_documents_before_the_first_batch_is_done(
    folder: Path,
) -> None:
    told: list[tuple[str, int, int | None]] = []
    build(
        folder / "s",
        TEXTS[:100],
        encoder=Scripted(),
        dims=None,
        progress=lambda *each: told.append(each),
    )
    assert [done for phase, done, _ in told if phase == "spool"] == [0, 16, 100]


def test_batches_cut_by_bytes_and_number() -> None:
    """A batch holds at most so many documents, and at most so many bytes of expected vectors unless
    it is a single document."""
    long = [
        espnx.Document(i, "", espnx.Encoded(torch.zeros(8), torch.zeros(n, 8)))
        for i, n in enumerate([1, 10, 1, 1, 50, 1, 0, 0])
    ]
    sizes = [
        [len(d.vectors.tokens) for d in batch if d.vectors]
        for batch in batches(long, 3, 12 * 8 * 4, 8)
    ]
    assert sizes == [[1, 10, 1], [1], [50], [1, 0, 0]]


def test_vectors_that_documents_bring_go_before_the_encoders() -> None:
    own = espnx.Encoded(torch.full((D_CLS,), 7.0), torch.zeros(1, DIM))
    made = encode([Document(1, "a"), Document(2, "b", own), Document(3, "cc")], Scripted())
    assert made[1] is own
    assert torch.equal(made[2].cls, Scripted.right(["cc"])[0].cls)
    assert np.array_equal(made[0].tokens.numpy(), Scripted.right(["a"])[0].tokens.numpy())
