"""``espnx bench postings --show splade``: sparse vectors from SSD, by whole lists and in two steps,
and others in memory."""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path

import numpy as np

import espnx
from espnx.errors import InvalidInputError

from ..harness.arguments import choices, positive
from ..harness.registry import Say
from ..harness.result import Row
from ..harness.runner import compare
from .fleet import Fleet, Folder
from .learned import Vectors, mixed, real_texts
from .names import PEERS, WHOLE
from .systems import missing

_ENCODED_AT_ONCE = 256


class LearnedIndexes(Folder):
    """Vectors mixed of real ones, real queries, and indexes.

    Args:
        collection: a folder in BEIR's form, whose passages are among the texts and whose queries
            are asked, or None.
        n, n_real, n_queries, seed: of vectors, of texts that are encoded, and of queries, which are
            fewer where there are not so many.
        encoder: of `espnx.load_sparse_encoder`.
    """

    def __init__(
        self,
        folder: Path,
        collection: Path | None,
        n: int,
        n_real: int,
        n_queries: int,
        seed: int,
        encoder: str,
        say: Say,
    ):
        def make(folder: Path) -> Mapping[str, float]:
            texts, queries = real_texts(collection, n_real)
            say(f"encoding {len(texts):,} texts")
            model = espnx.load_sparse_encoder(encoder)
            parts = range(0, len(texts), _ENCODED_AT_ONCE)
            real = Vectors.of(
                [
                    each
                    for at in parts
                    for each in model.encode_documents(texts[at : at + _ENCODED_AT_ONCE])
                ]
            )
            asked = [each for each in model.encode_queries(queries[:n_queries]) if len(each.terms)]
            pairs = [
                zip(np.asarray(each.terms).tolist(), np.asarray(each.weights).tolist(), strict=True)
                for each in asked
            ]
            (folder / "queries.json").write_text(
                json.dumps([{str(term): weight for term, weight in pair} for pair in pairs])
            )
            say(f"mixing {n:,} vectors of {len(real):,}")
            vectors = mixed(real, n, seed)
            vectors.save(folder / "vectors.npz")
            return {
                "real": len(real),
                "terms_mean": len(vectors.terms) / n,
                "real_terms_mean": len(real.terms) / len(real),
                "query_terms_mean": float(np.mean([len(each.terms) for each in asked])),
            }

        job = {
            "vectors": n,
            "real": n_real,
            "queries": n_queries,
            "seed": seed,
            "collection": collection.name if collection else "",
        }
        super().__init__(folder, job, make, say)

    def expect(self, k: int) -> None:
        """Writes what must be found: by sums of float32 products over all vectors."""
        vectors = Vectors.load(self.folder / "vectors.npz")
        order = np.argsort(vectors.terms, kind="stable")
        record = np.repeat(np.arange(len(vectors), dtype=np.int64), np.diff(vectors.begins))[order]
        weights, terms = vectors.weights[order], vectors.terms[order]
        numbers, scores = (
            np.full((len(self.queries), k), -1, np.int64),
            np.full((len(self.queries), k), -np.inf, np.float32),
        )
        for row, query in enumerate(self.queries):
            sums = np.zeros(len(vectors), np.float32)
            for term, weight in query.items():
                low, high = np.searchsorted(terms, [int(term), int(term) + 1]).tolist()
                sums[record[low:high]] += np.float32(weight) * weights[low:high]
            best = np.lexsort((np.arange(len(sums)), -sums))[:k]
            numbers[row], scores[row] = best, sums[best]
        np.savez(self.folder / "expected", numbers=numbers, scores=scores)


def measure(args: Namespace, folder: Path, limit_bytes: int | None, say: Say) -> list[Row]:
    """Rows of whole lists, of two steps by each of ``--steps``, and of what else is in memory.
    Raises as the case does."""
    wanted = choices(args.peers, PEERS, "--peers") if args.peers else []
    peers = [name for name in wanted if not missing(name)]
    for name in set(wanted) - set(peers):
        say(f"{name} is left out: {missing(name)} is not installed")
    n, n_real, n_queries, k = (
        positive(f"--{name}", getattr(args, name.replace("-", "_")))
        for name in ("n", "n-real", "n-queries", "k")
    )
    if args.quick:
        n, n_real, n_queries = 1000, 100, 10
    collection = Path(args.collection) if args.collection else None
    indexes = LearnedIndexes(
        folder, collection, n, n_real, n_queries, args.seed, args.sparse_encoder, say
    )
    indexes.build(["splade", *peers])
    if args.build_only:
        return []
    indexes.expect(k)
    ours = [WHOLE, *map(_two_steps, args.steps.split(","))]
    params = {
        "show": "splade",
        "passages": n,
        "queries": len(indexes.queries),
        "k": k,
        "memory": limit_bytes or "ample",
        **indexes.facts,
    }
    with Fleet(indexes, [*ours, *peers], k, limit_bytes, unlimited=peers) as fleet:
        systems = fleet.systems
        return compare(
            "postings",
            params,
            systems[: len(ours)],
            systems[len(ours) :],
            pairs=args.pairs,
            seed=args.seed,
            say=say,
        )


def _two_steps(text: str) -> str:
    """The name of a system that searches so: W:T:C. Raises InvalidInputError."""
    numbers = text.split(":")
    if len(numbers) != 3 or not all(number.isdigit() for number in numbers):
        raise InvalidInputError("--steps", got=text, expected="W:T:C, such as 8:16:50")
    return "two steps, {} of {} terms, {} candidates".format(*numbers)
