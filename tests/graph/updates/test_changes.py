"""Graphs that change: additions, deletions and merges, beside a dictionary of vectors."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.graph.codes.codebook import Codebook
from espnx.graph.edges import robust_prune
from espnx.graph.merging import writer
from espnx.graph.merging.lists import MergedLists
from espnx.graph.pages.checked import open_pages, read_pages
from espnx.graph.updates.log import RECORD, log_path
from espnx.graph.updates.log_writer import LogWriter
from espnx.storage import NativeEngine, files
from tests.forks import Forks
from tests.graph.conftest import clustered, exact, recall_of
from tests.graph.zygote import change, vectors_of


def small(path: Path, n: int = 400, dim: int = 8, **options: Any) -> np.ndarray:
    """A graph of vectors that float16 holds."""
    base = clustered(n, dim).astype(np.float16).astype(np.float32)
    espnx.graph.build(base, path, **{"max_degree": 12, "list_size": 30, "threads": 1, **options})
    return base


def living(graph: espnx.graph.GraphIndex) -> list[int]:
    """All ids that a search finds."""
    query = np.zeros((1, graph.facts.layout.dim), np.float32)
    every = None if graph.facts.clusters is None else 1000
    found = graph.search(query, len(graph) + 20, list_size=4000, nprobe=every).ids[0]
    ids = sorted(found[found >= 0].tolist())
    assert len(ids) == len(graph)
    return ids


@pytest.mark.parametrize(
    ("codes", "metric"), [("inline", "l2"), ("memory", "cosine"), ("paged", "ip")]
)
def test_it_is_as_a_dictionary(tmp_path: Path, codes: str, metric: str) -> None:
    base = small(tmp_path / "g", 700, 12, codes=codes, metric=metric)
    known = dict(enumerate(base))
    queries, more = clustered(20, 12, seed=1), clustered(600, 12, seed=2)
    more = more.astype(np.float16).astype(np.float32)
    random = np.random.default_rng(0)
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
            given = graph.add(rows[:20], ids=own)
            given = np.concatenate([given, graph.add(rows[20:])])
            known |= dict(zip(given.tolist(), rows, strict=True))
            for _ in range(2):
                _compare(graph, known, queries, metric)
                assert reader.reload() or not added
                _compare(reader, known, queries, metric)
                graph.merge()
            assert graph.pending.is_empty
        assert graph.merge() is False


def _compare(
    graph: espnx.graph.GraphIndex, known: dict[int, np.ndarray], queries: np.ndarray, metric: str
) -> None:
    ids = np.array(sorted(known))
    rows = np.stack([known[each] for each in ids.tolist()])
    assert len(graph) == len(known)
    graph.verify()
    found = graph.search(queries, 10, list_size=120)
    assert recall_of(found.ids, ids[exact(rows, queries, 10, metric)]) > 0.97
    if metric == "l2":
        far = np.square(queries - np.stack([known[each] for each in found.ids[:, 0]])).sum(axis=1)
        assert np.allclose(found.distances[:, 0], far, rtol=1e-3)
        assert np.array_equal(graph.vectors(ids[::7]), rows[::7])
    some = ids[::9]
    found = graph.search(queries, 5, include=some)
    assert recall_of(found.ids, some[exact(rows[::9], queries, 5, metric)]) > 0.97
    found = graph.search(queries, 5, list_size=120, exclude=some)
    assert not np.isin(found.ids, some).any()
    assert np.isin(found.ids, ids).all()


@pytest.mark.parametrize(
    ("count", "degree", "alpha"),
    [(40, 8, 1.2), (30, 30, 1.5), (3, 8, 1.0), (0, 4, 1.2), (900, 5, 1.2)],
)
@pytest.mark.parametrize("threads", [1, 2])
def test_pruning_is_as_one_by_one(
    monkeypatch: pytest.MonkeyPatch, count: int, degree: int, alpha: float, threads: int
) -> None:
    """Whole numbers, so that both compute the same distances: some candidates are copies of others,
    some come twice, some are where the node is."""
    monkeypatch.setattr("torch.get_num_threads", lambda: threads)
    random = np.random.default_rng(count)
    vectors = random.integers(-9, 10, (max(count, 1), 3)).astype(np.float32)
    targets = random.integers(-9, 10, (50, 3)).astype(np.float32)
    pool = random.integers(-1, count, (50, count + count // 3)) if count else np.empty((50, 0), int)
    found = robust_prune(targets, pool, vectors, degree, alpha)
    assert found.shape == (50, degree)
    for i in range(50):
        true = _pruned(targets[i], pool[i], vectors, degree, alpha)
        assert found[i].tolist() == true + [-1] * (degree - len(true))


@pytest.mark.parametrize(
    ("wrong", "what"),
    [
        ({"candidates": np.array([[3]])}, "a candidate is no row"),
        ({"candidates": np.zeros((2, 1), np.int64)}, "candidates of each target"),
        ({"candidates": np.zeros(1, np.int64)}, r"candidates \[n, p\]"),
        ({"targets": np.zeros((1, 3), np.float32)}, "targets must be"),
        ({"vectors": np.zeros((3, 2), np.float64)}, "vectors must be"),
        ({"degree": 0}, "a degree"),
        ({"alpha": 0.5}, "alpha"),
        ({"alpha": float("nan")}, "alpha"),
    ],
)
def test_pruning_refuses_what_does_not_fit(wrong: dict[str, Any], what: str) -> None:
    given = {
        "targets": np.zeros((1, 2), np.float32), "candidates": np.zeros((1, 1), np.int64),
        "vectors": np.zeros((3, 2), np.float32), "degree": 4, "alpha": 1.2,
    }  # fmt: skip
    # the latter until an engine has been opened
    with pytest.raises((errors.InvalidInputError, RuntimeError), match=what):
        robust_prune(**{**given, **wrong})


def test_additions_are_pruned_together_as_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of what is there, and others: the same graph, by fewer calls."""
    base, others = (np.rint(8 * clustered(n, 8, seed)) for n, seed in ((400, 0), (100, 5)))
    espnx.graph.build(base, tmp_path / "g", max_degree=20, list_size=30, threads=1)
    shutil.copytree(tmp_path / "g", tmp_path / "single")
    calls = list[int]()

    def counted(targets: np.ndarray, *rest: Any) -> np.ndarray:
        calls.append(len(targets))
        return robust_prune(targets, *rest)

    monkeypatch.setattr("espnx.graph.merging.lists.robust_prune", counted)
    monkeypatch.setattr("torch.get_num_threads", lambda: 1)  # several link in any order
    more, made, asked = np.concatenate([base[:150], others]), [], []
    for name, at_once in (("g", 64), ("single", 1)):
        monkeypatch.setattr("espnx.graph.merging.lists._LINKED_AT_ONCE", at_once)
        calls.clear()
        with espnx.graph.open_writer(tmp_path / name) as graph:
            given = graph.add(more)
            graph.merge(measure="never")
            found = graph.search(base[:150], 2, list_size=60)
            facts = graph.facts
        asked.append(len(calls))
        with NativeEngine("posix") as engine:
            pages = np.arange(facts.parts.n_pages)
            nodes = read_pages(engine, open_pages(engine, facts), facts, pages, 30.0)
        made.append([nodes[field] for field in ("row", "n_neighbours", "neighbours", "codes")])
    assert all(map(np.array_equal, *made))
    assert asked[0] < asked[1] / 3
    pairs = np.stack([np.arange(150), given[:150]], axis=1)
    assert np.mean(np.sort(found.ids, axis=1) == pairs) >= 0.99


