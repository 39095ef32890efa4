"""``espnx clusters``: lists of vectors on SSD (SPANN), built, searched, shown and verified."""

from __future__ import annotations

import argparse
import os
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...checks import check_given_directory
from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..device_options import add_device_options, devices_of
from ..output import add_json_option, emit, json_document
from .graph import recall_of, results_of

if TYPE_CHECKING:
    from ...clusters import ClusterReport

_SHOWN = 10
# Options of the command line are those of the functions, by name.
_BUILD_OPTIONS = (
    "metric", "n_lists", "heads_share", "list_bytes", "page_bytes", "replicas", "packing",
    "vector_dtype", "heads", "memory", "threads", "seed", "column", "replace",
)  # fmt: skip
_PLAN_OPTIONS = (
    "vector_dtype", "heads_share", "n_lists", "list_bytes", "page_bytes", "copies", "probed",
    "heads",
)  # fmt: skip
_DIRECTORY = "that `espnx clusters build` has made"


def _add_shape_options(parser: argparse.ArgumentParser) -> None:
    """What a build and a plan have."""
    parser.add_argument(
        "--heads-share",
        type=float,
        default=0.125,
        metavar="SHARE",
        help="lists to begin with, as a share of the vectors (default: 0.125)",
    )
    parser.add_argument(
        "--n-lists", type=int, metavar="N", help="instead: how many (default: by --heads-share)"
    )
    parser.add_argument(
        "--list-bytes",
        type=int,
        default=12288,
        metavar="B",
        help="of a list, at most: a longer one is split (default: 12288)",
    )
    parser.add_argument(
        "--page-bytes",
        type=int,
        default=4096,
        metavar="B",
        help="of a page of flash, which small lists share (default: 4096)",
    )
    parser.add_argument(
        "--heads",
        default="memory",
        choices=("memory", "graph"),
        help=(
            "where a query's lists are found: in memory, or in a graph on storage, so that memory "
            "does not grow with the lists (default: memory)"
        ),
    )


def configure_build(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "vectors", help="a file: .npy, .fvecs, .bvecs, .fbin, .u8bin, .i8bin or .parquet"
    )
    parser.add_argument("clusters", help="a new directory, or with --replace that of lists")
    parser.add_argument(
        "--metric", default="l2", choices=("l2", "ip", "cosine"), help="what is near (default: l2)"
    )
    _add_shape_options(parser)
    parser.add_argument(
        "--replicas",
        type=int,
        default=8,
        metavar="N",
        help="lists that a vector is in, at most (default: 8)",
    )
    parser.add_argument(
        "--packing",
        default="co-access",
        choices=("order", "best-fit", "co-access"),
        help=(
            "which lists share a page: those of successive numbers, those that fill it best, those "
            "that are read together (default: co-access)"
        ),
    )
    parser.add_argument(
        "--queries",
        metavar="FILE",
        help="vectors like those that will be asked: lists that they read together share pages",
    )
    parser.add_argument(
        "--vector-dtype",
        default="auto",
        choices=("auto", "float32", "float16", "uint8", "int8"),
        help=(
            "as vectors are stored; int8 rounds others to 255 steps (default: whole numbers as "
            "they come, else float16)"
        ),
    )
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="that the build may take, such as 2GiB (default: half of what is free)",
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that work (default: as many as torch uses)"
    )
    parser.add_argument(
        "--seed", type=int, default=0, help="of samples and clustering (default: 0)"
    )
    parser.add_argument(
        "--column", help="of a Parquet file of vectors (default: its only one of lists)"
    )
    parser.add_argument(
        "--replace", action="store_true", help="publish over the lists that are there"
    )
    add_json_option(parser)


def run_build(args: argparse.Namespace) -> int:
    check_given_directory(args.clusters)
    if not os.path.exists(args.vectors):
        raise InvalidInputError(
            f"vectors {args.vectors}",
            got="no such file",
            expected="a file of vectors, such as .npy or .fbin",
        )
    from ...clusters import build
    from ..progress import ProgressLine

    chosen = {name: getattr(args, name) for name in _BUILD_OPTIONS}
    asked = None if args.queries is None else _vectors_of(args.queries, None)
    with ProgressLine() as line:
        report: ClusterReport = build(
            args.vectors, args.clusters, **chosen, queries=asked, progress=line.update
        )
    emit(args, report.summary(), json_document("clusters build", **asdict(report)))
    return 0


def _vectors_of(path: str, column: str | None) -> Any:
    import numpy as np

    from ...graph import read_vectors

    blocks = read_vectors(path, column=column).blocks()
    return np.concatenate([np.asarray(each) for each in blocks])


