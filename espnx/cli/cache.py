"""``espnx cache ls|verify|rm``: the kept KV caches of a directory."""

from __future__ import annotations

import argparse
import time
from dataclasses import asdict
from typing import TYPE_CHECKING

from .output import add_json_option, emit, json_document, render_table

if TYPE_CHECKING:
    from ..kv.library import Entry


def _storage(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--storage", required=True, action="append", metavar="DIR", help="as given to KVCache; may be repeated")


def configure_ls(parser: argparse.ArgumentParser) -> None:
    _storage(parser)
    add_json_option(parser)


def run_ls(args: argparse.Namespace) -> int:
    from ..kv.library import entries

    found = entries(args.storage)
    rows = [_row(entry) for entry in found]
    headers = ("name", "model", "sequences", "tokens", "MiB", "last used", "open")
    emit(args, render_table(headers, rows, right=headers[2:5]), json_document("cache ls", caches=[asdict(entry) for entry in found]))
    return 0


def _row(entry: Entry) -> tuple[object, ...]:
    used = time.strftime("%Y-%m-%d %H:%M", time.localtime(entry.last_used_s)) if entry.last_used_s else "-"
    size = f"{entry.size_bytes / 2**20:,.1f}"
    return entry.name, entry.model, entry.sequences, entry.tokens, size, used, "yes" if entry.is_open else "no"


def configure_verify(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="+", help="names of caches")
    _storage(parser)


def run_verify(args: argparse.Namespace) -> int:
    from ..kv.library import verify

    for name in args.name:
        print(f"{name}: {verify(args.storage, name) / 2**20:,.1f} MiB of rows, every checksum right")
    return 0


def configure_rm(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="*", help="names of caches")
    _storage(parser)
    parser.add_argument("--keep", metavar="SIZE", help="remove the least recently used caches until the rest takes at most so much")


def run_rm(args: argparse.Namespace) -> int:
    from ..errors import InvalidInputError
    from ..kv.library import evict, remove
    from ..sizes import parse_size

    if not args.name and not args.keep:
        raise InvalidInputError("espnx cache rm", got="nothing to remove", expected="names, or --keep SIZE")
    for name in args.name:
        remove(args.storage, name)
    gone = [*args.name, *(evict(args.storage, parse_size(args.keep)) if args.keep else [])]
    print("removed " + ", ".join(gone) if gone else "nothing removed")
    return 0
