"""What `Postings` takes: numbers of others, collections of any kind, ids and documents; and what it
refuses, by type."""

from __future__ import annotations

import json
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx.postings
from espnx import errors
from espnx.postings import BM25, Analyzer, CsrArrays, Postings, SplitPostings, build_split
from espnx.storage import NativeEngine
from espnx.storage.documents import rows
from espnx.storage.manifest import read_manifest, write_manifest

TEXTS = ["the log is written", "a disk writes a log", "nothing of the kind"]
Tokenized = namedtuple("Tokenized", ["ids", "vocab"])  # as bm25s has it


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("inputs") / "x"
    Postings.build(path, TEXTS)
    return path


def test_numbers_of_numpy_and_torch(plain: Path) -> None:
    with Postings.open(plain) as postings:
        expected = postings.search("log", 2, k1=0.5, b=0.25)
        for k, k1, b in (
            (np.int64(2), np.float32(0.5), np.float64(0.25)),
            (torch.tensor(2), torch.tensor(0.5), torch.tensor(0.25)),
        ):
            found = postings.search("log", k, k1=k1, b=b, threads=k, deadline_s=np.float32(30))
            assert found.scores.tolist() == expected.scores.tolist()
            state = postings.begin("log", k)
            assert state.complete()[0].tolist() == expected.numbers[0].tolist()
        for number in (expected.numbers[0, 0], torch.tensor(int(expected.numbers[0, 0]))):
            assert (
                postings.explain("log", number, k1=np.float32(0.5), b=0.25).score
                == expected.scores[0, 0]
            )
    assert BM25(k1=np.float32(0.5)) == BM25(k1=0.5)


def test_k_is_no_more_than_there_are_records(plain: Path) -> None:
    with Postings.open(plain) as postings:
        found = postings.search(["log"] * 40, 1 << 24)
        assert found.numbers.shape == (40, 3)
        for k in (0, -1, 1.5, True, None, "2", (1 << 24) + 1):
            with pytest.raises(errors.InvalidInputError, match=r"^k"):
                postings.search("log", k)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "given",
    [
        {0, 2},
        frozenset({0, 2}),
        range(0, 3, 2),
        np.array([0, 2], np.uint8),
        torch.tensor([2, 0]),
        np.array([True, False, True]),
    ],
)
def test_filters_are_any_collection(plain: Path, given: Any) -> None:
    with Postings.open(plain) as postings:
        assert postings.search("log the", include=given).numbers[0].tolist()[:2] == [0, 2]
        assert postings.search("log the", exclude=given).numbers[0].tolist() == [1, -1, -1]
        assert postings.search("log the", include=iter([0, 2])).numbers[0].tolist()[:2] == [0, 2]


@pytest.mark.parametrize(
    "given", ["0", b"0", 1, 0.5, ["0"], [0.5], [[0]], np.array(3), [3], [-1], [None], [2**70]]
)
def test_filters_that_are_none(plain: Path, given: Any) -> None:
    with Postings.open(plain) as postings, pytest.raises(errors.InvalidInputError, match="include"):
        postings.search("log", include=given)


@pytest.mark.parametrize(
    "given",
    [None, 3, b"log", ["log", None], ["log", 3], ["log", b"log"], np.float32(1), [{"a": "b"}]],
)
def test_queries_that_are_none(plain: Path, given: Any) -> None:
    with Postings.open(plain) as postings:
        with pytest.raises(errors.InvalidInputError, match=r"quer|weight"):
            postings.search(given)
        if not isinstance(given, list):  # which is one query, of terms
            with pytest.raises(errors.InvalidInputError, match="query"):
                postings.begin(given)


def test_names_stand_for_analyzers_and_rules(tmp_path: Path) -> None:
    pytest.importorskip("Stemmer")
    Postings.build(tmp_path / "x", TEXTS, analyzer="english", bm25="bm25+")
    Postings.build(
        tmp_path / "y",
        TEXTS,
        analyzer=Analyzer(stop_words="english", stemmer="english"),
        bm25={"variant": "bm25+"},
    )
    with Postings.open(tmp_path / "x") as x, Postings.open(tmp_path / "y") as y:
        assert x.facts.analyzer == y.facts.analyzer
        assert x.facts.bm25 == y.facts.bm25 == BM25("bm25+")
    wrong: list[dict[str, Any]] = [
        {"analyzer": "elvish"},
        {"analyzer": 3},
        {"bm25": "bm26"},
        {"bm25": 3},
        {"bm25": {"k2": 1}},
        {"bm25": {"k1": "a"}},
        {"bm25": {"variant": []}},
    ]
    for options in wrong:
        with pytest.raises(errors.InvalidInputError):
            Postings.build(tmp_path / "z", TEXTS, **options)
        with pytest.raises(errors.InvalidInputError):
            build_split([tmp_path / "z"], TEXTS, **options)
    assert not (tmp_path / "z").exists()


