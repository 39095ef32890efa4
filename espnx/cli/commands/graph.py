"""``espnx graph search|info|verify|remove``: nearest neighbours from SSD. What makes and changes
graphs is in `graphs`."""

from __future__ import annotations

import argparse
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..device_options import add_device_options, devices_of
from ..output import add_json_option, emit, json_document

if TYPE_CHECKING:
    import numpy as np

    from ...device.registry import Devices
    from ...graph.neighbours import Neighbours

_SHOWN = 10


def _add_partial_option(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--partial",
        action="store_true",
        help=(
            "where clusters lie in several directories and some are lost: what is in the others "
            "(default: an error that names the first)"
        ),
    )


def configure_search(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` has made")
    parser.add_argument("queries", help="a file of vectors, as for build")
    parser.add_argument("-k", type=int, default=10, help="neighbours of each (default: 10)")
    parser.add_argument(
        "--list-size",
        type=int,
        metavar="L",
        help="candidates of a walk: more find more, and read more",
    )
    parser.add_argument(
        "--recall",
        type=float,
        metavar="R",
        help="instead: the smallest list measured to find that share (default: 0.95)",
    )
    parser.add_argument(
        "--nprobe",
        metavar="N",
        help=(
            "clusters that are searched for a query, or auto: those not much farther than the "
            "nearest (default: auto)"
        ),
    )
    parser.add_argument(
        "--beam-width",
        type=int,
        metavar="W",
        help="pages of a query under way at a time (default: 1; for few queries 4)",
    )
    parser.add_argument(
        "--threads", type=int, default=2, metavar="N", help="that read and compute (default: 2)"
    )
    parser.add_argument(
        "--ground-truth",
        metavar="FILE",
        help="ids of the true neighbours, .npy [q, k or more]: says the recall",
    )
    parser.add_argument("--column", help="of a Parquet file")
    _add_partial_option(parser)
    add_device_options(parser)
    add_json_option(parser)


def run_search(args: argparse.Namespace) -> int:
    import numpy as np

    from ...graph import read_vectors

    queries = np.concatenate(
        [np.asarray(each) for each in read_vectors(args.queries, column=args.column).blocks()]
    )
    with devices_of(args, [args.graph]) as devices:
        found = _found(args, queries, devices)
    facts: dict[str, Any] = {
        "queries": len(queries),
        "k": args.k,
        "pages_mean": float(found.pages.mean()) if len(queries) else 0.0,
        "bytes_mean": float(found.bytes_read.mean()) if len(queries) else 0.0,
    }
    if found.clusters is not None:
        facts["clusters_mean"] = float(found.clusters.mean()) if len(queries) else 0.0
    if args.ground_truth is not None:
        facts["recall"] = recall_of(found.ids, args.ground_truth)
    rows, results = results_of(found, _SHOWN)
    shown = (
        f"{len(queries):,} queries, {facts['pages_mean']:.1f} pages "
        f"({format_size(round(facts['bytes_mean']))}) a query"
    )
    if "clusters_mean" in facts:
        shown += f" through {facts['clusters_mean']:.1f} clusters"
    if found.lost_share:
        facts["lost_share"] = found.lost_share
        shown += f", {found.lost_share:.1%} of the vectors not looked at"
    if "recall" in facts:
        shown += f", recall@{args.k} {facts['recall']:.4f}"
    left = f"\nthe first {_SHOWN} are shown" if len(queries) > _SHOWN else ""
    text = (
        render_table(
            ("query", "rank", "id", "distance"), rows, right=("query", "rank", "id", "distance")
        )
        + f"\n{shown}{left}"
    )
    emit(args, text, json_document("graph search", **facts, results=results))
    return 0


def results_of(
    found: Neighbours, most: int
) -> tuple[list[tuple[int, int, int, str]], list[list[dict[str, float]]]]:
    """(rows of a table of the first `most` queries: query, rank, id, distance; the same of all
    queries, for programs)"""
    rows = [
        (query, rank + 1, int(row), f"{far:.6g}")
        for query in range(min(len(found.ids), most))
        for rank, (row, far) in enumerate(
            zip(found.ids[query], found.distances[query], strict=True)
        )
        if row >= 0
    ]
    results = [
        [
            {"id": int(row), "distance": float(far)}
            for row, far in zip(ids, distances, strict=True)
            if row >= 0
        ]
        for ids, distances in zip(found.ids, found.distances, strict=True)
    ]
    return rows, results


def _nprobe(given: str | None) -> int | str | None:
    try:
        return given if given is None else int(given)
    except ValueError:
        return given


def _found(args: argparse.Namespace, queries: np.ndarray, devices: Devices | None) -> Neighbours:
    """The nearest vectors, of the graph itself or of a device that walks over it."""
    from ...graph import GraphIndex

    if devices is None:
        with GraphIndex(args.graph, threads=args.threads, partial=args.partial) as index:
            return index.search(
                queries,
                args.k,
                list_size=args.list_size,
                recall=args.recall,
                nprobe=_nprobe(args.nprobe),
                beam_width=args.beam_width,
            )
    from ...device.near_storage import NearStorageDevice
    from ...graph.devices.walks import WALKS, WalkCommand

    for name in ("list_size", "beam_width", "nprobe"):
        if (getattr(args, name) is None) == (name == "list_size"):
            option = f"--{name.replace('_', '-')}"
            raise InvalidInputError(
                "a device's search of a graph",
                got=f"no {option}" if name == "list_size" else option,
                expected="--list-size, and none of --recall, --beam-width, --nprobe",
            )
    device = devices if isinstance(devices, (str, NearStorageDevice)) else devices[0]
    with closing(WALKS.open_on(device, args.graph, threads=args.threads)) as walks:
        command = WalkCommand(queries, args.k, list_size=args.list_size)
        found: Neighbours = walks.submit(command).finish()
    return found


def recall_of(ids: Any, path: str) -> float:
    """The share of the true neighbours, of a .npy file, that are among the ids, [q, k]. Raises
    InvalidInputError."""
    import numpy as np

    try:
        true = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInputError(
            "--ground-truth",
            got=f"{path}: {error}",
            expected="a .npy file of ids [queries, k or more]",
        ) from error
    if (
        true.ndim != 2
        or len(true) != len(ids)
        or true.shape[1] < ids.shape[1]
        or true.dtype.kind not in "iu"
    ):
        raise InvalidInputError(
            "--ground-truth",
            got=f"{true.dtype} {list(true.shape)}",
            expected=f"ids [{len(ids)}, {ids.shape[1]} or more]",
        )
    k = ids.shape[1]
    return sum(
        len(set(ours.tolist()) & set(theirs.tolist()))
        for ours, theirs in zip(ids, true[:, :k], strict=True)
    ) / max(1, ids.size)


def configure_info(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` has made")
    _add_partial_option(parser)
    add_json_option(parser)


def run_info(args: argparse.Namespace) -> int:
    from ...graph import GraphIndex

    with GraphIndex(args.graph, threads=1, walks=1, partial=args.partial) as index:
        facts = index.facts
        document = {
            **asdict(facts.layout),
            "nodes_per_page": facts.layout.nodes_per_page,
            "metric": facts.metric,
            "entry_points": len(facts.entries),
            "files": facts.file_sizes,
            "memory_bytes": facts.memory_bytes,
            "options": dict(facts.options),
            "recall": [asdict(each) for each in facts.recall],
            "built_recall": [asdict(each) for each in facts.built_recall],
            "vectors": len(index),
            "unused_bytes": facts.unused_bytes,
            "unmerged_added": index.pending.n_added,
            "unmerged_deleted": len(index.pending.dead),
            "directories": [
                {
                    "path": directory,
                    "pages_bytes": int(facts.parts.pages[facts.in_directory(number)].sum())
                    * facts.layout.page_bytes,
                    "lost": number in facts.lost_directories,
                }
                for number, directory in enumerate(facts.directories)
            ],
        }
        emit(args, index.summary(), json_document("graph info", **document))
    return 0


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` has made")
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ...graph import GraphIndex

    with GraphIndex(args.graph, threads=1, walks=1) as index:
        found, size_bytes = index.verify(), sum(index.facts.file_sizes.values())
    text = f"{found.pages:,} pages, {format_size(size_bytes)}: whole"
    if found.torn_bytes:
        text += (
            f"\nthe log ends in {found.torn_bytes:,} bytes of a change that was not written whole: "
            "a crash leaves them, or a writer is at it; nobody was told that it is there, and the "
            "next change takes its place"
        )
    emit(args, text, json_document("graph verify", size_bytes=size_bytes, **asdict(found)))
    return 0


def configure_remove(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` has made")
    add_json_option(parser)


def run_remove(args: argparse.Namespace) -> int:
    from ...graph import remove

    remove(args.graph)
    emit(args, f"{args.graph}: removed", json_document("graph remove", graph=args.graph))
    return 0
