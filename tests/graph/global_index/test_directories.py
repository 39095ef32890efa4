"""Clusters whose pages lie in several directories: searched as those of one, lost ones named or
left out, and removed with the graph."""

from __future__ import annotations

import json
import os
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.cli.main import main
from espnx.graph.format import CLUSTERS_VERSION, MAGIC
from espnx.graph.layout import rows_of
from espnx.graph.pages.checked import open_pages, read_pages
from espnx.graph.parts import balanced
from espnx.graph.planning import plan_graph
from espnx.storage import NativeEngine
from espnx.storage.manifest import write_manifest
from tests.graph.conftest import clustered, exact, recall_of

FEW: dict[str, Any] = {"max_degree": 16, "list_size": 40, "threads": 1, "clusters": 9}
N, DIM = 1500, 12


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the same graph in one, and in three directories and its own; there are
    replicas."""
    root = tmp_path_factory.mktemp("directories")
    base = clustered(N, DIM)
    espnx.graph.build(base, root / "one", replicas=0.2, **FEW)
    espnx.graph.build(
        base, root / "g", replicas=0.2, directories=[root / each for each in "abc"], **FEW
    )
    return root


@pytest.fixture
def copy(built: Path, tmp_path: Path) -> Path:
    """One of one's own, which names directories of its own."""
    for each in ("g", "a", "b", "c"):
        shutil.copytree(built / each, tmp_path / each)
    manifest = tmp_path / "g" / "MANIFEST.json"
    fields = json.loads(manifest.read_text())
    fields["directories"] = [str(tmp_path / each) for each in "abc"]
    _publish(tmp_path / "g", fields)
    return tmp_path


def _publish(where: Path, fields: dict[str, Any]) -> None:
    own = {
        name: value
        for name, value in fields.items()
        if name not in ("magic", "version", "byte_order", "checksum")
    }
    with NativeEngine("posix") as engine:
        write_manifest(engine, str(where), MAGIC, CLUSTERS_VERSION, own)


def home(root: Path, name: str) -> Path:
    """The folder of the graph in a directory."""
    (found,) = (root / name).iterdir()
    return found


def test_it_is_the_graph_of_one_directory(built: Path) -> None:
    queries = clustered(40, DIM, seed=1)
    with espnx.graph.open(built / "one") as one, espnx.graph.open(built / "g") as several:
        for options in (
            {"nprobe": 3, "list_size": 20}, {"recall": 0.9}, {"include": range(0, N, 3)},
            {"exclude": range(700), "list_size": 30}, {"include": [5, 9]},
        ):  # fmt: skip
            ours, theirs = (graph.search(queries, 5, **options) for graph in (several, one))
            assert np.array_equal(ours.ids, theirs.ids)
            assert np.array_equal(ours.distances, theirs.distances)
            assert np.array_equal(ours.pages, theirs.pages)
            assert ours.lost_share == 0
        rows = np.arange(0, N, 7)
        assert np.array_equal(several.vectors(rows), one.vectors(rows))
        assert several.verify() == one.verify()
        assert len(several.path_report()) == 3
        assert str(built / "b") in several.summary()


def test_directories_have_as_much_each(built: Path) -> None:
    with espnx.graph.open(built / "g") as graph:
        pages = graph.facts.parts.pages_of_files(3)
        assert pages.max() - pages.min() <= graph.facts.parts.pages.max()
        sizes = [os.path.getsize(each.path) for each in graph.facts.page_files]
        assert sizes == (pages * graph.facts.layout.page_bytes).tolist()
    assert not (built / "g" / "nodes.bin").exists()
    assert [sorted(os.listdir(home(built, each))) for each in "abc"] == [["nodes.bin"]] * 3


def test_the_largest_first_each_where_least_is() -> None:
    assert balanced(np.array([1, 9, 4, 5]), 2).tolist() == [0, 0, 1, 1]
    random = np.random.default_rng(0)
    for count, files in [(1, 3), (40, 4), (5, 5), (0, 2)]:
        pages = random.integers(1, 50, count)
        sums = np.bincount(balanced(pages, files), pages, files)
        # no cluster could move from the fullest to the emptiest and make them more alike
        assert sums.max() - sums.min() <= pages.max(initial=0)


@pytest.mark.parametrize("how", ["folder", "file", "directory"])
def test_a_lost_directory_is_named_or_left_out(copy: Path, how: str) -> None:
    where = {"folder": home(copy, "b"), "directory": copy / "b"}.get(how)
    if where is None:
        (home(copy, "b") / "nodes.bin").unlink()
    else:
        shutil.rmtree(where)
    with pytest.raises(errors.FileMissingError, match="directory of a graph") as caught:
        espnx.graph.open(copy / "g")
    assert str(copy / "b") in str(caught.value)
    base, queries = clustered(N, DIM), clustered(40, DIM, seed=1)
    with espnx.graph.open(copy / "g", partial=True) as graph:
        facts = graph.facts
        inside = facts.parts.nodes[facts.parts.files == 1].sum() / facts.parts.nodes.sum()
        found = graph.search(queries, 10, nprobe=9, list_size=80)
        assert 0.2 < inside < 0.5
        assert found.lost_share == pytest.approx(inside)
        assert (found.clusters == np.count_nonzero(facts.parts.files != 1)).all()
        # all that is in the others is found: rows of which a copy is there
        with espnx.graph.open(copy / "g", partial=True) as again:
            there = _rows_in(again)
        assert recall_of(found.ids, there[exact(base[there], queries, 10)]) >= 0.98
        gone = np.setdiff1d(np.arange(N), there)
        for options in ({"include": range(0, N, 2)}, {"include": np.arange(0, N, 50)}):
            some = graph.search(queries, 5, **options)
            assert np.isin(some.ids, [*there, -1]).all()
            assert some.lost_share == found.lost_share
            allowed = np.intersect1d(there, np.array(list(options["include"])))
            assert recall_of(some.ids, allowed[exact(base[allowed], queries, 5)]) >= 0.95
        assert (graph.search(queries, 3, include=gone[:5]).ids == -1).all()
        stored = base.astype(np.float16)
        assert np.array_equal(graph.vectors(there[::9]), stored[there[::9]])
        with pytest.raises(errors.FileMissingError):
            graph.vectors(gone[:2])
        with pytest.raises(errors.FileMissingError):
            graph.verify()
        assert "lost" in graph.summary()
    shutil.rmtree(copy / "a")
    shutil.rmtree(copy / "c")
    with pytest.raises(errors.FileMissingError):  # nothing is left
        espnx.graph.open(copy / "g", partial=True)


