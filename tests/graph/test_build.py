"""Building: sources, options, what is left when it is interrupted."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx.graph
from espnx import errors
from espnx.graph.codes.codebook import train_codebook
from espnx.graph.layout import choose_layout
from espnx.ops._native import load_extension
from espnx.storage import FaultRule, FaultyEngine
from espnx.storage.manifest import NAME
from tests.forks import Forks, is_running
from tests.graph.conftest import clustered


def bin_file(path: Path, values: np.ndarray) -> Path:
    path.write_bytes(np.array(values.shape, "<u4").tobytes() + values.tobytes())
    return path


def vecs_file(path: Path, values: np.ndarray) -> Path:
    dims = np.full((len(values), 1), values.shape[1], "<i4").view(np.uint8)
    path.write_bytes(
        np.concatenate([dims, values.view(np.uint8).reshape(len(values), -1)], axis=1).tobytes()
    )
    return path


def parquet_file(path: Path, values: np.ndarray) -> Path:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    pq.write_table(pa.table({"id": list(range(len(values))), "embedding": values.tolist()}), path)
    return path


FLOATS = clustered(50, 7)
BYTES = np.random.default_rng(0).integers(0, 256, (50, 7)).astype(np.uint8)


@pytest.mark.parametrize(
    "kind",
    [
        "array",
        "tensor",
        "blocks",
        "npy",
        "float64",
        "fbin",
        "fvecs",
        "parquet",
        "u8bin",
        "i8bin",
        "bvecs",
    ],
)
def test_sources(tmp_path: Path, kind: str) -> None:
    expected: np.ndarray = (
        BYTES if kind in ("u8bin", "bvecs") else BYTES.view(np.int8) if kind == "i8bin" else FLOATS
    )
    source: Any = {
        "array": lambda: FLOATS,
        "tensor": lambda: torch.from_numpy(FLOATS),
        "blocks": lambda: iter([FLOATS[:20], FLOATS[20:]]),
        "float64": lambda: FLOATS.astype(np.float64),
        "fbin": lambda: bin_file(tmp_path / "a.fbin", FLOATS),
        "fvecs": lambda: vecs_file(tmp_path / "a.fvecs", FLOATS),
        "parquet": lambda: parquet_file(tmp_path / "a.parquet", FLOATS),
        "u8bin": lambda: bin_file(tmp_path / "a.u8bin", BYTES),
        "i8bin": lambda: bin_file(tmp_path / "a.i8bin", expected),
        "bvecs": lambda: vecs_file(tmp_path / "a.bvecs", BYTES),
        "npy": lambda: np.save(tmp_path / "a.npy", FLOATS) or tmp_path / "a.npy",
    }[kind]()
    espnx.graph.build(
        source,
        tmp_path / "g",
        max_degree=8,
        vector_dtype="float32" if expected.dtype == np.float32 else "auto",
    )
    with espnx.graph.open(tmp_path / "g") as index:
        found = index.vectors(np.arange(50))
    assert found.dtype == expected.dtype
    assert np.array_equal(found, expected.astype(found.dtype))


@pytest.mark.parametrize(
    ("name", "data", "error"),
    [
        ("missing.npy", None, errors.FileMissingError),
        ("a.txt", b"1 2 3", errors.InvalidInputError),
        ("a.npy", b"not numpy", errors.FormatError),
        ("a.fbin", b"", errors.TruncatedFileError),
        ("a.fbin", np.array([3, 4], "<u4").tobytes() + bytes(40), errors.FormatError),
        ("a.fvecs", b"", errors.FormatError),
        ("a.fvecs", np.array([-1, 4], "<i4").tobytes(), errors.FormatError),
        ("a.fvecs", np.array([1, 0, 2, 0], "<i4").tobytes(), errors.FormatError),
        ("a.parquet", b"PAR1", errors.FormatError),
    ],
)
def test_damaged_sources(
    tmp_path: Path, name: str, data: bytes | None, error: type[Exception]
) -> None:
    if data is not None:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(error):
        espnx.graph.build(tmp_path / name, tmp_path / "g")
    assert not (tmp_path / "g" / NAME).exists()


@pytest.mark.parametrize(
    "wrong",
    [
        {"vectors": np.zeros((2, 3, 4), np.float32)},
        {"vectors": np.zeros((2, 3), np.int64)},
        {"vectors": 7},
        {"vectors": []},
        {"vectors": np.array([[1.0, np.nan]], np.float32)},
        {"vectors": np.array([[1.0, np.inf]], np.float32)},
        {"vectors": np.array([[1e6]], np.float32)},
        {"vectors": np.array([[1e19, 1e19]], np.float32), "vector_dtype": "float32"},
        {"metric": "hamming"},
        {"max_degree": 0},
        {"max_degree": 1025},
        {"list_size": 0},
        {"alpha": 0.9},
        {"alpha": float("nan")},
        {"codes": "nowhere"},
        {"pq_bytes": 8},
        {"pq_bytes": 0},
        {"vector_dtype": "uint8"},
        {"vector_dtype": "float64"},
        {"inline_pq": 3},
        {"codes": "paged", "inline_pq": -2},
        {"codes": "memory", "inline_pq": 65},
        {"codes": "memory", "inline_pq": 1.5},
        {"num_entry_points": 0},
        {"threads": 0},
        {"seed": -1},
    ],
)
def test_refuses(tmp_path: Path, wrong: dict[str, Any]) -> None:
    given = {"vectors": FLOATS} | wrong
    with pytest.raises(errors.InvalidInputError):
        espnx.graph.build(given.pop("vectors"), tmp_path / "g", **given)
    assert not (tmp_path / "g" / NAME).exists()


def test_one_thread_gives_the_same_graph(tmp_path: Path) -> None:
    from espnx.graph.pages.directory import read_graph
    from espnx.storage import NativeEngine

    facts = []
    for name in ("a", "b"):
        espnx.graph.build(clustered(500, 9), tmp_path / name, max_degree=10, threads=1, seed=4)
        with NativeEngine("posix") as engine:
            facts.append(read_graph(engine, tmp_path / name))
    pages = [
        np.fromfile(each.path("nodes.bin"), np.uint8).reshape(-1, each.layout.page_bytes)[:, 16:]
        for each in facts
    ]
    assert np.array_equal(*pages)
    assert facts[0].salt != facts[1].salt


def test_a_graph_is_not_built_over(tmp_path: Path) -> None:
    espnx.graph.build(FLOATS, tmp_path / "g")
    with pytest.raises(errors.InvalidInputError, match="a graph"):
        espnx.graph.build(FLOATS, tmp_path / "g")
    (tmp_path / "h").mkdir()
    (tmp_path / "h" / "mine.txt").write_text("mine")
    with pytest.raises(errors.InvalidInputError, match="empty directory"):
        espnx.graph.build(FLOATS, tmp_path / "h")
    assert (tmp_path / "h" / "mine.txt").read_text() == "mine"


@pytest.mark.parametrize("memory", [None, "8GiB"])
@pytest.mark.parametrize("store", ["nothing", "a graph", "postings"])
def test_a_folder_of_a_user_called_work_is_left_alone(
    tmp_path: Path, store: str, memory: str | None
) -> None:
    if store == "a graph":
        espnx.graph.build(FLOATS, tmp_path)
    elif store == "postings":
        espnx.Postings.build(tmp_path, ["a disk"])
    notes = tmp_path / "work" / "notes"
    notes.parent.mkdir()
    notes.write_text("years")
    with pytest.raises(errors.InvalidInputError):
        espnx.graph.build(FLOATS, tmp_path, memory=memory)
    assert notes.read_text() == "years"
    # a build's own: a graph's, if it is a graph's directory
    notes.rename(notes.with_name("job.json"))
    if store == "nothing":
        espnx.graph.build(FLOATS, tmp_path, memory=memory)
    else:
        with pytest.raises(errors.InvalidInputError):
            espnx.graph.build(FLOATS, tmp_path, memory=memory)
    assert notes.parent.exists() == (store == "postings")


def test_what_progress_raises_ends_the_build(tmp_path: Path) -> None:
    class EnoughError(Exception):
        pass

    def progress(what: str, done: int, total: int) -> None:
        if what == stage:
            raise EnoughError

    for stage in ("read", "codes", "edges", "pages", "recall"):
        path = tmp_path / stage
        with pytest.raises(EnoughError):
            espnx.graph.build(clustered(2000, 16), path, max_degree=32, progress=progress)
        assert (path / NAME).exists() == (stage == "recall"), (
            "without its curve of recall a graph is whole, too"
        )
        if stage != "recall":
            espnx.graph.build(clustered(100, 16), path)  # what was left is cleared


@pytest.mark.parametrize("after_s", [0.0, 0.3, 0.8])
def test_a_killed_build_leaves_no_graph_or_a_whole_one(
    tmp_path: Path, processes: Forks, after_s: float
) -> None:
    path = tmp_path / "g"
    running = processes.start(what="whole", path=path)
    while not path.exists() and is_running(running):
        time.sleep(0.01)
    time.sleep(after_s)
    os.kill(running, signal.SIGKILL)
    processes.wait(running)
    if (path / NAME).exists():
        with espnx.graph.open(path) as index:
            index.verify()
    else:
        with pytest.raises(errors.StoreNotFoundError):
            espnx.graph.open(path)
        espnx.graph.build(FLOATS, path)


@pytest.mark.parametrize("operation", ["open_write", "write", "truncate", "sync", "rename"])
@pytest.mark.parametrize("nth", [1, 2, 5])
def test_writes_that_fail(tmp_path: Path, operation: str, nth: int) -> None:
    rules = [FaultRule("error", operation=operation, nth=nth, count=1, value=28)]
    with FaultyEngine(rules, path="posix") as engine, contextlib.suppress(errors.WriteError):
        espnx.graph.build(FLOATS, tmp_path / "g", engine=engine)
    if not (tmp_path / "g" / NAME).exists():
        espnx.graph.build(FLOATS, tmp_path / "g")
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()


@pytest.mark.parametrize(("dim", "code_bytes"), [(13, 5), (8, 8), (1, 1), (128, 48)])
def test_codes_are_those_of_the_nearest_centroids(dim: int, code_bytes: int) -> None:
    vectors = clustered(max(400, 8 * dim), dim)
    book = train_codebook(vectors, code_bytes)
    assert np.diff(book.begin).max() - np.diff(book.begin).min() <= 1
    assert (book.rotation is None) == (dim == code_bytes), "there is nothing to deal out"
    codes = book.encode(vectors)
    turned = (
        vectors
        if book.rotation is None
        else vectors.astype(np.float64) @ book.rotation.astype(np.float64)
    )
    for part in range(code_bytes):
        own = slice(book.begin[part], book.begin[part + 1])
        far = np.square(turned[:, None, own].astype(np.float64) - book.centroids[None, :, own]).sum(
            axis=-1
        )
        chosen = far[np.arange(len(vectors)), codes[:, part]]
        assert (chosen <= far.min(axis=1) + 1e-5 * (1 + far.min(axis=1))).all()
    assert (
        np.square(book.decode(codes) - vectors).mean()
        < np.square(vectors - vectors.mean(axis=0)).mean()
    )


def test_pages_are_filled() -> None:
    layout = choose_layout(10, 128, "fp16", max_degree=64, codes="inline", code_bytes=None)
    assert (layout.page_bytes, layout.nodes_per_page, layout.code_bytes) == (4096, 1, 55)
    layout = choose_layout(10, 128, "fp16", max_degree=64, codes="memory", code_bytes=None)
    assert (layout.page_bytes, layout.nodes_per_page, layout.code_bytes) == (4096, 7, 64)
    layout = choose_layout(10, 768, "fp16", max_degree=64, codes="inline", code_bytes=None)
    assert layout.page_bytes == 8192
    assert 16 + layout.node_bytes <= 8192 < 16 + layout.node_bytes + 64
    layout = choose_layout(10, 784, "uint8", max_degree=64, codes="inline", code_bytes=None)
    assert (layout.page_bytes, layout.nodes_per_page, layout.code_bytes) == (4096, 1, 47)
    layout = choose_layout(10, 128, "fp16", max_degree=48, codes="inline", code_bytes=33)
    assert (layout.page_bytes, layout.nodes_per_page, layout.size_bytes) == (4096, 2, 5 * 4096)
    with pytest.raises(errors.InvalidInputError):
        choose_layout(10, 4096, "fp32", max_degree=1024, codes="inline", code_bytes=200)


@pytest.mark.parametrize("nodes_per_page", [1, 3, 7, 600])
def test_packing_is_a_permutation_that_keeps_neighbours_together(nodes_per_page: int) -> None:
    vectors = torch.from_numpy(clustered(500, 8))
    graph = load_extension().Vamana(
        vectors=vectors,
        format="fp32",
        degree=8,
        list_size=20,
        alpha=1.2,
        passes=1,
        saturate=True,
        threads=1,
        seed=0,
    )
    graph.build(lambda done, total: None)
    order = graph.pack(nodes_per_page).numpy()
    assert np.array_equal(np.sort(order), np.arange(500))
    neighbours, counts = (each.numpy() for each in graph.edges())
    page = np.empty(500, np.int64)
    page[order] = np.arange(500) // nodes_per_page
    inside = (
        sum((page[neighbours[i, : counts[i]]] == page[i]).sum() for i in range(500)) / counts.sum()
    )
    if nodes_per_page in (3, 7):
        chance = nodes_per_page / 500
        assert inside > 10 * chance


def test_every_node_is_reached_from_every_entry(graph: Path) -> None:
    with espnx.graph.open(graph) as index:
        layout = index.facts.layout
        raw = np.fromfile(index.facts.path("nodes.bin"), np.uint8).reshape(-1, layout.page_bytes)[
            :, 16:
        ]
        nodes = (
            np.ascontiguousarray(raw[:, : layout.nodes_per_page * layout.node_bytes])
            .view(layout.node_dtype)
            .ravel()[: layout.n]
        )
        for entry in index.facts.entries.tolist():
            seen, waiting = {entry}, [entry]
            while waiting:
                node = nodes[waiting.pop()]
                fresh = set(node["neighbours"][: node["n_neighbours"]].tolist()) - seen
                seen |= fresh
                waiting += fresh
            assert len(seen) == layout.n


def test_the_lock_of_a_build(tmp_path: Path) -> None:
    path = tmp_path / "g"

    def progress(what: str, done: int, total: int) -> None:
        if what == "read":
            with pytest.raises(errors.StoreBusyError):
                espnx.graph.build(FLOATS, path)

    espnx.graph.build(FLOATS, path, progress=progress)
    assert not os.path.exists(path / "LOCK") or (path / NAME).exists()


@pytest.mark.parametrize("level", range(4))
def test_formats_that_hold_the_same_numbers_give_the_same_edges(level: int) -> None:
    extension = load_extension()
    if extension.set_cpu_level(-1) < level:
        pytest.skip("this processor cannot")
    # sums of such are exact in every format
    vectors = np.clip(np.round(3 * clustered(400, 21)), -40, 40)
    found = []
    try:
        extension.set_cpu_level(level)
        for format_name, values in {
            "fp32": vectors.astype(np.float32),
            "fp16": vectors.astype(np.float16),
            "int8": vectors.astype(np.int8).view(np.uint8),
            "uint8": (vectors + 40).astype(np.uint8),
        }.items():
            graph = extension.Vamana(
                vectors=torch.from_numpy(values),
                format=format_name,
                degree=8,
                list_size=20,
                alpha=1.2,
                passes=1,
                saturate=True,
                threads=1,
                seed=0,
            )
            graph.build(lambda done, total: None)
            found.append(graph.edges()[0])
    finally:
        extension.set_cpu_level(-1)
    assert all(torch.equal(found[0], each) for each in found[1:])


def test_a_graph_of_given_edges() -> None:
    vectors = torch.from_numpy(clustered(40, 5))
    neighbours, counts = torch.zeros(40, 3, dtype=torch.uint32), torch.ones(40, dtype=torch.int64)
    # a chain, that ends in itself
    neighbours[:, 0] = torch.from_numpy(np.minimum(np.arange(1, 41), 39).astype(np.uint32))
    make = load_extension().Vamana.from_edges
    graph = make(
        vectors=vectors, format="fp32", neighbours=neighbours, counts=counts, medoid=3, list_size=10
    )
    found, many = graph.edges()
    assert torch.equal(found, neighbours)
    assert torch.equal(many, counts)
    assert graph.medoid == 3
    assert graph.leading_to(3).tolist() == [1] * 4 + [0] * 36
    # the first of the chain, which leads to the two behind it
    assert graph.connect(torch.tensor([3])) == 1
    assert graph.leading_to(0).tolist()[3] == 1
    assert sorted(graph.pack(7).tolist()) == list(range(40))
    for wrong in (
        {"neighbours": torch.full_like(neighbours, 40)},
        {"counts": counts + 3},
        {"counts": counts - 2},
        {"medoid": 40},
        {"medoid": -1},
        {"neighbours": neighbours[:39].contiguous()},
        {"counts": counts[:39]},
        {"neighbours": neighbours.long()},
    ):
        given = {
            "vectors": vectors,
            "format": "fp32",
            "neighbours": neighbours,
            "counts": counts,
            "medoid": 3,
            "list_size": 10,
        } | wrong
        with pytest.raises(ValueError):
            make(**given)


def test_a_graph_whose_recall_was_not_measured(tmp_path: Path) -> None:
    """The build is interrupted right after the graph is whole: it is searched with a list of some
    length, and not with all of it."""
    base = clustered(3000, 12)

    def stop(what: str, done: int, total: int) -> None:
        if what == "recall":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        espnx.graph.build(base, tmp_path / "g", max_degree=16, progress=stop)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.facts.recall == []
        found = index.search(base[:20], 5)
        assert found.ids[:, 0].tolist() == list(range(20))
        assert found.estimated.max() < 2500
        with pytest.raises(errors.InvalidInputError, match="no list was measured"):
            index.search(base[:20], 5, recall=0.95)


def test_more_threads_than_a_search_may_have(tmp_path: Path) -> None:
    report = espnx.graph.build(clustered(300, 8), tmp_path / "g", max_degree=8, threads=300)
    assert report.n == 300
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.facts.recall


def test_vectors_without_a_direction_have_no_cosine(tmp_path: Path) -> None:
    base = clustered(300, 8)
    base[7] = 0
    with pytest.raises(errors.InvalidInputError, match="vector 7; got length 0"):
        espnx.graph.build(base, tmp_path / "g", metric="cosine")
    espnx.graph.build(base[8:], tmp_path / "h", metric="cosine", max_degree=8)
    with (
        espnx.graph.open(tmp_path / "h") as index,
        pytest.raises(errors.InvalidInputError, match="query 1; got length 0"),
    ):
        index.search(np.stack([base[0], base[7]]))


@pytest.mark.parametrize("codes", ["paged", "memory"])
def test_codes_longer_than_a_page_of_codes(tmp_path: Path, codes: str) -> None:
    base = np.random.default_rng(0).standard_normal((60, 4096)).astype(np.float32)
    options: dict[str, Any] = {"codes": codes, "pq_bytes": 4090, "max_degree": 8, "list_size": 10}
    if codes == "paged":
        with pytest.raises(errors.InvalidInputError, match="at most 4080"):
            espnx.graph.build(base, tmp_path / "g", **options)
        return
    espnx.graph.build(base, tmp_path / "g", **options)
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.search(base[:3], 1).ids.ravel().tolist() == [0, 1, 2]


def test_a_directory_that_cannot_be_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> list[str]:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(os, "listdir", fail)
    with pytest.raises(errors.ReadError, match="cannot list a directory"):
        espnx.graph.build(clustered(20, 4), tmp_path / "g")


def test_tensors_of_bfloat16(tmp_path: Path) -> None:
    base = torch.from_numpy(clustered(200, 8)).to(torch.bfloat16)
    espnx.graph.build(base, tmp_path / "g", max_degree=8, vector_dtype="bfloat16")
    with espnx.graph.open(tmp_path / "g") as index:
        assert index.search(base[:9], 1).ids.ravel().tolist() == list(range(9))
        assert np.array_equal(index.vectors([3]), base[3:4].float().numpy())
        with pytest.raises(errors.InvalidInputError, match="a mask"):
            index.vectors(np.ones(200, bool))


def test_a_value_that_is_missing_is_no_zero(tmp_path: Path) -> None:
    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows: list[list[int | None]] = [[1, 2, 3]] * 9000 + [[1, None, 3]]
    parquet.write_table(
        arrow.table({"v": arrow.array(rows, arrow.list_(arrow.uint8()))}), tmp_path / "v.parquet"
    )
    with pytest.raises(errors.FormatError, match="a value that is missing"):
        espnx.graph.build(tmp_path / "v.parquet", tmp_path / "g")
