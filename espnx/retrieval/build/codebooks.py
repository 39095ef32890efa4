"""Trains the codebooks of residual formats, on tokens as the records will hold them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields

import numpy as np
import torch

from ...device.record_layout import RecordSchema
from ...ops.maxsim import Codebook
from ...storage.files import crc32c
from ..store.projection import Projection
from ..store.rows import tokens_of
from ..versions.segments import pieces
from .spool import Spool

_ROWS_PER_CENTROID = 64
_LEAST_BYTES = 1 << 20


@dataclass(frozen=True)
class TokenSource:
    """Spooled documents, and what becomes of their tokens before they are coded."""

    spool: Spool
    projection: Projection | None
    dim: int


def wanted_centroids(tokens: int, centroids: int | None) -> int:
    """Centroids of a codebook: as many as are asked for, else by ColBERTv2's rule, the power of two
    below 16 sqrt(tokens)."""
    return centroids or 2 ** int(np.log2(max(2.0, 16 * tokens**0.5)))


def train_codebooks(
    source: TokenSource, formats: Mapping[str, str], centroids: int | None, limit_bytes: int
) -> dict[str, np.ndarray]:
    """Codebooks of some tiers (name -> residual format), as tensors.

    Args:
        centroids: see `wanted_centroids`. Never more than half the sample.
        limit_bytes: of the sample.
    """
    spool = source.spool
    total = int(spool.n_tokens.sum(dtype=np.int64))
    wanted = wanted_centroids(total, centroids)
    rows = min(total, max(1, limit_bytes // (4 * source.dim)), _ROWS_PER_CENTROID * wanted)
    documents = max(1, round(len(spool) * rows / max(1, total)))
    chosen = np.sort(
        np.random.default_rng(3).choice(len(spool), size=documents, replace=False)
    ).astype(np.int64)
    parts = pieces(
        iter([chosen]),
        lambda arrivals: spool.schema.sizes(spool.n_tokens[arrivals]),
        max(_LEAST_BYTES, limit_bytes // 4),
        lambda: documents,
    )
    tokens = [tokens for part in parts for tokens in tokens_of(spool, part, source.projection)]
    sample = torch.cat(tokens) if tokens else torch.empty(0, source.dim)
    if not len(sample):  # no document of the sample has a token
        sample = torch.zeros(1, source.dim)
    books: dict[str, np.ndarray] = {}
    for tier, name in formats.items():
        book = Codebook.fit(
            sample, int(name.removeprefix("residual")), min(wanted, max(1, len(sample) // 2))
        )
        books |= codebook_tensors(tier, RecordSchema(name, 0, source.dim).pad_codebook(book))
    return books


def codebook_tensors(tier: str, book: Codebook) -> dict[str, np.ndarray]:
    """The tensors of a codebook as a store's metadata holds them: ``full.centroids``, ..."""
    return {f"{tier}.{field.name}": getattr(book, field.name).numpy() for field in fields(book)}


def codebook_sum(book: Codebook) -> int:
    """A checksum that tells codebooks apart."""
    total = 0
    for tensor in codebook_tensors("full", book).values():
        total = crc32c(tensor.reshape(-1).view(np.uint8), total)
    return total
