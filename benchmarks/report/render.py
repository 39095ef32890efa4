"""Tables in documents, rendered from result files: what stands between ``<!-- bench:CASE -->`` and
``<!-- /bench -->`` is never typed.

``<!-- bench:CASE:VIEW show=table corpus=B -->`` takes another table of the case (`Case.views`), and
only rows with those parameters (or that ``system``); several values of one are joined by ``|``.
``<!-- machine -->`` says once a page what its tables were measured on, ``<!-- plots:NAME,... -->``
shows plots that results have rows for (plots.py), ``<!-- headlines -->`` the few numbers that the
front page leads with, ``<!-- drives -->`` what drives that compute bring (headlines.py), ``<!--
training -->`` the record of the demo's model (training.py).
"""

from __future__ import annotations

import os
import re
import string
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError

from ..harness.registry import cases
from ..harness.result import KINDS, Row, files_in, load, rows_of
from . import columns, headlines, plots, training

BLOCK = re.compile(
    r"(<!-- bench:(?P<case>[\w-]+)(?::(?P<view>[\w-]+))?(?P<filters>(?: [\w-]+=[^\s>]+)*) -->\n"
    r").*?(<!-- /bench -->)",
    re.DOTALL,
)
MACHINE = re.compile(r"(<!-- machine -->\n).*?(<!-- /machine -->)", re.DOTALL)
RESULTS = "benchmarks/results"
LETTERS = string.ascii_uppercase


@dataclass(frozen=True)
class Table:
    """What a page shows of a result file: rows of one kind."""

    path: Path
    document: Mapping[str, Any]
    kind: str
    rows: Sequence[Row]
    headers: Sequence[str]
    cells: Sequence[Sequence[str]]

    def markdown(self, machines: Sequence[str]) -> str:
        """`machines`: those of the page; the caption names one where there are several."""
        return "\n".join(
            ["", *columns.markdown(self.headers, self.cells), "", self._caption(machines)]
        )

    def _caption(self, machines: Sequence[str]) -> str:
        commit = self.document["commit"]
        version = (
            f"commit {commit[:10]}{' with changes' if self.document['dirty'] else ''}"
            if commit
            else "unknown commit"
        )
        runs = sorted({row.n for row in self.rows})
        count = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
        how_often = "" if runs == [0] else f" {count} runs each;"  # 0: of what is counted, or sized
        place = (
            f" on machine {LETTERS[machines.index(describe(self.document['machine']))]}"
            if len(machines) > 1
            else ""
        )
        return (
            f"({self.kind.capitalize()}{place};{how_often} `{self.document['command']}`, "
            f"{version}; file `{self.path.name}`.)"
        )


