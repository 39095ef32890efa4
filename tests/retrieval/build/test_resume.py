"""Interrupted, repeated, concurrent builds: what is kept, what is refused, and that readers never
notice."""

from __future__ import annotations

import itertools
import json
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.build import builder as module
from espnx.retrieval.first_stage.ivf.stage import IvfStage
from espnx.retrieval.versions import part_writer, publish
from espnx.storage import ownership
from espnx.storage.lock import DirectoryLock
from tests.retrieval.common import (
    D_CLS,
    DIM,
    EVERYTHING,
    assert_ranks_as_written,
    build,
    check_store,
    corpus,
    leftovers,
    queries,
)
from tests.storage.common import in_child, open_descriptors
from tests.sweeps import some

DOCUMENTS = corpus(700)


class StopError(Exception):
    pass


def interrupt(
    path: Path, monkeypatch: pytest.MonkeyPatch, where: tuple[Any, str], at: int, **options: Any
) -> None:
    """Builds until the `at`-th call of a function, which then raises."""
    owner, name = where
    original, calls = getattr(owner, name), itertools.count(1)

    def stop(*args: Any, **kwargs: Any) -> Any:
        if next(calls) == at:
            raise StopError
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, stop)
        patch.setattr(module, "CHECKPOINT_S", 0.0)
        with pytest.raises(StopError):
            build(path, DOCUMENTS, **options)


PLACES: dict[str, tuple[tuple[Any, str], int]] = {
    "first document": ((module.SpoolWriter, "append"), 1),
    "second batch": ((module.SpoolWriter, "append"), 2),
    "last batch": ((module.SpoolWriter, "append"), 3),
    "end of the spool": ((module.SpoolWriter, "close"), 1),
    "training": ((IvfStage, "train"), 1),
    "assigning": ((module.arrange, "assign"), 1),
    "measuring": ((module.arrange, "tune"), 1),
    "first records": ((module.SegmentWriter, "append"), 1),
    "some records": ((module.SegmentWriter, "append"), 30),
    "first data file": ((module.SegmentWriter, "finish_segment"), 1),
    "third data file": ((module.SegmentWriter, "finish_segment"), 3),
    "texts": ((part_writer, "write_texts"), 1),
    "metadata": ((part_writer, "save_safetensors"), 1),
    "manifest": ((publish, "write_manifest"), 1),
}


PROJECTED = ["training", "measuring", "third data file"]


@pytest.mark.parametrize(
    ("place", "pca"),
    some([*((place, None) for place in PLACES), *((place, 4) for place in PROJECTED)], 2),
)
def test_interrupted_anywhere(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    small_segments: Callable[[int, int], None],
    place: str,
    pca: int | None,
) -> None:
    """Over a published store: that one stays as it was; the same call then goes on, and leaves
    nothing behind."""
    build(folder / "s", DOCUMENTS[:90])
    small_segments(20_000, 4096)
    before = open_descriptors()
    interrupt(folder / "s", monkeypatch, *PLACES[place], replace=True, pca=pca)
    assert open_descriptors() <= before
    check_store(folder / "s", DOCUMENTS[:90])
    report = build(folder / "s", iter(DOCUMENTS), replace=True, pca=pca)
    assert report.resumed_documents == {
        "first document": 0,
        "second batch": 256,
        "last batch": 512,
    }.get(place, 700)
    assert leftovers(folder / "s") == {"gen-000002"}
    with espnx.open(folder / "s") as index:
        assert index.store.verify() == 700
        assert len(index.store.segments) > 4
        if pca is None:
            assert_ranks_as_written(index, DOCUMENTS)
        build(folder / "clean", DOCUMENTS, pca=pca)
        with espnx.open(folder / "clean") as clean:
            for query in queries(2):
                options = {"k": EVERYTHING, "candidates": EVERYTHING, "nprobe": EVERYTHING}
                assert index.search(query, **options).hits == clean.search(query, **options).hits
    assert open_descriptors() <= before


def test_finished_data_files_are_not_written_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small_segments: Callable[[int, int], None]
) -> None:
    small_segments(20_000, 4096)
    interrupt(folder / "s", monkeypatch, *PLACES["third data file"])

    def written() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in folder.glob("s/gen-*/segment-*")}

    before = written()
    build(folder / "s", DOCUMENTS)
    assert len(before) == 3
    assert [name for name, when in sorted(before.items()) if written()[name] == when] == [
        "segment-00000.bin",
        "segment-00001.bin",
    ]


