"""Builds that were interrupted: the next attempt goes on from the runs that it finds, and what
comes out is the same, byte for byte."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import espnx.postings
from espnx import errors
from espnx.postings import Analyzer, CsrArrays, Postings, estimate_spool
from espnx.storage.lock import LOCK_NAME
from espnx.storage.work import WORK
from tests.forks import Forks
from tests.kills import killed, moments
from tests.postings.common import corpus
from tests.postings.zygote import spooled
from tests.sweeps import in_steps

MEMORY = 1 << 20
RECORDS = corpus(500, seed=1, longest=120)
VECTORS = [
    {term: 0.5 + len(term) + i % 7 for term in set(record)} for i, record in enumerate(RECORDS)
]


def contents(path: Path) -> dict[str, bytes]:
    """All files but the lock."""
    assert not (path / WORK).exists()
    return {each.name: each.read_bytes() for each in path.iterdir() if each.name != LOCK_NAME}


def cut_short(items: Iterable[Any], at: int) -> Iterator[Any]:
    for number, item in enumerate(items):
        if number == at:
            raise KeyboardInterrupt
        yield item


def interrupted(path: Path, at: int, **given: Any) -> None:
    """A build that has come so far. What it was given as a sequence comes as an iterator."""
    [name] = [name for name in ("texts", "terms", "vectors") if name in given]
    with pytest.raises(KeyboardInterrupt):
        Postings.build(path, **{**given, name: cut_short(given[name], at)}, memory_bytes=MEMORY)
    assert (path / WORK).is_dir()


class Told:
    """What a build says: the last number of each phase."""

    def __init__(self) -> None:
        self.last: dict[str, int] = {}

    def __call__(self, what: str, done: int, total: int) -> None:
        self.last[what] = done

    @property
    def kept(self) -> int:
        return self.last.get("records of the attempt before", 0)


def built(path: Path, **given: Any) -> tuple[dict[str, bytes], int]:
    """The files, and how many records an attempt before had left; beside them those of a build at
    once, with the same salt."""
    told = Told()
    Postings.build(path, **given, memory_bytes=MEMORY, progress=told)
    with Postings.open(path) as postings:
        salt = postings.searcher.collection.segments[0].dictionary.salt
    with patch("secrets.randbits", lambda _bits: salt):
        Postings.build(path.with_name(f"{path.name}-at-once"), **given, memory_bytes=MEMORY)
    assert contents(path) == contents(path.with_name(f"{path.name}-at-once"))
    return contents(path), told.kept


@in_steps(12)
def test_killed_at_any_moment_it_goes_on(
    folder: Path, open_forks: Callable[[str], Forks], step: int
) -> None:
    processes = open_forks("tests.postings.zygote")
    spooled(folder / "whole")
    states = moments(
        processes, folder / "note", [folder / "new"], path=folder / "new", what="spooled"
    )
    assert len(states) > 30
    for moment in [*states[:-6:step], *states[-6:]]:
        path = folder / f"at{moment}"
        if not killed(processes, moment, path=path, what="spooled"):
            continue
        if not (path / "MANIFEST.json").exists():
            assert processes.run(path=path, what="spooled") == 0
            assert contents(path) == contents(folder / "whole")
        else:  # it was published, and what is left is of no use
            espnx.postings.add(path, terms=[])
            assert not (path / WORK).exists()


@pytest.mark.parametrize("as_iterator", [False, True])
def test_what_was_sorted_is_not_sorted_again(tmp_path: Path, as_iterator: bool) -> None:
    interrupted(tmp_path / "x", 400, terms=RECORDS)
    told = Told()
    Postings.build(
        tmp_path / "x",
        terms=iter(RECORDS) if as_iterator else RECORDS,
        memory_bytes=MEMORY,
        progress=told,
    )
    assert 100 < told.kept < 400


@pytest.mark.parametrize("at", [250, 400, 499])
def test_texts_and_vectors_go_on_too(tmp_path: Path, at: int) -> None:
    texts = [" ".join(record) for record in RECORDS]
    interrupted(tmp_path / "texts", at, texts=texts)
    assert built(tmp_path / "texts", texts=texts)[1] > 0
    for name, exact in (("impacts", False), ("floats", True)):
        interrupted(tmp_path / name, at, vectors=VECTORS, exact=exact)
        assert built(tmp_path / name, vectors=VECTORS, exact=exact)[1] > 0


def test_rows_go_on_too(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    counts = random.integers(1, 40, 3000)
    indptr = np.concatenate([[0], np.cumsum(counts)])
    indices = np.concatenate([random.choice(500, count, replace=False) for count in counts])
    rows = CsrArrays(indptr, indices, random.random(len(indices)) + 0.01)
    with (
        patch("espnx.postings.build.builder.merge_runs", side_effect=KeyboardInterrupt),
        pytest.raises(KeyboardInterrupt),
    ):
        Postings.build(tmp_path / "x", vectors=rows, memory_bytes=MEMORY)
    assert built(tmp_path / "x", vectors=rows)[1] == len(counts)


@pytest.mark.parametrize("place", [0, 200, 399])
def test_from_the_first_difference_on_all_is_built_again(tmp_path: Path, place: int) -> None:
    interrupted(tmp_path / "x", 400, terms=RECORDS)
    changed = [*RECORDS[:place], ["other"], *RECORDS[place + 1 :]]
    kept = built(tmp_path / "x", terms=changed)[1]
    assert kept <= place
    assert (kept > 0) == (place > 0)


def test_a_shorter_input_keeps_no_more_than_it_has(tmp_path: Path) -> None:
    interrupted(tmp_path / "x", 400, terms=RECORDS)
    assert built(tmp_path / "x", terms=RECORDS[:200])[1] <= 200


@pytest.mark.parametrize("memory", [MEMORY + (200 << 10), 2 * MEMORY])
def test_runs_may_be_of_other_sizes(tmp_path: Path, memory: int) -> None:
    interrupted(tmp_path / "x", 400, terms=RECORDS)
    with pytest.raises(KeyboardInterrupt):
        Postings.build(
            tmp_path / "x",
            terms=cut_short([*RECORDS[:150], *RECORDS[:350]], 450),
            memory_bytes=memory,
        )
    built(tmp_path / "x", terms=RECORDS)


def test_with_other_options_it_begins_anew(tmp_path: Path) -> None:
    texts = [" ".join(record) for record in RECORDS]
    interrupted(tmp_path / "x", 400, texts=texts)
    assert built(tmp_path / "x", texts=texts, analyzer=Analyzer(stop_words=("w1",)))[1] == 0
    interrupted(tmp_path / "y", 400, vectors=VECTORS)
    assert built(tmp_path / "y", vectors=VECTORS, exact=True)[1] == 0
    interrupted(tmp_path / "z", 400, texts=texts)
    assert built(tmp_path / "z", terms=RECORDS)[1] == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["postings", "lengths", "facts.json"])
@pytest.mark.parametrize("how", ["bent", "short", "gone"])
def test_a_damaged_run_is_built_again(tmp_path: Path, name: str, how: str) -> None:
    interrupted(tmp_path / "x", 400, terms=RECORDS)
    file = sorted((tmp_path / "x" / WORK).glob("run_*"))[1] / name
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 64
    if how == "gone":
        file.unlink()
    else:
        file.write_bytes(data if how == "bent" else data[:-5])
    kept = built(tmp_path / "x", terms=RECORDS)[1]
    assert 0 < kept < 200


def test_damage_to_the_salt_or_the_job_begins_anew(tmp_path: Path) -> None:
    for name in ("begun/salt", "job.json"):
        path = tmp_path / name.replace("/", "-")
        interrupted(path, 400, terms=RECORDS)
        (path / WORK / name).write_text("?")
        assert built(path, terms=RECORDS)[1] == 0


def test_what_fits_in_memory_leaves_nothing(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        Postings.build(tmp_path / "x", terms=cut_short(RECORDS, 400))
    assert not (tmp_path / "x" / WORK).exists()


def test_the_spool_is_as_large_as_was_said(tmp_path: Path) -> None:
    for name, given, each in (
        ("terms", {"terms": RECORDS}, 8),
        ("vectors", {"vectors": VECTORS}, 20),
    ):
        said = estimate_spool(**given, memory_bytes=1 << 18)  # type: ignore[arg-type]
        told = Told()
        report = Postings.build(tmp_path / name, **given, memory_bytes=MEMORY, progress=told)  # type: ignore[arg-type]
        assert (said.n_records, said.n_postings, said.size_bytes) == (
            500,
            report.n_postings,
            each * report.n_postings,
        )
        assert told.last["bytes of the spool"] >= 8 * report.n_postings  # and the terms of each run
    assert estimate_spool(terms=RECORDS).size_bytes == 0
    assert (
        estimate_spool(
            1000, texts=(text for text in ["w1 w2", "w1 w1"]), memory_bytes=1 << 16
        ).n_postings
        == 1500
    )
    many = [["a"]] * 3000 + [["a", "b", "c"]] * 1000
    assert estimate_spool(terms=many).n_postings == 6000  # records from everywhere are looked at
    rows = CsrArrays(np.array([0, 2, 3]), np.array([0, 1, 0]), np.ones(3))
    assert estimate_spool(vectors=rows, memory_bytes=1).size_bytes == 60
    for given in ({}, {"texts": (text for text in ["a"])}):
        with pytest.raises(errors.InvalidInputError):
            estimate_spool(**given)  # type: ignore[arg-type]


@pytest.mark.parametrize("n_parts", [1, 2])
def test_a_folder_of_a_user_called_work_is_refused(tmp_path: Path, n_parts: int) -> None:
    paths = [tmp_path / str(i) for i in range(n_parts)]
    (paths[-1] / WORK / "thesis").mkdir(parents=True)
    (paths[-1] / WORK / "thesis" / "chapter").write_text("years")
    if n_parts > 1:
        interrupted(paths[0], 400, terms=RECORDS)
    with pytest.raises(errors.InvalidInputError, match="work"):
        if n_parts == 1:
            Postings.build(paths[0], terms=RECORDS)
        else:
            espnx.postings.build_split(paths, terms=RECORDS)
    assert (paths[-1] / WORK / "thesis" / "chapter").read_text() == "years"
    # refused before anything is removed
    assert n_parts == 1 or list((paths[0] / WORK).glob("run_*"))


def test_changes_leave_a_folder_of_a_user_alone(tmp_path: Path) -> None:
    Postings.build(tmp_path / "x", terms=RECORDS[:10])
    (tmp_path / "x" / WORK).mkdir()
    (tmp_path / "x" / WORK / "notes").write_text("years")
    espnx.postings.add(tmp_path / "x", terms=RECORDS[:10])
    assert (tmp_path / "x" / WORK / "notes").read_text() == "years"
    # what a build may have left
    (tmp_path / "x" / WORK / "notes").rename(tmp_path / "x" / WORK / "job.json")
    espnx.postings.delete(tmp_path / "x", [3])
    assert not (tmp_path / "x" / WORK).exists()
