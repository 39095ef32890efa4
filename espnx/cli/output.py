"""What all commands end with: a text on standard output, and a JSON document that appears whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ..errors import WriteError

SCHEMA_VERSION = 1


def add_json_option(parser: ArgumentParser) -> None:
    """Adds ``--json FILE``; ``-`` prints the document instead of the table."""
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON ('-': on standard output, instead of the table)")


def json_document(command: str, **fields: Any) -> dict[str, Any]:
    """A result document: ``schema_version`` and ``command`` first, then the fields."""
    return {"schema_version": SCHEMA_VERSION, "command": command, **fields}


def write_json(destination: str | os.PathLike[str], document: Mapping[str, Any]) -> None:
    """Writes a document to a file, atomically, or to standard output for ``-``.

    Raises:
        WriteError: the file cannot be written; what stood there before is untouched.
    """
    text = json.dumps(document, indent=2, allow_nan=False) + "\n"
    if destination == "-":
        sys.stdout.write(text)
        return
    path = Path(destination)
    temporary = None
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False) as file:
            temporary = file.name
            file.write(text)
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            Path(temporary).unlink(missing_ok=True)
        raise WriteError("cannot write JSON", path=path, errno=error.errno, fix="name another file after --json") from error


def emit(args: Namespace, text: str, document: Mapping[str, Any]) -> None:
    """Prints the human text and writes the document where ``--json`` says."""
    if args.json != "-":
        print(text)
    if args.json:
        write_json(args.json, document)


def _umask() -> int:
    """The process's file mode mask: temporary files are private, results should be as readable as any other file."""
    mask = os.umask(0)
    os.umask(mask)
    return mask
