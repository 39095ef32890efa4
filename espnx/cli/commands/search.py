"""``espnx search``: ranks documents for a query and shows where the time and the bytes went."""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from ...importers.queries import read_queries
from ..device_options import add_device_options, devices_of
from ..output import add_json_option, emit, json_document
from ..progress import ProgressLine

if TYPE_CHECKING:
    from ...retrieval.search.index import Index


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("store", help="directory of the store")
    parser.add_argument("query", nargs="*", help="queries, each one argument")
    parser.add_argument(
        "--queries",
        metavar="FILE",
        help="more of them: JSON lines with id (or _id) and text, or lines: id TAB text",
    )
    parser.add_argument("-k", type=int, default=10, help="hits per query (default: %(default)s)")
    add_search_options(parser)
    parser.add_argument(
        "--prefetch-step",
        default="auto",
        metavar="S,...",
        help=(
            "shares of them after which reads begin; 0: no prefetch (default: chosen from "
            "predicted times)"
        ),
    )
    parser.add_argument(
        "--include", action="append", metavar="ID", help="find no other document; may be repeated"
    )
    parser.add_argument(
        "--exclude", action="append", metavar="ID", help="do not find this one; may be repeated"
    )
    parser.add_argument(
        "--explain",
        action="store_true",
        help="show which token of the document matched each token of the query",
    )
    add_index_options(parser)
    add_json_option(parser)


def add_search_options(parser: argparse.ArgumentParser) -> None:
    """Those of `search_options`."""
    parser.add_argument(
        "--candidates",
        type=int,
        help="handed on by the first stage, at least k (default: 1000; of graph and clusters 100)",
    )
    parser.add_argument(
        "--first-stage",
        metavar="S,...",
        help="which of the index's, or several that are fused (default: its first)",
    )
    parser.add_argument(
        "--fuse",
        default="rrf",
        choices=("rrf", "weighted", "rrf+maxsim"),
        help=(
            "how several become one ranking; rrf+maxsim: MaxSim's is one more of them, not above "
            "all (default: %(default)s)"
        ),
    )
    parser.add_argument(
        "--rerank", type=int, help="how many of them are scored exactly (default: all)"
    )
    parser.add_argument(
        "--cascade",
        type=int,
        metavar="N",
        help="score coarse records of all candidates, full ones of the best N",
    )
    parser.add_argument(
        "--nprobe",
        default="auto",
        help=(
            "effort of the first stage that is named first: lists of ivf and clusters, L of graph "
            "(default: measured at build)"
        ),
    )


def search_options(args: argparse.Namespace) -> dict[str, Any]:
    """How deep to search, as `Index.search` takes it."""
    from ...errors import InvalidInputError

    nprobe: int | str = args.nprobe
    if nprobe != "auto":
        if not str(nprobe).isdigit():
            raise InvalidInputError("--nprobe", got=nprobe, expected="a number or auto")
        nprobe = int(nprobe)
    stages = args.first_stage.split(",") if args.first_stage else None
    return {
        "candidates": args.candidates,
        "first_stage": stages,
        "fuse": args.fuse,
        "rerank": args.rerank,
        "cascade": args.cascade,
        "nprobe": nprobe,
    }


def add_index_options(parser: argparse.ArgumentParser) -> None:
    """Those of `open_index`."""
    parser.add_argument(
        "--hot",
        default="0",
        metavar="SIZE",
        help="RAM for documents that several queries want (default: none)",
    )
    parser.add_argument(
        "--coarse",
        default="ssd",
        choices=("ssd", "ram"),
        help="where coarse records are read from (default: %(default)s)",
    )
    parser.add_argument("--encoder", help="default: the one the store was built with")
    parser.add_argument(
        "--encoder-dtype",
        choices=("fp32", "bf16"),
        help="beside --encoder (default: as the documents were encoded)",
    )
    parser.add_argument(
        "--sparse-encoder",
        metavar="M",
        help="of splade, where it came out of a folder: that folder",
    )
    parser.add_argument(
        "--engine",
        default="auto",
        help=(
            "path of the reads: auto, uring, posix, memory or a file of settings such as nvme.toml "
            "(default: %(default)s)"
        ),
    )
    parser.add_argument("--compute", default="cpu", help="cpu or cuda (default: %(default)s)")
    add_device_options(parser)


