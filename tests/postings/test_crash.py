"""kill -9 in every state that the files pass through: there is the version before, or the one
after, and a writer goes on from it."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

import espnx.postings
from espnx import errors
from espnx.postings import Postings
from tests.forks import Forks
from tests.kills import killed, moments
from tests.postings.common import corpus
from tests.sweeps import in_steps

QUERIES = corpus(10, seed=3, longest=8)


@pytest.fixture
def processes(open_forks: Callable[[str], Forks]) -> Forks:
    return open_forks("tests.postings.zygote")


def found_by(path: Path) -> list[list[int]]:
    """What searches find; all of it is checked."""
    with Postings.open(path) as postings:
        postings.verify()
        ids = list(postings.ids())
        assert len(set(ids)) == len(ids) == len(postings)
        return [*postings.search(QUERIES, k=30).numbers.tolist(), [len(postings)]]


def before(path: Path, what: str) -> None:
    """The postings that a job begins with."""
    if what == "build":
        return
    if what == "merge":  # the eighth addition of a size makes one of all
        records = [(f"d{i}", " ".join(words)) for i, words in enumerate(corpus(12, seed=1))]
        Postings.build(path, records[:2], keep_texts=True)
        for record in records[2:10]:
            espnx.postings.add(path, [record])
        espnx.postings.delete(path, ["d4"])
        return
    Postings.build(path, terms=corpus(60, seed=1))
    if what == "compact":
        espnx.postings.add(path, terms=corpus(30, seed=2))
        espnx.postings.delete(path, [5, 70])


@in_steps(8)
@pytest.mark.parametrize("what", ["build", "add", "merge", "delete", "compact"])
def test_killed_at_every_change(folder: Path, processes: Forks, what: str, step: int) -> None:
    old, new = folder / "old", folder / "new"
    before(old, what)
    before(new, what)
    states = moments(processes, folder / "note", [new], path=new, what=what)
    after = found_by(new)
    was = None if what == "build" else found_by(old)
    assert len(states) > 3
    for moment in [*states[:-4:step], *states[-4:]]:
        path = folder / f"at{moment}"
        if old.exists():
            shutil.copytree(old, path)
        if not killed(processes, moment, path=path, what=what):
            continue
        try:
            now = found_by(path)
        except errors.StoreNotFoundError:
            now = None
        assert now in (was, after)
        if now != after:
            assert processes.run(path=path, what=what) == 0
            assert found_by(path) == after
        shutil.rmtree(path)
