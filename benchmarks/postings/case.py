"""``espnx bench postings``: BM25 from SSD, one query at a time, cache cold, beside bm25s, Tantivy,
FTS5 and mmap of the same lists."""

from __future__ import annotations

import tempfile
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from contextlib import ExitStack
from pathlib import Path

from espnx.errors import PathUnavailableError
from espnx.sizes import parse_size

from ..harness.arguments import choices, positive
from ..harness.registry import Case, Say
from ..harness.result import Row, untimed
from .names import BASELINES, NOT_INSTALLED, PEERS
from .tables import learned, sizes, table

DESCRIPTION = """Passages by recipe: half of the words by Zipf's law (1.05) over 200,000 terms, half
of one of 2,000 topics, 46.6 words. Ranks 1 to 160 of the law are left out, as by a list of stop
words. Queries have about four words of one passage, drawn by df^0.55. So a million passages have
39.9 million postings, and a query meets about 25,000 of them in all its lists, one in twenty 58,000
or more. With the first ranks in, lists of the whole corpus outweigh all others: the same queries
would meet 1.4 million postings.

Every system builds an index and is asked one query after the other in a process of its own, whose
memory is limited, its page cache included; before each query the page cache of its files is
dropped, but of bm25s-memory (its default backend) and bm25s-numba. Scores of espnx, mmap-willneed
and bm25s must be bm25s's; Tantivy rounds lengths and FTS5 has a formula of its own: both must find
most of the same. A time is the mean of a query. Tantivy's time is that of its search, without the
stored number of each hit.

  espnx bench postings --path /mnt/nvme --baseline mmap-willneed,bm25s-mmap,tantivy \\
      --json postings.json
  # builds and keeps them
  espnx bench postings --n 1000000 --indexes /mnt/nvme/indexes --build-only
  # measures with those
  espnx bench postings --n 1000000 --indexes /mnt/nvme/indexes --pairs 7
  # does everything work here?
  espnx bench postings --quick

--show splade: real vectors of a small SPLADE model, of texts of a collection and of docstrings, and
as many as are wanted mixed of those: terms of one to three real ones, half of the weights drawn
from those that their terms have elsewhere. Queries are real ones, recall is of the best by float32
sums.

  espnx bench postings --show splade --n 200000 --collection cranfield --steps 0:8:200,8:16:50

Tantivy, bm25s and numba: pip install -c constraints.txt 'espnx[peers]'; a row of what is missing
says so. Nothing stays on disk unless --indexes says where."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the SSD (default: the current one)",
    )
    add(
        "--show",
        choices=("bm25", "splade"),
        default="bm25",
        help="what is measured (default: %(default)s)",
    )
    add(
        "--baseline",
        metavar="B,...",
        default="mmap-willneed,bm25s-mmap,fts5",
        help=f"of {', '.join(BASELINES)} (default: %(default)s)",
    )
    add("--n", metavar="N", default="100000", help="passages (default: %(default)s)")
    add("--n-queries", metavar="N", default="200", help="(default: %(default)s)")
    add("-k", metavar="K", default="10", help="records of each query (default: %(default)s)")
    add(
        "--memory",
        metavar="SIZE",
        default="auto",
        help="of each process: a size, ample, or auto: 1GiB where it can be limited (root)",
    )
    add(
        "--indexes",
        metavar="DIR",
        help="a folder that keeps passages and indexes, and whose are used again",
    )
    add(
        "--collection",
        metavar="FOLDER",
        help="splade: in BEIR's form; its queries are asked (default: first lines of docstrings)",
    )
    add(
        "--n-real",
        metavar="N",
        default="6000",
        help="splade: texts that are encoded (default: %(default)s)",
    )
    add(
        "--sparse-encoder", default="splade-tiny", metavar="M", help="splade (default: %(default)s)"
    )
    add(
        "--steps",
        metavar="W:T:C,...",
        default="8:16:50",
        help="splade: T terms, W by whole lists, give C candidates (default: %(default)s)",
    )
    add(
        "--peers",
        metavar="P,...",
        default=",".join(PEERS),
        help="splade: beside it, in memory without a limit (default: %(default)s)",
    )
    add("--build-only", action="store_true", help="with --indexes: build them, measure nothing")


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises InvalidInputError, PathUnavailableError (no limit here), and what building
    and searching raise."""
    from ..harness.runner import compare
    from .fleet import Fleet, Indexes
    from .learned_case import measure
    from .systems import index_of, missing

    wanted = choices(args.baseline, BASELINES, "baseline")
    baselines = [name for name in wanted if not missing(name)]
    n, n_queries, k = (
        positive(f"--{name}", getattr(args, name.replace("-", "_")))
        for name in ("n", "n-queries", "k")
    )
    if args.quick:
        n, n_queries = 2000, 10
    limit_bytes = _limit(args.memory, say)
    with ExitStack() as opened:
        folder = Path(
            args.indexes
            or opened.enter_context(
                tempfile.TemporaryDirectory(prefix="espnx-bench-postings-", dir=args.path)
            )
        ).absolute()
        folder.mkdir(exist_ok=True)
        if args.show == "splade":
            return measure(args, folder, limit_bytes, say)
        indexes = Indexes(folder, n, n_queries, args.seed, say)
        indexes.build(map(index_of, ["espnx", *baselines]))
        if args.build_only:
            return []
        indexes.expect(k)
        params = {
            "show": "bm25",
            "passages": n,
            "queries": n_queries,
            "k": k,
            "memory": limit_bytes or "ample",
            **indexes.facts,
        }
        ours, *others = opened.enter_context(
            Fleet(indexes, ["espnx", *baselines], k, limit_bytes)
        ).systems
        rows = compare(
            "postings", params, [ours], others, pairs=args.pairs, seed=args.seed, say=say
        )
    absent = [
        untimed(
            "postings", {**params, "missing": missing(name)}, name, path=NOT_INSTALLED, cache="cold"
        )
        for name in wanted
        if name not in baselines
    ]
    return rows + absent


def _limit(words: str, say: Say) -> int | None:
    from ..machine.cgroup import check_limit_possible

    if words == "ample":
        return None
    size_bytes = 1 << 30 if words == "auto" else parse_size(words)
    try:
        check_limit_possible(size_bytes)
    except PathUnavailableError as error:
        if words != "auto":
            raise
        say(f"The memory of the processes is NOT limited: {error}")
        return None
    return size_bytes


CASE = Case(
    "postings",
    "BM25 from SSD with a cold cache, beside bm25s, Tantivy, FTS5 and mmap",
    configure,
    run,
    table,
    views={"sizes": sizes, "splade": learned},
)
