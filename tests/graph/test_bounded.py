"""Builds that keep to a limit of memory: parts, their merge, what is left when they are
interrupted."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.graph.bounded import budget, builder
from espnx.graph.bounded.merge import EdgesFile, Piece, interleave, number_nodes
from espnx.graph.bounded.partition import NOBODY, divide
from espnx.storage.manifest import NAME
from espnx.storage.work import WorkFolder
from tests.forks import Forks, is_running
from tests.graph.conftest import clustered, exact, recall_of

BUILD = sys.modules["espnx.graph.build"]  # by its name the package knows the function
Build = Callable[..., espnx.graph.GraphReport]


@pytest.fixture
def build_in_parts(monkeypatch: pytest.MonkeyPatch) -> Build:
    """Builds with room for `rows` vectors in a part, whatever this process holds."""

    def build(
        vectors: np.ndarray, path: Path, rows: int, **options: Any
    ) -> espnx.graph.GraphReport:
        monkeypatch.setattr(BUILD, "resident_bytes", lambda: 0)
        monkeypatch.setattr(builder, "resident_bytes", lambda: 0)
        monkeypatch.setattr(budget, "member_bytes", lambda layout, options: 1000)
        memory = budget._BUFFERS_BYTES + budget._BYTES_PER_VECTOR * len(vectors) + 1000 * rows
        return espnx.graph.build(
            vectors, path, memory=memory, **({"max_degree": 16, "list_size": 40} | options)
        )

    return build


@pytest.fixture
def small(base: np.ndarray) -> np.ndarray:
    """As many parts with room for half as many vectors."""
    return base[:1500]


@pytest.mark.sampled(1)
@pytest.mark.parametrize("codes", ["inline", "paged", "memory"])
@pytest.mark.parametrize("metric", ["l2", "ip", "cosine"])
def test_a_graph_in_parts_finds_as_much(
    base: np.ndarray,
    queries: np.ndarray,
    tmp_path: Path,
    build_in_parts: Build,
    codes: str,
    metric: str,
) -> None:
    report = build_in_parts(
        base, tmp_path / "g", 900, codes=codes, metric=metric, num_entry_points=20
    )
    assert report.parts == 9  # 2 * 3000 * 1.25 / 900
    espnx.graph.build(
        base,
        tmp_path / "whole",
        codes=codes,
        metric=metric,
        max_degree=16,
        list_size=40,
        num_entry_points=20,
    )
    true = exact(base.astype(np.float16), queries, 10, metric)
    found = []
    for name in ("g", "whole"):
        with espnx.graph.open(tmp_path / name) as index:
            index.verify()
            found.append(index.search(queries, 10, list_size=40))
            assert (
                np.array_equal(index.vectors(np.arange(3000)), base.astype(np.float16))
                or metric == "cosine"
            )
            assert index.facts.recall
    assert recall_of(found[0].ids, true) > min(0.97, recall_of(found[1].ids, true) - 0.01)
    assert found[0].pages.mean() < 1.3 * found[1].pages.mean()
    assert not (tmp_path / "g" / "work").exists()


@pytest.mark.parametrize("codes", ["inline", "memory"])
def test_every_node_is_reached_from_every_entry(
    tmp_path: Path, build_in_parts: Build, codes: str
) -> None:
    build_in_parts(
        clustered(1000, 8), tmp_path / "g", 200, codes=codes, max_degree=4, num_entry_points=30
    )
    with espnx.graph.open(tmp_path / "g") as index:
        layout = index.facts.layout
        raw = np.fromfile(index.facts.path("nodes.bin"), np.uint8).reshape(-1, layout.page_bytes)[
            :, 16:
        ]
        nodes = (
            np.ascontiguousarray(raw[:, : layout.nodes_per_page * layout.node_bytes])
            .view(layout.node_dtype)
            .ravel()[: layout.n]
        )
        assert len(index.facts.entries) > 1
        for entry in index.facts.entries.tolist():
            seen, waiting = {entry}, [entry]
            while waiting:
                node = nodes[waiting.pop()]
                fresh = set(node["neighbours"][: node["n_neighbours"]].tolist()) - seen
                seen |= fresh
                waiting += fresh
            assert len(seen) == layout.n


@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_few_vectors(tmp_path: Path, n: int) -> None:
    vectors = clustered(20, 5)[:n]
    espnx.graph.build(vectors, tmp_path / "g", memory="8GiB", max_degree=16)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.verify().pages == index.facts.layout.n_pages
        assert (index.search(clustered(3, 5), 20).ids >= 0).sum() == 3 * n


def test_one_point_repeated(tmp_path: Path, build_in_parts: Build) -> None:
    vectors = np.concatenate([np.ones((700, 6), np.float32), clustered(100, 6)])
    build_in_parts(vectors, tmp_path / "g", 400, max_degree=8)
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        found = index.search(vectors[700:], 1, list_size=60)
    assert recall_of(found.ids, np.arange(700, 800)[:, None]) > 0.97


def test_codes_that_do_not_fit_are_read_as_pages_want_them(
    base: np.ndarray, tmp_path: Path, build_in_parts: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = budget.plan_parts
    pages = []
    for name, cache_bytes in (("a", None), ("b", 20_000)):
        if cache_bytes is not None:
            monkeypatch.setattr(
                builder,
                "plan_parts",
                lambda *a: budget.Budget(**(vars(original(*a)) | {"cache_bytes": 20_000})),
            )
        build_in_parts(base, tmp_path / name, 900, threads=1)
        with espnx.graph.open(tmp_path / name) as index:
            pages.append(
                np.fromfile(index.facts.path("nodes.bin"), np.uint8).reshape(
                    -1, index.facts.layout.page_bytes
                )[:, 16:]
            )
    assert np.array_equal(*pages)


class KilledError(BaseException):
    pass


@pytest.mark.parametrize("stage", ["read", "divide", "edges", "merge", "pages"])
def test_a_build_goes_on_where_it_was(
    small: np.ndarray, tmp_path: Path, build_in_parts: Build, stage: str
) -> None:
    path, seen = tmp_path / "g", []

    def stop(what: str, done: int, total: int) -> None:
        if what == stage and done > (total // 2 if what == "edges" else 0):
            raise KilledError

    def watch(what: str, done: int, total: int) -> None:
        seen.append((what, done, total))

    with pytest.raises(KilledError):
        build_in_parts(small, path, 450, threads=1, progress=stop)
    assert not (path / NAME).exists()
    build_in_parts(small, path, 450, threads=1, progress=watch)
    stages = [what for what, _, _ in seen]
    assert ("read" in stages) == (stage == "read")
    assert ("divide" in stages) == (stage in ("read", "divide"))
    inserted = {done for what, done, total in seen if what == "edges"}
    assert (len(inserted) > 9) == (stage in ("read", "divide", "edges")), (
        "parts that were whole are not built again"
    )
    if not UNINTERRUPTED:  # the same for every stage
        build_in_parts(small, tmp_path / "other", 450, threads=1)
        UNINTERRUPTED.append(pages_of(tmp_path / "other"))
    assert np.array_equal(pages_of(path), UNINTERRUPTED[0]), "as if it had not been interrupted"


UNINTERRUPTED: list[np.ndarray] = []


def pages_of(path: Path) -> np.ndarray:
    """uint8 [page, byte]: without the headers, which name the build."""
    with espnx.graph.open(path) as index:
        index.verify()
        pages = np.fromfile(index.facts.path("nodes.bin"), np.uint8)
        return pages.reshape(-1, index.facts.layout.page_bytes)[:, 16:]


def test_other_input_or_options_begin_anew(
    small: np.ndarray, tmp_path: Path, build_in_parts: Build
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "merge":
            raise KilledError

    seen: list[str] = []
    for change in ({"alpha": 1.3}, {"seed": 1}, {"vectors": small[::-1]}):
        path = tmp_path / str(list(change))
        with pytest.raises(KilledError):
            build_in_parts(small, path, 450, progress=stop)
        given = {
            "vectors": small,
            "path": path,
            "rows": 450,
            "progress": lambda what, done, total: seen.append(what),
        } | change
        build_in_parts(given.pop("vectors"), given.pop("path"), given.pop("rows"), **given)
        assert "read" in seen
        seen.clear()
    path = tmp_path / "unbounded"
    with pytest.raises(KilledError):
        build_in_parts(small, path, 450, progress=stop)
    espnx.graph.build(small[:100], path)
    assert not (path / "work").exists()


@pytest.mark.parametrize(
    "after",
    [
        pytest.param("sampled", marks=pytest.mark.sweep),
        pytest.param("parts", marks=pytest.mark.sweep),
        pytest.param("built_2", marks=pytest.mark.sweep),
        "built_7",
        "graph.new",
    ],
)
def test_a_build_that_is_killed_goes_on(tmp_path: Path, processes: Forks, after: str) -> None:
    source, path = tmp_path / "x.npy", tmp_path / "g"
    np.save(source, clustered(12_000, 24))
    running = processes.start(what="in parts", source=source, path=path)
    while not (path / "work" / after).exists() and is_running(running):
        time.sleep(0.002)
    os.kill(running, signal.SIGKILL)
    processes.wait(running)
    had = (
        {each.name for each in (path / "work").glob("built_*")}
        if (path / "work").exists()
        else set()
    )
    if (path / NAME).exists():
        pytest.skip("it was done before it was killed")
    with pytest.raises(errors.StoreNotFoundError):
        espnx.graph.open(path)
    assert after == "sampled" or after == "parts" or len(had - {f"{after}.new"}) >= 3
    assert processes.run(what="in parts", source=source, path=path) == 0
    with espnx.graph.open(path) as index:
        index.verify()
        assert len(index) == 12_000
        assert max(each.recall for each in index.facts.recall) > 0.95
    assert not (path / "work").exists()


PEAK = """
import re, sys, numpy as np, torch, espnx.graph
from espnx.graph import recall
from espnx.graph.bounded.budget import resident_bytes
from espnx.ops._native import load_extension
recall._REGIONS = int(sys.argv[5])  # each is looked for in all vectors
torch.addmm(torch.ones(1, 8), torch.ones(8, 8), torch.ones(8, 8)); load_extension()
room_mib = 112 if sys.argv[4] == "rotated" else 64  # 48 for principal directions
limit = resident_bytes() + (room_mib << 20)
options = {"codes": sys.argv[3], "use_opq": sys.argv[4] == "rotated", "memory": limit, "threads": 2}
report = espnx.graph.build(sys.argv[1], sys.argv[2], max_degree=12, list_size=12, **options)
# ru_maxrss would count the process that started this
peak_kib = re.search("VmHWM:\\s+(\\d+)", open("/proc/self/status").read()).group(1)
print(int(peak_kib) * 1024, limit, report.parts)
"""


@pytest.mark.parametrize(
    ("codes", "turned", "regions"),
    [
        ("inline", "rotated", 1),
        pytest.param("inline", "rotated", 8, marks=pytest.mark.sweep),
        pytest.param("memory", "as they are", 8, marks=pytest.mark.sweep),
    ],
)
def test_the_limit_is_kept(tmp_path: Path, codes: str, turned: str, regions: int) -> None:
    n, dim = 24_000, 1024  # 94 MiB, with 16 MiB for a part
    rows = np.random.default_rng(0).standard_normal((n, dim)).astype(np.float32)
    rows[:, 1::2] = rows[:, ::2]
    np.save(tmp_path / "x.npy", rows)
    script = [
        sys.executable,
        "-c",
        PEAK,
        str(tmp_path / "x.npy"),
        str(tmp_path / "g"),
        codes,
        turned,
        str(regions),
    ]
    peak, limit, parts = map(
        int, subprocess.run(script, check=True, capture_output=True, text=True).stdout.split()
    )
    assert parts > 3
    assert peak <= limit
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.verify().pages == index.facts.layout.n_pages
        assert (index.facts.codebook.rotation is not None) == (turned == "rotated")


def test_a_limit_that_is_too_low(tmp_path: Path) -> None:
    for memory in (0, "1MiB", 1 << 20):
        with pytest.raises(errors.InvalidInputError, match="at least"):
            espnx.graph.build(clustered(100, 8), tmp_path / "g", memory=memory)
    for memory in (-1, "a lot", 1.5):
        with pytest.raises(errors.InvalidInputError):
            espnx.graph.build(clustered(100, 8), tmp_path / "g", memory=memory)
    assert not (tmp_path / "g").exists()


def test_without_a_limit_what_does_not_fit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BUILD, "available_bytes", lambda: 10_000)
    with pytest.raises(errors.OutOfMemoryError, match="memory="):
        espnx.graph.build(clustered(100, 8), tmp_path / "g")
    assert not (tmp_path / "g").exists()


def test_a_disk_that_is_full(small: np.ndarray, tmp_path: Path, build_in_parts: Build) -> None:
    """A limit of the size of files stands for it, of several sizes: one for each kind of file that
    is written."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    import signal

    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for size_bytes in (100, 10_000, 20_000, 60_000, 200_000):
            resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, hard))
            try:
                with pytest.raises(errors.WriteError):
                    build_in_parts(small, tmp_path / "g", 450)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert not (tmp_path / "g" / NAME).exists()
    finally:
        signal.signal(signal.SIGXFSZ, before)
    build_in_parts(small, tmp_path / "g", 450)
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()


