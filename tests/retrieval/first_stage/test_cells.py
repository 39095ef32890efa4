"""The order of records inside a list: neighbours share pages, every record is there once."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx.retrieval.first_stage.ivf.arrays import (
    decoded,
    empty_index,
    enter,
    list_codes,
    list_numbers,
    sort_lists,
    train_arrays,
)
from espnx.retrieval.first_stage.ivf.cells import CELL_RECORDS, cell_order
from tests.retrieval.common import D_CLS, DIM, build

PAGE_RECORDS = 10


def clumps(count: int, size: int, dim: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(vectors near `count` centres, `size` of each, in random order; the number of each one's
    centre)."""
    rng = np.random.default_rng(seed)
    which = rng.permutation(np.repeat(np.arange(count), size))
    centres = rng.standard_normal((count, dim))
    return (centres[which] + 0.05 * rng.standard_normal((len(which), dim))).astype(
        np.float32
    ), which


def pages(order: np.ndarray, wanted: np.ndarray) -> int:
    place = np.empty(len(order), np.int64)
    place[order] = np.arange(len(order))
    return len(np.unique(place[wanted] // PAGE_RECORDS))


@pytest.mark.parametrize(
    "count",
    [
        0,
        1,
        2,
        CELL_RECORDS,
        CELL_RECORDS + 1,
        2 * CELL_RECORDS - 1,
        2 * CELL_RECORDS + 1,
        137,
        1000,
    ],
)
def test_every_row_is_there_once(count: int) -> None:
    vectors = np.random.default_rng(count).standard_normal((count, 5)).astype(np.float32)
    assert np.array_equal(np.sort(cell_order(vectors)), np.arange(count))


def test_neighbours_lie_on_few_pages() -> None:
    vectors, which = clumps(40, 2 * PAGE_RECORDS)
    order = cell_order(vectors)
    touched = [pages(order, np.flatnonzero(which == clump)) for clump in range(40)]
    as_they_came = [
        pages(np.arange(len(which)), np.flatnonzero(which == clump)) for clump in range(40)
    ]
    # of two pages at best, three where none is aligned
    assert np.mean(touched) <= 4 < 15 <= np.mean(as_they_came)


@pytest.mark.parametrize("value", [0.0, 1.0, 1e-30, 1e18])
def test_rows_that_are_alike_stay_as_they_came(value: float) -> None:
    assert np.array_equal(cell_order(np.full((100, 7), value, dtype=np.float32)), np.arange(100))


@pytest.mark.parametrize("code", ["flat", "sq8", "sq6", "sq4", "pq4"])
def test_lists_keep_their_entries(code: str) -> None:
    vectors, _ = clumps(30, 20)
    trained = train_arrays(vectors, 4, code)
    plain, index = empty_index(trained, code, 16), empty_index(trained, code, 16)
    for each in (plain, index):
        enter(each, [vectors])
    sort_lists(index)
    for (numbers, codes), (expected, plain_codes) in zip(
        zip(list_numbers(index), list_codes(index), strict=True),
        zip(list_numbers(plain), list_codes(plain), strict=True),
        strict=True,
    ):
        rows, plain_rows = codes.reshape(len(numbers), -1), plain_codes.reshape(len(expected), -1)
        back = np.argsort(numbers)
        assert np.array_equal(numbers[back], expected)
        assert np.array_equal(rows[back], plain_rows)
        assert np.array_equal(numbers, expected[cell_order(decoded(plain, plain_rows))])
    order = np.concatenate(list(list_numbers(index)))
    assert not np.array_equal(order, np.concatenate(list(list_numbers(plain))))


def test_a_compacted_store_has_cells_again(tmp_path: Path) -> None:
    """Additions lie behind what was there; compacting puts them between their neighbours."""
    cls, which = clumps(20, 2 * PAGE_RECORDS, D_CLS)
    cls /= np.linalg.norm(cls, axis=1, keepdims=True)
    documents = [
        espnx.Document(number, "", espnx.Encoded(torch.from_numpy(vector), torch.ones(1, DIM)))
        for number, vector in enumerate(cls)
    ]
    build(tmp_path / "store", documents[:200], nlist=2)
    for begin in range(200, 400, 20):
        espnx.add(tmp_path / "store", documents[begin : begin + 20])

    def touched() -> float:
        with espnx.open(tmp_path / "store") as index:
            order = np.array(list(index.ids()))
        assert np.array_equal(np.sort(order), np.arange(400))
        return float(np.mean([pages(order, np.flatnonzero(which == clump)) for clump in range(20)]))

    grown = touched()
    espnx.compact(tmp_path / "store")
    assert touched() <= 5 < 7 <= grown
