"""The processes of the retrieval benchmark as their parent sees them: one for each system, each with its own memory limit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any

from espnx.errors import EspnxError

from . import cache
from .cgroup import MemoryGroup, memory_group
from .corpus_store import Prepared

_END_S = 30.0


class WorkerError(EspnxError):
    """A process of the benchmark could not do what it was told."""


@dataclass(frozen=True)
class System:
    """One row of a table.

    Attributes:
        name: in the rows.
        kind: ``espnx`` or one of `WHOLE_STORE`.
        opening: arguments of the worker's `open`, beside the store.
        options: of every search, beside those of the point.
        process: systems of one name of this share a process.
        is_lossy: whether its ranking may leave out documents that an exact one has.
        is_limited: whether the point's memory limit holds for it; ``memory`` is what the others would like to be.
    """

    name: str
    kind: str = "espnx"
    opening: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    process: str = ""
    is_limited: bool = True
    is_lossy: bool = False

    @property
    def uses_page_cache(self) -> bool:
        """Systems that do would read what another has brought into memory, so no two of them run at a time."""
        return self.kind.startswith("mmap")

    @property
    def process_name(self) -> str:
        return self.process or self.name


class Worker:
    """One process. A context manager."""

    def __init__(self, name: str, group: MemoryGroup | None):
        self.name, self.group = name, group
        command = [sys.executable, "-m", "espnx.benchmarks.retrieval_worker"]
        if group is not None:
            command += ["--procs", str(group.procs)]
        root = str(Path(__file__).resolve().parents[1])
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment, cwd=root)

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises WorkerError."""
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            raise WorkerError(f"{self.name}: no pipe")
        try:
            stdin.write(json.dumps({"do": do, **arguments}) + "\n")
            stdin.flush()
        except BrokenPipeError:
            raise WorkerError(f"{self.name}: the process has ended", got=self._ending()) from None
        line = stdout.readline()
        if not line:
            raise WorkerError(f"{self.name}: the process ended while it was asked to {do}", got=self._ending())
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {do} failed", got=answer["error"])
        return answer

    def _ending(self) -> str:
        code = self._process.wait(timeout=_END_S)
        return "killed: the memory limit is too small for it" if code == -9 else f"exit code {code}"

    def close(self) -> None:
        if self._process.stdin is not None:
            self._process.stdin.close()
        try:
            self._process.wait(timeout=_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


class Fleet:
    """Processes for some systems on one store, opened. A context manager; all end with it.

    Args:
        limit_bytes: memory of each, page cache of its reads included. None for no limit: a store that is mapped then begins in memory
            as far as it fits, as after a while it would; under a limit it begins on disk.

    Attributes:
        opened: what each process said when it had opened the store.
        cache: the state of the page cache when the processes started.
        threads: of the first stage, in every system alike; None for the index's own choice.
    """

    def __init__(self, prepared: Prepared, systems: list[System], limit_bytes: int | None, threads: int | None, engine: str = "auto"):
        self.systems, self.limit_bytes = systems, limit_bytes
        self._workers: dict[str, Worker] = {}
        self.opened: dict[str, dict[str, Any]] = {}
        wants_warm = limit_bytes is None and any(system.uses_page_cache for system in systems)
        self.cache = prepare_cache(prepared.store, "warm" if wants_warm else "cold")
        with ExitStack() as stack:
            for system in systems:
                if system.process_name not in self._workers:
                    limited = system.is_limited and limit_bytes is not None
                    group = stack.enter_context(memory_group(system.process_name, limit_bytes or 0)) if limited else None
                    worker = stack.enter_context(Worker(system.process_name, group))
                    self._workers[system.process_name] = worker
                    self.opened[system.process_name] = worker.ask(
                        "open", store=str(prepared.store), queries=str(prepared.queries), system=system.kind, threads=threads,
                        engine=engine, **system.opening,
                    )  # fmt: skip
            self._stack = stack.pop_all()

    def of(self, system: System) -> Worker:
        return self._workers[system.process_name]

    def process(self, name: str) -> Worker:
        return self._workers[name]

    def facts(self, system: System) -> dict[str, Any]:
        """What the process said when it had opened the store."""
        return self.opened[system.process_name]

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def prepare_cache(store: Path, wanted: str) -> str:
    """Takes a store's data files out of the page cache (``cold``) or reads them into it (``warm``). Returns what is true afterwards: files
    that another process has mapped stay in memory."""
    files = [*store.rglob("segment-*.bin"), *store.rglob("compact-*.bin")]
    states = {cache.prepare(path, wanted) for path in files}
    return "cold" if states <= {"cold"} else "warm"


def check_limit_possible(limit_bytes: int) -> None:
    """Raises PathUnavailableError now, rather than after minutes of building, where memory cannot be limited."""
    with memory_group("check", limit_bytes):
        pass
