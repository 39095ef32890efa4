"""Runs that outlive a build's process: in a folder beside what is built, where the next attempt at
the same build finds them.

An attempt reads its input anew, for an iterator cannot be asked whether it is that of the attempt
before: items are counted off and hashed, and where they are those of a kept run, that run stands
for them. From the first that differ on all is built again.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import secrets
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ... import errors
from ...storage import NativeEngine
from ...storage.files import crc32c, file_sums
from ...storage.work import WORK, WorkFolder
from .spool import Run, TermPostings

#: Of the files of kept runs: those of another version are of no use.
RUNS_VERSION = 2
_BEGUN, _SALT, _FACTS, _POSTINGS, _LENGTHS = "begun", "salt", "facts.json", "postings", "lengths"


class InputDigest:
    """A digest of the items of an input, one after the other.

    Attributes:
        n_items: that were added.
    """

    def __init__(self) -> None:
        self._hash, self.n_items = hashlib.sha256(), 0

    @classmethod
    def of(cls, items: Iterable[bytes]) -> str:
        """The digest of these."""
        made = cls()
        for item in items:
            made.add(item)
        return made.digest

    def add(self, item: bytes) -> None:
        """The next one; where it ends matters, too."""
        self._hash.update(len(item).to_bytes(8, "little"))
        self._hash.update(item)
        self.n_items += 1

    @property
    def digest(self) -> str:
        return self._hash.hexdigest()


@dataclass(frozen=True, eq=False)
class RunFacts:
    """What is known of a kept run beside its postings.

    Attributes:
        number: counts runs, from 0.
        first_record: its first one.
        n_items, digest: of the input that it holds.
        n_records, n_terms: of the run.
        lengths: uint32 [n_records], of counts.
        crc32c: of its file.
    """

    number: int
    first_record: int
    n_items: int
    digest: str
    n_records: int
    n_terms: int
    lengths: np.ndarray | None
    crc32c: int = 0


class KeptRuns:
    """The runs of a build, in its folder.

    Args:
        engine: that writes and reads them; stays the caller's.
        directory: of what is built.
        job: what the runs depend on beside the input. Runs of another job are removed.

    Raises WriteError, DiskFullError.
    """

    def __init__(self, engine: NativeEngine, directory: str, job: Mapping[str, Any]):
        self._engine, self._directory, self._job = engine, directory, dict(job)
        self._work: WorkFolder | None = None
        self.salt = secrets.randbits(32)
        if Path(directory, WORK).is_dir():
            self._begin()

    def _begin(self) -> WorkFolder:
        """The folder, whose salt is this object's from now on: the new one, or that of the attempt
        before."""
        if self._work is None:
            self._work = WorkFolder(self._directory, self._job)
            if not self._work.has(_BEGUN):
                with self._work.step(_BEGUN) as folder:
                    (folder / _SALT).write_text(f"{self.salt:08x}")
            try:
                with self._work.writing():
                    self.salt = int(self._work.file(_BEGUN, _SALT).read_text(), 16)
            except ValueError:  # not what was written: nothing of it is of any use
                self._work.remove()
                self._work = None
                return self._begin()
        return self._work

    def facts(self) -> list[RunFacts]:
        """Facts of the runs that are there, in their order."""
        found: list[RunFacts] = []
        while self._work is not None and self._work.has(_name(len(found))):
            facts = self._read_facts(self._work, len(found))
            if facts is None:
                self.forget(len(found))
                break
            found.append(facts)
        return found

    def _read_facts(self, work: WorkFolder, number: int) -> RunFacts | None:
        """None where they are not what was written."""
        try:
            text, sums = work.file(_name(number), _FACTS).read_text().splitlines()
            fields, path = json.loads(text), work.file(_name(number), _LENGTHS)
            lengths = np.fromfile(path, "<u4") if path.exists() else None
            if sums != _sums(text, lengths):
                return None
            return RunFacts(lengths=lengths, **fields)
        except (OSError, ValueError, TypeError):
            return None

    def open(self, facts: RunFacts) -> Run | None:
        """The run of these facts; None where its file is not what was written."""
        if self._work is None:
            return None
        path = str(self._work.file(_name(facts.number), _POSTINGS))
        try:
            if file_sums(self._engine, path)[0] != facts.crc32c:
                return None
            return Run.open(self._engine, path, facts.n_terms)
        except errors.EspnxError:
            return None

    def keep(self, facts: RunFacts, postings: TermPostings) -> Run:
        """Writes a run, which an attempt finds from now on. Raises WriteError, DiskFullError."""
        work = self._begin()
        fields = {
            field.name: getattr(facts, field.name)
            for field in dataclasses.fields(facts)
            if field.name != "lengths"
        }
        with work.step(_name(facts.number)) as folder:
            run, fields["crc32c"] = Run.write(self._engine, str(folder / _POSTINGS), postings)
            if facts.lengths is not None:
                facts.lengths.tofile(folder / _LENGTHS)
            text = json.dumps(fields)
            (folder / _FACTS).write_text(f"{text}\n{_sums(text, facts.lengths)}\n")
        run.path = str(work.file(_name(facts.number), _POSTINGS))
        return run

    def forget(self, first: int) -> None:
        """Removes the run of that number and all behind it, the last one first: no run is left
        behind a gap."""
        end = first
        while self._work is not None and self._work.has(_name(end)):
            end += 1
        for number in reversed(range(first, end)):
            if self._work is not None:
                self._work.remove_step(_name(number))

    def remove(self) -> None:
        """Removes all of them."""
        if self._work is not None:
            self._work.remove()
            self._work = None


def _sums(text: str, lengths: np.ndarray | None) -> str:
    return (
        f"{crc32c(text.encode()):08x} "
        f"{'none' if lengths is None else f'{crc32c(lengths.view(np.uint8)):08x}'}"
    )


def _name(number: int) -> str:
    return f"run_{number:05d}"
