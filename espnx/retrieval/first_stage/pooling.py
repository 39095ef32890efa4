"""One first-stage vector from token vectors, for encoders that bring no CLS vector: their mean, or
a MUVERA encoding.

A pooling is made anew from its parameters wherever a store is opened, so what is random in it comes
from a generator whose raw output never changes (PCG64), not from a library's idea of a normal
distribution.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
import torch

from ... import errors

POOLINGS = ("mean", "muvera")
SIMHASH_BITS_MAX = 10
DIM_MAX = 1 << 20
# Weights of tokens in partitions are made for as many repetitions at a time as keep them below this
# many.
WEIGHTS_AT_ONCE = 1 << 20


class Pooling(Protocol):
    """Turns the token vectors of a text into one vector, so that inner products of such vectors
    find MaxSim's candidates.

    Attributes:
        name: ``"mean"`` or ``"muvera"``.
        dim: length of the vector.
    """

    @property
    def name(self) -> str: ...

    @property
    def dim(self) -> int: ...

    def documents(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token vectors of one document, float32 ``[n, d]``, to float32 ``[dim]``; zeros where n is
        0."""
        ...

    def query(self, tokens: torch.Tensor) -> torch.Tensor:
        """Token vectors of one query, float32 ``[n, d]``, to float32 ``[dim]``; zeros where n is
        0."""
        ...

    def parameters(self) -> dict[str, Any]:
        """What `make_pooling` needs beside name and d to make the same one again; JSON."""
        ...


def make_pooling(name: str, d: int, **parameters: Any) -> Pooling:
    """The pooling of that name for tokens of `d` dimensions. Raises InvalidInputError for other
    names, and parameters out of range."""
    if name not in POOLINGS:
        raise errors.InvalidInputError("pooling", got=repr(name), expected=" or ".join(POOLINGS))
    try:
        return MeanPooling(d, **parameters) if name == "mean" else Muvera(d, **parameters)
    except TypeError as error:
        raise errors.InvalidInputError(
            f"parameters of pooling {name}", got=str(error), expected="those that it has"
        ) from None


