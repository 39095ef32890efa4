"""What stands around the sources and the question of a prompt: plain text, or a chat template's
turns."""

from __future__ import annotations

from typing import Any

from .. import errors
from .pieces import IdCounter, TextCounter
from .prompt import Counter, Frame, Wording

_SOURCES, _QUESTION = "\u2402sources\u2403", "\u2402question\u2403"


def plain_frame(counter: Counter, wording: Wording, prefix: str) -> Frame:
    """The prompt as text: prefix and instructions, sources, question."""
    head = [each for each in (prefix, wording.instructions) if each]
    begin = "".join(f"{each}\n\n" for each in head) + wording.sources
    return Frame(*(counter.trusted(each) for each in (begin, wording.question, wording.answer)))


def model_frame(counter: IdCounter, tokenizer: Any, wording: Wording, prefix: str) -> Frame:
    """The frame of a chat template, where there is one."""
    if not getattr(tokenizer, "chat_template", None):
        plain = plain_frame(TextCounter(len), wording, prefix)
        return Frame(
            counter.trusted(plain.head.text, begins=True),
            counter.trusted(plain.middle.text),
            counter.trusted(plain.end.text),
        )
    asked = f"{wording.sources}{_SOURCES}{wording.question}{_QUESTION}"
    turns = [wording.instructions, asked] if wording.instructions else [asked]
    user = {"role": "user", "content": "\n\n".join(turns)}
    text = ""
    if prefix:
        try:
            text = _rendered(tokenizer, [{"role": "system", "content": prefix}, user])
        except Exception as error:
            # Some templates know no system turn, and raise their own kind of error.
            merged = {"role": "user", "content": f"{prefix}\n\n{user['content']}"}
            text = _rendered(tokenizer, [merged], error)
    else:
        text = _rendered(tokenizer, [user])
    head, found, rest = text.partition(_SOURCES)
    middle, also_found, end = rest.partition(_QUESTION)
    if not found or not also_found or _SOURCES in rest or _QUESTION in head + end:
        raise errors.InvalidInputError(
            "chat template",
            got="a prompt without what the user says, or with it twice",
            expected="the user's text once, as it is",
            fix="tokenizer.chat_template = None",
        )
    return Frame(counter.trusted(head), counter.trusted(middle), counter.trusted(end))


def _rendered(tokenizer: Any, turns: list[dict[str, str]], before: Exception | None = None) -> str:
    try:
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))
    except Exception:
        if before is not None:
            raise errors.InvalidInputError(
                "chat template", got=str(before)[:200], expected="one that takes a user's turn"
            ) from before
        raise
