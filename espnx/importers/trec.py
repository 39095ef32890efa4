"""Run files of TREC: what a system found for each query, ``query Q0 document rank score tag`` a
line."""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import check_path
from ..errors import InvalidInputError
from ..retrieval.evaluate import document_of
from ..suggestions import suggests_keywords

_GZIP = b"\x1f\x8b"
_COLUMNS = "query, Q0, document, rank, score, tag"


def read_run(path: str | os.PathLike[str]) -> dict[str, list[tuple[str, float]]]:
    """Rankings of a run file (also compressed, ``.gz``), by the order that trec_eval gives them: by
    score, in 32 bits as it reads them, of equal ones the document whose id comes later in the
    alphabet first. What the file says of ranks does not count.

    Returns:
        query -> pairs (document, score), best first, as `espnx.evaluate` takes them. Ids are text.

    Raises:
        InvalidInputError: the file cannot be read, or a line is none of a run, scores something
            that is no finite number, or repeats a document of its query; says which.
    """
    name = check_path("run", path)
    found: dict[str, dict[str, float]] = {}
    try:
        with open(name, "rb") as raw:
            lines: Any = gzip.GzipFile(fileobj=raw) if raw.peek(2)[:2] == _GZIP else raw
            for number, line in enumerate(lines, start=1):
                fields = line.decode("utf-8-sig" if number == 1 else "utf-8").split()
                if fields:
                    _take(found, fields, f"line {number} of {name}")
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        got = getattr(error, "strerror", None) or str(error)
        raise InvalidInputError(
            f"cannot read run {name}", got=got, expected="a readable text file"
        ) from error
    return {query: _by_score(scores) for query, scores in found.items()}


def _take(found: dict[str, dict[str, float]], fields: list[str], place: str) -> None:
    if len(fields) != 6:
        raise InvalidInputError(place, got=" ".join(fields)[:80], expected=_COLUMNS)
    query, _, document, _, written, _ = fields
    try:
        score = float(written)
    except ValueError:
        score = math.nan
    if not math.isfinite(score):
        raise InvalidInputError(place, got=f"score {written[:40]}", expected="a finite number")
    documents = found.setdefault(query, {})
    if document in documents:
        raise InvalidInputError(
            place,
            got=f"document {document!r} of query {query!r} again",
            expected="each at most once",
        )
    documents[document] = score


def _by_score(scores: dict[str, float]) -> list[tuple[str, float]]:
    documents = sorted(scores, reverse=True)
    with np.errstate(over="ignore"):
        documents.sort(key=lambda document: -np.float32(scores[document]))
    return [(document, scores[document]) for document in documents]


@suggests_keywords
def write_run(
    path: str | os.PathLike[str], rankings: Mapping[Any, Sequence[Any]], *, tag: str = "espnx"
) -> None:
    """Writes rankings as a run file, which is whole when this returns, or as it was before.

    Whoever reads it, trec_eval or `read_run`, sorts by score, so a score that does not fall from
    one document to the next, in 32 bits, is written lower by the least step: the ranking stays what
    it is.

    Args:
        path: of the file, replaced if it is there.
        rankings: query -> documents, best first: pairs (id, score), the hits of a search, or ids
            alone, whose scores are the length of the ranking, ..., 1. Ids are text or whole
            numbers.
        tag: of the run, the last column.

    Raises:
        InvalidInputError: an id or a tag that a column cannot hold, being empty or with white space
            in it; two ids that are the same text (7 and ``"7"``); a document twice; a score that is
            not finite.
        OSError: the file cannot be written.
    """
    tag = _column(tag, "tag")
    lines: list[str] = []
    queries: set[str] = set()
    for query, ranking in rankings.items():
        name = _column(query, "query")
        if name in queries:
            raise InvalidInputError(
                "run",
                got=f"query {name!r} twice, as a number and as text",
                expected="ids that differ as text",
            )
        queries.add(name)
        lines += _lines(name, list(ranking), tag)
    target = Path(check_path("run", path))
    part = target.with_name(f"{target.name}.part")
    try:
        part.write_text("".join(lines), encoding="utf-8")
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


def _lines(query: str, ranking: list[Any], tag: str) -> list[str]:
    lines: list[str] = []
    documents: set[str] = set()
    above = np.float32(np.inf)
    for rank, item in enumerate(ranking, start=1):
        document = _column(document_of(item), f"document {rank} of query {query!r}")
        if document in documents:
            raise InvalidInputError(
                f"run: query {query!r}",
                got=f"document {document!r} twice",
                expected="each at most once",
            )
        documents.add(document)
        score = (
            item[1]
            if isinstance(item, tuple) and len(item) > 1
            else getattr(item, "score", len(ranking) - rank + 1)
        )
        try:
            with np.errstate(over="ignore"):
                written = np.float32(score)
        except (TypeError, ValueError):
            written = np.float32(np.nan)
        written = (
            min(written, np.nextafter(above, np.float32(-np.inf)))
            if np.isfinite(written)
            else written
        )
        if not np.isfinite(written):
            raise InvalidInputError(
                f"run: document {document!r} of query {query!r}",
                got=f"score {score!r}",
                expected="a finite number",
            )
        lines.append(f"{query} Q0 {document} {rank} {float(written):.9g} {tag}\n")
        above = written
    return lines


def _column(given: Any, what: str) -> str:
    """An id as a column of a file whose columns are parted by white space."""
    if isinstance(given, bool) or not isinstance(given, (str, int, np.integer)):
        raise InvalidInputError(
            f"run: {what}", got=type(given).__name__, expected="text or a whole number"
        )
    text = str(given)
    if not text or any(each.isspace() or not each.isprintable() for each in text):
        raise InvalidInputError(
            f"run: {what}",
            got=repr(text)[:80],
            expected="an id without white space and control characters",
            fix="give documents other ids",
        )
    return text
