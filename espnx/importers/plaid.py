"""Index folders of residual codes, as PLAID's: one reader per writer, behind the same few members.

A document's tokens come out as the rows of espnx's residual formats: the centroid's number, then
the residual codes, byte for byte as they are in the index. Files are mapped, a slice of documents
at a time, and let go of after each: pages of a mapping count as the process's memory, and a whole
chunk may be larger than that.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from ..encoders.checkpoints import read_json, read_object
from ..errors import FormatError, InvalidInputError
from ..ops.maxsim import Codebook, token_format

TOKENS_AT_ONCE = 1 << 17
_CODE_BYTES = 4
_NBITS = (1, 2, 4)


@dataclass(frozen=True)
class Chunk:
    """A chunk of an index.

    Attributes:
        path: the file of its codes, for messages.
        lengths: tokens of each of its documents.
        open: maps codes ``[t]`` and residuals uint8 ``[t, dim * nbits / 8]``.
    """

    path: Path
    lengths: list[int]
    open: Callable[[], tuple[np.ndarray, np.ndarray]]


class IndexFolder(ABC):
    """An index of residual codes on disk.

    Attributes:
        folder: where the files are.
        codebook: what turns its rows into vectors; exactly the stored values.
        documents: how many it holds.
        tokens: how many token vectors they have together.

    Raises:
        InvalidInputError: the folder is not such an index.
        FormatError: something in it is damaged, missing or contradicts something else.
    """

    folder: Path
    codebook: Codebook
    documents: int
    tokens: int

    @property
    def format(self) -> str:
        """The espnx format of its rows: ``residual1``, ``residual2`` or ``residual4``."""
        return self.codebook.format

    @property
    def dim(self) -> int:
        return self.codebook.d

    @abstractmethod
    def chunks(self) -> Iterator[Chunk]:
        """The chunks in turn."""

    def rows(self) -> Iterator[torch.Tensor]:
        """Each document's rows in turn, uint8 ``[n, 4 + dim * nbits / 8]``, the caller's to keep.
        Raises FormatError."""
        documents = 0
        for chunk in self.chunks():
            begin = 0
            for part in _slices(chunk.lengths):
                yield from self._slice(chunk, begin, begin + sum(part)).split(part)
                begin += sum(part)
            documents += len(chunk.lengths)
        if documents != self.documents:
            raise FormatError(
                "documents of the index", path=self.folder, got=documents, expected=self.documents
            )

    def _slice(self, chunk: Chunk, begin: int, end: int) -> torch.Tensor:
        """Rows of tokens of a chunk, checked. The mapping ends with the call."""
        codes, residuals = chunk.open()
        self._check_chunk(chunk.path, chunk.lengths, codes, residuals)
        return self._rows(chunk.path, codes[begin:end], residuals[begin:end])

    def _check_chunk(
        self, path: Path, lengths: list[int], codes: np.ndarray, residuals: np.ndarray
    ) -> None:
        width = token_format(self.format).token_row_bytes(self.dim) - _CODE_BYTES
        if codes.ndim != 1 or codes.dtype.kind not in "iu":
            raise FormatError(
                "codes of the index",
                path=path,
                got=f"{codes.dtype} {list(codes.shape)}",
                expected="integers in one dimension",
            )
        if residuals.ndim != 2 or residuals.dtype != np.uint8 or residuals.shape[1] != width:
            expected = (
                f"uint8 [tokens, {width}], as {self.codebook.nbits} bits for d = {self.dim} have"
            )
            raise FormatError(
                "residuals beside the codes",
                path=path,
                got=f"{residuals.dtype} {list(residuals.shape)}",
                expected=expected,
            )
        if not len(codes) == len(residuals) == sum(lengths):
            raise FormatError(
                "a chunk of the index",
                path=path,
                got=f"{len(codes)} codes and {len(residuals)} residuals",
                expected=f"{sum(lengths)} of both, the sum of its documents' lengths",
                fix=(
                    "index the collection again: codes and lengths are of different runs, or files "
                    "are missing parts"
                ),
            )

    def _rows(self, path: Path, codes: np.ndarray, residuals: np.ndarray) -> torch.Tensor:
        if len(codes) and not 0 <= int(codes.min()) <= int(codes.max()) < self.codebook.n_centroids:
            raise FormatError(
                "codes of the index",
                path=path,
                got=f"{codes.min()} to {codes.max()}",
                expected=f"0 to {self.codebook.n_centroids - 1}",
            )
        rows = np.empty((len(codes), _CODE_BYTES + residuals.shape[1]), dtype=np.uint8)
        rows[:, :_CODE_BYTES] = codes.astype("<i4").view(np.uint8).reshape(-1, _CODE_BYTES)
        rows[:, _CODE_BYTES:] = residuals
        return torch.from_numpy(rows)


def _slices(lengths: list[int]) -> Iterator[list[int]]:
    """`lengths` in runs of at most `TOKENS_AT_ONCE` tokens (or one document), at least one."""
    run: list[int] = []
    tokens = 0
    for length in lengths:
        if run and tokens + length > TOKENS_AT_ONCE:
            yield run
            run, tokens = [], 0
        run.append(length)
        tokens += length
    yield run


def metadata_of(folder: Path, *fields: str) -> dict[str, Any]:
    """metadata.json, which the writers make last. Raises FormatError where it is missing or lacks
    one of `fields`."""
    path = folder / "metadata.json"
    if not path.is_file():
        raise FormatError(
            "an index without metadata.json",
            path=folder,
            expected="a whole index",
            fix="indexing did not come to its end: run it again",
        )
    held = read_object(path)
    for field in fields:
        where: Any = held
        for key in field.split("."):
            where = where.get(key) if isinstance(where, dict) else None
        if not isinstance(where, int) or isinstance(where, bool) or where < 0:
            raise FormatError(
                f"field {field} of the index's metadata",
                path=path,
                got=repr(where),
                expected="a whole number",
            )
    return held


def check_nbits(folder: Path, nbits: int) -> None:
    """Raises FormatError for residuals of another size than ColBERT's codec has."""
    if nbits not in _NBITS:
        raise FormatError(
            "residuals of the index",
            path=folder,
            got=f"{nbits} bits",
            expected="1, 2 or 4",
            fix="index again with one of them",
        )