def source_root() -> Path:
    """The clone that this package runs from. Raises InvalidInputError where it is installed without
    one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise InvalidInputError(
            "tables live in the source tree",
            got=f"an installation in {root}",
            fix="run this in a clone of espnx",
        )
    return root


def documents(root: Path) -> list[Path]:
    """README.md and the Markdown files below docs/ that hold marked blocks."""
    candidates = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = [path for path in candidates if path.is_file()]
    blocks = (BLOCK, headlines.BLOCK, headlines.DRIVES, plots.BLOCK, training.BLOCK)
    return [
        path
        for path in found
        if any(block.search(path.read_text(encoding="utf-8")) for block in blocks)
    ]


def result_files(root: Path) -> list[Path]:
    return files_in(root / RESULTS)


def render_all(root: Path, files: Sequence[Path], *, write: bool) -> list[Path]:
    """Renders every marked block of the documents from the result files.

    Args:
        root: the source tree.
        files: result files; a block shows, file by file, their rows of its case.
        write: whether the documents are rewritten.

    Returns:
        The documents that were stale.

    Raises:
        FormatError: a result file does not fit its schema.
        InvalidInputError: a block names an unknown case.
    """
    results = {path: load(path) for path in files}
    stale = []
    for path in documents(root):
        text = path.read_text(encoding="utf-8")
        fresh = training.fill(
            plots.fill(
                render_text(text, results),
                results,
                os.path.relpath(root / plots.FOLDER, path.parent),
            ),
            root,
        )
        if fresh != text:
            stale.append(path)
            if write:
                path.write_text(fresh, encoding="utf-8")
    return stale


def render_text(text: str, results: Mapping[Path, Mapping[str, Any]]) -> str:
    """The text with its tables filled."""
    tables = {match.start(): tables_of(match, results) for match in BLOCK.finditer(text)}
    machines = list(
        dict.fromkeys(
            describe(table.document["machine"]) for found in tables.values() for table in found
        )
    )
    if machines and not MACHINE.search(text):
        raise InvalidInputError(
            "a page of tables does not say what they were measured on",
            fix="<!-- machine --> and <!-- /machine -->",
        )
    filled = {
        start: _joined(table.markdown(machines) for table in found)
        for start, found in tables.items()
    }
    text = BLOCK.sub(lambda match: f"{match[1]}{filled[match.start()]}{match[5]}", text)
    text = MACHINE.sub(
        lambda match: f"{match[1]}{_joined(_machine_lines(machines))}{match[2]}", text
    )
    return headlines.fill(text, results)


def tables_of(match: re.Match[str], results: Mapping[Path, Mapping[str, Any]]) -> list[Table]:
    """The tables of a marked block: one for each result file and kind that has rows for it, for
    measured and modelled numbers never share a column. Raises InvalidInputError for a case or a
    view that nobody knows."""
    known = cases()
    case = known.get(match["case"])
    if case is None:
        raise InvalidInputError(
            "a marked block names an unknown benchmark",
            got=match["case"],
            expected=", ".join(known),
        )
    view = match["view"]
    if view is not None and view not in case.views:
        raise InvalidInputError(
            "a marked block names an unknown table",
            got=match[0].splitlines()[0],
            expected=", ".join(case.views),
        )
    filters = dict(word.split("=", 1) for word in match["filters"].split())
    make = case.table if view is None else case.views[view]
    found = []
    for path, document in results.items():
        rows = [row for row in rows_of(document) if row.case == case.name and passes(row, filters)]
        for kind in KINDS:
            if chosen := [row for row in rows if row.kind == kind]:
                found.append(Table(path, document, kind, chosen, *make(chosen)))
    return found


def passes(row: Row, filters: Mapping[str, str]) -> bool:
    """Whether every named parameter (or the system) has one of the values asked for, as text."""
    found = {**row.params, "system": row.system}
    return all(str(found.get(name)) in wanted.split("|") for name, wanted in filters.items())


def describe(machine: Mapping[str, Any]) -> str:
    """A machine in a line."""
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB of memory"
    fio = f", fio {machine['fio'].removeprefix('fio-')}" if machine["fio"] else ""
    disk = f"{machine['fs']} on {disk_kind(machine['disk'])}"
    gpu = f", {machine['gpu']}" if isinstance(machine.get("gpu"), str) else ""
    return (
        f"{machine['cpu']}, {machine['cores']} cores, {memory}, Linux {machine['kernel']}, {disk}"
        f"{fio}{gpu}"
    )


def disk_kind(text: str) -> str:
    """What a disk is, by the name that the kernel gives it: ``vda (scheduler ...)`` is a virtual
    one."""
    name = text.split(" ", 1)[0]
    kinds = {
        "vd": "a virtual disk (virtio",
        "xvd": "a virtual disk (Xen",
        "nvme": "an NVMe drive (",
        "sd": "a SCSI or SATA disk (",
    }
    kind = next(
        (words for prefix, words in kinds.items() if re.fullmatch(rf"{prefix}[a-z0-9]+", name)),
        None,
    )
    return text if kind is None else f"{kind}{'' if kind.endswith('(') else ', '}`{name}`)"


def _machine_lines(machines: Sequence[str]) -> list[str]:
    if len(machines) == 1:
        return ["", f"Measured on: {machines[0]}."]
    lines = [
        f"- machine {letter}: {line}." for letter, line in zip(LETTERS, machines, strict=False)
    ]
    return ["", "Measured on:", "", *lines] if lines else []


def _joined(parts: Iterable[str]) -> str:
    """Lines, and an empty one after them, or nothing."""
    lines = list(parts)
    return "\n".join([*lines, "", ""]) if lines else ""
