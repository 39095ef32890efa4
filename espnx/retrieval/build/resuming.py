"""How a build goes on from an interrupted one without mixing the two: by what the corpus of this
call says.

The spool has a digest of every document as it was given: id, text, and whatever vectors it brought.
While the corpus streams by, each document is compared with the one in its place. All that come
before the first other one are in the spool already, proven equal, and need no encoding; from there
on the spool is cut off and written anew. A corpus that ends early cuts it off too. So the store
that is published is always that of this corpus, whatever the interrupted build had seen, and a
corpus need only be iterated once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from .documents import Document, digest


def confirm(
    stream: Iterator[list[Document]], known: Iterator[bytes], progress: Callable[[int], None]
) -> tuple[int, list[Document]]:
    """(how many of the spooled documents the corpus begins with, the batch's documents from the
    first other one on).

    `known`: digests of the spooled ones. What comes after the documents returned is left in
    `stream`; none are returned where it has ended.
    """
    same = 0
    for batch in stream:
        for i, document in enumerate(batch):
            if digest(document) != next(known, None):
                return same, batch[i:]
            same += 1
        progress(same)
    return same, []
