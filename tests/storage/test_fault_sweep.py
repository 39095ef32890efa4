"""Every I/O call fails in turn: N = 1, 2, 3, ... until a run sees no fault, once and for ever, for every kind of fault.

Each run writes files, publishes one and reads them back. It may end in the right bytes or in a typed error that names the place, and in
nothing else; the engine then still reads other files, holds no memory and no descriptor.
"""

from __future__ import annotations

import errno
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, NativeEngine, Plan
from tests.storage.common import BLOCK, content, crc32c, make_file, open_descriptors, raw, read_bytes, until

REQUEST = 8 * 1024
DATA = content(9 * BLOCK, seed=1)
OTHER = content(3 * BLOCK, seed=2)
READS = [(0, 100), (BLOCK + 7, 5000), (5 * BLOCK, 4 * BLOCK), (3 * BLOCK, 1)]
SUMS = [crc32c(DATA[at : at + size]) for at, size in READS]
DEADLINE_S = 0.03  # for requests that never complete


@dataclass(frozen=True)
class Kind:
    fault: str
    value: int = 0
    harmless: bool = False  # every run must end in the right bytes
    only: str = "*"


KINDS = {
    "EIO": Kind("error", errno.EIO),
    "ENOSPC": Kind("error", errno.ENOSPC, only="[!or]*"),
    "EAGAIN": Kind("error", errno.EAGAIN),
    "short by a byte": Kind("short", REQUEST - 1, harmless=True),
    "one block": Kind("short", BLOCK, harmless=True),
    "one byte": Kind("short", 1),
    "flipped bit": Kind("flip", 8 * 3 + 1),
    "stale": Kind("stale"),
    "late": Kind("delay", 500_000, harmless=True),
    "never": Kind("never", only="[!s]*"),
}


def workload(engine: NativeEngine, folder: Path) -> None:
    """Raises a typed error, or has checked every byte it read."""
    deadline_s = DEADLINE_S if engine.stats().fault_hits < 0 else 30.0
    source = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
    file = engine.open(folder / "victim.new", "w", direct=False)
    engine.allocate(file, len(DATA))
    engine.write(Plan.of(file, [0, 4 * BLOCK], [4 * BLOCK, 5 * BLOCK], [0, 4 * BLOCK]), source, deadline_s=deadline_s).wait()
    engine.truncate(file, len(DATA))
    engine.sync(file)
    engine.close_file(file)
    if engine.effective != "memory":
        engine.rename(folder / "victim.new", folder / "victim")
        engine.sync_directory(folder)
    read_back(engine, folder, deadline_s)


def read_back(engine: NativeEngine, folder: Path, deadline_s: float) -> None:
    file = engine.open(folder / "victim")
    try:
        plan = Plan.of(file, [at for at, _ in READS], [size for _, size in READS], crc32c=SUMS)
        future = engine.read(plan, deadline_s=deadline_s)
        memory, places = future.wait(), future.position_bytes.tolist()
        for (at, size), place in zip(READS, places, strict=True):
            assert raw(memory[place : place + size]) == DATA[at : at + size], "wrong bytes"
        out = torch.zeros(6000, dtype=torch.uint8)
        engine.read(Plan.of(file, [10], [6000], [0], [crc32c(DATA[10:6010])]), out, deadline_s=deadline_s).wait()
        assert raw(out) == DATA[10:6010], "wrong bytes"
    finally:
        engine.close_file(file)


def check_error(error: errors.StorageError, name: str) -> None:
    assert error.path is not None, repr(error)
    assert "victim" in error.path or error.path == str(Path(error.path).parent / Path(error.path).name)
    assert str(error.path) in str(error)
    if isinstance(error, errors.DiskFullError):
        assert error.needed_bytes >= 0
        assert error.free_bytes >= 0
    elif type(error) in (errors.ReadError, errors.WriteError, errors.ShortReadError) and ("read" in error.what or "write" in error.what):
        operation = error.what.split()[0]
        if operation in ("read", "write"):
            assert error.offset_bytes is not None, f"{name}: {error!r}"
            assert error.size_bytes is not None
    elif isinstance(error, errors.ChecksumError | errors.TruncatedFileError | errors.DeadlineExceededError):
        assert error.offset_bytes is not None
        assert error.size_bytes is not None


def run(path: str, name: str, kind: Kind, nth: int, count: int, folder: Path) -> tuple[bool, int]:
    """One run. Whether it ended well, and how many faults it saw."""
    rule = FaultRule(kind.fault, operation=kind.only, path="*victim*", nth=nth, count=count, value=kind.value)
    engine = NativeEngine(path, rules=[rule], request_bytes=REQUEST, queue_depth=64, threads=4, poison=True)
    try:
        try:
            workload(engine, folder)
            ended_well = True
        except errors.StorageError as error:
            check_error(error, name)
            ended_well = False
        stats = engine.stats()
        assert kind.harmless <= ended_well, f"{name}, {nth}: a harmless fault was not survived"
        assert ended_well or stats.fault_hits > 0, "failed without a fault"
        assert read_bytes(engine, engine.open(folder / "other"), 5, 9000) == OTHER[5:9005], "the engine is not usable afterwards"
        if kind.fault == "never":
            assert stats.quarantined_buffers == (0 if ended_well else 1)
        else:
            assert until(lambda: engine.stats().in_flight == 0)
            assert engine.stats().quarantined_buffers == 0
        return ended_well, stats.fault_hits
    finally:
        engine.close(grace_s=0.001)


@pytest.mark.parametrize("name", KINDS)
def test_sweep(path: str, name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    kind = KINDS[name]
    if kind.fault == "never":
        monkeypatch.setattr(f"{__name__}.workload", lambda engine, folder: hurried(engine, folder))
    make_file(tmp_path / "other", len(OTHER), seed=2)
    (tmp_path / "victim").write_bytes(DATA)
    before = open_descriptors()
    for count in (1, -1):
        outcomes = []
        for nth in range(1, 200):
            ended_well, hits = run(path, name, kind, nth, count, tmp_path)
            outcomes.append(ended_well)
            if hits == 0:
                break
        assert hits == 0, "no clean run"
        assert ended_well, "a run without a fault failed"
        assert nth > (9 if kind.only == "*" else 5), "the sweep saw too few calls to mean anything"
        assert kind.harmless or not all(outcomes), "no fault was ever noticed"
    if kind.fault != "never":  # what never completes keeps its file open, on purpose
        assert until(lambda: len(open_descriptors()) <= len(before)), open_descriptors() - before


def hurried(engine: NativeEngine, folder: Path) -> None:
    """The same, with deadlines that a request without an end reaches soon."""
    source = torch.frombuffer(bytearray(DATA), dtype=torch.uint8)
    file = engine.open(folder / "victim.new", "w", direct=False)
    engine.write(Plan.of(file, [0, 4 * BLOCK], [4 * BLOCK, 5 * BLOCK], [0, 4 * BLOCK]), source, deadline_s=DEADLINE_S).wait()
    read_back(engine, folder, DEADLINE_S)
