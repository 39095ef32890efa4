"""Kept caches that share folders, and saves that fail: typed errors, and the state that was saved
before is still there."""

from __future__ import annotations

import contextlib
import gc
import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from espnx import enable_kv_cache, errors
from espnx.integrations.transformers.cache import KVCache
from espnx.kv.kept import state as kept
from espnx.kv.kept.library import entries
from espnx.storage import FaultRule, FaultyEngine
from tests.forks import Forks
from tests.integrations.transformers.forks import LENGTHS, NEW, go_on, held, wanted
from tests.integrations.transformers.tiny import enabled, make
from tests.storage.common import open_descriptors, until
from tests.storage.machine import command, fill, mounted
from tests.sweeps import in_steps

LONGEST, STEP = max(LENGTHS), 4


def test_one_process_at_a_time(folder: Path, processes: Forks) -> None:
    """The other is told who has it; the lock goes with its process, however that ends. Folders that
    are shared in part are locked too."""
    storage = [folder / "a", folder / "b"]
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
    storage = {
        "fewer": [a],
        "more": [a, b, c],
        "swapped": [b, a],
        "other first": [c, b],
        "other last": [a, c],
    }[wrong]
    with pytest.raises(
        (errors.ForeignFileError, errors.TruncatedFileError), match=r"director|too soon"
    ):
        KVCache(enabled("llama").config, storage, name="c")
    with KVCache(enabled("llama").config, [a, b], name="c") as cache:
        assert cache.get_seq_length() == LONGEST + 8
        go_on("llama", cache)


@in_steps(3)
@pytest.mark.parametrize("operation", ["write", "sync", "rename", "truncate"])
def test_a_save_that_fails(folder: Path, operation: str, step: int) -> None:
    """At every call. The state before is found, or the new one where only its last flush failed; a
    later save works."""
    failures = 0
    for nth in range(1, 30, step):
        made: list[FaultyEngine] = []

        def make_engine(nth: int = nth, made: list[FaultyEngine] = made) -> FaultyEngine:
            made.append(
                FaultyEngine(
                    [FaultRule("error", operation=operation, nth=nth, count=1, value=28)],
                    pool_bytes=1 << 20,
                )
            )
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
def test_a_directory_that_may_only_be_read(tmp_path: Path) -> None:
    """A kept cache is continued in its place or not at all; a copy of it can be."""
    with mounted("tmpfs", "espnx", tmp_path / "tmpfs", "size=6m") as where:
        with KVCache(enabled("llama").config, where, name="c", x_rows=0) as cache:
            go_on("llama", cache, until=4)
        shutil.copytree(where, tmp_path / "copy")
        command("mount", "-o", "remount,ro", where)
        before = {path.name: path.read_bytes() for path in (where / "c").iterdir()}
        with pytest.raises(errors.WriteError, match="copy it to a directory that you may write to"):
            KVCache(enabled("llama").config, where, name="c")
        with pytest.raises(errors.WriteError, match="Read-only"):
            KVCache(enabled("llama").config, where, name="d")
        assert [(entry.name, entry.tokens) for entry in entries(where)] == [("c", LONGEST + 3)]
        assert {path.name: path.read_bytes() for path in (where / "c").iterdir()} == before
    with KVCache(enabled("llama").config, tmp_path / "copy", name="c") as cache:
        go_on("llama", cache, until=12)


@pytest.mark.root
@pytest.mark.parametrize("room_bytes", [0, 9000, 70_000])
def test_a_full_disk(tmp_path: Path, room_bytes: int) -> None:
    """While it is saved, or before; the state before stays, and with room made the same cache goes
    on and is saved."""
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
    for _ in range(2):
        with pytest.raises(errors.WriteError):
            cache.close()
    with KVCache(enabled("llama").config, folder / "s", name="c", x_rows=0) as cache:
        assert cache.get_seq_length() == 0
        go_on("llama", cache)


def test_a_close_that_failed_can_be_repeated(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What came since the last save is not lost with the first try."""
    cache = KVCache(enabled("llama").config, folder, name="c", x_rows=0)
    go_on("llama", cache, until=4)
    held = cache.get_seq_length()
    logits = enabled("llama")(wanted("llama")[:, held : held + 1], past_key_values=cache).logits
    assert torch.isfinite(logits).all()
    with monkeypatch.context() as patch:
        patch.setattr(
            kept,
            "write_manifest",
            failing(errors.DiskFullError("full", needed_bytes=2, free_bytes=1)),
        )
        with pytest.raises(errors.DiskFullError):
            cache.close()
    cache.close()
    cache.close()
    with KVCache(enabled("llama").config, folder, name="c") as cache:
        assert cache.get_seq_length() == held + 1


def failing(error: Exception) -> Callable[..., None]:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("when", ["opened", "matched nothing", "after a pass"])
def test_another_model_is_refused_at_any_time(folder: Path, when: str) -> None:
    """And what was kept stays as it is."""
    other = enable_kv_cache(make("llama", seed=1))
    with KVCache(enabled("llama").config, folder, name="c", x_rows=0) as cache:
        go_on("llama", cache, until=4)
        held = cache.get_seq_length()
    with KVCache(enabled("llama").config, folder, name="c") as cache:
        ids = wanted("llama")[:, :held]
        if when == "matched nothing":
            assert cache.reuse_prefix(ids + 1) == 0
        if when == "after a pass":
            enabled("llama")(wanted("llama")[:, held : held + 1], past_key_values=cache)
        with pytest.raises(errors.ForeignFileError, match="another model"):
            other(ids[:, :1], past_key_values=cache)


def test_a_name_that_was_dropped_is_free(folder: Path) -> None:
    """Nothing was closed; nothing that was not saved is there."""
    before = open_descriptors()
    for number in range(3):
        cache = KVCache(enabled("llama").config, folder, name="c", x_rows=0)
        if not number:
            go_on("llama", cache, until=4)
        held = cache.get_seq_length()
        del cache
        gc.collect()
        assert held
    assert open_descriptors() <= before


def test_a_cache_that_could_not_be_opened_leaves_nothing(folder: Path) -> None:
    (folder / "file").touch()
    config = enabled("llama").config
    for storage, options in (
        ([folder, folder / "file"], {}),
        (folder, {"engine": "no such engine"}),
        (folder, {"capacity_tokens": 0}),
        ([folder, folder / "b"], {"engine": "no such engine"}),
    ):
        with pytest.raises(errors.EspnxError):
            KVCache(config, storage, name="c", **options)  # type: ignore[arg-type]
        assert not (folder / "c").exists()
        assert not (folder / "b" / "c").exists()
    keep = KVCache(enabled("llama").config, folder, name="c", x_rows=0)
    go_on("llama", keep, until=4)
    keep.close()
    with pytest.raises(errors.EspnxError):
        KVCache(config, folder, name="c", engine="no such engine")
    with KVCache(config, folder, name="c") as cache:
        assert cache.get_seq_length() > 0


def test_x_rows_that_were_kept_are_not_changed(folder: Path) -> None:
    with KVCache(enabled("llama").config, folder, name="c", x_rows=1) as cache:
        go_on("llama", cache, until=4)
    with pytest.raises(errors.InvalidInputError, match="x_rows of a kept cache"):
        KVCache(enabled("llama").config, folder, name="c", x_rows=0)
    with KVCache(enabled("llama").config, folder, name="c", x_rows=1) as cache:
        go_on("llama", cache)
