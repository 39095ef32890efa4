"""``espnx bench hybrid``: BM25, SPLADE and MaxSim over one index, alone and fused, judged on a test
collection."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from espnx.errors import InvalidInputError

from ..harness.registry import Case, Say
from ..harness.result import Row

SHOWS = ("rankings", "candidates", "stages", "overlap")
#: Of one vector a document, which can be compared.
STAGES = ("ivf", "graph", "clusters")
DESCRIPTION = """One index of a test collection with five first stages: BM25 and SPLADE from posting
lists on SSD, inverted lists in memory, and a graph and clusters on SSD over CLS vectors, whose
candidates MaxSim ranks. Quality by the collection's judgements.

rankings: those of BM25, SPLADE and MaxSim alone, reciprocal rank fusion (k = 60, nothing fitted) of
two and of all three, and MaxSim over the union of what the three find. Fused searches are compared
with what fusing the rankings by hand gives. The difference from the best of the three alone comes
with the interval of a paired bootstrap. candidates: MaxSim over 50 to 1,000 candidates of the
inverted lists, the graph, and the clusters (--stages); scores are compared with a search of all
documents. stages: the same first stages at equal recall, each with the least effort that finds
0.90, 0.95 and 0.98 of the 100 nearest. overlap: what BM25, SPLADE and the inverted lists take to
find all that they find, alone and together, nothing re-ranked and without encoding; beside the sum
of their CPU over two cores plus the longest wait of one of them.

  espnx bench hybrid --path /mnt/ssd/bench --collection cranfield \\
      --json benchmarks/results/hybrid.json
  espnx bench hybrid --path /mnt/ssd/bench --collection cranfield --show candidates
  espnx bench hybrid --path /mnt/ssd/bench --collection cranfield --show stages \\
      --stages graph,clusters
  # does everything work here?
  espnx bench hybrid --quick

Times are of one query after the other, past the page cache where the file system allows it;
encoding is timed apart, and in the time. --pairs is how often all queries are asked."""


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
        "--collection",
        metavar="FOLDER",
        help="in BEIR's form: corpus.jsonl, queries.jsonl, qrels.tsv",
    )
    add("--show", choices=SHOWS, default=SHOWS[0], help="(default: %(default)s)")
    add(
        "--stages",
        default=",".join(STAGES),
        metavar="S,...",
        help="first stages of one vector a document to compare (default: %(default)s)",
    )
    add("--encoder", default="minilm", metavar="M", help="of token vectors (default: %(default)s)")
    add("--sparse-encoder", default="splade-tiny", metavar="M", help="(default: %(default)s)")


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises what reading, building and searching raise."""
    from .measure import measure

    if args.collection is None and not args.quick:
        raise InvalidInputError(
            "--collection", got="none", expected="a folder in BEIR's form", fix="or --quick"
        )
    stages = args.stages.split(",")
    if unknown := [stage for stage in stages if stage not in STAGES]:
        raise InvalidInputError("--stages", got=", ".join(unknown), expected=", ".join(STAGES))
    return measure(
        args.path,
        args.collection,
        args.encoder,
        args.sparse_encoder,
        args.show,
        stages,
        1 if args.quick else args.pairs,
        say,
    )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """A table of rows of one show: those of the first."""
    from .candidates import candidates_table
    from .overlap import overlap_table
    from .stages import stages_table

    # results of before there were others
    shows = [row.params.get("show", "rankings") for row in rows]
    show = shows[0] if rows else "rankings"
    tables = {
        "candidates": candidates_table,
        "overlap": overlap_table,
        "rankings": _rankings_table,
        "stages": stages_table,
    }
    return tables[show]([row for row, own in zip(rows, shows, strict=True) if own == show])


def _rankings_table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "ranking", "nDCG@10", "recall@100", "nDCG@10 beyond the best alone (95 %)", "ms a query",
        "of that encoding", "KiB read", "right",
    ]  # fmt: skip
    return headers, [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    found = row.metrics
    beyond = (
        f"{found['beyond']:+.4f} ({found['beyond_low']:+.4f} to {found['beyond_high']:+.4f})"
        if "beyond" in found
        else ""
    )
    timed = row.median_s is not None
    return [
        row.system,
        f"{found['ndcg_10']:.4f}",
        f"{found['recall_100']:.4f}",
        beyond,
        f"{1e3 * (row.median_s or 0):.1f}" if timed else "",
        f"{1e3 * found['encode_s']:.1f}" if timed else "",
        f"{row.bytes_moved / 1024:,.0f}" if timed else "",
        "yes" if row.correct else "NO",
    ]


def leaves(directory: Path) -> list[Path]:
    """The index, which the next run takes again."""
    return sorted(directory.glob("hybrid-*"))


CASE = Case(
    "hybrid",
    "BM25, SPLADE and MaxSim over one index, alone and fused",
    configure,
    run,
    table,
    leaves=leaves,
)
