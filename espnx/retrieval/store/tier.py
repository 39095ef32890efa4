"""A tier: one kind of record of every document of a store, kept on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...device.interface import KeptRecords, RecordDevice
from ...device.record_layout import RecordLayout, RecordSchema
from ...ops.maxsim import Codebook
from ...storage.engine import FileHandle


class Tier(RecordLayout):
    """See the module.

    Args:
        device: has opened `files`, and keeps their records from now on; stays the caller's.
        schema, n_tokens, group_offset_bytes, segment_begin, files, salt, codebook: as for
            `RecordLayout`.

    Attributes:
        kept: the records there: what scores them, reads them and releases them. What `read` brings
            must pass `check` before it is used.
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
        self.kept: KeptRecords = device.keep_records(self)
