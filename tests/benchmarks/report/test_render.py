"""Tables in documents come from result files, stay the same when nothing changed, and keep the
kinds of numbers apart."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import Row, make_document
from espnx.benchmarks.report.render import (
    disk_kind,
    render_all,
    render_text,
    result_files,
    source_root,
)
from espnx.errors import FormatError, InvalidInputError
from espnx.tables import render_json
from tests.benchmarks.common import MACHINE, row

ROOT = Path(__file__).resolve().parents[3]
PARAMS = {
    "op": "read",
    "pattern": "random",
    "block_bytes": 4096,
    "queue_depth": 128,
    "throttle_bytes_per_s": None,
    "checksums": True,
}
METRICS = {"bytes_per_s": 4.2e8, "iops": 102_500.0, "cpu_us_per_item": 3.25, "ratio_iqr_fio": 0.07}
PLACE = "<!-- machine -->\n<!-- /machine -->\n"
README = f"# Title\n\n{PLACE}\nbefore\n\n<!-- bench:io -->\nstale\n<!-- /bench -->\n\nafter\n"


def io_row(**changes: Any) -> Row:
    return row(**{"params": PARAMS, "metrics": METRICS, "ratio": {"fio": 0.974}} | changes)


def tree(root: Path, rows: list[Row], text: str = README) -> Path:
    """A source tree with one result file."""
    (root / "benchmarks/results").mkdir(parents=True)
    document = make_document(
        "espnx bench io --baseline fio", "0123456789abcdef", True, MACHINE, rows
    )
    (root / "benchmarks/results/io.json").write_text(json.dumps(document))
    (root / "README.md").write_text(text)
    return root


def render(root: Path, *, write: bool = True) -> list[str]:
    return [path.name for path in render_all(root, result_files(root), write=write)]


def test_a_marked_block_is_filled_and_the_rest_stays(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row(), io_row(system="fio", ratio={})])
    assert render(root) == ["README.md"]
    text = (root / "README.md").read_text()
    assert text.startswith("# Title\n\n<!-- machine -->\n\nMeasured on: ")
    # what is the same in all rows is folded
    assert "<!-- /machine -->\n\nbefore\n\n<!-- bench:io -->\n\n| system |" in text
    assert text.endswith("<!-- /bench -->\n\nafter\n")
    assert "stale" not in text
    # in view, and folded
    line = " ".join(line for line in text.splitlines() if "espnx-uring" in line)
    for cell in (
        "random read 4 KiB QD128",
        "cold",
        "420",
        "102.5",
        "3.25",
        "1.00",
        "yes",
        "0.97x [0.07]",
    ):
        assert f" {cell} " in line
    assert "commit 0123456789 with changes" in text


def test_rendering_twice_changes_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row()])
    assert render(root)
    text = (root / "README.md").read_text()
    assert render(root) == []
    assert (root / "README.md").read_text() == text


def test_check_writes_nothing(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row()])
    assert render(root, write=False) == ["README.md"]
    assert (root / "README.md").read_text() == README


def test_a_table_goes_stale_with_its_results(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row()])
    render(root)
    results = root / "benchmarks/results/io.json"
    results.write_text(results.read_text().replace("0.974", "0.874"))
    assert render(root, write=False) == ["README.md"]
    (root / "README.md").write_text((root / "README.md").read_text().replace("102.5", "999.9"))
    assert render(root) == ["README.md"]
    assert "999.9" not in (root / "README.md").read_text()


def test_documents_below_docs_are_rendered_too(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row()], text="no block\n")
    (root / "docs/more").mkdir(parents=True)
    (root / "docs/more/disk.md").write_text(f"{README}\n{README}")
    assert render(root) == ["disk.md"]
    # in view and folded, twice
    assert (root / "docs/more/disk.md").read_text().count("espnx-uring") == 4


def test_kinds_never_share_a_table(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row(), io_row(kind="modelled", system="smartssd")])
    render(root)
    # each is followed by its folded columns
    tables = (root / "README.md").read_text().split("| what |")[1::2]
    assert len(tables) == 2
    assert (root / "README.md").read_text().count("<details") == 2
    assert "espnx-uring" in tables[0]
    assert "smartssd" not in tables[0]
    text = (root / "README.md").read_text()
    assert (
        text.index("espnx-uring")
        < text.index("(Measured;")
        < text.index("smartssd")
        < text.index("(Modelled;")
    )


def test_a_wrong_row_shows_no_speed(tmp_path: Path) -> None:
    bad = io_row(
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
    root = tree(tmp_path, [bad])
    render(root)
    line = next(
        line for line in (root / "README.md").read_text().splitlines() if "espnx-uring" in line
    )
    assert " NO " in line
    assert "x" not in line.replace("espnx", "")


def test_a_block_without_results_is_empty() -> None:
    assert render_text(README, {}) == README.replace("stale\n", "")


def with_machine(**facts: Any) -> dict[str, Any]:
    return make_document("espnx bench io", None, None, {**MACHINE, **facts}, [io_row()])


def test_a_machine_stands_once_on_a_page() -> None:
    text = render_text(
        f"{PLACE}{README}",
        {Path("a.json"): with_machine(), Path("b.json"): with_machine(load_average=3)},
    )
    assert text.count("2 cores") == 2  # once in each of the two places for it
    assert "on machine" not in text


def test_tables_name_their_machine_where_there_are_several() -> None:
    text = render_text(
        README,
        {
            Path("a.json"): with_machine(),
            Path("b.json"): with_machine(cores=64),
            Path("c.json"): with_machine(),
        },
    )
    assert "- machine A: c, 2 cores" in text
    assert "- machine B: c, 64 cores" in text
    assert re.findall(r"Measured on machine (\w);.*file `(\w)", text) == [
        ("A", "a"),
        ("B", "b"),
        ("A", "c"),
    ]


def test_tables_without_a_place_for_their_machine_are_refused() -> None:
    with pytest.raises(InvalidInputError, match="<!-- machine -->"):
        render_text(README.replace(PLACE, ""), {Path("a.json"): with_machine()})


@pytest.mark.parametrize(
    ("disk", "said"),
    [
        ("vda (disk vda, rotational 1)", "a virtual disk (virtio, `vda`)"),
        ("xvdb1 (disk xvdb)", "a virtual disk (Xen, `xvdb1`)"),
        ("nvme0n1p2 (disk nvme0n1)", "an NVMe drive (`nvme0n1p2`)"),
        ("sda (rotational 1)", "a SCSI or SATA disk (`sda`)"),
        ("dm-0 (disk dm-0)", "dm-0 (disk dm-0)"),
        ("no block device", "no block device"),
    ],
)
def test_a_disk_is_called_what_it_is(disk: str, said: str) -> None:
    assert disk_kind(disk) == said


def test_unknown_cases_and_damaged_files_are_errors(tmp_path: Path) -> None:
    root = tree(tmp_path, [io_row()], text=README.replace("bench:io", "bench:nothing"))
    with pytest.raises(InvalidInputError, match="nothing"):
        render(root)
    (root / "benchmarks/results/io.json").write_text("{}")
    with pytest.raises(FormatError, match=r"io\.json"):
        render(root)


def test_the_tables_of_this_tree_are_up_to_date() -> None:
    root = source_root()
    assert render_all(root, result_files(root), write=False) == [], "run `espnx bench --render`"


def test_result_files_of_the_repository_are_compared_line_by_line() -> None:
    files = sorted((ROOT / "benchmarks/results").glob("*.json"))
    assert sum(len(path.read_text().splitlines()) for path in files) <= 4_000
    for path in files:
        assert path.read_text() == render_json(json.loads(path.read_text())), path
