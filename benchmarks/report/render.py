"""Tables in documents, rendered from result files: what stands between ``<!-- bench:CASE -->`` and ``<!-- /bench -->`` is never typed.

``<!-- bench:CASE:VIEW show=table corpus=B -->`` takes another table of the case (`Case.views`), and only rows with those parameters (or
that ``system``); several values of one are joined by ``|``. ``<!-- training -->`` takes the record of the demo's model (training.py).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError

from ..harness.registry import Case, cases
from ..harness.result import KINDS, Row, load, rows_of
from . import training

BLOCK = re.compile(
    r"(<!-- bench:(?P<case>[\w-]+)(?::(?P<view>[\w-]+))?(?P<filters>(?: [\w-]+=[^\s>]+)*) -->\n).*?(<!-- /bench -->)", re.DOTALL
)
RESULTS = "benchmarks/results"


def source_root() -> Path:
    """The clone that this package runs from. Raises InvalidInputError where it is installed without one."""
    root = Path(__file__).resolve().parents[2]
    if not (root / "pyproject.toml").is_file():
        raise InvalidInputError("tables live in the source tree", got=f"an installation in {root}", fix="run this in a clone of espnx")
    return root


def documents(root: Path) -> list[Path]:
    """README.md and the Markdown files below docs/ that hold marked blocks."""
    candidates = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    found = [path for path in candidates if path.is_file()]
    return [path for path in found if any(block.search(path.read_text(encoding="utf-8")) for block in (BLOCK, training.BLOCK))]


def result_files(root: Path) -> list[Path]:
    return sorted((root / RESULTS).glob("*.json"))


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
        fresh = training.fill(render_text(text, results), root)
        if fresh != text:
            stale.append(path)
            if write:
                path.write_text(fresh, encoding="utf-8")
    return stale


def render_text(text: str, results: Mapping[Path, Mapping[str, Any]]) -> str:
    """The text with its marked blocks filled."""
    known = cases()

    def fill(match: re.Match[str]) -> str:
        case = known.get(match["case"])
        if case is None:
            raise InvalidInputError("a marked block names an unknown benchmark", got=match["case"], expected=", ".join(known))
        view = match["view"]
        if view is not None and view not in case.views:
            raise InvalidInputError("a marked block names an unknown table", got=match[0].splitlines()[0], expected=", ".join(case.views))
        filters = dict(word.split("=", 1) for word in match["filters"].split())
        return f"{match[1]}{render_case(case, results, view, filters)}{match[5]}"

    return BLOCK.sub(fill, text)


def render_case(
    case: Case, results: Mapping[Path, Mapping[str, Any]], view: str | None = None, filters: Mapping[str, str] | None = None
) -> str:
    """Markdown of all rows of a case that pass the filters: one table per result file and kind, for measured and modelled numbers never
    share a column. Nothing where there are no results."""
    parts = []
    table = case.table if view is None else case.views[view]
    for path, document in results.items():
        rows = [row for row in rows_of(document) if row.case == case.name and passes(row, filters or {})]
        for kind in KINDS:
            if chosen := [row for row in rows if row.kind == kind]:
                parts += ["", *_table(table(chosen)), "", _caption(path, document, kind, chosen)]
    return "\n".join([*parts, "", ""]) if parts else ""


def passes(row: Row, filters: Mapping[str, str]) -> bool:
    """Whether every named parameter (or the system) has one of the values asked for, as text."""
    found = {**row.params, "system": row.system}
    return all(str(found.get(name)) in wanted.split("|") for name, wanted in filters.items())


def _table(made: tuple[list[str], list[list[str]]]) -> Iterable[str]:
    headers, cells = made
    yield "| " + " | ".join(headers) + " |"
    yield "|" + " --- |" * len(headers)
    for line in cells:
        yield "| " + " | ".join(line) + " |"


def _caption(path: Path, document: Mapping[str, Any], kind: str, rows: Sequence[Row]) -> str:
    machine, commit = document["machine"], document["commit"]
    version = f"commit {commit[:10]}{' with changes' if document['dirty'] else ''}" if commit else "unknown commit"
    memory = f"{machine['memory_bytes'] / 2**30:.0f} GiB"
    place = ", ".join(
        [
            machine["cpu"],
            f"{machine['cores']} cores",
            memory,
            f"Linux {machine['kernel']}",
            machine["disk"],
            machine["fs"],
            f"fio {machine['fio']}",
        ]
    )
    runs = sorted({row.n for row in rows})
    count = f"{runs[0]}" if len(runs) == 1 else f"{runs[0]} to {runs[-1]}"
    return f"({kind.capitalize()}; {count} runs each; `{document['command']}`, {version}; {place}; file `{path.name}`.)"
