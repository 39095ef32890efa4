"""kill -9 at every moment at which a process's files are others than before: jobs of
tests/forks.py, and the tests' end.

Of a killed process nothing is left but its files. So two kills between which no file has changed
are one and the same, and all that can be found are as many as there are states of the files: one
process runs to its end and notes when each began, then one is killed in each.
"""

from __future__ import annotations

import itertools
import json
import os
import signal
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from espnx.storage import NativeEngine
from tests.forks import Forks

#: What changes files, and what a change has arrived after.
FUNCTIONS: list[tuple[Any, tuple[str, ...]]] = [
    (NativeEngine, ("open", "write", "allocate", "truncate", "sync", "sync_directory", "rename")),
    (os, ("open", "write", "mkdir", "unlink", "rmdir", "rename", "replace")),
]


def moments(processes: Forks, note: Path, folders: Sequence[Path], **job: Any) -> list[int]:
    """Runs a job to its end. The moments, by number, from which on there is something in the
    folders that was not there before; the first is that at which nothing has happened yet.

    Args:
        note: a file for the answer.
    """
    assert processes.run(**job, note=note, folders=folders) == 0
    found: list[int] = json.loads(note.read_text())
    return found


def killed(processes: Forks, moment: int, **job: Any) -> bool:
    """Runs the job until that moment. Whether it came so far."""
    code = processes.run(**job, moment=moment)
    assert code in (0, -signal.SIGKILL)
    return code != 0


def watch(job: dict[str, Any]) -> None:
    """In the job's own process, before it begins."""
    if "moment" in job:
        _at_each_moment(
            lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == job["moment"] else None
        )
    elif "note" in job:
        known: dict[object, int] = {}

        def see(number: int) -> None:
            if known.setdefault(_contents(job["folders"]), number) == number:
                Path(job["note"]).write_text(json.dumps(list(known.values())))

        _at_each_moment(see)


def _at_each_moment(see: Callable[[int], None]) -> None:
    """Before and after every call that may change a file."""
    numbers = itertools.count()

    def watched(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **options: Any) -> Any:
            see(next(numbers))
            try:
                return function(*args, **options)
            finally:
                see(next(numbers))

        return call

    for owner, names in FUNCTIONS:
        for name in names:
            setattr(owner, name, watched(getattr(owner, name)))


def _contents(folders: Sequence[str]) -> object:
    found = []
    for folder in folders:
        for path in sorted(Path(folder).rglob("*")):
            found.append(
                (
                    str(path),
                    zlib.crc32(path.read_bytes()) if path.is_file() else -1,
                    path.stat().st_size if path.is_file() else 0,
                )
            )
    return tuple(found)
