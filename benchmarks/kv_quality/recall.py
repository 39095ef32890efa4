"""Recall questions: a line ``KEY garden: silver river`` in held-out text and, so many tokens behind
it, ``GET garden: silver river``.

A model's folder carries what they are made of (`NAME`): held-out text and words as tokens, so that
nothing but the folder is needed to ask.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from espnx.errors import FormatError, InvalidInputError

NAME = "held_out.safetensors"
DISTANCES = (128, 512, 1024, 1900)
DISTRACTORS = 3  # other key lines in the context of a question
_MARKS = ("KEY", "GET", ":", "\n")


@dataclass(frozen=True)
class HeldOut:
    """What a model has not seen in training.

    Attributes:
        tokens: uint16 [n], text.
        words: of keys and values, each a few tokens.
        marks: the tokens of ``KEY``, ``GET``, ``:`` and the newline.
    """

    tokens: np.ndarray
    words: list[list[int]]
    marks: dict[str, list[int]]

    def line(self, kind: str, key: list[int], value: list[int]) -> tuple[list[int], list[int]]:
        """``KEY word:`` or ``GET word:`` on a line of its own, and the value with the newline that
        ends it."""
        newline = self.marks["\n"]
        return newline + self.marks[kind] + key + self.marks[":"], value + newline

    def save(self, folder: Path) -> None:
        from safetensors.numpy import save_file

        notes = {"words": json.dumps(self.words), "marks": json.dumps(self.marks)}
        save_file(
            {"tokens": np.ascontiguousarray(self.tokens, dtype=np.uint16)},
            folder / NAME,
            metadata=notes,
        )

    @classmethod
    def load(cls, folder: Path) -> HeldOut:
        """Raises InvalidInputError where the folder has none, FormatError where it is not what
        `save` writes."""
        from safetensors import SafetensorError, safe_open

        path = folder / NAME
        if not path.is_file():
            raise InvalidInputError(
                "held-out text",
                got=f"no {NAME} in {folder}",
                expected="a folder of scripts/train_demo_model.py",
                fix=f"python scripts/train_demo_model.py --out {folder}",
            )
        try:
            with safe_open(path, "numpy") as file:
                notes = file.metadata() or {}
                found = cls(
                    file.get_tensor("tokens"),
                    json.loads(notes["words"]),
                    json.loads(notes["marks"]),
                )
        except (SafetensorError, KeyError, ValueError) as error:
            raise FormatError(
                "cannot read held-out text",
                path=path,
                got=str(error),
                expected="tokens, words and marks",
            ) from error
        if (
            set(found.marks) != set(_MARKS)
            or len(found.words) < 4 * (1 + DISTRACTORS)
            or not len(found.tokens)
        ):
            raise FormatError(
                "cannot read held-out text",
                path=path,
                got=f"{len(found.words)} words",
                expected="16 words, marks and text",
            )
        return found


def text_window(stream: np.ndarray, rng: np.random.Generator, count: int) -> list[int]:
    """So many tokens from somewhere in the stream."""
    start = int(rng.integers(0, max(1, len(stream) - count)))
    return np.resize(stream[start : start + count], count).tolist() if count else []


def question(
    held_out: HeldOut, rng: np.random.Generator, context: int, distance: int
) -> tuple[list[int], int]:
    """context + 1 held-out tokens that end with an answer, ``distance`` behind the value it
    repeats; and how many tokens the answer has."""
    words = held_out.words
    picks = rng.permutation(len(words))[: 4 * (1 + DISTRACTORS)].reshape(1 + DISTRACTORS, 4)
    pairs = [
        (words[pick[0]], [token for word in pick[1:] for token in words[word]]) for pick in picks
    ]
    key_head, value = held_out.line("KEY", *pairs[0])
    get_head, _ = held_out.line("GET", *pairs[0])
    others = [[*head, *tail] for head, tail in (held_out.line("KEY", *pair) for pair in pairs[1:])]
    between, before = (
        distance - len(value) - len(get_head),
        context + 1 - distance - len(value) - len(key_head),
    )
    behind = [
        line
        for number, line in enumerate(others[1:], 1)
        if sum(map(len, others[1 : number + 1])) <= between
    ]
    front = others[:1] if len(others[0]) <= before else []
    first, second = (
        _scatter(held_out.tokens, rng, lines, room)
        for lines, room in ((front, before), (behind, between))
    )
    return first + key_head + value + second + get_head + value, len(value)


def _scatter(
    stream: np.ndarray, rng: np.random.Generator, lines: list[list[int]], count: int
) -> list[int]:
    """``count`` tokens of text with the lines somewhere in it."""
    text = text_window(stream, rng, count - sum(map(len, lines)))
    cuts = [0, *sorted(rng.integers(0, len(text) + 1, len(lines)).tolist()), len(text)]
    pieces = (
        text[begin:end] + line
        for (begin, end), line in zip(itertools.pairwise(cuts), [*lines, []], strict=True)
    )
    return list(itertools.chain.from_iterable(pieces))
