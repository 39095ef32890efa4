"""Graphs of clusters that change: which clusters are written anew and which stay, and what is
found, beside a dictionary of vectors."""

from __future__ import annotations

import errno
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
from espnx.graph.format import CLUSTERS, CLUSTERS_VERSION, MAGIC, GraphFacts
from espnx.graph.layout import rows_of
from espnx.graph.merging import pieces
from espnx.graph.merging.clusters import FILES_MOST, chosen_files
from espnx.graph.pages.checked import open_pages, read_pages
from espnx.graph.parts import TABLE, PageFile
from espnx.storage import NativeEngine, files
from espnx.storage.files import crc32c
from espnx.storage.manifest import NAME, write_manifest
from tests.graph.conftest import clustered, exact, recall_of
from tests.graph.updates.programs import Program

EVERY = 1000  # clusters


def rounded(n: int, dim: int, seed: int = 0) -> np.ndarray:
    """Vectors that float16 holds."""
    return clustered(n, dim, seed).astype(np.float16).astype(np.float32)


def small(path: Path, n: int = 600, dim: int = 8, **options: Any) -> np.ndarray:
    base = rounded(n, dim)
    few = {"max_degree": 12, "list_size": 30, "threads": 1, "clusters": 6}
    espnx.graph.build(base, path, **{**few, **options})
    return base


def members(facts: GraphFacts) -> list[list[int]]:
    """Ids of each cluster, as its pages have them."""
    pages = np.arange(facts.parts.n_pages)
    with NativeEngine("posix") as engine:
        nodes = read_pages(engine, open_pages(engine, facts), facts, pages, 30.0)
    places = pages[:, None] * facts.layout.nodes_per_page + np.arange(facts.layout.nodes_per_page)
    rows, inside = rows_of(nodes), facts.parts.is_node(places)
    part = facts.parts.of_pages(pages)
    return [
        rows[part == each][inside[part == each]].tolist() for each in range(len(facts.parts.nodes))
    ]


@pytest.mark.parametrize(
    ("metric", "options"),
    [
        ("l2", {"clusters": 3}),  # large ones, whose graphs are changed and not built anew
        ("cosine", {"clusters": 12, "replicas": 0.3}),
        ("ip", {"clusters": 4, "directories": 2}),
    ],
)
def test_it_is_as_a_dictionary(tmp_path: Path, metric: str, options: dict[str, Any]) -> None:
    dim, random = 12, np.random.default_rng(0)
    if count := options.pop("directories", 0):
        options["directories"] = [tmp_path / str(each) for each in range(count)]
    base = small(tmp_path / "g", 1500, dim, metric=metric, **options)
    known, more, queries = dict(enumerate(base)), rounded(600, dim, 2), clustered(20, dim, 1)
    with (
        espnx.graph.open_writer(tmp_path / "g", durability="none", memory="16MiB") as graph,
        espnx.graph.open(tmp_path / "g") as reader,
    ):
        for round_, (gone, added) in enumerate([(70, 70), (200, 30), (0, 150), (10, 0)]):
            ids = random.choice(sorted(known), gone, replace=False)
            graph.delete(ids)
            for each in ids.tolist():
                del known[each]
            rows = more[150 * round_ : 150 * round_ + added]
            own = ids[:20] if round_ == 0 else None  # some come again with other vectors
            given = np.concatenate([graph.add(rows[:20], ids=own), graph.add(rows[20:])])
            known |= dict(zip(given.tolist(), rows, strict=True))
            for _ in range(2):
                _compare(graph, known, queries, metric)
                assert reader.reload()
                _compare(reader, known, queries, metric)
                graph.merge()
        assert graph.merge() is False
        assert graph.facts.unused_bytes <= graph.facts.file_sizes["nodes.bin"] / 2


