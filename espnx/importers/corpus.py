"""Corpora as they lie on disk: JSON lines, CSV, Parquet, Arrow, or a folder of texts, one document
at a time."""

from __future__ import annotations

import errno
import gzip
import os
import sys
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast

from ..checks import check_path
from ..errors import InvalidInputError
from ..suggestions import suggests_keywords
from .corpus_lines import csv_rows, json_rows

FORMATS = ("jsonl", "csv", "tsv", "parquet", "arrow", "folder")
#: What a document is made of; `Corpus.columns` may give each another name.
FIELDS = ("id", "text", "title")

_BY_SUFFIX = {
    "jsonl": "jsonl", "ndjson": "jsonl", "json": "jsonl", "csv": "csv", "tsv": "tsv",
    "parquet": "parquet", "pq": "parquet", "arrow": "arrow", "feather": "arrow", "ipc": "arrow",
}  # fmt: skip
_TABLES = ("parquet", "arrow")
_TEXTS = (".txt", ".text", ".md", ".rst")
_GZIP = b"\x1f\x8b"
_COUNTED_BYTES = 16 << 20

Rows = Iterator[tuple[str, dict[str, Any]]]


class Corpus:
    """Documents of a file or a folder, as `espnx.build` takes them: mappings with ``id``, ``text``
    and perhaps ``title``. Each iteration reads it again, with one document in memory at a time.

    Args:
        path: of JSON lines (``.jsonl``), ``.csv``, ``.tsv`` (with a line of names), ``.parquet`` or
            ``.arrow`` (also ``.feather``; pyarrow must be installed); the first three also
            compressed (``.gz``); ``-``: standard input, which can be read once. Of a folder, every
            text file below it (``.txt``, ``.md``, ``.rst``) is a document, its path its id.
        format: one of `FORMATS`; None: as the name says, and what else has no suffix is JSON lines.
        columns: what the corpus calls ``id``, ``text`` and ``title``, where it does not call them
            so (``_id`` is an id, too).

    Raises:
        InvalidInputError: it cannot be opened, or nobody knows its format. While it is read: a line
            or a row that is no document; the message says which.
        MissingDependencyError: pyarrow is not installed.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        *,
        format: str | None = None,  # noqa: A002
        columns: Mapping[str, str] | None = None,
    ):
        self.path = check_path("corpus", path)
        self.name = "standard input" if self.path == "-" else self.path
        if unknown := [field for field in columns or {} if field not in FIELDS]:
            raise InvalidInputError(
                "columns of a corpus", got=unknown[0], expected=", ".join(FIELDS)
            )
        self.columns = dict(columns or {})
        self._check_there()
        self.format = _format_of(self.path) if format is None else format
        if self.format not in FORMATS:
            raise InvalidInputError(
                "format of a corpus", got=repr(format), expected=", ".join(FORMATS)
            )
        is_folder = os.path.isdir(self.path)
        if (self.format == "folder") != is_folder:
            raise InvalidInputError(
                f"corpus {self.name}",
                got="a folder" if is_folder else "a file",
                expected=self.format,
            )
        if self.format in _TABLES:
            _tables()  # what is not installed shows now

    def __repr__(self) -> str:
        return f"<Corpus {self.name!r}: {self.format}>"

    def __length_hint__(self) -> Any:
        """How many documents there are, as far as that can be told without reading them;
        `NotImplemented` where it cannot."""
        if self.format == "folder":
            return sum(1 for _ in _text_files(self.path))
        if self.format in _TABLES:
            return int(_tables().count_rows(self.path, self.format))
        return (
            self._count_lines()
            if os.path.isfile(self.path) and not self._is_compressed()
            else NotImplemented
        )

    def __iter__(self) -> Iterator[dict[str, Any]]:
        for place, row in self._rows():
            yield _document(place, row, self.columns)

    def _rows(self) -> Rows:
        """(where it stands, its fields) of each document."""
        if self.format == "folder":
            return _folder_rows(self.path)
        if self.format in _TABLES:
            wanted = {self.columns.get(field, field) for field in FIELDS} | (
                set() if "id" in self.columns else {"_id"}
            )
            rows: Rows = _tables().table_rows(self.path, self.format, wanted)
            return rows
        parse: Callable[..., Rows] = json_rows if self.format == "jsonl" else csv_rows
        return self._lines(parse)

    def _lines(self, parse: Callable[..., Rows]) -> Rows:
        options = (
            {} if self.format == "jsonl" else {"delimiter": "," if self.format == "csv" else "\t"}
        )
        try:
            with (
                nullcontext(sys.stdin.buffer) if self.path == "-" else open(self.path, "rb") as file
            ):
                is_compressed = cast(Any, file).peek(2)[:2] == _GZIP
                yield from parse(
                    self.name, gzip.GzipFile(fileobj=file) if is_compressed else file, **options
                )
        except (OSError, EOFError, zlib.error) as error:
            # also gzip's own, for a file that is cut short or damaged
            raise _unreadable(self.name, error) from error

    def _check_there(self) -> None:
        if self.path == "-":
            return
        try:
            os.stat(self.path)
            if not os.access(self.path, os.R_OK):
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
        except OSError as error:
            raise _unreadable(self.name, error) from error

    def _is_compressed(self) -> bool:
        with open(self.path, "rb") as file:
            return file.read(2) == _GZIP

    def _count_lines(self) -> int:
        """Those that are not empty, as far as that shows from line ends in a row."""
        count, last = 0, b"\n"
        with open(self.path, "rb") as file:
            while block := file.read(_COUNTED_BYTES):
                count += block.count(b"\n") - (last + block).count(b"\n\n")
                last = block[-1:]
        lines = count + (last != b"\n")
        return lines if self.format == "jsonl" else max(0, lines - 1)


@suggests_keywords
def read_corpus(
    path: str | os.PathLike[str],
    *,
    format: str | None = None,  # noqa: A002
    columns: Mapping[str, str] | None = None,
) -> Corpus:
    """See `Corpus`."""
    return Corpus(path, format=format, columns=columns)


def _tables() -> Any:
    from . import corpus_tables

    return corpus_tables


def _unreadable(name: str, error: Exception) -> InvalidInputError:
    got = getattr(error, "strerror", None) or str(error)
    return InvalidInputError(
        f"cannot read corpus {name}", got=got, expected="a readable file, or a folder of texts"
    )


def _format_of(path: str) -> str:
    if os.path.isdir(path):
        return "folder"
    suffixes = [suffix[1:].lower() for suffix in Path(path).suffixes]
    if suffixes[-1:] == ["gz"]:
        suffixes.pop()
    return _BY_SUFFIX.get(suffixes[-1], "jsonl") if suffixes else "jsonl"


def _text_files(folder: str) -> Iterator[str]:
    """Paths below it, in a fixed order. Hidden files and folders are passed over."""
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(name for name in folders if not name.startswith("."))
        yield from (
            os.path.join(root, name)
            for name in sorted(names)
            if name.lower().endswith(_TEXTS) and not name.startswith(".")
        )


def _folder_rows(folder: str) -> Rows:
    empty = True
    for path in _text_files(folder):
        empty = False
        try:
            text = Path(path).read_text(encoding="utf-8-sig")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidInputError(
                f"cannot read {path} of the corpus", got=str(error), expected="a text file in UTF-8"
            ) from error
        yield path, {"id": Path(path).relative_to(folder).as_posix(), "text": text}
    if empty:
        raise InvalidInputError(
            f"corpus {folder}", got="no text file below it", expected=", ".join(_TEXTS)
        )


def _document(place: str, row: Mapping[str, Any], columns: Mapping[str, str]) -> dict[str, Any]:
    """Raises InvalidInputError where a row has not the fields of a document, or other values than
    one may have."""
    names = {field: columns.get(field, field) for field in FIELDS}
    identifier = row.get(names["id"])
    if identifier is None and "id" not in columns:
        identifier = row.get("_id")
    if identifier is None or names["text"] not in row:
        found = ", ".join(list(row)[:8]) or "nothing"
        id_name = names["id"] if "id" in columns else "id (or _id)"
        raise InvalidInputError(
            place,
            got=f"a document with {found}",
            expected=f"{id_name}, {names['text']} and perhaps {names['title']}",
            fix="name them: columns={'text': ...} (--columns text=NAME)",
        )
    text, title = row[names["text"]], row.get(names["title"])
    if not isinstance(text, str):
        raise InvalidInputError(
            f"{place}: {names['text']}", got=type(text).__name__, expected="text"
        )
    if not isinstance(identifier, str) and (
        not isinstance(identifier, int) or isinstance(identifier, bool)
    ):
        raise InvalidInputError(
            f"{place}: {names['id']}", got=repr(identifier), expected="text or a whole number"
        )
    return {"id": identifier, "text": text} | ({"title": title} if title else {})
