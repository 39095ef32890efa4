"""Every device for records gives the reference's scores, finds damage, and ends what nobody wants:
over every engine, and without one."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.gpu.records import TensorRecordDevice
from espnx.device.interface import Pairs, RecordDevice, RecordQuery
from espnx.device.records.ssd import SsdRecordDevice
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import FaultRule, FaultyEngine, NativeEngine
from tests.device.null_records import NullRecordDevice
from tests.retrieval.common import build, corpus, exact_scores, queries

CPU = torch.device("cpu")
Open = Callable[[Path], EmbeddingStore]
DEVICES: dict[str, Callable[[ExitStack], RecordDevice]] = {
    "uring or what there is": lambda opened: SsdRecordDevice(opened.enter_context(NativeEngine())),
    "posix": lambda opened: SsdRecordDevice(opened.enter_context(NativeEngine("posix"))),
    "memory": lambda opened: SsdRecordDevice(opened.enter_context(NativeEngine("memory"))),
    "no window, one worker": lambda opened: SsdRecordDevice(
        opened.enter_context(NativeEngine()), window_bytes=1, workers=1
    ),
    "no workers": lambda opened: SsdRecordDevice(opened.enter_context(NativeEngine()), workers=0),
    "late": lambda opened: SsdRecordDevice(
        opened.enter_context(
            FaultyEngine([FaultRule("delay", path="*segment*", value=2_000_000, probability=0.5)])
        )
    ),
    "tensor ops": lambda opened: TensorRecordDevice(opened.enter_context(NativeEngine()), CPU),
    "near storage": lambda opened: NullRecordDevice(),
}


@pytest.fixture(params=list(DEVICES))
def device(request: pytest.FixtureRequest) -> Iterator[RecordDevice]:
    with ExitStack() as opened:
        made = DEVICES[request.param](opened)
        opened.callback(made.close)
        yield made


@pytest.fixture
def kept(store: Path, device: RecordDevice) -> Iterator[EmbeddingStore]:
    with NativeEngine() as native, EmbeddingStore(store, native, device) as opened:
        yield opened


def record_query(query: espnx.Encoded, cls_weight: float = 2.0) -> RecordQuery:
    return RecordQuery(query.cls.reshape(1, -1), query.tokens, cls_weight)


def assert_scored(
    kept: EmbeddingStore,
    documents: list[espnx.Document],
    numbers: np.ndarray,
    query: espnx.Encoded,
    scores: Any,
) -> None:
    wanted, bounds = exact_scores(documents, query, 2.0, "fp16")
    assert len(numbers) == len(scores)
    for (identifier, _), score in zip(
        kept.texts.get(numbers.tolist()), scores.tolist(), strict=True
    ):
        assert abs(score - wanted[identifier]) <= bounds[identifier]


@pytest.mark.parametrize("is_urgent", [True, False])
def test_scores_are_the_references(
    kept: EmbeddingStore, documents: list[espnx.Document], is_urgent: bool
) -> None:
    query = queries(1)[0]
    for numbers in (np.arange(300), np.array([299, 3, 4, 70]), np.arange(0)):
        ticket = kept.full.maxsim(numbers, [record_query(query)], is_urgent=is_urgent)
        assert_scored(kept, documents, numbers, query, ticket.finish())
        assert ticket.stats.bytes_asked == int(
            kept.full.schema.sizes(kept.full.n_tokens[numbers]).sum()
        )
        assert not len(numbers) or ticket.finished_at <= time.perf_counter()


@pytest.mark.parametrize("is_urgent", [True, False])
def test_scores_as_they_arrive(
    kept: EmbeddingStore, documents: list[espnx.Document], is_urgent: bool
) -> None:
    query, numbers = queries(1)[0], np.arange(0, 300, 2)
    ticket = kept.full.maxsim(numbers, [record_query(query)], is_urgent=is_urgent)
    seen, finished = list[int](), False
    while not finished:
        items, finished = ticket.next(20)
        assert finished or len(items) >= 20
        assert_scored(kept, documents, numbers[items], query, ticket.scores[items])
        seen += items.tolist()
    assert sorted(seen) == list(range(150))
    items, finished = ticket.next()
    assert (len(items), finished) == (0, True)


def test_several_queries_share_what_is_read(
    kept: EmbeddingStore, documents: list[espnx.Document]
) -> None:
    three, numbers = queries(3), np.arange(40)
    first = Pairs(np.array([0, 0, 1, 5, 39]), np.array([0, 2, 1, 1, 0]))
    later = Pairs(np.array([0, 5, 5, 38]), np.array([1, 0, 2, 2]))
    requests = [
        kept.full.maxsim(numbers, [record_query(q) for q in three], first, is_urgent=urgent)
        for urgent in (False, True, False)
    ]
    for ticket in reversed(requests):
        ticket.add(later)
        scores = ticket.finish()
        assert len(scores) == 9
        for at, pairs in ((0, first), (5, later)):
            for i in range(len(pairs)):
                one = numbers[pairs.item[i : i + 1]]
                assert_scored(
                    kept, documents, one, three[pairs.query[i]], scores[at + i : at + i + 1]
                )


def test_a_whole_search_is_the_same(store: Path, device: RecordDevice) -> None:
    """First stage, prefetch, exact scores, filters, batches: with this device, and with the plain
    SSD."""
    with espnx.open(store) as plain, espnx.open(store, device=device) as index:
        assert index.device is device
        for options in (
            {},
            {"rerank": 20},
            {"prefetch_step": (0.1, 0.5)},
            {"exclude": ["doc-3", "doc-8"]},
            {"explain": True},
        ):
            wanted, found = (
                each.search(queries(5), k=30, candidates=80, **options) for each in (plain, index)
            )
            assert [result.hits for result in found] == [result.hits for result in wanted]
            assert (
                plain.search(queries(1)[0], **options).hits
                == index.search(queries(1)[0], **options).hits
            )
        assert index.store.verify() == 300


def test_a_cascade_is_the_same(tmp_path: Path, device: RecordDevice) -> None:
    build(tmp_path / "s", corpus(200), coarse="int8")
    for coarse in ("ssd", "ram"):
        with (
            espnx.open(tmp_path / "s", coarse=coarse) as plain,
            espnx.open(tmp_path / "s", device=device, coarse=coarse) as index,
        ):
            found, wanted = (
                each.search(queries(4), k=150, candidates=150, cascade=20)
                for each in (index, plain)
            )
            assert [result.hits for result in found] == [result.hits for result in wanted]


def test_the_path_of_a_result_is_the_devices(store: Path) -> None:
    with espnx.open(store, device=NullRecordDevice()) as index:
        assert index.search(queries(1)[0]).effective_path == "near-storage"
    with pytest.raises(errors.InvalidInputError, match=r"hot.*keeps its records to itself"):
        espnx.open(store, device=NullRecordDevice(), hot="1MiB")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_urgent", [True, False])
def test_damage_is_found_and_named(tmp_path: Path, device: RecordDevice, is_urgent: bool) -> None:
    build(tmp_path / "s", corpus(60))
    with NativeEngine() as native:
        with EmbeddingStore(tmp_path / "s", native) as opened:
            path = tmp_path / "s" / opened.segments[0].path
            _, offset, _ = opened.full.locate(np.array([37]))
        data = bytearray(path.read_bytes())
        data[int(offset[0]) + 20] ^= 4
        path.write_bytes(data)
        with EmbeddingStore(tmp_path / "s", native, device) as opened:
            ticket = opened.full.maxsim(
                np.arange(60), [record_query(queries(1)[0])], is_urgent=is_urgent
            )
            with pytest.raises(
                errors.ChecksumError, match=rf"record 37 is not what was written.*{path.name}"
            ):
                ticket.finish()
            again = opened.full.maxsim(
                np.arange(37), [record_query(queries(1)[0])], is_urgent=is_urgent
            )
            assert len(again.finish()) == 37


@pytest.fixture(params=["ssd", "tensor ops"])
def stuck(
    request: pytest.FixtureRequest, store: Path
) -> Iterator[tuple[EmbeddingStore, RecordDevice]]:
    """The first read of records never ends."""
    rule = FaultRule("never", operation="read", path="*segment*", begin_bytes=4096, nth=1, count=1)
    engine = FaultyEngine([rule])
    device: RecordDevice = (
        SsdRecordDevice(engine, workers=2)
        if request.param == "ssd"
        else TensorRecordDevice(engine, CPU, workers=2)
    )
    with NativeEngine() as native:
        with EmbeddingStore(store, native, device) as opened:
            yield opened, device
        device.close()
        engine.close(grace_s=0.001)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("is_urgent", [True, False])
@pytest.mark.parametrize("everything", [True, False])
def test_cancelled_from_another_thread(
    stuck: tuple[EmbeddingStore, RecordDevice], is_urgent: bool, everything: bool
) -> None:
    kept, device = stuck
    ticket = kept.full.maxsim(
        np.arange(0, 300, 9), [record_query(queries(1)[0])], is_urgent=is_urgent
    )
    killer = threading.Timer(0.2, device.forget if everything else ticket.cancel)
    killer.start()
    with pytest.raises(errors.TransferCancelledError):
        ticket.finish()
    killer.join()
    sound = kept.full.maxsim(np.arange(30), [record_query(queries(1)[0])], is_urgent=is_urgent)
    assert len(sound.finish()) == 30


@pytest.mark.parametrize("is_urgent", [True, False])
def test_the_deadline(stuck: tuple[EmbeddingStore, RecordDevice], is_urgent: bool) -> None:
    ticket = stuck[0].full.maxsim(
        np.arange(0, 300, 9), [record_query(queries(1)[0])], is_urgent=is_urgent, deadline_s=0.1
    )
    with pytest.raises(errors.DeadlineExceededError):
        ticket.finish()


def test_next_gives_up_when_it_was_told_to(stuck: tuple[EmbeddingStore, RecordDevice]) -> None:
    kept, device = stuck
    if not isinstance(device, SsdRecordDevice):
        pytest.skip("a tensor device looks at the clock between reads")
    ticket = kept.full.maxsim(np.arange(0, 300, 9), [record_query(queries(1)[0])])
    items, finished = ticket.next(2**62, timeout_s=0.01)
    assert (len(items), finished) == (0, False)
    ticket.cancel()


def test_the_window_holds_reads_back(store: Path) -> None:
    """What nobody waits for begins as room comes free, in any order of asking; who waits need not
    wait for the others."""
    with NativeEngine() as native:
        device = SsdRecordDevice(native, window_bytes=1, workers=1)
        with EmbeddingStore(store, native, device) as kept:
            query = record_query(queries(1)[0])
            before = native.stats().bytes_asked
            tickets = [
                kept.full.maxsim(np.arange(i, 300, 7), [query], is_urgent=False) for i in range(7)
            ]
            wanted = [kept.full.maxsim(np.arange(i, 300, 7), [query]).finish() for i in range(7)]
            for i in (6, 2, 0, 1, 5, 3):
                assert np.array_equal(tickets[i].finish(), wanted[i])
            device.forget()
            assert native.stats().bytes_asked > before
            stats = device.stats()
            assert stats.bytes_asked > 0
            assert stats.computing_s > 0


def test_a_ticket_in_line_is_forgotten_too(stuck: tuple[EmbeddingStore, RecordDevice]) -> None:
    kept, device = stuck
    if not isinstance(device, SsdRecordDevice):
        pytest.skip("no window")
    narrow = SsdRecordDevice(device.engine, window_bytes=1)  # type: ignore[arg-type]
    tier = narrow.keep_records(kept.full)
    query = record_query(queries(1)[0])
    first, second = (tier.maxsim(np.arange(0, 300, 9), [query], is_urgent=False) for _ in range(2))
    narrow.forget()
    for ticket in (first, second):
        with pytest.raises(errors.TransferCancelledError):
            ticket.finish()


def test_a_failed_read_fails_its_ticket_alone(store: Path) -> None:
    rule = FaultRule("error", operation="read", path="*segment*", begin_bytes=4096, nth=2, count=1)
    with FaultyEngine([rule]) as engine, NativeEngine() as native:
        device = SsdRecordDevice(engine)
        with EmbeddingStore(store, native, device) as kept:
            query = record_query(queries(1)[0])
            tickets = [
                kept.full.maxsim(np.arange(i, 300, 30), [query], is_urgent=False) for i in range(3)
            ]
            outcomes, told = list[int](), list[str]()
            for ticket in tickets:
                try:
                    outcomes.append(len(ticket.finish()))
                except errors.ReadError as error:
                    outcomes.append(-1)
                    told.append(str(error))
            assert sorted(outcomes) == [-1, 10, 10]
            assert "segment-00000" in told[0]


def test_paths_are_those_of_what_is_kept(store: Path, device: RecordDevice, tmp_path: Path) -> None:
    """Of two stores, of one of them, of what it was merged into, of none."""
    build(tmp_path / "s", corpus(20))

    def found() -> set[str]:
        return {file.path for file in device.path_report()}

    with NativeEngine() as native:
        with EmbeddingStore(tmp_path / "s", native, device) as mine:
            with EmbeddingStore(store, native, device) as other:
                assert found() == {file.path for file in (*mine.full.files, *other.full.files)}
            assert found() == {file.path for file in mine.full.files}
            espnx.delete(tmp_path / "s", ["doc-3"])
            espnx.compact(tmp_path / "s")
        with EmbeddingStore(tmp_path / "s", native, device) as merged:
            assert found() == {file.path for file in merged.full.files}
            assert not found() & {file.path for file in mine.full.files}
        assert not found()


def test_what_is_refused(store: Path) -> None:
    with NativeEngine() as native, EmbeddingStore(store, native) as kept:
        query = record_query(queries(1)[0])
        for numbers, asked, pairs, what in (
            ([300], [query], None, "record 300 is not in the store"),
            ([-1], [query], None, "record -1"),
            ([1, 2], [query, query], None, "several queries need pairs"),
            ([1, 2], [query], Pairs(np.array([1, 0]), np.array([0, 0])), "ordered by item"),
            ([1, 2], [query], Pairs(np.array([2]), np.array([0])), "that are there"),
            ([1, 2], [query], Pairs(np.array([0]), np.array([1])), "that are there"),
        ):
            with pytest.raises(errors.InvalidInputError, match=what):
                kept.full.maxsim(np.array(numbers), asked, pairs)
