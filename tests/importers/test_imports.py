"""Stores made of indexes that colbert-ai, fast-plaid and PyLate wrote, and the calls of ColBERT and
PyLate on them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx.errors import EspnxError, FormatError, InvalidInputError

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra [dev])"
)

from safetensors.torch import load_file  # noqa: E402

from espnx.encoders.colbert import ColBERTEncoder  # noqa: E402
from espnx.importers.convert import import_index, inspect_index, open_index  # noqa: E402
from espnx.importers.pylate_ids import IDS, read_ids  # noqa: E402
from espnx.integrations.colbert import Searcher  # noqa: E402
from espnx.retrieval.encoder import Encoded  # noqa: E402
from espnx.retrieval.search.index import Index  # noqa: E402
from tests.encoders import tiny  # noqa: E402

COLBERT = ["colbert-index-1", "colbert-index-2", "colbert-index-4"]
NO_CLS = torch.empty(0)


def held(name):
    return load_file(tiny.DATA / f"{name}.safetensors")


def query(tokens):
    return Encoded(NO_CLS, tokens)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return tiny.restore("colbert", tmp_path_factory.mktemp("checkpoint") / "colbert")


@pytest.fixture(scope="module")
def store(tmp_path_factory, checkpoint):
    """The 2-bit index with its texts and its encoder."""
    root = tmp_path_factory.mktemp("imported")
    texts = root / "collection.tsv"
    texts.write_text("".join(f"{n}\t{text}\n" for n, text in enumerate(tiny.collection())))
    import_index(
        tiny.DATA / "colbert-index-2",
        root / "store",
        texts=texts,
        encoder=ColBERTEncoder(checkpoint),
    )
    return root / "store"


@pytest.mark.parametrize("name", COLBERT)
def test_scores_are_colberts(tmp_path, name):
    expected = held(name)
    report = import_index(tiny.DATA / name, tmp_path / "store")
    assert (report.documents, report.tokens) == (
        expected["scores"].shape[1],
        open_index(tiny.DATA / name).tokens,
    )
    with Index(tmp_path / "store") as index:
        for tokens, row, pids in zip(
            expected["queries"], expected["scores"], expected["pids"].tolist(), strict=True
        ):
            hits = index.search(query(tokens), k=100).hits
            assert sorted(hit.id for hit in hits) == list(range(len(row)))
            # 16 sums of 32 products of values below 1, in another order: 16 * 32 roundings of
            # 2^-24, were they all one way.
            np.testing.assert_allclose(
                [hit.score for hit in hits],
                row[[hit.id for hit in hits]],
                atol=16 * 32 * 2**-24,
                rtol=0,
            )
            mine = [hit.id for hit in hits][:10]
            # as ColBERT ranked them, ties in any order
            assert row[mine].tolist() == pytest.approx(row[pids].tolist(), abs=1e-5)


@pytest.mark.parametrize("name", [*COLBERT, "fast-plaid-index", "pylate-index"])
def test_rows_are_kept_byte_for_byte(tmp_path, name):
    import_index(tiny.DATA / name, tmp_path / "store")
    source = open_index(tiny.DATA / name)
    with Index(tmp_path / "store") as index:
        book = index.store.full.codebook
        for mine, theirs in zip(
            (book.centroids, book.bucket_cutoffs, book.bucket_weights),
            (
                source.codebook.centroids,
                source.codebook.bucket_cutoffs,
                source.codebook.bucket_weights,
            ),
            strict=True,
        ):
            assert torch.equal(mine, theirs)
        data = b"".join(
            path.read_bytes() for path in (tmp_path / "store").rglob("*") if path.is_file()
        )
    for rows in source.rows():
        assert rows.numpy().tobytes() in data


def test_fast_plaid_scores(tmp_path):
    expected = held("fast-plaid-index")
    import_index(tiny.DATA / "fast-plaid-index", tmp_path / "store")
    with Index(tmp_path / "store") as index:
        for tokens, numbers, scores in zip(
            expected["queries"], expected["numbers"].tolist(), expected["scores"], strict=True
        ):
            mine = {hit.id: hit.score for hit in index.search(query(tokens), k=100).hits}
            # fast-plaid decodes and sums three tokens in fp16: for each a few roundings of 2^-11,
            # and those of the sum, below 4, of 2^-10.
            np.testing.assert_allclose([mine[n] for n in numbers], scores, atol=3 * 2**-10, rtol=0)


def test_pylate_ids_come_along(tmp_path):
    expected = held("pylate-index")
    import_index(
        tiny.DATA / "pylate-index", tmp_path / "store", pooling="muvera", first_stage_code="flat"
    )
    with Index(tmp_path / "store") as index:
        assert index.store.manifest.first_stage.describe()["vector"] == "muvera"
        for tokens, numbers, scores in zip(
            expected["queries"], expected["numbers"].tolist(), expected["scores"], strict=True
        ):
            mine = {hit.id: hit.score for hit in index.search(query(tokens), k=100).hits}
            np.testing.assert_allclose(
                [mine[f"doc-{n:02}"] for n in numbers], scores, atol=3 * 2**-10, rtol=0
            )
        assert len(mine) == 39
        assert "doc-03" not in mine  # removed before


def test_texts_and_ids(tmp_path):
    folder = tiny.DATA / "colbert-index-4"
    lines = tmp_path / "c.jsonl"
    lines.write_text(
        "".join(
            json.dumps({"_id": f"x{n}", "text": text}) + "\n"
            for n, text in enumerate(tiny.collection(25))
        )
    )
    cases = [
        ({"texts": lines}, "x3", tiny.collection(25)[3]),
        ({"texts": lines, "ids": [f"x{n}" for n in range(25)]}, "x3", tiny.collection(25)[3]),
        ({"ids": iter(range(100, 125))}, 103, ""),
        ({"texts": {n: f"text {n}" for n in range(25)}}, 3, "text 3"),
        ({}, 3, ""),
    ]
    for number, (options, identifier, text) in enumerate(cases):
        import_index(folder, tmp_path / str(number), **options)
        with Index(tmp_path / str(number)) as index:
            found = index.store.texts.get(index.store.texts.numbers([identifier]).tolist())
            assert found == [(identifier, text)]


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"ids": range(24)}, "import: ids; got 24; expected 25"),
        ({"ids": iter(range(24))}, "import: ids; got 24; expected one"),
        ({"ids": iter(range(26))}, "import: ids; got more than 25"),
        ({"ids": ["same"] * 25}, "same"),
        ({"texts": {0: "only"}}, "document 1; got no such key"),
        ({"texts": "no such file.tsv"}, "cannot read texts"),
        ({"pooling": "cls"}, "mean or muvera"),
        ({"encoder": 7}, "encoder; got int"),
    ],
)
def test_wrong_arguments(tmp_path, options, says):
    with pytest.raises(InvalidInputError, match=says):
        import_index(tiny.DATA / "colbert-index-4", tmp_path / "store", **options)
    assert not (tmp_path / "store" / "manifest.json").exists()


def test_texts_of_other_documents(tmp_path):
    lines = tmp_path / "c.jsonl"
    lines.write_text("".join(json.dumps({"id": n + 1, "text": ""}) + "\n" for n in range(25)))
    with pytest.raises(InvalidInputError, match=r"document 0; got id 1; expected 0.*mapping"):
        import_index(tiny.DATA / "colbert-index-4", tmp_path / "store", texts=lines, ids=range(25))


def test_encoder_of_other_dimensions(tmp_path, checkpoint):
    encoder = ColBERTEncoder(checkpoint)
    encoder.dim = 64
    with pytest.raises(
        InvalidInputError, match="vectors of 64 dimensions; expected the index's 32"
    ):
        import_index(tiny.DATA / "colbert-index-2", tmp_path / "store", encoder=encoder)


def test_a_damaged_index_makes_no_store_and_a_repaired_one_goes_on(tmp_path):
    folder = shutil.copytree(tiny.DATA / "colbert-index-2", tmp_path / "index")
    whole = (folder / "2.codes.pt").read_bytes()
    (folder / "2.codes.pt").write_bytes(whole[:100])
    with pytest.raises(FormatError, match=r"2\.codes\.pt"):
        import_index(folder, tmp_path / "store")
    with pytest.raises(EspnxError):
        Index(tmp_path / "store")
    (folder / "2.codes.pt").write_bytes(whole)
    assert import_index(folder, tmp_path / "store").documents == 50
    with Index(tmp_path / "store") as index:
        index.store.verify(lambda done, total: None)


def test_inspect():
    found = inspect_index(tiny.DATA / "colbert-index-2")
    assert (found.documents, found.tokens, found.dim, found.format, found.centroids) == (
        50,
        436,
        32,
        "residual2",
        256,
    )


def test_adding_to_an_imported_store(tmp_path, checkpoint):
    from espnx.retrieval.build.changes.change import add, delete

    encoder = ColBERTEncoder(checkpoint)
    import_index(tiny.DATA / "colbert-index-2", tmp_path / "store", encoder=encoder)
    add(tmp_path / "store", [(1000, "supersonic wing flow")], encoder)
    delete(tmp_path / "store", [0])
    with Index(tmp_path / "store", encoder) as index:
        hits = index.search("supersonic wing flow", k=100).hits
        assert len(hits) == 50
        assert hits[0].id == 1000
        assert 0 not in [hit.id for hit in hits]


def test_searcher(store, checkpoint):
    expected = held("colbert-index-2")
    with Searcher(index=store.name, index_root=store.parent, checkpoint=checkpoint) as searcher:
        assert torch.allclose(searcher.encode(tiny.QUERIES), expected["queries"], atol=3e-6)
        for text, pids, scores in zip(
            tiny.QUERIES, expected["pids"].tolist(), expected["found"].tolist(), strict=True
        ):
            found = searcher.search(text, k=10)
            assert [type(part) for part in found] == [list, list, list]
            assert found[1] == list(range(1, 11))
            # What ColBERT's own Searcher returned; its query vectors are within 3e-6 of ours in
            # each of 32 values.
            assert found[2] == pytest.approx(scores, abs=16 * 32**0.5 * 3e-6)
            assert found[0] == pids
        assert searcher.collection[5] == tiny.collection()[5]
        assert list(searcher.collection) == tiny.collection()
        with pytest.raises(KeyError):
            searcher.collection[50]


def test_searcher_for_many_queries(store, checkpoint, tmp_path):
    with Index(store) as index:
        searcher = Searcher(index, ColBERTEncoder(checkpoint), candidates=40)
        one = searcher.search(tiny.QUERIES[2], k=3)
        ranking = searcher.search_all({"a": tiny.QUERIES[0], "b": tiny.QUERIES[2]}, k=3)
        assert list(ranking.data) == ["a", "b"]
        assert [row[:2] for row in ranking.todict()["b"]] == list(zip(*one[:2], strict=True))
        assert [row[2] for row in ranking.data["b"]] == pytest.approx(one[2], abs=1e-5)
        assert [row[0] for row in ranking.tolist()] == ["a"] * 3 + ["b"] * 3
        assert searcher.search_all([tiny.QUERIES[0]], k=1).data[0][0][1] == 1
        lines = Path(ranking.save(tmp_path / "ranking.tsv")).read_text().splitlines()
        assert lines[0].split("\t")[:3] == ["a", str(ranking.data["a"][0][0]), "1"]
        searcher.close()
        # given open, left open
        assert index.search(query(held("colbert-index-2")["queries"][0]), k=1).hits


def test_searcher_restricted(store, checkpoint):
    with Searcher(store, checkpoint) as searcher:
        every = searcher.search(tiny.QUERIES[2], k=50)
        few = searcher.search(tiny.QUERIES[2], k=10, pids=[7, 3, 11])
        assert sorted(few[0]) == [3, 7, 11]
        assert few[2] == sorted(few[2], reverse=True)
        assert few[0] == [pid for pid in every[0] if pid in (3, 7, 11)]
        odd = searcher.search(tiny.QUERIES[2], k=5, filter_fn=lambda pids: pids[pids % 2 == 1])
        assert odd[0] == [pid for pid in every[0] if pid % 2 == 1][:5]
        assert odd[0] != every[0][:5]
        assert odd[1] == [1, 2, 3, 4, 5]
        dense = searcher.dense_search(searcher.encode(tiny.QUERIES[2]), k=4)
        assert dense[0] == every[0][:4]
        vectors = searcher.encode(tiny.QUERIES[2])
        for pids in (
            np.array([7, 3, 11]),
            torch.tensor([7, 3, 11]),
            iter([7, 3, 11]),
            [np.int64(7), 3, 11],
        ):
            assert searcher.dense_search(vectors, pids=pids)[0] == few[0]
        assert searcher.collection[np.int64(7)] == searcher.collection[7]
        for wrong in (vectors.repeat(2, 1, 1), vectors[:0], vectors[0, 0], None):
            with pytest.raises(InvalidInputError, match="dense_search"):
                searcher.dense_search(wrong)
        by_query = searcher.search_all([tiny.QUERIES[2]] * 2, k=5, qid_to_pids={0: [1], 1: [2, 4]})
        assert [[row[0] for row in rows] for rows in by_query.data.values()] in (
            [[1], [2, 4]],
            [[1], [4, 2]],
        )
        with pytest.raises(InvalidInputError, match="full_length_search"):
            searcher.search("a", full_length_search=True)


def test_searcher_wants_the_encoder_of_the_store(store, checkpoint):
    with pytest.raises(InvalidInputError, match="another encoder"):
        Searcher(store, ColBERTEncoder(checkpoint, query_maxlen=20))
    with Searcher(store) as searcher, pytest.raises(InvalidInputError, match="folder is not known"):
        searcher.encode("a")
    with pytest.raises(EspnxError):
        Searcher(store.parent / "nothing", checkpoint)


def test_ids_of_pylate_are_those_it_found(tmp_path):
    ids = read_ids(tiny.DATA / "pylate-index" / IDS, 39)
    assert ids == [f"doc-{n:02}" for n in range(40) if n != 3]
