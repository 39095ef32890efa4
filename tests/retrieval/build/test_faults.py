"""Every I/O call of a build, and of opening and searching, fails in turn: N = 1, 2, 3, ... until a
run sees no fault.

A run may end in the right result or in a typed error that names the place, and in nothing else.
After a build that failed, the same call with a sound engine goes on and the store ranks as its
documents say. Nothing half-built is ever published; what a lying device bent or lost on the way is
found by the build, by opening, by searching or by verifying.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.device.interface import RecordTicket
from espnx.retrieval.search.result import Hit
from espnx.storage import FaultRule, NativeEngine
from tests.retrieval.common import EVERYTHING, build, check_store, corpus, queries
from tests.storage.common import open_descriptors, patiently, until
from tests.sweeps import in_steps

DOCUMENTS = corpus(30, tokens=(0, 9))
OLDER = corpus(12, seed=4)
SETTINGS: dict[str, Any] = {"nlist": 2, "pca": 8}
# all; read and write; write, truncate, sync, sync_directory
EVERY, TRANSFERS, CHANGES = "*", "[rw][er][ai]*", "[!or]*"


class Impatient(NativeEngine):
    """Faults by rule, and no read or write may take longer than `limit_s`."""

    def __init__(self, rule: FaultRule, limit_s: float = 30.0):
        super().__init__(rules=[rule], poison=True, pool_bytes=1 << 20)
        self.limit_s = limit_s

    def _submit(self, *args: Any, deadline_s: float, **options: Any) -> Any:
        return super()._submit(*args, deadline_s=min(deadline_s, self.limit_s), **options)


@dataclass(frozen=True)
class Kind:
    fault: str
    value: int = 0
    operation: str = TRANSFERS
    count: int = 1
    lies: bool = False  # success is reported: a build may end well with bytes that are not right
    harmless: bool = False
    limit_s: float = 30.0

    def rule(self, nth: int) -> FaultRule:
        return FaultRule(
            self.fault, operation=self.operation, nth=nth, count=self.count, value=self.value
        )


KINDS = {
    "EIO once": Kind("error", errno.EIO, EVERY),
    "EIO from then on": Kind("error", errno.EIO, EVERY, count=-1),
    "ENOSPC once": Kind("error", errno.ENOSPC, CHANGES),
    "ENOSPC from then on": Kind("error", errno.ENOSPC, CHANGES, count=-1),
    "short once": Kind("short", 4096, harmless=True),
    "nothing moves": Kind("short", 0, count=-1),
    "flipped bit": Kind("flip", 8 * 37 + 2, lies=True),
    "flipped bits": Kind("flip", 8 * 37 + 2, lies=True, count=-1),
    "stale once": Kind("stale", lies=True),
    "late": Kind("delay", 1_000_000, EVERY, harmless=True),
}


def check_error(error: errors.StorageError, folder: Path) -> None:
    assert error.path is not None
    assert error.path in str(error)
    assert str(folder) in error.path
    if isinstance(error, errors.DiskFullError):
        assert error.free_bytes >= 0


def resume(path: Path) -> None:
    """The same call again; where a lying device bent the build's own notes, the message says
    restart, and that works."""
    try:
        build(path, DOCUMENTS, replace=True, **SETTINGS)
    except errors.StorageError as error:
        if "restart" not in str(error):
            raise
        build(path, DOCUMENTS, replace=True, restart=True, **SETTINGS)


def one_build(path: Path, kind: Kind, nth: int, known: Path) -> tuple[bool, int]:
    """One run over a published store. Whether it ended well, and how many faults it saw."""
    shutil.copytree(known, path)
    engine = Impatient(kind.rule(nth), kind.limit_s)
    ended_well = True
    try:
        build(path, DOCUMENTS, engine=engine, replace=True, **SETTINGS)
    except errors.StorageError as error:
        check_error(error, path)
        ended_well = False
        # a busy machine: the limit is short
        if kind.fault == "never" and not engine.stats().fault_hits:
            engine.close(grace_s=0.001)
            raise
    stats = engine.stats()
    assert ended_well or (stats.fault_hits > 0 and not kind.harmless)
    assert kind.fault == "never" or until(
        lambda: (engine.stats().in_flight, engine.stats().quarantined_buffers) == (0, 0)
    )
    engine.close(grace_s=0.001)
    if ended_well:
        try:
            check_projected(path, DOCUMENTS)
            return True, stats.fault_hits
        except errors.StorageError as error:
            # A manifest is read back before it takes the place of the one that was right (a bit
            # bent twice is straight again).
            if not kind.lies or (kind.count == 1 and str(error.path).endswith("MANIFEST.json")):
                raise
            check_error(error, path)
    else:
        check_projected(path, OLDER if generation(path) == 1 else DOCUMENTS)
        if kind.count == -1 and kind.fault == "error":
            return False, stats.fault_hits  # what can be resumed after one error can after many
    resume(path)
    check_projected(path, DOCUMENTS)
    return ended_well, stats.fault_hits


def generation(path: Path) -> int:
    with espnx.open(path) as index:
        return int(index.store.manifest.generation)


def everything(index: espnx.Index, deadline_s: float = 30.0) -> list[Hit]:
    return index.search(
        queries(1)[0], k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING, deadline_s=deadline_s
    ).hits


RIGHT: dict[int, list[tuple[object, float, str]]] = {}


def check_projected(path: Path, documents: list[espnx.Document]) -> None:
    """Verifies, and ranks exactly as the store that a sound build makes."""
    with espnx.open(path) as index:
        assert index.store.verify() == len(documents)
        assert [(hit.id, hit.score, hit.text) for hit in everything(index)] == RIGHT[len(documents)]


@pytest.fixture(scope="module", autouse=True)
def known(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The older store; and the rankings of both, as a sound engine makes them."""
    folder = tmp_path_factory.mktemp("known")
    for name, documents in (("older", OLDER), ("newer", DOCUMENTS)):
        build(folder / name, documents, **SETTINGS)
        with espnx.open(folder / name) as index:
            RIGHT[len(documents)] = [(hit.id, hit.score, hit.text) for hit in everything(index)]
    build(folder / "plain", DOCUMENTS, nlist=2)
    check_store(folder / "plain", DOCUMENTS)  # which is what makes those right
    return folder / "older"