def _compare(
    graph: espnx.graph.GraphIndex, known: dict[int, np.ndarray], queries: np.ndarray, metric: str
) -> None:
    ids = np.array(sorted(known))
    rows = np.stack([known[each] for each in ids.tolist()])
    assert len(graph) == len(known)
    graph.verify()
    found = graph.search(queries, 10, list_size=150, nprobe=EVERY)
    assert recall_of(found.ids, ids[exact(rows, queries, 10, metric)]) > 0.97
    assert all(len(set(each)) == 10 for each in found.ids.tolist())
    if metric != "cosine":
        assert np.array_equal(graph.vectors(ids[::7]), rows[::7])
    some = ids[::9]
    found = graph.search(queries, 5, include=some)
    assert recall_of(found.ids, some[exact(rows[::9], queries, 5, metric)]) > 0.97
    found = graph.search(queries, 5, list_size=120, exclude=some)
    assert not np.isin(found.ids, some).any()
    assert np.isin(found.ids, ids).all()


def test_only_what_has_changed_is_written(tmp_path: Path) -> None:
    base = small(tmp_path / "g", 900, clusters=9, max_points=900)
    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        before = graph.facts
        assert before.clusters is not None
        inside = members(before)
        graph.delete(inside[2][:5])
        near = before.clusters.centroids[4][None] + np.linspace(0, 0.01, 3)[:, None]
        ids = graph.add(near)
        graph.merge()
        after = graph.facts
        assert after.clusters is not None
        stays = after.clusters.salts == before.clusters.salts
        assert np.flatnonzero(~stays).tolist() == [2, 4]
        assert after.clusters.page_files[0] == before.clusters.page_files[0]
        assert after.clusters.files.tolist() == [0, 0, 1, 0, 1, 0, 0, 0, 0]
        assert (tmp_path / "g" / "nodes.bin").exists()
        assert not (tmp_path / "g" / "rows.bin").exists()
        now = members(after)
        assert sorted(now[2]) == sorted(inside[2][5:])
        assert sorted(now[4]) == sorted([*inside[4], *ids.tolist()])
        assert all(now[each] == inside[each] for each in (0, 1, 3, 5, 6, 7, 8))
        same = np.array([0, 1, 3, 5, 6, 7, 8])
        assert np.array_equal(after.clusters.centroids[same], before.clusters.centroids[same])
        # that of a cluster goes with the mean of its vectors
        moved = base[now[2]].mean(axis=0) - base[inside[2]].mean(axis=0)
        assert np.allclose(
            after.clusters.centroids[2], before.clusters.centroids[2] + moved, atol=1e-5
        )
        for turn in range(2 * FILES_MOST):  # a file a merge, until there are too many
            graph.delete([members(graph.facts)[turn % 9][0]])
            graph.merge()
            assert graph.facts.clusters is not None
            named = {Path(each.path).name for each in graph.facts.page_files}
            assert len(named) <= FILES_MOST
            there = {each for each in os.listdir(tmp_path / "g") if each.startswith("nodes")}
            assert there == named
            assert graph.facts.unused_bytes <= graph.facts.file_sizes["nodes.bin"] / 2
        graph.verify()
        assert len(graph) == 900 + 3 - 5 - 2 * FILES_MOST


@pytest.mark.parametrize("replicas", [0.0, 0.4, 1.0])
def test_additions_go_where_a_build_would_put_them(tmp_path: Path, replicas: float) -> None:
    options = {"replicas": replicas, "max_points": 900, "vector_dtype": "float32"}
    small(tmp_path / "g", 900, clusters=7, **options)
    more = clustered(200, 8, seed=5)
    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        before = graph.facts
        assert before.clusters is not None
        centroids = before.clusters.centroids.astype(np.float64)
        most = int(before.options["max_points"])
        ids = graph.add(more)
        graph.merge()
        now = members(graph.facts)[: len(centroids)]
        copies = 0
        homes = np.square(more[:, None].astype(np.float64) - centroids).sum(axis=2)
        room = most - before.clusters.nodes - np.bincount(homes.argmin(axis=1), minlength=7)
        assert (room >= 0).all()
        for number, far in zip(ids.tolist(), homes, strict=True):
            there = [each for each, rows in enumerate(now) if number in rows]
            first, second = np.argsort(far)[:2].tolist()
            assert first in there
            if before.border is not None and far[second] / far[first] - 1 <= before.border:
                assert second in there or room[second] == np.count_nonzero(
                    np.array(now[second]) >= 900
                ) - np.count_nonzero(homes.argmin(axis=1) == second)
                copies += second in there
            else:
                assert there == [first]
        assert (copies > 0) == (replicas > 0)
        assert graph.facts.copies == (2 if replicas else 1)


