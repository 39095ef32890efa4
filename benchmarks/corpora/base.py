"""Corpus A: real documents, encoded once and expanded to any size by slightly changed copies.

The documents are docstrings of the installed Python packages (scripts/docstrings.py), cut into
passages. The copies follow KIOXIA's recipe for synthetic vectors: in a random half of the
dimensions of a vector v of d dimensions, +-0.05 * ||v|| / sqrt(d) is added.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load_file, save_file

from espnx.errors import InvalidInputError, MissingDependencyError
from espnx.retrieval.store.projection import Projection

from ..harness.registry import Say
from ..report.render import source_root
from .mixtures import CHUNK_DOCUMENTS, Chunk, stream, unit

NOISE = 0.05
D_CLS, DIM = 128, 32
SLICE_TOKENS = 86  # 68 word pieces in the mean
LEAST_PUBLISHED = 50_000
_AT_ONCE, _FIT_DOCUMENTS = 1024, 4096
_COPIES = 17  # a stream of its own, see mixtures.py


@dataclass(frozen=True)
class Base:
    """Real documents. cls: float32 [n, 128]. tokens: float16 [sum of counts, 32]. counts: int64
    [n]. All rows of norm 1."""

    cls: np.ndarray
    tokens: np.ndarray
    counts: np.ndarray
    encoder: str


class Expanded:
    """Document i is a copy of base document i mod n."""

    d_cls, dim = D_CLS, DIM

    def __init__(self, base: Base, count: int, seed: int = 1, name: str = "A"):
        self.count, self._base, self._seed = count, base, seed
        self.key = f"{name}-{count}-base{len(base.counts)}-noise{NOISE:g}-seed{seed}"
        ends = np.cumsum(base.counts)
        self._begins = ends - base.counts

    def chunk(self, number: int) -> Chunk:
        base = self._bases(number)
        counts = self._base.counts[base]
        ends = np.cumsum(counts)
        rows = np.arange(int(ends[-1])) + np.repeat(self._begins[base] - (ends - counts), counts)
        rng = stream(self._seed, _COPIES, number)
        return Chunk(
            expand(self._base.cls[base], rng),
            expand(self._base.tokens[rows].astype(np.float32), rng),
            counts,
        )

    def cls(self, number: int) -> np.ndarray:
        return expand(self._base.cls[self._bases(number)], stream(self._seed, _COPIES, number))

    def _bases(self, number: int) -> np.ndarray:
        first = number * CHUNK_DOCUMENTS
        return np.arange(first, min(first + CHUNK_DOCUMENTS, self.count)) % len(self._base.counts)


def expand(vectors: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Copies by KIOXIA's recipe; every dimension is changed with probability 1/2, up or down alike.
    float32 [n, d]."""
    signs = np.array([-1, 0, 0, 1], dtype=np.float32)
    drawn = signs[rng.integers(4, size=vectors.shape, dtype=np.uint8)]
    size = np.linalg.norm(vectors, axis=1, keepdims=True) * np.float32(
        NOISE / vectors.shape[1] ** 0.5
    )
    return vectors + drawn * size


def ensure_base(root: Path, wanted: int, say: Say, *, texts: Path | None = None) -> Base:
    """The first `wanted` passages of the installed documentation (or of `texts`, JSON lines),
    encoded once and kept in `root`.

    Raises MissingDependencyError where the encoder is not installed, InvalidInputError where there
    are fewer passages.
    """
    path = root / f"base-{wanted}-slices{SLICE_TOKENS}.safetensors"
    if not path.exists():
        root.mkdir(parents=True, exist_ok=True)
        source = texts or _docstrings(root, say)
        passages = list(islice(_texts(source), wanted))
        if len(passages) < wanted:
            raise InvalidInputError(
                "base documents",
                got=wanted,
                expected=f"at most {len(passages)}: what is installed here",
            )
        encode(passages, path, say)
    tensors = load_file(path)
    return Base(tensors["cls"], tensors["tokens"], tensors["counts"].astype(np.int64), "minilm")


def _docstrings(root: Path, say: Say) -> Path:
    script, out = source_root() / "scripts" / "docstrings.py", root / "docstrings.jsonl"
    if not out.exists():
        say("collecting the documentation of the installed packages")
        command = [
            sys.executable,
            str(script),
            "--out",
            str(out.with_suffix(".part")),
            "--slice-tokens",
            str(SLICE_TOKENS),
        ]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise MissingDependencyError(
                "cannot collect docstrings",
                got=done.stderr.strip()[-200:],
                expected="a clone of espnx",
            )
        out.with_suffix(".part").rename(out)
    return out


def _texts(path: Path) -> Iterator[str]:
    with path.open(encoding="utf-8") as lines:
        for line in lines:
            yield json.loads(line)["text"]


def encode(passages: list[str], path: Path, say: Say) -> None:
    """Encodes passages, projects their vectors (PCA of a sample, tokens to 32 dimensions, CLS to
    128) and writes them to `path`."""
    from espnx.encoders import load_encoder

    encoder = load_encoder("minilm")
    stride = max(1, len(passages) // _FIT_DOCUMENTS)
    sample = list(encoder.encode_documents(passages[::stride][:_FIT_DOCUMENTS]))
    to_dim = Projection.fit((found.tokens for found in sample), encoder.dim, DIM)
    to_cls = Projection.fit((found.cls[None] for found in sample), encoder.d_cls, D_CLS)
    del sample
    parts: list[tuple[np.ndarray, np.ndarray, list[int]]] = []
    begun = last = time.monotonic()
    for first in range(0, len(passages), _AT_ONCE):
        found = list(encoder.encode_documents(passages[first : first + _AT_ONCE]))
        cls = _projected(to_cls, torch.stack([one.cls for one in found]))
        tokens = _projected(to_dim, torch.cat([one.tokens for one in found])).astype(np.float16)
        parts.append((cls, tokens, [len(one.tokens) for one in found]))
        if time.monotonic() - last > 20:
            last = time.monotonic()
            say(
                f"  encoded {first + len(found):,} of {len(passages):,} passages in "
                f"{last - begun:.0f} s"
            )
    arrays: dict[str, Any] = {
        "cls": np.concatenate([part[0] for part in parts]),
        "tokens": np.concatenate([part[1] for part in parts]),
        "counts": np.array([count for part in parts for count in part[2]], dtype=np.int32),
    }
    save_file(arrays, path.with_suffix(".part"))
    path.with_suffix(".part").rename(path)


def _projected(projection: Projection, vectors: torch.Tensor) -> np.ndarray:
    return unit(projection(vectors).numpy())
