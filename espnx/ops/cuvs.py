"""The door to cuVS, NVIDIA's library of vector search on GPUs, where it is installed."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
import torch

from .. import errors


def cuda_device(name: str) -> torch.device:
    """A GPU by its name, ``cuda`` or ``cuda:1``.

    Raises:
        InvalidInputError: another kind of device. PathUnavailableError: there is none.
    """
    try:
        device = torch.device(name)
    except (RuntimeError, TypeError):
        device = torch.device("meta")
    if device.type != "cuda":
        raise errors.InvalidInputError(
            "device of a build", got=repr(name), expected="cpu, cuda, or cuda:1 and so on"
        )
    if not torch.cuda.is_available():
        raise errors.PathUnavailableError("no CUDA device here", got=name, fix="build on the CPU")
    return device


def load_cuvs(module: str) -> Any:
    """A module of cuVS, such as ``cluster.kmeans``. Raises MissingDependencyError."""
    try:
        return importlib.import_module(f"cuvs.{module}")
    except ImportError as error:
        raise errors.MissingDependencyError(
            "builds on a GPU need cuVS",
            got=str(error),
            fix="pip install cuvs-cu12 (or cuvs-cu13), or build on the CPU",
        ) from error


def fit_means_on(device: str, sample: np.ndarray, n_means: int, rounds: int) -> np.ndarray:
    """k-means by cuVS: float32 [n_means, d]. It draws its first means itself, so that two calls may
    differ.

    Raises as `cuda_device` and `load_cuvs`.
    """
    kmeans, place = load_cuvs("cluster.kmeans"), cuda_device(device)
    with torch.cuda.device(place):
        values = torch.from_numpy(np.ascontiguousarray(sample, dtype=np.float32)).to(place)
        params = kmeans.KMeansParams(n_clusters=n_means, init_method="Random", max_iter=rounds)
        found = kmeans.fit(params, values)
        return torch.as_tensor(found.centroids, device=place).cpu().numpy()