def test_what_grows_is_divided_and_what_is_empty_is_left_out(tmp_path: Path) -> None:
    base = small(tmp_path / "g", 400, clusters=4, max_points=150)
    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        first = members(graph.facts)
        crowd = rounded(1, 8, seed=9) + np.linspace(0, 0.5, 500, dtype=np.float32)[:, None]
        ids = graph.add(crowd)
        graph.delete(first[1])
        graph.merge()
        sizes = graph.facts.parts.nodes
        assert sizes.max() <= 150
        assert len(sizes) >= 7
        assert sizes.min() > 0
        everyone = sorted(each for part in members(graph.facts) for each in part)
        assert everyone == sorted({*range(400), *ids.tolist()} - set(first[1]))
        graph.verify()
        found = graph.search(crowd[::50], 1, list_size=40, nprobe=EVERY)
        assert np.allclose(found.distances, 0, atol=1e-3)
        alike = graph.add(np.ones((700, 8), np.float32))  # no centre is nearer than another
        graph.merge()
        assert graph.facts.parts.nodes.max() <= 150
        found = graph.search(np.ones((1, 8), np.float32), 600, list_size=900, nprobe=EVERY)
        assert np.isin(found.ids, alike).all()
        graph.delete(sorted({*everyone, *alike.tolist()}))
        assert (graph.search(base[:3], 4).ids == -1).all()
        graph.merge()
        assert len(graph) == 0
        graph.verify()
        assert (graph.search(base[:3], 4).ids == -1).all()
        assert graph.merge() is False
        given = graph.add(base)
        assert given[0] == 1600
        graph.merge()
        assert graph.facts.parts.nodes.max() <= 150
        found = graph.search(base[:40], 1, list_size=60, nprobe=EVERY)
        assert np.array_equal(found.ids[:, 0], given[:40])


