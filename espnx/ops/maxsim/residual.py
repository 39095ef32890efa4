"""Residual token formats: the number of a centroid, and for each dimension a code of 1, 2 or 4 bits
of what the centroid misses.

The codes are ColBERTv2's (Santhanam et al., 2022, section 3.3), bit for bit, so those of an
existing index are kept as they are.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInputError
from .codebook import Codebook, nearest_centroids
from .quantised import BITS
from .token import TokenFormat

CODE_BYTES = 4
# Codes are spread out to bits one byte each: 8 MiB of them at a time.
CHUNK_BITS = 8 << 20
TINY_NORM = 1e-12  # as torch.nn.functional.normalize


@dataclass(frozen=True)
class ResidualFormat(TokenFormat):
    """``value = (centroids[number] + bucket_weights[code]) / its length``.

    Decoded rows have length 1, whatever the length of the token was: encode tokens of length 1, as
    ColBERT's are.

    Attributes:
        nbits: of a code.
    """

    nbits: int

    @property
    def needs_codebook(self) -> bool:
        return True

    def token_row_bytes(self, d: int) -> int:
        return CODE_BYTES + d * self.nbits // 8

    def check_codebook(self, d: int, codebook: Codebook | None) -> None:
        self._fitting(d, codebook)

    def _fitting(self, d: int, codebook: Codebook | None) -> Codebook:
        expected = f"a Codebook of {self.nbits}-bit codes for d = {d}"
        if codebook is None:
            raise InvalidInputError(
                f"{self.name} rows need a codebook",
                got="None",
                expected=expected,
                fix="pass codebook=",
            )
        if (codebook.nbits, codebook.d) != (self.nbits, d):
            raise InvalidInputError(
                f"{self.name} rows of another codebook",
                got=f"{codebook.nbits}-bit codes for d = {codebook.d}",
                expected=expected,
            )
        return codebook

    def encode(self, tokens: torch.Tensor, codebook: Codebook | None = None) -> torch.Tensor:
        codebook = self._fitting(tokens.shape[-1], codebook)
        values = self.check_tokens(tokens)
        n, d = values.shape
        rows = torch.empty(n, self.token_row_bytes(d), dtype=torch.uint8, device=values.device)
        for part, out in zip(
            values.split(self._chunk_rows(d)), rows.split(self._chunk_rows(d)), strict=True
        ):
            numbers = nearest_centroids(part, codebook.centroids)
            out[:, :CODE_BYTES] = (
                numbers.to(torch.int32).view(torch.uint8).view(len(part), CODE_BYTES)
            )
            out[:, CODE_BYTES:] = self.pack(part - codebook.centroids[numbers], codebook)
        return rows.view(-1)

    def pack(self, residuals: torch.Tensor, codebook: Codebook) -> torch.Tensor:
        """float32 ``[n, d]`` of what centroids miss to codes, uint8 ``[n, d * nbits / 8]``.

        A code's lowest bit comes first, and the first of eight bits is a byte's highest:
        ``np.packbits`` of ColBERT's ``binarize``.
        """
        codes = torch.bucketize(residuals.contiguous(), codebook.bucket_cutoffs).to(torch.uint8)
        bits = (
            codes[:, :, None] >> torch.arange(self.nbits, dtype=torch.uint8, device=codes.device)
        ) & 1
        return (
            bits.view(len(codes), codes.shape[1] * self.nbits // 8, 8)
            * BITS.flip(0).to(codes.device)
        ).sum(dim=2, dtype=torch.uint8)

    def unpack(self, packed: torch.Tensor) -> torch.Tensor:
        """Codes, uint8 ``[n, d * nbits / 8]``, to bucket numbers, int64 ``[n, d]``."""
        bits = ((packed[:, :, None] & BITS.flip(0).to(packed.device)) != 0).view(
            len(packed), packed.shape[1] * 8 // self.nbits, self.nbits
        )
        return (bits * (1 << torch.arange(self.nbits, device=packed.device))).sum(dim=2)

    def decode(self, rows: torch.Tensor, d: int, codebook: Codebook | None = None) -> torch.Tensor:
        codebook = self._fitting(d, codebook)
        table = rows.reshape(-1, self.token_row_bytes(d))
        values = torch.empty(len(table), d, device=rows.device)
        for part, out in zip(
            table.split(self._chunk_rows(d)), values.split(self._chunk_rows(d)), strict=True
        ):
            out.copy_(self._decode_chunk(part, codebook))
        return values

    def _decode_chunk(self, rows: torch.Tensor, codebook: Codebook) -> torch.Tensor:
        numbers = (
            rows[:, :CODE_BYTES]
            .clone(memory_format=torch.contiguous_format)
            .view(torch.int32)
            .view(-1)
            .long()
        )
        bad = (numbers < 0) | (numbers >= len(codebook.centroids))
        if bool(bad.any()):
            raise centroid_error(
                f"number {int(numbers[bad][0])} in row {int(bad.nonzero()[0])}",
                len(codebook.centroids),
            )
        values = (
            codebook.centroids[numbers] + codebook.bucket_weights[self.unpack(rows[:, CODE_BYTES:])]
        )
        return values / values.norm(dim=1, keepdim=True).clamp_min(TINY_NORM)

    def _chunk_rows(self, d: int) -> int:
        return max(1, CHUNK_BITS // (d * self.nbits))


def first_unknown(
    buffer: torch.Tensor,
    offset_bytes: torch.Tensor,
    n_tokens: torch.Tensor,
    row_bytes: int,
    n_centroids: int,
) -> int | None:
    """The first document with a row that names a centroid which is not among `n_centroids`; all of
    them lie inside the buffer."""
    for document, (begin, count) in enumerate(
        zip(offset_bytes.tolist(), n_tokens.tolist(), strict=True)
    ):
        rows = buffer[begin : begin + count * row_bytes].view(count, row_bytes)
        numbers = (
            rows[:, :CODE_BYTES].clone(memory_format=torch.contiguous_format).view(torch.int32)
        )
        if bool(((numbers < 0) | (numbers >= n_centroids)).any()):
            return document
    return None


def centroid_error(got: str, n_centroids: int) -> InvalidInputError:
    """The error of a row that names a centroid that the codebook does not have."""
    return InvalidInputError(
        "maxsim row names an unknown centroid",
        got=got,
        expected=f"0 to {n_centroids - 1}",
        fix="pass the codebook that the rows were encoded with; if it is, the rows are damaged",
    )
