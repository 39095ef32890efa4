"""Records that are scored on a GPU that is late on purpose (tests/device/gpu/late.py): which stream
the work is on, and how often the host waits for it."""

from __future__ import annotations

import errno
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device import record_layout
from espnx.device.gpu import records as gpu_records
from espnx.device.gpu.findings import Findings
from espnx.device.gpu.records import TensorRecordDevice
from espnx.device.gpu.staging import Tables
from espnx.device.interface import RecordQuery
from espnx.device.record_layout import RecordSchema
from espnx.retrieval.search.opened.hot_records import HotRecords
from espnx.retrieval.search.opened.scoring import QueryVectors, TierScoring
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine
from espnx.storage.gds.engine import GdsEngine
from tests.device.gpu.late import LateDevice, LateMemory, late_device
from tests.retrieval.common import exact_scores, queries
from tests.storage.common import until
from tests.storage.gds.cufile_stub import CuFileStub, Rule

pytestmark = pytest.mark.usefixtures("one_thread")
NUMBERS = np.array([299, 3, 4, 70, 120])


@contextmanager
def kept_on(
    late: LateDevice,
    store: Path,
    monkeypatch: pytest.MonkeyPatch,
    way: str = "pinned",
    rules: Sequence[Rule] = (),
) -> Iterator[EmbeddingStore]:
    monkeypatch.setattr(
        gpu_records,
        "ThreadPoolExecutor",
        partial(ThreadPoolExecutor, initializer=late.enter_thread),
    )
    with ExitStack() as stack:
        native = stack.enter_context(NativeEngine("posix"))
        engine = native if way == "pinned" else stack.enter_context(gds(late, rules))
        device = TensorRecordDevice(engine, late.device, workers=1)
        stack.callback(device.close)
        yield stack.enter_context(EmbeddingStore(store, native, device))


def gds(late: LateDevice, rules: Sequence[Rule]) -> GdsEngine:
    """Records arrive in the device's memory, some at a time."""
    stub = CuFileStub(rules=rules)
    return GdsEngine("gds-compat", bindings=stub, memory=LateMemory(late), arena_bytes=256 << 10)


def on_device(late: LateDevice, query: espnx.Encoded) -> list[torch.Tensor]:
    """Its vectors, which are still computed."""
    return [x.to(late.device) * 1.0 for x in (query.cls.reshape(1, -1), query.tokens)]


def scored(
    late: LateDevice, kept: EmbeddingStore, query: espnx.Encoded, *, is_urgent: bool
) -> np.ndarray:
    """Scores of a query whose vectors are still computed, on another stream than the default one,
    when it is asked."""
    with late.on(late.new(late.device)):
        cls, tokens = on_device(late, query)
        late.waits.clear()
        late.pageable_copies = 0
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


