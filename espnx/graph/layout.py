"""Pages of nodes: how large they are, and where things lie in them. The written specification is
docs/graph-format.md."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from .. import errors
from ..ops.distances import VECTOR_FORMATS, vector_bytes

PAGE_UNIT_BYTES = 4096
PAGE_BYTES_MAX = 64 * 1024
HEADER = np.dtype([("crc32c", "<u4"), ("page", "<u4"), ("salt", "<u8")])
MAX_DEGREE_MAX = 1024
#: What nodes may hold of a vector: values of a format of the distance kernels, or a code of product
#: quantisation in their place.
NODE_FORMATS = (*VECTOR_FORMATS, "pq")
#: Where codes may lie: beside each node its neighbours', in pages of their own, in memory.
CODES_IN = ("inline", "paged", "memory")
#: Of pages of codes, where codes are paged.
CODE_PAGE_BYTES = 4096
#: Behind a vector: its row, and how many neighbours there are.
NODE_FIXED_BYTES = 8
# A code of fewer bytes than this says too little of where a neighbour lies: larger pages are taken
# then. Of what is longer, bytes that are read decide: 47 bytes for 784 pixels leave 4 KiB enough,
# and walks read few more pages of 4 than of 8 with 56. 35 bytes for 768 dimensions do so where
# rotation helps, and where it does not, walks with 97 read less.
_CODE_BYTES_MIN, _DIMS_PER_CODE_BYTE_MAX = 16, 18
_CODE_BYTES_IN_MEMORY = 64
# Codes by so much shorter say nearly as much (a tenth more reads, measured), and smaller pages are
# a multiple smaller.
_SHORTER_MOST, _SMALLER = 4, 2 / 3


@dataclass(frozen=True)
class PageLayout:
    """The places of nodes in pages.

    Attributes:
        n: rows of the input, of each of which there is a node; where there is one graph, nodes are
            numbered by it page by page.
        dim: values of a vector.
        format: of the vectors, of `NODE_FORMATS`.
        max_degree: neighbours that a node has room for, R.
        code_bytes: of a code of product quantisation.
        inline_pq: neighbours whose codes lie in the node: the first so many; 0 to max_degree.
        paged_codes: whether the others' lie in pages of a file of their own, which searches read;
            else they stay in memory.
        page_bytes: a multiple of 4096.
        disk_pq_bytes: of the code that a node holds in place of its vector, where the format is
            ``pq``; else 0.
    """

    n: int
    dim: int
    format: str
    max_degree: int
    code_bytes: int
    inline_pq: int
    paged_codes: bool
    page_bytes: int
    disk_pq_bytes: int = 0

    @property
    def vector_bytes(self) -> int:
        """Bytes of what a node holds of its vector."""
        return held_bytes(self.format, self.dim, self.disk_pq_bytes)

    @property
    def row_format(self) -> str:
        """The format of vectors outside of nodes, a key of `espnx.ops.distances.VECTOR_FORMATS`:
        float32 in place of codes, and of bfloat16, which NumPy does not have."""
        return "fp32" if self.format in ("bf16", "pq") else self.format

    @property
    def row_dtype(self) -> np.dtype:
        """The same."""
        return np.dtype(str(VECTOR_FORMATS[self.row_format]).removeprefix("torch."))

    @property
    def codes_in(self) -> str:
        """``inline``, all of them; or where those are that are not: ``paged`` or ``memory``."""
        return (
            "inline"
            if self.inline_pq == self.max_degree
            else "paged"
            if self.paged_codes
            else "memory"
        )

    @property
    def codes_per_page(self) -> int:
        """Codes that a page holds where they are paged."""
        return (CODE_PAGE_BYTES - HEADER.itemsize) // self.code_bytes

    @property
    def codes_bytes(self) -> int:
        """Bytes of the file of codes; 0: there is none."""
        if self.codes_in == "inline":
            return 0
        return (
            -(-self.n // self.codes_per_page) * CODE_PAGE_BYTES
            if self.paged_codes
            else self.n * self.code_bytes
        )

    @property
    def node_bytes(self) -> int:
        """Bytes of one node."""
        return node_bytes(self.vector_bytes, self.max_degree, self.inline_pq * self.code_bytes)

    @property
    def nodes_per_page(self) -> int:
        """All pages but the last hold so many."""
        return (self.page_bytes - HEADER.itemsize) // self.node_bytes

    @property
    def n_pages(self) -> int:
        return -(-self.n // self.nodes_per_page)

    @property
    def size_bytes(self) -> int:
        """Bytes of the file of pages."""
        return self.n_pages * self.page_bytes

    @property
    def node_dtype(self) -> np.dtype:
        """The layout of a node, without holes: ``vector`` (as `VectorCoding.encode` makes it),
        ``row``, ``n_neighbours``, ``row_high``, ``neighbours``; ``codes`` where they are inline."""
        whole: dict[str, np.dtype] = {"pq": np.dtype(np.uint8), "bf16": np.dtype(np.uint16)}
        held = whole.get(self.format, self.row_dtype).newbyteorder("<")
        fields: list[tuple] = [
            ("vector", held, (self.vector_bytes // held.itemsize,)),
            ("row", "<u4"),
            ("n_neighbours", "<u2"),
            ("row_high", "<u2"),
            ("neighbours", "<u4", (self.max_degree,)),
        ]
        if self.inline_pq:
            fields.append(("codes", "u1", (self.inline_pq, self.code_bytes)))
        return np.dtype(fields)


def rows_of(nodes: np.ndarray) -> np.ndarray:
    """int64: the rows that nodes are of, `PageLayout.node_dtype`, of whatever shape."""
    found: np.ndarray = nodes["row"].astype(np.int64)
    if nodes["row_high"].any():
        found |= nodes["row_high"].astype(np.int64) << 32
    return found


def code_salt(salt: int) -> int:
    """The salt of pages of codes, so that no page of nodes is taken for one."""
    return salt ^ (2**64 - 1)


def held_bytes(format: str, dim: int, disk_pq_bytes: int) -> int:  # noqa: A002
    """Bytes of what a node holds of its vector."""
    return disk_pq_bytes if format == "pq" else vector_bytes(format, dim)


def node_bytes(held: int, max_degree: int, codes_bytes: int) -> int:
    """Bytes of a node in which a vector and codes take so many bytes."""
    return held + NODE_FIXED_BYTES + 4 * max_degree + codes_bytes


def choose_layout(
    n: int,
    dim: int,
    format: str,  # noqa: A002
    *,
    max_degree: int,
    codes: str,
    code_bytes: int | None,
    inline_pq: int | None = None,
    disk_pq_bytes: int | None = None,
) -> PageLayout:
    """The smallest pages that hold a node, and codes that fill them: of the bytes that a read
    brings none is left unused, and nothing makes a walk shorter than better codes.

    Args:
        codes: ``inline``, ``paged`` or ``memory``.
        code_bytes: None: chosen here, at most a byte a dimension.
        inline_pq: where codes are paged or in memory: neighbours whose codes lie in the node all
            the same; -1: as many as the smallest page for one node holds.
        disk_pq_bytes: where the format is ``pq``.

    Raises InvalidInputError where a node would be larger than 64 KiB, or a code than a page of
    codes.
    """
    held = held_bytes(format, dim, disk_pq_bytes or 0)
    is_chosen_here = code_bytes is None
    if code_bytes is None:
        code_bytes = (
            min(dim, _CODE_BYTES_IN_MEMORY)
            if codes != "inline"
            else _filling(dim, held, max_degree)
        )
    count = max_degree if codes == "inline" else inline_pq or 0
    bare = node_bytes(held, max_degree, 0)
    if count < 0:
        count = min(max_degree, (_pages_for(bare) - HEADER.itemsize - bare) // code_bytes)
    node = bare + count * code_bytes
    page_bytes = _pages_for(node)
    if page_bytes > PAGE_BYTES_MAX:
        raise errors.InvalidInputError(
            f"a node of {dim} dimensions as {format}, max_degree {max_degree}",
            got=f"{node} bytes",
            expected=f"at most {PAGE_BYTES_MAX - HEADER.itemsize}",
            fix="lower max_degree or pq_bytes, or keep codes in memory",
        )
    is_paged = codes == "paged" and count < max_degree
    if is_paged and code_bytes > CODE_PAGE_BYTES - HEADER.itemsize:
        raise errors.InvalidInputError(
            "pq_bytes of paged codes",
            got=code_bytes,
            expected=f"at most {CODE_PAGE_BYTES - HEADER.itemsize}, what a page of codes holds",
        )
    layout = PageLayout(
        n, dim, format, max_degree, code_bytes, count, is_paged, page_bytes, disk_pq_bytes or 0
    )
    return (
        with_codes(layout, found[0])
        if is_chosen_here and (found := shorter_codes(layout))
        else layout
    )


def with_codes(layout: PageLayout, code_bytes: int) -> PageLayout:
    """The same with codes of so many bytes."""
    node = node_bytes(layout.vector_bytes, layout.max_degree, layout.inline_pq * code_bytes)
    return replace(layout, code_bytes=code_bytes, page_bytes=_pages_for(node))


def shorter_codes(layout: PageLayout) -> tuple[int, float] | None:
    """Codes at most a quarter shorter with which nodes would take a third less of a page or less
    still.

    Returns:
        Bytes of such a code, the longest; and what a node would take then, as a share of what it
        takes. None: there are none.
    """
    if not layout.inline_pq:
        return None
    now = layout.page_bytes / layout.nodes_per_page
    for code_bytes in range(
        layout.code_bytes - 1, layout.code_bytes - layout.code_bytes // _SHORTER_MOST - 1, -1
    ):
        shorter = with_codes(layout, code_bytes)
        if (share := shorter.page_bytes / shorter.nodes_per_page / now) <= _SMALLER:
            return code_bytes, share
    return None


def shorter_codes_hint(layout: PageLayout) -> str | None:
    """The same, for people."""
    found = shorter_codes(layout)
    if found is None:
        return None
    shorter = f"pq_bytes={found[0]} instead of {layout.code_bytes}"
    return (
        f"{shorter} would make the folder {found[1]:.2f}x as large, and searches read about that "
        "share"
    )


def _filling(dim: int, held: int, max_degree: int) -> int:
    """Bytes of inline codes that fill the smallest page in which they are any good."""
    least = min(dim, max(_CODE_BYTES_MIN, dim // _DIMS_PER_CODE_BYTE_MAX))
    page_bytes = _pages_for(node_bytes(held, max_degree, least * max_degree))
    room = page_bytes - HEADER.itemsize - node_bytes(held, max_degree, 0)
    return max(least, min(dim, room // max_degree))


def _pages_for(node: int) -> int:
    return -(-(node + HEADER.itemsize) // PAGE_UNIT_BYTES) * PAGE_UNIT_BYTES
