"""Corpora in files and folders: the same documents whatever they lie in, and what is no corpus
refused with its place."""

from __future__ import annotations

import csv
import gzip
import importlib
import io
import json
import operator
import os
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from tests.retrieval.common import toy_encoder

DOCUMENTS: list[dict[str, Any]] = [
    {"id": "a", "text": "red, green", "title": "Colours"},
    {"id": "b", "text": 'one "two"\nthree'},
    {"id": "c", "text": "", "title": "Größe"},
]


def _json(path: Path) -> None:
    path.write_text("\n\n".join(json.dumps(each) for each in DOCUMENTS), encoding="utf-8-sig")


def _csv(path: Path, delimiter: str = ",") -> None:
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(
            file, ["title", "id", "text", "more"], restval="", delimiter=delimiter
        )
        writer.writeheader()
        writer.writerows(DOCUMENTS)


def _table() -> Any:
    pyarrow = pytest.importorskip("pyarrow", reason="pyarrow is not installed (extra [arrow])")
    rows = [
        {"_id": each["id"], "text": each["text"], "title": each.get("title"), "more": [1, 2]}
        for each in DOCUMENTS
    ]
    return pyarrow.Table.from_pylist(rows)


def _parquet(path: Path) -> None:
    table = _table()
    importlib.import_module("pyarrow.parquet").write_table(table, path, row_group_size=2)


def _arrow(path: Path, make: str = "new_file") -> None:
    table, ipc = _table(), importlib.import_module("pyarrow.ipc")
    with open(path, "wb") as file, getattr(ipc, make)(file, table.schema) as writer:
        writer.write_table(table, max_chunksize=2)


def _compressed(write: Callable[[Path], None]) -> Callable[[Path], None]:
    def both(path: Path) -> None:
        write(path)
        path.write_bytes(gzip.compress(path.read_bytes()))

    return both


KINDS: dict[str, Callable[[Path], None]] = {
    "c.jsonl": _json,
    "c": _json,
    "c.jsonl.gz": _compressed(_json),
    "c.csv": _csv,
    "c.CSV.gz": _compressed(_csv),
    "c.tsv": lambda path: _csv(path, "\t"),
    "c.parquet": _parquet,
    "c.arrow": _arrow,
    "c.feather": lambda path: _arrow(path, "new_stream"),
}


@pytest.mark.parametrize("name", KINDS)
def test_the_same_documents_in_every_format(tmp_path: Path, name: str) -> None:
    KINDS[name](tmp_path / name)
    corpus = espnx.read_corpus(tmp_path / name)
    assert list(corpus) == DOCUMENTS
    assert list(corpus) == DOCUMENTS, "it can be read again"
    # Line ends are counted, and within quotes there are some, too.
    count = {"c.csv": 4, "c.tsv": 4}.get(name, 0 if "gz" in name.lower() else 3)
    assert operator.length_hint(corpus, 0) == count
    assert repr(corpus).startswith(f"<Corpus {str(tmp_path / name)!r}: ")


def test_a_folder_of_texts(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".git").mkdir()
    for name, text in {
        "b.txt": "two",
        "a.md": "\ufeffone",
        "sub/c.TXT": "three",
        ".git/x.txt": "-",
        ".x.txt": "-",
        "d.png": "-",
    }.items():
        (tmp_path / name).write_text(text)
    corpus = espnx.read_corpus(tmp_path)
    assert [(each["id"], each["text"]) for each in corpus] == [
        ("a.md", "one"),
        ("b.txt", "two"),
        ("sub/c.TXT", "three"),
    ]
    assert operator.length_hint(corpus) == 3
    (tmp_path / "e.txt").write_bytes(b"\xff\xfe")
    with pytest.raises(errors.InvalidInputError, match=r"e\.txt.*utf-8"):
        list(corpus)
    (tmp_path / "empty").mkdir()
    with pytest.raises(errors.InvalidInputError, match="no text file below it"):
        list(espnx.read_corpus(tmp_path / "empty"))


def test_other_names_and_numbers(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text("key,body,head\n7,red,Top\n")
    columns = {"id": "key", "text": "body", "title": "head"}
    assert list(espnx.read_corpus(tmp_path / "c.csv", columns=columns)) == [
        {"id": "7", "text": "red", "title": "Top"}
    ]
    (tmp_path / "c.jsonl").write_text('{"key": 7, "_id": 1, "body": "red"}\n')
    assert list(espnx.read_corpus(tmp_path / "c.jsonl", columns=columns)) == [
        {"id": 7, "text": "red"}
    ]
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"_id": [1, 2], "key": [2**40, 8], "body": ["red", "green"]})
    importlib.import_module("pyarrow.parquet").write_table(table, tmp_path / "c.parquet")
    assert [each["id"] for each in espnx.read_corpus(tmp_path / "c.parquet", columns=columns)] == [
        2**40,
        8,
    ]


