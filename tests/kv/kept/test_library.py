"""A library of kept caches: listed, verified and removed by name, and held below a size, the least
recently used going first."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.kv.kept.folders import KeptName
from espnx.kv.kept.library import entries, evict, remove, verify
from espnx.kv.kept.state import ROWS_NAME
from espnx.storage import NativeEngine
from espnx.storage.lock import DirectoryLock
from espnx.storage.manifest import write_manifest
from tests.integrations.transformers.forks import LENGTHS, go_on
from tests.integrations.transformers.tiny import enabled, generate, prompt
from tests.retrieval.common import memory_folder

LONGEST = max(LENGTHS)


@pytest.fixture
def folder() -> Iterator[Path]:
    with memory_folder() as path:
        yield path


def keep(
    storage: Path | list[Path], name: str, used_s: int | None = None, **options: object
) -> int:
    """A cache of 8 new tokens, last used so many seconds after 1970. Its size."""
    with KVCache(enabled("llama").config, storage, name=name, **{"x_rows": 0} | options) as cache:  # type: ignore[arg-type]
        go_on("llama", cache, until=8)
    first = storage[0] if isinstance(storage, list) else storage
    if used_s is not None:
        os.utime(first / name / "LAST_USED", (used_s, used_s))
    return next(entry.size_bytes for entry in entries(storage) if entry.name == name)


def names(storage: Path | list[Path]) -> list[str]:
    return [entry.name for entry in entries(storage)]


def test_entries(folder: Path) -> None:
    assert entries(folder) == []
    keep(folder, "later", 2000)
    size = keep(folder, "sooner", 1000)
    (folder / "file").write_text("")
    (folder / "empty").mkdir()
    with KVCache(enabled("llama").config, folder, name="later"):
        first, second = entries(folder)
    assert (first.name, first.last_used_s, first.is_open) == ("sooner", 1000.0, False)
    assert (second.name, second.is_open) == ("later", True)
    assert (first.model, first.sequences, first.tokens, first.directories) == (
        "LlamaForCausalLM",
        2,
        LONGEST + 7,
        1,
    )
    used = sum(path.stat().st_blocks * 512 for path in (folder / "sooner").iterdir())
    # K and V, layers, sequences, heads, tokens in whole blocks, values, bytes
    rows = 2 * 2 * 2 * 2 * 24 * 128 * 4
    assert size == first.size_bytes == used
    assert rows <= size < 1.6 * rows
    with pytest.raises(errors.StoreNotFoundError):
        entries(folder / "nowhere")


def test_sequences_kept_as_x_count(folder: Path) -> None:
    keep(folder, "c", x_rows=1)
    assert entries(folder)[0].sequences == 2


def test_the_least_recently_used_go(folder: Path) -> None:
    sizes = {
        name: keep(folder, name, used_s)
        for name, used_s in (("b", 3000), ("a", 1000), ("d", 4000), ("c", 2000))
    }
    total = sum(sizes.values())
    assert evict(folder, total) == []
    assert evict(folder, total - 1) == ["a"]
    assert not (folder / "a").exists()
    assert evict(folder, sizes["d"] + sizes["b"]) == ["c"]
    with KVCache(enabled("llama").config, folder, name="b"):
        assert evict(folder, 0) == ["d"], "an open cache stays"
    assert names(folder) == ["b"]
    with KVCache(enabled("llama").config, folder, name="b") as cache:
        go_on("llama", cache)
    assert evict(folder, 0) == ["b"]
    assert evict(folder, 0) == []


def test_using_a_cache_makes_it_recent(folder: Path) -> None:
    for name, used_s in (("a", 1000), ("b", 2000)):
        keep(folder, name, used_s)
    KVCache(enabled("llama").config, folder, name="a").close()
    assert names(folder) == ["b", "a"]
    verify(folder, "b")
    assert names(folder) == ["b", "a"], "verifying is not using"


def test_a_limit_acts_when_a_cache_is_saved(folder: Path) -> None:
    sizes = [keep(folder, name, used_s) for name, used_s in (("a", 1000), ("b", 2000), ("c", 3000))]
    keep(folder, "d", library_bytes=sum(sizes[:3]) + sizes[0] // 2)
    assert names(folder) == ["b", "c", "d"]
    keep(folder, "e", library_bytes="1KiB")
    assert names(folder) == ["e"], "the cache that is saved stays, however large"
    with KVCache(enabled("llama").config, folder, name="f", library_bytes=0, x_rows=0) as cache:
        go_on("llama", cache, until=4)
        assert names(folder) == ["f"]
        with KVCache(enabled("llama").config, folder, name="g", library_bytes=0, x_rows=0) as other:
            go_on("llama", other, until=4)
        assert names(folder) == ["f", "g"], "neither goes while it is open"
        go_on("llama", cache)
    assert names(folder) == ["f"]


def test_limits_that_are_none(folder: Path) -> None:
    for bad in (-1, "much", "-5GiB"):
        with pytest.raises(errors.InvalidInputError):
            KVCache(enabled("llama").config, folder, name="c", library_bytes=bad)
    with pytest.raises(errors.InvalidInputError, match="name"):
        KVCache(enabled("llama").config, folder, library_bytes=5)
    assert not list(folder.iterdir())


def test_other_stores_and_files_stay(folder: Path) -> None:
    """An index in the same directory, somebody's notes in the folder of a cache."""
    keep(folder, "c")
    (folder / "c" / "notes.txt").write_text("mine")
    (folder / "index").mkdir()
    with NativeEngine() as engine:
        write_manifest(engine, folder / "index", "espnx-store", 1, {"generation": 1})
    (folder / "index" / "data").write_bytes(bytes(100_000))
    assert names(folder) == ["c"]
    assert evict(folder, 0) == ["c"]
    assert (folder / "index" / "data").stat().st_size == 100_000
    assert [path.name for path in (folder / "c").iterdir()] == ["notes.txt"]
    for name in ("index", "c", "nowhere"):
        with pytest.raises(errors.StoreNotFoundError):
            remove(folder, name)
        with pytest.raises(errors.StoreNotFoundError):
            verify(folder, name)
    for name in ("", "..", "../x", "a/b"):
        with pytest.raises(errors.InvalidInputError):
            remove(folder, name)
    assert not (folder / "nowhere").exists()


