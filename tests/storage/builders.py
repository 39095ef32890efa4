"""Every builder of a store, small, with what its stores hold: for the tests of what replaces what.
Jobs of tests/forks.py, too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import espnx
import espnx.clusters
import espnx.graph
import espnx.postings
from espnx.device.clusters import write_clusters
from espnx.device.clusters.layout import read_clusters
from espnx.graph import PrivateGraphs, build_private
from espnx.graph.hnsw import HnswGraph, Links, write_hnsw
from espnx.postings import Postings, SplitPostings, build_split
from espnx.retrieval.build.trained import Trained
from espnx.storage import NativeEngine
from tests.forks import serve
from tests.kills import watch
from tests.retrieval.common import D_CLS, DIM, build, corpus, queries

Read = Callable[[Sequence[Path]], object]


def vectors(version: int) -> np.ndarray:
    return np.random.default_rng(version).integers(0, 9, (20 + version, 4)).astype(np.uint8)


def texts(version: int) -> list[str]:
    return [f"version v{version} of record r{i}" for i in range(6 + version)]


def _hnsw(path: Path, version: int, **options: Any) -> None:
    rows = vectors(version)
    lowest = np.full((len(rows), 4), -1, "<i4")
    lowest[:, 0] = (np.arange(len(rows)) + 1) % len(rows)
    write_hnsw(
        path,
        rows,
        Links(np.ones(len(rows), np.uint8), lowest, np.empty((0, 2), "<i4"), 0),
        **options,
    )


def _read_index(path: Path) -> object:
    with espnx.open(path) as index:
        return [(hit.id, hit.text, hit.score) for hit in index.search(queries(1)[0], k=100).hits]


def _read_graph(path: Path) -> object:
    with espnx.graph.open(path) as graph:
        graph.verify()
        return graph.vectors(range(len(graph))).tolist()


def _read_private(paths: Sequence[Path]) -> object:
    with PrivateGraphs(paths) as graphs:
        return [graph.vectors(range(len(graph))).tolist() for graph in graphs.graphs]


def _read_postings(path: Path) -> object:
    with Postings.open(path) as postings:
        postings.verify()
        return postings.search(texts(1) + texts(2), k=20).scores.tolist(), len(postings)


def _read_split(paths: Sequence[Path]) -> object:
    with SplitPostings(paths) as postings:
        postings.verify()
        return postings.search(texts(1) + texts(2), k=20).scores.tolist(), len(postings)


def _read_hnsw(path: Path) -> object:
    graph = HnswGraph(path)
    return graph.n_nodes, graph.links.lowest.tolist()


def _read_clusters(path: Path) -> object:
    with NativeEngine() as engine:
        found = read_clusters(engine, path)
    return found.n_vectors.tolist(), Path(found.path).read_bytes()


def _lists(path: Path, version: int, **options: Any) -> None:
    espnx.clusters.build(vectors(version), path, n_lists=3, threads=1, **options)


def _read_lists(path: Path) -> tuple[list[int], bytes]:
    with espnx.clusters.open(path, engine="posix", threads=1) as index:
        return [len(index), index.verify()], Path(index.path_report()[0].path).read_bytes()


def _graph(path: Path, version: int, **options: Any) -> None:
    espnx.graph.build(
        vectors(version),
        path,
        max_degree=4,
        threads=1,
        num_entry_points=4,
        use_opq=False,
        **options,
    )


def _private(paths: Sequence[Path], version: int, **options: Any) -> None:
    build_private(
        vectors(version),
        paths,
        max_degree=4,
        threads=1,
        num_entry_points=4,
        use_opq=False,
        **options,
    )


def _train(path: Path, version: int, **options: Any) -> None:
    espnx.train(path, corpus(20, seed=version), dims=(D_CLS, DIM), nlist=2, pca=4, **options)


#: By kind: what builds a version of it in directories, and what a reader finds there.
BUILDERS: dict[str, tuple[Callable[..., object], Read]] = {
    "index": (
        lambda paths, version, **options: build(
            paths[0], corpus(10 + version, seed=version), **options
        ),
        lambda p: _read_index(p[0]),
    ),
    "postings": (
        lambda paths, version, **options: Postings.build(paths[0], texts(version), **options),
        lambda p: _read_postings(p[0]),
    ),
    "split postings": (
        lambda paths, version, **options: build_split(paths, texts(version), **options),
        _read_split,
    ),
    "postings by term": (
        lambda paths, version, **options: build_split(
            paths, texts(version), placement="terms", **options
        ),
        _read_split,
    ),
    "graph": (
        lambda paths, version, **options: _graph(paths[0], version, **options),
        lambda p: _read_graph(p[0]),
    ),
    "private graphs": (_private, _read_private),
    "hnsw": (
        lambda paths, version, **options: _hnsw(paths[0], version, **options),
        lambda p: _read_hnsw(p[0]),
    ),
    "clusters": (
        lambda paths, version, **options: write_clusters(
            paths[0],
            np.arange(len(vectors(version))),
            vectors(version),
            np.arange(len(vectors(version))) % 3,
            **options,
        ),
        lambda p: _read_clusters(p[0]),
    ),
    "lists": (
        lambda paths, version, **options: _lists(paths[0], version, **options),
        lambda p: _read_lists(p[0]),
    ),
    "trained": (
        lambda paths, version, **options: _train(paths[0], version, **options),
        lambda p: Trained.load(p[0]).id,
    ),
}
#: Those that write several directories.
SEVERAL = ("split postings", "postings by term", "private graphs")


def directories(folder: Path, kind: str) -> list[Path]:
    """Where a store of that kind lies in a folder."""
    return [folder / "a", folder / "b"] if kind in SEVERAL else [folder / "a"]


def run(job: dict[str, Any]) -> int:
    watch(job)
    kind = job["kind"]
    BUILDERS[kind][0](directories(Path(job["path"]), kind), job["version"], replace=True)
    return 0


PACKAGES = (
    "espnx.postings",
    "espnx.graph",
    "espnx.clusters",
    "espnx.retrieval",
    "espnx.storage",
    "espnx.device",
)


def jobs() -> None:
    serve(run)
