"""Building: what comes out for corpora of every awkward kind, and where the bytes lie."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.retrieval.build.builder import segment_bytes
from espnx.retrieval.store.record import MAX_TOKENS
from tests.retrieval.common import (
    D_CLS,
    DIM,
    EVERYTHING,
    assert_ranks_as_written,
    build,
    check_store,
    corpus,
    leftovers,
    queries,
)

BLOCK = 4096


def document(
    identifier: object, text: str = "t", n_tokens: int = 2, seed: int = 0
) -> espnx.Document:
    twin = corpus(1, tokens=(n_tokens, n_tokens), seed=seed)[0]
    return espnx.Document(identifier, text, twin.vectors)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [0, 1, 2, 63, 64, 65, 129])
def test_corpora_of_every_size(folder: Path, count: int) -> None:
    documents = corpus(count)
    report = build(folder / "s", documents)
    assert (report.documents, report.tokens) == (
        count,
        sum(len(d.vectors.tokens) for d in documents if d.vectors),
    )
    check_store(folder / "s", documents)
    assert leftovers(folder / "s") == ({"gen-000001"} if count else set())


def test_an_empty_corpus_finds_nothing(folder: Path) -> None:
    report = build(folder / "s", [])
    assert (report.documents, report.record_bytes, report.first_stage["nlist"]) == (0, 0, 0)
    with espnx.open(folder / "s") as index:
        for options in (
            {},
            {"prefetch_step": 0},
            {"rerank": 0},
            {"k": 1, "candidates": 1, "nprobe": 1},
        ):
            result = index.search(queries(1)[0], **options)
            assert (result.hits, result.candidates, result.bytes_asked, result.hit_rate) == (
                [],
                0,
                0,
                0,
            )


def test_the_longest_and_the_empty(folder: Path) -> None:
    """0, 1 and 65,535 tokens in one corpus; the scores are those of the vectors."""
    rng = np.random.default_rng(0)
    documents = corpus(20)
    for position, n_tokens in ((3, MAX_TOKENS), (7, 0), (11, 1)):
        long = espnx.Encoded(
            documents[position].vectors.cls,
            torch.from_numpy(rng.normal(size=(n_tokens, DIM)).astype(np.float32)),
        )
        documents[position] = espnx.Document(f"doc-{position}", f"text of {position}", long)
    build(folder / "s", documents)
    check_store(folder / "s", documents)
    with espnx.open(folder / "s") as index:
        query = queries(1)[0]
        scores = {
            hit.id: hit.score
            for hit in index.search(query, k=20, candidates=20, nprobe=EVERYTHING).hits
        }
        assert scores["doc-7"] == pytest.approx(
            float(query.cls @ documents[7].vectors.cls), rel=1e-2
        )


def test_one_token_too_many(folder: Path) -> None:
    tokens = torch.zeros(MAX_TOKENS + 1, DIM)
    with pytest.raises(errors.InvalidInputError, match=r"'too-long'.*65536 tokens.*at most 65535"):
        build(
            folder / "s",
            [*corpus(2), espnx.Document("too-long", "", espnx.Encoded(torch.zeros(D_CLS), tokens))],
        )


def test_ids_and_texts(folder: Path) -> None:
    """Ints, strings, both of the same face, extremes, and text of every script; all come back as
    they were."""
    ids = [1, "1", 0, -1, 2**63 - 1, -(2**63), "", "ключ", "a'b\"c", "x" * 5000, "\ufeff"]
    texts = [
        "",
        "one",
        "zero",
        "-",
        "largest",
        "\x00",
        "",
        "текст 文本 🙂 \n \u2028",
        "'; DROP TABLE docs",
        "y" * 100_000,
        "\ufeff",
    ]
    given = list(zip(ids, texts, strict=True))
    documents = [document(identifier, text, seed=i) for i, (identifier, text) in enumerate(given)]
    build(folder / "s", documents)
    with espnx.open(folder / "s") as index:
        hits = index.search(queries(1)[0], k=99, candidates=99, nprobe=EVERYTHING).hits
    assert {(type(hit.id), hit.id): hit.text for hit in hits} == {
        (type(identifier), identifier): text for identifier, text in given
    }


@pytest.mark.parametrize(("first", "second"), [("a", "a"), (7, 7), ("", "")])
@pytest.mark.parametrize("between", [0, 300])
def test_an_id_twice(folder: Path, first: object, second: object, between: int) -> None:
    """Within one batch, and batches apart."""
    documents = [document(first), *corpus(between), document(second)]
    with pytest.raises(errors.InvalidInputError, match="occurs twice") as caught:
        build(folder / "s", documents)
    assert repr(second) in str(caught.value)


@pytest.mark.parametrize(
    ("item", "said"),
    [
        ("text alone", "document 1; got str"),
        (("id", "text", "more"), "document 1; got tuple"),
        (document(True), "id of document 1; got True"),
        (document(None), "id of document 1"),
        (document(1.5), "id of document 1"),
        (document(2**63), "64-bit"),
        (document("a", None), "text of document 'a'; got NoneType"),  # type: ignore[arg-type]
        ({"text": "no id"}, "id of document 1"),
        ({"id": "a"}, "text of document 'a'"),
        (document("a", "\ud800"), "surrogate"),
        (document("\udfff"), "surrogate"),
        (("a", "needs an encoder"), "'a' has no vectors"),
    ],
)
def test_what_cannot_be_indexed(folder: Path, item: object, said: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=said):
        build(folder / "s", [document("fine"), item])


def test_forms_of_a_document(folder: Path) -> None:
    """Pairs, mappings with id or _id, a title before the text."""
    seen: list[str] = []

    def encode(texts: list[str]) -> list[object]:
        seen.extend(texts)
        return [(np.ones(D_CLS), np.ones((1, DIM))) for _ in texts]

    encoder = espnx.FunctionEncoder(encode, "ones@1", d_cls=D_CLS, dim=DIM)
    forms = [
        ("a", "pair"),
        {"id": "b", "text": "mapping"},
        {"_id": "c", "text": "beir", "title": "Title"},
        espnx.Document("d", "document"),
        {"id": "e", "text": "x", "title": ""},
    ]
    build(folder / "s", forms, encoder=encoder, dims=None)
    assert seen == ["pair", "mapping", "Title beir", "document", "x"]
    with espnx.open(folder / "s", encoder) as index:
        assert {hit.id: hit.text for hit in index.search("q").hits} == dict(
            zip("abcde", seen[:5], strict=True)
        )


def test_resident_memory(store: Path) -> None:
    with espnx.open(store) as index:
        assert index.store.resident_bytes <= 2 * 300 + 8 * (-(-300 // 64)) + 16 * len(
            index.store.segments
        )
        assert index.store.resident_bytes <= 8 * 300


@pytest.mark.parametrize("candidates", [5, 50, 1000])
def test_nprobe_is_the_least_that_finds_enough(
    folder: Path, monkeypatch: pytest.MonkeyPatch, candidates: int
) -> None:
    """The least, to a sixteenth, with which the documents find 98 % of their exhaustive
    candidates."""
    monkeypatch.setattr("espnx.retrieval.first_stage.ivf.stage.CANDIDATES", candidates)
    monkeypatch.setattr("espnx.retrieval.first_stage.ivf.probing._SAMPLE", 64)
    count = 600
    build(folder / "s", corpus(count, tokens=(1, 1)), nlist=32)
    with espnx.open(folder / "s") as index:
        nprobe, stage = index.default_nprobe, index.first_stage
        sample = np.sort(np.random.default_rng(1).choice(count, size=64, replace=False))
        vectors = [
            document.vectors.cls.numpy()
            for document in np.array(corpus(count, tokens=(1, 1)), dtype=object)[sample]
        ]

        def found(lists: int) -> list[set[int]]:
            return [
                set(
                    stage.start(vector[None], min(candidates, count), lists)
                    .complete()[0][0]
                    .tolist()
                )
                for vector in vectors
            ]

        exhaustive = found(32)
        wanted = 0.98 * sum(map(len, exhaustive))
        assert sum(len(a & b) for a, b in zip(found(nprobe), exhaustive, strict=True)) >= wanted
        if nprobe > 1:
            assert (
                sum(
                    len(a & b)
                    for a, b in zip(found(nprobe - max(1, nprobe // 16)), exhaustive, strict=True)
                )
                < wanted
            )
        if candidates == 50:
            assert 1 < nprobe < 32, "the case decides nothing"


def test_lists_lie_together(store: Path, documents: list[espnx.Document]) -> None:
    """Record numbers follow the inverted lists; in the file, too, and no record touches a block too
    many."""
    with espnx.open(store) as index:
        ivf = index.first_stage.index
        members = [sorted(ivf.invlists.get_ids(i) and _ids(ivf, i)) for i in range(ivf.nlist)]
        assert [number for numbers in members for number in numbers] == list(range(300))
        segment, offset, size = (part.numpy() for part in index.store.full.locate(np.arange(300)))
        assert np.all(np.diff(segment) >= 0)
        assert np.all(np.diff(offset)[np.diff(segment) == 0] > 0)
        assert np.all((offset + size - 1) // BLOCK - offset // BLOCK + 1 <= -(-size // BLOCK))
        # Within a list, documents lie in cells (test_cells.py); each is there once.
        ids = [int(identifier[4:]) for identifier, _ in index.store.texts.get(range(300))]
        assert sorted(ids) == list(range(300))


def _ids(ivf: object, number: int) -> list[int]:
    import faiss

    invlists = ivf.invlists  # type: ignore[attr-defined]
    return faiss.rev_swig_ptr(invlists.get_ids(number), invlists.list_size(number)).tolist()


@pytest.mark.sampled(1)
@pytest.mark.parametrize("segment_bytes", [1, 20_000, 60_000])
@pytest.mark.parametrize("run_bytes", [1, 3000, 50_000])
def test_many_segments(
    folder: Path, small_segments: Callable[[int, int], None], segment_bytes: int, run_bytes: int
) -> None:
    small_segments(segment_bytes, run_bytes)
    documents = corpus(500, tokens=(0, 60))
    build(folder / "s", documents)
    with espnx.open(folder / "s") as index:
        segments = index.store.segments
        assert len(segments) > 2
        assert all(segment.first_record % 64 == 0 for segment in segments)
        assert [segment.first_record + segment.records for segment in segments] == [
            *(s.first_record for s in segments[1:]),
            500,
        ]
        assert all(
            os.path.getsize(folder / "s" / segment.path) == segment.size_bytes
            for segment in segments
        )
        if segment_bytes == 1 and run_bytes < 50_000:
            assert [segment.records for segment in segments] == [64] * 7 + [52]
    check_store(folder / "s", documents)


def test_several_directories(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small_segments: Callable[[int, int], None]
) -> None:
    """Segments go round the directories, made where they are missing; the store opens from
    anywhere; replacing it cleans up."""
    small_segments(8192, 4096)
    monkeypatch.chdir(folder)
    documents = corpus(400)
    (folder / "new").mkdir()
    build("s", documents, directories=["a", folder / "new" / "b"])
    monkeypatch.chdir("/")
    check_store(folder / "s", documents)
    places = {name: list(folder.glob(f"{name}/espnx-*/gen-*/segment-*")) for name in ("a", "new/b")}
    assert len(places["a"]) - len(places["new/b"]) in (0, 1)
    assert len(places["new/b"]) > 1
    assert not list((folder / "s").glob("gen-*/segment-*"))
    build(folder / "s", documents[:100], replace=True, directories=[folder / "a"])
    check_store(folder / "s", documents[:100])
    assert not list(folder.glob("new/b/*"))
    assert len(list(folder.glob("a/espnx-*"))) == 1


def test_segment_size_on_several_devices() -> None:
    """Enough files that all devices share the load, unless they would be tiny."""
    assert segment_bytes(1 << 20, 2) == 16 << 20
    assert segment_bytes(4 << 30, 2) == (4 << 30) // 16
    assert segment_bytes(1 << 40, 2) == segment_bytes(1 << 40, 0) == 1 << 30


def test_zero_vectors_and_twins(folder: Path) -> None:
    """All centroids alike: k-means has nothing to work with, and every score is 0."""
    zero = espnx.Encoded(torch.zeros(D_CLS), torch.zeros(2, DIM))
    documents = [espnx.Document(f"doc-{i}", f"text of {i}", zero) for i in range(100)]
    build(folder / "s", documents)
    check_store(folder / "s", documents)


@pytest.mark.parametrize("code", ["sq8", "pq4"])
def test_lossy_first_stages_still_rank_exactly(folder: Path, code: str) -> None:
    documents = corpus(300)
    build(folder / "s", documents, first_stage_code=code)
    with espnx.open(folder / "s") as index:
        assert_ranks_as_written(index, documents)


def test_a_path_with_a_space_and_more(folder: Path) -> None:
    path = folder / "a b%20?#'\"ü"
    build(path, corpus(10))
    check_store(path, corpus(10))