def check_store(path: str) -> None:
    """What can be told of a store before seconds of imports. Raises StoreNotFoundError."""
    from ...errors import StoreNotFoundError

    if os.path.lexists(os.path.join(path, "MANIFEST.json")):
        return
    fix = "build one with `espnx index build`, or check the path"
    if os.path.isdir(os.path.join(path, "building")):
        fix = "a build was interrupted here: the same `espnx index build` goes on"
    raise StoreNotFoundError("no published store", path=path, expected="a MANIFEST.json", fix=fix)


@contextmanager
def open_index(args: argparse.Namespace, progress: ProgressLine) -> Iterator[Index]:
    """The store of a command, with its encoder, on the devices that the command names."""
    from ...errors import InvalidInputError

    check_store(args.store)
    if args.encoder_dtype and not args.encoder:
        fix = f"--encoder minilm --encoder-dtype {args.encoder_dtype}"
        raise InvalidInputError("--encoder-dtype", got="no --encoder", expected="both", fix=fix)
    with progress.loading(f"{args.store} and its encoder"):
        from ... import load_encoder
        from ...retrieval.search.index import Index
        from ...retrieval.store.manifest import data_directories

        encoder = args.encoder or "auto"
        if args.encoder_dtype:
            encoder = load_encoder(encoder, device=args.compute, dtype=args.encoder_dtype)
        directories = data_directories(args.store) if args.device or args.record else []
        with (
            devices_of(args, directories) as device,
            Index(
                args.store,
                encoder,
                engine=args.engine,
                compute=args.compute,
                hot=args.hot,
                coarse=args.coarse,
                device=device,
                sparse_encoder=args.sparse_encoder,
            ) as index,
        ):
            yield index


def _steps(text: str) -> str | list[float]:
    from ...errors import InvalidInputError

    if text == "auto":
        return text
    try:
        return [float(word) for word in text.split(",")]
    except ValueError:
        raise InvalidInputError(
            "--prefetch-step",
            got=text,
            expected="auto, or shares of the lists such as 0.3 or 0.05,0.2",
        ) from None


def _ids(words: list[str] | None) -> list[int | str] | None:
    """Each id as typed, and as a number where it is one: a shell cannot tell the two kinds of id
    apart."""
    if words is None:
        return None
    numbers = (int(word) for word in words if re.fullmatch("-?[0-9]{1,19}", word))
    return [*words, *(number for number in numbers if -(2**63) <= number < 2**63)]


def _warn_of_unknown(index: Index, args: argparse.Namespace) -> None:
    """An id that the store does not hold has no effect, and nothing else would show that it was
    mistyped."""
    for option, words in (("--include", args.include), ("--exclude", args.exclude)):
        missing = [
            word for word in words or [] if not any(each in index for each in _ids([word]) or [])
        ]
        if missing:
            count = "none" if len(missing) == len(words) else f"{len(words) - len(missing):,}"
            shown = ", ".join(missing[:5]) + (", ..." if len(missing) > 5 else "")
            print(
                f"espnx: warning: {option}: {count} of the {len(words):,} ids in the store; not "
                f"{shown}",
                file=sys.stderr,
            )


def run(args: argparse.Namespace) -> int:
    from ...errors import InvalidInputError

    queries: list[tuple[str | None, str]] = [(None, query) for query in args.query]
    if args.queries:
        queries += read_queries(args.queries).items()
    if not queries:
        raise InvalidInputError(
            "espnx search", got="no query", expected="queries after the store, or --queries FILE"
        )
    options = search_options(args) | {
        "prefetch_step": _steps(args.prefetch_step),
        "explain": args.explain,
    }
    with ProgressLine(is_terse=True) as progress, open_index(args, progress) as index:
        _warn_of_unknown(index, args)
        texts = [text for _, text in queries]
        results = index.search(
            texts, k=args.k, include=_ids(args.include), exclude=_ids(args.exclude), **options
        )
    found = list(zip(queries, results, strict=True))
    device = results[0].device  # what all of them took
    parts = [
        f"{query if name is None else f'{name}: {query}'}\n{replace(result, device=None).summary()}"
        for (name, query), result in found
    ]
    text = "\n\n".join(parts if device is None else [*parts, device.summary()])
    documents = [
        {"query": query, **({} if name is None else {"query_id": name}), **asdict(result)}
        for (name, query), result in found
    ]
    emit(
        args,
        text,
        json_document(
            "search",
            store=args.store,
            results=documents,
            device=None if device is None else asdict(device),
        ),
    )
    return 0
