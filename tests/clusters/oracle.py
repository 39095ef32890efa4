"""Lists as they lie in their files, by NumPy alone, and what searches of them must find."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

DTYPES = {"uint8": "u1", "int8": "i1", "fp16": "<f2", "fp32": "<f4"}


@dataclass(frozen=True)
class Files:
    """Attributes:
    begin, counts: of each list. ids, vectors: of each list, in order.
    """

    manifest: dict
    begin: np.ndarray
    counts: np.ndarray
    size_bytes: np.ndarray
    ids: list[np.ndarray]
    vectors: list[np.ndarray]
    heads: np.ndarray

    def pages(self, lists: np.ndarray) -> int:
        page = self.manifest["page_bytes"]
        touched: set[int] = set()
        for each in lists.tolist():
            first, last = self.begin[each], self.begin[each] + self.size_bytes[each] - 1
            touched.update(range(first // page, last // page + 1))
        return len(touched)

    def nearest_lists(self, query: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
        """(numbers, squared distances)"""
        far = np.square(self.heads.astype(np.float64) - query).sum(axis=1)
        order = np.argsort(far, kind="stable")[:count]
        return order, far[order]

    def nearest(
        self, query: np.ndarray, lists: np.ndarray, k: int, metric: str = "l2"
    ) -> list[tuple[float, int]]:
        """(distance, row) of the k nearest in some lists, each once, ties by row."""
        best: dict[int, float] = {}
        for each in lists.tolist():
            rows = self.vectors[each].astype(np.float64)
            far = -(rows @ query) if metric == "ip" else np.square(rows - query).sum(axis=1)
            best.update(zip(self.ids[each].tolist(), far.tolist(), strict=True))
        return sorted((far, row) for row, far in best.items())[:k]


def read_files(directory: Path) -> Files:
    manifest = json.loads((directory / "MANIFEST.json").read_text())
    generation = manifest["generation"]
    end = "" if generation == 1 else f".v{generation}"
    dim, dtype = manifest["dim"], DTYPES[manifest["format"]]
    entry = np.dtype([("id", "<i4"), ("vector", dtype, (dim,))])
    table = np.fromfile(
        directory / f"clusters{end}.table", [("at", "<u8"), ("n", "<u4"), ("crc", "<u4")]
    )
    data = (directory / f"clusters{end}.bin").read_bytes()
    held = [np.frombuffer(data, entry, n, at) for at, n, _ in table.tolist()]
    said = manifest["index"]
    head_dim = dim + (said["metric"] == "ip")
    values = np.fromfile(directory / f"heads{end}.bin", "<f4")
    heads = values[: len(table) * head_dim].reshape(-1, head_dim)
    return Files(
        manifest,
        table["at"].astype(int),
        table["n"].astype(int),
        table["n"].astype(int) * entry.itemsize,
        [each["id"] for each in held],
        [each["vector"] for each in held],
        heads,
    )
