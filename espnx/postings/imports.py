"""Sparse vectors and indexes that others wrote: lines of JSON with a weight for each term, and
folders of bm25s."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import numpy as np

from .. import errors
from ..checks import check_path
from ..storage.parse import Fields, check_plain_file, parse_object
from .build.records import CsrArrays

_LINE_MAX = 64 << 20
_PARAMS, _VOCABULARY = "params.index.json", "vocab.index.json"
_ARRAYS = {
    "data": "data.csc.index.npy",
    "indices": "indices.csc.index.npy",
    "indptr": "indptr.csc.index.npy",
}
_JSON_MAX = 4 << 30


def read_vector_lines(path: str | os.PathLike[str]) -> Iterator[tuple[str, dict[str, float]]]:
    """Ids and vectors of a file of lines ``{"id": ..., "vector": {TERM: WEIGHT, ...}}``, as
    Anserini, BMP and Seismic read. A line without an id has its number, from 0.

    Raises InvalidInputError where the file cannot be read; FormatError for a line of another kind,
    which it names.
    """
    name = check_path("file of vectors", path)
    try:
        with open(name, "rb") as file:
            number = 0
            while line := file.readline(_LINE_MAX + 1):
                if len(line) > _LINE_MAX:
                    raise errors.FormatError(
                        f"line {number + 1} of vectors",
                        path=name,
                        got="too long",
                        expected=f"at most {_LINE_MAX} bytes",
                    )
                if line.strip():
                    yield _vector(line, number, name)
                    number += 1
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.InvalidInputError(
            f"cannot read vectors {name}", got=error.strerror, expected="a readable file"
        ) from error


def _vector(line: bytes, number: int, path: str) -> tuple[str, dict[str, float]]:
    what = f"line {number + 1} of vectors"
    values = parse_object(line, path, what=what).values()
    vector = values.get("vector")
    if not isinstance(vector, dict) or not all(_is_weight(weight) for weight in vector.values()):
        raise errors.FormatError(
            what,
            path=path,
            got=f"keys {', '.join(values)}"[:80],
            expected='"vector": {TERM: WEIGHT of 0 or more}',
        )
    given = values.get("id", values.get("_id", number))
    if isinstance(given, bool) or not isinstance(given, (str, int)):
        raise errors.FormatError(
            what, path=path, got=type(given).__name__, expected="an id that is text or a number"
        )
    return str(given), {term: float(weight) for term, weight in vector.items()}


def _is_weight(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < 3.4e38


def read_bm25s(path: str | os.PathLike[str]) -> Iterator[dict[str, float]]:
    """The records of a folder that `bm25s.BM25.save` wrote, as vectors of the scores that are in
    it: postings of these, with ``exact=True``, give bm25s's scores for queries whose terms weigh 1.
    All of it is in memory meanwhile.

    Such a folder holds scores, no counts and no lengths: k1, b and the variant are what they were.
    Build from texts to choose.

    Raises InvalidInputError where there is no such folder, or its variant is ``bm25l`` or
    ``bm25+``, whose folders cannot be taken over; FormatError for files that are damaged.
    """
    folder = check_path("folder of bm25s", path)
    params = _json(folder, _PARAMS)
    method = params.text("method", most=64)
    if method in ("bm25l", "bm25+"):
        raise errors.InvalidInputError(
            f"folder of bm25s {folder}",
            got=f"variant {method}",
            expected="robertson, lucene or atire",
            fix="build from the texts: its records have scores for terms that they do not have",
        )
    words = _json(folder, _VOCABULARY).values()
    numbers = list(words.values())
    arrays = {name: _array(folder, file) for name, file in _ARRAYS.items()}
    data, indices, indptr = arrays["data"], arrays["indices"], arrays["indptr"]
    n_records = params.whole("num_docs", most=2**31 - 1)
    fits = (
        indptr.ndim == indices.ndim == data.ndim == 1
        and len(indptr) > 0
        and len(indices) == len(data) == int(indptr[-1])
    )
    fits = (
        fits
        and int(indptr[0]) == 0
        and bool((np.diff(indptr) >= 0).all())
        and data.dtype.kind == "f"
    )
    if not fits or (len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < n_records):
        raise errors.FormatError(
            "folder of bm25s",
            path=folder,
            got="arrays that do not fit",
            expected="a matrix in CSC form",
        )
    if not all(type(number) is int and 0 <= number < len(indptr) for number in numbers):
        raise errors.FormatError(
            "vocabulary of bm25s",
            path=folder,
            got="numbers beyond the matrix",
            expected=f"below {len(indptr)}",
        )
    names = {number: word for word, number in words.items()}
    column = np.repeat(np.arange(len(indptr) - 1), np.diff(indptr))
    order = np.argsort(indices, kind="stable")
    rows = CsrArrays(
        np.concatenate([[0], np.cumsum(np.bincount(indices, minlength=n_records))]),
        column[order],
        data[order],
    )
    for vector in rows:
        yield {names[number]: weight for number, weight in vector.items() if number in names}


def _json(folder: str, name: str) -> Fields:
    path = os.path.join(folder, name)
    try:
        if check_plain_file(path) > _JSON_MAX:
            raise errors.FormatError(
                "file of bm25s", path=path, got="too large", expected=f"at most {_JSON_MAX} bytes"
            )
        with open(path, "rb") as file:
            return parse_object(file.read(), path, what="file of bm25s")
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.InvalidInputError(
            f"folder of bm25s {folder}",
            got=f"{name}: {error.strerror}",
            expected="one that bm25s.BM25.save wrote",
        ) from error


def _array(folder: str, name: str) -> np.ndarray:
    path = os.path.join(folder, name)
    try:
        check_plain_file(path)
        found: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.FormatError(
            "array of bm25s", path=path, got=str(error), expected="an array that numpy.save wrote"
        ) from error
    return found


__all__ = ["read_bm25s", "read_vector_lines"]
