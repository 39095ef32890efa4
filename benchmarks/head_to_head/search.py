"""Indexes of the same token vectors, beside the ranking of every document."""

from __future__ import annotations

import shutil
import tempfile
from argparse import Namespace
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from espnx.retrieval.evaluate import evaluate
from espnx.retrieval.store.projection import Projection

from ..corpora.mixtures import MIXTURES, Mixture, chunks, make_queries, unit
from ..harness.registry import Say
from ..harness.result import Row
from ..retrieval.formats import load_dataset
from .programs import ask, chosen, row_of, shown

EXACT = "exact"
SYSTEMS = (EXACT, "espnx", "espnx-residual4", "fast-plaid", "pylate-plaid")
DIM, K = 128, 10  # ColBERT's
RECALL = 0.95  # of the exact best 10, that rows of the page reach


@dataclass(frozen=True)
class Corpus:
    """A corpus: where its vectors lie, and what is known of its queries. Documents are their
    numbers."""

    name: str
    documents: int
    folder: Path
    # query number -> document number -> relevance
    qrels: Mapping[int, Mapping[int, int]] = field(default_factory=dict)


class Wide(Mixture):
    """Tokens as wide as ColBERT's, and no vector for a whole text."""

    dim = DIM


def measure(args: Namespace, say: Say) -> list[Row]:
    """A row for each system, effort and corpus."""
    found = list[Row]()
    with tempfile.TemporaryDirectory(prefix="head-to-head-", dir=args.path) as scratch:
        for corpus in corpora(args, Path(scratch), say):
            found += _compared(args, corpus, Path(scratch), say)
            shutil.rmtree(corpus.folder)
    return found


def corpora(args: Namespace, scratch: Path, say: Say) -> Iterator[Corpus]:
    """Their vectors are written when their turn comes."""
    if args.collection is not None:
        yield labelled(
            Path(args.collection), scratch / "collection", say, 300 if args.quick else None
        )
    else:
        say("no --collection: random vectors alone, which nobody has judged")
    count, queries = (500, 10) if args.quick else (args.documents, args.queries)
    yield random_vectors(count, queries, scratch / "random", args.seed, say)


def labelled(source: Path, folder: Path, say: Say, limit: int | None = None) -> Corpus:
    """A collection, encoded by minilm, tokens projected to as many dimensions as ColBERT's. Raises
    InvalidInputError."""
    say(f"{source.name} is encoded")
    data = load_dataset(source, "minilm", say, limit)
    documents = [
        document.vectors.tokens for document in data.documents if document.vectors is not None
    ]
    queries = [found.tokens for found in data.queries.values()]
    projection = Projection.fit(documents, data.dims[1], DIM)
    folder.mkdir()
    for name, texts in (("tokens", documents), ("queries", queries)):
        rows = np.concatenate([unit(projection(tokens).numpy()) for tokens in texts])
        np.save(folder / f"{name}.npy", rows.astype(np.float16 if name == "tokens" else np.float32))
    np.save(folder / "counts.npy", np.array([len(tokens) for tokens in documents]))
    np.save(folder / "query_counts.npy", np.array([len(tokens) for tokens in queries]))
    numbers = {str(document.id): number for number, document in enumerate(data.documents)}
    qrels = {
        number: {numbers[name]: gain for name, gain in data.qrels[query].items() if name in numbers}
        for number, query in enumerate(data.queries)
    }
    return Corpus(data.name, len(documents), folder, qrels)


def random_vectors(count: int, queries: int, folder: Path, seed: int, say: Say) -> Corpus:
    """Documents of 68 tokens in the mean, of topics; a query is 32 noisy tokens of a document. What
    a ColBERT of random weights gives."""
    say(f"{count:,} documents of random vectors are made")
    corpus = Wide("W", count, MIXTURES["C"], seed)
    counts = np.concatenate([chunk.counts for _, chunk in chunks(corpus)])
    folder.mkdir()
    tokens = np.lib.format.open_memmap(
        folder / "tokens.npy", mode="w+", dtype=np.float16, shape=(int(counts.sum()), DIM)
    )
    begin = 0
    for _, chunk in chunks(corpus):
        tokens[begin : begin + len(chunk.tokens)] = chunk.tokens
        begin += len(chunk.tokens)
    tokens.flush()
    asked = [query.tokens.numpy() for query in make_queries(corpus, queries, seed + 1)]
    np.save(folder / "counts.npy", counts)
    np.save(folder / "queries.npy", np.concatenate(asked).astype(np.float32))
    np.save(folder / "query_counts.npy", np.array([len(each) for each in asked]))
    return Corpus("random", count, folder)


def _compared(args: Namespace, corpus: Corpus, scratch: Path, say: Say) -> list[Row]:
    """The exact ranking first: recall is measured against it."""
    params = {
        "job": "search",
        "corpus": corpus.name,
        "documents": corpus.documents,
        "dim": DIM,
        "k": K,
        "recall": RECALL,
    }
    params["limit_s"] = args.time_limit
    found, truth = list[Row](), list[list[int]]()
    for system in chosen(args, SYSTEMS):
        job = {
            "system": system,
            "vectors": str(corpus.folder),
            "index": str(scratch / "index"),
            "k": K,
            "pooling": args.pooling,
        }
        say(f"{corpus.name}: {system} builds")
        # nothing could be said of the others' recall without it
        limit_s = None if system == EXACT else args.time_limit
        built = ask(
            "search", Path(args.environments), {**job, "do": "build"}, scratch, limit_s=limit_s
        )
        answer = built
        if "why" not in built:
            answer = ask(
                "search", Path(args.environments), {**job, "do": "search"}, scratch, limit_s=limit_s
            )
        shutil.rmtree(scratch / "index", ignore_errors=True)
        for point in answer.get("points", []):
            # where exact was not asked for, the others are compared with the first
            truth = truth or point["found"]
            metrics = {name: float(built[name]) for name in ("build_s", "index_bytes")} | _quality(
                corpus, point["found"], truth
            )
            metrics |= {
                name: float(point[name]) for name in ("held_bytes", "mapped_bytes", "together_s")
            }
            metrics["together_recall"] = _quality(corpus, point["found_together"], truth)[
                f"recall@{K}"
            ]
            answered = {**point, "version": answer["version"]}
            found.append(
                row_of(
                    {**params, "effort": point["effort"], "options": point["options"]},
                    system,
                    answered,
                    metrics,
                )
            )
            say(f"{shown(found[-1])}, recall {metrics[f'recall@{K}']:.3f}")
        if "why" in answer:  # after the efforts that it did come to the end of
            found.append(row_of({**params, "effort": {}}, system, answer, {}))
            say(shown(found[-1]))
    return found


def _quality(corpus: Corpus, found: list[list[int]], truth: list[list[int]]) -> dict[str, float]:
    recall = {
        f"recall@{K}": float(
            np.mean(
                [
                    len(set(mine) & set(exact)) / len(exact)
                    for mine, exact in zip(found, truth, strict=True)
                ]
            )
        )
    }
    if not corpus.qrels:
        return recall
    rankings: dict[Any, list[Any]] = {number: list(mine) for number, mine in enumerate(found)}
    return recall | evaluate(rankings, corpus.qrels, [f"nDCG@{K}"])
