"""The codebook of residual token formats: centroids, and the cutoffs and weights of what they
miss."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from ...errors import InvalidInputError
from .kmeans import fit_centroids, nearest_centroids
from .limits import DIM_MAX

__all__ = ["NBITS", "Codebook", "nearest_centroids"]

NBITS = (1, 2, 4)
CENTROIDS_MAX = 2**31 - 1
# Of residuals whose quantiles are taken, as ColBERT does; in values, a limit that torch.quantile
# has too.
HELD_OUT_SHARE = 0.05
HELD_OUT_ROWS_MIN = 1000
HELD_OUT_VALUES_MAX = 4 << 20


def _check_width(d: int) -> None:
    """Raises InvalidInputError. Any width can be fitted; what rows it has is the formats'
    affair."""
    if not 1 <= d <= DIM_MAX:
        raise InvalidInputError("dimensions of a codebook", got=d, expected=f"1 to {DIM_MAX}")


@dataclass(frozen=True, eq=False)
class Codebook:
    """What turns residual rows into values.

    Attributes:
        centroids: float32 ``[K, d]``.
        bucket_cutoffs: float32 ``[2^N - 1]``, ascending: a residual's code is the number of cutoffs
            below it.
        bucket_weights: float32 ``[2^N]``: the residual that a code stands for.

    Raises:
        InvalidInputError: other dtypes or shapes, values that are not finite, cutoffs out of order,
            tensors on several devices.
    """

    centroids: torch.Tensor
    bucket_cutoffs: torch.Tensor
    bucket_weights: torch.Tensor

    def __post_init__(self) -> None:
        for name, dims in (("centroids", 2), ("bucket_cutoffs", 1), ("bucket_weights", 1)):
            tensor = getattr(self, name)
            if (
                tensor.dtype != torch.float32
                or tensor.dim() != dims
                or not bool(tensor.isfinite().all())
            ):
                raise InvalidInputError(
                    f"codebook {name}",
                    got=f"{tensor.dtype} {list(tensor.shape)}",
                    expected=f"finite float32 with {dims} dimension(s)",
                )
            if tensor.device != self.centroids.device:
                raise InvalidInputError(
                    f"codebook {name}",
                    got=f"on {tensor.device}",
                    expected=f"on {self.centroids.device}",
                )
            object.__setattr__(self, name, tensor.detach().contiguous())
        _check_width(self.d)
        if not 1 <= len(self.centroids) <= CENTROIDS_MAX:
            raise InvalidInputError(
                "codebook centroids", got=len(self.centroids), expected=f"1 to {CENTROIDS_MAX}"
            )
        if (
            len(self.bucket_weights) not in [2**nbits for nbits in NBITS]
            or len(self.bucket_cutoffs) != len(self.bucket_weights) - 1
        ):
            got = f"{len(self.bucket_weights)} weights and {len(self.bucket_cutoffs)} cutoffs"
            raise InvalidInputError(
                "codebook buckets", got=got, expected="2, 4 or 16 weights and one cutoff fewer"
            )
        if bool((self.bucket_cutoffs.diff() < 0).any()):
            raise InvalidInputError(
                "codebook bucket_cutoffs",
                got=self.bucket_cutoffs.tolist(),
                expected="ascending values",
            )

    @property
    def nbits(self) -> int:
        """Bits of a code: 1, 2 or 4."""
        return len(self.bucket_weights).bit_length() - 1

    @property
    def d(self) -> int:
        """Dimensions of a token."""
        return self.centroids.shape[1]

    @property
    def n_centroids(self) -> int:
        return self.centroids.shape[0]

    @property
    def format(self) -> str:
        """The format whose rows it decodes."""
        return f"residual{self.nbits}"

    def to(self, device: torch.device | str) -> Codebook:
        """The same on another device."""
        return Codebook(
            self.centroids.to(device),
            self.bucket_cutoffs.to(device),
            self.bucket_weights.to(device),
        )

    @classmethod
    def fit(cls, sample: torch.Tensor, nbits: int, n_centroids: int, seed: int = 0) -> Codebook:
        """A codebook for tokens like those of a sample; the same one for the same arguments on the
        same machine.

        Centroids by k-means with the dot product (in two levels above 1,024 of them), of length 1.
        Cutoffs and weights are quantiles of the residuals of a share that k-means did not see: at
        ``i / 2^N`` and ``(i + 0.5) / 2^N`` (ColBERTv2's ``collection_indexer``). Beside the sample
        it holds a permuted copy of it and about 100 MB.

        Args:
            sample: float32 ``[m, d]``, tokens of length 1; 64 for each centroid are plenty.
            nbits: 1, 2 or 4.
            n_centroids: at most the number of rows in the sample.
            seed: of the permutation and of the first centroids.

        Raises:
            InvalidInputError: another dtype or shape, values that are not finite, other nbits, more
                centroids than rows.
        """
        if sample.dtype != torch.float32 or sample.dim() != 2 or not bool(sample.isfinite().all()):
            raise InvalidInputError(
                "codebook sample",
                got=f"{sample.dtype} {list(sample.shape)}",
                expected="finite float32 [m, d]",
            )
        _check_width(sample.shape[1])
        if nbits not in NBITS:
            raise InvalidInputError("codebook nbits", got=nbits, expected="1, 2 or 4")
        if not 1 <= n_centroids <= len(sample):
            raise InvalidInputError(
                "codebook n_centroids",
                got=n_centroids,
                expected=f"1 to {len(sample)}, the rows of the sample",
            )
        generator = torch.Generator().manual_seed(seed)
        shuffled = sample.cpu()[torch.randperm(len(sample), generator=generator)]
        n_held_out = cls._held_out_rows(len(sample), n_centroids, sample.shape[1])
        centroids = fit_centroids(
            shuffled[n_held_out:] if len(sample) - n_held_out >= n_centroids else shuffled,
            n_centroids,
            generator,
        )
        held_out = shuffled[: max(n_held_out, 1)]
        residuals = (held_out - centroids[nearest_centroids(held_out, centroids)]).view(-1)
        quantiles = torch.arange(2**nbits) / 2**nbits
        cutoffs = residuals.quantile(quantiles[1:])
        weights = residuals.quantile(quantiles + 0.5 / 2**nbits)
        return cls(centroids, cutoffs, weights).to(sample.device)

    @staticmethod
    def _held_out_rows(m: int, n_centroids: int, d: int) -> int:
        most = max(1, HELD_OUT_VALUES_MAX // d)
        return min(max(int(HELD_OUT_SHARE * m), min(HELD_OUT_ROWS_MIN, m)), most)
