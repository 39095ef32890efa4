"""Builds of lists: heads, closure, splits, packing, bounded memory, and inputs at their ends."""

from __future__ import annotations

import errno
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.clusters
from espnx import errors
from espnx.clusters import gather, packing
from espnx.clusters.closure import Closure
from espnx.clusters.heads import choose_heads, flat_index, split
from espnx.device.clusters.layout import misplaced
from espnx.storage import FaultRule, FaultyEngine
from tests.clusters.oracle import read_files

DIM = 8


def grouped(n: int, seed: int, dim: int = DIM, groups: int = 40) -> np.ndarray:
    rng = np.random.default_rng(seed)
    middles = np.random.default_rng(3).standard_normal((groups, dim)) * 4
    return (middles[rng.integers(0, groups, n)] + rng.standard_normal((n, dim))).astype(np.float32)


def test_closure_is_the_rng_rule() -> None:
    """A plain loop over all heads, the nearest first."""
    heads, vectors = grouped(30, 1), grouped(200, 2)
    for replicas in (1, 2, 8):
        found = Closure(heads, replicas).lists_of(vectors)
        for row, vector in zip(found.tolist(), vectors.astype(float), strict=True):
            far = np.square(heads - vector).sum(axis=1)
            taken: list[int] = []
            for head in np.argsort(far).tolist():
                beside = [np.square(heads[head] - heads[each]).sum() for each in taken]
                if len(taken) < replicas and all(each > far[head] for each in beside):
                    taken.append(head)
            assert [each for each in row if each >= 0] == taken
    assert (found >= 0).sum() > 1.5 * len(vectors)


def test_heads_are_balanced() -> None:
    """No group has many times the vectors of another, though vectors lie in few dense groups."""
    rng = np.random.default_rng(1)
    dense = rng.standard_normal((4000, DIM)) * 0.01
    vectors = np.concatenate([dense, grouped(2000, 2)]).astype(np.float32)
    heads = choose_heads(vectors, 600, 5)
    counts = np.bincount(flat_index(heads).search(vectors, 1)[1][:, 0], minlength=len(heads))
    assert 550 <= len(heads) <= 600
    assert counts.min() >= 1
    assert counts.max() <= 6 * counts.mean()
    assert np.array_equal(heads, choose_heads(vectors, 600, 5))


@pytest.mark.parametrize("count", [1, 7, 33, 100])
def test_heads_of_few_vectors(count: int) -> None:
    vectors = grouped(100, 1)
    heads = choose_heads(vectors, count, 0)
    assert 1 <= len(heads) <= count
    assert len(choose_heads(np.repeat(vectors[:1], 50, axis=0), min(count, 50), 0)) == 1


@pytest.mark.parametrize("vectors", [grouped(500, 1), np.ones((500, DIM), np.float32)])
def test_a_split_leaves_nobody_out(vectors: np.ndarray) -> None:
    groups = split(vectors, 9, 0)
    assert sorted(np.concatenate(groups).tolist()) == list(range(500))
    assert max(map(len, groups)) <= 9


