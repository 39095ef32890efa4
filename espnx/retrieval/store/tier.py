"""A tier: one kind of record of every document of a store, kept on a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from ...device.interface import RecordDevice
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
        maxsim, read, release: of the `KeptRecords` that the device has made of them. What `read`
            brings must pass `check` before it is used.
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
        kept = device.keep_records(self)
        self.maxsim, self.read, self.release = kept.maxsim, kept.read, kept.release
