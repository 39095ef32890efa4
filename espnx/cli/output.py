"""What all commands print with: aligned tables on standard output, JSON documents that appear whole or not at all."""

from __future__ import annotations

import json
import os
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from ..errors import WriteError

SCHEMA_VERSION = 1


def add_json_option(parser: ArgumentParser) -> None:
    """Adds ``--json FILE``; ``-`` prints the document instead of the table."""
    parser.add_argument("--json", metavar="FILE", help="also write the result as JSON ('-': on standard output, instead of the table)")


def stage_in_words(described: Mapping[str, Any]) -> str:
    """A first stage as its manifest has it, on one line: its kind, and what can be said in a word."""
    words = (f"{name} {value}" for name, value in described.items() if name != "kind" and isinstance(value, (str, int, float)))
    return ", ".join([str(described["kind"]), *words])


def render_table(headers: Sequence[str], rows: Sequence[Sequence[object]], *, right: Sequence[str] = ()) -> str:
    """Plain text columns, two spaces apart.

    Args:
        headers: one per column; empty strings give no header line.
        rows: cells, printed by ``str``; None prints as ``-``.
        right: headers of the columns to align on the right (numbers).
    """
    cells = [["-" if cell is None else str(cell) for cell in row] for row in rows]
    widths = [max(len(line[i]) for line in [list(headers), *cells]) for i in range(len(headers))]
    lines = [list(headers), *cells] if any(headers) else cells
    aligned = []
    for line in lines:
        parts = (
            cell.rjust(width) if header in right else cell.ljust(width) for cell, width, header in zip(line, widths, headers, strict=True)
        )
        aligned.append("  ".join(parts).rstrip())
    return "\n".join(aligned)


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
