"""Every I/O call fails in turn: N = 1, 2, 3, ... until a run sees no fault, once and forever, for
every kind of fault.

Each run writes a file, publishes it and reads it back. It may end in the right bytes or in a typed
error that names the place, and in nothing else; the engine then still reads other files, holds no
memory and no descriptor.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, NativeEngine, Plan
from tests.storage.common import (
    BLOCK,
    content,
    crc32c,
    make_file,
    open_descriptors,
    raw,
    read_bytes,
    until,
)

REQUEST = 8 * 1024
DATA = content(9 * BLOCK, seed=1)
OTHER = content(3 * BLOCK, seed=2)
READS = [(0, 100), (BLOCK + 7, 5000), (5 * BLOCK, 4 * BLOCK), (3 * BLOCK, 1)]
SUMS = [crc32c(DATA[at : at + size]) for at, size in READS]
EVERY = "*"
TRANSFERS = "[rw][er][ai]*"  # read and write
GROWING = "[!or]*"  # write, allocate, truncate, sync, sync_directory


@dataclass(frozen=True)
class Kind:
    fault: str
    value: int = 0
    harmless: bool = False  # every run must end in the right bytes
    operation: str = EVERY
    deadline_s: float = 30.0


KINDS = {
    "EIO": Kind("error", errno.EIO),
    "ENOSPC": Kind("error", errno.ENOSPC, operation=GROWING),
    "EAGAIN": Kind("error", errno.EAGAIN),
    "short by a byte": Kind("short", REQUEST - 1, harmless=True),
    "one block": Kind("short", BLOCK, harmless=True),
    "one byte": Kind("short", 1, operation="read"),
    "flipped bit": Kind("flip", 8 * 3 + 1),
    "stale": Kind("stale"),
    "late": Kind("delay", 500_000, harmless=True),
    "never": Kind("never", operation=TRANSFERS, deadline_s=0.04),
}


def workload(engine: NativeEngine, folder: Path, deadline_s: float) -> None:
    """Raises a typed error, or has checked every byte it read."""
    source = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
    file = engine.open(folder / "victim.new", "w", direct=False)
    engine.allocate(file, len(DATA))
    engine.write(
        Plan.of(file, [0, 4 * BLOCK], [4 * BLOCK, 5 * BLOCK], [0, 4 * BLOCK]),
        source,
        deadline_s=deadline_s,
    ).wait()
    engine.truncate(file, len(DATA))
    engine.sync(file)
    engine.close_file(file)
    if engine.effective != "memory":  # which leaves nothing on disk to publish
        engine.rename(folder / "victim.new", folder / "victim")
        engine.sync_directory(folder / "victims")
    file = engine.open(folder / "victim")
    plan = Plan.of(file, [at for at, _ in READS], [size for _, size in READS], crc32c=SUMS)
    future = engine.read(plan, deadline_s=deadline_s)
    memory, places = future.wait(), future.position_bytes.tolist()
    for (at, size), place in zip(READS, places, strict=True):
        assert raw(memory[place : place + size]) == DATA[at : at + size], "wrong bytes"
    out = torch.zeros(6000, dtype=torch.uint8)
    engine.read(
        Plan.of(file, [10], [6000], [0], [crc32c(DATA[10:6010])]), out, deadline_s=deadline_s
    ).wait()
    assert raw(out) == DATA[10:6010], "wrong bytes"


def check_error(error: errors.StorageError) -> None:
    assert error.path is not None
    assert "victim" in error.path
    assert error.path in str(error)
    if isinstance(error, errors.DiskFullError):
        assert error.needed_bytes > 0 or not error.what.startswith("write "), (
            "what a write lacks is known"
        )
        assert error.free_bytes >= 0
        return
    transfers = (
        errors.ShortReadError,
        errors.ChecksumError,
        errors.TruncatedFileError,
        errors.DeadlineExceededError,
    )
    if isinstance(error, transfers) or error.what.startswith(("read ", "write ")):
        assert error.offset_bytes is not None
        assert error.size_bytes is not None
        assert 0 <= error.offset_bytes < len(DATA)
        assert 0 < error.size_bytes <= len(DATA)


def run(path: str, kind: Kind, nth: int, count: int, folder: Path) -> tuple[bool, int]:
    """One run. Whether it ended well, and how many faults it saw."""
    rule = FaultRule(
        kind.fault,
        operation=kind.operation,
        path="*victim*",
        nth=nth,
        count=count,
        value=kind.value,
    )
    engine = NativeEngine(
        path, rules=[rule], request_bytes=REQUEST, queue_depth=64, threads=4, poison=True
    )
    try:
        ended_well = True
        try:
            workload(engine, folder, kind.deadline_s)
        except errors.DeadlineExceededError as error:
            if engine.stats().fault_hits == 0:
                return False, -1  # this machine was busy: the limit is short
            check_error(error)
            ended_well = False
        except errors.StorageError as error:
            check_error(error)
            ended_well = False
        stats = engine.stats()
        assert ended_well or not kind.harmless, "a harmless fault was not survived"
        assert ended_well or stats.fault_hits > 0, "failed without a fault"
        assert read_bytes(engine, engine.open(folder / "other"), 5, 9000) == OTHER[5:9005], (
            "the engine is not usable afterwards"
        )
        if kind.fault == "never":
            assert stats.quarantined_buffers == (0 if ended_well else 1)
        else:
            assert until(lambda: engine.stats().in_flight == 0)
            assert engine.stats().quarantined_buffers == 0
        return ended_well, stats.fault_hits
    finally:
        engine.close(grace_s=0.001)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", KINDS)
def test_sweep(disk_path: str, name: str, tmp_path: Path) -> None:
    sweep(disk_path, name, tmp_path)


@pytest.mark.parametrize("name", ["EIO", "EAGAIN", "one block", "flipped bit"])
def test_sweep_in_memory(name: str, tmp_path: Path) -> None:
    """The same completion routine; test_faults.py has the other kinds on every path."""
    sweep("memory", name, tmp_path)


def sweep(path: str, name: str, tmp_path: Path) -> None:
    kind = KINDS[name]
    make_file(tmp_path / "other", len(OTHER), seed=2)
    (tmp_path / "victim").write_bytes(DATA)
    (tmp_path / "victims").mkdir()
    before = open_descriptors()
    for count in (1, -1):
        outcomes: list[bool] = []
        for nth in range(1, 100):
            for _ in range(5):
                ended_well, hits = run(path, kind, nth, count, tmp_path)
                if hits >= 0:
                    break
            outcomes.append(ended_well)
            if hits == 0:
                break
        assert (hits, ended_well) == (0, True), f"a run without a fault: {nth}"
        assert nth > (3 if kind.operation == "read" else 8), (
            "the sweep saw too few calls to mean anything"
        )
        # Once is no more than a retry for EAGAIN, and where a file is not read in blocks even
        # single bytes are progress.
        assert kind.harmless or count == 1 or kind.fault == "short" or not all(outcomes), (
            "no fault was ever noticed"
        )
    if kind.fault != "never":  # what never completes keeps its file open, on purpose
        assert until(lambda: len(open_descriptors()) <= len(before)), open_descriptors() - before
