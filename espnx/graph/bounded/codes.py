"""Codes of nodes from a file, for builds and merges that write them beside lists of neighbours."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from ...storage import FileHandle, NativeEngine, Plan
from ..layout import PageLayout
from .work import read_array

# Read together, with what lies between them: 16 MiB at most.
_CODES_AT_ONCE = 4096


class CodeReader:
    """Codes of nodes from a file, [n, code_bytes]: all in memory where they fit, else those that
    the next nodes want.

    Attributes:
        rows_at_once: nodes whose neighbours' codes fit.
    """

    def __init__(self, engine: NativeEngine, path: Path, layout: PageLayout, cache_bytes: int):
        self.path, self._engine, self._layout = path, engine, layout
        self._keeps = layout.n * layout.code_bytes <= cache_bytes
        row_bytes = 2 * layout.max_degree * layout.code_bytes
        self.rows_at_once = max(1, layout.n if self._keeps else cache_bytes // row_bytes)
        self._nodes = np.empty(0, np.int64)
        self._codes = np.empty((0, layout.code_bytes), np.uint8)
        self._file: FileHandle | None = None

    def open(self) -> None:
        """When the file is written."""
        if self._keeps:
            self._codes = read_array(self.path, np.uint8, self._layout.code_bytes)
        else:
            self._file = self._engine.open(self.path)

    def load(self, nodes: np.ndarray) -> None:
        """Codes of these nodes, int64 [m], growing, in place of those before."""
        if self._file is None:
            return
        size = self._layout.code_bytes
        self._nodes = nodes
        self._codes = np.empty((len(nodes), size), np.uint8)
        for first in range(0, len(nodes), _CODES_AT_ONCE):
            part = nodes[first : first + _CODES_AT_ONCE]
            future = self._engine.read(
                Plan.of(self._file, (part * size).tolist(), [size] * len(part)), gap_bytes=4096
            )
            memory = future.wait().numpy()
            self._codes[first : first + len(part)] = memory[
                future.position_bytes.numpy()[:, None] + np.arange(size)
            ]

    def get(self, nodes: np.ndarray) -> np.ndarray:
        """uint8 [m, code_bytes], of nodes that were loaded."""
        return self._codes[nodes if self._file is None else np.searchsorted(self._nodes, nodes)]

    def close(self) -> None:
        if self._file is not None:
            self._engine.close_file(self._file)
