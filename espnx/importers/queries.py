"""Files of queries: JSON lines, or an id and a text a line."""

from __future__ import annotations

import json

from ..errors import InvalidInputError


def read_queries(path: str) -> dict[str, str]:
    """Texts by id, in the order of the file: JSON lines with ``id`` (or ``_id``) and ``text``, or
    lines ``id TAB text``. Ids become text.

    Raises InvalidInputError: the file cannot be read, or a line is neither, or repeats an id; says
    which.
    """
    queries: dict[str, str] = {}
    try:
        with open(path, encoding="utf-8-sig") as file:
            for number, line in enumerate(file, start=1):
                if not line.strip():
                    continue
                place = f"line {number} of {path}"
                identifier, text = _parsed(line, place)
                if queries.setdefault(identifier, text) != text:
                    raise InvalidInputError(
                        place, got=f"another query {identifier!r}", expected="ids that occur once"
                    )
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInputError(
            f"cannot read queries {path}", got=str(error), expected="a readable text file"
        ) from error
    if not queries:
        raise InvalidInputError(f"queries {path}", got="no query", expected="lines of queries")
    return queries


def _parsed(line: str, place: str) -> tuple[str, str]:
    expected = 'a JSON object with "id" (or "_id") and "text", or an id, a tab and a text'
    if not line.lstrip().startswith("{"):
        identifier, tab, text = line.strip("\r\n").partition("\t")
        if not tab or not identifier.strip() or not text.strip():
            raise InvalidInputError(place, got=line.strip()[:80], expected=expected)
        return identifier.strip(), text.strip()
    try:
        item = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise InvalidInputError(place, got=str(error), expected=expected) from error
    identifier, text = item.get("_id", item.get("id")), item.get("text")
    if (
        isinstance(identifier, bool)
        or not isinstance(identifier, (str, int))
        or not isinstance(text, str)
    ):
        raise InvalidInputError(place, got=f"keys {', '.join(item)}"[:80], expected=expected)
    return str(identifier), text