def test_restart_discards_everything(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small_segments: Callable[[int, int], None]
) -> None:
    small_segments(20_000, 4096)
    directories = [folder / "a", folder / "b"]
    interrupt(folder / "s", monkeypatch, *PLACES["third data file"], directories=directories)
    assert len(list(folder.glob("[ab]/espnx-*"))) == 2
    report = build(folder / "s", DOCUMENTS[:100], restart=True, directories=directories)
    assert report.resumed_documents == 0
    check_store(folder / "s", DOCUMENTS[:100])
    with espnx.open(folder / "s") as index:
        used = {Path(segment.path).parent for segment in index.store.segments}
    assert set(folder.glob("[ab]/espnx-*/gen-*")) == used, (
        "the data of the discarded build is still there"
    )
    assert len(list(folder.glob("[ab]/espnx-*"))) == 2


def test_resumed_from_another_directory(
    folder: Path, monkeypatch: pytest.MonkeyPatch, small_segments: Callable[[int, int], None]
) -> None:
    small_segments(20_000, 4096)
    monkeypatch.chdir(folder)
    interrupt(Path("s"), monkeypatch, *PLACES["third data file"], directories=["data"])
    monkeypatch.chdir("/")
    assert build(folder / "s", DOCUMENTS, directories=[folder / "data"]).resumed_documents == 700
    check_store(folder / "s", DOCUMENTS)