@pytest.mark.parametrize(
    ("metric", "n", "n_more", "degree", "memory_bytes"),
    [
        ("l2", 500, 150, 8, 1 << 30),
        ("ip", 500, 150, 8, 1 << 30),
        ("l2", 500, 150, 8, 20_000),  # no room for vectors: by codes
        ("l2", 24, 9, 60, 1 << 30),  # all fits in a list
    ],
)
def test_lists_are_repaired_by_their_definition(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    metric: str,
    n: int,
    n_more: int,
    degree: int,
    memory_bytes: int,
) -> None:
    """Every old list after a merge of deletions and additions, and every list of an addition, one
    after the other. Of whole numbers, so that both compute the same distances."""
    base, more = (np.rint(8 * clustered(m, 8, seed)) for m, seed in ((n, 0), (n_more, 5)))
    options = {"max_degree": degree, "list_size": 30, "metric": metric, "threads": 1}
    espnx.graph.build(base, tmp_path / "g", pq_bytes=8, **options)
    seen: list[tuple[Any, ...]] = []
    chosen: list[tuple[np.ndarray, ...]] = []
    decode = Codebook.decode
    monkeypatch.setattr(Codebook, "decode", lambda *given: np.rint(decode(*given)))
    _recorded(monkeypatch, "repaired", seen)
    _recorded(monkeypatch, "_pruned", chosen)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph._memory_bytes = memory_bytes
        graph.delete(np.arange(0, n, 6))
        graph.add(more)
        graph.merge(measure="never")
    lists, _, nodes, links, repaired = seen[0]
    added = links.lists
    dead = lists._dead
    assert len(nodes) == n  # one block
    if memory_bytes < 1 << 20:
        codes = lists._nodes.book.encode(nodes["vector"].astype(np.float32))
        points = np.concatenate([lists._nodes.book.decode(codes), more])
        targets = np.concatenate([nodes["vector"], more]).astype(np.float32)
    else:
        targets = points = lists._nodes.points(np.arange(n + n_more))
    before = [each["neighbours"][: each["n_neighbours"]].tolist() for each in nodes]
    first = chosen[0][-1]  # what additions got of what lies near them
    for name in set(range(n + n_more)) - set(dead.tolist()):
        linked = [n + at for at, each in enumerate(first if name >= n else added) if name in each]
        own = first[name - n] if name >= n else np.array(before[name])
        kept = [int(each) for each in own if each >= 0 and each not in dead]
        lost = [int(each) for each in own if each in dead]
        pool = kept + [each for each in linked if each not in kept]
        if lost:
            pool += [each for node in lost for each in before[node] if each not in dead]
        if lost or len(pool) > degree:
            pool = _pruned(
                targets[name],
                np.array([each for each in pool if each != name]),
                points,
                degree,
                1.2,
            )
        found = added[name - n] if name >= n else repaired[name]
        assert found[found >= 0].tolist() == pool