def test_files_of_an_interrupted_build_that_are_short(
    small: np.ndarray, tmp_path: Path, build_in_parts: Build
) -> None:
    def stop(what: str, done: int, total: int) -> None:
        if what == "merge":
            raise KilledError

    for name in (
        "sampled/codebook",
        "sampled/rotated",
        "built_3/own.neighbours",
        "built_3/own.vectors",
        "built_3/guest.counts",
    ):
        path = tmp_path / name.replace("/", ".")
        with pytest.raises(KilledError):
            build_in_parts(small, path, 450, progress=stop, pq_bytes=12)
        file = path / "work" / name
        data = file.read_bytes()
        # the centroids, without a rotation
        file.write_bytes(
            data[: 256 * 4 * small.shape[1]] if name == "sampled/codebook" else data[:-7]
        )
        with pytest.raises(errors.EspnxError):
            build_in_parts(small, path, 450, pq_bytes=12)
        assert not (path / NAME).exists()


def test_parts_take_no_more_than_they_have_room_for() -> None:
    vectors, centres = clustered(1000, 4), clustered(7, 4, seed=3)
    room = np.array([100, 400, 400, 400, 400, 400, 400])
    home, guest = divide(vectors, centres, room)
    far = np.square(vectors[:, None] - centres[None]).sum(axis=-1)
    both = np.bincount(home, minlength=7) + np.bincount(guest[guest != NOBODY], minlength=7)
    assert (both <= [100, 400, 400, 400, 400, 400, 400]).all()
    assert (home != guest).all()
    assert (home < 7).all()
    assert both.sum() == 2000
    assert (home == far.argmin(axis=1)).mean() > 0.5
    one, nobody = divide(vectors, centres[:1], np.array([1000]))
    assert not one.any()
    assert (nobody == NOBODY).all()


