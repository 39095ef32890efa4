"""The verb `scan`: its command byte for byte, best records and partial scores beside plain NumPy,
tickets that are cancelled, refusals."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.device.postings import (
    LIST,
    PARTIAL,
    SCAN,
    SCAN_REPLY,
    WEIGHT,
    Rule,
    ScanCommand,
    ScanLists,
    SsdPostingsDevice,
    Weights,
)
from espnx.postings import BM25, VARIANTS, build_split
from espnx.postings.split.parts import PartLists, read_parts
from espnx.storage import FaultRule, NativeEngine
from tests.postings.common import corpus, numbers_of, plain_absent, plain_bm25

DOCUMENTS = corpus(300, seed=2)
AVERAGE = sum(map(len, DOCUMENTS)) / len(DOCUMENTS)


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("scan") / "all"
    build_split([path], terms=DOCUMENTS)
    return path


def lists_in(directory: Path) -> PartLists:
    return read_parts([directory])[0][0]


def reads_of_opening(directory: Path) -> int:
    rule = FaultRule("delay", operation="read", value=0)
    with (
        NativeEngine("posix", rules=[rule]) as engine,
        SsdPostingsDevice(lists_in(directory), engine=engine),
    ):
        return engine.stats().fault_hits


def asked(lists: PartLists, terms: list[str], bm25: BM25) -> tuple[ScanLists, Weights]:
    """What a host asks of a device that has all records: addresses from its dictionary, weights as
    the search of one index has them."""
    names = [term.encode() for term in terms]
    held = lists.segment.dictionary
    numbers = numbers_of(lists.segment, terms)
    places, weights = np.zeros(len(terms), LIST), np.zeros(len(terms), WEIGHT)
    offset, size = held.place(numbers)
    places["offset"], places["size"], places["term"] = offset // 64, size // 64, numbers
    places["postings"], places["name"] = held.df[numbers], [len(name) for name in names]
    idf = [bm25.idf(int(df), len(DOCUMENTS)) for df in held.df[numbers]]
    weights["weight"], weights["absent"] = (
        np.array(idf, np.float32),
        [plain_absent(bm25, each) for each in idf],
    )
    rule = Rule(bm25.number, bm25.k1, bm25.b, bm25.delta, AVERAGE)
    constant = float(np.array([plain_absent(bm25, each) for each in idf], np.float32).sum())
    return ScanLists(places, b"".join(names)), Weights(weights, constant, rule)


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_best_and_partial_scores_are_plain_bm25(directory: Path, variant: str) -> None:
    terms, bm25 = ["w0", "w7", "w1", "w40"], BM25(variant, 1.2, 0.6)
    with SsdPostingsDevice(lists := lists_in(directory)) as device:
        where, weights = asked(lists, terms, bm25)
        numbers, scores = plain_bm25(DOCUMENTS, terms, bm25)
        best = device.scan(where, weights, 20).finish()
        assert best.dtype == SCAN_REPLY
        assert best["number"].tolist() == numbers[:20].tolist()
        assert best["score"].tobytes() == scores[:20].tobytes()
        every = device.scan(where, weights, 5000).finish()
        assert every["score"].tobytes() == scores.tobytes()
        allowed = np.arange(len(DOCUMENTS)) % 3 == 1
        some = device.scan(
            where, weights, 20, allowed=np.packbits(allowed, bitorder="little")
        ).finish()
        assert some["number"].tolist() == numbers[allowed[numbers]][:20].tolist()
        partial = device.scan(where, weights, 0).finish()
    assert partial.dtype == PARTIAL
    sums, at = np.zeros(len(DOCUMENTS), np.float32), 0
    for term, count in zip(terms, where.places["postings"].tolist(), strict=True):
        part = partial[at : at + count]
        assert part["number"].tolist() == [
            i for i, document in enumerate(DOCUMENTS) if term in document
        ]
        sums[part["number"]] += part["score"]
        at += count
    assert at == len(partial)
    assert (sums + np.float32(weights.constant))[numbers].tobytes() == scores.tobytes()


def test_nothing_asked_is_nothing_found(directory: Path) -> None:
    with SsdPostingsDevice(lists_in(directory)) as device:
        empty = ScanLists(np.zeros(0, LIST), b"")
        for k in (0, 5):
            ticket = device.scan(empty, Weights(np.zeros(0, WEIGHT)), k)
            assert (len(ticket.finish()), ticket.command.data_len, ticket.command.flash_bytes) == (
                0,
                0,
                0,
            )
        assert device.stats().bytes_moved == 0


def test_the_command_says_what_it_asks(directory: Path) -> None:
    with SsdPostingsDevice(lists := lists_in(directory)) as device:
        where, weights = asked(lists, ["w0", "w1999"], BM25("bm25+"))
        allowed = np.packbits(np.arange(len(DOCUMENTS)) % 2, bitorder="little")
        for k, some in ((7, None), (7, allowed), (0, None)):
            ticket = device.scan(where, weights, k, allowed=some)
            command, reply = ticket.command, ticket.finish()
            payload = command.payload
            assert (
                len(payload)
                == command.payload_bytes
                == 64 + 2 * 36 + 7 + (0 if some is None else 38)
            )
            again = ScanCommand.parse(payload)
            assert again.payload == payload
            assert (again.k, again.weights.rule, again.opcode) == (k, weights.rule, SCAN)
            assert (
                device.scan(again.lists, again.weights, again.k, allowed=again.allowed)
                .finish()
                .tobytes()
                == reply.tobytes()
            )
            assert (
                reply.nbytes
                <= command.data_len
                == (12 * min(7, where.n_postings) if k else 8 * where.n_postings)
            )
            begin, size = (
                where.places["offset"].astype(int) * 64,
                where.places["size"].astype(int) * 64,
            )
            assert command.flash_bytes == sum(
                4096 * ((b + s - 1) // 4096 - b // 4096 + 1)
                for b, s in zip(begin, size, strict=True)
            )
            assert ticket.stats.bytes_asked == size.sum()
        assert device.stats().bytes_asked == 6 * size.sum()


@pytest.mark.parametrize(
    ("offset", "size", "pages"),
    [(0, 1, 1), (0, 64, 1), (0, 65, 2), (63, 1, 1), (63, 2, 2), (127, 66, 3), (128, 64, 1)],
)
def test_a_list_is_read_in_whole_pages(offset: int, size: int, pages: int) -> None:
    places = np.zeros(2, LIST)
    places["offset"], places["size"] = offset, size
    assert ScanLists(places, b"").flash_bytes == 2 * pages * 4096


def test_bytes_that_are_no_command(directory: Path) -> None:
    """A typed error, or a command that the device refuses or runs: nothing else."""
    with SsdPostingsDevice(lists := lists_in(directory)) as device:
        where, weights = asked(lists, ["w0", "w3"], BM25())
        whole = ScanCommand(where, weights, 3).payload
        for cut in (0, 1, 63, len(whole) - 1):
            with pytest.raises(errors.FormatError, match="command of a scan"):
                ScanCommand.parse(whole[:cut])
        with pytest.raises(errors.FormatError, match="command of a scan"):
            ScanCommand.parse(whole + b"\0")
        random, ran = np.random.default_rng(0), 0
        for _ in range(600):
            data = bytearray(whole)
            for at in random.integers(0, len(data), random.integers(1, 4)):
                data[at] = random.integers(256)
            try:
                command = ScanCommand.parse(bytes(data))
                device.scan(
                    command.lists, command.weights, command.k, allowed=command.allowed
                ).finish()
                ran += 1
            except errors.EspnxError:
                continue
    assert ran > 50


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda where, weights: {"k": -1}, "k"),
        (lambda where, weights: {"k": 1 << 25}, "k"),
        (lambda where, weights: {"weights": Weights(weights.lists[:1])}, "weights of lists"),
        (lambda where, weights: {"weights": Weights(np.zeros(2))}, "weights of lists"),
        (lambda where, weights: {"deadline_s": float("nan")}, "deadline_s"),
        (lambda where, weights: {"allowed": np.zeros(3, np.uint8)}, "allowed"),
        (lambda where, weights: {"allowed": np.zeros(300, bool)}, "allowed"),
        (lambda where, weights: {"allowed": np.zeros(38, np.uint8), "k": 0}, "allowed"),
    ],
)
def test_wrong_arguments_are_refused(directory: Path, change: object, match: str) -> None:
    with SsdPostingsDevice(lists := lists_in(directory)) as device:
        where, weights = asked(lists, ["w0", "w3"], BM25())
        options = {"lists": where, "weights": weights, "k": 3} | change(where, weights)  # type: ignore[operator]
        with pytest.raises(errors.InvalidInputError, match=match):
            device.scan(**options)
    with pytest.raises(errors.InvalidInputError, match="names of lists"):
        ScanLists(where.places, where.names[1:])
    with pytest.raises(errors.InvalidInputError, match="lists of a scan"):
        ScanLists(np.zeros(2), b"")
    with pytest.raises(errors.InvalidInputError, match="variant of BM25"):
        Rule(5)


def test_lists_that_lie_elsewhere_are_refused(directory: Path) -> None:
    """Before anything is read; and bytes that are no list of that term when they are looked at."""
    with SsdPostingsDevice(lists := lists_in(directory)) as device:
        where, weights = asked(lists, ["w0", "w3"], BM25())
        for name, value, kind in (
            ("offset", 1 << 30, errors.InvalidInputError),
            ("size", 1 << 30, errors.InvalidInputError),
            ("size", 0, errors.InvalidInputError),
            ("term", 7, errors.ChecksumError),
            ("offset", 1, errors.ChecksumError),
        ):
            places = where.places.copy()
            places[name][0] = value
            with pytest.raises(kind):
                device.scan(ScanLists(places, where.names), weights, 3).finish()
        other = device.scan(ScanLists(where.places, b"w9w3"), weights, 3)
        other.finish()
        assert other.other_terms.tolist() == [0]
        assert len(device.scan(where, weights, 3).finish()) == 3


@pytest.mark.sampled(1)
@pytest.mark.parametrize("k", [5, 0])
@pytest.mark.parametrize("how", ["cancel", "forget", "close"])
def test_who_waits_is_woken(directory: Path, k: int, how: str) -> None:
    rule = FaultRule(
        fault="delay",
        operation="read",
        nth=1 + reads_of_opening(directory),
        count=1,
        value=300_000_000,
    )
    with NativeEngine("posix", rules=[rule]) as engine:
        device = SsdPostingsDevice(lists := lists_in(directory), engine=engine)
        where, weights = asked(lists, ["w0", "w3"], BM25())
        ticket, seen = device.scan(where, weights, k), list[BaseException]()

        def wait() -> None:
            try:
                ticket.finish()
            except errors.EspnxError as error:
                seen.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        time.sleep(0.05)
        assert waiting.is_alive()
        {"cancel": ticket.cancel, "forget": device.forget, "close": device.close}[how]()
        waiting.join(20)
        assert not waiting.is_alive()
        assert [type(each) for each in seen] == [errors.TransferCancelledError]
        if how == "close":
            with pytest.raises(errors.EngineClosedError):
                device.scan(where, weights, k)
        else:
            assert len(device.scan(where, weights, k).finish()) > 0
        device.close()
        device.close()


def test_a_deadline(directory: Path) -> None:
    rule = FaultRule(
        fault="delay",
        operation="read",
        nth=1 + reads_of_opening(directory),
        count=1,
        value=300_000_000,
    )
    with (
        NativeEngine("posix", rules=[rule]) as engine,
        SsdPostingsDevice(lists := lists_in(directory), engine=engine) as device,
    ):
        where, weights = asked(lists, ["w0", "w3"], BM25())
        with pytest.raises(errors.DeadlineExceededError):
            device.scan(where, weights, 3, deadline_s=0.1).finish()
        assert len(device.scan(where, weights, 3).finish()) == 3


def test_a_finished_ticket_is_beyond_cancelling(directory: Path) -> None:
    with SsdPostingsDevice(lists := lists_in(directory)) as device:
        where, weights = asked(lists, ["w0"], BM25())
        ticket = device.scan(where, weights, 3)
        found = ticket.finish()
        ticket.cancel()
        assert ticket.finish().tobytes() == found.tobytes()


def test_a_device_of_another_package_keeps_none(directory: Path, tmp_path: Path) -> None:
    device = espnx.device.open("espnx.device.example.ram_device:RamDevice", tmp_path)
    with pytest.raises(errors.InvalidInputError, match="posting lists on device"):
        device.open_postings(lists_in(directory))