def test_caches_that_are_damaged_or_newer(folder: Path) -> None:
    """Listed, verified as such, and removed like others."""
    for name, used_s in (("a", 1000), ("b", 2000), ("c", 3000)):
        keep(folder, name, used_s)
    (folder / "a" / "MANIFEST.json").write_text("{")
    manifest = folder / "b" / "MANIFEST.json"
    manifest.write_text(manifest.read_text().replace('"version": 1', '"version": 2'))
    assert [(entry.name, entry.model) for entry in entries(folder)] == [
        ("a", "damaged"),
        ("b", "damaged"),
        ("c", "LlamaForCausalLM"),
    ]
    for name in "ab":
        with pytest.raises(errors.FormatError):
            verify(folder, name)
    assert evict(folder, entries(folder)[2].size_bytes) == ["a", "b"]
    with KVCache(enabled("llama").config, folder, name="a", x_rows=0) as cache:
        go_on("llama", cache)


def test_several_directories(folder: Path) -> None:
    """Both count, both are verified, both go; one of them alone is not enough."""
    storage = [folder / "x", folder / "y"]
    both = keep(storage, "c")
    keep(folder / "y", "other")
    (one,) = entries(folder / "x")
    assert (one.directories, one.name) == (2, "c")
    assert one.size_bytes < both
    assert names(folder / "y") == ["other"]
    assert verify(storage, "c") > 0
    with pytest.raises(errors.InvalidInputError, match="name all"):
        remove(folder / "x", "c")
    assert evict(folder / "x", 0) == []
    with pytest.raises(errors.StoreNotFoundError):
        remove(folder / "y", "c")
    with KVCache(enabled("llama").config, storage, name="c") as cache:
        with pytest.raises(errors.StoreBusyError):
            remove(storage, "c")
        go_on("llama", cache)
    remove(storage, "c")
    assert not (folder / "x" / "c").exists()
    assert not (folder / "y" / "c").exists()
    assert names(folder / "y") == ["other"]


