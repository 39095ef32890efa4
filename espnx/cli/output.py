"""What all commands end with: a text on standard output, and a JSON document that appears whole or
not at all."""

from __future__ import annotations

import errno as codes
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WriteError
from ..tables import render_json

SCHEMA_VERSION = 1
_JSON, _OTHER_JSON = "cannot write JSON", "name another file after --json"


def add_memory_option(parser: ArgumentParser) -> None:
    """Adds ``--memory`` to what builds or changes an index, see `BuildOptions.memory`."""
    parser.add_argument(
        "--memory",
        metavar="SIZE",
        help="of the process, such as 2GiB (default: 512MiB beside what it holds, 1GiB at least)",
    )


def add_json_option(parser: ArgumentParser) -> None:
    """Adds ``--json FILE``; ``-`` prints the document instead of the table."""
    parser.add_argument(
        "--json",
        metavar="FILE",
        help="also write the result as JSON ('-': on standard output, instead of the table)",
    )


def json_document(command: str, **fields: Any) -> dict[str, Any]:
    """A result document: ``schema_version`` and ``command`` first, then the fields."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **fields}


def check_json(destination: str) -> None:
    """Whether `write_json` could write there: asked before the work whose result it is. Raises
    WriteError."""
    if destination != "-":
        check_writable(destination, _JSON, _OTHER_JSON)


def write_json(destination: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes a document to a file, as `write_whole` does, or to standard output for ``-``. Raises
    WriteError."""
    text = render_json(document)
    if destination == "-":
        sys.stdout.write(text)
        return
    write_whole(destination, text, _JSON, _OTHER_JSON)


def check_writable(path: str | os.PathLike[str], what: str, fix: str) -> None:
    """Whether `write_whole` could write there; nothing is left of the trial. Raises WriteError,
    which says `what` cannot be done, and the way to `fix` it."""
    directory, name = os.path.split(target := os.path.realpath(path))
    try:
        if os.path.isdir(target):
            raise IsADirectoryError(codes.EISDIR, os.strerror(codes.EISDIR))
        if not _is_stream(path):
            with tempfile.NamedTemporaryFile(dir=directory, prefix=f".{name}."):
                pass
    except OSError as error:
        raise WriteError(what, path=path, errno=error.errno, fix=fix) from error


def write_whole(path: str | os.PathLike[str], text: str, what: str, fix: str) -> None:
    """Makes or replaces a file in one step, the one that a link names; a pipe or a device is
    written to.

    Raises:
        WriteError: as `check_writable` has it; what stood there before is untouched.
    """
    directory, name = os.path.split(target := os.path.realpath(path))
    temporary = None
    try:
        if _is_stream(path):
            with open(path, "w", encoding="utf-8") as stream:
                stream.write(text)
            return
        with tempfile.NamedTemporaryFile(
            "w", encoding="utf-8", dir=directory, prefix=f".{name}.", delete=False
        ) as file:
            temporary = file.name
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise WriteError(what, path=path, errno=error.errno, fix=fix) from error


def _is_stream(path: str | os.PathLike[str]) -> bool:
    """Something that cannot be replaced: a pipe, a terminal, ``/dev/null``."""
    return os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path)


def emit(args: Namespace, text: str, document: Mapping[str, Any]) -> None:
    """Prints the human text and writes the document where ``--json`` says."""
    if args.json != "-":
        print(text)
    if args.json:
        write_json(args.json, document)


def _umask() -> int:
    """The process's file mode mask: temporary files are private, results should be as readable as
    any other file."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