def test_short_memory_does_not_divide(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small(tmp_path / "g", 400, clusters=4, max_points=150)
    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        with monkeypatch.context() as patched:
            patched.setattr(pieces, "member_bytes", lambda *_: 1 << 40)
            graph.add(rounded(300, 8, seed=3))
            graph.merge()
            assert graph.facts.parts.nodes.max() > 150
            assert len(graph.facts.parts.nodes) == 4
            graph.verify()
            assert "more memory divides" in graph.summary()
        graph.delete([0])
        graph.merge()
        assert graph.facts.parts.nodes.max() <= 150
        assert "more memory divides" not in graph.summary()


def test_codes_are_trained_anew_for_what_they_cannot_tell_apart(tmp_path: Path) -> None:
    base, more = np.ones((400, 24), np.float32), clustered(800, 24)
    espnx.graph.build(base, tmp_path / "g", max_degree=16, list_size=40, threads=1, clusters=3)
    queries = clustered(30, 24, seed=1)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(more)
        graph.merge()
        truth = exact(np.concatenate([base, more]), queries, 10)
        found = graph.search(queries, 10, list_size=60, nprobe=EVERY)
        assert recall_of(found.ids, truth) >= 0.95
        graph.verify()


def test_recall_is_measured_again_and_drift_is_told(tmp_path: Path) -> None:
    small(tmp_path / "g", 900, replicas=0.2)
    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        built = list(graph.facts.recall)
        graph.add(rounded(60, 8, seed=3))
        graph.merge()
        assert list(graph.facts.recall) == built
        assert "when it was built" not in graph.summary()
        graph.add(rounded(300, 8, seed=4))
        graph.merge(measure="never")
        with pytest.raises(errors.InvalidInputError, match="measure again"):
            graph.search(rounded(1, 8), recall=0.9)
        assert not graph.merge(measure="always")
        assert graph.facts.unmeasured == 0
        assert list(graph.facts.built_recall) == built
        assert list(graph.facts.recall) != built
        assert all(each.clusters is not None for each in graph.facts.recall)
        assert "when it was built" in graph.summary()
        graph.search(rounded(1, 8), recall=0.9)


def _homes(root: Path, names: str) -> dict[str, list[str]]:
    return {each: sorted(os.listdir(next((root / each).iterdir()))) for each in names}


def test_readers_keep_their_version_and_full_disks_leave_the_old_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small(tmp_path / "g", 600, directories=[tmp_path / each for each in "ab"])

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    write = files.StreamWriter.write
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        with pytest.raises(errors.StoreBusyError):
            espnx.graph.open_writer(tmp_path / "g")
        with espnx.graph.open(tmp_path / "g") as reader:
            for turn in range(3):
                graph.delete(range(100 * turn, 100 * turn + 100))
                graph.add(base[:50])
                there = set(os.listdir(tmp_path / "g")), _homes(tmp_path, "ab")
                for part in (f"nodes.v{turn + 2}", f"rows.v{turn + 2}"):
                    with monkeypatch.context() as patched:
                        patched.setattr(
                            files.StreamWriter,
                            "write",
                            lambda self, data, part=part: (
                                full() if part in self.path else write(self, data)
                            ),
                        )
                        with pytest.raises(errors.DiskFullError):
                            graph.merge()
                    assert (set(os.listdir(tmp_path / "g")), _homes(tmp_path, "ab")) == there
                    assert len(graph) == 600 - 50 * (turn + 1)
                graph.merge()
            assert len(reader) == 600
            found = reader.search(base[:20], 1, list_size=60, nprobe=EVERY)
            assert np.array_equal(found.ids[:, 0], range(20))
            assert np.array_equal(reader.vectors([1, 599]), base[[1, 599]])
            assert set(reader.search(base[:9], 3, include=range(99)).ids.ravel()) <= set(range(99))
            reader.verify()
            assert reader.reload()
            assert len(reader) == 450
            reader.verify()
    (tmp_path / "g" / "nodes.v99.bin").write_bytes(b"of a merge that was killed")
    (next((tmp_path / "b").iterdir()) / "nodes.v99.bin").write_bytes(b"likewise")
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.delete([599])
        graph.merge()
        assert len(graph) == 449
    assert not any("v99" in name for each in _homes(tmp_path, "ab").values() for name in each)
    espnx.graph.remove(tmp_path / "g")
    assert os.listdir(tmp_path / "a") == os.listdir(tmp_path / "b") == []


def test_a_lost_directory_is_searched_without(tmp_path: Path) -> None:
    base = small(tmp_path / "g", 600, directories=[tmp_path / each for each in "ab"])
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.delete(range(30))
        graph.add(base[:30])
        graph.merge()
        graph.delete([100])
        ids = graph.add(base[100:101])
        inside = [set(each) for each in members(graph.facts)]
        where = graph.facts.in_directory(1)
    gone = set[int]().union(*(rows for rows, lost in zip(inside, where, strict=True) if lost))
    shutil.rmtree(tmp_path / "b")
    for opened in (espnx.graph.open_writer, espnx.graph.open):
        with pytest.raises(errors.FileMissingError, match="directory of a graph"):
            opened(tmp_path / "g")
    with espnx.graph.open(tmp_path / "g", partial=True) as reader:
        found = reader.search(base, 1, list_size=60, nprobe=EVERY)
        assert found.lost_share == pytest.approx(len(gone) / 600)
        assert not gone & set(found.ids.ravel().tolist())
        assert found.ids[100, 0] == ids[0]
        there = sorted(set(range(30, 600)) - gone - {100})
        assert np.mean(found.ids[there, 0] == there) > 0.97
        assert not reader.reload()


def test_places_that_cannot_be_are_refused(tmp_path: Path) -> None:
    small(tmp_path / "g")
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.delete([0])
        graph.merge()
        where = graph.facts
    name = Path(where.path(CLUSTERS))
    whole = np.frombuffer(name.read_bytes(), TABLE)
    for field, value in [("first_page", 2**63), ("first_page", 10**6), ("file", 9), ("nodes", 0)]:
        table = whole.copy()
        table[field][3] = value
        _damaged(tmp_path / "g", name, table)
        with pytest.raises(errors.FormatError):
            espnx.graph.open(tmp_path / "g")
    table = whole.copy()
    table["first_page"][3], table["file"][3] = table["first_page"][4], table["file"][4]
    _damaged(tmp_path / "g", name, table)
    with pytest.raises(errors.FormatError, match="places of clusters"):
        espnx.graph.open(tmp_path / "g")
    _damaged(tmp_path / "g", name, whole)
    with espnx.graph.open(tmp_path / "g") as graph:
        graph.verify()


def _damaged(graph: Path, name: Path, table: np.ndarray) -> None:
    """Publishes another table, with sums that are right."""
    name.write_bytes(table.tobytes())
    fields = json.loads((graph / NAME).read_text())
    fields["sums"][CLUSTERS] = crc32c(table.tobytes())
    own = {
        key: value
        for key, value in fields.items()
        if key not in ("magic", "version", "byte_order", "checksum")
    }
    with NativeEngine("posix") as engine:
        write_manifest(engine, str(graph), MAGIC, CLUSTERS_VERSION, own)


def test_files_that_hold_little_of_use_go() -> None:
    made = [PageFile(0, 1, 100), PageFile(0, 2, 10), PageFile(1, 1, 50)]
    assert chosen_files(made, np.array([60, 10, 30]), np.array([0, 1, 2])) == [0, 1, 2]
    assert chosen_files(made, np.array([49, 10, 25]), np.array([0, 1, 2])) == [1, 2]
    assert chosen_files(made, np.array([60, 10, 30]), np.array([0, -1, -1])) == [0]
    many = [PageFile(0, each, 10 + each) for each in range(1, 12)]
    kept = chosen_files(many, np.arange(11, 22), np.arange(11))
    assert kept == list(range(11 - (FILES_MOST - 1), 11))


@pytest.mark.parametrize(
    ("seed", "steps"),
    [(each, 12) for each in range(3)]
    + [pytest.param(each, 40, marks=pytest.mark.sweep) for each in range(3, 60)],
)
def test_random_programs(tmp_path: Path, seed: int, steps: int) -> None:
    Program(tmp_path / "p", seed).run(steps)


def test_the_command_line_changes_clusters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    np.save(tmp_path / "v.npy", rounded(300, 8))
    np.save(tmp_path / "more.npy", rounded(40, 8, seed=1))
    graph = str(tmp_path / "g")
    assert main(["graph", "build", str(tmp_path / "v.npy"), graph, "--clusters=4"]) == 0
    assert main(["graph", "add", graph, str(tmp_path / "more.npy")]) == 0
    assert main(["graph", "delete", graph, "5", "6"]) == 0
    assert main(["graph", "merge", graph]) == 0
    capsys.readouterr()
    assert main(["graph", "info", graph, "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["vectors"] == 338
    assert found["unmerged_added"] == found["unmerged_deleted"] == 0
    assert found["unused_bytes"] >= 0
    assert found["built_recall"]
    assert main(["graph", "verify", graph]) == 0


def test_what_recall_promises_outlives_clusters_that_are_no_more(tmp_path: Path) -> None:
    """A few vectors far from all others are deleted, and then as many come."""
    near, far = clustered(3000, 16), clustered(90, 16, seed=1) + 200
    espnx.graph.build(
        np.concatenate([near, far]), tmp_path / "g", clusters=13,
        max_degree=16, list_size=40, threads=1,
    )  # fmt: skip
    queries = clustered(100, 16, seed=2)

    def asked(graph: espnx.graph.GraphIndex) -> float:
        found = graph.search(queries, 10, recall=0.9)
        assert found.clusters is not None
        return float(found.clusters.mean())

    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        before = asked(graph)
        graph.delete(np.arange(3000, 3090))
        graph.merge(measure="auto")
        without = asked(graph)
        graph.add(clustered(90, 16, seed=3) - 200)
        graph.merge(measure="auto")
        others = asked(graph)
    assert 0.8 * before - 0.1 <= without <= 1.25 * before + 0.1
    assert 0.8 * before - 0.1 <= others <= 1.25 * before + 0.1