def _recorded(monkeypatch: pytest.MonkeyPatch, name: str, seen: list[tuple[Any, ...]]) -> None:
    """Arguments of a method of merges, and what it returned."""
    plain = getattr(MergedLists, name)

    def wrapper(*given: Any) -> Any:
        found = plain(*given)
        seen.append((*given, found.copy()))
        return found

    monkeypatch.setattr(MergedLists, name, wrapper)


def _pruned(
    target: np.ndarray, pool: np.ndarray, vectors: np.ndarray, degree: int, alpha: float
) -> list[int]:
    """Algorithm 2 by its definition, of the 750 nearest, in float32."""
    nodes = np.unique(pool[pool >= 0])
    far = np.square(vectors[nodes] - target).sum(axis=1)
    order = np.lexsort([nodes, far])[:750]
    nodes, far = nodes[order], far[order]
    occlusion, chosen, now = np.zeros(len(nodes), np.float32), list[int](), np.float32(1)
    while True:
        for place in range(len(nodes)):
            if place in chosen or occlusion[place] > now or len(chosen) == degree:
                continue
            chosen.append(place)
            between = np.square(vectors[nodes[place + 1 :]] - vectors[nodes[place]]).sum(axis=1)
            ratio = np.where(between > 0, far[place + 1 :] / np.maximum(between, 1), np.inf)
            occlusion[place + 1 :] = np.maximum(occlusion[place + 1 :], ratio)
        if now >= np.float32(alpha):
            break
        now = min(now * np.float32(1.2), np.float32(alpha))
    chosen += [place for place in range(len(nodes)) if place not in chosen]
    return [int(nodes[place]) for place in chosen[:degree]]


@pytest.mark.parametrize("codes", ["inline", "memory", "paged"])
def test_codes_are_trained_anew_for_what_they_cannot_tell_apart(tmp_path: Path, codes: str) -> None:
    """A graph of vectors that are all alike, and then others come."""
    base, more = np.ones((400, 24), np.float32), clustered(800, 24)
    options = {"codes": codes, "max_degree": 16, "list_size": 40, "threads": 1}
    espnx.graph.build(base, tmp_path / "g", **options)
    queries = clustered(30, 24, seed=1)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(more)
        graph.merge()
        truth = exact(np.concatenate([base, more]), queries, 10)
        assert recall_of(graph.search(queries, 10, list_size=60).ids, truth) >= 0.95


def test_codes_of_what_comes_alike_are_kept(tmp_path: Path) -> None:
    drawn = clustered(4000, 24)
    espnx.graph.build(drawn[:3600], tmp_path / "g", max_degree=12, list_size=30, threads=1)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        before = graph.facts.codebook.packed()
        graph.delete(np.arange(100))
        graph.add(drawn[3600:])
        graph.merge()
        assert np.array_equal(graph.facts.codebook.packed(), before)


