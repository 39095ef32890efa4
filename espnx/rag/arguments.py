"""What `Rag` is asked with, checked before anything is looked for."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from .. import errors
from ..checks import check_finite, check_text, check_whole
from ..retrieval.search.options import SearchKeywords, SearchOptions
from ..storage.documents.ids import document_ids
from ..suggestions import nearest
from .calibration import KnownSource

_IDS = ("include", "exclude")
#: Tokens and passages that no program means more of; more than 64 bits hold nothing can count.
_MOST = 2**31 - 1


def check_count(name: str, value: object, least: int) -> None:
    """Raises InvalidInputError unless it is a whole number that can be counted to."""
    check_whole(name, value, least, _MOST)


def check_deadline(deadline_s: object) -> None:
    """Raises InvalidInputError."""
    if deadline_s is not None:
        check_finite("deadline_s", deadline_s)
        if not isinstance(deadline_s, int | float) or deadline_s <= 0:
            raise errors.InvalidInputError(
                "deadline_s", got=deadline_s, expected="seconds, above 0"
            )


def check_asked(question: object, k: object, deadline_s: object) -> None:
    """Raises InvalidInputError."""
    check_count("k", k, 0)
    check_text("question", question)
    if not str(question).strip():
        raise errors.InvalidInputError("question", got=repr(question), expected="some text")
    check_deadline(deadline_s)


def search_of(search: object, k: int) -> SearchKeywords:
    """Options of `Index.search`, checked and ready to be given more than once. Raises
    InvalidInputError."""
    if search is None:
        return {}
    known = sorted(SearchKeywords.__optional_keys__)
    if not isinstance(search, Mapping):
        raise errors.InvalidInputError(
            "search",
            got=repr(search)[:60],
            expected="options of Index.search by name",
            fix="search={'first_stage': ('bm25', 'ivf')}",
        )
    for name in search:
        if name not in known:
            meant = nearest(str(name), known)
            raise errors.InvalidInputError(
                "search",
                got=f"the option {name!r}",
                expected=", ".join(known),
                fix=None if meant is None else f"did you mean {meant!r}?",
            )
    given: dict[str, Any] = dict(search)
    for name in _IDS:
        if given.get(name) is not None:
            given[name] = document_ids(given[name], f"search={{{name!r}: ...}}")
    checked = SearchOptions(k=max(k, 1), **given)
    found: Any = {name: getattr(checked, name) for name in given}
    return found


def known_sources(questions: object) -> list[KnownSource]:
    """Questions whose source is known. Raises InvalidInputError."""
    if not isinstance(questions, Iterable) or isinstance(questions, str | bytes | Mapping):
        raise errors.InvalidInputError(
            "questions", got=repr(questions)[:60], expected="a list of KnownSource"
        )
    found = list(questions)
    for each in found:
        if not isinstance(each, KnownSource):
            raise errors.InvalidInputError(
                "questions", got=repr(each)[:60], expected="KnownSource(question, passage)"
            )
    return found
