"""Builds the edges of a graph that fits in memory, on the CPU, or on a GPU with cuVS."""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch

from .. import errors
from ..ops._native import load_extension
from ..ops.cuvs import cuda_device, load_cuvs
from .options import GraphOptions

if TYPE_CHECKING:
    from .._C import Vamana

#: What cuVS's Vamana has kernels for.
CUDA_DEGREES = (32, 64, 128, 256)
_BLOCK_ROWS = 16_384
# Of a graph as cuVS and DiskANN write it: bytes in all, the largest degree, where walks begin,
# frozen points.
_HEADER = np.dtype([("size_bytes", "<u8"), ("degree", "<u4"), ("start", "<u4"), ("frozen", "<u8")])


def build_edges(
    rows: np.ndarray,
    format: str,  # noqa: A002
    options: GraphOptions,
    seed: int,
    progress: Callable[[int, int], None],
) -> Vamana:
    """The graph of some vectors.

    Args:
        rows: [n, dim], see `measured_rows`, and their format.
        progress: (nodes done, of how many); a GPU tells it when all are done.

    Raises:
        InvalidInputError: a degree that cuVS does not have.
        MissingDependencyError, PathUnavailableError: no cuVS, no GPU.
    """
    view = torch.from_numpy(rows.view(np.uint8) if rows.dtype == np.int8 else rows)
    if options.device == "cpu" or len(rows) <= options.max_degree:
        graph = load_extension().Vamana(
            vectors=view,
            format=format,
            degree=options.max_degree,
            list_size=options.list_size,
            alpha=options.alpha,
            passes=1,
            saturate=True,
            threads=options.threads,
            seed=seed,
        )
        graph.build(progress)
        return graph
    neighbours, counts = _edges_by_cuvs(rows, options)
    progress(len(rows), len(rows))
    return load_extension().Vamana.from_edges(
        vectors=view,
        format=format,
        neighbours=torch.from_numpy(neighbours),
        counts=torch.from_numpy(counts),
        medoid=_medoid(rows),
        list_size=options.list_size,
    )


def robust_prune(
    targets: np.ndarray, candidates: np.ndarray, vectors: np.ndarray, degree: int, alpha: float
) -> np.ndarray:
    """The neighbours that some nodes get of their candidates, as in a build: robust pruning
    (DiskANN, algorithm 2).

    Of each node's 750 nearest candidates one is left out where a chosen one is nearer to it than
    the node is by the factor `alpha`, squared distances compared, which grows from 1; and what is
    free then is filled with the nearest that were left out.

    Args:
        targets: float32 [m, dim]: the nodes. candidates: int64 [m, p]: rows of `vectors`, not the
            nodes themselves; -1: none. vectors: float32 [n, dim].

    Returns:
        int64 [m, degree]: rows, those chosen first in front, -1 behind the last.
    """
    return (
        load_extension()
        .prune_candidates(
            targets=torch.from_numpy(np.ascontiguousarray(targets)),
            candidates=torch.from_numpy(np.ascontiguousarray(candidates)),
            vectors=torch.from_numpy(np.ascontiguousarray(vectors)),
            degree=degree,
            alpha=alpha,
            threads=torch.get_num_threads(),
        )
        .numpy()
    )


def check_device(options: GraphOptions) -> None:
    """Raises what `build_edges` would, before there is anything to build."""
    if options.device == "cpu":
        return
    if not isinstance(options.device, str) or not re.fullmatch(r"cuda(:\d+)?", options.device):
        raise errors.InvalidInputError(
            "device of a build", got=repr(options.device), expected='"cpu", "cuda" or "cuda:N"'
        )
    load_cuvs("neighbors.vamana")
    cuda_device(options.device)
    if options.max_degree not in CUDA_DEGREES:
        raise errors.InvalidInputError(
            "max_degree on a GPU",
            got=options.max_degree,
            expected=", ".join(map(str, CUDA_DEGREES)),
        )


def _edges_by_cuvs(rows: np.ndarray, options: GraphOptions) -> tuple[np.ndarray, np.ndarray]:
    """(neighbours uint32 [n, max_degree], zeros behind the last; counts int64 [n]). cuVS's Python
    hands its graph out as a file alone."""
    vamana, place = load_cuvs("neighbors.vamana"), cuda_device(options.device)
    candidates = max(options.list_size, options.max_degree + 1)
    with torch.cuda.device(place), tempfile.TemporaryDirectory() as folder:
        vectors = torch.from_numpy(
            rows.astype(np.float32) if rows.dtype == np.float16 else rows
        ).to(place)
        params = vamana.IndexParams(
            metric="sqeuclidean",
            graph_degree=options.max_degree,
            visited_size=1 << (candidates - 1).bit_length(),
            alpha=options.alpha,
        )
        file = Path(folder) / "graph"
        vamana.save(str(file), vamana.build(params, vectors), include_dataset=False)
        return read_vamana_file(file, len(rows), options.max_degree)


def read_vamana_file(path: Path, n: int, degree: int) -> tuple[np.ndarray, np.ndarray]:
    """Edges of a graph as DiskANN keeps it in memory and cuVS writes it: for each node a count, and
    so many numbers.

    Returns:
        uint32 [n, degree], zeros behind the last, and counts, int64 [n]; a node's edge to itself is
        left out.

    Raises FormatError where the file is not of n nodes of at most so many edges.
    """
    data = np.fromfile(path, np.uint8)

    def wrong(got: str, expected: str) -> errors.FormatError:
        return errors.FormatError(
            "a graph that cuVS has written", path=path, got=got, expected=expected
        )

    if (
        data.size < _HEADER.itemsize
        or data.size % 4
        or int(data[: _HEADER.itemsize].view(_HEADER)[0]["size_bytes"]) != data.size
    ):
        raise wrong(f"{data.size} bytes", "what its header says")
    numbers = data[_HEADER.itemsize :].view("<u4")
    neighbours, counts = np.zeros((n, degree), np.uint32), np.zeros(n, np.int64)
    at = 0
    for node in range(n):
        count = int(numbers[at]) if at < numbers.size else degree + 1
        if count > degree or at + 1 + count > numbers.size:
            raise wrong(f"node {node} with {count} edges", f"at most {degree}, inside the file")
        near = numbers[at + 1 : at + 1 + count]
        if count and near.max() >= n:
            raise wrong(f"an edge of node {node} to {near.max()}", f"below {n}")
        near = near[near != node]
        neighbours[node, : len(near)], counts[node] = near, len(near)
        at += 1 + count
    if at != numbers.size:
        raise wrong(f"{4 * (numbers.size - at)} bytes behind the last node", "none")
    return neighbours, counts


def _medoid(rows: np.ndarray) -> int:
    """The vector nearest to the mean of all."""
    starts = range(0, len(rows), _BLOCK_ROWS)
    mean = sum(
        rows[first : first + _BLOCK_ROWS].sum(axis=0, dtype=np.float64) for first in starts
    ) / len(rows)
    far = [np.square(rows[first : first + _BLOCK_ROWS] - mean).sum(axis=1) for first in starts]
    return int(np.argmin(np.concatenate(far)))
