"""`PassagePrefetch`: reads of passages that begin while it is still being found out which of them a
prompt will have."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Self

from ....kv.passages.early import EarlyReads
from .prompts import Ids, passages_of

#: Starts the reads of these passages.
Start = Callable[[EarlyReads, Sequence[str | Ids]], bool]


class PassagePrefetch:
    """What `PassageKV.prefetch` returns, for `PassageKV.compose`. A context manager: what no prompt
    took is given up at its end. Safe to use from several threads.

    Args:
        early: the reads.
        start: begins more of them.

    Attributes:
        early: as given; the prompt that is composed closes it.
    """

    def __init__(self, early: EarlyReads, start: Start):
        self.early, self._start = early, start
        self._is_taken = False
        self._end = weakref.finalize(self, early.close)

    def want(self, passages: Sequence[str | Ids]) -> bool:
        """The passages that are likely now, the likeliest first, in place of those before: reads
        that are under way for others end. Nothing is computed: passages that are not in the library
        are left out.

        Returns:
            False: nothing was done, because the library is at work on another prompt.

        Raises InvalidInputError: these are no passages.
        """
        return self._start(self.early, passages_of(passages))

    def take(self) -> EarlyReads:
        """The reads, which are the caller's to close from here on."""
        self._is_taken = True
        self._end.detach()
        return self.early

    @property
    def started_bytes(self) -> int:
        """Bytes of all reads so far."""
        return self.early.started_bytes

    @property
    def wasted_bytes(self) -> int:
        """Bytes of them that no prompt uses, those of cancelled reads as if they had been read."""
        return self.early.wasted_bytes

    def cancel(self) -> None:
        """Ends the reads, unless a prompt has taken them. May be called again."""
        if not self._is_taken:
            self.early.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.cancel()
