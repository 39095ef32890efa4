"""Records that are scored on a GPU that is late on purpose (tests/device/gpu/late.py): which stream
the work is on, and how often the host waits for it."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx.device.gpu import records as gpu_records
from espnx.device.gpu.records import TensorRecordDevice
from espnx.device.interface import RecordQuery
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine
from tests.device.gpu.late import LateDevice, late_device
from tests.retrieval.common import exact_scores, queries
from tests.storage.common import until

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS = np.array([299, 3, 4, 70, 120])


@contextmanager
def kept_on(
    late: LateDevice, store: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[EmbeddingStore]:
    monkeypatch.setattr(
        gpu_records,
        "ThreadPoolExecutor",
        partial(ThreadPoolExecutor, initializer=late.enter_thread),
    )
    with NativeEngine("posix") as native:
        device = TensorRecordDevice(native, late.device, workers=1)
        with EmbeddingStore(store, native, device) as opened:
            yield opened
        device.close()


def scored(
    late: LateDevice, kept: EmbeddingStore, query: espnx.Encoded, *, is_urgent: bool
) -> np.ndarray:
    """Scores of a query whose vectors are still computed, on another stream than the default one,
    when it is asked."""
    with late.on(late.new(late.device)):
        cls, tokens = (x.to(late.device) * 1.0 for x in (query.cls.reshape(1, -1), query.tokens))
        late.waits.clear()
        ticket = kept.full.maxsim(NUMBERS, [RecordQuery(cls, tokens, 2.0)], is_urgent=is_urgent)
        assert is_urgent or until(lambda: ticket.is_finished)  # by a worker, not by this thread
        return ticket.finish()


def are_right(
    kept: EmbeddingStore, documents: list[espnx.Document], query: espnx.Encoded, scores: np.ndarray
) -> bool:
    wanted, bounds = exact_scores(documents, query, 2.0, "fp16")
    names = [identifier for identifier, _ in kept.texts.get(NUMBERS.tolist())]
    return all(
        abs(score - wanted[name]) <= bounds[name]
        for name, score in zip(names, scores.tolist(), strict=True)
    )


def test_scores_in_any_order(
    store: Path, documents: list[espnx.Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    query = queries(1)[0]
    for seed in range(6):
        with (
            late_device(seed, (0.0, 0.2)[seed % 2]) as late,
            kept_on(late, store, monkeypatch) as kept,
        ):
            found = scored(late, kept, query, is_urgent=seed % 3 == 0)
            assert are_right(kept, documents, query, found)


def test_workers_need_the_callers_stream(
    store: Path, documents: list[espnx.Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without it a worker scores with queries that are not there yet."""
    monkeypatch.setattr(gpu_records, "on", lambda _: nullcontext())
    query = queries(1)[0]
    for seed in range(10):
        with late_device(seed, 0.0) as late, kept_on(late, store, monkeypatch) as kept:
            cls_and_tokens = scored(late, kept, query, is_urgent=False)
            if not are_right(kept, documents, query, cls_and_tokens):
                return
    pytest.fail("nobody noticed")


def test_how_often_the_host_waits(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three times for a query's records, however many: for their headers, their checksums and the
    scores."""
    with late_device(1, 1.0) as late, kept_on(late, store, monkeypatch) as kept:
        scored(late, kept, queries(1)[0], is_urgent=True)
        assert late.waits == {"copy": 3}