def test_verify_leaves_everything_as_it_is(folder: Path) -> None:
    keep(folder, "c")
    before = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (folder / "c").iterdir()
        if path.name != "LOCK"
    }
    rows = sum(len(data) for name, (data, _) in before.items() if name == "rows.bin")
    assert 0 < verify(folder, "c") <= rows
    after = {
        path.name: (path.read_bytes(), path.stat().st_mtime_ns)
        for path in (folder / "c").iterdir()
        if path.name != "LOCK"
    }
    assert {name: data for name, (data, _) in after.items()} == {
        name: data for name, (data, _) in before.items()
    }
    assert after["LAST_USED"] == before["LAST_USED"]
    with KVCache(enabled("llama").config, folder, name="c"), pytest.raises(errors.StoreBusyError):
        verify(folder, "c")


def test_an_empty_state(folder: Path) -> None:
    with KVCache(enabled("llama").config, folder, name="c", x_rows=0) as cache:
        generate(enabled("llama"), prompt([30, 9]), cache, max_new_tokens=2)
        cache.save()
        cache.reset()
    assert verify(folder, "c") == 0
    (entry,) = entries(folder)
    assert (entry.tokens, entry.model) == (0, "LlamaForCausalLM")


def test_a_lock_that_is_held_for_a_moment(folder: Path) -> None:
    keep(folder, "a")
    held = DirectoryLock(folder / "a")
    held.__enter__()
    letting_go = threading.Timer(0.05, held.__exit__, (None, None, None))
    letting_go.start()
    KVCache(enabled("llama").config, folder, name="a").close()
    letting_go.join()
    with DirectoryLock(folder / "a"), pytest.raises(errors.StoreBusyError, match="is open"):
        KVCache(enabled("llama").config, folder, name="a")


def test_threads_that_list_open_and_evict(folder: Path) -> None:
    """Listing takes each lock for a moment; nobody who opens a cache is refused for it, and nobody
    sees an entry half."""
    enabled("llama")
    keep(folder, "a")
    stop, failed = threading.Event(), list[BaseException]()

    def listing() -> None:
        while not stop.is_set():
            try:
                entries(folder)
                evict(folder, 1 << 40)
            except BaseException as error:
                failed.append(error)
                raise

    def churning() -> None:
        for number in range(12):
            try:
                keep(folder, f"t{number % 3}")
                remove(folder, f"t{number % 3}")
            except BaseException as error:
                failed.append(error)
                raise

    lister, churner = threading.Thread(target=listing), threading.Thread(target=churning)
    lister.start(), churner.start()
    for _ in range(12):
        KVCache(enabled("llama").config, folder, name="a").close()
    churner.join()
    stop.set()
    lister.join()
    assert not failed
    assert names(folder) == ["a"]


def test_owners_and_removers_of_one_name(folder: Path) -> None:
    """Removal takes the lock file with it; whoever waited for that file's lock must not own the
    name beside its next maker."""
    owners, failed = list[int](), list[BaseException]()

    def watched(body: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            try:
                for _ in range(300):
                    body()
            except BaseException as error:
                failed.append(error)

        return run

    def own() -> None:
        try:
            kept = KeptName(folder, "a")
        except errors.StoreBusyError:
            return
        owners.append(1)
        (folder / "a" / ROWS_NAME).touch()
        if len(owners) != 1:
            failed.append(AssertionError("two own one cache"))
        owners.pop()
        kept.unlock()

    def drop() -> None:
        with contextlib.suppress(errors.StoreBusyError, errors.StoreNotFoundError):
            remove(folder, "a")

    def look() -> None:
        entries(folder)

    threads = [threading.Thread(target=watched(body)) for body in (own, own, drop, drop, look)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    drop()
    assert not list(folder.iterdir())
