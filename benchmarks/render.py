"""Tables in documents, rendered from result files: what stands between ``<!-- bench:CASE -->`` and ``<!-- /bench -->`` is never typed."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from espnx.errors import InvalidInputError

from .registry import Case, cases
from .result import KINDS, Row, load, rows_of

BLOCK = re.compile(r"(<!-- bench:(?P<case>[\w-]+) -->\n).*?(<!-- /bench -->)", re.DOTALL)
RESULTS = "benchmarks/results"


def source_root() -> Path:
    """The clone that this package runs from. Raises InvalidInputError where it is installed without one."""
    root = Path(__file__).resolve().parent.parent
    if not (root / "pyproject.toml").is_file():
        raise InvalidInputError("tables live in the source tree", got=f"an installation in {root}", fix="run this in a clone of espnx")
    return root


def documents(root: Path) -> list[Path]:
    """README.md and the Markdown files below docs/ that hold marked blocks."""
    candidates = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [path for path in candidates if path.is_file() and BLOCK.search(path.read_text(encoding="utf-8"))]


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
        fresh = render_text(text, results)
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
        return f"{match[1]}{render_case(case, results)}{match[3]}"

    return BLOCK.sub(fill, text)


def render_case(case: Case, results: Mapping[Path, Mapping[str, Any]]) -> str:
    """Markdown of all rows of a case: one table per result file and kind, for measured and modelled numbers never share a column.
    Nothing where there are no results."""
    parts = []
    for path, document in results.items():
        rows = [row for row in rows_of(document) if row.case == case.name]
        for kind in KINDS:
            if chosen := [row for row in rows if row.kind == kind]:
                parts += ["", *_table(case, chosen), "", _caption(path, document, kind, chosen)]
    return "\n".join([*parts, "", ""]) if parts else ""


def _table(case: Case, rows: Sequence[Row]) -> Iterable[str]:
    headers, cells = case.table(rows)
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