def test_wrong_input_changes_nothing(tmp_path: Path) -> None:
    base = small(tmp_path / "g", 100)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        bad = base[:2].copy()
        bad[1, 3] = np.nan
        for vectors, ids in [
            (bad, None), (base[:2, :5], None), (base[:2], [5, 200]), (base[:2], [200, 200]),
            (base[:2], [200]), (base[:1], [2**32]), (base[:1], [-1]),
            (base[:1], np.array([2**64 - 1], np.uint64)), (np.full(8, 1e300), None),
        ]:  # fmt: skip
            with pytest.raises(errors.InvalidInputError):
                graph.add(vectors, ids=ids)
        unsigned = np.array([2**64 - 1], np.uint64)
        for gone in ([100], [3, 3], [1.5], [-1], [2, 2**40], [[1], [2, 3]], unsigned):
            with pytest.raises(errors.InvalidInputError):
                graph.delete(gone)
        assert living(graph) == list(range(100))
        assert graph.pending.stamp == 0
        graph.delete([7])
        with pytest.raises(errors.InvalidInputError):
            graph.delete(7)
        with pytest.raises(errors.InvalidInputError):
            graph.vectors([7])
        graph.delete([each for each in range(100) if each != 7])
        assert len(graph) == 0
        assert (graph.search(base[:3], 4).ids == -1).all()
        graph.merge()
        assert len(graph) == 0
        assert graph.add(base[:30]).tolist() == list(range(100, 130))
        graph.merge()
        assert living(graph) == list(range(100, 130))
    with pytest.raises(errors.StoreNotFoundError):
        espnx.graph.open_writer(tmp_path / "none")
    with pytest.raises(errors.InvalidInputError):
        espnx.graph.open_writer(tmp_path / "g", durability="some")


def test_one_writer_and_readers_that_keep_their_version(tmp_path: Path) -> None:
    base = small(tmp_path / "g", codes="paged")
    with espnx.graph.open_writer(tmp_path / "g", durability="group") as graph:
        with pytest.raises(errors.StoreBusyError):
            espnx.graph.open_writer(tmp_path / "g")
        with espnx.graph.open(tmp_path / "g") as reader:
            for merged in range(3):
                graph.delete(range(50 * merged, 50 * merged + 50))
                graph.add(base[:50])
                graph.merge()
            assert living(reader) == list(range(400))
            assert set(reader.search(base[:9], 3, include=range(99)).ids.ravel()) <= set(range(99))
            assert np.array_equal(reader.vectors([1, 399]), base[[1, 399]])
            reader.verify()
            assert reader.reload()
            assert living(reader) == living(graph) == list(range(150, 550))
            assert not reader.reload()
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        assert len(graph) == 400


def test_a_call_merges_what_goes_beyond_the_limit(tmp_path: Path) -> None:
    base = small(tmp_path / "g")
    with espnx.graph.open_writer(tmp_path / "g", pending_bytes=4096) as graph:
        generation = graph.facts.generation
        for _ in range(3):
            graph.add(base[:300])
        assert graph.facts.generation == generation + 3
        assert len(graph) == 1300


