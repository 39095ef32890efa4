#!/usr/bin/env python3
"""Real vectors for `espnx bench graph`, of what every machine has: docstrings of installed
packages, and photographs that packages ship.

    python scripts/graph_vectors.py tokens --out tokens
        384 float32 of MiniLM for each token (espnx[minilm])
    python scripts/graph_vectors.py docstrings --out docstrings
        one vector a docstring: the mean of its tokens, of length 1
    python scripts/graph_vectors.py patches --out patches
        28 x 28 grey pixels, uint8 (pip install scikit-image scikit-learn)

Each writes NAME.npy, and NAME-queries.npy: drawn as the vectors are, from texts and pictures that
none of the vectors is of.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from docstrings import documents

SIDE, BATCH = 28, 64
PICTURES = (".png", ".jpg", ".jpeg", ".tif", ".tiff")


def encoded(seed: int, chars_max: int) -> Iterator[np.ndarray]:
    """float32 [tokens, 384] of what docstrings begin with, in an order drawn by lot, as long as
    there are any."""
    import espnx

    texts = [each["text"][:chars_max] for each in documents()]
    order = np.random.default_rng(seed).permutation(len(texts))
    encoder = espnx.load_encoder("minilm")
    for first in range(0, len(order), BATCH):
        for each in encoder.encode_documents([texts[i] for i in order[first : first + BATCH]]):
            if len(each.tokens):
                yield np.asarray(each.tokens, dtype=np.float32)


def tokens(seed: int, count: int) -> Iterator[np.ndarray]:
    """float32 [m, 384] of each text: at most 32 of the tokens of its first 1,000 characters, drawn
    by lot."""
    random = np.random.default_rng(seed + 1)
    for each in encoded(seed, 1000):
        yield each[random.permutation(len(each))[:32]]


def docstrings(seed: int, count: int) -> Iterator[np.ndarray]:
    """float32 [1, 384] of each text's first 256 characters, mostly its first paragraph: 64,000 in
    about 40 minutes of a core."""
    for each in encoded(seed, 256):
        mean = each.mean(axis=0, keepdims=True)
        yield mean / np.linalg.norm(mean)


def pictures() -> Iterator[np.ndarray]:
    """uint8 [height, width]: in grey, that scikit-image and scikit-learn carry in their wheels."""
    io, colour = import_module("skimage.io"), import_module("skimage.color")
    folders = [
        Path(str(import_module(name).__file__)).parent
        for name in ("skimage.data", "sklearn.datasets")
    ]
    for path in sorted(
        path for folder in folders for path in folder.rglob("*") if path.suffix in PICTURES
    ):
        picture = io.imread(path)
        if picture.ndim == 3:
            picture = colour.rgb2gray(picture[..., :3]) * 255
        if picture.ndim == 2 and min(picture.shape) >= 4 * SIDE:
            yield picture.astype(np.uint8)


def patches(seed: int, count: int) -> Iterator[np.ndarray]:
    """uint8 [m, 784] of each picture: different places, of large pictures more; flat ones are left
    out, for many of those are one."""
    random = np.random.default_rng(seed)
    views = [
        np.lib.stride_tricks.sliding_window_view(each, (SIDE, SIDE)).reshape(-1, SIDE, SIDE)
        for each in pictures()
    ]
    total = sum(map(len, views))
    for number in random.permutation(len(views)):
        view = views[number]
        flat = view[random.permutation(len(view))[: 3 * count * len(view) // total]].reshape(
            -1, SIDE * SIDE
        )
        yield flat[flat.std(axis=1) > 8]


def take(sources: Iterator[np.ndarray], count: int) -> np.ndarray:
    """Vectors of whole sources until there are so many, or no more. How many there are is printed,
    at most once a second."""
    found, total, said = list[np.ndarray](), 0, time.monotonic()
    for each in sources:
        found.append(each)
        total += len(each)
        if total >= count:
            break
        if time.monotonic() - said > 1:
            said = time.monotonic()
            print(f"\r{total:,} of {count:,}", end="", file=sys.stderr, flush=True)
    return np.concatenate(found)[:count]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    kinds = {"tokens": tokens, "docstrings": docstrings, "patches": patches}
    parser.add_argument("kind", choices=kinds)
    parser.add_argument(
        "--out", required=True, help="what files are called, but for .npy and -queries.npy"
    )
    parser.add_argument(
        "--n", type=int, default=60_000, help="vectors, at most (default: %(default)s)"
    )
    parser.add_argument("--n-queries", type=int, default=5_000, help="(default: %(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    sources = kinds[args.kind](args.seed, args.n + args.n_queries)
    queries, vectors = take(sources, args.n_queries), take(sources, args.n)
    np.save(f"{args.out}.npy", vectors)
    np.save(f"{args.out}-queries.npy", queries)
    print(
        f"{args.out}.npy: {len(vectors):,} x {vectors.shape[1]} {vectors.dtype}; "
        f"{args.out}-queries.npy: {len(queries):,}"
    )


if __name__ == "__main__":
    main()