@in_steps(8)
@pytest.mark.parametrize("name", KINDS)
def test_every_call_of_a_build(folder: Path, known: Path, name: str, step: int) -> None:
    """In steps, from another call on for each kind of fault."""
    kind = KINDS[name]
    before = open_descriptors()
    outcomes = []
    step = max(step, 7) if name == "late" else step
    for nth in range(1 + list(KINDS).index(name) % step, 400, step):
        ended_well, hits = one_build(folder / str(nth), kind, nth, known)
        shutil.rmtree(folder / str(nth))
        outcomes.append(ended_well)
        if hits == 0:
            break
    assert (hits, ended_well) == (0, True), "the sweep never came to a run without a fault"
    assert len(outcomes) * step > 20, "the sweep saw too few calls to mean anything"
    assert all(outcomes) if kind.harmless else not all(outcomes)
    assert until(lambda: len(open_descriptors()) <= len(before)), open_descriptors() - before


@pytest.mark.parametrize("nth", [1, 4, 9, 17, 23])
def test_calls_of_a_build_that_never_end(folder: Path, known: Path, nth: int) -> None:
    def outcome(limit_s: float) -> tuple[bool, int]:
        return one_build(folder / f"{limit_s}", Kind("never", limit_s=limit_s), nth, known)

    assert patiently(outcome, 0.1) == (False, 1)


@pytest.fixture(scope="module")
def newer(known: Path) -> Path:
    return known.parent / "newer"


def one_search(path: Path, kind: Kind, nth: int, limit_s: float) -> tuple[bool, int]:
    """Opens, searches, searches again. A failed search leaves the index as good as new."""
    engine = Impatient(kind.rule(nth), limit_s)
    right, ended_well = RIGHT[len(DOCUMENTS)], True
    try:
        with espnx.open(path, engine=engine) as index:
            for _ in range(2):
                try:
                    assert [
                        (hit.id, hit.score, hit.text) for hit in everything(index, limit_s)
                    ] == right
                except errors.StorageError as error:
                    check_error(error, path)
                    assert kind.count == -1 or ended_well, "one fault failed two searches"
                    ended_well = False
    except errors.StorageError as error:
        check_error(error, path)
        ended_well = False
    stats = engine.stats()
    engine.close(grace_s=0.001)
    if kind.fault == "never" and not ended_well and not stats.fault_hits:
        raise errors.DeadlineExceededError("a busy machine: the limit is short", path=path)
    assert ended_well or (stats.fault_hits > 0 and not kind.harmless)
    return ended_well, stats.fault_hits