@pytest.mark.parametrize("way", ["pinned", "gds"])
def test_scores_in_any_order(
    store: Path, documents: list[espnx.Document], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    query = queries(1)[0]
    for seed in range(6):
        with (
            late_device(seed, (0.0, 0.2)[seed % 2]) as late,
            kept_on(late, store, monkeypatch, way) as kept,
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


def several(late: LateDevice, kept: EmbeddingStore, n: int, hot: HotRecords | None) -> TierScoring:
    """A search of so many queries, which wants some records early and the others at the end."""
    there = [on_device(late, query) for query in queries(n)]
    vectors = [QueryVectors(cls, tokens, 2.0, prepared=None) for cls, tokens in there]
    late.waits.clear()
    late.pageable_copies = 0
    scoring = TierScoring(kept.full, vectors, gap_bytes=0, deadline_s=5, hot=hot)
    early = [np.arange(10 * i, 40 + 10 * i) for i in range(n)]
    for step in (20, 30):
        scoring.ask([numbers[:step] for numbers in early])
        assert until(lambda: all(each.ticket.is_finished for each in scoring._requests))
    # the last query wants what the others wanted before, too
    scoring.ask([*early[:-1], np.arange(120)], is_urgent=True)
    return scoring


def all_are_right(
    kept: EmbeddingStore,
    documents: list[espnx.Document],
    found: list[tuple[np.ndarray, np.ndarray]],
) -> bool:
    for query, (numbers, scores) in zip(queries(len(found)), found, strict=True):
        wanted, bounds = exact_scores(documents, query, 2.0, "fp16")
        names = [identifier for identifier, _ in kept.texts.get(numbers.tolist())]
        if not all(
            abs(score - wanted[name]) <= bounds[name]
            for name, score in zip(names, scores.tolist(), strict=True)
        ):
            return False
    return True


@pytest.mark.parametrize("way", ["pinned", "gds"])
@pytest.mark.parametrize("n_queries", [1, 3])
def test_one_wait_a_query(
    store: Path,
    documents: list[espnx.Document],
    monkeypatch: pytest.MonkeyPatch,
    way: str,
    n_queries: int,
) -> None:
    """At its end, however many steps records were asked for in, however they arrive: for their
    headers, their checksums and their scores, together. Tables are copied from pinned memory."""
    with late_device(1, 0.3) as late, kept_on(late, store, monkeypatch, way) as kept:
        scoring = several(late, kept, n_queries, None)
        assert not late.waits
        found = scoring.finish()
        assert set(late.waits) == {"event"}
        assert late.waits["event"] == 1
        assert late.pageable_copies == 0
        assert all_are_right(kept, documents, found)


@pytest.mark.parametrize("way", ["pinned", "gds"])
def test_the_wait_is_needed(
    store: Path, documents: list[espnx.Document], monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """Without it what lies in memory is taken for checksums."""
    monkeypatch.setattr(Findings, "wait", lambda _: None)
    with (
        late_device(2, 0.0) as late,
        kept_on(late, store, monkeypatch, way) as kept,
        pytest.raises((errors.ChecksumError, errors.StaleDataError)),
    ):
        several(late, kept, 1, None).finish()


def damage(kept: EmbeddingStore, record: int) -> tuple[np.ndarray, np.ndarray]:
    """Changes a byte of a record. Its place and size."""
    segment, offsets, sizes = kept.full.locate(np.array([record]))
    with open(kept.full.files[int(segment[0])].path, "r+b") as file:
        file.seek(int(offsets[0] + sizes[0] // 2))
        byte = file.read(1)[0]
        file.seek(-1, 1)
        file.write(bytes([byte ^ 16]))
    return offsets, sizes


def test_damage_is_seen_before_scores_count(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By `next` too, which hands out what has arrived; and nothing of the search is left over."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    with late_device(3, 0.0) as late, kept_on(late, copy, monkeypatch, "gds") as kept:
        offsets, sizes = damage(kept, 15)
        with pytest.raises(errors.ChecksumError, match="record 15 is not") as caught:
            several(late, kept, 1, None).finish()
        assert (caught.value.offset_bytes, caught.value.size_bytes) == (offsets[0], sizes[0])
        cls, tokens = on_device(late, queries(1)[0])
        ticket = kept.full.maxsim(np.arange(100), [RecordQuery(cls, tokens, 2.0)])
        with pytest.raises(errors.ChecksumError, match="record 15 is not"):
            while not ticket.next()[1]:
                pass
        assert all(np.isnan(ticket.scores[15:16]))


@pytest.mark.parametrize("is_damaged", [True, False])
def test_damage_comes_before_a_later_read_that_fails(
    store: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_damaged: bool
) -> None:
    """What arrived first is judged first, also when nobody has waited for it yet."""
    copy = tmp_path / "store"
    shutil.copytree(store, copy)
    far = 1 << 62
    rule = Rule("never", errno.EIO, match=lambda offset, size: offset + size > far)
    with late_device(3, 0.0) as late, kept_on(late, copy, monkeypatch, "gds", [rule]) as kept:
        if is_damaged:
            damage(kept, 15)
        far = int(kept.full.locate(np.array([260]))[1][0])
        numbers = np.r_[np.arange(40), np.arange(260, 300)]
        cls, tokens = on_device(late, queries(1)[0])
        ticket = kept.full.maxsim(numbers, [RecordQuery(cls, tokens, 2.0)], is_urgent=False)
        assert until(lambda: ticket._asked)
        rule.fault = "error"
        assert until(lambda: ticket.is_finished)
        kind = errors.ChecksumError if is_damaged else errors.ReadError
        with pytest.raises(kind, match="record 15 is not" if is_damaged else "read failed"):
            ticket.finish()
        with pytest.raises(kind):
            ticket.next()


def test_hot_records_on_a_gpu(
    store: Path, documents: list[espnx.Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that lie in host memory are scored without a wait of their own, and those that come to
    lie there are copied beside what is done next."""
    with late_device(4, 0.3) as late, kept_on(late, store, monkeypatch) as kept:
        hot = HotRecords(kept.full, 1 << 20)
        for n_hot in (0, 0, 120):
            scoring = several(late, kept, 1, hot)
            found = scoring.finish()
            assert scoring.n_hot == n_hot
            assert all_are_right(kept, documents, found)
            assert late.waits["event"] <= 1
            assert sum(late.waits.values()) <= 1
            assert late.pageable_copies == 0
            late.main.synchronize()


def test_hot_records_wait_for_their_copy(
    store: Path, documents: list[espnx.Document], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Into the ring; without that what lies in memory is taken for records."""
    with late_device(5, 0.0) as late, kept_on(late, store, monkeypatch) as kept:
        hot = HotRecords(kept.full, 1 << 20)
        for _ in range(2):
            several(late, kept, 1, hot).finish()
        # The copy has not run.
        assert hot._coming
        assert not any(each.copied.query() for each in hot._coming)
        assert not hot._is_here(hot._place).any()
        late.main.synchronize()
        scoring = several(late, kept, 1, hot)
        assert all_are_right(kept, documents, scoring.finish())
        assert scoring.n_hot == 120


def test_unknown_centroids_are_found_without_a_wait() -> None:
    """The first of them, in any order in memory."""
    schema, counts = RecordSchema("residual2", 0, 16), np.array([3, 0, 70, 1, 9], np.uint16)
    sizes = schema.sizes(counts)
    positions = torch.from_numpy(np.cumsum(sizes[::-1])[::-1] - sizes + 16)
    memory = torch.zeros(int(sizes.sum()) + 16, dtype=torch.uint8)
    for record, row, code in ((None, 0, 0), (4, 8, 13), (2, 69, -1), (2, 3, 2**31 - 1), (0, 0, 14)):
        if record is not None:
            at = int(positions[record]) + schema.fixed_bytes + row * schema.row_bytes
            memory[at : at + 4] = torch.tensor([code], dtype=torch.int32).view(torch.uint8)
        with late_device(6, 0.2) as late:
            there = memory.to(late.device)
            late.waits.clear()
            late.pageable_copies = 0
            put = Tables(late.device).put
            named = record_layout._first_unknown(there, schema, positions, counts, 13, put)
            assert not late.waits
            assert late.pageable_copies == 0
            found = record_layout._record_of(named.cpu(), np.arange(5), counts)
        assert found == (None if record is None else (record, code))