def make_codebook(
    folder: Path,
    dim: int | None,
    nbits: int,
    centroids: torch.Tensor,
    cutoffs: torch.Tensor,
    weights: torch.Tensor,
) -> Codebook:
    """The index's codebook in float32, which holds its values (float16 or float32) exactly. Raises
    FormatError where they do not fit."""
    buckets = (len(cutoffs), len(weights)) if cutoffs.dim() == weights.dim() == 1 else None
    if buckets != (2**nbits - 1, 2**nbits):
        got = f"cutoffs {list(cutoffs.shape)}, weights {list(weights.shape)}"
        raise FormatError(
            "buckets of the index",
            path=folder,
            got=got,
            expected=f"[{2**nbits - 1}] and [{2**nbits}] for {nbits} bits",
        )
    if centroids.dim() != 2 or (dim is not None and centroids.shape[1] != dim):
        expected = f"[any, {'dim' if dim is None else dim}]"
        raise FormatError(
            "centroids of the index",
            path=folder,
            got=f"shape {list(centroids.shape)}",
            expected=expected,
        )
    try:
        # they are mapped
        return Codebook(
            *(part.detach().to(torch.float32, copy=True) for part in (centroids, cutoffs, weights))
        )
    except InvalidInputError as error:
        raise FormatError(
            "codebook of the index",
            path=folder,
            got=str(error),
            expected="what ColBERT's codec writes",
        ) from error


def lengths_of(path: Path) -> list[int]:
    """The numbers of tokens of a chunk's documents. Raises FormatError."""
    if not path.is_file():
        raise missing(path)
    lengths = read_json(path)
    if not isinstance(lengths, list) or not all(
        isinstance(length, int) and not isinstance(length, bool) and length >= 0
        for length in lengths
    ):
        raise FormatError(
            "lengths of documents",
            path=path,
            got=f"{str(lengths)[:40]}",
            expected="a list of whole numbers",
        )
    return lengths


def missing(path: Path) -> FormatError:
    """The error of an index that lacks a file."""
    return FormatError(
        "a chunk of the index is missing",
        path=path,
        got="no such file",
        expected="every chunk",
        fix="copy the folder again, or index again",
    )
