"""Which GPU, which stream, which memory: what a search on a GPU asks for, shown without one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.gpu import records as gpu_records
from espnx.device.gpu.records import TensorRecordDevice
from espnx.device.record_layout import RecordLayout
from espnx.device.records import score as record_score
from espnx.retrieval.search import devices as search_devices
from espnx.retrieval.search.opened import hot_records as hot_module
from espnx.retrieval.search.opened import version as open_version
from espnx.retrieval.search.opened.hot_records import HotRecords
from espnx.retrieval.search.opened.scoring import QueryVectors, TierScoring
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine
from tests.retrieval.common import DIM, queries


@pytest.fixture
def four_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)


@pytest.fixture
def pretended_pinned(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pinned memory that is none; the devices that it was for."""
    wanted: list[torch.device] = []

    def host_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
        wanted.append(device)
        return torch.full((size_bytes,), 0xA5, dtype=torch.uint8)

    monkeypatch.setattr(gpu_records, "host_memory", host_memory)
    monkeypatch.setattr(hot_module, "host_memory", host_memory)
    return wanted


@pytest.mark.usefixtures("four_gpus")
def test_the_number_of_the_gpu_is_found_once() -> None:
    assert search_devices._torch_device("cuda") == torch.device("cuda", 3)
    assert (
        search_devices._torch_device("cuda:1")
        == search_devices._torch_device(torch.device("cuda", 1))
        == torch.device("cuda", 1)
    )
    assert (
        search_devices._torch_device("cpu")
        == search_devices._torch_device("cpu:0")
        == torch.device("cpu")
    )
    for wrong in ("meta", "abacus", 5.5, None):
        with pytest.raises(errors.InvalidInputError, match="cpu or cuda"):
            search_devices._torch_device(wrong)  # type: ignore[arg-type]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("engine", "device", "expected"),
    [("gds", "cuda:1", 1), ("gds-compat", "cuda", 3), ("auto", "cuda:1", None)],
)
def test_the_engine_reads_into_the_gpu_that_scores(
    store: Path, monkeypatch: pytest.MonkeyPatch, engine: str, device: str, expected: int | None
) -> None:
    asked: list[Any] = []

    def open_engine(path: str, **options: Any) -> Any:
        asked.append((path, options))
        raise errors.PathUnavailableError("pretended")

    monkeypatch.setattr(search_devices, "open_engine", open_engine)
    with pytest.raises(errors.PathUnavailableError, match="pretended"):
        espnx.open(store, engine=engine, compute=device)
    assert asked == [
        (engine, {} if expected is None else {"device": torch.device("cuda", expected)})
    ]


@pytest.mark.usefixtures("four_gpus")
@pytest.mark.parametrize(
    ("device", "expected"), [(torch.device("cuda", 2), 2), (torch.device("cpu"), 3)]
)
def test_the_first_stage_is_on_the_gpu_that_scores(device: torch.device, expected: int) -> None:
    assert (
        open_version._gpu_of_first_stage(
            open_version.OpenOptions(device, 2, "cuda", 0, "ssd", None)
        )
        == expected
    )
    assert (
        open_version._gpu_of_first_stage(open_version.OpenOptions(device, 2, "cpu", 0, "ssd", None))
        is None
    )


def vectors(query: espnx.Encoded) -> QueryVectors:
    return QueryVectors(query.cls.reshape(1, -1), query.tokens, 1.0, prepared=query.cls.numpy())


@contextmanager
def kept_on(store: Path, compute: torch.device) -> Iterator[EmbeddingStore]:
    with NativeEngine() as native:
        device = TensorRecordDevice(native, compute, workers=1)
        with EmbeddingStore(store, native, device) as opened:
            yield opened
        device.close()