def test_published_but_not_tidied_up(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed right after publication: the state of that build must not become the next one's, which
    would write into the live files."""
    build(folder / "s", DOCUMENTS[:50])
    with monkeypatch.context() as patch:
        patch.setattr(ownership, "remove_directory", lambda *args: None)
        build(folder / "s", DOCUMENTS[:80], replace=True)
    assert leftovers(folder / "s") == {"building", "gen-000001", "gen-000002"}
    with espnx.open(folder / "s") as reader:
        with pytest.raises(errors.InvalidInputError, match="already holds a store"):
            build(folder / "s", DOCUMENTS)
        report = build(folder / "s", DOCUMENTS, replace=True)
        assert (report.generation, report.resumed_documents) == (3, 0)
        assert_ranks_as_written(reader, DOCUMENTS[:80])
    assert leftovers(folder / "s") == {"gen-000003"}
    check_store(folder / "s", DOCUMENTS)


def test_killed_while_discarding(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a restart had removed by then, the directory is still recognised as ours."""
    interrupt(folder / "s", monkeypatch, *PLACES["first records"])
    removed: list[str] = []
    original = ownership.remove_directory

    def stop_second(path: Any, *args: Any, **options: Any) -> None:
        if removed:
            raise StopError
        removed.append(os.fspath(path))
        original(path, *args, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ownership, "remove_directory", stop_second)
        with pytest.raises(StopError):
            build(folder / "s", DOCUMENTS, restart=True)
    build(folder / "s", DOCUMENTS, restart=True)
    check_store(folder / "s", DOCUMENTS)


def test_a_strangers_directory_is_left_alone(folder: Path) -> None:
    (folder / "thesis.tex").write_text("x")
    with pytest.raises(errors.InvalidInputError, match=r"not empty and no store; got thesis\.tex"):
        build(folder, DOCUMENTS[:5])
    with pytest.raises(errors.InvalidInputError, match="not empty and no store"):
        build(folder, DOCUMENTS[:5], replace=True, restart=True)
    assert (folder / "thesis.tex").read_text() == "x"
    with pytest.raises(errors.InvalidInputError, match=r"thesis\.tex; got a file"):
        build(folder / "thesis.tex", DOCUMENTS[:5])


def test_a_store_is_not_replaced_unasked(folder: Path) -> None:
    build(folder / "s", DOCUMENTS[:50])
    with pytest.raises(
        errors.InvalidInputError, match=r"already holds a store.*add to it.*replace"
    ):
        build(folder / "s", DOCUMENTS)
    check_store(folder / "s", DOCUMENTS[:50])
    manifest = folder / "s" / "MANIFEST.json"
    manifest.write_text(manifest.read_text()[:-20])
    with pytest.raises(errors.InvalidInputError, match="already holds a store"):
        build(folder / "s", DOCUMENTS)
    build(folder / "s", DOCUMENTS[:60], replace=True)
    check_store(folder / "s", DOCUMENTS[:60])


def test_nothing_published(folder: Path) -> None:
    for path in (folder, folder / "nowhere"):
        with pytest.raises(errors.StoreNotFoundError, match="no published store") as caught:
            espnx.open(path)
        assert str(path) in str(caught.value)


def test_a_reader_keeps_its_version(
    folder: Path, small_segments: Callable[[int, int], None]
) -> None:
    """Opened before, never used: after the replacement it still has its files, texts included."""
    small_segments(8192, 4096)
    build(folder / "s", DOCUMENTS[:200], directories=[folder / "data"])
    with espnx.open(folder / "s") as reader:
        build(folder / "s", DOCUMENTS[200:350], replace=True)
        build(folder / "s", DOCUMENTS[350:], replace=True)
        assert_ranks_as_written(reader, DOCUMENTS[:200])
    check_store(folder / "s", DOCUMENTS[350:])
    assert not list(folder.glob("data/*"))


def test_opened_while_being_replaced(folder: Path) -> None:
    """Whoever opens while generations change gets one of them, whole."""
    build(folder / "s", DOCUMENTS[:60])
    stop, failures = threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            try:
                with espnx.open(folder / "s") as index:
                    result = index.search(
                        queries(1)[0], k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING
                    )
                    assert len(result.hits) in (60, 61)
            except (errors.EspnxError, AssertionError) as error:
                failures.append(error)

    threads = [threading.Thread(target=read) for _ in range(2)]
    for thread in threads:
        thread.start()
    for turn in range(8):
        build(folder / "s", DOCUMENTS[: 60 + turn % 2], replace=True, nlist=1)
    stop.set()
    for thread in threads:
        thread.join()
    assert not failures


def test_a_second_writer_is_told(folder: Path) -> None:
    def documents() -> Iterator[espnx.Document]:
        yield from DOCUMENTS[:10]
        for write in (
            lambda: build(folder / "s", DOCUMENTS),
            lambda: in_child(lambda: second(folder / "s")),
        ):
            with pytest.raises((errors.StoreBusyError, AssertionError)) as caught:
                write()
            assert "StoreBusyError" in repr(caught.value) or isinstance(
                caught.value, errors.StoreBusyError
            )
            assert f"process {os.getpid()}" in str(caught.value)
        yield from DOCUMENTS[10:20]

    build(folder / "s", documents())
    check_store(folder / "s", DOCUMENTS[:20])


def second(path: Path) -> None:
    with DirectoryLock(path):
        pass


def test_a_lock_dies_with_its_process(folder: Path) -> None:
    def hold_and_die() -> None:
        DirectoryLock(folder).__enter__()
        os._exit(0)

    with pytest.raises(AssertionError, match="crashed"):
        in_child(hold_and_die)
    with DirectoryLock(folder), pytest.raises(errors.StoreBusyError), DirectoryLock(folder):
        pass
    with DirectoryLock(folder):
        pass


#: What STATE.json says of a build that was asked for nothing.
_LATER = {
    "kind": "'build'", "format": "'fp16'", "pca": "None", "cls_weight": "1.0", "coarse": "None",
    "centroids": "None", "first_stage_code": "'sq8'", "nlist": "None",
}  # fmt: skip
_SPOOLED = {
    "encoder": "None",
    "d_cls": "16",
    "dim": "8",
    "spool": "'fp16'",
    "codebook": "None",
    "trained": "None",
    "first_stages": "'ivf'",
    "language": "'english'",
    "sparse_encoder": "None",
    "pooling": "None",
}


@pytest.mark.parametrize(
    ("options", "spooled", "later"),
    [
        ({}, {}, {}),
        (
            {"first_stages": {"ivf": {"code": "flat", "nlist": 5}}},
            {},
            {"first_stage_code": "'flat'", "nlist": "5"},
        ),
        (
            {"first_stages": "graph", "nlist": 3, "cls_weight": 2},
            {"first_stages": "'graph'"},
            {"nlist": "3", "cls_weight": "2"},
        ),
        ({"language": "german"}, {"language": "'german'"}, {}),
        (
            {"first_stages": ["ivf", "bm25"], "language": "none", "pooling": "mean"},
            {"first_stages": "'ivf bm25'", "language": "'none'", "pooling": "'mean'"},
            {},
        ),
        ({"coarse": "bit1", "pca": 4}, {"spool": "'fp32'"}, {"coarse": "'bit1'", "pca": "4"}),
    ],
    ids=repr,
)
def test_what_tells_builds_apart(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    spooled: dict[str, str],
    later: dict[str, str],
) -> None:
    """In these words, whatever the options look like in a program: an interrupted build may be of
    another version of espnx."""

    def stop(*args: Any) -> None:
        raise StopError

    monkeypatch.setattr(module.arrange, "assign", stop)
    with pytest.raises(StopError):
        espnx.build(folder / "s", DOCUMENTS[:60], dims=(D_CLS, DIM), **options)
    state = json.loads((folder / "s" / "building" / "STATE.json").read_bytes().rpartition(b"\n")[0])
    assert state["settings"] == {
        "spooled": _SPOOLED | spooled,
        "later": _LATER | later,
        "directories": [],
    }
