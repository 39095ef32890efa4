"""Builds on a GPU: what is asked of cuVS, with a module in its place that does it on the CPU."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx.graph
from espnx import errors
from espnx.graph.edges import read_vamana_file
from espnx.ops._native import load_extension
from espnx.ops.centroids import fit_means, fit_product_quantizer
from tests.graph.conftest import clustered, exact, recall_of


def write_vamana(path: str, lists: list[list[int]], degree: int = 0, size_change: int = 0) -> None:
    """As cuVS's vamana.save does (cpp/src/neighbors/detail/vamana/vamana_serialize.cuh)."""
    body = b"".join(np.array([len(each), *each], "<u4").tobytes() for each in lists)
    header = (
        np.array([24 + len(body) + size_change], "<u8").tobytes()
        + np.array([degree, 0], "<u4").tobytes()
        + bytes(8)
    )
    Path(path).write_bytes(header + body)


class Stub:
    """Stands for cuVS 26: `cuvs.neighbors.vamana` and `cuvs.cluster.kmeans`, with their names and
    keywords alone."""

    def __init__(self) -> None:
        self.built: list[dict[str, Any]] = []
        self.fitted: list[tuple[dict[str, Any], tuple[int, ...]]] = []

    def modules(self) -> dict[str, types.ModuleType]:
        vamana, kmeans = (
            types.ModuleType("cuvs.neighbors.vamana"),
            types.ModuleType("cuvs.cluster.kmeans"),
        )

        def index_params(
            *, metric: str, graph_degree: int, visited_size: int, alpha: float
        ) -> dict[str, Any]:
            return {
                "metric": metric,
                "degree": graph_degree,
                "visited": visited_size,
                "alpha": alpha,
            }

        def build(
            params: dict[str, Any], dataset: torch.Tensor
        ) -> tuple[torch.Tensor, torch.Tensor]:
            assert dataset.dtype in (torch.float32, torch.uint8, torch.int8)
            assert params["metric"] == "sqeuclidean"
            assert params["visited"] > params["degree"]
            self.built.append(params | {"n": len(dataset), "dtype": dataset.dtype})
            graph = load_extension().Vamana(
                vectors=dataset.float(),
                format="fp32",
                degree=params["degree"],
                list_size=40,
                alpha=params["alpha"],
                passes=1,
                saturate=False,
                threads=1,
                seed=0,
            )
            graph.build(lambda done, total: None)
            return graph.edges()

        def save(
            filename: str, index: tuple[torch.Tensor, torch.Tensor], include_dataset: bool = True
        ) -> None:
            assert not include_dataset
            write_vamana(
                filename,
                [
                    near[:count].tolist()
                    for near, count in zip(index[0].numpy(), index[1].tolist(), strict=True)
                ],
            )

        def params(*, n_clusters: int, init_method: str, max_iter: int) -> dict[str, Any]:
            assert init_method in ("KMeansPlusPlus", "Random", "Array")
            return {"k": n_clusters, "rounds": max_iter}

        def fit(params: dict[str, Any], x: torch.Tensor) -> types.SimpleNamespace:
            assert x.dtype == torch.float32
            self.fitted.append((params, tuple(x.shape)))
            return types.SimpleNamespace(
                centroids=torch.from_numpy(fit_means(x.numpy(), params["k"])), inertia=0.0, n_iter=1
            )

        vamana.IndexParams, vamana.build, vamana.save = index_params, build, save  # type: ignore[attr-defined]
        kmeans.KMeansParams, kmeans.fit = params, fit  # type: ignore[attr-defined]
        return {"cuvs.neighbors.vamana": vamana, "cuvs.cluster.kmeans": kmeans}


