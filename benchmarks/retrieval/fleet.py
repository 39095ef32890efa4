"""The processes of the retrieval benchmark as their parent sees them: one for each system, each
with its own memory limit."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ..corpora.stores import Prepared
from ..harness.processes import Worker, Workers
from ..machine import page_cache
from ..machine.cgroup import memory_group


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
        is_limited: whether the point's memory limit holds for it; ``memory`` is what the others
            would like to be.
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
        """Systems that do would read what another has brought into memory, so no two of them run at
        a time."""
        return self.kind.startswith("mmap")

    @property
    def process_name(self) -> str:
        return self.process or self.name


class Fleet(Workers):
    """Processes for some systems on one store, opened. A context manager; all end with it.

    Args:
        limit_bytes: memory of each, page cache of its reads included. None for no limit: a store
            that is mapped then begins in memory as far as it fits, as after a while it would; under
            a limit it begins on disk.

    Attributes:
        opened: what each process said when it had opened the store.
        cache: the state of the page cache when the processes started.
        threads: of the first stage, in every system alike; None for the index's own choice.
    """

    def __init__(
        self,
        prepared: Prepared,
        systems: list[System],
        limit_bytes: int | None,
        threads: int | None,
        engine: str = "auto",
    ):
        super().__init__()
        self.systems, self.limit_bytes = systems, limit_bytes
        self.opened: dict[str, dict[str, Any]] = {}
        wants_warm = limit_bytes is None and any(system.uses_page_cache for system in systems)
        self.cache = prepare_cache(prepared.store, "warm" if wants_warm else "cold")
        with ExitStack() as stack:
            for system in systems:
                if system.process_name not in self._workers:
                    limited = system.is_limited and limit_bytes is not None
                    group = (
                        stack.enter_context(memory_group(system.process_name, limit_bytes or 0))
                        if limited
                        else None
                    )
                    worker = stack.enter_context(Worker("retrieval", system.process_name, group))
                    self._workers[system.process_name] = worker
                    self.opened[system.process_name] = worker.ask(
                        "open",
                        store=str(prepared.store),
                        queries=str(prepared.queries),
                        system=system.kind,
                        threads=threads,
                        engine=engine,
                        **system.opening,
                    )
            self._stack = stack.pop_all()

    def worker_of(self, system: System) -> Worker:
        return self._workers[system.process_name]

    def process(self, name: str) -> Worker:
        return self._workers[name]

    def facts(self, system: System) -> dict[str, Any]:
        """What the process said when it had opened the store."""
        return self.opened[system.process_name]


def prepare_cache(store: Path, wanted: str) -> str:
    """Takes a store's data files out of the page cache (``cold``) or reads them into it (``warm``).
    Returns what is true afterwards: files that another process has mapped stay in memory."""
    files = [*store.rglob("segment-*.bin"), *store.rglob("coarse-*.bin")]
    states = {page_cache.prepare(path, wanted) for path in files}
    return "cold" if states <= {"cold"} else "warm"
