"""What a library of passages is given, checked before anything is computed. A file of its own: what
it checks is as much of prompts and of caches as of the library."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from transformers import PreTrainedModel

from .... import errors
from ....checks import check_text
from ....kv.options import CacheOptions
from ....suggestions import nearest


def words_of(model: object) -> int:
    """The words that a model knows. Raises InvalidInputError for what is none of transformers."""
    base = getattr(model, "get_base_model", None)
    inner = base() if callable(base) else model
    if not isinstance(inner, PreTrainedModel):
        raise errors.InvalidInputError(
            "PassageKV",
            got=type(model).__name__,
            expected="a model of transformers",
            fix="PassageKV(model, directory)",
        )
    return len(inner.get_input_embeddings().weight)


def check_key(key: object) -> None:
    """Raises InvalidInputError for what is no name."""
    check_text("the name of a passage", key)
    if not key:
        raise errors.InvalidInputError("the name of a passage", got="''", expected="some text")


def check_options(options: Mapping[str, Any]) -> None:
    """Raises InvalidInputError for options that rows behind passages do not have."""
    if options.get("draft") is not None or options.get("draft_memory") is not None:
        raise errors.InvalidInputError(
            "drafts behind composed passages",
            got=options.get("draft"),
            expected="None: tokens one by one",
            fix="KVCache(..., draft=...), of which all is computed",
        )
    known = [each.name for each in fields(CacheOptions)]
    given = {
        name: value for name, value in options.items() if name not in ("draft", "draft_memory")
    }
    for name in given:
        if name not in known:
            meant = nearest(name, known)
            raise errors.InvalidInputError(
                "compose",
                got=f"the option {name!r}",
                expected=f"of rows behind passages: {', '.join(known)}",
                fix=None if meant is None else f"did you mean {meant!r}?",
            )
    CacheOptions(**given)
