"""The first stage on a GPU, where faiss-gpu is installed: the same lists, the same steps, in pieces
that a GPU index takes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np

from .... import errors
from ....ops.quantise import load_faiss
from ..interface import Candidates
from ..ties import merged, top
from .search import LoadedIvf

#: What a GPU index takes at a time: lists, and results.
LISTS_MAX = RESULTS_MAX = 2048


class GpuLoadedIvf(LoadedIvf):
    """`LoadedIvf` whose lists are scanned by a GPU. Lists beyond 2,048 are scanned in further calls
    and merged.

    The index stays in host memory too: a GPU index knows no bitmap, so filtered searches are the
    CPU's.

    Args:
        device: number of the GPU. *searched, **options: as of `LoadedIvf`; threads are those of
            filtered searches.

    Raises:
        MissingDependencyError: the installed FAISS has no GPU part. PathUnavailableError: there is
            no GPU.
    """

    def __init__(self, *searched: Any, device: int, **options: Any):
        super().__init__(*searched, **options)
        faiss = load_faiss()
        if not hasattr(faiss, "StandardGpuResources"):
            raise errors.MissingDependencyError(
                "a first stage on the GPU needs FAISS with CUDA",
                got="faiss-cpu",
                fix="install faiss-gpu instead, or first_stage_on='cpu'",
            )
        if faiss.get_num_gpus() <= device:
            raise errors.PathUnavailableError(
                "no such GPU",
                got=device,
                expected=f"one of {faiss.get_num_gpus()}",
                fix="first_stage_on='cpu'",
            )
        self._resources = faiss.StandardGpuResources()
        self._on_gpu: Any = (
            None
            if self.index is None
            else faiss.index_cpu_to_gpu(self._resources, device, self.index)
        )
        self._lock = threading.Lock()  # FAISS's GPU resources belong to one thread at a time

    def scan(
        self,
        vectors: np.ndarray,
        lists: np.ndarray,
        distances: np.ndarray,
        count: int,
        selector: Any,
    ) -> list[Candidates]:
        if selector is not None or self._on_gpu is None:
            return super().scan(vectors, lists, distances, count, selector)
        if count > RESULTS_MAX:
            raise errors.InvalidInputError(
                "candidates of a first stage on the GPU",
                got=count,
                expected=f"at most {RESULTS_MAX}",
                fix="fewer, or first_stage_on='cpu'",
            )
        parts = [
            self._scan_on_gpu(
                vectors,
                lists[:, first : first + LISTS_MAX],
                distances[:, first : first + LISTS_MAX],
                count,
            )
            for first in range(0, lists.shape[1], LISTS_MAX)
        ]
        if len(parts) == 1:
            return parts[0]
        return [merged(found, count) for found in zip(*parts, strict=True)]

    def _scan_on_gpu(
        self, vectors: np.ndarray, lists: np.ndarray, distances: np.ndarray, count: int
    ) -> list[Candidates]:
        pointer = self._faiss.swig_ptr
        queries, count = len(vectors), min(count, self.index.ntotal)
        vectors, lists, distances = (
            np.ascontiguousarray(a, t)
            for a, t in ((vectors, "f4"), (lists, "i8"), (distances, "f4"))
        )
        scores, numbers = np.empty((queries, count), "f4"), np.empty((queries, count), "i8")
        parameters = self._faiss.SearchParametersIVF(nprobe=lists.shape[1])
        with self._lock:
            self._on_gpu.search_preassigned_c(
                queries,
                pointer(vectors),
                count,
                pointer(lists),
                pointer(distances),
                pointer(scores),
                pointer(numbers),
                False,
                parameters,
            )
        return [top(n[n >= 0], s[n >= 0], count) for n, s in zip(numbers, scores, strict=True)]
