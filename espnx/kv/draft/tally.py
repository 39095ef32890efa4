"""What drafts brought: which kind of draft a cache has, how many of its tokens the passes
accepted, and what drafts and passes took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import errors

#: Ways to draft.
KINDS = ("lookup",)


@dataclass
class Tally:
    """Of a cache, since it was opened.

    Attributes:
        kind: of draft.
        passes: verifying passes over the stored rows.
        turns: of the sequences in them: a pass over 8 sequences is 8.
        tokens: that these passes brought, of all sequences.
        offered, accepted: how many times a token was proposed at a position behind the text, and
            how many times it and all before it were accepted.
        draft_s, pass_s: seconds that drafts took, and passes with what they decide.
        bytes_asked: of stored rows, in the passes.
        draft_bytes_asked: of stored rows, while drafts were made.
        gamma: how many tokens are proposed for each sequence of a pass at most; None: no pass yet.
        why: it is so many.
    """

    kind: str
    passes: int = 0
    turns: int = 0
    tokens: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    pass_s: float = 0.0
    bytes_asked: int = 0
    draft_bytes_asked: int = 0
    gamma: int | None = None
    why: str = ""

    def __post_init__(self) -> None:
        """Raises InvalidInputError for a draft that there is not."""
        if self.kind not in KINDS:
            raise errors.InvalidInputError(
                "draft of a cache", got=repr(self.kind), expected=" or ".join(map(repr, KINDS))
            )

    def add(self, drafted: Sequence[int], kept: Sequence[int]) -> None:
        """A pass: how many tokens were proposed for each sequence, and how many it got."""
        self.passes, self.turns = self.passes + 1, self.turns + len(kept)
        self.tokens += sum(kept)
        for n_drafted, n_kept in zip(drafted, kept, strict=True):
            while len(self.offered) < n_drafted:
                self.offered.append(0)
                self.accepted.append(0)
            for position in range(n_drafted):
                self.offered[position] += 1
                self.accepted[position] += position < n_kept - 1

    def as_dict(self) -> dict[str, Any]:
        """For `KVCache.stats`."""
        return {
            "draft": self.kind,
            "passes": self.passes,
            "tokens": self.tokens,
            "tokens_a_pass": self.tokens / self.turns if self.turns else None,
            "accepted_by_position": [
                accepted / offered
                for accepted, offered in zip(self.accepted, self.offered, strict=True)
            ],
            "bytes_a_token": self.bytes_asked / self.tokens if self.tokens else None,
            "draft_bytes_asked": self.draft_bytes_asked,
            "draft_s": self.draft_s,
            "pass_s": self.pass_s,
            "gamma": self.gamma,
            "why": self.why,
        }
