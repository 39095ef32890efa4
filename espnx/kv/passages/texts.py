"""The prompts of a batch that are composed of passages, and which sequence stands behind which."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from ... import errors


@dataclass(frozen=True)
class Spread:
    """The places of a batch's sequences among the queries of each prompt.

    Attributes:
        most: sequences of a prompt; those that have fewer are filled up.
        chosen: int64 [prompts, most]: sequences.
        text_of, slots: int64 [sequences]: the prompt of each, and its place there.
        uses: int64 [columns, sequences]: the passage of each column of the attention mass, or -1.
    """

    most: int
    chosen: torch.Tensor
    text_of: torch.Tensor
    slots: torch.Tensor
    uses: torch.Tensor

    def gathered(self, q: torch.Tensor) -> torch.Tensor:
        """Rows [sequences, heads, n, d] as [prompts, heads, most x n, d]."""
        n_texts, (heads, n, d) = len(self.chosen), q.shape[1:]
        by_text = q[self.chosen.view(-1)].view(n_texts, self.most, heads, n, d)
        return by_text.transpose(1, 2).reshape(n_texts, heads, self.most * n, d)


class Texts:
    """Prompts of which each has passages of its own.

    Args:
        count: of prompts.
        passages: (prompt, tokens, whether it is counted) of each, prompt by prompt.

    Attributes:
        count: as given.
        begins: the position of each passage in its prompt.
        tokens: of each prompt.
        columns: of the attention mass: counted passages of the prompt with the most.
    """

    def __init__(self, count: int, passages: Sequence[tuple[int, int, bool]]):
        self.count, self.tokens, self.begins = count, [0] * count, list[int]()
        counted: list[list[int]] = [[] for _ in range(count)]
        for number, (text, tokens, is_counted) in enumerate(passages):
            self.begins.append(self.tokens[text])
            self.tokens[text] += tokens
            if is_counted:
                counted[text].append(number)
        self.columns = max(map(len, counted), default=0)
        self._counted = [[*each, *[-1] * (self.columns - len(each))] for each in counted]
        self._text_of: list[int] | None = None
        self._spread: Spread | None = None

    @property
    def longest(self) -> int:
        """Tokens of the longest prompt."""
        return max(self.tokens)

    def of(self, n_sequences: int, *, is_first: bool) -> list[int]:
        """The prompt of each sequence. In the first pass as many stand behind each, one after the
        other, as `generate` repeats them. Raises InvalidInputError."""
        if self._text_of is None or (is_first and len(self._text_of) != n_sequences):
            if n_sequences % self.count:
                raise errors.InvalidInputError(
                    "sequences of a batch behind composed prompts",
                    got=n_sequences,
                    expected=f"{self.count}, or a multiple of it",
                    fix="cache.prompt(questions)",
                )
            each = n_sequences // self.count
            self._text_of, self._spread = [i // each for i in range(n_sequences)], None
        return self._text_of

    def spread(self, n_sequences: int, *, is_first: bool) -> Spread:
        """See `Spread`. Raises what `of` raises."""
        text_of = self.of(n_sequences, is_first=is_first)
        if self._spread is None:
            mine: list[list[int]] = [[] for _ in range(self.count)]
            slots = list[int]()
            for sequence, text in enumerate(text_of):
                slots.append(len(mine[text]))
                mine[text].append(sequence)
            most = max(map(len, mine))
            chosen = [[*each, *[0] * (most - len(each))] for each in mine]
            uses = [
                [self._counted[text][column] for text in text_of] for column in range(self.columns)
            ]
            self._spread = Spread(
                most,
                torch.tensor(chosen),
                torch.tensor(text_of),
                torch.tensor(slots),
                torch.tensor(uses, dtype=torch.int64).view(self.columns, n_sequences),
            )
        return self._spread

    def padding(self, n_sequences: int, *, is_first: bool) -> list[int]:
        """How many positions in front of each sequence's prompt are none of its own."""
        return [
            self.longest - self.tokens[text] for text in self.of(n_sequences, is_first=is_first)
        ]

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        if self._text_of is not None:
            self._text_of, self._spread = [self._text_of[i] for i in sequences], None

    def clear(self) -> None:
        """The batch is over; the next one may have another size."""
        self._text_of = self._spread = None
