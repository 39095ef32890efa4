"""A graph as the native searcher sees it; a file of its own, since its fields are those of C++."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from ..ops._native import load_extension
from .codes.codebook import Codebook
from .format import CODES, NODES, GraphFacts

if TYPE_CHECKING:
    from .. import _C


def native_view(facts: GraphFacts, codes: np.ndarray | None) -> _C.GraphView:
    """A graph as the native searcher sees it. `codes`: uint8 [n, code_bytes] of all nodes, where
    they are in memory."""
    layout = facts.layout
    native = load_extension()
    if codes is not None and facts.has_gaps:  # by row, as the searcher counts them: pages untouched
        whole = np.zeros((facts.n_rows, layout.code_bytes), np.uint8)
        whole[: layout.n] = codes
        codes = whole
    paged = CODES if layout.paged_codes else NODES  # or none are read
    return native.GraphView(
        pages=[(facts.pinned(each.path), each.offset_bytes) for each in facts.page_files],
        code_pages=(facts.path(paged), facts.begin_bytes(paged) if paged in facts.regions else 0),
        layout=native.PageLayout(
            n=facts.n_rows,
            dim=layout.dim,
            format="fp32" if layout.format == "pq" else layout.format,
            degree=layout.max_degree,
            code_bytes=layout.code_bytes,
            inline_codes=layout.inline_pq,
            paged_codes=layout.codes_in == "paged",
            disk_pq_bytes=0 if facts.disk_codebook is None else facts.disk_codebook.code_bytes,
            page_bytes=layout.page_bytes,
            nodes_per_page=layout.nodes_per_page,
        ),
        metric="ip" if facts.metric == "ip" else "l2",
        book=native_codebook(facts.codebook),
        disk_book=None if facts.disk_codebook is None else native_codebook(facts.disk_codebook),
        codes=None if codes is None else torch.from_numpy(codes.copy()),
        part_nodes=torch.from_numpy(facts.parts.nodes),
        part_files=torch.from_numpy(facts.parts.files),
        part_pages=torch.from_numpy(facts.parts.file_pages),
        part_salts=torch.from_numpy(facts.parts.salts.view(np.int64)),
        copies=facts.copies,
        entries=torch.from_numpy(facts.entries),
        entry_codes=torch.from_numpy(facts.entry_codes.copy()),
        entries_begin=torch.from_numpy(facts.parts.entries_begin),
    )


def native_codebook(book: Codebook) -> _C.Codebook:
    rotation = None if book.rotation is None else torch.from_numpy(book.rotation)
    return load_extension().Codebook(
        parts=book.begin.tolist(), centroids=torch.from_numpy(book.centroids), rotation=rotation
    )
