"""Makes I/O buffers for tests: records scattered in random order among poison, so that a byte read
beside a record turns into NaN."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from espnx.ops import token_format
from espnx.ops.maxsim import Codebook

POISON = 0xFF  # two or four of them are a NaN in fp16 and in fp32


@dataclass(frozen=True)
class Records:
    """Documents in a buffer, as the op takes them."""

    buffer: torch.Tensor
    offset_bytes: torch.Tensor
    n_tokens: torch.Tensor
    format: str
    codebook: Codebook | None = None

    @property
    def args(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, str]:
        return self.buffer, self.offset_bytes, self.n_tokens, self.format


def integers(*shape: int, seed: int = 0, largest: int = 8) -> torch.Tensor:
    """Small integers as float32: sums of their products are exact, so every correct version gives
    the same bits."""
    return torch.randint(
        -largest, largest + 1, shape, generator=torch.Generator().manual_seed(seed)
    ).float()


def normals(*shape: int, seed: int = 0) -> torch.Tensor:
    """Values of a normalised embedding's size: standard normal over the root of the last
    dimension."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / shape[-1] ** 0.5


def codebook_for(fmt: str, d: int, n_centroids: int = 13) -> Codebook | None:
    """Random centroids of length 1 for a residual format, else None; the same for the same
    arguments."""
    token = token_format(fmt)
    if not token.needs_codebook:
        return None
    n_weights = 2 ** int(fmt.removeprefix("residual"))
    generator = torch.Generator().manual_seed(d)
    centroids = torch.nn.functional.normalize(
        torch.randn(n_centroids, d, generator=generator), dim=1
    )
    # weights and cutoffs by turns
    steps = torch.arange(2 * n_weights - 1).float() / n_weights - 1 + 0.5 / n_weights
    scale = d**-0.5
    return Codebook(centroids, steps[1::2].clone() * scale, steps[::2].clone() * scale)


def scatter(
    documents: list[torch.Tensor], fmt: str = "fp16", *, align_bytes: int = 1, seed: int = 0
) -> Records:
    """Writes each ``[n, d]`` document somewhere in a poisoned buffer that ends where the last
    record does."""
    generator = torch.Generator().manual_seed(seed)
    token = token_format(fmt)
    codebook = codebook_for(fmt, documents[0].shape[1])
    offset_bytes, end = torch.zeros(len(documents), dtype=torch.int64), 0
    for i in torch.randperm(len(documents), generator=generator).tolist():
        gap = int(torch.randint(1, 70, (), generator=generator))
        begin = -(-(end + gap) // align_bytes) * align_bytes
        offset_bytes[i], end = (
            begin,
            begin + token.token_row_bytes(documents[i].shape[1]) * len(documents[i]),
        )
    buffer = torch.full((end,), POISON, dtype=torch.uint8)
    for begin, document in zip(offset_bytes.tolist(), documents, strict=True):
        encoded = token.encode(document, codebook)
        buffer[begin : begin + encoded.numel()] = encoded
    return Records(
        buffer,
        offset_bytes,
        torch.tensor([len(document) for document in documents], dtype=torch.int64),
        fmt,
        codebook,
    )
