"""A first stage on a GPU, with FAISS's GPU index replaced by one that has its limits: the pieces
merge to the whole."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.retrieval.first_stage.ivf import gpu as gpu_first_stage
from espnx.retrieval.first_stage.ivf.gpu import GpuLoadedIvf
from tests.retrieval.common import EVERYTHING, build, corpus, queries

LISTS = 5


class LimitedIndex:
    """Refuses what a GPU index would refuse."""

    def __init__(self, index: Any):
        self._index, self.calls = index, 0

    def search_preassigned_c(self, n: int, x: Any, k: int, *rest: Any) -> None:
        assert rest[-1].nprobe <= LISTS
        assert rest[-1].sel is None
        assert k <= gpu_first_stage.RESULTS_MAX
        self.calls += 1
        self._index.search_preassigned_c(n, x, k, *rest)


@pytest.fixture
def pretended(monkeypatch: pytest.MonkeyPatch) -> Iterator[SimpleNamespace]:
    import faiss

    made = SimpleNamespace(index=None)

    def to_gpu(resources: Any, device: int, index: Any) -> LimitedIndex:
        made.index = LimitedIndex(index)
        return made.index

    monkeypatch.setattr(gpu_first_stage, "LISTS_MAX", LISTS)
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 1, raising=False)
    monkeypatch.setattr(faiss, "index_cpu_to_gpu", to_gpu, raising=False)
    return made


@pytest.mark.parametrize("nprobe", [1, 4, 5, 6, 17])
def test_pieces_make_the_whole(folder: Path, pretended: SimpleNamespace, nprobe: int) -> None:
    build(folder / "s", corpus(400), nlist=17)
    with (
        espnx.open(folder / "s", first_stage_on="cuda") as index,
        espnx.open(folder / "s") as plain,
    ):
        wanted = queries(7)
        for options in ({"prefetch_step": 0}, {"prefetch_step": (0.1, 0.5)}):
            on_gpu = index.search(wanted, k=30, candidates=60, nprobe=nprobe, **options)
            assert [r.hits for r in on_gpu] == [
                r.hits for r in plain.search(wanted, k=30, candidates=60, nprobe=nprobe, **options)
            ]
        calls = pretended.index.calls
        assert calls > 0
        some = [f"doc-{i}" for i in range(150)]
        filtered = index.search(wanted[0], k=9, candidates=20, include=some)
        assert filtered.hits == plain.search(wanted[0], k=9, candidates=20, include=some).hits
        assert pretended.index.calls == calls  # a bitmap is the CPU's


def test_too_many_candidates(folder: Path, pretended: SimpleNamespace) -> None:
    build(folder / "s", corpus(30))
    with espnx.open(folder / "s", first_stage_on="cuda") as index:
        stage = index.first_stage
        assert isinstance(stage, GpuLoadedIvf)
        with pytest.raises(errors.InvalidInputError, match="at most 2048"):
            stage.start(np.zeros((1, 16), "f4"), 5000, EVERYTHING).complete()


def test_without_faiss_gpu_or_a_gpu(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import faiss

    monkeypatch.delattr(faiss, "StandardGpuResources", raising=False)
    with pytest.raises(errors.MissingDependencyError, match="faiss-gpu"):
        espnx.open(store, first_stage_on="cuda")
    monkeypatch.setattr(faiss, "StandardGpuResources", object, raising=False)
    monkeypatch.setattr(faiss, "get_num_gpus", lambda: 0, raising=False)
    with pytest.raises(errors.PathUnavailableError, match="no such GPU"):
        espnx.open(store, first_stage_on="cuda")
    with pytest.raises(errors.InvalidInputError, match="cpu or cuda"):
        espnx.open(store, first_stage_on="tpu")
