"""Parts: what an addition writes and opens, when parts become one, and that whatever was done ranks
as the documents that are left."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.retrieval.store.manifest import parse_manifest
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine
from espnx.storage.documents import rows as part_texts
from espnx.storage.levels import PARTS_PER_LEVEL, groups_to_merge, level
from tests.retrieval.common import assert_ranks_as_written, build, check_store, corpus

DOCUMENTS = corpus(700)


def contents(path: Path) -> object:
    return parse_manifest(json.loads((path / "MANIFEST.json").read_text()), str(path))


def counts_of(path: Path) -> list[int]:
    """Records of the parts that were added, oldest first."""
    return [part["count"] for part in json.loads((path / "MANIFEST.json").read_text())["parts"]][1:]


def assert_few(counts: list[int]) -> None:
    """Levels descend, and there are at most eight parts of one."""
    levels = [level(count) for count in counts]
    assert levels == sorted(levels, reverse=True)
    assert all(levels.count(each) <= PARTS_PER_LEVEL for each in levels)


@pytest.mark.parametrize(
    ("counts", "groups"),
    [
        ([], []),
        ([5], []),
        ([1] * 8, []),
        ([1] * 9, [range(9)]),
        ([64, *[8] * 8, *[1] * 9], [range(1, 18)]),
        ([1, 9], [range(2)]),
        ([1, 1, 70, 1], [range(3)]),
        ([100, 20, 3], []),
    ],
)
def test_what_is_merged(counts: list[int], groups: list[range]) -> None:
    assert groups_to_merge(counts) == groups


@pytest.mark.parametrize("seed", range(5))
def test_each_document_is_copied_once_a_level(seed: int) -> None:
    rng, counts, copied, added = random.Random(seed), list[int](), 0, 0
    for _ in range(3000):
        counts.append(rng.choice([1, 1, 1, 2, 7, 40, 300]))
        added += counts[-1]
        for group in reversed(groups_to_merge(counts)):
            merged = sum(counts[group.start : group.stop])
            copied += merged
            counts[group.start : group.stop] = [merged]
        assert_few(counts)
    assert copied <= added * (level(added) + 1)


def directory_bytes(path: Path) -> int:
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def test_what_one_document_costs(folder: Path) -> None:
    """Bytes that an addition leaves, and descriptors that an open index takes, do not grow with the
    store or the number of additions."""
    path = folder / "s"
    build(path, DOCUMENTS[:500])
    with NativeEngine() as engine:
        for number, document in enumerate(DOCUMENTS[500:600]):
            report = espnx.add(path, [document], engine=engine)
            assert_few(counts_of(path))
            manifest_bytes = (path / "MANIFEST.json").stat().st_size
            if not report.merged:
                assert report.record_bytes + manifest_bytes <= 64 << 10
            assert len(counts_of(path)) == report.parts - 1
            assert report.documents == 1, number
        before = len(os.listdir("/proc/self/fd"))
        with EmbeddingStore(path, engine) as store:
            assert len(os.listdir("/proc/self/fd")) - before == len(store.parts) + 1, (
                "a file for each part, and the base's records"
            )
    check_store(path, DOCUMENTS[:600])
    assert not report.compacting_pays
    espnx.delete(path, [str(document.id) for document in DOCUMENTS[:200]])
    assert espnx.add(path, DOCUMENTS[600:601]).compacting_pays


@pytest.mark.parametrize(("seed", "tier"), [(0, None), (1, None), (2, "int8")])
def test_random_changes(folder: Path, seed: int, tier: str | None) -> None:
    """Hundreds of documents added, replaced and deleted in any order: a store of many levels,
    always that of its live documents."""
    rng, path = random.Random(seed), folder / "s"
    alive = {str(document.id): document for document in DOCUMENTS[:20]}
    build(path, alive.values(), coarse=tier)
    fresh = iter(DOCUMENTS[20:])
    with NativeEngine() as engine:
        for turn in range(40):
            what = rng.random()
            if what < 0.6:
                new = [
                    each
                    for _, each in zip(range(rng.choice([1, 1, 1, 3, 12, 40])), fresh, strict=False)
                ]
                espnx.add(path, iter(new), engine=engine)
                alive |= {str(document.id): document for document in new}
            elif what < 0.8 and alive:
                chosen = rng.sample(sorted(alive), min(len(alive), rng.choice([1, 5])))
                others = rng.sample(DOCUMENTS, len(chosen))
                again = [
                    espnx.Document(i, f"turn {turn}", each.vectors)
                    for i, each in zip(chosen, others, strict=True)
                ]
                report = espnx.add(path, again, replace=True, engine=engine)
                assert (report.documents, report.replaced) == (len(again), len(again))
                alive |= {str(document.id): document for document in again}
            elif what < 0.95 and alive:
                gone = rng.sample(sorted(alive), min(len(alive), rng.choice([1, 3, 30])))
                assert espnx.delete(path, gone, engine=engine) == len(gone)
                for identifier in gone:
                    del alive[identifier]
            else:
                espnx.compact(path, engine=engine)
            assert_few(counts_of(path))
            if turn % 10 == 9:
                check(path, alive.values(), engine)
        check(path, alive.values(), engine)
        espnx.compact(path, engine=engine)
        check(path, alive.values(), engine)


def check(path: Path, documents: Iterable[espnx.Document], engine: NativeEngine) -> None:
    """The store verifies, ranks as these documents say, and finds each by its id and nothing
    else."""
    known = list(documents)
    with espnx.open(path, engine=engine) as index:
        assert index.store.verify() == len(known)
        assert_ranks_as_written(index, known)
        numbers = index.store.texts.numbers([document.id for document in known])
        assert len(set(numbers.tolist())) == len(known)
        assert [text for _, text in index.store.texts.get(numbers.tolist())] == [
            document.text for document in known
        ]
        others = sorted(
            {str(document.id) for document in DOCUMENTS} - {str(document.id) for document in known}
        )
        assert (index.store.texts.numbers([*others, 7, "nobody"]) == -1).all()


def test_an_id_twice_in_one_addition(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the first one is by then: in the batch, or in a part that this addition has written.
    Nothing is published."""
    build(folder / "s", DOCUMENTS[:20])
    manifest = (folder / "s" / "MANIFEST.json").read_bytes()
    for replace in (False, True):
        for again in (DOCUMENTS[30], DOCUMENTS[399]):
            with pytest.raises(errors.InvalidInputError, match="occurs twice"):
                espnx.add(folder / "s", [*DOCUMENTS[20:400], again], replace=replace)
    assert (folder / "s" / "MANIFEST.json").read_bytes() == manifest


