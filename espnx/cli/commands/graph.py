"""``espnx graph build|add|delete|merge|search|info|verify|remove|import|export|advise``: nearest
neighbours from SSD."""

from __future__ import annotations

import argparse
import os
from contextlib import closing
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from ...checks import check_given_directory
from ...errors import InvalidInputError
from ...sizes import format_size
from ...tables import render_table
from ..device_options import add_device_options, devices_of
from ..output import add_json_option, emit, json_document
from ..plans.graph import check_build_memory

if TYPE_CHECKING:
    import numpy as np

    from ...device.registry import Devices
    from ...graph import GraphWriter
    from ...graph.neighbours import Neighbours

_SHOWN = 10


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
    from ...graph import build
    from ..progress import ProgressLine

    with ProgressLine() as line:
        report = build(
            args.vectors,
            args.graph,
            **_chosen(args, *_BUILD_OPTIONS, *_SHARED_OPTIONS),
            progress=line.update,
        )
    emit(args, report.summary(), json_document("graph build", **asdict(report)))
    return 0


def _add_writer_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--memory",
        default="1GiB",
        metavar="SIZE",
        help="that a merge may take for vectors and codes (default: 1GiB)",
    )
    add_json_option(parser)


def _add_pending_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--durability",
        default="each",
        choices=("each", "group", "none"),
        help=(
            "when a change is acknowledged: on the device, or with the operating system (none) "
            "(default: each)"
        ),
    )
    parser.add_argument(
        "--pending",
        default="64MiB",
        metavar="SIZE",
        help="changes that wait in the log for a merge, at most (default: 64MiB)",
    )
    _add_writer_options(parser)


def configure_add(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` has made")
    parser.add_argument("vectors", help="a file of vectors, as for build")
    parser.add_argument(
        "--ids",
        metavar="FILE",
        help=".npy of a whole number for each (default: those behind the largest)",
    )
    parser.add_argument("--column", help="of a Parquet file")
    _add_pending_options(parser)


def run_add(args: argparse.Namespace) -> int:
    from ...graph import GraphWriter, read_vectors

    ids = None if args.ids is None else _ids_of(args.ids)
    source, added = read_vectors(args.vectors, column=args.column), 0
    if ids is not None and len(ids) != source.n:
        raise InvalidInputError(
            "--ids", got=f"{len(ids)} ids", expected=f"{source.n}, one for each vector"
        )
    with GraphWriter(args.graph, **_writer_options(args)) as graph:
        first = last = None
        for block in source.blocks():
            some = None if ids is None else ids[added : added + len(block)]
            given = graph.add(block, ids=some)
            added += len(given)
            if len(given):
                first, last = int(given[0]) if first is None else first, int(given[-1])
        facts = {"added": added, "first_id": first, "last_id": last, **_state(graph)}
    span = "" if first is None else f", ids {first} to {last}"
    emit(args, f"{added:,} added{span}; {_shown(facts)}", json_document("graph add", **facts))
    return 0


def configure_delete(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph build` has made")
    parser.add_argument("ids", nargs="+", help="numbers, or one .npy file of them")
    _add_pending_options(parser)


def run_delete(args: argparse.Namespace) -> int:
    import numpy as np

    from ...graph import GraphWriter

    if len(args.ids) == 1 and not args.ids[0].isdecimal():
        ids = _ids_of(args.ids[0])
    else:
        wrong = [each for each in args.ids if not each.isdecimal()]
        if wrong:
            raise InvalidInputError("ids to delete", got=wrong[0], expected="whole numbers")
        ids = np.array([int(each) for each in args.ids])
    with GraphWriter(args.graph, **_writer_options(args)) as graph:
        deleted = graph.delete(ids)
        facts = {"deleted": deleted, **_state(graph)}
    emit(args, f"{deleted:,} deleted; {_shown(facts)}", json_document("graph delete", **facts))
    return 0


def configure_merge(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("graph", help="that `espnx graph add` or `delete` has changed")
    parser.add_argument(
        "--measure",
        default="auto",
        choices=("auto", "always", "never"),
        help=(
            "what searches find, which --recall goes by: again where more than a tenth of the "
            "vectors were changed since (auto), also where nothing is pending, or not (default: "
            "auto)"
        ),
    )
    _add_writer_options(parser)


def run_merge(args: argparse.Namespace) -> int:
    from ...graph import GraphWriter
    from ..progress import ProgressLine

    with GraphWriter(args.graph, memory=args.memory) as graph, ProgressLine() as line:
        before = graph.facts.recall
        merged = graph.merge(progress=line.update, measure=args.measure)
        measured = graph.facts.recall is not before and not graph.facts.unmeasured
        facts = {"merged": merged, "measured": measured, **_state(graph)}
    text = "merged" if merged else "nothing to merge"
    text += ", recall measured again" if measured else ""
    emit(args, f"{text}; {_shown(facts)}", json_document("graph merge", **facts))
    return 0


def _writer_options(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "durability": args.durability, "pending_bytes": args.pending, "memory": args.memory,
    }  # fmt: skip


def _state(graph: GraphWriter) -> dict[str, Any]:
    pending = graph.pending
    return {
        "vectors": len(graph),
        "unmerged_added": pending.n_added,
        "unmerged_deleted": len(pending.dead),
        "torn_bytes": graph.torn_bytes,
    }


def _shown(facts: dict[str, Any]) -> str:
    text = (
        f"{facts['vectors']:,} vectors, not merged: {facts['unmerged_added']:,} added, "
        f"{facts['unmerged_deleted']:,} deleted"
    )
    if facts["torn_bytes"]:
        text += f"\nthe log ended in {facts['torn_bytes']} bytes of a change that was not written"
    return text


def _ids_of(path: str) -> np.ndarray:
    import numpy as np

    try:
        found: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise InvalidInputError(
            "ids", got=f"{path}: {error}", expected="a .npy file of whole numbers"
        ) from error
    return found


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
    from ...graph import import_diskann
    from ..progress import ProgressLine

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
    from ...graph import export_diskann

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
    from ...clusters.advice import advise
    from ..progress import ProgressLine

    with ProgressLine() as line:
        advice = advise(args.vectors, **_chosen(args, *_ADVISE_OPTIONS), progress=line.update)
    emit(args, advice.summary(), json_document("graph advise", **asdict(advice)))
    return 0
