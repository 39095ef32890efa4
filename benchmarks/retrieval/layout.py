"""List order against id order: the same candidates read from where they lie, and from where they
would lie as they came.

The second is no other store but the same files read at other places: what a read costs depends on
where its bytes lie, not on what they are. Records of the id order are laid out by the same rules,
in the order of the documents' ids (the numbers in which they came).
"""

from __future__ import annotations

import os
import time
from typing import Any

import numpy as np
import torch

from espnx.errors import InvalidInputError
from espnx.retrieval.search.index import Index
from espnx.retrieval.store.part_file import HEADER_BYTES
from espnx.storage import Plan

LIST_ORDER, ID_ORDER = "list-order", "id-order"


class LayoutReplay:
    """Reads the records of candidates under either layout.

    Args:
        index: of a store whose document ids are 0 to n - 1.
    """

    def __init__(self, index: Index):
        self._index, store = index, index.store
        if index.device.engine is None:
            raise InvalidInputError(
                "bench retrieval --show layout",
                got="a device without files to share",
                expected="a plain SSD",
            )
        self._engine = index.device.engine
        self._files = [
            index.device.open(os.path.join(store.path, segment.path)) for segment in store.segments
        ]
        self._ends = np.cumsum([file.size_bytes for file in self._files])
        numbers = store.texts.numbers(list(range(store.count)))  # record number by id
        offsets, _ = store.full.schema.lay_out(store.n_tokens[numbers], HEADER_BYTES)
        self._offset_bytes = np.empty(store.manifest.end_number, dtype=np.int64)
        self._offset_bytes[numbers] = offsets

    def read(self, numbers: np.ndarray, layout: str, gap_bytes: int) -> dict[str, Any]:
        """Seconds, requests and bytes of one read."""
        numbers = np.sort(numbers)
        plan = (
            self._index.store.full.plan(numbers) if layout == LIST_ORDER else self._by_id(numbers)
        )
        begun = time.perf_counter()
        future = self._engine.read(plan, gap_bytes=gap_bytes)
        future.wait()
        return {
            "seconds": time.perf_counter() - begun,
            "bytes_asked": future.bytes_asked,
            "bytes_moved": future.bytes_moved,
            "requests": future.request_count,
        }

    def _by_id(self, numbers: np.ndarray) -> Plan:
        sizes = self._index.store.full.schema.sizes(self._index.store.n_tokens[numbers])
        # Offsets as in one long file; a record that would cross from one of the files into the next
        # is read before the border.
        begin = np.minimum(self._offset_bytes[numbers], self._ends[-1] - sizes)
        file = np.searchsorted(self._ends, begin, side="right")
        begin = np.minimum(begin, self._ends[file] - sizes)
        handles = torch.tensor([one.number for one in self._files])[torch.from_numpy(file)]
        first = np.concatenate([[0], self._ends[:-1]])
        order = np.argsort(begin)
        return Plan(
            file=handles[torch.from_numpy(order)],
            offset_bytes=torch.from_numpy((begin - first[file])[order]),
            size_bytes=torch.from_numpy(sizes[order]),
        )
