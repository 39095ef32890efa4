"""Attention over rows that a device shows, which keeps the pages that weigh most, compiled: for the
rows that drafts attend to (`espnx.kv.draft.pages` says which and why).

A file of its own: it writes to tensors that it is given, as nothing else here does.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from .._native import load_extension
from .rows import Queries, native_arguments


class PageTensors(NamedTuple):
    """Tensors that keep pages, of each (sequence, KV head) as many: contiguous, on the CPU.

    Attributes:
        k, v: [sequences, KV heads, slots, 32, d or dv], of the dtype of the stored rows; of int8
            rows: any float dtype.
        seen: uint8 [sequences, KV heads, slots, 32]: which rows are there, and no padding.
        lse: float32 [sequences, KV heads, slots, n]: of each page for the queries.
        stays: uint8 [sequences, KV heads, slots]: the page stays whatever it weighs.
        number: int64 [sequences, KV heads, slots]: which page of the text it is; -1: none.
    """

    k: torch.Tensor
    v: torch.Tensor
    seen: torch.Tensor
    lse: torch.Tensor
    stays: torch.Tensor
    number: torch.Tensor


def page_naming(
    queries: Queries,
    geometry: dict[str, Any],
    pages: PageTensors,
    places: list[int],
    end: int,
    *,
    threads: int = 0,
) -> Any:
    """A compiled ``PageNaming``: `see(memory, pieces)` takes rows as a device shows them, pieces
    int64 [n, 5]; `finish()` gives (o, lse) over all of them.

    Args:
        queries: what attends, on the CPU.
        geometry: of the rows (`RowLayout.geometry`).
        pages: where those with the most are kept.
        places: which sequence of `pages` each of the queries' is; -1: none.
        end: behind the last position that will come.
        threads: for devices that hand on reads without Python between; 0: as many as PyTorch uses.

    Raises:
        InvalidInputError: tensors of another shape, dtype or device.
    """
    given = native_arguments(queries, None, threads)
    del given["rows"]
    return load_extension().PageNaming(
        **given,
        geometry=geometry,
        **pages._asdict(),
        place=torch.tensor(places, dtype=torch.int64),
        end=end,
    )
