"""Writers of postings in children that tests kill at any moment: the jobs of tests/forks.py."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy.random  # noqa: F401 - as what `load` imports: for all children

import espnx.postings
from espnx.postings import Postings
from tests.forks import serve
from tests.kills import watch
from tests.postings.common import corpus


def spooled(path: str | Path) -> None:
    """A build of several runs, whose number is no matter of chance."""
    with patch("secrets.randbits", lambda _bits: 0x5EED):
        Postings.build(path, terms=corpus(500, seed=1, longest=120), memory_bytes=1 << 20)


def run(job: dict[str, Any]) -> int:
    watch(job)
    path, what = job["path"], job["what"]
    if what == "build":
        Postings.build(path, terms=corpus(60, seed=1), memory_bytes=1 << 20)
    elif what == "spooled":
        spooled(path)
    elif what == "add":
        espnx.postings.add(path, terms=corpus(30, seed=2))
    elif what == "merge":
        espnx.postings.add(path, [("d1", "another text of w1"), ("new", "w2 w3")], replace=True)
    elif what == "delete":
        espnx.postings.delete(path, range(0, 60, 3))
    else:
        espnx.postings.compact(path)
    return 0


PACKAGES = ("espnx.postings", "espnx.storage")


def jobs() -> None:
    serve(run)
