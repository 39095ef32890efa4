"""A page shows ratios first, in seven columns at most; nothing of a table is lost."""

from __future__ import annotations

import pytest

from espnx.benchmarks.report import columns

HEADERS = ["corpus", "system", "memory", "ms", "IQR", "recall", "n", "correct", "vs mmap", "vs fio"]
CELLS = [
    ["A", name, "1 GiB", ms, "0.1", "0.95", "5", "yes", ratio, "2.0x"]
    for name, ms, ratio in (("espnx", "8", "9x"), ("mmap", "72", "-"))
]


def names(headers: list[str], cells: list[list[str]]) -> tuple[list[str], list[str]]:
    shown, folded = columns.in_view(headers, cells)
    return [headers[at] for at in shown], [headers[at] for at in folded]


def test_ratios_stand_first() -> None:
    shown, folded = names(HEADERS, CELLS)
    assert shown == ["system", "recall", "vs mmap", "vs fio", "memory", "ms", "IQR"]
    assert folded == ["system", "corpus", "n", "correct"]
    assert names(["what", "system", "ms", "vs fio"], [["a", "b", "1", "2x"]]) == (
        ["what", "system", "vs fio", "ms"],
        [],
    )


@pytest.mark.parametrize("ratios", range(12))
def test_no_more_than_seven_and_none_lost(ratios: int) -> None:
    headers = [
        "work",
        "system",
        "ms",
        "n",
        "recall@10",
        *(f"vs {number}" for number in range(ratios)),
    ]
    shown, folded = names(
        headers, [[str(number + line) for number in range(len(headers))] for line in (0, 1)]
    )
    assert len(shown) <= columns.SHOWN
    assert set(shown) | set(folded) == set(headers)
    assert shown[:2] == ["work", "system"]
    assert ("ms" in shown, "recall@10" in shown) == (True, True)


def test_what_is_wrong_is_in_view() -> None:
    shown, _ = names(HEADERS, [CELLS[0], [*CELLS[1][:7], "NO", *CELLS[1][8:]]])
    assert "correct" in shown


def test_what_leans_on_the_column_before_takes_its_name() -> None:
    assert columns.full_names(["reads", "of one", "KiB", "of one", "x fio"]) == [
        "reads",
        "reads, of one",
        "KiB",
        "KiB, of one",
        "x fio",
    ]
    assert columns.full_names(["rounds", "x one", "KiB", "of it", "x one"]) == [
        "rounds",
        "rounds, x one",
        "KiB",
        "KiB, of it",
        "KiB, x one",
    ]


def test_folds() -> None:
    text = "\n".join(columns.markdown(HEADERS, CELLS))
    assert text.startswith("| system | recall | vs mmap |")
    assert (
        '\n\n<details markdown="1">\n<summary>3 more columns</summary>\n\n'
        "| system | corpus | n | correct |\n" in text
    )
    assert text.endswith("|\n\n</details>")
    long = columns.markdown(
        ["what", "ms"], [["a", str(number)] for number in range(columns.ROWS_SHOWN + 1)]
    )
    assert long[:4] == ['<details markdown="1">', "<summary>25 rows</summary>", "", "| what | ms |"]