def test_a_collection_takes_what_postings_take(tmp_path: Path) -> None:
    pytest.importorskip("Stemmer")
    options: dict[str, Any] = {
        "analyzer": "english",
        "bm25": {"variant": "bm25+", "k1": np.float32(0.5)},
        "memory_bytes": np.int64(1 << 20),
    }
    Postings.build(tmp_path / "one", np.array(TEXTS), **options)
    paths = [tmp_path / "a", tmp_path / "b"]
    build_split(iter(paths), np.array(TEXTS), **options)
    with Postings.open(tmp_path / "one") as one, SplitPostings(iter(paths)) as split:
        assert split.facts.analyzer == one.facts.analyzer
        assert split.facts.bm25 == one.facts.bm25 == BM25("bm25+", k1=0.5)
        expected, found = (
            each.search("who writes logs?", np.int64(5), include={1, 0}) for each in (one, split)
        )
        assert found.numbers.tolist() == expected.numbers.tolist()
        assert found.scores.tolist() == expected.scores.tolist()


IDS: list[Any] = ["a", "b", 7]


def records() -> dict[str, dict[str, Any]]:
    """The same three records with ids, in every way."""
    terms = [text.split() for text in TEXTS]
    vectors: list[dict[str, float]] = [dict.fromkeys(each, 1.0) for each in terms]
    return {
        "pairs": {"texts": list(zip(IDS, TEXTS, strict=True))},
        "mapping": {"texts": dict(zip(IDS, TEXTS, strict=True))},
        "mappings": {
            "texts": [{"id": i, "text": text} for i, text in zip(IDS, TEXTS, strict=True)]
        },
        "titles": {
            "texts": (
                {"_id": i, "title": text[:3], "text": text[4:]}
                for i, text in zip(IDS, TEXTS, strict=True)
            )
        },
        "documents": {
            "texts": [espnx.Document(i, text) for i, text in zip(IDS, TEXTS, strict=True)]
        },
        "beside": {"texts": iter(TEXTS), "ids": iter(IDS)},
        "numpy": {"texts": [("a", TEXTS[0]), ("b", TEXTS[1]), (np.int64(7), TEXTS[2])]},
        "terms": {"terms": list(zip(IDS, terms, strict=True))},
        "terms beside": {"terms": terms, "ids": IDS},
        "vectors": {"vectors": list(zip(IDS, vectors, strict=True))},
        "arrays": {
            "vectors": CsrArrays(np.array([0, 1, 2, 3]), np.array([5, 5, 6]), np.ones(3)),
            "ids": IDS,
        },
    }


@pytest.mark.parametrize("way", records())
def test_ids_in_every_way(tmp_path: Path, way: str) -> None:
    given = records()[way]
    Postings.build(tmp_path / "x", **given)
    with Postings.open(tmp_path / "x") as postings:
        assert list(postings.ids()) == IDS
        assert postings.numbers([7, "b", "7", "nothing"]).tolist() == [2, 1, -1, -1]
        assert ("a" in postings, "7" in postings, None in postings) == (True, False, False)
        query = {"5": 1.0} if way == "arrays" else {"log": 1.0} if "vectors" in given else ("log",)
        (hits,) = postings.search(query)
        assert sorted((hit.id, hit.number, hit.text) for hit in hits) == [
            ("a", 0, None),
            ("b", 1, None),
        ]
        assert [hit.id for hit in postings.search(query, include={"b", 7, "unknown"})[0]] == ["b"]
        assert [hit.id for hit in postings.search(query, exclude=np.array(["b"]))[0]] == ["a"]
        assert [hit.id for hit in postings.search(query, include=[False, True, True])[0]] == ["b"]
        with pytest.raises(errors.InvalidInputError, match="keep_texts"):
            postings.get("a")


def test_a_corpus_with_its_texts(tmp_path: Path) -> None:
    source = tmp_path / "c.jsonl"
    source.write_text(
        "".join(json.dumps({"id": f"d{i}", "text": text}) + "\n" for i, text in enumerate(TEXTS))
    )
    Postings.build(tmp_path / "x", espnx.read_corpus(source), keep_texts=True)
    report = espnx.postings.add(
        tmp_path / "x", [("d1", "a log"), ("d3", "half \ud800 of a pair")], replace=True
    )
    assert (report.n_replaced, report.n_records) == (1, 2)
    espnx.postings.compact(tmp_path / "x")
    with Postings.open(tmp_path / "x") as postings:
        found = postings.search(["log", "nothing"])
        assert len(found) == 2
        assert [[hit.text for hit in hits] for hits in found] == [["a log", TEXTS[0]], [TEXTS[2]]]
        assert found[-1] == found[1:][0] == list(found)[1]
        assert postings.get("d1") == "a log"
        assert postings.get(["d3", "d9", "d0"]) == ["half \ud800 of a pair", None, TEXTS[0]]
        with pytest.raises(IndexError):
            found[2]
    with pytest.raises(errors.EngineClosedError):
        found[0]


