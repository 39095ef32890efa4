"""Add, delete and compact when things go wrong: kill -9, failing and lying devices, full disks,
damaged files, the caller's own exceptions.

After each there is the old version or the new one, whole, and the next change works. Scores do not
depend on how a store came about, so what any version must rank is known exactly, from one store
that holds every document there ever is.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.build.changes import adding
from espnx.retrieval.build.changes import compact as compacting
from espnx.retrieval.versions import publish
from espnx.storage import NativeEngine
from tests.forks import Forks
from tests.kills import killed, moments
from tests.retrieval.build.test_faults import KINDS, Impatient, Kind, check_error
from tests.retrieval.common import (
    EVERYTHING,
    assert_ranking,
    exact_scores,
    memory_folder,
    section_places,
    toy_encoder,
)
from tests.retrieval.store.test_damage import BLUNT, assert_names
from tests.retrieval.versions.test_changes import assert_tidy
from tests.storage.common import open_descriptors, until
from tests.storage.machine import fill, mounted
from tests.sweeps import in_steps

ENCODER = toy_encoder()
ALL = [(f"doc-{n}", " ".join(f"word{n * k % 23}" for k in range(1, 2 + n % 6))) for n in range(50)]
BASE = {identifier for identifier, _ in ALL[:30]} - {"doc-3", "doc-25"}
QUERY = ENCODER.encode_queries(["word1 word6 word22 word0"])[0]

CHANGES: dict[str, Callable[..., object]] = {
    "add": lambda path, **options: espnx.add(path, iter(ALL[30:40]), ENCODER, **options),
    "delete": lambda path, **options: espnx.delete(path, ["doc-4", "doc-26"], **options),
    "compact": lambda path, **options: espnx.compact(path, **options),
}
AFTER = {
    "add": BASE | {identifier for identifier, _ in ALL[30:40]},
    "delete": BASE - {"doc-4", "doc-26"},
    "compact": BASE,
}
SCORES: dict[str, float] = {}


def found(path: Path, engine: NativeEngine | str = "auto") -> tuple[int, dict[Any, float]]:
    """Generation, and score by id, of a store that verifies and whose texts are right."""
    with espnx.open(path, engine=engine) as index:
        hits = index.search(QUERY, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING).hits
        assert index.store.verify() == index.store.count == len(hits)
        assert [hit.id for hit in hits] == [
            hit.id
            for hit in sorted(hits, key=lambda hit: (-hit.score, isinstance(hit.id, str), hit.id))
        ]
        assert all(hit.text == dict(ALL)[str(hit.id)] for hit in hits)
        return index.store.manifest.generation, {hit.id: hit.score for hit in hits}


def right(alive: Iterable[str]) -> dict[Any, float]:
    return {identifier: SCORES[identifier] for identifier in alive}


def check(path: Path, alive: Iterable[str], engine: NativeEngine | str = "auto") -> None:
    assert found(path, engine)[1] == right(alive)


def settled(path: Path, name: str, engine: NativeEngine | str = "auto") -> bool:
    """Whether the change was published: generation 4 and what it should hold, or generation 3 and
    what there was."""
    generation, scores = found(path, engine)
    assert (generation, scores) in ((3, right(BASE)), (4, right(AFTER[name])))
    return generation == 4


def go_on(path: Path, name: str, published: bool, turn: int, engine: NativeEngine) -> None:
    """Other changes work, in any order; the one that failed does too; at the end nothing is left of
    it."""
    alive = set(AFTER[name] if published else BASE)
    for step in range(3 if turn % 2 else 1):
        if (step + turn) % 3 == 0:
            espnx.add(path, [ALL[45]], ENCODER, engine=engine)
            alive.add("doc-45")
        elif (step + turn) % 3 == 1:
            espnx.delete(path, ["doc-7"], engine=engine)
            alive.remove("doc-7")
        else:
            espnx.compact(path, engine=engine)
        if step == turn % 2:
            check(path, alive, engine)
    if not published:
        alive = AFTER[name] - (BASE - alive) | (alive - BASE)
        CHANGES[name](path, engine=engine)
    espnx.compact(path, engine=engine)
    check(path, alive, engine)
    assert_tidy(path)


@pytest.fixture(scope="module")
def known() -> Iterator[Path]:
    """Two parts and two deleted documents, generation 3."""
    with memory_folder() as folder:
        espnx.build(folder / "all", ALL, ENCODER, nlist=3, first_stage_code="flat")
        with espnx.open(folder / "all") as index:
            hits = index.search(QUERY, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING).hits
        written = [
            espnx.Document(i, text, vectors)
            for (i, text), vectors in zip(
                ALL, ENCODER.encode_documents([t for _, t in ALL]), strict=True
            )
        ]
        assert_ranking(hits, *exact_scores(written, QUERY, 1.0, "fp16"))
        SCORES.update({str(hit.id): hit.score for hit in hits})
        path = folder / "known"
        espnx.build(path, ALL[:20], ENCODER, nlist=2, first_stage_code="flat")
        espnx.add(path, ALL[20:30], ENCODER)
        espnx.delete(path, ["doc-3", "doc-25"])
        assert not settled(path, "compact")
        yield path


@pytest.fixture(scope="module")
def sound() -> Iterator[NativeEngine]:
    with NativeEngine() as opened:
        yield opened


def words(folder: Path, path: Path, name: str) -> dict[str, Any]:
    """The change as a job for another process, by the command line."""
    lines = folder / "corpus.jsonl"
    lines.write_text(
        "\n".join(json.dumps({"id": identifier, "text": text}) for identifier, text in ALL[30:40])
    )
    argv = {
        "add": ["--corpus", str(lines), "--encoder", "toy"],
        "delete": ["doc-4", "doc-26"],
        "compact": list[str](),
    }[name]
    return {
        "argv": ["index", name, str(path), *argv],
        "stdout": folder / "out",
        "stderr": folder / "err",
    }


@in_steps(3)
@pytest.mark.parametrize("name", CHANGES)
def test_killed_at_every_change(
    folder: Path, known: Path, processes: Forks, sound: NativeEngine, name: str, step: int
) -> None:
    """In each state that the files pass through, about ten for a deletion and twenty for a
    compaction, or in every third one."""
    shutil.copytree(known, folder / "noted")
    reached = moments(
        processes, folder / "moments", [folder / "noted"], **words(folder, folder / "noted", name)
    )
    outcomes = []
    for turn, moment in enumerate([*reached[:-2:step], *reached[-2:]]):
        path = folder / f"{moment}"
        shutil.copytree(known, path)
        assert killed(processes, moment, **words(folder, path, name)), (folder / "err").read_text()
        outcomes.append(settled(path, name, sound))
        go_on(path, name, outcomes[-1], turn, sound)
        shutil.rmtree(path)
    assert outcomes == sorted(outcomes), "published, and then not"
    assert outcomes.count(False) * step >= 8, "too few moments to mean anything"
    assert outcomes.count(True) >= 1


@pytest.mark.parametrize("name", CHANGES)
def test_killed_at_random(
    folder: Path, known: Path, processes: Forks, sound: NativeEngine, name: str
) -> None:
    rng, kills = random.Random(name), 0
    shutil.copytree(known, folder / "clean")
    begun = time.monotonic()
    assert processes.wait(processes.start(**words(folder, folder / "clean", name))) == 0
    limit_s = time.monotonic() - begun
    for turn in range(30):
        path = folder / f"{turn}"
        shutil.copytree(known, path)
        child = processes.start(**words(folder, path, name))
        time.sleep(rng.uniform(0, limit_s))
        os.kill(child, signal.SIGKILL)
        code = processes.wait(child)
        assert code in (0, -signal.SIGKILL)
        kills += code != 0
        limit_s *= 0.6 if code == 0 else 1
        go_on(path, name, settled(path, name, sound), turn, sound)
        if kills == 3:
            break
    assert kills == 3


def one_change(
    path: Path, known: Path, name: str, kind: Kind, nth: int, sound: NativeEngine
) -> tuple[bool, int]:
    """Whether it ended well, and how many faults it saw."""
    shutil.copytree(known, path)
    engine, ended_well, said = Impatient(kind.rule(nth), kind.limit_s), True, ""
    try:
        CHANGES[name](path, engine=engine)
    except errors.StorageError as error:
        check_error(error, path)
        ended_well, said = False, str(error)
    stats = engine.stats()
    assert ended_well or (stats.fault_hits > 0 and not kind.harmless)
    assert until(lambda: (engine.stats().in_flight, engine.stats().quarantined_buffers) == (0, 0))
    engine.close()
    try:
        published = settled(path, name, sound)
    except errors.StorageError as error:
        # What a device lost or bent while it said that all was well is found, and is the new
        # version's alone.
        assert kind.lies
        assert ended_well
        check_error(error, path)
        return ended_well, stats.fault_hits
    assert published or not ended_well
    assert ("it is published" in said) == (published and not ended_well)
    if not published:
        assert_tidy(path)
        CHANGES[name](path, engine=sound)
        check(path, AFTER[name], sound)
        assert_tidy(path)
    elif not ended_well:  # the last flush failed: published all the same, and said to be in doubt
        espnx.compact(path, engine=sound)
        check(path, AFTER[name], sound)
        assert_tidy(path)
    return ended_well, stats.fault_hits


@pytest.mark.sampled(1)
@in_steps(2)
@pytest.mark.parametrize("name", CHANGES)
@pytest.mark.parametrize("fault", KINDS)
def test_every_call_of_a_change(
    folder: Path, known: Path, sound: NativeEngine, name: str, fault: str, step: int
) -> None:
    """Every fourth in turn for an error (of an addition; every third of the rest), and every
    eleventh or seventh for the other kinds."""
    kind, single = KINDS[fault], fault == "EIO once"
    step *= (4 if single else 11) if name == "add" else 3 if single else 7
    before, outcomes = open_descriptors(), []
    for nth in range(1, 400, step):
        ended_well, hits = one_change(folder / f"{nth}", known, name, kind, nth, sound)
        shutil.rmtree(folder / f"{nth}")
        outcomes.append(ended_well)
        if hits == 0:
            break
    assert (hits, ended_well) == (0, True), "the sweep never came to a run without a fault"
    assert len(outcomes) * step > 6
    assert all(outcomes) if kind.harmless else not all(outcomes)
    assert until(lambda: len(open_descriptors()) <= len(before)), open_descriptors() - before


# 240 kB of records
CORPUS = [(f"doc-{n}", " ".join(f"word{n * k % 97}" for k in range(1, 90))) for n in range(160)]


@pytest.fixture(scope="module")
def half() -> Iterator[Path]:
    """A store of half the corpus, less three documents."""
    with memory_folder() as folder:
        espnx.build(folder / "s", CORPUS[:80], ENCODER, nlist=2, first_stage_code="flat")
        espnx.delete(folder / "s", ["doc-0", "doc-64", "doc-79"])
        yield folder / "s"


@contextlib.contextmanager
def small_disk(folder: Path, half: Path) -> Iterator[tuple[Path, dict[str, float]]]:
    """That store on a file system of 20 MB; and what it ranks."""
    with mounted("tmpfs", "espnx", folder / "tmpfs", "size=20m") as where:
        shutil.copytree(half, where / "s")
        yield where, scores_of(where / "s")


def scores_of(path: Path) -> dict[Any, float]:
    with espnx.open(path) as index:
        hits = index.search(QUERY, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING).hits
        assert index.store.verify() == len(hits)
        return {hit.id: hit.score for hit in hits}


GROWTH: dict[str, Callable[[Path], object]] = {
    "add": lambda path: espnx.add(path, iter(CORPUS[80:]), ENCODER),
    "delete": lambda path: espnx.delete(path, ["doc-1"]),
    "compact": lambda path: espnx.compact(path),
}
GROWN = {"add": 157, "delete": 76, "compact": 77}


def disk_is_full(where: Path, name: str, before: dict[str, float]) -> None:
    """Said with bytes needed and free; the store stays; once there is room the change works, and
    leaves nothing but itself."""
    path = where / "s"
    with pytest.raises(errors.DiskFullError) as caught:
        GROWTH[name](path)
    assert str(where) in str(caught.value)
    assert caught.value.needed_bytes > 0
    assert caught.value.free_bytes >= 0
    assert scores_of(path) == before
    (where / "ballast").unlink()
    GROWTH[name](path)
    after = scores_of(path)
    assert len(after) == GROWN[name]
    assert all(after.get(key, score) == score for key, score in before.items())
    assert_tidy(path)


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "room"),
    [
        ("add", 0),
        ("add", 40 << 10),
        ("add", 200 << 10),
        ("delete", 0),
        ("compact", 0),
        ("compact", 60 << 10),
    ],
)
def test_a_full_disk(tmp_path: Path, half: Path, name: str, room: int) -> None:
    with small_disk(tmp_path, half) as (where, before):
        fill(where, room)
        disk_is_full(where, name, before)


LATER = [
    ("add", adding, "checked_order"),
    ("add", adding, "finish_part"),
    ("compact", compacting, "merged_order"),
    ("compact", compacting, "finish_part"),
    *[(name, publish, "write_manifest") for name in CHANGES],
]


@pytest.mark.root
@pytest.mark.parametrize(
    ("name", "owner", "place"), LATER, ids=[f"{name}-{place}" for name, _, place in LATER]
)
def test_a_disk_that_fills_up_later(
    tmp_path: Path, half: Path, monkeypatch: pytest.MonkeyPatch, name: str, owner: Any, place: str
) -> None:
    with small_disk(tmp_path, half) as (where, before):
        original = getattr(owner, place)

        def take(*args: Any, **options: Any) -> Any:
            if not (where / "ballast").exists():
                fill(where, 0)
            return original(*args, **options)

        with monkeypatch.context() as patch:
            patch.setattr(owner, place, take)
            with pytest.raises(errors.DiskFullError) as caught:
                GROWTH[name](where / "s")
            assert str(where) in str(caught.value)
        disk_is_full(where, name, before)


def bitmap(path: Path) -> Path:
    return next(path.glob("gen-*/deleted.bin"))


@pytest.fixture
def victim(known: Path, folder: Path) -> Path:
    shutil.copytree(known, folder / "s")
    return folder / "s"


def refused(path: Path, damaged: Path, kinds: tuple[type[errors.StorageError], ...]) -> None:
    """Neither opened nor changed: the error names the file, and the manifest stays."""
    manifest = (path / "MANIFEST.json").read_bytes()
    attempts: list[Callable[[Path], object]] = [found, *CHANGES.values()]
    for attempt in attempts:
        with pytest.raises(kinds) as caught:
            attempt(path)
        assert_names(caught.value, damaged)
        assert (path / "MANIFEST.json").read_bytes() == manifest


@pytest.mark.parametrize("damage", BLUNT)
def test_a_damaged_bitmap(victim: Path, sound: NativeEngine, damage: str) -> None:
    path = bitmap(victim)
    whole = path.read_bytes()
    BLUNT[damage](path)
    kinds = {"missing": (errors.FormatError,), "a directory": (errors.StorageError,)}
    refused(victim, path, kinds.get(damage, (errors.ChecksumError, errors.TruncatedFileError)))
    path.rmdir() if path.is_dir() else path.unlink(missing_ok=True)
    path.write_bytes(whole)
    go_on(victim, "delete", False, 0, sound)


def test_a_bit_of_the_bitmap(victim: Path, sound: NativeEngine) -> None:
    """Each of them, set or not: a deleted document does not come back, and none goes."""
    path = bitmap(victim)
    whole = path.read_bytes()
    for bit in range(8 * len(whole)):
        bent = bytearray(whole)
        bent[bit // 8] ^= 1 << bit % 8
        path.write_bytes(bent)
        with pytest.raises(errors.ChecksumError) as caught:
            found(victim, sound)
        assert_names(caught.value, path)
    path.write_bytes(whole)
    check(victim, BASE, sound)


def test_an_older_bitmap(victim: Path) -> None:
    """Whole and of this store, but of the version before: more is deleted now."""
    older = bitmap(victim).read_bytes()
    espnx.delete(victim, ["doc-9"])
    bitmap(victim).write_bytes(older)
    refused(victim, bitmap(victim), (errors.ChecksumError,))


def test_damage_is_not_compacted(victim: Path, sound: NativeEngine) -> None:
    """A record's bytes are checked before they get a checksum of the new part; so are texts and
    lists. Deleted ones may be anything."""
    with espnx.open(victim, engine=sound) as index:
        numbers = index.store.texts.numbers(["doc-2", "doc-27", "doc-8"])
        segment, offset, size = index.store.full.locate(numbers)
        files = index.store.full.files
        places = [
            (Path(files[int(s)].path), int(o) + int(n) - 20)
            for s, o, n in zip(segment, offset, size, strict=True)
        ]
    added, base = (
        section_places(victim / name / "part.bin") for name in ("gen-000002", "gen-000001")
    )
    sections = [
        added["stage.codes"],
        added["rows"],
        added["meta"],
        base["meta"],
        base["model"],
        base["stage.codes"],
    ]
    for path, at in [
        *places[:2],
        *((each.path, each.offset_bytes + each.size_bytes - 1) for each in sections),
    ]:
        whole = path.read_bytes()
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
        manifest = (victim / "MANIFEST.json").read_bytes()
        with pytest.raises(errors.ChecksumError) as caught:
            espnx.compact(victim, engine=sound)
        assert_names(caught.value, path)
        assert (victim / "MANIFEST.json").read_bytes() == manifest
        path.write_bytes(whole)
    path, at = places[2]
    espnx.delete(victim, ["doc-8"])
    whole = path.read_bytes()
    path.write_bytes(whole[:at] + bytes([whole[at] ^ 16]) + whole[at + 1 :])
    espnx.compact(victim)
    check(victim, BASE - {"doc-8"}, sound)
    assert_tidy(victim)


class Own(BaseException):
    """Of the caller, and no Exception even."""


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", [Own, KeyError])
@pytest.mark.parametrize("place", ["iterator", "encoder"])
@pytest.mark.parametrize("after", [0, 1, 300])
def test_an_exception_of_the_callers(
    folder: Path, kind: type[BaseException], place: str, after: int
) -> None:
    """It arrives as it is; store and ranking stay, and the same addition works without it."""
    path, whole, calls = folder / "s", ENCODER, 0

    def encode(texts: list[str]) -> Any:
        nonlocal calls
        calls += 1
        if place == "encoder" and calls == (1 if after < 256 else 2):
            raise kind("caller's own")
        return [(vectors.cls, vectors.tokens) for vectors in whole.encode_documents(texts)]

    def documents() -> Iterator[tuple[str, str]]:
        for number in range(310):
            if place == "iterator" and number == after:
                raise kind("caller's own")
            yield f"new {number}", f"one of {number % 7}"

    espnx.build(
        path,
        [(f"old {n}", f"some words {n % 5}") for n in range(20)],
        whole,
        nlist=2,
        first_stage_code="flat",
    )
    with espnx.open(path, encoder=whole) as index:
        right = index.search("words of 3", k=30, nprobe=EVERYTHING).hits
        with pytest.raises(kind, match="caller's own"):
            espnx.add(
                path,
                documents(),
                espnx.FunctionEncoder(encode, whole.name, d_cls=whole.d_cls, dim=whole.dim),
            )
        assert_tidy(path)
        assert index.search("words of 3", k=30, nprobe=EVERYTHING).hits == right
    with espnx.open(path, encoder=whole) as index:
        assert index.store.verify() == 20
        assert index.search("words of 3", k=30, nprobe=EVERYTHING).hits == right
    espnx.add(path, [(f"new {number}", f"one of {number % 7}") for number in range(310)], whole)
    with espnx.open(path, encoder=whole) as index:
        assert index.store.verify() == 330
        assert {hit.id for hit in index.search("one of 3", k=20, nprobe=EVERYTHING).hits} <= {
            f"new {n}" for n in range(3, 310, 7)
        }
    assert_tidy(path)


def test_another_encoder(folder: Path) -> None:
    whole = ENCODER
    espnx.build(folder / "s", [("a", "one"), ("b", "two")], whole, nlist=1, first_stage_code="flat")
    other = espnx.FunctionEncoder(lambda texts: [], "other@1", d_cls=whole.d_cls, dim=whole.dim)
    with pytest.raises(errors.InvalidInputError, match="another encoder"):
        espnx.add(folder / "s", [("c", "three")], other)
    with pytest.raises(errors.InvalidInputError, match="0 results"):
        espnx.add(
            folder / "s",
            [("c", "three")],
            espnx.FunctionEncoder(lambda texts: [], whole.name, d_cls=whole.d_cls, dim=whole.dim),
        )
    assert espnx.add(folder / "s", [("c", "three")], whole).documents == 1
    assert_tidy(folder / "s")
