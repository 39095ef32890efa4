"""``espnx bench retrieval``: search from SSD beside search in memory, mmap and no prefetch, on
corpora of any size."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from pathlib import Path

from ..harness.registry import Case, Say
from ..harness.result import Row
from .names import SHOWS, THROTTLED
from .table import by_memory, by_size, table

DESCRIPTION = """Searches a corpus by espnx and by baselines that share its first stage, its MaxSim
kernel and its cores; each runs in a process of its own. Rankings are compared with plain PyTorch
first. Then all take turns, query by query, in shuffled order; a ratio is the median over the
queries of the baseline's time over ours (above 1: ours is faster).

  # 20,000 documents: does everything work here?
  espnx bench retrieval --path /mnt/nvme --quick
  # the table: exact, and 64 re-ranked
  espnx bench retrieval --path /mnt/nvme --corpus A,B,C --memory ample,1GiB
  espnx bench retrieval --path /mnt/nvme --show batches,hit-rate --corpus B
  # below, at and above the size that memory holds
  espnx bench retrieval --path /mnt/nvme --show sizes \\
      --docs 62500,125000,250000,500000,1000000,2000000 --memory 1GiB
  # on a slower disk, and what it was asked
  espnx bench retrieval --path /mnt/nvme --throttle 800MB/s --record traces
  # nDCG@10, MRR@10, recall@100 by format
  espnx bench retrieval --path /mnt/nvme --show formats --dataset DIR

Corpora are made once, below --path, a few minutes for each million documents: A, copies of real
passages (docstrings, encoded here); B, a mixture of 20,000 topics; C, one of 50,000 overlapping
topics, which needs a sixth of the lists."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--path",
        metavar="DIR",
        default=".",
        help=(
            "a directory on the disk to measure; corpora are kept there (default: the current one)"
        ),
    )
    add(
        "--show",
        metavar="S,...",
        default="table",
        help=f"what to measure: {', '.join(SHOWS)} (default: table)",
    )
    add(
        "--corpus",
        metavar="C,...",
        default="B",
        help="A, B, C, or the folder of a store that is there (default: B)",
    )
    add(
        "--docs",
        metavar="N,...",
        default="1000000",
        help="documents of A, B, C; all but sizes take the first number (default: 1000000)",
    )
    add(
        "--base",
        type=int,
        default=60_000,
        metavar="N",
        help="real documents that A is made of (default: 60000)",
    )
    add(
        "--dataset",
        metavar="DIR",
        help="a labelled collection: corpus.jsonl, queries.jsonl, qrels.tsv (formats, cascade)",
    )
    add(
        "--encoder",
        default="minilm",
        metavar="E",
        help="of the dataset: minilm, or the folder of a model (default: minilm)",
    )
    add(
        "--pca",
        type=int,
        default=128,
        metavar="D",
        help=(
            "dimensions that the dataset's token vectors are projected to, for comparison "
            "(default: 128)"
        ),
    )
    add(
        "--memory",
        metavar="M,...",
        default="ample",
        help="limit of each process: ample, or sizes such as 1GiB (root; default: ample)",
    )
    add(
        "--baseline",
        metavar="B,...",
        default="memory,mmap-1,mmap-2,mmap-8,mmap-willneed",
        help="memory, mmap-N, mmap-willneed, swap",
    )
    add(
        "--prefetch-step",
        metavar="P,...",
        default="0,0.3,auto",
        help="each a system: 0, 0.3, 0.05+0.1+0.2, auto (default: 0,0.3,auto)",
    )
    _add_searching(parser)


def _add_searching(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--nprobe",
        metavar="N",
        default="auto",
        help="lists to scan: auto, a number, or a recall such as 0.95 (default: auto)",
    )
    add(
        "--candidates",
        type=int,
        default=1000,
        metavar="N",
        help="of the first stage (default: 1000)",
    )
    add(
        "--rerank",
        metavar="N,...",
        default="all,64",
        help="how many are scored exactly: all, or numbers (default: all,64)",
    )
    add(
        "--batch",
        metavar="N,...",
        default="1",
        help="queries of a search (default: 1; batches: 1,4,12,48,192)",
    )
    add(
        "--threads",
        type=int,
        metavar="N",
        help="of the first stage, in every system (default: the index's own choice)",
    )
    add(
        "--first-stage-code",
        default="sq8",
        help="code of the corpora's first stage: flat, sq8, sq6, pq32 (default: sq8)",
    )
    add(
        "--format",
        metavar="F,...",
        help="record formats, or all (other measurements take the first; default: fp16)",
    )
    add(
        "--coarse",
        default="bit1",
        metavar="F",
        help=(
            "format of the coarse tier, for the cascade: bit1, residual1, ..., none (default: bit1)"
        ),
    )
    add(
        "--cascade",
        metavar="N,...",
        default="64",
        help="full records scored after all coarse ones (cascade, formats; default: 64)",
    )
    add(
        "--layout",
        metavar="L,...",
        default="list,id",
        help="order of the records, for --show layout: list, id (default: both)",
    )
    add("--queries", type=int, default=100, metavar="N", help="measured queries (default: 100)")
    add(
        "--record",
        metavar="DIR",
        help="table: espnx a second time, which writes a trace into DIR (espnx-recorded.trace)",
    )
    add("--engine", default="auto", help="of the record reads: auto, uring, posix (default: auto)")
    add(
        "--throttle",
        metavar="RATE",
        help=f"slow the disk down, such as 800MB/s (root, cgroup v1); {', '.join(THROTTLED)} alone",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures what `--show` names. Raises InvalidInputError, PathUnavailableError (no memory
    limits here), DiskFullError."""
    from .options import read_options
    from .sweeps import measure_shows

    return measure_shows(read_options(args), say)


def leaves(directory: Path) -> list[Path]:
    """Corpora, stores of datasets, and the passages that corpus A is made of."""
    corpora = [note.parent for note in directory.glob("*/CORPUS.json")]
    datasets = [manifest.parent for manifest in directory.glob("dataset-*/MANIFEST.json")]
    bases = [*directory.glob("base-*-slices*.safetensors")]
    return [*corpora, *datasets, *bases, *(directory.glob("docstrings.jsonl") if bases else ())]


CASE = Case(
    "retrieval",
    "multi-vector search from SSD, beside memory, mmap and no prefetch",
    configure,
    run,
    table,
    views={"by-memory": by_memory, "by-size": by_size},
    leaves=leaves,
)
