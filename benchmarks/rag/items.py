"""Planted facts and held-out text for the table of quality, as token ids, by model."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch

from espnx.errors import InvalidInputError

from ..kv.resume import text_tokens
from ..kv_quality.recall import NAME, HeldOut
from .options import PREFIX_TOKENS, Opened

PASSAGES, PASSAGE_TOKENS, TEXT_TOKENS = 6, 128, 64
#: Of a text in passages with what follows: one token is asked with, the others are judged.
_LENGTH = PASSAGES * PASSAGE_TOKENS + 1 + TEXT_TOKENS
#: Of another text than passages are cut from: a system prompt has nothing to do with them.
_PREFIX = "You answer questions from the documents below, briefly and from nothing else. "
_TEXT_OF_WORDS = (
    "amber badge beacon bottle bridge candle castle cedar cherry circle clover copper coral "
    "cotton desert dragon eagle falcon forest garden glacier harbor honey island jade kettle "
    "ladder lemon marble meadow mirror nectar ocean olive orchid pepper planet quartz rabbit "
    "ribbon saddle shadow silver spider temple timber turtle valley velvet walnut willow "
    "winter"
)
_NAMES = tuple(_TEXT_OF_WORDS.split())


@dataclass(frozen=True)
class Item:
    """A prompt and what comes behind it.

    Attributes:
        prefix, passages: token ids, int64 [n] each.
        asked: tokens between the last passage and what is judged; at least one.
        answer: the judged tokens.
    """

    prefix: torch.Tensor
    passages: list[torch.Tensor]
    asked: torch.Tensor
    answer: torch.Tensor


class Items:
    """What a model is asked.

    Args:
        opened: a model; where its folder has held-out text and words, these are used, and lines
            that it was trained to recall; else Python's reference, which it may have seen, and
            facts in plain English.
        seed: of what is drawn.
        text_of: tokens of that reference, to draw from.

    Attributes:
        source: what the text is.
        prefix: token ids before the passages.

    Raises InvalidInputError where there is too little text, or too few words.
    """

    def __init__(self, opened: Opened, seed: int, text_of: int = 120_000):
        self._opened, self._seed, self._tokenizer = opened, seed, opened.tokenizer
        if (opened.folder / NAME).is_file():
            self._known: HeldOut | None = HeldOut.load(opened.folder)
            self._text = torch.from_numpy(self._known.tokens.astype(np.int64))
            self.source = "held-out text"
        else:
            self._known = None
            self._text, self.source = text_tokens(self._tokenizer, text_of), "Python's reference"
        needed, there = 4 * PASSAGES, len(self._known.words) if self._known else 4 * PASSAGES
        if len(self._text) < _LENGTH or there < needed:
            raise InvalidInputError(
                f"held-out text of {opened.name}",
                got=f"{len(self._text)} tokens and {there} words",
                expected=f"{_LENGTH} tokens and {needed} words, or more",
            )
        words = self._ids(_PREFIX * PREFIX_TOKENS)
        self.prefix = torch.tensor(words[:PREFIX_TOKENS])

    def _ids(self, text: str) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=False).input_ids)

    def facts(self, count: int) -> Iterator[Item]:
        """Each passage has a fact, and one of them is asked for."""
        rng = np.random.default_rng([self._seed, 1])
        for _ in range(count):
            source, passages = int(rng.integers(PASSAGES)), list[torch.Tensor]()
            for number, (line, asked, answer) in enumerate(self._lines(rng)):
                room = PASSAGE_TOKENS - len(line)
                start = int(rng.integers(len(self._text) - room))
                cut = int(rng.integers(room + 1))
                text = self._text[start : start + room]
                passages.append(torch.cat([text[:cut], torch.tensor(line), text[cut:]]))
                if number == source:
                    chosen = torch.tensor(asked), torch.tensor(answer)
            yield Item(self.prefix, passages, *chosen)

    def _lines(self, rng: np.random.Generator) -> list[tuple[list[int], list[int], list[int]]]:
        """(line, question, answer) of each passage."""
        if self._known is not None:
            words = self._known.words
            picks = rng.permutation(len(words))[: 4 * PASSAGES].reshape(PASSAGES, 4)
            found = []
            for pick in picks:
                value = list(itertools.chain.from_iterable(words[i] for i in pick[1:]))
                head, tail = self._known.line("KEY", words[pick[0]], value)
                asked, answer = self._known.line("GET", words[pick[0]], value)
                found.append((head + tail, asked, answer))
            return found
        names = [_NAMES[i] for i in rng.permutation(len(_NAMES))[: 3 * PASSAGES]]
        return [
            (
                self._ids(f"\nThe key of the {name} is {first} {second}.\n"),
                self._ids(f"\n\nQuestion: What is the key of the {name}?\nAnswer: The key of the "
                          f"{name} is"),
                self._ids(f" {first} {second}."),
            )
            for name, first, second in zip(names[::3], names[1::3], names[2::3], strict=True)
        ]  # fmt: skip

    def texts(self, count: int) -> Iterator[Item]:
        """A text in passages, and how it goes on. No two have a token in common, so that they are
        independent; fewer than `count` where there is no more text."""
        rng = np.random.default_rng([self._seed, 2])
        body = PASSAGES * PASSAGE_TOKENS
        for number in rng.permutation(len(self._text) // _LENGTH)[:count].tolist():
            text = self._text[number * _LENGTH : (number + 1) * _LENGTH]
            passages = list(text[:body].split(PASSAGE_TOKENS))
            yield Item(self.prefix, passages, text[body : body + 1], text[body + 1 :])