def configure_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("clusters", help=_DIRECTORY)
    parser.add_argument("queries", help="a file of vectors, as for build")
    parser.add_argument("-k", type=int, default=10, help="neighbours of each (default: 10)")
    parser.add_argument(
        "--n-lists",
        "--nprobe",
        type=int,
        default=32,
        metavar="N",
        help="lists that are read for a query, at most (default: 32)",
    )
    parser.add_argument(
        "--max-dist-ratio",
        type=float,
        metavar="R",
        help=(
            "of these only lists whose head is at most so many times as far as the nearest, by "
            "squared distance (default: all)"
        ),
    )
    parser.add_argument(
        "--threads", type=int, metavar="N", help="that measure (default: as many as torch uses)"
    )
    parser.add_argument(
        "--ground-truth",
        metavar="FILE",
        help="ids of the true neighbours, .npy [q, k or more]: says the recall",
    )
    parser.add_argument("--column", help="of a Parquet file")
    add_device_options(parser)
    add_json_option(parser)


def run_search(args: argparse.Namespace) -> int:
    from ...clusters import ClusterIndex
    from ...device.near_storage import NearStorageDevice

    queries = _vectors_of(args.queries, args.column)
    with devices_of(args, [args.clusters]) as devices:
        given = (
            devices
            if devices is None or isinstance(devices, (str, NearStorageDevice))
            else devices[0]
        )
        with ClusterIndex(args.clusters, device=given, threads=args.threads) as index:
            found = index.search(
                queries, args.k, n_lists=args.n_lists, max_dist_ratio=args.max_dist_ratio
            )

    def mean(values: Any) -> float:
        return float(values.mean()) if len(queries) else 0.0

    facts: dict[str, Any] = {
        "queries": len(queries),
        "k": args.k,
        "lists_mean": mean(found.lists),
        "pages_mean": mean(found.pages),
        "page_bytes": found.page_bytes,
        "requests_mean": mean(found.requests),
        "bytes_mean": mean(found.bytes_moved),
        "rounds_mean": mean(found.rounds),
        "head_pages_mean": mean(found.head_pages),
    }
    if args.ground_truth is not None:
        facts["recall"] = recall_of(found.ids, args.ground_truth)
    rows, results = results_of(found, _SHOWN)
    shown = (
        f"{len(queries):,} queries, {facts['lists_mean']:.1f} lists on {facts['pages_mean']:.1f} "
        f"pages of {format_size(found.page_bytes)} ({format_size(round(facts['bytes_mean']))} "
        f"read) a query"
    )
    if "recall" in facts:
        shown += f", recall@{args.k} {facts['recall']:.4f}"
    left = f"\nthe first {_SHOWN} are shown" if len(queries) > _SHOWN else ""
    columns = ("query", "rank", "id", "distance")
    text = render_table(columns, rows, right=columns) + f"\n{shown}{left}"
    emit(args, text, json_document("clusters search", **facts, results=results))
    return 0


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("clusters", help=_DIRECTORY)
    add_json_option(parser)


def run_info(args: argparse.Namespace) -> int:
    from ...clusters import info

    facts = info(args.clusters)
    emit(args, facts.summary(), json_document("clusters info", **asdict(facts)))
    return 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("clusters", help=_DIRECTORY)
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ...clusters import ClusterIndex

    with ClusterIndex(args.clusters, threads=1) as index:
        lists, size_bytes = index.verify(), index.facts.folder_bytes
    emit(
        args,
        f"{lists:,} lists, {format_size(size_bytes)}: whole",
        json_document("clusters verify", lists=lists, size_bytes=size_bytes),
    )
    return 0


def configure_plan(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--vectors", type=int, required=True, metavar="N", help="how many")
    parser.add_argument("--dim", type=int, required=True, metavar="D", help="values of each")
    _add_shape_options(parser)
    parser.add_argument(
        "--vector-dtype",
        default="float16",
        choices=("float32", "float16", "uint8", "int8"),
        help="as vectors are stored (default: float16)",
    )
    parser.add_argument(
        "--copies",
        type=float,
        default=4.0,
        help="lists that a vector is in, mean: 1.2 to 4 (default: 4)",
    )
    parser.add_argument(
        "--probed",
        type=int,
        default=32,
        metavar="N",
        help="lists that are read for a query (default: 32)",
    )
    add_json_option(parser)


def run_plan(args: argparse.Namespace) -> int:
    from ...clusters import plan

    found = plan(args.vectors, args.dim, **{name: getattr(args, name) for name in _PLAN_OPTIONS})
    rows = [
        ("lists", f"{found.n_lists:,}", f"{found.entries:,} vectors in them, copies included"),
        ("on storage", format_size(found.disk["total_bytes"]), "lists, table and heads"),
        ("in memory", format_size(found.memory["total_bytes"]), "table and heads"),
        (
            "pages of a query",
            f"{found.pages_per_query:,.0f}",
            f"of {format_size(args.page_bytes)}, at most: {found.probed} lists",
        ),
    ]
    text = render_table(("what", "expected", "of"), rows, right=("expected",))
    emit(args, text, json_document("clusters plan", **asdict(found)))
    return 0
