"""What a search tells its caller while it is under way, so that what is done with the documents may
begin before they are ranked. A file of its own: callers and the search share it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ...storage.documents.ids import DocumentId


@dataclass(frozen=True)
class KnownCandidates:
    """The best that a search knows of a query after one of its steps.

    Attributes:
        query: its number in the call, from 0.
        share: of the first stage's work that is done, above 0, at most 1.
        is_ranked: these are the hits of the result, in their order, and nothing else is told of
            this query. Before that the order is the first stage's.
        documents: (id, text) of at most k documents, the best first.
    """

    query: int
    share: float
    is_ranked: bool
    documents: tuple[tuple[DocumentId, str], ...]


#: Called in the thread that searches, while the search waits for it: it should note what it is told
#: and return. It must not call the index. What it raises ends the search.
OnCandidates = Callable[[KnownCandidates], object]
