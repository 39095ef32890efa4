"""Rows and result files: schema version 1. Other programs read these keys, so a file that strays
from them is refused here."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from espnx.errors import FormatError

SCHEMA_VERSION = 1
KINDS = ("measured", "replayed", "emulated", "modelled")
CACHES = ("cold", "warm")
TOP_LEVEL = ("schema_version", "command", "commit", "dirty", "machine", "rows")
MACHINE = ("cpu", "cores", "memory_bytes", "kernel", "disk", "fs", "fio", "python", "torch")


@dataclass(frozen=True)
class Row:
    """What one system did at one point of one case.

    Attributes:
        case: name of the case.
        params: the point, the same for all systems measured there.
        system: what was measured (``espnx-uring``, ``fio``, ...).
        kind: ``measured``, ``replayed``, ``emulated`` or ``modelled``.
        requested_path, effective_path: the path of the bytes.
        cache: ``cold`` or ``warm``: the page cache, as observed before every run.
        n: runs.
        median_s, p99_s, iqr_s: of the time of a run; None where there was none.
        bytes_asked: of one run.
        bytes_moved: what the device really moved in one run, by the kernel's count (median); the
            engine's own where the kernel has none.
        correct: whether the results were verified and right. A wrong system has no runs and no
            ratio.
        metrics: name -> number, median of the runs.
        ratio: baseline -> the baseline's time per byte over ours, median of the paired runs (above
            1: ours is faster).
    """

    case: str
    params: Mapping[str, Any]
    system: str
    kind: str
    requested_path: str
    effective_path: str
    cache: str
    n: int
    median_s: float | None
    p99_s: float | None
    iqr_s: float | None
    bytes_asked: int
    bytes_moved: int
    correct: bool
    metrics: Mapping[str, float] = field(default_factory=dict)
    ratio: Mapping[str, float] = field(default_factory=dict)


def untimed(
    case: str,
    params: Mapping[str, Any],
    system: str,
    *,
    path: str,
    effective_path: str | None = None,
    cache: str = "warm",
    correct: bool = True,
    metrics: Mapping[str, float] | None = None,
) -> Row:
    """A row without runs: of a system that cannot run here, as `params` says, or of counts that no
    clock belongs to. `effective_path` None: as requested."""
    return Row(
        case=case,
        params=params,
        system=system,
        kind="measured",
        requested_path=path,
        effective_path=effective_path or path,
        cache=cache,
        n=0,
        median_s=None,
        p99_s=None,
        iqr_s=None,
        bytes_asked=0,
        bytes_moved=0,
        correct=correct,
        metrics=metrics or {},
    )


def found_wrong(row: Row) -> Row:
    """The row of a system whose results turned out to be wrong: its times and counts are
    dropped."""
    return replace(
        row,
        n=0,
        median_s=None,
        p99_s=None,
        iqr_s=None,
        bytes_asked=0,
        bytes_moved=0,
        correct=False,
        metrics={},
        ratio={},
    )


def make_document(
    command: str,
    commit: str | None,
    dirty: bool | None,
    machine: Mapping[str, Any],
    rows: Sequence[Row],
    *,
    note: str | None = None,
) -> dict[str, Any]:
    """A result file's content, validated. `note`: what somebody had to say about the run."""
    document = {
        "schema_version": SCHEMA_VERSION,
        "command": command,
        "commit": commit,
        "dirty": dirty,
        "machine": dict(machine),
        "rows": [asdict(row) for row in rows],
        **({} if note is None else {"note": note}),
    }
    validate(document)
    return document


#: Documents of other commands that lie among result files.
NO_RESULTS = ("validation.json",)


def files_in(folder: Path) -> list[Path]:
    """The files of results, by name."""
    return sorted(path for path in folder.glob("*.json") if path.name not in NO_RESULTS)


def load(path: str | os.PathLike[str]) -> dict[str, Any]:
    """A result file, validated. Raises FormatError."""
    try:
        document = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise FormatError(
            "cannot read a result file",
            path=path,
            got=str(error),
            expected="JSON of `espnx bench --json`",
        ) from error
    validate(document, path)
    return dict(document)


def rows_of(document: Mapping[str, Any]) -> list[Row]:
    return [Row(**row) for row in document["rows"]]


def validate(document: Any, path: str | os.PathLike[str] | None = None) -> None:
    """Raises FormatError unless `document` has exactly the keys of schema version 1, of the right
    types."""
    problem = _document_problem(document)
    if problem:
        raise FormatError(
            "result file does not fit its schema",
            path=path,
            got=problem,
            expected=f"schema version {SCHEMA_VERSION}",
        )


def _document_problem(document: Any) -> str | None:
    if not isinstance(document, dict):
        return f"a {type(document).__name__} instead of an object"
    if document.get("schema_version") != SCHEMA_VERSION:
        return f"schema_version {document.get('schema_version')!r}"
    if problem := _keys_problem(
        document, [*TOP_LEVEL, "note"] if "note" in document else TOP_LEVEL
    ):
        return problem
    if not isinstance(document.get("note", ""), str):
        return "note must be a string"
    if not isinstance(document["command"], str) or not isinstance(document["rows"], list):
        return "command must be a string and rows a list"
    if not isinstance(document["commit"], str | None) or not isinstance(
        document["dirty"], bool | None
    ):
        return "commit must be a string or null, dirty true, false or null"
    if not isinstance(document["machine"], dict):
        return "machine must be an object"
    if missing := [key for key in MACHINE if key not in document["machine"]]:
        return f"machine lacks {', '.join(missing)}"
    for number, row in enumerate(document["rows"]):
        if problem := row_problem(row):
            return f"row {number}: {problem}"
    return None


def row_problem(row: Any) -> str | None:
    """What about a row does not fit the schema; None: nothing."""
    if not isinstance(row, dict):
        return "not an object"
    if problem := _keys_problem(row, [item.name for item in fields(Row)]):
        return problem
    for name in ("case", "system", "requested_path", "effective_path"):
        if not isinstance(row[name], str):
            return f"{name} must be a string"
    if row["kind"] not in KINDS or row["cache"] not in CACHES:
        return f"kind {row['kind']!r}, cache {row['cache']!r}"
    for name in ("n", "bytes_asked", "bytes_moved"):
        if not isinstance(row[name], int) or isinstance(row[name], bool) or row[name] < 0:
            return f"{name} must be a whole number, at least 0"
    if not isinstance(row["correct"], bool) or not isinstance(row["params"], dict):
        return "correct must be true or false, params an object"
    for name in ("median_s", "p99_s", "iqr_s"):
        if not _is_number(row[name]) and not (row[name] is None and row["n"] == 0):
            return f"{name} must be a number (null only where n is 0)"
    for name in ("metrics", "ratio"):
        if not isinstance(row[name], dict) or not all(
            _is_number(value) for value in row[name].values()
        ):
            return f"{name} must map names to numbers"
    if row["ratio"] and not row["correct"]:
        return "a ratio on wrong results"
    return None


def _keys_problem(found: Mapping[str, Any], expected: Sequence[str]) -> str | None:
    wrong = sorted(set(found) ^ set(expected))
    return f"keys missing or unknown: {', '.join(wrong)}" if wrong else None


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float)
        and not isinstance(value, bool)
        and value == value
        and abs(value) != float("inf")
    )
