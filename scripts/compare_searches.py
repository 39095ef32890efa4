"""A worker of compare_commits.sh: searches one store in each turn, by one caller, by several, and
as a batch.

    scripts/compare_commits.sh A B --worker scripts/compare_searches.py STORE QUERIES [--callers 16]
    [--per-turn 32] [--coarse]

Both commits have to read the store's format. QUERIES: a safetensors file with ``cls`` [n, d_cls]
and ``tokens`` [n, tokens, dim], as `espnx bench retrieval` keeps it beside a store. The store
itself is never written to.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from safetensors.torch import load_file

import espnx


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("store")
    parser.add_argument("queries")
    parser.add_argument("--callers", type=int, default=16)
    parser.add_argument("--per-turn", type=int, default=32, help="queries of a turn")
    parser.add_argument(
        "--coarse", action="store_true", help="the store has coarse records: a cascade too"
    )
    args = parser.parse_args()
    tensors = load_file(args.queries)
    queries = [
        espnx.Encoded(cls, tokens)
        for cls, tokens in zip(tensors["cls"], tensors["tokens"], strict=True)
    ]
    ways: dict[str, dict[str, Any]] = {"exact": {}, "re-rank 64": {"rerank": 64}} | (
        {"cascade 64": {"cascade": 64}} if args.coarse else {}
    )
    with espnx.open(args.store) as index, ThreadPoolExecutor(args.callers) as callers:

        def one_by_one(chosen: Sequence[espnx.Encoded], **options: Any) -> list[espnx.SearchResult]:
            return [index.search(query, prefetch_step=0.0, **options) for query in chosen]

        def by_callers(chosen: Sequence[espnx.Encoded], **options: Any) -> list[espnx.SearchResult]:
            return list(
                callers.map(lambda query: index.search(query, prefetch_step=0.0, **options), chosen)
            )

        def as_a_batch(chosen: Sequence[espnx.Encoded], **options: Any) -> list[espnx.SearchResult]:
            return index.search(chosen, **options)

        by: dict[str, Callable[..., list[espnx.SearchResult]]] = {
            "1 caller": one_by_one,
            f"{args.callers} callers": by_callers,
            "batch": as_a_batch,
        }
        # A collection of all that was imported takes as long as twenty searches, whenever it comes.
        gc.collect()
        gc.freeze()
        for line in sys.stdin:
            begin = int(line) * args.per_turn
            chosen = [queries[(begin + n) % len(queries)] for n in range(args.per_turn)]
            seconds, results = {}, {}
            for way, options in ways.items():
                for name, search in by.items():
                    begun = time.perf_counter()
                    found = search(chosen, **options)
                    seconds[f"{way}, {name}"] = time.perf_counter() - begun
                    results[f"{way}, {name}"] = [
                        [hit.id for hit in result.hits] for result in found
                    ]
            print(json.dumps({"seconds": seconds, "results": results}), flush=True)


if __name__ == "__main__":
    main()