@pytest.mark.parametrize("bits", [0, 1, 4])
def test_ids_of_the_same_hash(folder: Path, monkeypatch: pytest.MonkeyPatch, bits: int) -> None:
    """Ids are compared themselves: with as few as one hash for all of them, over several blocks,
    each is found and no other."""
    whole = part_texts.id_hash
    monkeypatch.setattr(part_texts, "id_hash", lambda identifier: whole(identifier) % 2**bits)
    build(folder / "s", DOCUMENTS[:260])
    espnx.add(folder / "s", DOCUMENTS[260:280])
    with NativeEngine() as engine, EmbeddingStore(folder / "s", engine) as store:
        numbers = store.texts.numbers([document.id for document in DOCUMENTS[:280]])
        assert [identifier for identifier, _ in store.texts.get(numbers.tolist())] == [
            document.id for document in DOCUMENTS[:280]
        ]
        assert store.texts.numbers(["doc-280", 1, ""]).tolist() == [-1, -1, -1]
        assert store.verify() == 280


_UNDER_A_LIMIT = """
import resource, sys
import espnx
from espnx import errors
from tests.retrieval.common import corpus
path, documents = sys.argv[1], corpus(700)
index = espnx.open(path)  # torch and FAISS have opened what they need
index.close()
_, most = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[2]), most))
try:
    espnx.open(path).close()
    print("opened")
except errors.ReadError as error:
    print(error)
espnx.add(path, documents[600:601])
espnx.delete(path, [documents[3].id])
print(espnx.compact(path).documents)
espnx.open(path).close()
"""


def test_few_files_may_be_open(folder: Path, small_segments: object) -> None:
    """What changes a store opens a few of its files at a time: also one of many, where few may be
    open, can be added to and compacted."""
    small_segments(1, 4096)  # type: ignore[operator]
    build(folder / "s", DOCUMENTS[:600], nlist=4)
    with NativeEngine() as engine, EmbeddingStore(folder / "s", engine) as store:
        files = len(store.segments)
    assert files >= 8
    espnx.add(folder / "s", DOCUMENTS[601:620])
    command = [sys.executable, "-c", _UNDER_A_LIMIT, str(folder / "s"), "64"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=True)
    assert done.stdout.splitlines()[-1] == "619"


def test_too_many_files_says_what_helps(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    build(folder / "s", DOCUMENTS[:20])
    original = NativeEngine.open

    def refuse(self: NativeEngine, path: object, *args: object, **options: object) -> object:
        if str(path).endswith(".bin"):
            raise errors.ReadError("cannot open file", path=str(path), errno=24)
        return original(self, path, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(NativeEngine, "open", refuse)
    with pytest.raises(
        errors.ReadError, match=r"Too many open files.*ulimit -n.*espnx index compact"
    ):
        espnx.open(folder / "s")


def test_all_alike(folder: Path) -> None:
    """A thousand times the same vectors, one at a time and many: one list, many parts, every id."""
    vectors = DOCUMENTS[0].vectors
    documents = [espnx.Document(n, "OK", vectors) for n in range(400)]
    build(folder / "s", documents[:50])
    for begin in range(50, 120):
        espnx.add(folder / "s", documents[begin : begin + 1])
    espnx.add(folder / "s", documents[120:])
    with NativeEngine() as engine, EmbeddingStore(folder / "s", engine) as store:
        assert store.verify() == 400
        assert (np.sort(store.texts.numbers(list(range(400)))) >= 0).all()
