"""``espnx bench additions``: what many additions of one document cost a large store."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path

from ..harness.registry import Case, Say
from ..harness.result import Row

DESCRIPTION = """A store of random vectors (8 tokens of 32 dimensions, CLS of 128, fp16) is built
below --path; then documents are added one by one, each by a call of espnx.add of its own, beside an
index that is open. The process may open at most --open-files files all the while, those of the
interpreter included. At the end a new index must find every document that was added.

  espnx bench additions --path /mnt/ssd/bench --json benchmarks/results/retrieval-additions.json
  espnx bench additions --quick                                       does everything work here?

The store is kept; the next run adds to it. --pairs is not used."""


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
        "--docs",
        type=int,
        metavar="N",
        default=1_000_000,
        help="of the store (default: 1000000; with --quick 2000)",
    )
    add(
        "--additions",
        type=int,
        metavar="N",
        default=1000,
        help="of one document each (default: 1000; with --quick 40)",
    )
    add(
        "--open-files",
        type=int,
        metavar="N",
        default=40,
        help="that the process may have at a time (default: 40)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises what building, adding and searching raise."""
    from .measure import measure

    docs, additions = (2000, 40) if args.quick else (args.docs, args.additions)
    return [measure(args.path, docs, additions, args.open_files, say)]


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "documents",
        "additions",
        "CPU in all",
        "time of one, p50 / p99",
        "written by one, p50 / mean / p99",
        "parts",
        "correct",
    ]
    return headers, [_cells(row) for row in rows]


def _cells(row: Row) -> list[str]:
    found = row.metrics
    written = " / ".join(
        f"{found[f'written_bytes_{name}'] / 1024:.0f}" for name in ("p50", "mean", "p99")
    )
    return [
        f"{row.params['docs']:,}",
        f"{row.params['additions']:,}",
        f"{found['cpu_s']:.1f} s",
        f"{1e3 * (row.median_s or 0):.0f} / {1e3 * (row.p99_s or 0):.0f} ms",
        f"{written} KiB",
        f"{found['parts']:.0f}",
        "yes" if row.correct else "NO",
    ]


def leaves(directory: Path) -> list[Path]:
    """The store that is added to."""
    return (
        [directory / "additions"] if (directory / "additions" / "MANIFEST.json").is_file() else []
    )


CASE = Case(
    "additions",
    "many additions of one document: processor time, bytes written, open files",
    configure,
    run,
    table,
    leaves=leaves,
)
