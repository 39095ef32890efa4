"""Index folders that fast-plaid writes (lightonai/fast-plaid, up to 1.7): ``.npy`` files, by chunk
or merged.

Until 1.6 a chunk's codes and residuals lie in files of their own, and once more in the merged ones;
since 1.7 in the merged ones alone. A chunk's own file, where there is one, is newer than its part
of the merged file, as for fast-plaid itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ..encoders.checkpoints import read_object
from ..errors import FormatError
from .plaid import Chunk, IndexFolder, check_nbits, lengths_of, make_codebook, metadata_of, missing

_PARTS = ("codes", "residuals")


class FastPlaidIndex(IndexFolder):
    """The reader of a fast-plaid index; its members are those of `IndexFolder`."""

    def __init__(self, folder: Path):
        self.folder = folder
        held = metadata_of(
            folder, "nbits", "num_chunks", "num_partitions", "num_documents", "num_embeddings"
        )
        check_nbits(folder, held["nbits"])
        centroids, cutoffs, weights = (
            torch.from_numpy(np.array(_array(folder / f"{name}.npy")))
            for name in ("centroids", "bucket_cutoffs", "bucket_weights")
        )
        self.codebook = make_codebook(folder, None, held["nbits"], centroids, cutoffs, weights)
        if self.codebook.n_centroids != held["num_partitions"]:
            got = f"{self.codebook.n_centroids} centroids"
            raise FormatError(
                "centroids of the index",
                path=folder / "centroids.npy",
                got=got,
                expected=f"{held['num_partitions']}",
            )
        self._chunks: int = held["num_chunks"]
        self.documents, self.tokens = held["num_documents"], held["num_embeddings"]

    def chunks(self) -> Iterator[Chunk]:
        begins = dict.fromkeys(_PARTS, 0)
        manifests = {part: self._manifest(part) for part in _PARTS}
        tokens = 0
        for number in range(self._chunks):
            lengths = lengths_of(self.folder / f"doclens.{number}.json")
            places = {}
            for part in _PARTS:
                own = f"{number}.{part}.npy"
                rows = manifests[part].get(own, sum(lengths))  # of this chunk in the merged file
                places[part] = begins[part], begins[part] + rows
                begins[part] += rows
            yield Chunk(
                self.folder / f"{number}.codes.npy", lengths, partial(self._mapped, number, places)
            )
            tokens += sum(lengths)
        if tokens != self.tokens:
            raise FormatError(
                "tokens of the index",
                path=self.folder / "metadata.json",
                got=tokens,
                expected=self.tokens,
            )

    def _mapped(
        self, number: int, places: dict[str, tuple[int, int]]
    ) -> tuple[np.ndarray, np.ndarray]:
        found = []
        for part in _PARTS:
            own, merged = self.folder / f"{number}.{part}.npy", self.folder / f"merged_{part}.npy"
            if own.is_file():
                found.append(_array(own))
            elif merged.is_file():
                found.append(_array(merged)[slice(*places[part])])
            else:
                raise missing(own)
        return found[0], found[1]

    def _manifest(self, part: str) -> dict[str, int]:
        """Rows by chunk in the merged file, where the manifest names them."""
        path = self.folder / f"merged_{part}.manifest.json"
        if not path.is_file():
            return {}
        rows: dict[str, int] = {}
        for name, entry in read_object(path).items():
            count = entry.get("rows") if isinstance(entry, dict) else None
            if not isinstance(count, int) or count < 0:
                raise FormatError(
                    "manifest of the index",
                    path=path,
                    got=f"{name}: {count!r} rows",
                    expected="a whole number",
                )
            rows[name] = count
        return rows


def _array(path: Path) -> np.ndarray:
    if not path.is_file():
        raise missing(path)
    try:
        array: np.ndarray = np.load(path, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError, OSError) as error:
        raise FormatError(
            "read an array",
            path=path,
            got=str(error).splitlines()[0],
            expected="a whole .npy file of numbers",
        ) from error
    return array
