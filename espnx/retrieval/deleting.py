"""The bitmap of deleted records: a file of the version that deleted some of them."""

from __future__ import annotations

import os
from typing import Any

import numpy as np

from ..storage import NativeEngine
from ..storage.stream import write_file
from . import generations
from .store import EmbeddingStore

DELETED_NAME = "deleted.bin"


class Deletion:
    """Records of a store that its next version is to be without, beside those that are deleted already.

    Attributes:
        count: how many.
    """

    def __init__(self, store: EmbeddingStore):
        self._bitmap = np.zeros(-(-store.end_number // 8), dtype=np.uint8) if store.deleted is None else store.deleted.copy()
        self.count = 0

    def add(self, numbers: np.ndarray) -> None:
        """Records that are alive, each once."""
        np.bitwise_or.at(self._bitmap, numbers >> 3, (1 << (numbers & 7)).astype(np.uint8))
        self.count += len(numbers)

    def write(self, engine: NativeEngine, path: str, contents: dict[str, Any]) -> None:
        """Writes the bitmap to the directory of the version that `contents` will be the manifest of, and names it there."""
        if not self.count:
            return
        directory = generations.name(contents["generation"])
        _, crc = write_file(engine, os.path.join(path, directory, DELETED_NAME), self._bitmap.tobytes())
        for flushed in (os.path.join(path, directory), path):
            engine.sync_directory(flushed)
        contents["deleted"] = {"path": os.path.join(directory, DELETED_NAME), "crc32c": crc, "size_bytes": self._bitmap.nbytes}
        contents["records"]["count"] -= self.count
