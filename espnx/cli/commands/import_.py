"""``espnx index import``: an index of ColBERT, fast-plaid or PyLate as a store, its residual codes
kept as they are."""

from __future__ import annotations

import argparse
import os

from ...checks import check_given_directory
from ..output import add_json_option, add_memory_option, emit, json_document
from ..progress import ProgressLine


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "folder",
        help=(
            "of the index: with centroids.pt (ColBERT), centroids.npy (fast-plaid) or "
            "fast_plaid_index (PyLate)"
        ),
    )
    parser.add_argument(
        "store", help="directory to build in; an interrupted import into it is resumed"
    )
    parser.add_argument(
        "--texts",
        metavar="FILE",
        help="collection.tsv or JSON lines, in the order of the index; without it texts are empty",
    )
    parser.add_argument(
        "--encoder",
        metavar="FOLDER",
        help=(
            "checkpoint or model that the index was made with; the store then refuses queries of "
            "another"
        ),
    )
    parser.add_argument(
        "--pooling",
        choices=("mean", "muvera"),
        help="how the first stage's vector is made of a document's tokens (default: mean)",
    )
    parser.add_argument(
        "--first-stage-code",
        default="sq8",
        metavar="CODE",
        help="flat, sq8 or pqM: code of the lists (default: %(default)s)",
    )
    parser.add_argument(
        "--nlist", type=int, help="number of inverted lists (default: 4 sqrt(documents))"
    )
    add_memory_option(parser)
    parser.add_argument(
        "--directory",
        action="append",
        default=[],
        metavar="DIR",
        help="put data files there, one per SSD; may be repeated",
    )
    parser.add_argument(
        "--replace", action="store_true", help="publish over the store that is there"
    )
    parser.add_argument(
        "--restart",
        action="store_true",
        help="discard an interrupted import instead of resuming it",
    )
    add_json_option(parser)


def run(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    for directory in (args.store, *args.directory):
        check_given_directory(directory)
    from ...importers.convert import import_index, inspect_index

    found = inspect_index(args.folder)
    with ProgressLine() as progress:
        progress.say(
            f"importing {found.documents:,} documents of {args.folder} into {args.store}; it needs "
            "twice the store's size on disk"
        )
        report = import_index(
            args.folder,
            args.store,
            texts=args.texts,
            encoder=args.encoder,
            pooling=args.pooling,
            first_stage_code=args.first_stage_code,
            nlist=args.nlist,
            memory=args.memory,
            directories=[os.path.abspath(directory) for directory in args.directory],
            replace=args.replace,
            restart=args.restart,
            progress=progress.update,
        )
    kept = (
        f"kept as they were: {report.tokens:,} x {found.dim} {found.format}, {found.centroids:,} "
        "centroids"
    )
    emit(
        args,
        f"{report.summary()}\n{kept}",
        json_document("index import", index=asdict(found), report=asdict(report)),
    )
    return 0
