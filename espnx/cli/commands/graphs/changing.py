"""``espnx graph add|delete|merge``: changes of a graph, which wait in its log until they are
merged."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

from ....errors import InvalidInputError
from ...output import add_json_option, emit, json_document

if TYPE_CHECKING:
    import numpy as np

    from ....graph import GraphWriter


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
    from ....graph import GraphWriter, read_vectors

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

    from ....graph import GraphWriter

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
    from ....graph import GraphWriter
    from ...progress import ProgressLine

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
