"""The last part of the demo: the model answers with references. K and V of each passage are
computed for the first question and kept on SSD; for the second one they are read, at other places
in the prompt, and nothing of them is computed again."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from demo_answer import load

import espnx
from espnx.rag.answer import Answer
from espnx.sizes import format_size
from espnx.tables import render_table

NEW_TOKENS = 48
#: Passages before the first question; before the second, in its own order, so many of the same.
PASSAGES, OF_THEM = 5, 3
#: A model with fewer positions has no room for passages and what is around them.
POSITIONS_LEAST = 1024
_PASSAGE_TOKENS = 192


def has_room(folder: str | Path) -> bool:
    """Whether a model has positions enough."""
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    return bool(config.max_position_embeddings >= POSITIONS_LEAST)


def referenced_answers(
    index: espnx.Index, folder: Path, questions: Sequence[str], storage: str
) -> bool:
    """Answers both, and prints what each stands on. Returns whether nothing was computed of the
    second one's passages, and every number in the answers leads to a text."""
    model, tokenizer = load(folder)
    with espnx.Rag(
        index,
        model,
        tokenizer,
        kv=storage,
        max_new_tokens=NEW_TOKENS,
        passage_tokens=_PASSAGE_TOKENS,
    ) as rag:
        first = rag.ask(questions[0], k=PASSAGES)
        # about the same sources, in the order that this question finds them in
        known = [each.passage for each in first.references]
        second = rag.ask(questions[1], k=OF_THEM, search={"include": known})
        is_there = all(rag.check(each)[n] == "unchanged" for each in (first, second) for n in
                       _numbers(each))  # fmt: skip
    for answer in (first, second):
        print(f"Question: {answer.question}\nAnswer: {answer.summary()}\n")
    rows = [("", "first question", "second question")]
    rows += [
        (name, *(make(each) for each in (first, second)))
        for name, make in (
            ("passages", lambda each: f"{len(each.references)}"),
            ("their tokens computed", lambda each: f"{_said(each, 'computed'):,}"),
            ("and read from SSD", lambda each: f"{_said(each, 'reused'):,}"),
            ("bytes of K and V read", lambda each: format_size(_said(each, "bytes"))),
            ("first token", lambda each: f"{each.timings.first_token_s or 0:.2f} s"),
        )
    ]
    print(render_table(rows[0], rows[1:]))
    return bool(second.references) and not _said(second, "computed") and is_there


def _said(answer: Answer, name: str) -> int:
    """What the passages' library says of an answer's prompt."""
    return int((answer.reused or {}).get(name, 0))


def _numbers(answer: Answer) -> list[int]:
    return [each.number for each in answer.references]