@pytest.fixture
def cuvs(monkeypatch: pytest.MonkeyPatch) -> Stub:
    """cuVS, and a GPU that is the CPU."""
    import contextlib

    stub = Stub()
    for name in ("cuvs", "cuvs.neighbors", "cuvs.cluster"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    for name, module in stub.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for module in ("espnx.graph.edges", "espnx.ops.cuvs"):
        monkeypatch.setattr(sys.modules[module], "cuda_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "device", lambda place: contextlib.nullcontext())
    return stub


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["fp16", "uint8", "int8", "ip"])
@pytest.mark.parametrize("memory", [None, "8GiB"])
def test_a_graph_by_cuvs(
    base: np.ndarray, queries: np.ndarray, tmp_path: Path, cuvs: Stub, kind: str, memory: str | None
) -> None:
    if kind in ("uint8", "int8"):
        base, queries = (
            np.clip(3 * each + (100 if kind == "uint8" else 0), -128, 255).astype(kind)
            for each in (base, queries)
        )
    metric = "ip" if kind == "ip" else "l2"
    espnx.graph.build(
        base,
        tmp_path / "g",
        device="cuda",
        max_degree=32,
        list_size=60,
        metric=metric,
        memory=memory,
    )
    expected = {"uint8": torch.uint8, "int8": torch.int8}.get(kind, torch.float32)
    assert cuvs.built == [
        {
            "metric": "sqeuclidean",
            "degree": 32,
            "visited": 64,
            "alpha": 1.2,
            "n": 3000,
            "dtype": expected,
        }
    ]
    assert {params["k"] for params, _ in cuvs.fitted} >= {256}
    true = exact(base.astype(np.float16) if base.dtype == np.float32 else base, queries, 10, metric)
    with espnx.graph.open(tmp_path / "g") as index:
        index.verify()
        assert recall_of(index.search(queries, 10, list_size=60).ids, true) > 0.95


def test_product_quantisers_by_cuvs(cuvs: Stub) -> None:
    vectors, begin = clustered(1000, 10), np.array([0, 3, 6, 8, 10])
    found = fit_product_quantizer(vectors, begin, device="cuda")
    assert found.shape == (256, 10)
    assert [shape for _, shape in cuvs.fitted] == [(1000, 3), (1000, 3), (1000, 2), (1000, 2)]
    assert np.abs(found.mean(axis=0) - vectors.mean(axis=0)).max() < 1


def test_without_cuvs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuvs", None)
    with pytest.raises(errors.MissingDependencyError, match="cuvs-cu12"):
        espnx.graph.build(clustered(100, 4), tmp_path / "g", device="cuda")
    assert not (tmp_path / "g").exists()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(tmp_path: Path, cuvs: Stub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    for name, module in cuvs.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    for name in ("cuvs", "cuvs.neighbors", "cuvs.cluster"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    with pytest.raises(errors.PathUnavailableError):
        espnx.graph.build(clustered(100, 4), tmp_path / "g", device="cuda")
    with pytest.raises(errors.InvalidInputError):
        espnx.graph.build(clustered(100, 4), tmp_path / "g", device="tpu")
    assert not (tmp_path / "g").exists()


def test_degrees_that_cuvs_has_not(tmp_path: Path, cuvs: Stub) -> None:
    with pytest.raises(errors.InvalidInputError, match="max_degree"):
        espnx.graph.build(clustered(100, 4), tmp_path / "g", device="cuda", max_degree=48)


def test_a_graph_file(tmp_path: Path) -> None:
    path = tmp_path / "graph"
    write_vamana(str(path), [[1, 2], [], [2, 0]])
    neighbours, counts = read_vamana_file(path, 3, 4)
    assert neighbours.tolist() == [[1, 2, 0, 0], [0, 0, 0, 0], [0, 0, 0, 0]], (
        "an edge of a node to itself is left out"
    )
    assert counts.tolist() == [2, 0, 1]


@pytest.mark.parametrize(
    "wrong",
    [
        {"lists": [[1, 2], []]},
        {"lists": [[1], [], [0], [1]]},
        {"lists": [[1, 2, 0, 1, 2], [], []]},
        {"lists": [[3], [], []]},
        {"size_change": 4},
        {"size_change": -4},
    ],
)
def test_damaged_graph_files(tmp_path: Path, wrong: dict[str, Any]) -> None:
    path = tmp_path / "graph"
    write_vamana(str(path), **({"lists": [[1, 2], [], [0]]} | wrong))
    with pytest.raises(errors.FormatError):
        read_vamana_file(path, 3, 4)
    path.write_bytes(path.read_bytes()[:13])
    with pytest.raises(errors.FormatError):
        read_vamana_file(path, 3, 4)