class MeanPooling:
    """The mean of the token vectors, L2-normalised."""

    name = "mean"

    def __init__(self, d: int):
        _check_int("d", d, 1, DIM_MAX)
        self.dim = d

    def documents(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.normalize(_checked(tokens, self.dim).sum(0), dim=0)

    def query(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.documents(tokens)

    def parameters(self) -> dict[str, Any]:
        return {}


class Muvera:
    """Fixed-dimensional encodings whose inner product approximates MaxSim (Dhulipala et al.,
    MUVERA, arXiv 2405.19504, section 2).

    Hyperplanes through the origin cut space into ``2^simhash_bits`` partitions. In each, a query
    has the sum of its tokens and a document the mean of its tokens, or, where it has none there,
    the token whose partition has the fewest other bits (the first of several). This is done
    `repetitions` times with other hyperplanes and the parts are joined. Were each query token in
    one partition with the document's nearest token, and that alone there, the inner product would
    be MaxSim.

    Whether it finds more than the mean depends on the model: with tokens that lie in clusters it
    does, with those of a model that was trained to be averaged (MiniLM) the mean finds more, at a
    fraction of the dimensions.

    Args:
        d: dimensions of a token vector.
        repetitions: independent partitions of space.
        simhash_bits: hyperplanes of a repetition, 0 to 10.
        projection: dimensions that tokens are projected to in each partition, by random signs; `d`
            or more keeps them as they are.
        final: dimensions that the whole is reduced to, by a count sketch; 0 keeps it whole.
        seed: of hyperplanes, signs and sketch.

    Raises:
        InvalidInputError: parameters out of range, or more than 2^20 dimensions in all.
    """

    name = "muvera"

    def __init__(
        self,
        d: int,
        repetitions: int = 20,
        simhash_bits: int = 5,
        projection: int = 8,
        final: int = 0,
        seed: int = 0,
    ):
        _check_int("d", d, 1, DIM_MAX)
        for what, value, least, most in (
            ("repetitions", repetitions, 1, 1024),
            ("simhash_bits", simhash_bits, 0, SIMHASH_BITS_MAX),
            ("projection", projection, 1, DIM_MAX),
            ("final", final, 0, DIM_MAX),
            ("seed", seed, 0, 2**63 - 1),
        ):
            _check_int(what, value, least, most)
        self.d, self.repetitions, self.simhash_bits = d, repetitions, simhash_bits
        self.projection, self.seed = min(projection, d), seed
        whole = repetitions * self.partitions * self.projection
        if whole > DIM_MAX:
            raise errors.InvalidInputError(
                "dimensions of a MUVERA encoding", got=whole, expected=f"at most {DIM_MAX}"
            )
        self.final = final if final < whole else 0
        self.dim = self.final or whole
        random = np.random.PCG64(seed)
        self._planes = _normal(random, d * repetitions * simhash_bits).reshape(d, -1)
        self._signs = (
            None
            if self.projection == d
            else (_signs(random, d * repetitions * self.projection) / self.projection**0.5)
        )
        if self.final:
            self._bucket = (random.random_raw(whole) % np.uint64(self.final)).astype(np.int64)
            self._bucket_sign = _signs(random, whole)
        bits = np.arange(self.partitions)[:, None] >> np.arange(simhash_bits) & 1
        #: How many bits of two partitions' numbers differ.
        self._hamming = (bits[:, None] != bits[None, :]).sum(2).astype(np.uint8)

    @property
    def partitions(self) -> int:
        return 1 << self.simhash_bits

    def documents(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._encode(tokens, is_query=False)

    def query(self, tokens: torch.Tensor) -> torch.Tensor:
        return self._encode(tokens, is_query=True)

    def parameters(self) -> dict[str, Any]:
        names = ("repetitions", "simhash_bits", "projection", "final", "seed")
        return {name: getattr(self, name) for name in names}

    def _encode(self, tokens: torch.Tensor, is_query: bool) -> torch.Tensor:
        values = _checked(tokens, self.d).numpy()
        if not len(values):
            return torch.zeros(self.dim)
        codes = self._codes(values)
        blocks = self._projected(values)
        parts = np.empty((self.repetitions, self.partitions, self.projection), np.float32)
        step = max(1, WEIGHTS_AT_ONCE // (self.partitions * len(values)))
        for begin in range(0, self.repetitions, step):
            end = begin + step
            weights = self._weights(codes[begin:end], is_query)
            np.matmul(
                weights, blocks[begin:end] if len(blocks) > 1 else blocks, out=parts[begin:end]
            )
        # Half of 1 / repetitions on either side, so that the inner product is on the scale of
        # MaxSim.
        whole = parts.reshape(-1) / np.float32(self.repetitions**0.5)
        if self.final:
            whole = np.bincount(
                self._bucket, weights=whole * self._bucket_sign, minlength=self.final
            ).astype(np.float32)
        return torch.from_numpy(whole)

    def _codes(self, values: np.ndarray) -> np.ndarray:
        """int64 [repetitions, n]: the partition of each token."""
        if not self.simhash_bits:
            return np.zeros((self.repetitions, len(values)), np.int64)
        above = (values @ self._planes > 0).reshape(
            len(values), self.repetitions, self.simhash_bits
        )
        return (above @ (1 << np.arange(self.simhash_bits))).T

    def _projected(self, values: np.ndarray) -> np.ndarray:
        """float32 [repetitions, n, projection], or [1, n, d] where nothing is projected."""
        if self._signs is None:
            return values[None]
        projected = values @ self._signs.reshape(self.d, -1)
        return projected.reshape(len(values), self.repetitions, self.projection).transpose(1, 0, 2)

    def _weights(self, codes: np.ndarray, is_query: bool) -> np.ndarray:
        """float32 [repetitions, partitions, n]: how much of each token goes into each partition."""
        weights = (codes[:, None, :] == np.arange(self.partitions)[None, :, None]).astype(
            np.float32
        )
        if is_query:
            return weights
        counts = weights.sum(2, keepdims=True)
        weights /= np.maximum(counts, 1)
        repetition, partition = np.nonzero(counts[:, :, 0] == 0)
        # argmin takes the first of equals, whatever the machine.
        nearest = (
            self._hamming[partition[:, None], codes[repetition]].argmin(1)
            if len(partition)
            else partition
        )
        weights[repetition, partition, nearest] = 1
        return weights


def _normal(random: np.random.PCG64, n: int) -> np.ndarray:
    """float32 [n] normal values, by Box and Muller from the raw stream."""
    radius, angle = _uniform(random, n), _uniform(random, n)
    return (np.sqrt(-2 * np.log(radius)) * np.cos(2 * np.pi * angle)).astype(np.float32)


def _uniform(random: np.random.PCG64, n: int) -> np.ndarray:
    """float64 [n], above 0 and up to 1."""
    return ((random.random_raw(n) >> np.uint64(11)).astype(np.float64) + 1) / 2.0**53


def _signs(random: np.random.PCG64, n: int) -> np.ndarray:
    """float32 [n] of -1 and 1."""
    return (1 - 2 * (random.random_raw(n) >> np.uint64(63)).astype(np.float32)).astype(np.float32)


def _check_int(what: str, value: object, least: int, most: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not least <= value <= most:
        raise errors.InvalidInputError(
            f"pooling: {what}", got=repr(value), expected=f"an int from {least} to {most}"
        )


def _checked(tokens: torch.Tensor, d: int) -> torch.Tensor:
    if tokens.dim() != 2 or tokens.shape[1] != d or tokens.dtype != torch.float32 or tokens.is_cuda:
        got = f"{tokens.dtype} {list(tokens.shape)} on {tokens.device}"
        raise errors.InvalidInputError(
            "tokens to pool", got=got, expected=f"float32 [n, {d}] on the CPU"
        )
    return tokens.detach()
