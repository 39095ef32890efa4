"""`espnx graph advise`: samples are built, searched and weighed; which way it names, and when it
says that it cannot tell."""

from __future__ import annotations

import functools
from pathlib import Path

import numpy as np
import pytest

import espnx.clusters.advice.disk
from espnx import errors
from espnx.benchmarks.graph.data import by_recipe
from espnx.cli.main import main
from espnx.clusters.advice import Advice, advise
from espnx.clusters.advice.trials import GRAPH, LISTS
from tests.cli.documents import strict_json

DIM = 128
N, SAMPLE = 2000, 1200


@pytest.fixture(autouse=True)
def _quick_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(espnx.clusters.advice.disk, "_RUN_S", 0.02)


def vectors(recipe: str, n: int, seed: int, dim: int = 128) -> np.ndarray:
    """``mixed``: half of each."""
    if recipe == "mixed":
        parts = [vectors(each, n, seed, dim)[: n // 2] for each in ("hard", "rc")]
        return np.random.default_rng(seed).permutation(np.concatenate(parts))
    return by_recipe(n, 1, 10, seed, dim=dim, recipe=recipe).base


@functools.cache
def advised(recipe: str, folder: Path, n: int) -> Advice:
    return advise(vectors(recipe, N, 0, DIM)[:n], path=folder, sample=SAMPLE, folds=2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("advise")


@pytest.mark.parametrize(
    ("recipe", "n", "choice"), [("hard", N, GRAPH), ("rc", N, LISTS), ("hard", 500, None)]
)
def test_which_way_fits(recipe: str, n: int, choice: str | None, folder: Path) -> None:
    found = advised(recipe, folder, n)
    assert found.choice == choice, found.summary()
    assert not any(folder.iterdir())  # nothing is left
    sizes = (SAMPLE, SAMPLE // 4) if n == N else (400, 100)
    assert (found.samples, found.folds, found.is_extrapolated) == (sizes[::-1], 2, True)
    for system in (GRAPH, LISTS):
        for size in sizes:
            curve = [
                each
                for each in found.curves
                if (each.system, each.sample, each.ratio) == (system, size, None)
            ]
            efforts = [each.effort for each in curve]
            assert efforts == sorted(set(efforts))
            assert curve[0].pages <= curve[-1].pages
            assert max(each.recall for each in curve) >= 0.95
            for each in curve:
                assert each.query_s >= each.pages * found.disk.page_s * (1 - 1e-9)
    graph, lists = found.estimates
    assert (graph.system, lists.system) == (GRAPH, LISTS)
    assert graph.rounds == pytest.approx(graph.pages)  # one page of a query at a time
    assert lists.rounds == 1
    assert found.difference is not None
    if n == N:
        assert (found.difference > 1) == (choice == GRAPH)


def test_what_the_estimates_say_is_what_was_built(folder: Path) -> None:
    """Of all vectors the folder of a graph is as many pages as there are, and more entry points."""
    found = advised("hard", folder, N)
    graph, lists = found.estimates
    assert graph.folder_bytes >= N * 4096
    assert graph.folder_bytes < 1.2 * N * 4096 + (1 << 20)
    assert lists.memory_bytes > 0
    assert lists.folder_bytes < graph.folder_bytes


def test_the_summary_says_it(folder: Path) -> None:
    found = advised("rc", folder, N)
    text = found.summary()
    assert text.splitlines()[-1].startswith("clusters: clusters take 0.")
    assert f"extrapolated to {N:,} vectors from samples of 300 and 1,200" in text
    assert "within 1.5x" in text
    assert advised("hard", folder, 500).summary().splitlines()[-1].startswith("cannot tell: 500 ")


def test_on_the_command_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "v.npy", vectors("rc", 300, 1, 16))
    np.save(tmp_path / "q.npy", vectors("rc", 20, 2, 16))
    command = ["graph", "advise", str(tmp_path / "v.npy"), "--path", str(tmp_path)]
    command += ["--queries", str(tmp_path / "q.npy"), "--folds", "2", "-k", "5", "--recall", "0.9"]
    assert main([*command, "--json", str(tmp_path / "told")]) == 0
    told = strict_json((tmp_path / "told").read_text())
    assert (told["n"], told["queries"], told["k"], told["choice"]) == (300, 20, 5, None)
    assert {each["system"] for each in told["curves"]} == {GRAPH, LISTS}
    assert "cannot tell" in capsys.readouterr().out
    assert sorted(each.name for each in tmp_path.iterdir()) == ["q.npy", "told", "v.npy"]
    np.save(tmp_path / "v.npy", np.full((300, 16), np.nan, np.float32))
    assert main(command) == 2
    assert "not finite" in capsys.readouterr().err


@pytest.mark.parametrize(
    "wrong",
    [
        {"k": 0},
        {"k": 400},
        {"recall": 1.0},
        {"recall": "much"},
        {"recall": float("nan")},
        {"metric": "l1"},
        {"in_flight": 0},
        {"folds": 1},
        {"sample": 10},
        {"threads": 0},
        {"path": "nowhere"},
    ],
)
def test_what_is_refused(wrong: dict[str, object], tmp_path: Path) -> None:
    with pytest.raises(errors.InvalidInputError):
        advise(vectors("rc", 300, 1, 16), **{"path": tmp_path, **wrong})  # type: ignore[arg-type]
    assert not any(tmp_path.iterdir())


def test_nothing_is_left_of_what_was_interrupted(tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def stop(what: str, done: int, total: int) -> None:
        if (what, done) == ("trials", 1):
            raise EnoughError

    with pytest.raises(EnoughError):
        advise(vectors("rc", 300, 1, 16), path=tmp_path, k=3, progress=stop)
    assert not any(tmp_path.iterdir())


# --- recipes of 50,000, each by ten seeds ---

N_WHOLE = 50_000


@pytest.mark.sweep
@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize(("recipe", "choice"), [("hard", GRAPH), ("rc", LISTS), ("mixed", None)])
def test_seeds(recipe: str, choice: str | None, seed: int, tmp_path: Path) -> None:
    found = advise(vectors(recipe, N_WHOLE, seed), path=tmp_path, seed=seed)
    assert found.choice == choice, found.summary()


@pytest.mark.sweep
@pytest.mark.parametrize("copy", ["turned", "scaled", "shuffled"])
@pytest.mark.parametrize(("recipe", "choice"), [("hard", GRAPH), ("rc", LISTS), ("mixed", None)])
def test_copies(recipe: str, choice: str | None, copy: str, tmp_path: Path) -> None:
    base, rng = vectors(recipe, N_WHOLE, 0), np.random.default_rng(1)
    if copy == "turned":
        base = base @ np.linalg.qr(rng.standard_normal((128, 128)))[0].astype(np.float32)
    if copy == "scaled":
        base = base * np.float32(3.3e4)
    if copy == "shuffled":
        base = rng.permutation(base)
    found = advise(base, path=tmp_path)
    assert found.choice == choice, found.summary()


@pytest.mark.sweep
@pytest.mark.parametrize("recipe", ["hard", "rc"])
@pytest.mark.parametrize("seed", range(10))
def test_seeds_of_500(recipe: str, seed: int, tmp_path: Path) -> None:
    base = vectors(recipe, N_WHOLE, seed)[:500]
    assert advise(base, path=tmp_path, seed=seed).choice is None
