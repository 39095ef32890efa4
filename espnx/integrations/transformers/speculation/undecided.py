"""Tokens of a cache that may be rejected: what it knows of them beside their rows (ids, padding,
rotations, the time of passes) follows what `Proposal` keeps of these."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from .... import errors
from ....kv.proposal import Proposal
from ..forward.state import PassState


class Undecided:
    """The last tokens of a cache's batch, from `SsdCache.propose` to `settle`.

    Args:
        passes: of the cache.
    """

    def __init__(self, passes: PassState):
        self._passes = passes

    @property
    def rows(self) -> Proposal:
        """Their rows. Raises StateError where no tokens may be rejected, as after a cache was
        reset."""
        proposal = self._passes.store.proposal
        if proposal is None:
            raise errors.StateError(
                "tokens that may be rejected", got="none", fix="leave the cache alone meanwhile"
            )
        return proposal

    def accept(self, n_new: int, kept: Sequence[int]) -> None:
        """Keeps the first `kept` of the last pass's `n_new` tokens of each sequence, which move to
        its end."""
        passes, rows = self._passes, self.rows
        begin = passes.length() - n_new
        passes.text.accept(begin, rows.ends, kept)
        passes.x.rotations.accept(begin, rows.ends, kept)
        rows.accept(n_new, kept)
        passes.times.accept(sum(kept))

    @contextmanager
    def drafting(self) -> Iterator[None]:
        """Passes inside are drafts (`Proposal.drafting`)."""
        passes, hidden = self._passes, self._passes.text.hidden
        with self.rows.drafting():
            try:
                yield
            finally:
                passes.abort()
                passes.text.hide(hidden)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """What becomes of the batch inside is forgotten at the end."""
        passes = self._passes
        before = passes.store.set_aside(), passes.text.twin(), passes.x.rotations.twin()
        try:
            yield
        finally:
            passes.abort()
            passes.store.bring_back(before[0])
            passes.text, passes.x.rotations = before[1:]

    def settle(self) -> None:
        """All tokens stand from here on; those that not all sequences have are forgotten."""
        self._passes.abort()
        self._passes.store.settle()