def test_logs_that_are_torn_damaged_or_foreign(tmp_path: Path) -> None:
    base = small(tmp_path / "g", 100)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(base[:3])
        graph.delete([1, 101])
        graph.add(base[3:4])
        log = Path(log_path(graph.facts))
    whole = log.read_bytes()
    now = sorted({*range(100), 100, 102, 103} - {1})
    for cut in (1, 30, RECORD.itemsize + 10):
        log.write_bytes(whole[:-cut])
        with espnx.graph.open(tmp_path / "g") as reader:
            torn = reader.verify().torn_bytes
            log.write_bytes(whole[:-cut] + b"on")  # another process is at it
            assert reader.verify().torn_bytes == torn + 2
            log.write_bytes(whole[:-cut])
        with espnx.graph.open_writer(tmp_path / "g") as graph:
            assert graph.torn_bytes == torn > 0
            assert graph.verify().torn_bytes == torn
            assert living(graph) == now[:-1]
            assert graph.add(base[9:10]).tolist() == [103]
        with espnx.graph.open(tmp_path / "g") as reader:
            assert living(reader) == now
            assert reader.verify().torn_bytes == 0
    for at in (3, 60, len(whole) // 2):  # others behind it were written when it was on the device
        data = bytearray(whole)
        data[at] ^= 1
        log.write_bytes(data)
        with pytest.raises(errors.ChecksumError):
            espnx.graph.open(tmp_path / "g")
    log.unlink()
    for number in range(2):  # each by a writer of its own, as from the command line
        with espnx.graph.open_writer(tmp_path / "g") as graph:
            graph.add(base[number : number + 1])
    data = bytearray(log.read_bytes())
    data[60] ^= 1
    log.write_bytes(data)
    with pytest.raises(errors.ChecksumError):
        espnx.graph.open(tmp_path / "g")
    log.write_bytes(whole)
    small(tmp_path / "other", 100)
    shutil.copy(log, tmp_path / "other" / log.name)
    with pytest.raises(errors.ForeignFileError, match="another graph"):
        espnx.graph.open(tmp_path / "other")
    log.write_bytes(b"")
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        assert living(graph) == list(range(100))


def test_a_full_disk_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    base = small(tmp_path / "g", 200)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "full")

    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(base[:5])
        with monkeypatch.context() as patched:
            patched.setattr(os, "pwrite", full)
            with pytest.raises(errors.DiskFullError):
                graph.add(base[:1])
        graph.delete([0])
        ids = [*range(1, 205)]
        assert living(graph) == ids
        there = set(os.listdir(tmp_path / "g"))
        for name in ("write", "sync"):
            with monkeypatch.context() as patched:
                patched.setattr(
                    files.StreamWriter, name, lambda self, *_: full() if "v2" in self.path else 0
                )
                with pytest.raises(OSError, match="full"):
                    graph.merge()
            assert set(os.listdir(tmp_path / "g")) == there
            assert living(graph) == ids
        graph.merge()
        assert living(graph) == ids
        with monkeypatch.context() as patched:
            patched.setattr(os, "fdatasync", full)
            with pytest.raises(errors.DiskFullError):
                graph.add(base[:1])
        with pytest.raises(errors.StateError):  # nobody knows what is on the device
            graph.add(base[:1])


@pytest.mark.parametrize("clusters", [None, 3])
def test_what_is_merged_and_cannot_be_opened_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, clusters: int | None
) -> None:
    """The log that it would go into is that of older pages, which nobody reads."""
    base = small(tmp_path / "g", 200, clusters=clusters)

    def fail(self: object) -> None:
        raise errors.ReadError("no descriptors are left", path="x", errno=errno.EMFILE)

    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(base[:5])
        with monkeypatch.context() as patched:
            patched.setattr(espnx.graph.GraphIndex, "_opened", fail)
            with pytest.raises(errors.ReadError):
                graph.merge()
        for change in (lambda: graph.add(base[:1]), lambda: graph.delete([0]), graph.merge):
            with pytest.raises(errors.StateError, match="open it again"):
                change()
        assert len(graph) == 205
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        assert living(graph) == list(range(205))


