"""The text in a cache: the tokens that it holds, as far as they are known, and which of them are
padding, as the model's masks say."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ...kv.visibility import Visibility


class Text:
    """The tokens of one batch of sequences, which have as many each.

    Attributes:
        tokens: int64 [sequences, n], or None where the model was fed no ids. Those of a pass that
            failed are among them until the next one begins.
        hidden: which of them are padding: bool [sequences, n]; None: none is.
    """

    def __init__(self) -> None:
        self.tokens: torch.Tensor | None = None
        self.hidden: torch.Tensor | None = None
        # of the pass under way: its mask, up to which position, and what that means
        self._seen: tuple[torch.Tensor | None, int, Visibility] | None = None

    def visibility(self, mask: torch.Tensor | None, n_sequences: int, positions: int) -> Visibility:
        """Which positions the new tokens may attend to, by the padding mask [sequences, positions]
        (None: all), which says what is hidden from here on."""
        known = self._seen
        # the first layer of the pass; all others have the same
        if known is None or known[0] is not mask or known[1] != positions:
            known = self._seen = (mask, positions, Visibility.of(mask, n_sequences, positions))
            self.hidden = known[2].hidden
        return known[2]

    def hide(self, hidden: torch.Tensor | None) -> None:
        """Which tokens are padding, bool [sequences, n] or None, whatever the last pass said."""
        self.hidden, self._seen = hidden, None

    def extend(self, ids: torch.Tensor | None, held: int) -> None:
        """New tokens [sequences, n] come after the first `held`; None: not known."""
        if ids is None:
            self.tokens = None
        elif held == 0 or self.tokens is None:
            self.tokens = ids.detach().cpu().clone() if held == 0 else None
        else:
            # one sequence stands for those that begin alike, until they differ
            before = self.tokens[:, :held]
            if len(before) < len(ids):
                before = before.repeat_interleave(len(ids) // len(before), dim=0)
            self.tokens = torch.cat([before, ids.detach().cpu()], dim=1)

    def begins(self, ids: torch.Tensor, held: int) -> bool | None:
        """Whether a text [sequences, n] begins with the `held` tokens, padding aside; each sequence
        of it may have become several here (beams, samples). None: the tokens are not known, or are
        another batch's."""
        if self.tokens is None or not len(ids) or len(self.tokens) % len(ids):
            return None
        given = ids[:, :held].cpu().repeat_interleave(len(self.tokens) // len(ids), dim=0)
        same = given == self.tokens[:, : given.shape[1]]
        return bool((same if self.hidden is None else same | self.hidden[:, : same.shape[1]]).all())

    def common(self, ids: torch.Tensor, attention_mask: torch.Tensor | None, held: int) -> int:
        """How many of the `held` tokens a text [sequences, n] of as many sequences begins with; its
        last token does not count."""
        if not held or self.tokens is None:
            return 0
        n = min(held, ids.shape[1] - 1)
        same = (self.tokens[:, :n] == ids[:, :n]).all(dim=0)
        hidden = (
            torch.zeros_like(ids, dtype=torch.bool)
            if attention_mask is None
            else ~attention_mask.bool().cpu()
        )
        before = torch.zeros_like(hidden[:, :n]) if self.hidden is None else self.hidden[:, :n]
        same &= (hidden[:, :n] == before).all(dim=0)
        return int(same.to(torch.int64).cumprod(0).sum())

    def accept(self, begin: int, ends: Sequence[int], kept: Sequence[int]) -> None:
        """Keeps of each sequence's tokens from `begin` on the first `kept`, behind its `ends`."""
        self._seen = None
        for rows in (self.tokens, self.hidden):
            if rows is not None:
                for sequence, (end, n) in enumerate(zip(ends, kept, strict=True)):
                    rows[sequence, end : end + n] = rows[sequence, begin : begin + n].clone()

    def twin(self) -> Text:
        """The same once more."""
        other = Text()
        other.tokens, other.hidden = (
            None if rows is None else rows.clone() for rows in (self.tokens, self.hidden)
        )
        return other

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        self._seen = None
        if self.hidden is not None:
            self.hidden = self.hidden[sequences]
        if self.tokens is not None:
            self.tokens = self.tokens[sequences]

    def clear(self) -> None:
        """No tokens are left."""
        self.tokens = self.hidden = self._seen = None

    def tensors(self, held: int) -> dict[str, torch.Tensor]:
        """The tensors that a kept cache saves of the first `held` tokens."""
        found = {} if self.tokens is None or not held else {"tokens": self.tokens[:, :held]}
        if self.hidden is not None:
            found["hidden"] = self.hidden[:, :held].to(torch.uint8)
        return found

    def restore(self, tensors: dict[str, torch.Tensor]) -> None:
        """Takes the tensors that a kept cache saved."""
        self.tokens = tensors.get("tokens")
        self.hidden = tensors["hidden"].bool() if "hidden" in tensors else None
