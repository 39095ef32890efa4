"""How much of their attention tokens paid to each passage."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ... import errors

#: Of the last so many tokens; what came before is forgotten, so that memory does not grow with the
#: text.
KEPT_TOKENS = 4096
#: Of heads that are watched, the last tokens that take so many bytes.
KEPT_HEAD_BYTES = 64 << 20


class MassRecord:
    """Shares of attention, of every token that came after the passages: the mean over the heads of
    each layer, and those of some heads by themselves.

    Args:
        layers: of the model.
        columns: passages.
    """

    def __init__(self, layers: int, columns: int):
        self._layers, self._columns = layers, columns
        self._means = _Shares(layers, columns, KEPT_TOKENS)
        self._heads = _Shares(0, columns, KEPT_TOKENS)
        self._watched = dict[int, list[tuple[int, int]]]()  # layer -> (row of `_heads`, head)

    @property
    def count(self) -> int:
        """Tokens so far."""
        return self._means.count

    def watch(self, heads: Sequence[tuple[int, int]]) -> None:
        """Keeps the shares of these heads by themselves, (layer, head) from 0, in place of those
        that were watched before, from the next token on."""
        self._watched.clear()
        for row, (layer, head) in enumerate(heads):
            self._watched.setdefault(layer, []).append((row, head))
        token_bytes = 4 * len(heads) * max(self._columns, 1)
        most = max(1, min(KEPT_TOKENS, KEPT_HEAD_BYTES // max(token_bytes, 1)))
        self._heads = _Shares(len(heads), self._columns, most)
        self._heads.skip_to(self.count)

    def clear(self) -> None:
        """No tokens have come."""
        self._means.clear()
        self._heads.clear()

    def note(self, layer: int, begin: int, sequences: range, shares: torch.Tensor) -> None:
        """Notes the shares of tokens from `begin` on: float32 [passages, some sequences, heads,
        n]."""
        shares = shares.detach()
        self._means.note([layer], begin, sequences, shares.mean(dim=2)[None])
        if watched := self._watched.get(layer):
            rows, heads = zip(*watched, strict=True)
            chosen = shares[:, :, list(heads)].permute(2, 0, 1, 3)
            self._heads.note(list(rows), begin, sequences, chosen)

    def shares(self) -> tuple[int, torch.Tensor]:
        """(number of the first token, float32 [sequences, layers, tokens, passages]): means over
        heads."""
        return self._means.held()

    def head_shares(self) -> tuple[int, torch.Tensor]:
        """(number of the first token, float32 [sequences, heads, tokens, passages]) of the heads
        that are watched, in the order they were given in."""
        return self._heads.held()

    def crop(self, count: int) -> None:
        """Keeps the first tokens."""
        self._means.crop(count)
        self._heads.crop(count)

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        self._means.select(sequences)
        self._heads.select(sequences)


class _Shares:
    """Shares by row (a layer or a head) of the last `most` tokens.

    Attributes:
        count: tokens so far.
    """

    def __init__(self, rows: int, columns: int, most: int):
        self._rows, self._columns, self._most = rows, columns, most
        self.clear()

    def clear(self) -> None:
        self.count = self._first = 0
        self._kept = torch.empty(0, self._rows, 0, self._columns)

    def skip_to(self, count: int) -> None:
        """Nothing is known of the first `count` tokens."""
        self.count = self._first = count

    def note(self, rows: list[int], begin: int, sequences: range, shares: torch.Tensor) -> None:
        """float32 [these rows, passages, some sequences, n] of tokens from `begin` on."""
        skip = max(shares.shape[3] - self._most, self._first - begin, 0)
        shares, begin = shares[..., skip:].cpu(), begin + skip
        end = begin + shares.shape[3]
        if sequences.stop > len(self._kept) or end - self._first > self._kept.shape[2]:
            self._grow(sequences.stop, end)
        at = slice(begin - self._first, end - self._first)
        part = self._kept[sequences.start : sequences.stop, :, at]
        part[:, rows] = shares.permute(2, 0, 3, 1)
        self.count = max(self.count, end)

    def _grow(self, sequences: int, end: int) -> None:
        """Memory for tokens up to `end`, of so many sequences; the oldest may go."""
        old, first = self._kept, max(self._first, end - self._most)
        room = min(max(2 * (end - first), 64), 2 * self._most)
        self._kept = torch.zeros(max(sequences, len(old)), self._rows, room, self._columns)
        held = max(self.count - first, 0)
        skip = first - self._first
        self._kept[: len(old), :, :held] = old[:, :, skip : skip + held]
        self._first = first

    def held(self) -> tuple[int, torch.Tensor]:
        held = self.count - self._first
        first = max(held - self._most, 0)
        return self._first + first, self._kept[:, :, first:held].clone()

    def crop(self, count: int) -> None:
        if count < self.count:
            if count <= self._first:
                self.clear()
                self._first = count
            self.count = count

    def select(self, sequences: Sequence[int]) -> None:
        if self._kept.shape[0]:
            self._kept = self._kept[list(sequences)]


def check_heads(heads: object, layers: int, heads_each: int) -> list[tuple[int, int]]:
    """(layer, head) pairs of a model. Raises InvalidInputError."""
    found = list[tuple[int, int]]()
    for pair in heads if isinstance(heads, Sequence) else [heads]:
        match pair:
            case [int() as layer, int() as head] if bool not in (type(layer), type(head)):
                pass
            case _:
                raise errors.InvalidInputError(
                    "heads of attention",
                    got=repr(heads)[:60],
                    expected="pairs (layer, head), from 0",
                )
        if not (0 <= layer < layers and 0 <= head < heads_each):
            raise errors.InvalidInputError(
                "heads of attention",
                got=f"head {head} of layer {layer}",
                expected=f"of {heads_each} heads of {layers} layers, from 0",
            )
        found.append((layer, head))
    return found