def _rows_in(graph: espnx.graph.GraphIndex) -> np.ndarray:
    """Rows with a node in a directory that is there, as its pages say."""
    facts = graph.facts
    pages = np.flatnonzero(np.repeat(facts.is_there, facts.parts.pages))
    with NativeEngine("posix") as engine:
        nodes = read_pages(engine, open_pages(engine, facts), facts, pages, 30.0)
    places = pages[:, None] * facts.layout.nodes_per_page + np.arange(facts.layout.nodes_per_page)
    return np.unique(rows_of(nodes)[facts.parts.is_node(places)])


def test_damage_is_told_with_its_file(copy: Path) -> None:
    file = home(copy, "c") / "nodes.bin"
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with espnx.graph.open(copy / "g") as graph:
        with pytest.raises(errors.ChecksumError) as caught:
            graph.verify()
        assert str(file) in str(caught.value)
    file.write_bytes(data[:-4096])
    for partial in (False, True):  # damage, and no directory that is not mounted
        with pytest.raises(errors.TruncatedFileError):
            espnx.graph.open(copy / "g", partial=partial)
    fields = json.loads((copy / "g" / "MANIFEST.json").read_text())
    fields["directories"] = fields["directories"][:2]
    _publish(copy / "g", fields)
    with pytest.raises(errors.FormatError, match="directory of a cluster"):
        espnx.graph.open(copy / "g")


def test_a_build_replaces_one_and_leaves_its_directories(tmp_path: Path) -> None:
    base = clustered(300, DIM)
    first, second = ([tmp_path / each for each in names] for names in ("ab", "bc"))
    few = {**FEW, "clusters": 4}
    espnx.graph.build(base, tmp_path / "g", directories=first, **few)
    keep = tmp_path / "a" / "mine"
    keep.write_text("stays")
    espnx.graph.build(base, tmp_path / "g", directories=second, replace=True, **few)
    assert os.listdir(tmp_path / "a") == ["mine"]
    assert [len(os.listdir(each)) for each in second] == [1, 1]
    with espnx.graph.open(tmp_path / "g") as graph:
        assert (graph.search(base[:9], 1, nprobe=4).ids[:, 0] == range(9)).all()
    espnx.graph.build(base, tmp_path / "g", replace=True, **few)
    assert not any(os.listdir(each) for each in second)
    espnx.graph.build(base, tmp_path / "g", directories=second, replace=True, **few)
    (tmp_path / "b" / "also mine").write_text("stays")
    espnx.graph.remove(tmp_path / "g")
    assert not (tmp_path / "g").exists()
    assert os.listdir(tmp_path / "b") == ["also mine"]
    assert os.listdir(tmp_path / "c") == []
    with pytest.raises(errors.StoreNotFoundError):
        espnx.graph.remove(tmp_path / "g")


def test_a_plan_says_what_the_fullest_has() -> None:
    plan = plan_graph(9000, DIM, clusters=9, directories=2)
    assert plan.disk["directory_bytes"] == plan.disk["nodes_bytes"] * 5 // 9
    assert plan.disk["total_bytes"] == plan_graph(9000, DIM, clusters=9).disk["total_bytes"]
    with pytest.raises(errors.InvalidInputError):
        plan_graph(9000, DIM, directories=2)


def test_directories_that_cannot_be_are_refused(tmp_path: Path) -> None:
    base = clustered(60, DIM)
    for directories, more in [
        ([tmp_path / "a", tmp_path / "a"], {}),
        ([tmp_path / "g"], {}),
        (str(tmp_path / "a"), {}),
        ([tmp_path / str(each) for each in range(65)], {}),
        ([tmp_path / "a"], {"clusters": None}),
    ]:
        with pytest.raises(errors.InvalidInputError):
            espnx.graph.build(
                base, tmp_path / "g", directories=directories, **{**FEW, "clusters": 2, **more}
            )
    assert not list(tmp_path.iterdir())


def test_the_command_line_knows_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.save(tmp_path / "v.npy", clustered(300, DIM))
    graph = str(tmp_path / "g")
    places = [f"--directory={tmp_path / each}" for each in "ab"]
    assert main(["graph", "build", str(tmp_path / "v.npy"), graph, "--clusters=4", *places]) == 0
    capsys.readouterr()
    assert main(["graph", "info", graph, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [each["path"] for each in found["directories"]] == [str(tmp_path / e) for e in "ab"]
    assert main(["graph", "verify", graph]) == 0
    shutil.rmtree(tmp_path / "b")
    search = ["graph", "search", graph, str(tmp_path / "v.npy"), "-k", "1"]
    assert main(search) != 0
    assert str(tmp_path / "b") in capsys.readouterr().err
    assert main([*search, "--partial"]) == 0
    assert "not looked at" in capsys.readouterr().out
    assert main(["graph", "remove", graph]) == 0
    assert not Path(graph).exists()
    assert os.listdir(tmp_path / "a") == []
