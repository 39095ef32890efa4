"""One fault at a time: what the caller is told, and that everything else goes on."""

from __future__ import annotations

import errno
import os
import random
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, FaultyEngine, Plan
from tests.storage.common import (
    BLOCK,
    Case,
    OpenEngine,
    content,
    crc32c,
    make_file,
    random_case,
    raw,
    read_bytes,
)

REQUEST = 16 * 1024


@pytest.mark.parametrize("nth", [1, 3, 5], ids=["first", "middle", "last"])
@pytest.mark.parametrize(
    "code", [errno.EIO, errno.EBADF, errno.ENODATA, errno.EREMOTEIO, errno.ETIMEDOUT]
)
def test_an_error_names_its_place(
    path: str, nth: int, code: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Five requests, one of which fails: file, offset, length, number; the same read then works."""
    engine = open_engine(
        path, [FaultRule("error", operation="read", nth=nth, count=1, value=code)], queue_depth=1
    )
    data = make_file(tmp_path / "a", 5 * 2 * BLOCK)
    file = engine.open(tmp_path / "a")
    plan = Plan.of(file, [2 * BLOCK * i for i in range(5)], [BLOCK] * 5)
    future = engine.read(plan)
    with pytest.raises(errors.ReadError) as caught:
        future.wait()
    error = caught.value
    assert (error.path, error.offset_bytes, error.size_bytes, error.errno) == (
        str(tmp_path / "a"),
        2 * BLOCK * (nth - 1),
        BLOCK,
        code,
    )
    assert os.strerror(code) in str(error)
    assert str(tmp_path / "a") in str(error)
    for again in (future.wait, future.next, lambda: list(future)):
        with pytest.raises(errors.ReadError):
            again()
    assert future.done()
    assert raw(engine.read(plan).wait()[:BLOCK]) == data[:BLOCK]
    stats = engine.stats()
    assert (stats.failures, stats.fault_hits, stats.in_flight, stats.quarantined_buffers) == (
        1,
        1,
        0,
        0,
    )


@pytest.mark.parametrize("code", [errno.EAGAIN, errno.EINTR])
def test_try_again(path: str, code: int, open_engine: OpenEngine, tmp_path: Path) -> None:
    """A burst is passed over; one that never ends is an error, soon."""
    data = make_file(tmp_path / "a", 3 * BLOCK)
    engine = open_engine(path, [FaultRule("error", operation="read", count=10, value=code)])
    assert read_bytes(engine, engine.open(tmp_path / "a"), 0, len(data)) == data
    assert engine.stats().retries == 10
    endless = open_engine(path, [FaultRule("error", operation="read", value=code)])
    with pytest.raises(errors.ReadError) as caught:
        read_bytes(endless, endless.open(tmp_path / "a"), 0, len(data))
    assert caught.value.errno == code
    assert endless.stats().retries <= 100


@pytest.mark.parametrize("moved", [1, 511, 512, 4095, 4096, 4097, 8191, 12_288, 15_000])
def test_every_read_is_short(
    path: str, moved: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """Progress of less than a block is none where the file is read in blocks; any other progress
    ends with the right bytes."""
    data = make_file(tmp_path / "a", 5 * BLOCK + 99, seed=moved)
    for direct in (None, False):
        engine = open_engine(
            path, [FaultRule("short", operation="read", value=moved)], request_bytes=REQUEST
        )
        file = engine.open(tmp_path / "a", direct=direct)
        if moved >= file.alignment_bytes:
            assert read_bytes(engine, file, 0, len(data)) == data
            assert engine.stats().retries > 0
            continue
        with pytest.raises(errors.ShortReadError) as caught:
            read_bytes(engine, file, 0, len(data))
        assert caught.value.path == str(tmp_path / "a")
        assert caught.value.offset_bytes is not None
        assert engine.stats().retries <= 100


def test_random_short_reads(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    for seed in range(6):
        rng = random.Random(seed)
        lengths = [
            rng.choice([BLOCK, BLOCK + 1, 2 * BLOCK - 1, rng.randint(1, 3 * BLOCK)])
            for _ in range(4)
        ]
        rules = [
            FaultRule("short", operation="read", probability=0.3, value=value) for value in lengths
        ]
        rules.append(FaultRule("error", operation="read", probability=0.1, value=errno.EAGAIN))
        engine = open_engine(path, rules, seed=seed, request_bytes=REQUEST, queue_depth=8)
        data = make_file(tmp_path / "a", 150_001, seed=seed)
        file = engine.open(tmp_path / "a", direct=rng.choice([None, False]))
        for _ in range(4):
            case = random_case(rng, [(file, data)], REQUEST, count=8)
            future = engine.read(case.plan, gap_bytes=rng.choice([0, 10_000]))
            case.check(future.wait(), future.position_bytes)
        assert engine.stats().fault_hits > 0


@pytest.mark.parametrize("fault", ["flip", "stale"])
@pytest.mark.parametrize("with_memory", [False, True])
def test_checksums_catch_wrong_bytes(
    path: str, fault: str, with_memory: bool, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """A flipped bit, and a device that says it has read and has not: named by the item's place, and
    the caller's memory is left alone."""
    data = make_file(tmp_path / "a", 3 * 2 * BLOCK)
    offsets, sizes = [0, 2 * BLOCK + 7, 4 * BLOCK], [100, 1000, BLOCK]
    sums = [crc32c(data[at : at + n]) for at, n in zip(offsets, sizes, strict=True)]
    rule = FaultRule(
        fault,
        operation="read",
        begin_bytes=2 * BLOCK,
        end_bytes=3 * BLOCK,
        count=1,
        value=8 * 57 + 3,
    )
    engine = open_engine(path, [rule])
    file = engine.open(tmp_path / "a")
    places = [1, 500, 3000] if with_memory else None
    plan = Plan.of(file, offsets, sizes, places, sums)

    def memory() -> torch.Tensor | None:
        return torch.zeros(3000 + BLOCK, dtype=torch.uint8) if with_memory else None

    out = memory()
    with pytest.raises(errors.ChecksumError) as caught:
        engine.read(plan, out).wait()
    error = caught.value
    assert (error.path, error.offset_bytes, error.size_bytes) == (
        str(tmp_path / "a"),
        offsets[1],
        sizes[1],
    )
    assert f"{sums[1]:08x}" in str(error)
    # through a buffer, because the places are not aligned: checked before it is copied
    if out is not None and file.direct:
        assert not out[500:1500].any()
    future = engine.read(plan, memory())
    Case(plan, [data[at : at + n] for at, n in zip(offsets, sizes, strict=True)]).check(
        future.wait(), future.position_bytes
    )
    assert engine.stats().failures == 1


def test_each_single_bit_is_seen(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 64)
    for bit in range(0, 512, 7):
        engine = open_engine(path, [FaultRule("flip", operation="read", value=bit)])
        file = engine.open(tmp_path / "a", direct=False)
        with pytest.raises(errors.ChecksumError):
            engine.read(Plan.of(file, [0], [64], crc32c=[crc32c(data)])).wait()
        engine.close()


def test_flips_and_stale_writes_reach_the_disk(
    disk_path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """So that users of the engine can test what they do about them. The caller's own memory stays
    as it was."""
    data = content(2 * BLOCK, seed=1)
    source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    for fault, expected in (("flip", data[:5] + bytes([data[5] ^ 4]) + data[6:]), ("stale", b"")):
        engine = open_engine(disk_path, [FaultRule(fault, operation="write", value=42)])
        file = engine.open(tmp_path / "w", "w", direct=False)
        engine.write(Plan.of(file, [0], [len(data)], [0]), source).wait()
        assert raw(source) == data
        assert (tmp_path / "w").read_bytes() == expected


@pytest.mark.parametrize("direct", [None, False], ids=["direct", "buffered"])
@pytest.mark.parametrize("kept", [0, 100, BLOCK, 2 * BLOCK + 1000, 3 * BLOCK])
def test_a_file_cut_while_it_is_open(
    disk_path: str, direct: bool | None, kept: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    data = make_file(tmp_path / "a", 4 * BLOCK)
    engine = open_engine(disk_path)
    file = engine.open(tmp_path / "a", direct=direct)
    os.truncate(tmp_path / "a", kept)
    with pytest.raises(errors.TruncatedFileError) as caught:
        read_bytes(engine, file, 0, 4 * BLOCK)
    assert caught.value.path == str(tmp_path / "a")
    assert f"a file of {kept} bytes" in str(caught.value)
    if kept >= BLOCK:
        assert read_bytes(engine, file, 0, BLOCK) == data[:BLOCK]
    with pytest.raises(errors.TruncatedFileError):
        read_bytes(engine, file, 0, kept + 1)


@pytest.mark.parametrize(
    ("operation", "kind"),
    [
        ("open_read", errors.ReadError),
        ("open_write", errors.WriteError),
        ("allocate", errors.WriteError),
        ("truncate", errors.WriteError),
        ("sync", errors.WriteError),
        ("sync_directory", errors.WriteError),
        ("rename", errors.WriteError),
    ],
)
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EDQUOT])
def test_faults_of_other_operations(
    path: str, operation: str, kind: type[errors.StorageError], code: int, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", 100)
    with FaultyEngine(
        [FaultRule("error", operation=operation, count=1, value=code)], path
    ) as engine:

        def work() -> None:
            engine.open(tmp_path / "a")
            file = engine.open(tmp_path / "w", "w")
            engine.allocate(file, 100)
            engine.truncate(file, 50)
            engine.sync(file)
            make_file(tmp_path / "b", 10)
            engine.rename(tmp_path / "b", tmp_path / "c")
            engine.sync_directory(tmp_path)

        with pytest.raises(errors.StorageError) as caught:
            work()
        if code in (errno.ENOSPC, errno.EDQUOT) and operation != "open_read":
            assert isinstance(caught.value, errors.DiskFullError)
            assert caught.value.free_bytes > 0
            assert caught.value.needed_bytes > 0 or not caught.value.what.startswith("write ")
        else:
            assert isinstance(caught.value, kind)
            assert caught.value.errno == code
        assert caught.value.path is not None
        assert caught.value.path.startswith(str(tmp_path))
        work()
        assert engine.stats().fault_hits == 1


def test_a_full_disk_says_what_is_missing(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """The third of four requests finds no space: two are written, so two are still needed."""
    engine = open_engine(
        path,
        [FaultRule("error", operation="write", nth=3, value=errno.ENOSPC)],
        request_bytes=BLOCK,
        queue_depth=1,
    )
    file = engine.open(tmp_path / "w", "w", direct=False)
    with pytest.raises(errors.DiskFullError) as caught:
        engine.write(
            Plan.of(file, [0], [4 * BLOCK], [0]), torch.zeros(4 * BLOCK, dtype=torch.uint8)
        ).wait()
    assert caught.value.needed_bytes == 2 * BLOCK
    assert caught.value.free_bytes > 0
    assert caught.value.path == str(tmp_path / "w")
    assert caught.value.errno == errno.ENOSPC


def test_rules_choose_by_path_range_and_turn(
    path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    rule = FaultRule(
        "error",
        operation="re*",
        path="*/b?",
        begin_bytes=BLOCK,
        end_bytes=2 * BLOCK,
        nth=2,
        count=2,
    )
    engine = open_engine(path, [rule])
    for name in ("a1", "b1"):
        make_file(tmp_path / name, 3 * BLOCK)
    other, file = (
        engine.open(tmp_path / "a1", direct=False),
        engine.open(tmp_path / "b1", direct=False),
    )
    outcomes = []
    for offset in (BLOCK, 0, 2 * BLOCK, 2 * BLOCK - 1, BLOCK, BLOCK, BLOCK):
        read_bytes(engine, other, offset, 1)
        try:
            read_bytes(engine, file, offset, 1)
            outcomes.append("ok")
        except errors.ReadError:
            outcomes.append("failed")
    assert outcomes == ["ok", "ok", "ok", "failed", "failed", "ok", "ok"]
    assert engine.stats().fault_hits == 2


def test_the_seed_decides(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)

    def pattern(seed: int) -> list[bool]:
        engine = open_engine(
            path, [FaultRule("error", operation="read", probability=0.5)], seed=seed
        )
        file = engine.open(tmp_path / "a")
        found = []
        for _ in range(40):
            try:
                read_bytes(engine, file, 0, 10)
                found.append(True)
            except errors.ReadError:
                found.append(False)
        return found

    assert pattern(1) == pattern(1)
    assert pattern(1) != pattern(2)
    assert 5 < sum(pattern(3)) < 35
