"""The posting lists of a segment, as a device that scans them needs to know them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ... import errors
from ...device.postings import Rule
from ...storage import FileHandle, NativeEngine
from ...storage.files import Region
from ..bm25 import BM25, VARIANTS
from ..stored.layout import COUNT
from ..stored.segment import Segment


class SegmentLists:
    """See `espnx.device.postings.interface.PostingLists`.

    Args:
        region: in which the lists lie. n_records: of the segment.
        open_segment: opens it by an engine, the caller's to close; raises what that does.
    """

    def __init__(
        self, region: Region, n_records: int, open_segment: Callable[[NativeEngine], Segment]
    ):
        self.path, self.begin_bytes = region.path, region.offset_bytes
        self.n_records, self.open_segment = n_records, open_segment
        self._segment: Segment | None = None
        self._norms: tuple[Rule, torch.Tensor] | None = None

    @property
    def segment(self) -> Segment:
        """Raises StateError before `open`."""
        if self._segment is None:
            raise errors.StateError(
                "posting lists", got="lists that are not open", expected="lists on a device"
            )
        return self._segment

    def open(self, engine: NativeEngine) -> Sequence[FileHandle]:
        """See `PostingLists`."""
        self._segment = self.open_segment(engine)
        return self._segment.files

    def view(self, rule: Rule, allowed: torch.Tensor | None) -> dict[str, Any]:
        """See `PostingLists`: numbers begin at 0, whatever the segment's do."""
        norms = self._norms_of(rule) if self.segment.dictionary.kind == COUNT else None
        return self.segment.view(allowed, norms) | {"first_number": 0}

    def _norms_of(self, rule: Rule) -> torch.Tensor:
        """The bits of the float64 norm of each length; kept for the next scan."""
        held = self._norms  # read once: another thread may put others there
        if held is None or held[0] != rule:
            bm25 = BM25(VARIANTS[rule.variant], rule.k1, rule.b, rule.delta)
            made = bm25.norms(self.segment.length_table, rule.average_length)
            self._norms = held = rule, torch.from_numpy(made.view("int64"))
        return held[1]