def test_texts_without_ids_are_found_by_number(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", TEXTS, keep_texts=True)
    espnx.postings.add(tmp_path / "x", ["more"])
    espnx.postings.delete(tmp_path / "x", {1})
    espnx.postings.compact(tmp_path / "x")
    with Postings.open(tmp_path / "x") as postings:
        assert postings.get([3, 1, 0, 4]) == ["more", None, TEXTS[0], None]
        assert list(postings.ids()) == [0, 2, 3]
        assert [(hit.id, hit.text) for hit in postings.search("more")[0]] == [(3, "more")]


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({"texts": [("a", "x"), ("a", "y")]}, "occurs twice"),
        ({"texts": [("a", "x"), "y"]}, "no id"),
        ({"texts": ["x", ("a", "y")]}, "the id 'a'"),
        ({"texts": [("a", "x")], "ids": ["a"]}, "none beside ids="),
        ({"texts": ["x", "y"], "ids": ["a"]}, "one for each"),
        ({"texts": ["x"], "ids": ["a", "b"]}, "more than there are"),
        ({"texts": ["x"], "ids": "a"}, "a collection"),
        ({"texts": [(1.5, "x")]}, "id of record 0"),
        ({"texts": [["log", "disk"]]}, "terms="),
        ({"texts": [{"log": 1.0}]}, "vectors="),
        ({"texts": [3]}, "a str"),
        ({"texts": 3}, "a collection"),
        ({"terms": ["log disk"]}, "texts="),
        ({"terms": [None]}, "terms of record 0"),
        ({"vectors": {"log": 1.0}}, "a collection"),
        ({"vectors": [["log"]]}, "vector of record 0"),
        ({"vectors": [{"log": 1.0}], "keep_texts": True}, "keep_texts"),
        ({"texts": ["a"], "memory_bytes": 1}, "memory_bytes"),
    ],
)
def test_records_that_are_none(tmp_path: Path, given: dict[str, Any], match: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=match):
        Postings.build(tmp_path / "x", **given)
    Postings.build(tmp_path / "x", ["a text"])  # what is left is no obstacle
    before = sorted(path.name for path in (tmp_path / "x").iterdir())
    if "keep_texts" not in given:
        with pytest.raises(errors.InvalidInputError):
            espnx.postings.add(tmp_path / "x", **given)
    assert sorted(path.name for path in (tmp_path / "x").iterdir()) == before


def test_ids_and_none_do_not_mix(tmp_path: Path) -> None:
    Postings.build(tmp_path / "ids", [("a", "x")])
    Postings.build(tmp_path / "none", ["x"])
    with pytest.raises(errors.InvalidInputError, match="no id"):
        espnx.postings.add(tmp_path / "ids", ["y"])
    with pytest.raises(errors.InvalidInputError, match="without ids"):
        espnx.postings.add(tmp_path / "none", [("b", "y")])
    with pytest.raises(errors.InvalidInputError, match="replace"):
        espnx.postings.add(tmp_path / "none", ["y"], replace=True)
    with pytest.raises(errors.InvalidInputError, match="such record"):
        espnx.postings.delete(tmp_path / "ids", ["a", "b"])
    assert espnx.postings.delete(tmp_path / "ids", ["a", "b"], missing_ok=True) == 1
    with pytest.raises(errors.InvalidInputError, match="ids"):
        espnx.postings.build_split([tmp_path / "p"], [("a", "x")])
    espnx.postings.add(tmp_path / "ids", [("a", "again")])  # of a deleted record
    with Postings.open(tmp_path / "ids") as postings:
        assert postings.numbers(["a"]).tolist() == [1]


def test_what_bm25s_has_cut(tmp_path: Path) -> None:
    bm25s = pytest.importorskip("bm25s")
    cut = bm25s.tokenize(TEXTS, stopwords=None, show_progress=False)
    assert type(cut)._fields == Tokenized._fields
    Postings.build(tmp_path / "x", cut)
    Postings.build(tmp_path / "y", terms=cut)
    Postings.build(tmp_path / "z", TEXTS)
    with (
        Postings.open(tmp_path / "x") as x,
        Postings.open(tmp_path / "y") as y,
        Postings.open(tmp_path / "z") as z,
    ):
        wanted = z.search(["log disk", "the"])
        for found in (
            x.search(bm25s.tokenize(["log disk", "the"], stopwords=None, show_progress=False)),
            y.search(["log disk", "the"]),
        ):
            assert found.scores.tolist() == wanted.scores.tolist()
    with pytest.raises(errors.InvalidInputError, match="no word's"):
        Postings.build(tmp_path / "w", Tokenized([[5]], {"log": 0}))


