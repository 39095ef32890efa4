"""``espnx cache ls|verify|rm``: the kept KV caches of a directory."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from ...sizes import format_size
from ...tables import render_table
from ..output import add_json_option, emit, json_document

if TYPE_CHECKING:
    from ...kv.kept.library import Entry


def _storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "storage", metavar="DIR", help="the directory of kept caches, as given to KVCache"
    )
    parser.add_argument(
        "--storage",
        dest="further",
        action="append",
        default=[],
        metavar="DIR",
        help="the others, where caches are spread; may be repeated",
    )


def _directories(args: argparse.Namespace) -> list[str]:
    return [args.storage, *args.further]


def configure_ls(parser: argparse.ArgumentParser) -> None:
    _storage(parser)
    add_json_option(parser)


def run_ls(args: argparse.Namespace) -> int:
    from ...kv.kept.library import entries

    found = entries(_directories(args))
    rows = [_row(entry) for entry in found]
    headers = ("name", "model", "sequences", "tokens", "size", "last used", "open")
    emit(
        args,
        render_table(headers, rows, right=headers[2:5]),
        json_document("cache ls", caches=[asdict(entry) for entry in found]),
    )
    return 0


def _row(entry: Entry) -> tuple[object, ...]:
    used = (
        time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used_s))
        if entry.last_used_s
        else "-"
    )
    return (
        entry.name,
        entry.model,
        entry.sequences,
        entry.tokens,
        format_size(entry.size_bytes),
        used,
        "yes" if entry.is_open else "no",
    )


def configure_verify(parser: argparse.ArgumentParser) -> None:
    _storage(parser)
    parser.add_argument("name", nargs="+", help="names of caches")
    add_json_option(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ...errors import StorageError
    from ...kv.kept.library import verify

    lines, found = list[str](), list[dict[str, object]]()
    for name in args.name:  # all of them: one that is damaged says nothing about the next
        try:
            seen_bytes = verify(_directories(args), name)
            lines.append(f"{name}: {format_size(seen_bytes)} of rows, every checksum right")
            found.append({"name": name, "is_sound": True, "bytes": seen_bytes})
        except StorageError as error:
            lines.append(f"{name}: {' '.join(str(error).split())}")
            found.append(
                {
                    "name": name,
                    "is_sound": False,
                    "error": type(error).__name__,
                    "message": str(error),
                }
            )
    emit(args, "\n".join(lines), json_document("cache verify", caches=found))
    return 0 if all(each["is_sound"] for each in found) else 1


def configure_rm(parser: argparse.ArgumentParser) -> None:
    _storage(parser)
    parser.add_argument("name", nargs="*", help="names of caches")
    parser.add_argument(
        "--keep",
        metavar="SIZE",
        help="remove the least recently used caches until the rest takes at most so much",
    )
    add_json_option(parser)


def run_rm(args: argparse.Namespace) -> int:
    from ...errors import InvalidInputError
    from ...kv.kept.library import evict, remove
    from ...sizes import parse_size

    limit_bytes = None if args.keep is None else parse_size(args.keep)
    if not args.name and limit_bytes is None:
        raise InvalidInputError(
            "espnx cache rm",
            got="nothing to remove",
            expected="names after the directory, or --keep SIZE",
        )
    gone = list(dict.fromkeys(args.name))
    for name in gone:
        remove(_directories(args), name)
    if limit_bytes is not None:
        gone += evict(_directories(args), limit_bytes)
    emit(
        args,
        "removed " + ", ".join(gone) if gone else "nothing removed",
        json_document("cache rm", removed=gone),
    )
    return 0