def test_interleaving() -> None:
    none = NOBODY
    first = np.array([[1, 2, 3], [1, none, none], [none, none, none], [4, 5, 6]], np.uint32)
    second = np.array([[3, 4, 5], [none, none, none], [7, 8, none], [4, 5, 6]], np.uint32)
    merged, counts = interleave(first, second, 4)
    assert counts.tolist() == [4, 1, 2, 3]
    assert merged.tolist() == [[1, 3, 2, 4], [1, 0, 0, 0], [7, 8, 0, 0], [4, 5, 6, 0]]


def test_numbers_of_nodes() -> None:
    assert number_nodes([7, 0, 5], 3) == [
        Piece(0, 0, 6, 0),
        Piece(2, 0, 3, 6),
        Piece(0, 6, 7, 9),
        Piece(2, 3, 5, 10),
    ]
    assert number_nodes([2], 1) == [Piece(0, 0, 2, 0)]


@pytest.mark.parametrize("degree", [1, 2, 3])
def test_lost_nodes_are_connected(tmp_path: Path, degree: int) -> None:
    """Of nodes that lead nowhere, or round in circles: all are reached from the entry afterwards,
    and none has too many edges."""
    random = np.random.default_rng(degree)
    counts = random.integers(0, degree + 1, 60).astype(np.uint16)
    edges = random.integers(0, 20, (60, degree)).astype(np.uint32)
    edges[30:40, 0], counts[30:40] = np.roll(np.arange(30, 40), 1), 1
    edges.tofile(tmp_path / "edges")
    file = EdgesFile(tmp_path / "edges", degree, counts)
    assert not file.reached_from(3).all()
    assert file.connect(3) > 0
    assert file.reached_from(3).all()
    assert (file.counts <= degree).all()
    leads = file.leading_to(3)
    for node in range(60):
        assert leads[node] == file.reached_from(node)[3]


