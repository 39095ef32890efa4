"""``espnx bench graph --show lists``, and the vectors and lists that it makes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.graph import list_devices, lists
from espnx.benchmarks.graph.case import CASE
from espnx.benchmarks.graph.data import LIST_MIXES, by_recipe, lists_by_mix, sizes_by_mix
from espnx.benchmarks.harness.result import load, rows_of
from espnx.cli.main import main

pytestmark = pytest.mark.usefixtures("here")


def test_a_quick_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    command = ["bench", "graph", "--show", "lists", "--quick", "--pairs", "1", "--threads", "2"]
    command += ["--packing", "order,co-access", "--mix", "spacev", "--recipe", "rc"]
    assert main([*command, "--path", str(tmp_path), "--json", str(result)]) == 0
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    found = rows_of(load(result))
    assert all(row.correct for row in found)
    of_lists = [row for row in found if row.params["show"] == "lists"]
    assert [(row.params["recall"], row.system) for row in of_lists] == [
        (recall, system)
        for recall in lists.TARGETS
        for system in ("espnx-graph", "espnx-lists-order", "espnx-lists-co-access")
    ]
    for row in of_lists:
        is_graph = row.system == "espnx-graph"
        if "reads" in row.metrics:  # a toy need not reach every recall
            assert row.metrics["rounds"] == pytest.approx(row.metrics["reads"] if is_graph else 1)
            assert row.metrics["bytes_read"] == pytest.approx(4096 * row.metrics["reads"])
        if not is_graph and "cpu_s" in row.metrics:
            assert 0 < row.metrics["heads_share"] < 1.5
    devices = [row for row in found if row.params["show"] == "list-devices"]
    assert [(row.system, row.params["threads"]) for row in devices] == [
        (system, threads) for system in list_devices.SYSTEMS for threads in (1, 3)
    ]
    times = {row.system: row.median_s for row in devices}
    # the link bounds without elements, flash with them (Sung, 2025, section 3.5)
    conventional, quick = times["cosmos-conventional"], times["cosmos-async-pe"]
    assert conventional is not None
    assert quick is not None
    assert 3 < conventional / quick < 536 / 133 + 0.1
    assert {row.kind for row in devices} == {"measured", "emulated"}
    for rows in (of_lists, devices):
        headers, cells = CASE.table(rows)
        assert {len(line) for line in cells} == {len(headers)}
    assert "of the graph's" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--packing", "tight"],
        ["--recipe", "soft"],
        ["--mix", "x"],
        ["--list-threads", "0"],
        ["--list-dtype", "int4"],
        ["--list-page-bytes", "x"],
    ],
)
def test_options_that_make_no_sense(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ["bench", "graph", "--show", "lists", "--n", "300", "--n-queries", "4"]
    assert main([*command, "--path", str(tmp_path), *words]) != 0
    assert "expected" in capsys.readouterr().err
    assert not any(tmp_path.iterdir())


# --- recipes ---


def test_clusters_lie_apart() -> None:
    """The ten nearest of a query have its centre, unlike those of vectors that overlap: so they are
    much nearer than the hundredth."""
    contrast = {}
    for recipe in ("rc", "hard"):
        data = by_recipe(2000, 20, 10, 0, recipe=recipe)
        assert (data.base.shape, data.name) == ((2000, 128), f"{recipe}, 2,000 x 128 float32")
        far = np.square(data.base[None].astype(np.float64) - data.queries[:, None]).sum(axis=2)
        far.sort(axis=1)
        contrast[recipe] = np.median(far[:, 9] / far[:, 99])
    assert contrast["rc"] < 0.6 < 0.62 < contrast["hard"]


def test_a_centre_has_fifty_and_noise_is_half() -> None:
    data = by_recipe(2000, 1, 1, 3, recipe="rc")
    wide = data.base.astype(np.float64)
    squares = np.square(wide).sum(axis=1)
    apart = squares[:, None] + squares[None] - 2 * wide @ wide.T
    # of two vectors of one centre: twice the noise, in each of 128 dimensions
    same = np.triu(apart < 2 * 128 * 0.5**2 * 1.6, 1)
    assert apart[same].mean() == pytest.approx(2 * 128 * 0.25, rel=0.02)
    assert same.sum() * 2 / len(wide) == pytest.approx(50, rel=0.1)
    assert by_recipe(7, 2, 1, 0, recipe="rc").base.shape == (7, 128)
    again, other = (by_recipe(60, 1, 1, seed, recipe="rc").base for seed in (3, 4))
    assert not np.array_equal(again, other)


@pytest.mark.parametrize("mix", LIST_MIXES)
@pytest.mark.parametrize("n_lists", [1, 3, 100, 9999])
def test_sizes_of_a_mix(mix: str, n_lists: int) -> None:
    """Of each size as many as its share, to within one."""
    sizes = sizes_by_mix(mix, n_lists, seed=1)
    assert len(sizes) == n_lists
    whole = sum(LIST_MIXES[mix].values())
    for size, share in LIST_MIXES[mix].items():
        assert abs((sizes == size).sum() - n_lists * share / whole) < 1
    if n_lists > 3:
        assert not np.array_equal(sizes, sizes_by_mix(mix, n_lists, seed=2))


def test_lists_are_as_full_as_their_sizes_let_them_be() -> None:
    vectors, list_of, queries = lists_by_mix("sift", 200, 5, 0)
    counts = np.bincount(list_of, minlength=200)
    sizes = sizes_by_mix("sift", 200, 0)
    assert (counts * 132 <= sizes).all()
    assert ((counts + 1) * 132 > sizes).all()
    assert (len(vectors), queries.shape, vectors.dtype) == (counts.sum(), (5, 128), np.uint8)
