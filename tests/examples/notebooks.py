"""Runs a notebook's cells in this process, one after the other, as Jupyter would where it is not
installed. Used by test_notebooks.py.

    python -m tests.examples.notebooks examples/tour.ipynb

writes what they print into the notebook.
"""

from __future__ import annotations

import contextlib
import io
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def load(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text(encoding="utf-8")))


def code_cells(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


def shown(cell: dict[str, Any]) -> str:
    """What the notebook says that a cell prints."""
    return "".join("".join(output["text"]) for output in cell["outputs"])


def run(notebook: dict[str, Any]) -> Iterator[tuple[dict[str, Any], str]]:
    """Each cell of code, and what it printed on standard output. The current directory is that of
    the notebook."""
    names: dict[str, Any] = {"__name__": "__main__"}
    for cell in code_cells(notebook):
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed):
            exec(compile("".join(cell["source"]), "<cell>", "exec"), names)
        yield cell, printed.getvalue()


def write_outputs(path: Path) -> None:
    """Runs a notebook where it lies, and puts what its cells print into it."""
    notebook = load(path)
    with contextlib.chdir(path.parent):
        for cell, printed in run(notebook):
            text = printed.splitlines(keepends=True)
            cell["outputs"] = (
                [{"name": "stdout", "output_type": "stream", "text": text}] if text else []
            )
    path.write_text(json.dumps(notebook, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_outputs(Path(sys.argv[1]))