def test_a_step_is_there_when_it_is_whole(tmp_path: Path) -> None:
    work = WorkFolder(tmp_path, {"a": 1})
    with pytest.raises(KilledError), work.step("x") as folder:
        (folder / "file").write_text("half")
        raise KilledError
    assert not work.has("x")
    with work.step("x") as folder:
        assert not list(folder.iterdir())
        (folder / "file").write_text("whole")
    assert WorkFolder(tmp_path, {"a": 1}).file("x", "file").read_text() == "whole"
    assert not WorkFolder(tmp_path, {"a": 2}).has("x")


def test_another_column_is_another_build(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(0)
    first, second = (random.standard_normal((600, 8)).astype(np.float32) for _ in "ab")
    source = tmp_path / "x.parquet"
    parquet.write_table(arrow.table({"a": list(first), "b": list(second)}), source)

    def stop(what: str, done: int, total: int) -> None:
        if what == "merge":
            raise KeyboardInterrupt

    options: dict[str, Any] = {
        "memory": "8GiB",
        "max_degree": 8,
        "list_size": 20,
        "vector_dtype": "float32",
    }
    with pytest.raises(KeyboardInterrupt):
        espnx.graph.build(source, tmp_path / "g", column="a", progress=stop, **options)
    espnx.graph.build(source, tmp_path / "g", column="b", **options)
    with espnx.graph.open(tmp_path / "g") as index:
        assert np.array_equal(index.vectors(np.arange(600)), second)
