"""A tier: one kind of record of every document of a store, kept on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...device.interface import Pairs, RecordDevice, RecordQuery, RecordTicket
from ...device.record_layout import RecordLayout, RecordSchema
from ...ops.maxsim import Codebook
from ...storage.engine import DEFAULT_DEADLINE_S, FileHandle, Future


class Tier(RecordLayout):
    """See the module.

    Args:
        device: has opened `files`, and keeps their records from now on; stays the caller's.
        schema, n_tokens, group_offset_bytes, segment_begin, files, salt, codebook: as for
            `RecordLayout`.
    """

    def __init__(
        self,
        device: RecordDevice,
        schema: RecordSchema,
        n_tokens: np.ndarray,
        group_offset_bytes: torch.Tensor,
        segment_begin: torch.Tensor,
        files: Sequence[FileHandle],
        *,
        salt: int,
        codebook: Codebook | None = None,
    ):
        super().__init__(
            schema, n_tokens, group_offset_bytes, segment_begin, files, salt=salt, codebook=codebook
        )
        self._kept = device.keep_records(self)

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        *,
        gap_bytes: int = 0,
        is_urgent: bool = True,
        deadline_s: float = DEFAULT_DEADLINE_S,
    ) -> RecordTicket:
        """Starts scoring records where they are; see
        `espnx.device.interface.KeptRecords.maxsim`."""
        return self._kept.maxsim(
            numbers, queries, pairs, gap_bytes=gap_bytes, is_urgent=is_urgent, deadline_s=deadline_s
        )

    def read(
        self, numbers: np.ndarray, *, gap_bytes: int, deadline_s: float = DEFAULT_DEADLINE_S
    ) -> Future:
        """Starts reading records; item i of the future is record `numbers[i]`. What arrives must
        pass `check` before it is used."""
        return self._kept.read(numbers, gap_bytes=gap_bytes, deadline_s=deadline_s)

    def release(self) -> None:
        """Nobody will ask for its records again."""
        self._kept.release()