def test_a_file_or_nothing_in_the_place_of_postings(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("a file")
    with pytest.raises(errors.InvalidInputError, match="got a file"):
        Postings.build(tmp_path / "file", TEXTS)
    for path in (tmp_path / "file", tmp_path / "missing", tmp_path):
        with pytest.raises(errors.StoreNotFoundError, match="espnx postings build"):
            Postings.open(path)


def forge(path: Path, change: Any) -> None:
    """A manifest that says something else, its checksum made right."""
    with NativeEngine() as engine:
        fields = read_manifest(engine, path, "espnx-postings", 2)
        change(fields)
        kept = {
            name: value
            for name, value in fields.items()
            if name not in ("magic", "version", "byte_order")
        }
        write_manifest(engine, path, "espnx-postings", 2, kept)


FORGERIES: list[tuple[str, Any]] = [
    ("a gap", lambda f: f["segments"][1].update(first_number=2**33)),
    ("a small gap", lambda f: f["segments"][1].update(first_number=4)),
    ("an overlap", lambda f: f["segments"][1].update(first_number=1)),
    ("a late beginning", lambda f: f["segments"][0].update(first_number=1)),
    ("many records", lambda f: f["segments"][1].update(n_records=2**31 - 1)),
    ("one more", lambda f: f["segments"][1].update(n_records=2)),
    ("a file twice", lambda f: f["segments"][1].update(name=f["segments"][0]["name"])),
    ("a name", lambda f: f["segments"][0].update(name="other")),
    ("a path", lambda f: f["segments"][0].update(name="../s1")),
    ("a long section", lambda f: f["segments"][0]["sections"].update(dict=[2**52, 0])),
    (
        "a longer section",
        lambda f: f["segments"][0]["sections"]["lists"].__setitem__(
            0, f["segments"][0]["sections"]["lists"][0] + 64
        ),
    ),
    ("no section", lambda f: f["segments"][0]["sections"].pop("terms")),
    ("one section more", lambda f: f["segments"][0]["sections"].update(rows=[0, 0])),
    ("a section of nothing", lambda f: f["segments"][0]["sections"].update(terms=[])),
    ("no segments", lambda f: f.update(segments=[])),
    ("many deleted", lambda f: f.update(n_deleted=2**40)),
    ("others deleted", lambda f: f.update(n_deleted=2)),
    ("none deleted", lambda f: f.update(deletions="")),
    ("ids", lambda f: f.update(has_ids=True)),
    ("another kind", lambda f: f.update(kind="float")),
]


@pytest.mark.parametrize(("what", "change"), FORGERIES, ids=[name for name, _ in FORGERIES])
def test_a_forged_manifest_is_refused_before_it_takes_memory(
    tmp_path: Path, what: str, change: Any
) -> None:
    path = tmp_path / "x"
    Postings.build(path, TEXTS)
    espnx.postings.add(path, ["more of it"])
    espnx.postings.delete(path, [1])
    forge(path, lambda fields: None)
    with Postings.open(path) as postings:
        assert len(postings) == 3
    forge(path, change)
    there = sorted(each.name for each in path.iterdir())
    for use in (lambda: Postings.open(path), lambda: espnx.postings.compact(path)):
        with pytest.raises(
            (
                errors.FormatError,
                errors.TruncatedFileError,
                errors.FileMissingError,
                errors.ChecksumError,
            )
        ):
            use()
    assert sorted(each.name for each in path.iterdir()) == there


def test_ids_whose_hashes_are_alike_are_told_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = rows.id_hash
    monkeypatch.setattr(rows, "id_hash", lambda identifier: whole(identifier) % 4)
    named = [(f"d{i}" if i % 2 else i, f"w{i} w{i % 5}") for i in range(40)]
    Postings.build(tmp_path / "x", named[:20])
    espnx.postings.add(tmp_path / "x", [*named[20:], ("d3", "new"), (4, "new")], replace=True)
    for given in ([("e", "x"), ("f", "y"), ("e", "z")], [(4, "x")]):
        with pytest.raises(errors.InvalidInputError, match=r"occurs twice|the postings have"):
            espnx.postings.add(tmp_path / "x", given)
    with Postings.open(tmp_path / "x") as postings:
        postings.verify()
        assert postings.numbers([name for name, _ in named]).tolist() == [
            {3: 40, 4: 41}.get(i, i) for i in range(40)
        ]
