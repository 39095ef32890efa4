"""``espnx graph build|import|export|advise``: graphs of vectors, and of another program's files."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import Any

from ....checks import check_given_directory
from ....errors import InvalidInputError
from ...output import add_json_option, emit, json_document
from ...plans.graph import check_build_memory

# Options of the command line are those of the functions, by name.
_SHARED_OPTIONS = ("codes", "num_entry_points", "threads", "seed", "column", "replace")
_BUILD_OPTIONS = (
    "metric", "max_degree", "list_size", "alpha", "inline_pq", "pq_bytes", "vector_dtype",
    "disk_pq_bytes", "use_opq", "device", "memory", "clusters", "max_points",
    "replicas", "directories",
)  # fmt: skip
_ADVISE_OPTIONS = (
    "queries", "k", "recall", "path", "metric", "in_flight", "sample", "folds", "threads", "seed",
    "column",
)  # fmt: skip
_IMPORT_OPTIONS = ("vectors", "data_type", "metric", "order")


def _add_shared_options(parser: argparse.ArgumentParser) -> None:
    """What every way to make a graph has."""
    parser.add_argument(
        "--codes",
        default="inline",
        choices=("inline", "paged", "memory"),
        help=(
            "where codes lie: beside each node, so that memory does not grow with the vectors; in "
            "pages of their own, a smaller folder and more reads; in memory, few reads (default: "
            "inline)"
        ),
    )
    parser.add_argument(
        "--num-entry-points",
        type=int,
        default=1000,
        metavar="N",
        help="where searches may begin (default: 1000)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that work (default: as many as torch uses)"
    )
    parser.add_argument(
        "--seed",
        type=int,
        default=0,
        help="of samples, entry points and the order of insertion (default: 0)",
    )
    parser.add_argument(
        "--column", help="of a Parquet file of vectors (default: its only one of lists)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="publish over the graph that is there"
    )


def _chosen(args: argparse.Namespace, *names: str) -> dict[str, Any]:
    return {name: getattr(args, name) for name in names}


def _add_cluster_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--clusters",
        type=int,
        metavar="N",
        help=(
            "a graph for each of so many clusters, of which searches go through the near ones: for "
            "more vectors than one graph is built of (default: one graph)"
        ),
    )
    parser.add_argument(
        "--max-points",
        type=int,
        metavar="N",
        help="vectors of a cluster, at most (default: twice the mean)",
    )
    parser.add_argument(
        "--replicas",
        type=float,
        default=0.0,
        metavar="SHARE",
        help=(
            "vectors, as a share of all, that are in two clusters: those nearest to a border "
            "(default: none)"
        ),
    )
    parser.add_argument(
        "--directory",
        dest="directories",
        action="append",
        metavar="DIR",
        help=(
            "put the clusters' pages there, one per SSD; may be repeated (default: into the "
            "graph's directory)"
        ),
    )


def configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "vectors", help="a file: .npy, .fvecs, .bvecs, .fbin, .u8bin, .i8bin or .parquet"
    )
    parser.add_argument("graph", help="a new directory, or with --replace that of a graph")
    parser.add_argument(
        "--metric", default="l2", choices=("l2", "ip", "cosine"), help="what is near (default: l2)"
    )
    parser.add_argument(
        "--max-degree", type=int, default=64, metavar="R", help="neighbours of a node (default: 64)"
    )
    parser.add_argument(
        "--list-size",
        "--search-list-size",
        type=int,
        default=100,
        metavar="L",
        help="candidates of the build's walks (default: 100)",
    )
    parser.add_argument(
        "--alpha",
        type=float,
        default=1.2,
        help="how far apart the neighbours of a node are kept (default: 1.2)",
    )
    _add_shared_options(parser)
    parser.add_argument(
        "--inline-pq",
        type=int,
        metavar="N",
        help=(
            "where codes are paged or in memory: neighbours whose codes lie beside each node all "
            "the same; -1: as many as fill a page"
        ),
    )
    parser.add_argument(
        "--pq-bytes", type=int, metavar="N", help="of a code (default: as many as fill a page)"
    )
    parser.add_argument(
        "--no-opq",
        dest="use_opq",
        action="store_false",
        help=(
            "codes of the vectors as they are: by default of rotated ones, where these say more of "
            "them"
        ),
    )
    parser.add_argument(
        "--vector-dtype",
        default="auto",
        choices=("auto", "float32", "float16", "bfloat16", "uint8", "int8", "pq"),
        help=(
            "as vectors are stored; pq: codes in their place, see --disk-pq-bytes (default: whole "
            "numbers as they come, else float16)"
        ),
    )
    parser.add_argument(
        "--disk-pq-bytes",
        type=int,
        metavar="N",
        help=(
            "codes of so many bytes in place of vectors: a smaller folder; the report says to what "
            "share of the nearest that limits searches"
        ),
    )
    parser.add_argument(
        "--device",
        default="cpu",
        help="that builds edges and codes: cpu, or cuda, where cuVS does (default: cpu)",
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help=(
            "that the build may take in all, such as 2GiB: it works in parts, and goes on where it "
            "was interrupted (default: as much as it takes)"
        ),
    )
    _add_cluster_options(parser)
    add_json_option(parser)


def run_build(args: argparse.Namespace) -> int:
    check_build_memory(args.memory)
    check_given_directory(args.graph)
    if not os.path.exists(args.vectors):
        raise InvalidInputError(
            f"vectors {args.vectors}",
            got="no such file",
            expected="a file of vectors, such as .npy or .fbin",
        )
    from ....graph import build
    from ...progress import ProgressLine

    with ProgressLine() as line:
        report = build(
            args.vectors,
            args.graph,
            **_chosen(args, *_BUILD_OPTIONS, *_SHARED_OPTIONS),
            progress=line.update,
        )
    emit(args, report.summary(), json_document("graph build", **asdict(report)))
    return 0


def configure_import(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "prefix",
        help=(
            "of the index's files: PREFIX_disk.index, PREFIX_pq_pivots.bin, "
            "PREFIX_pq_compressed.bin"
        ),
    )
    parser.add_argument("graph", help="a new directory, or with --replace that of a graph")
    parser.add_argument(
        "--vectors",
        metavar="FILE",
        help="what an index was built from whose nodes have codes: to have these instead",
    )
    parser.add_argument(
        "--data-type",
        choices=("float32", "uint8", "int8"),
        help="of its vectors (default: as PREFIX_metadata.bin says)",
    )
    parser.add_argument(
        "--metric",
        choices=("l2", "ip"),
        help="of the index (default: as PREFIX_metadata.bin says, else l2)",
    )
    parser.add_argument(
        "--order",
        default="packed",
        choices=("packed", "given"),
        help="of nodes in pages: as build packs them, or by number (default: packed)",
    )
    _add_shared_options(parser)
    add_json_option(parser)


def run_import(args: argparse.Namespace) -> int:
    from ....graph import import_diskann
    from ...progress import ProgressLine

    with ProgressLine() as line:
        report = import_diskann(
            args.prefix,
            args.graph,
            **_chosen(args, *_IMPORT_OPTIONS, *_SHARED_OPTIONS),
            progress=line.update,
        )
    emit(args, report.summary(), json_document("graph import", **asdict(report)))
    return 0


def configure_export(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` or `import` has made")
    parser.add_argument("prefix", help="of new files, which DiskANN and diskannpy read")
    add_json_option(parser)


def run_export(args: argparse.Namespace) -> int:
    from ....graph import export_diskann

    report = export_diskann(args.graph, args.prefix)
    emit(args, report.summary(), json_document("graph export", **asdict(report)))
    return 0


def configure_advise(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("vectors", help="a file of vectors, as for build")
    add(
        "--queries",
        metavar="FILE",
        help="of those that will be asked (default: vectors that the samples do not hold)",
    )
    add("-k", "--k", type=int, default=10, metavar="K", help="neighbours of each (default: 10)")
    add(
        "--recall",
        type=float,
        default=0.95,
        metavar="R",
        help="share of them that is to be found (default: 0.95)",
    )
    add(
        "--path",
        default=".",
        metavar="DIR",
        help="on the disk in question, for indexes that are gone afterwards (default: here)",
    )
    add("--metric", default="l2", choices=("l2", "ip", "cosine"), help="what is near (default: l2)")
    add(
        "--in-flight",
        type=int,
        default=64,
        metavar="N",
        help="queries under way at a time; 1: what counts is how long one waits (default: 64)",
    )
    add(
        "--sample",
        type=int,
        metavar="N",
        help="vectors of a sample (default: 16384, or as many as 64 MiB hold)",
    )
    add("--folds", type=int, default=3, metavar="N", help="samples, 2 or more (default: 3)")
    add("--threads", type=int, metavar="N", help="of builds (default: as many as torch uses)")
    add("--seed", type=int, default=0, help="of samples and builds (default: 0)")
    add("--column", help="of a Parquet file")
    add_json_option(parser)


def run_advise(args: argparse.Namespace) -> int:
    from ....clusters.advice import advise
    from ...progress import ProgressLine

    with ProgressLine() as line:
        advice = advise(args.vectors, **_chosen(args, *_ADVISE_OPTIONS), progress=line.update)
    emit(args, advice.summary(), json_document("graph advise", **asdict(advice)))
    return 0
