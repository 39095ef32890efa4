"""The files of a device for records whose bytes an engine reads: what a record device on this
machine's SSDs is, beside its scoring."""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch

from ...storage import Engine, FileHandle
from ..interface import Capabilities, FilePath
from ..record_layout import RecordLayout


class RecordFiles:
    """The part of `espnx.device.interface.RecordDevice` that is about files.

    Args:
        engine: of the reads; stays the caller's.
        compute: where records are scored.
    """

    capabilities = Capabilities(hands_out_records=True)

    def __init__(self, engine: Engine, compute: torch.device):
        self.compute = compute
        self.engine: Engine | None = engine
        self._reads = engine
        self._layouts = set[RecordLayout]()  # whose records are kept

    def open(self, path: str) -> FileHandle:
        """See `RecordDevice`."""
        return self._reads.open(path)

    def close_file(self, file: FileHandle) -> None:
        """See `RecordDevice`."""
        self._reads.close_file(file)

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return [
            FilePath(file.path, file.effective, self._why(file))
            for file in {
                file.path: file for layout in list(self._layouts) for file in layout.files
            }.values()
        ]

    def _why(self, file: FileHandle) -> str:
        if file.effective.endswith("(buffered)"):
            return f"no direct I/O in {os.path.dirname(file.path)}"
        return self._reads.fallback_reason
