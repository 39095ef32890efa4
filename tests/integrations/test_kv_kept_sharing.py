"""Kept caches that share folders, and saves that fail: typed errors, and the state that was saved before is still there."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from espnx import errors
from espnx.integrations.transformers import KVCache
from espnx.kv.library import entries
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.kv_forks import LENGTHS, NEW, Forks, forks, go_on, held
from tests.integrations.kv_models import enabled
from tests.integrations.test_kv_disk import fill
from tests.retrieval.common import memory_folder
from tests.storage.common import until
from tests.storage.machine import mounted

LONGEST, STEP = max(LENGTHS), 4


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def test_one_process_at_a_time(folder: Path) -> None:
    """The other is told who has it; the lock goes with its process, however that ends. Folders that are shared in part are locked too."""
    storage = [folder / "a", folder / "b"]
    with forks() as processes:
        _one_at_a_time(folder, storage, processes)


def _one_at_a_time(folder: Path, storage: list[Path], processes: Forks) -> None:
    child = processes.start(model="llama", storage=storage, hold=folder / "held", step=STEP)
    assert until((folder / "held").exists, 30)
    for other in (storage, storage[:1], storage[1:], storage[::-1], [folder / "new", folder / "b"]):
        with pytest.raises(errors.StoreBusyError, match=f"process {child}") as caught:
            KVCache(enabled("llama").config, other, name="c")
        assert caught.value.path is not None
    assert [entry.is_open for entry in entries(storage)] == [True]
    KVCache(enabled("llama").config, storage, name="d").close()
    os.kill(child, signal.SIGKILL)
    assert processes.wait(child) == -signal.SIGKILL
    assert [entry.is_open for entry in entries(storage) if entry.name == "c"] == [False]
    with KVCache(enabled("llama").config, storage, name="c") as cache:
        assert cache.get_seq_length() == LONGEST + NEW - 1
        go_on("llama", cache)


@pytest.mark.parametrize("wrong", ["fewer", "more", "swapped", "other first", "other last"])
def test_other_directories(folder: Path, wrong: str) -> None:
    """A typed error, and the cache is as it was."""
    a, b, c = (folder / word for word in "abc")
    with KVCache(enabled("llama").config, [a, b], name="c", x_rows=0) as cache:
        go_on("llama", cache, until=9)
    storage = {"fewer": [a], "more": [a, b, c], "swapped": [b, a], "other first": [c, b], "other last": [a, c]}[wrong]
    with pytest.raises((errors.ForeignFileError, errors.TruncatedFileError), match=r"director|too soon"):
        KVCache(enabled("llama").config, storage, name="c")
    with KVCache(enabled("llama").config, [a, b], name="c") as cache:
        assert cache.get_seq_length() == LONGEST + 8
        go_on("llama", cache)


@pytest.mark.parametrize("operation", ["write", "sync", "rename", "truncate"])
def test_a_save_that_fails(folder: Path, operation: str) -> None:
    """At every call. The state before is found, or the new one where only its last flush failed; a later save works."""
    failures = 0
    for nth in range(1, 30):
        made: list[FaultyEngine] = []

        def make_engine(nth: int = nth, made: list[FaultyEngine] = made) -> FaultyEngine:
            made.append(FaultyEngine([FaultRule("error", operation=operation, nth=nth, count=1, value=28)], pool_bytes=1 << 20))
            return made[-1]

        shutil.rmtree(folder / "c", ignore_errors=True)
        with KVCache(enabled("llama").config, folder, name="c", x_rows=0) as cache:
            go_on("llama", cache, until=4)
        cache = KVCache(enabled("llama").config, folder, name="c", engine=make_engine)
        try:
            go_on("llama", cache, until=12)
            cache.close()
        except errors.WriteError as error:
            failures += 1
            where = str(error.path)
            assert held("llama", [folder]) in (LONGEST + 3, LONGEST + 11)
        else:
            where = str(folder)
        assert where.startswith(str(folder))
        with contextlib.suppress(errors.EngineClosedError):  # where closing it was what failed
            go_on("llama", cache, until=16)
            cache.close()
        hits = made[0].stats().fault_hits
        made[0].close()
        assert held("llama", [folder]) >= LONGEST + 3
        if not hits:
            break
    assert not hits
    assert failures, "no save failed"


@pytest.mark.root
@pytest.mark.parametrize("room_bytes", [0, 9000, 70_000])
def test_a_full_disk(tmp_path: Path, room_bytes: int) -> None:
    """While it is saved, or before; the state before stays, and with room made the same cache goes on and is saved."""
    with mounted("tmpfs", "espnx", tmp_path / "tmpfs", "size=6m") as where:
        cache = KVCache(enabled("llama").config, where, name="c", x_rows=0)
        go_on("llama", cache, until=4)
        ballast = fill(where, room_bytes)
        with pytest.raises(errors.DiskFullError) as caught:
            go_on("llama", cache, step=3)
        assert caught.value.needed_bytes > caught.value.free_bytes >= 0
        shutil.copytree(where / "c", tmp_path / "copy" / "c", ignore=shutil.ignore_patterns("LOCK"))
        ballast.unlink()
        go_on("llama", cache)
        cache.close()
        with KVCache(enabled("llama").config, tmp_path / "copy", name="c") as copied:
            assert copied.get_seq_length() >= LONGEST + 3
            go_on("llama", copied)
        with KVCache(enabled("llama").config, where, name="c") as cache:
            assert cache.get_seq_length() == LONGEST + NEW - 1
            go_on("llama", cache)


def test_the_directory_is_removed(folder: Path) -> None:
    cache = KVCache(enabled("llama").config, folder / "s", name="c", x_rows=0)
    go_on("llama", cache, until=4)
    shutil.rmtree(folder / "s")
    with pytest.raises(errors.WriteError) as caught:
        go_on("llama", cache)
    assert caught.value.path is not None
    with pytest.raises(errors.WriteError):
        cache.close()
    cache.close()
    with KVCache(enabled("llama").config, folder / "s", name="c", x_rows=0) as cache:
        assert cache.get_seq_length() == 0
        go_on("llama", cache)
