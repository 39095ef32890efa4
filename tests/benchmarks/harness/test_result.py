"""The schema of result files: exactly the documented keys, of the documented types."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import load, make_document, rows_of, validate
from espnx.errors import FormatError
from tests.benchmarks.common import MACHINE, row

KEYS = (
    "case params system kind requested_path effective_path cache n median_s p99_s iqr_s "
    "bytes_asked bytes_moved correct metrics ratio"
)


@pytest.fixture
def document() -> dict[str, Any]:
    return make_document(
        "espnx bench io", "abc", False, MACHINE, [row(), row(system="fio", ratio={})]
    )


def test_the_keys_are_those_that_other_programs_read(document: dict[str, Any]) -> None:
    assert list(document) == ["schema_version", "command", "commit", "dirty", "machine", "rows"]
    assert document["schema_version"] == 1
    assert list(document["rows"][0]) == KEYS.split()


def test_a_file_survives_the_way_to_disk_and_back(document: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    path.write_text(json.dumps(document))
    assert load(path) == document
    assert rows_of(load(path))[0] == row()


@pytest.mark.parametrize("key", ["schema_version", "command", "commit", "dirty", "machine", "rows"])
def test_a_missing_top_level_key(document: dict[str, Any], key: str) -> None:
    del document[key]
    with pytest.raises(FormatError, match=key):
        validate(document)


@pytest.mark.parametrize("key", [*MACHINE])
def test_a_missing_machine_key(document: dict[str, Any], key: str) -> None:
    del document["machine"][key]
    with pytest.raises(FormatError, match=key):
        validate(document)


@pytest.mark.parametrize("key", list(row().__dict__))
def test_a_missing_or_unknown_row_key(document: dict[str, Any], key: str) -> None:
    without, more = copy.deepcopy(document), copy.deepcopy(document)
    del without["rows"][1][key]
    more["rows"][1][f"{key}_x"] = 1
    for bad in (without, more):
        with pytest.raises(FormatError, match=f"row 1: .*{key}"):
            validate(bad)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("kind", "guessed"),
        ("cache", "lukewarm"),
        ("case", 1),
        ("n", -1),
        ("n", 1.5),
        ("n", True),
        ("median_s", None),
        ("median_s", float("nan")),
        ("p99_s", "0.1"),
        ("iqr_s", float("inf")),
        ("bytes_asked", 1.0),
        ("bytes_moved", -1),
        ("correct", "yes"),
        ("correct", False),  # with a ratio
        ("params", []),
        ("metrics", {"iops": None}),
        ("ratio", {"fio": "1x"}),
    ],
)
def test_values_of_the_wrong_kind(document: dict[str, Any], key: str, value: Any) -> None:
    document["rows"][0][key] = value
    with pytest.raises(FormatError, match="row 0"):
        validate(document)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("schema_version", 2),
        ("dirty", "no"),
        ("commit", 7),
        ("rows", {}),
        ("machine", []),
        ("command", None),
    ],
)
def test_top_level_values_of_the_wrong_kind(document: dict[str, Any], key: str, value: Any) -> None:
    document[key] = value
    with pytest.raises(FormatError):
        validate(document)


def test_a_row_without_runs_has_no_times() -> None:
    make_document(
        "c",
        None,
        None,
        MACHINE,
        [row(n=0, median_s=None, p99_s=None, iqr_s=None, correct=False, ratio={})],
    )


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema_version": 1}'])
def test_files_that_are_no_results(tmp_path: Path, text: str) -> None:
    path = tmp_path / "r.json"
    path.write_text(text)
    with pytest.raises(FormatError, match=r"r\.json"):
        load(path)


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(FormatError, match="none"):
        load(tmp_path / "none.json")
