"""Index folders that ColBERT writes (stanford-futuredata/ColBERT v2, PLAID): ``.pt`` files of codes
and residuals by chunk."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..encoders.checkpoints import read_object
from ..encoders.torch_files import load_torch
from ..errors import FormatError
from .plaid import Chunk, IndexFolder, check_nbits, lengths_of, make_codebook, metadata_of, missing


class ColBERTIndex(IndexFolder):
    """See `IndexFolder`. Files are read as tensors alone; no pickle is run."""

    def __init__(self, folder: Path):
        self.folder = folder
        held = metadata_of(
            folder, "config.dim", "config.nbits", "num_chunks", "num_partitions", "num_embeddings"
        )
        dim, nbits = held["config"]["dim"], held["config"]["nbits"]
        check_nbits(folder, nbits)
        cutoffs, weights = self._buckets(folder / "buckets.pt")
        self.codebook = make_codebook(
            folder, dim, nbits, _tensor(folder / "centroids.pt"), cutoffs, weights
        )
        if self.codebook.n_centroids != held["num_partitions"]:
            got = f"{self.codebook.n_centroids} centroids"
            raise FormatError(
                "centroids of the index",
                path=folder / "centroids.pt",
                got=got,
                expected=f"{held['num_partitions']}",
            )
        self._chunks: int = held["num_chunks"]
        self.tokens = held["num_embeddings"]
        self.checkpoint: str | None = held["config"].get("checkpoint")
        self.documents = sum(
            len(lengths_of(folder / f"doclens.{number}.json")) for number in range(self._chunks)
        )

    @staticmethod
    def _buckets(path: Path) -> tuple[torch.Tensor, torch.Tensor]:
        held = load_torch(path) if path.is_file() else None
        if not isinstance(held, (tuple, list)) or [type(part) for part in held] != [
            torch.Tensor,
            torch.Tensor,
        ]:
            got = "no such file" if held is None else type(held).__name__
            raise FormatError(
                "buckets of the index",
                path=path,
                got=got,
                expected="a pair of tensors, cutoffs and weights",
            )
        return held[0], held[1]

    def chunks(self) -> Iterator[Chunk]:
        documents = tokens = 0
        for number in range(self._chunks):
            lengths = lengths_of(self.folder / f"doclens.{number}.json")
            self._check_place(number, documents, len(lengths), sum(lengths))
            path = self.folder / f"{number}.codes.pt"
            yield Chunk(
                path, lengths, partial(_mapped, path, self.folder / f"{number}.residuals.pt")
            )
            documents, tokens = documents + len(lengths), tokens + sum(lengths)
        if tokens != self.tokens:
            raise FormatError(
                "tokens of the index",
                path=self.folder / "metadata.json",
                got=tokens,
                expected=self.tokens,
            )

    def _check_place(self, number: int, documents: int, count: int, tokens: int) -> None:
        """A chunk says itself which documents it holds: files of several runs in one folder are
        found out."""
        path = self.folder / f"{number}.metadata.json"
        if not path.is_file():
            raise missing(path)
        held = read_object(path)
        expected = {"passage_offset": documents, "num_passages": count, "num_embeddings": tokens}
        got: dict[str, Any] = {key: held.get(key) for key in expected}
        if got != expected:
            raise FormatError(
                "a chunk of the index",
                path=path,
                got=got,
                expected=expected,
                fix="index the collection again",
            )


def _mapped(codes: Path, residuals: Path) -> tuple[np.ndarray, np.ndarray]:
    return _tensor(codes).numpy(), _tensor(residuals).numpy()


def _tensor(path: Path) -> torch.Tensor:
    if not path.is_file():
        raise missing(path)
    held = load_torch(path)
    if not isinstance(held, torch.Tensor):
        raise FormatError(
            "tensor of the index", path=path, got=type(held).__name__, expected="a tensor"
        )
    return held