@pytest.mark.parametrize("name", ["_opened", "LogWriter"])
def test_a_merge_that_is_interrupted_at_its_end_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Pages and log are those before, which a reader has left behind."""
    base = small(tmp_path / "g", 200)

    def interrupt(*given: object) -> None:
        raise KeyboardInterrupt

    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(base[:5])
        with monkeypatch.context() as patched:
            patched.setattr(
                espnx.graph.GraphIndex if name == "_opened" else writer, name, interrupt
            )
            with pytest.raises(KeyboardInterrupt):
                graph.merge()
        with pytest.raises(errors.StateError, match="open it again"):
            graph.add(base[:1])
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        assert living(graph) == list(range(205))


@pytest.mark.parametrize("name", ["pwrite", "fdatasync"])
@pytest.mark.parametrize("durability", ["each", "group"])
def test_a_change_that_is_interrupted_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, durability: str
) -> None:
    """Nor in the log, once it is written: what comes next takes its ids. In a group a change is
    there before it is on the device."""
    base, call = small(tmp_path / "g", 200), getattr(os, name)

    def interrupted(*given: Any) -> None:
        call(*given)
        raise KeyboardInterrupt

    there = list(range(200))
    with espnx.graph.open_writer(tmp_path / "g", durability=durability) as graph:
        for change in (lambda: graph.add(base[:5]), lambda: graph.delete([3])):
            with monkeypatch.context() as patched:
                patched.setattr(os, name, interrupted)
                with pytest.raises(KeyboardInterrupt):
                    change()
            is_there = durability == "group" and name == "fdatasync"
            assert (living(graph) == there) != is_there
            with espnx.graph.open(tmp_path / "g") as other:
                assert living(other) == living(graph)
            there = living(graph)
        graph.add(base[:2])
        there = living(graph)
    with espnx.graph.open_writer(tmp_path / "g") as graph:
        assert living(graph) == there
        graph.merge()
        assert living(graph) == there


def test_a_log_that_fails_beside_a_merge_takes_no_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = small(tmp_path / "g", 200)
    close = LogWriter.close

    def fail(log: LogWriter) -> None:
        log.broken = OSError(errno.EIO, "of another thread")
        close(log)

    with espnx.graph.open_writer(tmp_path / "g") as graph:
        graph.add(base[:5])
        with monkeypatch.context() as patched:
            patched.setattr(LogWriter, "close", fail)
            assert graph.merge()
        assert len(graph) == 205
        with pytest.raises(errors.StateError, match="of another thread"):
            graph.add(base[:1])


@pytest.mark.parametrize(
    "kills", [5, pytest.param(100, marks=pytest.mark.sweep)], ids=["few", "many"]
)
@pytest.mark.parametrize("options", [{}, {"clusters": 5, "replicas": 0.2}], ids=["one", "clusters"])
def test_killed_at_any_moment(
    tmp_path: Path, processes: Forks, kills: int, options: dict[str, Any]
) -> None:
    small(tmp_path / "first", 1000, **options)
    random = np.random.default_rng(0)
    note, graph = tmp_path / "note", tmp_path / "g"
    done = 600
    for _ in range(kills):
        if done >= 500:
            shutil.rmtree(graph, ignore_errors=True)
            shutil.copytree(tmp_path / "first", graph)
            done = 0
        note.unlink(missing_ok=True)
        child = processes.start(what="changes", path=graph, note=note, first=done)
        while not note.exists():
            time.sleep(0.01)
        time.sleep(random.uniform(0, 0.6))
        os.kill(child, signal.SIGKILL)
        processes.wait(child)
        acknowledged = done + len(note.read_bytes()) // 4
        with espnx.graph.open(graph) as opened:
            ids = living(opened)
            states = [_after(calls) for calls in (acknowledged, acknowledged + 1)]
            assert ids in states
            done = acknowledged + (ids != states[0])
            added = change(max(0, (done - 1) // 3))[0]
            if added[-1] in ids:
                true = vectors_of(added)[10:].astype(np.float16)
                assert np.array_equal(opened.vectors(added[10:]), true)


def _after(calls: int) -> list[int]:
    there = set(range(1000))
    for call in range(calls):
        added, gone, old = change(call // 3)
        if call % 3 == 0:
            there |= set(added)
        elif call % 3 == 1:
            there -= {*gone, old}
    return sorted(there)


@pytest.mark.sweep
@pytest.mark.parametrize(
    ("dim", "options", "most"),
    [(96, {}, 1.05), (32, {"codes": "memory"}, 1.1), (32, {"max_degree": 24}, 1.1)],
    ids=["one node a page", "codes in memory", "several nodes a page"],
)
def test_ten_rounds_beside_a_fresh_build(
    tmp_path: Path, dim: int, options: dict[str, Any], most: float
) -> None:
    """A fifth of the vectors is others after them."""
    n = 3000
    base, more = clustered(n, dim), clustered(n // 5, dim, seed=5)
    queries, random = clustered(100, dim, seed=1), np.random.default_rng(0)
    known = dict(enumerate(base.astype(np.float16).astype(np.float32)))
    espnx.graph.build(base, tmp_path / "g", **options)
    with espnx.graph.open_writer(tmp_path / "g", durability="none") as graph:
        for rows in np.split(more.astype(np.float16).astype(np.float32), 10):
            gone = random.choice(sorted(known), len(rows), replace=False)
            graph.delete(gone)
            for each in gone.tolist():
                del known[each]
            known |= dict(zip(graph.add(rows).tolist(), rows, strict=True))
            graph.merge()
        ids = np.array(sorted(known))
        vectors = np.stack([known[each] for each in ids.tolist()])
        true = ids[exact(vectors, queries, 10)]
        espnx.graph.build(vectors, tmp_path / "fresh", **options)
        with espnx.graph.open(tmp_path / "fresh") as fresh:
            assert (fresh.facts.layout.nodes_per_page > 1) == (most > 1.05)
            for length in (10, 14, 28):
                ours = graph.search(queries, 10, list_size=length)
                theirs = fresh.search(queries, 10, list_size=length)
                assert recall_of(ours.ids, true) >= recall_of(ids[theirs.ids], true) - 0.01
                assert ours.pages.mean() <= most * theirs.pages.mean()
