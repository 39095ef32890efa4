"""Text of a prompt, piece by piece, whose tokens are counted: by a rule, or by a model's
tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from .. import errors
from .prompt import Counted


@dataclass(frozen=True)
class TextPiece:
    """Text and its tokens by some count."""

    text: str
    count: Callable[[str], int]

    @cached_property
    def size(self) -> int:
        return self.count(self.text)

    def cut(self, tokens: int) -> TextPiece:
        """The longest beginning of at most so many tokens, found by halving: of a count that does
        not grow with the text, a beginning that fits."""
        low, high = 0, len(self.text)
        while low < high:
            middle = (low + high + 1) // 2
            if self.count(self.text[:middle]) <= tokens:
                low = middle
            else:
                high = middle - 1
        return TextPiece(self.text[:low], self.count)


@dataclass(frozen=True)
class TextCounter:
    """Text by a rule. See `Counter`."""

    count: Callable[[str], int]

    def trusted(self, text: str) -> TextPiece:
        return TextPiece(text, self.count)

    data = trusted


@dataclass(frozen=True)
class IdPiece:
    """Token ids, and the tokenizer that reads them."""

    ids: tuple[int, ...]
    tokenizer: Any

    @property
    def size(self) -> int:
        return len(self.ids)

    @property
    def text(self) -> str:
        # a character may be cut in two
        return str(self.tokenizer.decode(list(self.ids))).rstrip("\ufffd")

    def cut(self, tokens: int) -> IdPiece:
        return IdPiece(self.ids[:tokens], self.tokenizer)


class IdCounter:
    """Text by a model's tokenizer, each piece by itself. See `Counter`.

    In data, what the tokenizer would read as one of its own signs (``<|im_end|>``) is read letter
    by letter. A sign that is one letter (Gemma's line break) is no more than that letter, and
    stays; but one that is special has no other reading, and is left out.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        special = set(tokenizer.all_special_tokens)
        added = tokenizer.get_added_vocab()
        letters = {sign for sign in added if len(sign) == 1} - special
        signs = {*added, *special} - letters - {""}
        longest = sorted(signs, key=lambda sign: (-len(sign), sign))
        self._sign = re.compile("|".join(map(re.escape, longest))) if longest else None
        known = set(tokenizer.all_special_ids)
        known |= {number for sign, number in added.items() if sign not in letters}
        self._sign_ids = known - {getattr(tokenizer, "unk_token_id", None)}

    def trusted(self, text: str, *, begins: bool = False) -> IdPiece:
        """`begins`: a text, with what the model wants to stand there."""
        return IdPiece(tuple(self._ids(text, begins=begins)), self._tokenizer)

    def data(self, text: str) -> IdPiece:
        cuts, match = [0], self._sign.search(text) if self._sign else None
        while match and self._sign:
            cuts.append(match.start() + 1)
            # its rest may be a sign, too: four spaces, then three
            match = self._sign.search(text, cuts[-1])
        parts = zip(cuts, [*cuts[1:], len(text)], strict=True)
        ids = [n for begin, end in parts if begin < end for n in self._ids(text[begin:end])]
        return IdPiece(tuple(n for n in ids if n not in self._sign_ids), self._tokenizer)

    def _ids(self, text: str, *, begins: bool = False) -> list[int]:
        return list(self._tokenizer(text, add_special_tokens=begins, verbose=False).input_ids)


def ids_of(piece: Counted) -> list[int]:
    """The tokens of a model's piece. Raises StateError for one that has none."""
    if not isinstance(piece, IdPiece):
        raise errors.StateError(
            "token ids", got=type(piece).__name__, expected="what a model's tokenizer has read"
        )
    return list(piece.ids)
