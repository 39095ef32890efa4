"""``espnx bench postings``: BM25 from SSD, one query at a time, cache cold, beside bm25s, Tantivy, FTS5 and mmap of the same lists."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..harness.arguments import choices, positive
from ..harness.cells import baselines_of, metric, number, ratio
from ..harness.registry import Case, Say
from ..harness.result import Row

if TYPE_CHECKING:
    from espnx.postings import BM25

BASELINES = ("mmap-willneed", "bm25s-mmap", "bm25s-memory", "tantivy", "fts5")
DESCRIPTION = """Passages by recipe: half of the words by Zipf's law over 200,000 terms, half of one of 2,000 topics; queries of about four
words of one passage. Every system builds an index of them and is asked one query after the other; before each the page cache of its files
is dropped, but of bm25s-memory. Scores of espnx, mmap-willneed and bm25s must be bm25s's; Tantivy rounds lengths and FTS5 has a formula of
its own: both must find most of the same. A time is the mean of a query.

  espnx bench postings --path /mnt/nvme --baseline mmap-willneed,bm25s-mmap,tantivy --json postings.json
  espnx bench postings --n 1000000 --n-queries 200
  espnx bench postings --quick                                                  does everything work here?

Tantivy: pip install tantivy. Nothing stays on disk."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--path", metavar="DIR", default=".", help="a directory on the SSD (default: the current one)")
    add("--baseline", metavar="B,...", default="mmap-willneed,bm25s-mmap,fts5", help=f"of {', '.join(BASELINES)} (default: %(default)s)")
    add("--n", metavar="N", default="100000", help="passages (default: %(default)s)")
    add("--n-queries", metavar="N", default="200", help="(default: %(default)s)")
    add("-k", metavar="K", default="10", help="records of each query (default: %(default)s)")


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises InvalidInputError, MissingDependencyError, and what building and searching raise."""
    from ..harness.runner import compare
    from .corpus import make_passages, make_queries
    from .systems import FTS5_RULE, RULE, build, open_system, require

    baselines = choices(args.baseline, BASELINES, "baseline")
    for name in baselines:
        require(name)
    n, n_queries, k = (positive(f"--{name}", getattr(args, name.replace("-", "_"))) for name in ("n", "n-queries", "k"))
    if args.quick:
        n, n_queries = 2000, 10
    passages = make_passages(n, args.seed)
    queries = make_queries(passages, n_queries, args.seed)
    with tempfile.TemporaryDirectory(prefix="espnx-bench-postings-", dir=args.path) as made, ExitStack() as opened:
        folder = Path(made)
        for name in ("espnx", *baselines):
            say(f"building {name}")
            build(name, folder, passages)
        expected = {rule: _expected(folder, queries, k, rule) for rule in (RULE, FTS5_RULE)}
        rules = {name: FTS5_RULE if name == "fts5" else RULE for name in ("espnx", *baselines)}
        systems = {name: open_system(name, folder, queries, k, expected[rule]) for name, rule in rules.items()}
        for system in systems.values():
            opened.callback(system.close)
        params = {"passages": n, "queries": n_queries, "k": k}
        others = [systems[name] for name in baselines]
        return compare("postings", params, [systems["espnx"]], others, pairs=args.pairs, seed=args.seed, say=say)


def _expected(folder: Path, queries: Sequence[list[str]], k: int, rule: BM25) -> Any:
    """(numbers, scores) by the lists decoded whole and summed in an array of all passages: no scan, no window, no threshold."""
    import numpy as np

    from espnx.postings import Postings
    from espnx.postings.stored.lists import read_lists
    from espnx.postings.stored.terms import hashes_of

    scores, numbers = np.full((len(queries), k), -np.inf, np.float32), np.full((len(queries), k), -1, np.int64)
    with Postings.open(folder / "espnx") as postings:
        (segment,) = postings.searcher.collection.segments
        lengths = segment.length_table[segment.codes.numpy()]
        norms = rule.norms(lengths, postings.searcher.collection.average_length)
        terms = sorted({term.encode() for query in queries for term in query})
        numbered = zip(terms, segment.look_up(terms, hashes_of(terms)).tolist(), strict=True)
        found = {term: number for term, number in numbered if number >= 0}
        lists = {term: next(read_lists(postings.searcher.engine, segment, number, number + 1)) for term, number in found.items()}
        for row, query in enumerate(queries):
            sums = np.zeros(len(postings), np.float32)
            for part in (lists[term.encode()] for term in query if term.encode() in lists):
                idf = np.float64(np.float32(rule.idf(len(part.records), len(postings))))
                sums[part.records] += (idf * rule.part(part.values, norms[part.records])).astype(np.float32)
            best = np.lexsort((np.arange(len(sums)), -sums))[:k]
            best = best[sums[best] > 0]
            scores[row, : len(best)], numbers[row, : len(best)] = sums[best], best
    return numbers, scores


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    shown = [name for name in BASELINES if name in baselines_of(rows)]
    headers = [
        "passages",
        "system",
        "path",
        "cache",
        "ms",
        "p99 ms",
        "CPU ms",
        "requests",
        "asked KB",
        "moved KB",
        "index MB",
        "n",
        "correct",
    ]
    cells = [
        [
            f"{row.params['passages']:,}", row.system, row.effective_path, row.cache, number(row.median_s, 1e-3, 3), metric("p99_ms")(row),
            metric("cpu_ms", 1, 3)(row), metric("requests", 1, 1)(row), metric("asked_bytes", 1e3, 1)(row),
            number(row.bytes_moved if row.n else None, 1e3, 1), metric("index_bytes", 1e6, 1)(row), str(row.n),
            "yes" if row.correct else "NO",
            *(ratio(row, name) for name in shown),
        ]
        for row in rows
    ]  # fmt: skip
    return headers + [f"vs {name} [IQR]" for name in shown], cells


CASE = Case("postings", "BM25 from SSD with a cold cache, beside bm25s, Tantivy, FTS5 and mmap", configure, run, table)
