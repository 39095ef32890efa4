"""Texts of an indexed collection, read beside its index: the n-th line belongs to the n-th
document."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from ..errors import InvalidInputError
from ..storage.documents.ids import DocumentId

Texts = Mapping[DocumentId, str] | str | Path | None


def texts_of(texts: Texts, documents: int) -> Iterator[tuple[DocumentId | None, str]]:
    """(the id that the line names or None, text) for each document in turn.

    Args:
        texts: a path of ``collection.tsv`` as ColBERT reads it (number, text, and a title that is
            put before it) or of JSON lines (``id`` or ``_id``, ``text``, ``title``); None for empty
            texts. A mapping has no order: see `text_for`.
        documents: how many the index has; a file with fewer or more lines is not its collection.

    Raises:
        InvalidInputError: the file cannot be read, or is not the collection of the index; says
            which line.
    """
    if texts is None or isinstance(texts, Mapping):
        yield from ((None, "") for _ in range(documents))
        return
    path = Path(texts)
    parse = _tsv if path.suffix == ".tsv" else _json
    count = 0
    for number, line in enumerate(_lines(path)):
        if count == documents:
            raise _differs(path, f"more than {documents} lines", documents)
        yield parse(path, number, line)
        count += 1
    if count < documents:
        raise _differs(path, f"{count} lines", documents)


def text_for(texts: Texts, identifier: DocumentId, line: str) -> str:
    """The text of a document: of the mapping if there is one, else of its line. Raises
    InvalidInputError where the mapping lacks it."""
    if not isinstance(texts, Mapping):
        return line
    try:
        return texts[identifier]
    except KeyError:
        raise InvalidInputError(
            f"texts: document {identifier!r}",
            got="no such key",
            expected="a text for each document",
        ) from None


def _differs(path: Path, got: str, documents: int) -> InvalidInputError:
    return InvalidInputError(
        f"{path} is not the collection of the index",
        got=got,
        expected=f"{documents}, one for each document",
        fix="give the file that was indexed",
    )


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="\n") as file:
            for line in file:
                if line.strip():
                    yield line
    except OSError as error:
        raise InvalidInputError(
            f"cannot read texts {path}", got=error.strerror, expected="a readable file"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidInputError(f"texts {path}", got=str(error), expected="UTF-8") from error


def _tsv(path: Path, number: int, line: str) -> tuple[DocumentId | None, str]:
    fields = line.strip("\n\r ").split("\t")
    # ColBERT takes a heading for a passage, so it has a number too.
    if len(fields) < 2 or fields[0] not in (str(number), "id"):
        got = repr(line[:40])
        raise InvalidInputError(
            f"line {number + 1} of {path}",
            got=got,
            expected=f"{number}, a tab, and the text, as ColBERT reads it",
        )
    return None, f"{fields[2]} | {fields[1]}" if len(fields) > 2 else fields[1]


def _json(path: Path, number: int, line: str) -> tuple[DocumentId | None, str]:
    try:
        item: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(
            f"line {number + 1} of {path}", got=str(error), expected="a JSON object"
        ) from error
    text = item.get("text") if isinstance(item, dict) else None
    if not isinstance(text, str):
        raise InvalidInputError(
            f"line {number + 1} of {path}", got=repr(item)[:40], expected="an object with a text"
        )
    if item.get("title"):
        text = f"{item['title']} {text}"
    return item.get("id", item.get("_id")), text
