"""Walks that are under way in the threads of a graph."""

from __future__ import annotations

from typing import Any

import numpy as np

from ... import errors
from ..format import GraphFacts
from ..neighbours import Neighbours, shown


class GraphSearch:
    """A search under way in the threads of a graph; see `GraphIndex.start`. One thread at a time
    may ask it, and any may call it off meanwhile. Ends when nobody holds it."""

    def __init__(self, facts: GraphFacts, k: int, search: Any, **shared: Any):
        self._facts, self._k, self._search, self._shared = facts, k, search, shared
        self._failure: errors.EspnxError | None = None

    def partial(self, pages: int) -> tuple[np.ndarray, np.ndarray]:
        """What each walk has found after so many pages, or at its end if it comes sooner; walks go
        on meanwhile.

        Returns:
            ids and distances as `Neighbours` has them.

        Raises as `GraphIndex.search`.
        """
        if isinstance(self._search, Neighbours):
            return self._search.ids, self._search.distances
        self._check_wanted()
        rows, far = self._search.partial(pages)
        return rows.numpy().reshape(-1, self._k), shown(
            self._facts.metric, far.numpy().reshape(-1, self._k)
        )

    def finish(self) -> Neighbours:
        """Waits for the end of all walks. Raises as `GraphIndex.search`, and the same again when it
        is called again."""
        if isinstance(self._search, Neighbours):
            return self._search
        self._check_wanted()
        search = self._search
        try:
            rows, far, pages, code_pages, measured, estimated, seconds = search.finish()
        except errors.EspnxError as error:
            self._failure = error
            raise
        self._search = found = Neighbours(
            rows.numpy().reshape(-1, self._k),
            shown(self._facts.metric, far.numpy().reshape(-1, self._k)),
            pages.numpy(),
            code_pages.numpy(),
            measured.numpy(),
            estimated.numpy(),
            seconds.numpy(),
            self._facts.layout.page_bytes,
            **self._shared,
        )
        return found

    def _check_wanted(self) -> None:
        if self._failure is not None:
            raise self._failure
        if self._search is None:
            raise errors.TransferCancelledError("the walks are not needed")

    def cancel(self) -> None:
        """Ends the walks, unless they have ended: whoever waits, or asks later, raises
        TransferCancelledError."""
        search = self._search
        if search is not None and not isinstance(search, Neighbours):
            search.cancel()
            self._search = None
