"""Documents of files of lines: JSON objects, or CSV below a line of names. A file of its own:
formats are read, and know of no others."""

from __future__ import annotations

import codecs
import csv
import json
from collections.abc import Iterable, Iterator
from typing import Any

from ..errors import InvalidInputError

_FIELD_CHARACTERS_MAX = 1 << 30
_FIX_QUOTES = (
    "put texts that begin with a quotation mark into quotation marks, and double those within; or "
    "write JSON lines"
)


def json_rows(name: str, lines: Iterable[bytes]) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it stands, the object) of each line that holds one. Raises InvalidInputError for any
    other that is not empty."""
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        place = f"line {number} of {name}"
        try:
            item = json.loads(line.decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:  # not JSON, or not UTF-8
            raise InvalidInputError(
                place,
                got=str(error),
                expected="JSON lines: an object a line",
                fix=(
                    "other formats are told by their names (.csv, .tsv, .parquet, .arrow), or by "
                    "format= (--corpus-format)"
                )
                if number == 1
                else None,
            ) from error
        if not isinstance(item, dict):
            raise InvalidInputError(
                place, got=type(item).__name__, expected="JSON lines: an object a line"
            )
        yield place, item


def csv_rows(
    name: str, lines: Iterable[bytes], *, delimiter: str
) -> Iterator[tuple[str, dict[str, Any]]]:
    """(where it ends, its fields by the names in the first line) of each row; fields are text.
    Raises InvalidInputError.

    Of tabs, too, fields may be quoted, as pandas and `csv` write them. A file that is not meant so
    shows where a text begins with a quotation mark: what follows is no CSV, or whole lines lie
    within the quotes.
    """
    # of the whole process; a document may be longer than 128 KiB
    if csv.field_size_limit() < _FIELD_CHARACTERS_MAX:
        csv.field_size_limit(_FIELD_CHARACTERS_MAX)
    reader = csv.reader(codecs.iterdecode(lines, "utf-8-sig"), delimiter=delimiter, strict=True)
    names: list[str] | None = None
    try:
        for row in reader:
            place = f"line {reader.line_num} of {name}"
            if names is None:
                names = [each.strip() for each in row]
                if len(set(names)) < len(names):
                    raise InvalidInputError(
                        place, got=", ".join(names[:8]), expected="names of columns, each once"
                    )
            elif row:
                if len(row) != len(names):
                    raise InvalidInputError(
                        place,
                        got=f"{len(row)} fields",
                        expected=f"{len(names)}: {', '.join(names[:8])}",
                    )
                if delimiter == "\t" and any("\n" in field and "\t" in field for field in row):
                    raise InvalidInputError(
                        place,
                        got="lines with tabs within a quoted field",
                        expected="a row a line",
                        fix=_FIX_QUOTES,
                    )
                yield place, dict(zip(names, row, strict=True))
    except (csv.Error, UnicodeDecodeError) as error:
        fix = _FIX_QUOTES if delimiter == "\t" and isinstance(error, csv.Error) else None
        raise InvalidInputError(
            f"line {reader.line_num} of {name}", got=str(error), expected="CSV in UTF-8", fix=fix
        ) from error
