"""What drafts brought: which kind of draft a cache has, how many of its tokens the passes
accepted, and what drafts and passes took."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from ... import errors
from .pace import Pace
from .reach import Reach
from .sources import LOOKUP, Sources

#: All rows in four bits.
PACKED = "4bit"
#: Ways to draft.
KINDS = ("lookup", "pages", PACKED)
#: And what one is called that a smaller model makes.
ASSISTANT = "assistant"
#: Of K and V, that stays in memory for drafts unless one says how much.
_SHARE = 1 / 16


@dataclass
class Tally:
    """What was drafted for a cache since it was opened.

    Attributes:
        kind: of draft.
        share: of K and V that stays in memory for drafts; None: nothing does.
        ahead_bytes: that are read ahead for the pass while drafts are made, at most, of all devices
            together; None: as `Reach` has it.
        passes: verifying passes over the stored rows.
        turns: of the sequences in them: a pass over 8 sequences is 8.
        tokens: that these passes brought, of all sequences.
        offered, accepted: how many times a token was proposed at a position behind the text, and
            how many times it and all before it were accepted.
        draft_s, pass_s: seconds that drafts took, and passes with what they decide.
        bytes_asked: of stored rows, in the passes.
        draft_bytes_asked: of stored rows, while drafts were made.
        memory_bytes: that rows for drafts took at most.
        lost: sequences, of a batch, for whose rows for drafts there was no memory, at most.
        pace: how many tokens are proposed for each sequence of a pass.
        sources: who proposed them.
        reach: how far reads go ahead while drafts are made.
    """

    kind: str
    share: float | None = None
    ahead_bytes: int | None = None
    passes: int = 0
    turns: int = 0
    tokens: int = 0
    offered: list[int] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    draft_s: float = 0.0
    pass_s: float = 0.0
    bytes_asked: int = 0
    draft_bytes_asked: int = 0
    memory_bytes: int = 0
    lost: int = 0
    pace: Pace = field(init=False)
    sources: Sources = field(default_factory=Sources)
    reach: Reach = field(init=False)

    def __post_init__(self) -> None:
        """Raises InvalidInputError for an unknown draft, a share that is none, and reads ahead of a
        draft that takes no time."""
        if self.kind not in (*KINDS, ASSISTANT):
            raise errors.InvalidInputError(
                "draft of a cache", got=repr(self.kind), expected=" or ".join(map(repr, KINDS))
            )
        if self.kind == LOOKUP and self.ahead_bytes is not None:
            raise errors.InvalidInputError(
                f"draft_read_ahead_bytes of draft={LOOKUP!r}",
                got=self.ahead_bytes,
                expected="None: it takes no time in which anything could be read",
            )
        self.pace, self.reach = Pace(self.kind), Reach(self.ahead_bytes)
        if self.kind == "pages" and self.share is None:
            self.share = _SHARE
        if self.share is not None and (
            self.kind != "pages"
            or not isinstance(self.share, (int, float))
            or not 0 < self.share <= 1
        ):
            raise errors.InvalidInputError(
                f"draft_memory of draft={self.kind!r}",
                got=repr(self.share),
                expected="a part of K and V, above 0 and at most 1"
                if self.kind == "pages"
                else "None: how much it takes follows from the rows"
                if self.kind == "4bit"
                else "None: it takes no memory",
            )

    def add(
        self,
        drafted: Sequence[int],
        kept: Sequence[int],
        draft_s: float,
        pass_s: float,
        sources: Sequence[str],
        looked: Sequence[int | None] | None = None,
        *,
        is_slow: bool = False,
    ) -> None:
        """A pass: how many tokens were proposed for each sequence and by whom, how many it got, the
        seconds of the drafts and of the pass, and how many it would have got by lookup.
        `is_slow`: it did more than those after it."""
        self.pace.note(drafted, kept, pass_s, is_slow=is_slow)
        self.sources.note(sources, drafted, kept, draft_s, pass_s, looked)
        self.draft_s, self.pass_s = self.draft_s + draft_s, self.pass_s + pass_s
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
        """Its part of `KVCache.stats`."""
        return {
            "draft": self.kind,
            "passes": self.passes,
            "turns": self.turns,
            "tokens": self.tokens,
            "tokens_a_pass": self.tokens / self.turns if self.turns else None,
            "accepted_by_position": [
                accepted / offered
                for accepted, offered in zip(self.accepted, self.offered, strict=True)
            ],
            "bytes_a_token": self.bytes_asked / self.tokens if self.tokens else None,
            "draft_bytes_asked": self.draft_bytes_asked,
            "sources": self.sources.as_dict(),
            "draft_memory_bytes": self.memory_bytes,
            "read_ahead_bytes": self.reach.read_bytes,
            "read_ahead_limit_bytes": self.reach.limit_bytes,
            "sequences_without_memory": self.lost,
            "draft_s": self.draft_s,
            "pass_s": self.pass_s,
            "gamma": self.pace.gamma,
            "why": self.pace.why,
            "decisions": list(self.pace.decisions),
            "predicted_s": self.pace.foretold_s,
            "measured_s": (self.draft_s + self.pass_s) * self.turns / self.passes / self.tokens
            if self.tokens
            else None,
        }
