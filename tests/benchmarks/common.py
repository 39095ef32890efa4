"""A row and a machine for tests, a system that does what it is told, and a benchmark's process that
is none."""

from __future__ import annotations

import importlib
import json
import os
from dataclasses import dataclass, field
from typing import Any

from espnx.benchmarks.harness.result import Row
from espnx.benchmarks.harness.runner import Sample
from espnx.errors import ChecksumError

MACHINE = {
    "cpu": "c",
    "cores": 2,
    "memory_bytes": 1,
    "kernel": "k",
    "disk": "d",
    "fs": "f",
    "fio": None,
    "python": "3",
    "torch": "2",
}


def row(**changes: Any) -> Row:
    fields: dict[str, Any] = {
        "case": "io",
        "params": {"op": "read"},
        "system": "espnx-uring",
        "kind": "measured",
        "requested_path": "uring",
        "effective_path": "uring",
        "cache": "cold",
        "n": 15,
        "median_s": 0.5,
        "p99_s": 0.6,
        "iqr_s": 0.1,
        "bytes_asked": 4096,
        "bytes_moved": 4096,
        "correct": True,
        "metrics": {"iops": 1.0},
        "ratio": {"fio": 0.97},
    }
    return Row(**fields | changes)


@dataclass
class ScriptedSystem:
    """Runs take the given times; the run of number `wrong_at` finds a wrong checksum."""

    name: str
    seconds: list[float]
    group: str = "ours"
    bytes_asked: int = 1000
    problem: str | None = None
    wrong_at: int | None = None
    cache: str = "cold"
    log: list[str] = field(default_factory=list)
    requested_path: str = "uring"
    effective_path: str = "uring"
    turn: int = -1

    def verify(self) -> str | None:
        return self.problem

    def prepare(self, turn: int) -> str:
        self.turn = turn
        return self.cache

    def run(self) -> Sample:
        self.log.append(self.name)
        if self.turn == self.wrong_at:
            raise ChecksumError("bytes read are not the bytes written", path="x")
        return Sample(
            self.seconds[self.turn],
            self.bytes_asked,
            self.bytes_asked,
            {"requests": float(self.turn)},
        )

    def close(self) -> None:
        pass


class HereSession:
    """Answers as a process does, in this one. Starting Python and importing the libraries once for
    each system would take most of a minute on a busy machine."""

    def __init__(self, session: str):
        self.number = os.getpid()
        self._session: Any = importlib.import_module(
            f"espnx.benchmarks.{session}.session"
        ).Session()

    def ask(self, line: str) -> str:
        return json.dumps(self._session.handle(json.loads(line)))

    def ending(self) -> str:
        return "it has not ended"

    def close(self) -> None:
        self._session.close()
