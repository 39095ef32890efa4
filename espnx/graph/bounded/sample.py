"""The vectors of a build's input as they are stored, block by block, and a sample of them. Builds
that hold all of them in memory need neither."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from ... import errors
from ..layout import PageLayout
from ..options import GraphOptions, stored_rows
from ..vectors import Vectors


def stored_blocks(
    source: Vectors, layout: PageLayout, metric: str, progress: Callable[[int], None]
) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first, vectors as they are stored) block by block.

    Raises FormatError where they are not as many as the input said; InvalidInputError as
    `stored_rows`.
    """
    done = 0
    for block in source.blocks():
        if done + len(block) > layout.n:
            raise errors.FormatError(
                source.name, got="more vectors than it said", expected=layout.n
            )
        rows = stored_rows(block, done, metric, layout.format)
        yield done, rows.astype(layout.row_dtype, copy=False)
        done += len(block)
        progress(done)
    if done != layout.n:
        raise errors.FormatError(source.name, got=f"{done} vectors", expected=layout.n)


def draw_sample(
    blocks: Iterable[tuple[int, np.ndarray]], layout: PageLayout, options: GraphOptions, count: int
) -> tuple[np.ndarray, float]:
    """Reads all `stored_blocks`.

    Returns:
        float32 [count, dim]: vectors drawn by the options' seed, in their order; and the largest
        squared length of all, 0 unless the metric is ``ip``.
    """
    chosen = np.sort(
        np.random.default_rng(options.seed).choice(layout.n, count, replace=False, shuffle=False)
    )
    sample, longest = np.empty((count, layout.dim), np.float32), 0.0
    for first, rows in blocks:
        begin, end = np.searchsorted(chosen, [first, first + len(rows)])
        sample[begin:end] = rows[chosen[begin:end] - first]
        if options.metric == "ip" and len(rows):
            longest = max(longest, float(np.square(rows.astype(np.float32)).sum(axis=1).max()))
    return sample, longest
