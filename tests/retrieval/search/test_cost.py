"""The cost model of reads: what follows from its numbers, and that measuring gives some."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

import espnx
from espnx.retrieval.search import read_cost as cost
from espnx.retrieval.search.read_cost import DeviceCost
from tests.retrieval.common import build, corpus, queries


def test_gap_is_what_another_request_costs() -> None:
    assert DeviceCost(0, 10e-6, 1.7e9).gap_bytes == 16384
    assert DeviceCost(0, 0, 1e9).gap_bytes == 0
    assert DeviceCost(0, 1, 1e9).gap_bytes == 65536


def test_time_of_a_read() -> None:
    model = DeviceCost(1e-4, 1e-5, 1e9)
    assert model.read_s(100, 10**6) == pytest.approx(1e-4 + 1e-3 + 1e-3)
    assert model.read_s(0, 0) == 0


class Device:
    """A tier on a device that keeps the model to the letter, by a clock of its own."""

    size_bytes = 1 << 30

    def __init__(self, truth: DeviceCost, monkeypatch: pytest.MonkeyPatch):
        self.truth, self.now = truth, 0.0
        monkeypatch.setattr(cost.time, "perf_counter", lambda: self.now)

    def read(self, numbers: np.ndarray, *, gap_bytes: int) -> SimpleNamespace:
        requests = 9 if gap_bytes else len(numbers)
        moved = len(numbers) * (5400 if gap_bytes else 8192)

        def wait() -> torch.Tensor:
            self.now += self.truth.read_s(requests, moved)
            return torch.empty(0)

        return SimpleNamespace(request_count=requests, bytes_moved=moved, wait=wait)


@pytest.mark.parametrize(
    "truth",
    [DeviceCost(1e-4, 9e-6, 1.5e9), DeviceCost(2e-5, 1e-6, 7e9), DeviceCost(1e-3, 1e-4, 2e8)],
)
def test_measuring_finds_the_truth(truth: DeviceCost, monkeypatch: pytest.MonkeyPatch) -> None:
    found = cost.measure(Device(truth, monkeypatch), 200_000)
    assert found.bytes_per_s == pytest.approx(truth.bytes_per_s, rel=0.15)
    assert found.request_s == pytest.approx(truth.request_s, rel=0.3)


def test_measured_on_a_real_store(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with espnx.open(store) as index:
        assert index.cost == DeviceCost()  # too small to measure
        monkeypatch.setattr(cost, "_LEAST_BYTES", 0)
        monkeypatch.setattr(cost, "_RECORDS", 100)
        found = cost.measure(index.store.full, index.store.count)
        assert found != DeviceCost(), "nothing was measured"
        assert (
            0
            < found.latency_s
            < found.read_s(1, 4096)
            < found.read_s(100, 4096)
            < found.read_s(100, 1 << 30)
        )
        given = DeviceCost(1, 2, 3)
        with espnx.open(store, cost=given) as other:
            assert other.cost is given
            assert other.search(queries(1)[0], k=3).hits == index.search(queries(1)[0], k=3).hits


def test_numbers_that_are_nobodys_are_not_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Between the parts of a store are numbers without a record: measuring is of the base."""
    monkeypatch.setattr(cost, "_LEAST_BYTES", 0)
    monkeypatch.setattr(cost, "_RECORDS", 20)
    documents = corpus(110, d_cls=512)
    build(folder / "s", documents[:100], dims=(512, 8))
    for document in documents[100:]:
        espnx.add(folder / "s", [document])
    espnx.open(folder / "s").close()
