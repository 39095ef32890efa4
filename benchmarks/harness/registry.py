"""The cases that ``espnx bench`` knows: ``CASE`` of every room's ``case.py``. A new case is a new
room, nothing else."""

from __future__ import annotations

import importlib
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .result import Row

Say = Callable[[str], None]


@dataclass(frozen=True)
class Case:
    """One benchmark. Importing its module, and `configure`, must stay light: they run for
    ``--help``.

    Attributes:
        name: on the command line, and in the rows.
        summary: one line.
        configure: adds the case's own options (``--json``, ``--pairs``, ``--seed``, ``--quick`` and
            ``--render`` are there already).
        run: measures; gets the options and a function for progress. Verifies results first and
            gives wrong ones no ratio.
        table: headers and cells of a table of rows of this case, for the terminal and for
            documents.
        views: further tables by name, for documents: a block names one as ``bench:CASE:VIEW``.
        standalone: what to do instead of measuring, or None: returns the text to print (the options
            decide, as with ``--tune``).
        leaves: what its runs have left in a directory to be used again, and `espnx bench clean`
            removes: files, or folders of stores.
    """

    name: str
    summary: str
    configure: Callable[[ArgumentParser], None]
    run: Callable[[Namespace, Say], list[Row]]
    table: Callable[[Sequence[Row]], tuple[list[str], list[list[str]]]]
    standalone: Callable[[Namespace, Say], str | None] = lambda args, say: None
    views: Mapping[str, Callable[[Sequence[Row]], tuple[list[str], list[list[str]]]]] = field(
        default_factory=dict
    )
    leaves: Callable[[Path], Sequence[Path]] = lambda directory: ()


def cases() -> dict[str, Case]:
    """All cases, by name."""
    rooms = sorted(path.parent.name for path in Path(__file__).parents[1].glob("*/case.py"))
    found = [importlib.import_module(f"espnx.benchmarks.{room}.case").CASE for room in rooms]
    return {case.name: case for case in found}