def test_records_on_their_way_to_a_gpu_lie_packed_in_pinned_memory(
    store: Path, pretended_pinned: list[torch.device], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers, elsewhere = np.array([3, 4, 7, 120, 299]), torch.device("meta")
    monkeypatch.setattr(gpu_records, "score_pairs", lambda *args: None)
    # what crosses stays where it is
    monkeypatch.setattr(torch.Tensor, "to", lambda tensor, *args, **options: tensor)
    with kept_on(store, elsewhere) as kept:
        full = kept.full
        ticket = full.maxsim(numbers, [vectors(queries(1)[0])])
        ticket.finish()
        memory, positions = ticket.records
        sizes = full.schema.sizes(full.n_tokens[numbers])
        assert memory.numel() == sizes.sum()
        assert positions.tolist() == (np.cumsum(sizes) - sizes).tolist()
        full.check(memory, positions, numbers)
        assert pretended_pinned == [elsewhere]
        full.read(numbers, gap_bytes=0).wait()
        assert len(pretended_pinned) == 1


def test_a_buffer_crosses_once(
    store: Path, monkeypatch: pytest.MonkeyPatch, pretended_pinned: list[torch.device]
) -> None:
    """Also for queries that want its records after it was asked for."""
    elsewhere, scored = torch.device("meta"), list[torch.Tensor]()

    def score_pairs(records: Any, memory: torch.Tensor, *rest: Any) -> None:
        scored.append(memory)
        rest[-1][:] = 0

    monkeypatch.setattr(gpu_records, "score_pairs", score_pairs)
    monkeypatch.setattr(RecordLayout, "check", lambda *_: None)
    with kept_on(store, elsewhere) as kept:
        scores = TierScoring(
            kept.full, [vectors(query) for query in queries(3)], gap_bytes=0, deadline_s=5
        )
        scores.ask([np.arange(20), np.arange(0), np.arange(0)])
        scores.ask([np.arange(20), np.arange(10), np.arange(0)])
        scores.ask([np.arange(20), np.arange(10), np.arange(20)])
        assert [len(numbers) for numbers, _ in scores.finish()] == [20, 10, 20]
    assert len(scored) == 3
    assert {memory.device for memory in scored} == {elsewhere}
    assert len({id(memory) for memory in scored}) == 1


class OnGpu(torch.Tensor):
    """Memory that Python's side may not look into."""

    is_cuda = True
    crossed: list[int] = []  # noqa: RUF012

    def numpy(self, **options: Any) -> Any:
        raise TypeError("can't convert cuda device type tensor to numpy")

    def cpu(self, *args: Any, **options: Any) -> torch.Tensor:
        OnGpu.crossed.append(self.nbytes)
        return self.as_subclass(torch.Tensor)


@pytest.fixture
def ring(store: Path) -> Any:
    index = espnx.open(store)
    yield HotRecords(index.store.full, 6000), index.store.full
    index.close()


def read(full: Any, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
    future = full.read(numbers, gap_bytes=0)
    return future.wait(), future.position_bytes


def test_records_read_by_a_gpu_are_kept_too(ring: Any) -> None:
    hot, full = ring
    numbers, query = np.arange(5, 25, 2), vectors(queries(1)[0])
    memory, positions = read(full, numbers)
    OnGpu.crossed.clear()
    hot.admit(numbers, memory.as_subclass(OnGpu), positions)
    assert OnGpu.crossed == [], "seen once, and copied"
    hot.admit(numbers[:6], memory.as_subclass(OnGpu), positions[:6])
    assert OnGpu.crossed == [int(full.schema.sizes(full.n_tokens[numbers[:6]]).sum())]
    found, scores = hot.score(numbers, query)
    assert found.tolist() == [True] * 6 + [False] * 4
    assert np.array_equal(
        scores(), record_score.score(full, memory, positions[:6], numbers[:6], query)
    )


def test_only_records_that_are_wanted_cross(
    ring: Any, monkeypatch: pytest.MonkeyPatch, pretended_pinned: list[torch.device]
) -> None:
    hot, full = ring
    numbers = np.arange(20)
    memory, positions = read(full, numbers)
    for _ in range(2):
        hot.admit(numbers, memory, positions)
    wanted = np.array([1, 7, 19, 40])
    crossed: list[torch.Tensor] = []

    def score(
        tier: Any, given: torch.Tensor, at: torch.Tensor, which: np.ndarray, query: Any
    ) -> np.ndarray:
        crossed.append(given)
        assert which.tolist() == [1, 7, 19]
        assert at.tolist() == [0, *np.cumsum(full.schema.sizes(full.n_tokens[which]))[:-1].tolist()]
        return np.zeros(len(which), "f4")

    monkeypatch.setattr(hot_module, "score", score)
    elsewhere = SimpleNamespace(tokens=torch.empty(2, DIM, device="meta"))
    assert hot.score(wanted, elsewhere)[0].tolist() == [True, True, True, False]
    assert (crossed[0].device.type, crossed[0].nbytes) == (
        "meta",
        int(full.schema.sizes(full.n_tokens[wanted[:3]]).sum()),
    )
    assert crossed[0].nbytes < hot.budget_bytes
    gathered, at = hot._gathered(
        wanted[:3], hot._place[wanted[:3]] % hot.budget_bytes, torch.device("cpu")
    )
    full.check(gathered, at, wanted[:3])
