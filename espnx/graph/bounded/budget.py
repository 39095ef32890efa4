"""How much memory a build takes, and how large its parts may be."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from ... import errors
from ...ops.distances import vector_bytes
from ...sizes import format_size
from ..codes.codebook import rotation_fit_bytes
from ..layout import PageLayout
from ..options import GraphOptions

# Blocks of vectors, pages, codes and searches that are under way, whatever the number of vectors.
_BUFFERS_BYTES = 48 << 20
# Of each vector of the input: its node, its row, whether it is reached and leads on, and a copy
# while they are reordered.
_BYTES_PER_VECTOR = 20
# k-means makes parts of unequal size, and what has no room in its nearest part goes to the next.
_ROOM = 1.25
_SLACK = 1.3  # csrc/graph/build/vamana.cpp has the same one
#: Parts that each vector belongs to, where there is more than one.
OVERLAP = 2


@dataclass(frozen=True)
class Budget:
    """Attributes: n_parts; part_rows: of a part at most; sample_rows: for codebook and centres;
    cache_bytes: for codes, while pages are written."""

    n_parts: int
    part_rows: int
    sample_rows: int
    cache_bytes: int


def plan_parts(
    layout: PageLayout, options: GraphOptions, memory_bytes: int, used_bytes: int
) -> Budget:
    """The fewest parts that keep to a limit.

    Args:
        memory_bytes: that the process may hold in all. used_bytes: that it holds now.

    Raises InvalidInputError where the limit is too low for any.
    """
    n = max(1, layout.n)
    needed = used_bytes + least_bytes(layout, options)
    if memory_bytes < needed:
        raise errors.InvalidInputError(
            "memory for a build",
            got=format_size(memory_bytes),
            expected=(
                f"at least {format_size(needed)}, of which this process has "
                f"{format_size(used_bytes)} already"
            ),
            fix=f"use_opq=False takes {format_size(turned)} less"
            if (turned := fit_bytes(layout, options))
            else None,
        )
    free_bytes = (
        memory_bytes
        - used_bytes
        - _BUFFERS_BYTES
        - fit_bytes(layout, options)
        - _BYTES_PER_VECTOR * n
    )
    rows = free_bytes // member_bytes(layout, options)
    n_parts = 1 if rows >= n else math.ceil(OVERLAP * n * _ROOM / rows)
    sample = min(n, 65_536, max(1, free_bytes // (16 * layout.dim)))
    return Budget(n_parts, n if n_parts == 1 else rows, max(sample, n_parts), free_bytes // 2)


def least_bytes(layout: PageLayout, options: GraphOptions) -> int:
    """The smallest limit of a build in parts, beside what the process has already."""
    n = max(1, layout.n)
    fixed = _BUFFERS_BYTES + fit_bytes(layout, options)
    return (
        fixed
        + _BYTES_PER_VECTOR * n
        + min(n, 4 * options.max_degree) * member_bytes(layout, options)
    )


def fit_bytes(layout: PageLayout, options: GraphOptions) -> int:
    """Bytes that looking for the rotation of codes takes, whatever the number of vectors."""
    code_bytes = min(layout.code_bytes, layout.disk_pq_bytes or layout.code_bytes)
    return rotation_fit_bytes(layout.n, layout.dim, code_bytes, use_opq=options.use_opq)


def member_bytes(layout: PageLayout, options: GraphOptions) -> int:
    """Bytes that a vector of a part takes, while the part's graph is built, packed and written."""
    stored = vector_bytes(layout.row_format, layout.dim)
    measured = 4 * (layout.dim + 1) if options.metric == "ip" else 0
    edges = 4 * max(layout.max_degree + 1, int(_SLACK * layout.max_degree))
    copies = 3 * 4 * layout.max_degree + (edges if layout.nodes_per_page > 1 else 0)
    return 2 * stored + measured + edges + copies + 4 * options.threads + 64


def resident_bytes() -> int:
    """Memory that this process holds."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * 4096


def available_bytes() -> int | None:
    """Memory that the system can give without swapping; None where nothing says so."""
    try:
        lines = dict(line.split(":") for line in Path("/proc/meminfo").read_text().splitlines())
        return int(lines["MemAvailable"].split()[0]) * 1024
    except (OSError, ValueError, KeyError):
        return None