@pytest.mark.parametrize("name", [*KINDS, "never", "never again"])
def test_every_call_of_opening_and_searching(newer: Path, name: str) -> None:
    kind = KINDS.get(name) or Kind("never", count=1 if name == "never" else -1, limit_s=0.1)
    before = open_descriptors()
    outcomes = []
    step = 2 if kind.fault == "never" else 1
    for nth in range(1, 200, step):
        ended_well, hits = patiently(
            lambda limit_s, nth=nth: one_search(newer, kind, nth, limit_s), kind.limit_s
        )
        outcomes.append(ended_well)
        if hits == 0:
            break
    assert (hits, ended_well) == (0, True)
    if kind.operation != CHANGES:
        assert len(outcomes) * step >= 9
        assert all(outcomes) if kind.harmless else not all(outcomes)
    if kind.fault != "never":  # what never completes keeps its file open, on purpose
        assert until(lambda: len(open_descriptors()) <= len(before)), open_descriptors() - before


@pytest.fixture
def plain(known: Path) -> Iterator[espnx.Index]:
    """The sixth read of data files fails, and no other: how many more a search begins before it
    hears of it, nobody can say."""
    engine = Impatient(FaultRule("error", operation="read", path="*segment*", nth=6, count=1))
    with espnx.open(known.parent / "plain", engine=engine) as index:
        yield index
    engine.close()


def test_batches_after_a_failure(plain: espnx.Index) -> None:
    """A batch with a failing query raises; the next batch does not."""
    wanted = queries(8)
    with pytest.raises(errors.ReadError, match="segment-00000"):
        for _ in range(3):
            plain.search(wanted, candidates=EVERYTHING, nprobe=EVERYTHING)
    alone = [hit.id for hit in everything(plain)]
    assert sorted(alone) == sorted(document.id for document in DOCUMENTS)


def test_a_failed_search_calls_its_prefetch_off(
    known: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The reads of the critical path fail while the prefetch hangs: nobody waits half a minute for
    it afterwards."""
    vectors = 4096  # where the headers of data files end
    hangs = FaultRule(
        "never", operation="read", path="*segment*", begin_bytes=vectors, nth=1, count=1
    )
    fails = FaultRule(
        "error", operation="read", path="*segment*", begin_bytes=vectors, nth=2, count=1
    )
    engine = NativeEngine(rules=[hangs, fails])

    def prefetch_hangs_first(*arguments: Any, **options: Any) -> RecordTicket:
        ticket = maxsim(*arguments, **options)
        assert until(lambda: engine.stats().fault_hits)
        return ticket

    with espnx.open(known.parent / "plain", engine=engine) as index:
        maxsim = index.store.full.maxsim
        monkeypatch.setattr(index.store.full, "maxsim", prefetch_hangs_first)
        with pytest.raises(errors.ReadError, match="Input/output error"):
            index.search(queries(1)[0], candidates=EVERYTHING, nprobe=EVERYTHING, prefetch_step=0.5)
        begun = time.monotonic()
    assert time.monotonic() - begun < 25
    engine.close(grace_s=0.001)


@pytest.mark.parametrize("place", ["prefetch", "header"])
def test_a_failure_lets_go_at_once(known: Path, place: str) -> None:
    """Files are closed when the error is gone, not when the next garbage collection happens to
    come."""
    begin, end = (4096, 2**62) if place == "prefetch" else (0, 4096)
    engine = NativeEngine(
        rules=[
            FaultRule("error", operation="read", path="*segment*", begin_bytes=begin, end_bytes=end)
        ]
    )
    before = open_descriptors()
    gc.disable()
    try:
        for _ in range(3):
            with (
                contextlib.suppress(errors.ReadError),
                espnx.open(known.parent / "plain", engine=engine) as index,
            ):
                index.search(queries(1)[0], nprobe=EVERYTHING, prefetch_step=1.0)
                pytest.fail("no fault was seen")
        assert until(lambda: open_descriptors() <= before), open_descriptors() - before
    finally:
        gc.enable()
        engine.close()