def sizes_of(seed: int, page_bytes: int) -> np.ndarray:
    """Of a file, some of several pages."""
    rng = np.random.default_rng(seed)
    return rng.integers(1, page_bytes * rng.choice([1, 1, 3], 400) // 2 + 1)


@pytest.mark.parametrize("page_bytes", [4096, 16384])
def test_packing_keeps_to_pages(page_bytes: int) -> None:
    """No list straddles pages that it fits, none overlap, and pages are well filled; the best fit
    takes fewest."""
    size_bytes, heads = sizes_of(1, page_bytes), grouped(400, 1)
    gains = packing.gains_of(heads, flat_index(heads), None)
    places = {
        "order": packing.in_order(size_bytes, page_bytes),
        "best-fit": packing.best_fit(size_bytes, page_bytes),
        "co-access": packing.co_access(size_bytes, gains, page_bytes),
    }
    ends = {}
    for name, begin in places.items():
        ends[name] = int((begin + size_bytes).max())
        assert misplaced(begin, size_bytes, page_bytes, ends[name]) is None, name
    assert ends["best-fit"] <= min(ends.values()) + page_bytes
    assert max(ends.values()) < 1.35 * size_bytes.sum()


def pages_read(begin: np.ndarray, size_bytes: np.ndarray, read: np.ndarray) -> int:
    return sum(
        len(
            set(
                itertools.chain.from_iterable(
                    range(begin[each] // 16384, (begin[each] + size_bytes[each] - 1) // 16384 + 1)
                    for each in lists
                )
            )
        )
        for lists in read.tolist()
    )


def test_lists_that_are_read_together_share_pages() -> None:
    """Queries that were not sampled read fewest pages where near heads, and best where sampled
    queries, say which lists do."""
    heads = grouped(1000, 1)
    size_bytes = np.random.default_rng(2).integers(500, 6000, 1000)
    index = flat_index(heads)
    sampled = index.search(grouped(3000, 4), 6)[1]
    unseen = index.search(grouped(400, 5), 6)[1]
    pages = {
        "order": packing.in_order(size_bytes, 16384),
        "best-fit": packing.best_fit(size_bytes, 16384),
        "heads": packing.co_access(size_bytes, packing.gains_of(heads, index, None), 16384),
        "queries": packing.co_access(size_bytes, packing.gains_of(heads, index, sampled), 16384),
    }
    read = {name: pages_read(begin, size_bytes, unseen) for name, begin in pages.items()}
    assert read["queries"] < read["heads"] < 0.8 * read["best-fit"]
    assert read["heads"] < read["order"]


@pytest.mark.parametrize("packed", espnx.clusters.PACKINGS)
@pytest.mark.parametrize(("list_bytes", "page_bytes"), [(512, 4096), (12288, 16384), (9000, 4096)])
def test_what_is_built(folder: Path, packed: str, list_bytes: int, page_bytes: int) -> None:
    """Every vector is in one list or more, whole; no list is longer than it may be; the report,
    `info` and the file say the same."""
    base = grouped(700, 1)
    report = espnx.clusters.build(
        base,
        folder / "c",
        n_lists=25,
        list_bytes=list_bytes,
        page_bytes=page_bytes,
        packing=packed,
        queries=grouped(50, 2),
        vector_dtype="float32",
        threads=1,
    )
    files, facts = read_files(folder / "c"), espnx.clusters.info(folder / "c")
    assert set(np.concatenate(files.ids).tolist()) == set(range(700))
    assert max(files.size_bytes) <= list_bytes
    for ids, vectors in zip(files.ids, files.vectors, strict=True):
        assert len(set(ids.tolist())) == len(ids)
        np.testing.assert_array_equal(vectors, base[ids])
    counts = np.bincount(np.concatenate(files.ids))
    assert 1 <= counts.min() <= counts.max() <= 8
    assert report.n_lists == facts.n_lists == len(files.counts) >= 25
    assert (report.split > 0) == (list_bytes == 512)
    assert report.entries == facts.entries == files.counts.sum()
    assert report.list_vectors == (files.counts.min(), files.counts.max())
    held = sum(each.stat().st_size for each in (folder / "c").iterdir() if each.name != "LOCK")
    assert report.folder_bytes == facts.folder_bytes == held
    assert facts.pages * page_bytes == (folder / "c" / "clusters.bin").stat().st_size
    assert not list((folder / "c").glob("*.work"))
    assert "lists" in report.summary()
    assert packed in facts.summary()


def test_bounded_memory_gives_the_same_lists(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several passes over a file, and lists gathered in pieces."""
    np.save(folder / "v.npy", grouped(3000, 1))
    options: dict[str, Any] = {"n_lists": 50, "list_bytes": 2048, "threads": 1}
    whole = espnx.clusters.build(folder / "v.npy", folder / "a", **options)
    monkeypatch.setattr(sys.modules["espnx.clusters.making"], "_GATHER_SHARE", 2e-4)
    monkeypatch.setattr("espnx.graph.vectors._BLOCK_BYTES", 9000)  # of which 281 rows have place
    parts = espnx.clusters.build(folder / "v.npy", folder / "b", memory="64MiB", **options)
    assert (whole.parts, parts.parts > 4) == (1, True)
    assert (folder / "a" / "clusters.bin").read_bytes() == (
        folder / "b" / "clusters.bin"
    ).read_bytes()
    monkeypatch.setattr(gather, "_SPLIT_BYTES", 4096)
    espnx.clusters.build(folder / "v.npy", folder / "c", **options)
    with espnx.clusters.open(folder / "c") as index:
        index.verify()
        assert index.facts.list_vectors[2] <= 2048 // 20


@pytest.mark.parametrize(
    "base",
    [
        np.zeros((0, DIM), np.float32),
        grouped(1, 1),
        grouped(2, 1),
        np.ones((600, DIM), np.float32),
        np.zeros((600, DIM), np.uint8),
        np.arange(5, dtype=np.uint8)[:, None],
    ],
)
@pytest.mark.parametrize("heads", ["memory", "graph"])
def test_inputs_at_their_ends(folder: Path, base: np.ndarray, heads: str) -> None:
    """None, one, all alike, fewer vectors than heads: all are found."""
    espnx.clusters.build(base, folder / "c", n_lists=64, list_bytes=1024, heads=heads, threads=1)
    with espnx.clusters.open(folder / "c") as index:
        assert len(index) == len(base)
        assert index.verify() == index.facts.n_lists
        found = index.search(base[:1] if len(base) else np.zeros((1, DIM)), 700, n_lists=5000)
    assert sorted(found.ids[0][found.ids[0] >= 0].tolist()) == list(range(len(base)))
    assert (found.distances[0][: len(base)] >= 0).all()


def test_one_list_holds_everything(folder: Path) -> None:
    base = grouped(2000, 1)
    report = espnx.clusters.build(base, folder / "c", n_lists=1, list_bytes=1 << 20, threads=1)
    assert (report.n_lists, report.list_vectors, report.split) == (1, (2000, 2000), 0)
    with espnx.clusters.open(folder / "c") as index:
        assert index.search(base[7], 1).ids.tolist() == [[7]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vectors": np.full((3, DIM), np.nan)}, "vector 0, value 0; got nan"),
        ({"vectors": np.zeros((3, DIM)), "metric": "cosine"}, "vector 0; got length 0"),
        ({"vectors": np.full((3, DIM), 1e6)}, "expected at most 65504"),
        ({"vectors": np.zeros(3)}, "shape of vectors"),
        ({"metric": "cos"}, "metric of lists; got 'cos'"),
        ({"packing": "none"}, "packing of lists; got 'none'"),
        ({"heads": "disk"}, "heads of lists; got 'disk'"),
        ({"heads_share": 0}, "heads_share; got 0"),
        ({"heads_share": 1.5}, "heads_share; got 1.5"),
        ({"n_lists": 0}, "n_lists; got 0"),
        ({"list_bytes": 19}, "list_bytes, of a list; got 19"),
        ({"page_bytes": 6000}, "page_bytes, of a page of flash; got 6000"),
        ({"page_bytes": 2048}, "page_bytes, of a page of flash; got 2048"),
        ({"replicas": 9}, "replicas, lists of a vector; got 9"),
        ({"vector_dtype": "bfloat16"}, "vector_dtype; got 'bfloat16'"),
        ({"vector_dtype": "uint8"}, "vector_dtype; got 'uint8'"),
        ({"memory": "1MiB"}, r"memory of a build of lists; got 1 MiB; expected 64 MiB or more"),
        ({"seed": -1}, "seed; got -1"),
        ({"threads": 0}, "threads; got 0"),
        ({"queries": np.zeros((2, DIM + 1))}, "queries; got"),
        ({"n_list": 4}, "n_lists"),
    ],
)
def test_what_is_refused(folder: Path, change: dict[str, Any], message: str) -> None:
    """Nothing is left of it."""
    where = folder / "c"
    with pytest.raises((errors.InvalidInputError, TypeError), match=message):
        espnx.clusters.build(**{"vectors": grouped(20, 1), "path": where, "threads": 1, **change})
    left = {each.name for each in where.iterdir()} if where.exists() else set()
    assert left <= {"LOCK"}


def test_a_disk_that_is_full(folder: Path) -> None:
    """Whatever write it is that finds no room: a typed error, no file is left, and what was there
    stays."""
    base, options = grouped(300, 1), {"n_lists": 10, "threads": 1}
    espnx.clusters.build(base, folder / "kept", **options)
    failed = 0
    for nth in itertools.count(1):
        rule = FaultRule(operation="write", nth=nth, count=1, value=errno.ENOSPC)
        with FaultyEngine([rule]) as engine:
            try:
                espnx.clusters.build(
                    grouped(300, 2), folder / "kept", replace=True, engine=engine, **options
                )
            except errors.DiskFullError:
                failed += 1
            else:
                break
        with espnx.clusters.open(folder / "kept") as index:
            assert index.search(base[5], 1).ids.tolist() == [[5]]
        assert not [each for each in (folder / "kept").iterdir() if ".v2" in each.name]
    assert failed > 4
    assert espnx.clusters.info(folder / "kept").n == 300


def test_plans(folder: Path) -> None:
    """A plan is near to what a build takes, and refuses what it would."""
    base = grouped(4000, 1, dim=32)
    for dtype, heads in (("float32", "memory"), ("float16", "graph")):
        report = espnx.clusters.build(
            base, folder / dtype, vector_dtype=dtype, heads=heads, threads=1
        )
        found = espnx.clusters.plan(
            4000, 32, vector_dtype=dtype, heads=heads, copies=report.entries / 4000, probed=7
        )
        assert 0.7 < found.disk["total_bytes"] / report.folder_bytes < 1.3
        assert found.pages_per_query == 7
        if heads == "memory":
            assert 0.7 < found.memory["total_bytes"] / report.memory_bytes < 1.3
    for wrong in ({"n": 0}, {"dim": 0}, {"copies": 9}, {"vector_dtype": "pq"}, {"probed": 0}):
        with pytest.raises(errors.InvalidInputError):
            espnx.clusters.plan(**{"n": 10, "dim": 4, **wrong})  # type: ignore[arg-type]