def test_a_long_field_of_a_csv(tmp_path: Path) -> None:
    (tmp_path / "c.csv").write_text(f"id,text\n1,{'x' * 300_000}\n")
    assert [len(each["text"]) for each in espnx.read_corpus(tmp_path / "c.csv")] == [300_000]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        (
            "c.jsonl",
            b"id,text\n1,red\n",
            r"line 1 of .*c\.jsonl.*expected JSON lines: an object a line.*\.csv",
        ),
        ("c.jsonl", b'{"id": 1, "text": "a"}\n[1]\n', "line 2 .*got list"),
        ("c.csv", b"id,text\n1,red,more\n", "line 2 .*got 3 fields; expected 2: id, text"),
        (
            "c.csv",
            b"id,body\n1,red\n",
            (
                r"line 2 .*got a document with id, body; expected id \(or _id\), text.*--columns "
                r"text=NAME"
            ),
        ),
        ("c.csv", b"text\nred\n", "line 2 .*got a document with text"),
        ("c.csv", b"id,id\n1,2\n", "line 1 .*names of columns, each once"),
        ("c.csv", b'id,text\n1,"red\n', "line 2 .*unexpected end of data"),
        ("c.csv", b"id,text\n1,\xff\n", "line 1 .*utf-8"),
        ("c.tsv", b"id\ttext\n1\tred\textra\n", "line 2 .*got 3 fields"),
        (
            "c.tsv",
            b'id\ttext\n5\t"x\n6\ty"\n7\tz\n',
            "line 3 .*lines with tabs within a quoted field.*double",
        ),
        ("c.tsv", b'id\ttext\n1\t"Alpha" is first\n', "line 2 .*double"),
        ("c.parquet", b"PAR1 and no more", "cannot read corpus .*a whole parquet file"),
        ("c.arrow", b"ARROW1", "cannot read corpus .*a whole arrow file"),
    ],
)
def test_what_is_no_corpus(tmp_path: Path, name: str, content: bytes, said: str) -> None:
    if name in ("c.parquet", "c.arrow"):
        pytest.importorskip("pyarrow")
    (tmp_path / name).write_bytes(content)
    with pytest.raises(errors.InvalidInputError, match=said):
        list(espnx.read_corpus(tmp_path / name))


def test_rows_that_are_no_documents(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    write = importlib.import_module("pyarrow.parquet").write_table
    for columns, said in (
        ({"id": ["a", None], "text": ["x", "y"]}, r"row 2 .*got a document with id, text"),
        ({"id": ["a", "b"], "text": ["x", None]}, r"row 2 of .*: text; got NoneType"),
        ({"id": [1.5], "text": ["x"]}, r"row 1 of .*: id; got 1\.5"),
        ({"key": ["a"], "body": ["x"]}, r"row 1 .*got a document with key, body"),
    ):
        write(pyarrow.table(columns), tmp_path / "c.parquet")
        with pytest.raises(errors.InvalidInputError, match=said):
            list(espnx.read_corpus(tmp_path / "c.parquet"))


def test_what_is_wrong_shows_before_anything_is_read(tmp_path: Path) -> None:
    (tmp_path / "c.jsonl").write_text("")
    for call, said in (
        (
            lambda: espnx.read_corpus(tmp_path / "nowhere"),
            "cannot read corpus .*nowhere.*No such file",
        ),
        (
            lambda: espnx.read_corpus(tmp_path / "c.jsonl", format="xml"),
            "format of a corpus; got 'xml'",
        ),
        (
            lambda: espnx.read_corpus(tmp_path / "c.jsonl", format="folder"),
            "got a file; expected folder",
        ),
        (lambda: espnx.read_corpus(tmp_path, format="csv"), "got a folder; expected csv"),
        (
            lambda: espnx.read_corpus(tmp_path / "c.jsonl", columns={"body": "text"}),
            "columns of a corpus; got body",
        ),
        (lambda: espnx.read_corpus(7), "corpus; got 7"),  # type: ignore[arg-type]
        (
            lambda: espnx.build(tmp_path / "s", str(tmp_path / "c.jsonl"), toy_encoder()),
            r"documents; got .*espnx\.read_corpus",
        ),
    ):
        with pytest.raises(errors.InvalidInputError, match=said):
            call()
    assert not (tmp_path / "s").exists()


def test_a_package_that_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.parquet").write_bytes(b"")
    monkeypatch.delitem(sys.modules, "espnx.importers.corpus_tables", raising=False)
    monkeypatch.delattr("espnx.importers.corpus_tables", raising=False)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(errors.MissingDependencyError, match=r"pip install 'espnx\[arrow\]'"):
        espnx.read_corpus(tmp_path / "c.parquet")


def test_standard_input_and_pipes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are opened once, and nothing of them is looked at before."""
    monkeypatch.setattr(
        "sys.stdin", io.TextIOWrapper(io.BufferedReader(io.BytesIO(b'{"id": 1, "text": "a"}\n')))
    )  # type: ignore[arg-type]
    corpus = espnx.read_corpus("-")
    assert operator.length_hint(corpus, 0) == 0
    assert list(corpus) == [{"id": 1, "text": "a"}]
    os.mkfifo(tmp_path / "pipe")
    pipe = espnx.read_corpus(tmp_path / "pipe")
    assert operator.length_hint(pipe, 0) == 0
    writer = threading.Thread(
        target=(tmp_path / "pipe").write_bytes, args=(b'{"id": 2, "text": "b"}\n',)
    )
    writer.start()
    assert list(pipe) == [{"id": 2, "text": "b"}]
    writer.join()


def test_an_index_of_one(tmp_path: Path) -> None:
    _csv(tmp_path / "c.csv")
    seen: list[tuple[str, int, int | None]] = []
    espnx.build(
        tmp_path / "s",
        espnx.read_corpus(tmp_path / "c.csv"),
        toy_encoder(),
        progress=lambda *step: seen.append(step),
    )
    assert seen[0] == ("spool", 0, 4), "what there is to do is said before the first is done"
    with espnx.open(tmp_path / "s") as index:
        assert index.get("a") == "Colours red, green"
