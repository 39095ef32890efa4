"""The processes of the KV benchmark as their parent sees them: one for each system, on the same
weights and the same rows."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from espnx.errors import PathUnavailableError
from espnx.sizes import format_size

from ..harness.processes import Worker, Workers
from ..harness.registry import Say
from ..machine.cgroup import check_limit_possible, memory_group
from .systems.models import Task, write_weights

#: Of the page cache of each process, in parts of the KV.
CACHE_PART = 4
# A process needs some room for the files that it is made of.
_CACHE_LEAST_BYTES = 64 << 20
_SHARED_MEMORY = Path("/dev/shm")
_CHECK_BYTES = 1 << 30


@dataclass(frozen=True)
class Spec:
    """A system to measure.

    Attributes:
        name: in the rows.
        kind: one of `kv_systems.KINDS`, or ``flexgen-disk``.
        options: of its cache.
        lossy: the format of its rows, where they are not as the model made them.
    """

    name: str
    kind: str
    options: Mapping[str, Any] = field(default_factory=dict)
    lossy: str | None = None

    @property
    def in_memory(self) -> bool:
        return self.kind in ("dynamic", "static")


@dataclass(frozen=True)
class Limit:
    """A limit of the memory of each process: ``ample`` (none), ``auto`` (what it allocates and a
    quarter of the KV for page cache), or bytes."""

    kind: str
    size_bytes: int = 0

    @classmethod
    def possible(cls, kind: str, size_bytes: int, say: Say) -> Limit:
        """`auto` becomes `ample` where memory cannot be limited, and says so. Raises
        PathUnavailableError for a limit in bytes."""
        if kind == "ample":
            return cls(kind)
        try:
            check_limit_possible(size_bytes or _CHECK_BYTES)
        except PathUnavailableError as error:
            if kind != "auto":
                raise
            say(
                "The page cache is NOT limited, what reads through it may not read the disk: "
                f"{error}"
            )
            return cls("ample")
        return cls(kind, size_bytes)

    def words(self) -> Any:
        return self.size_bytes or self.kind


class Fleet(Workers):
    """Processes with filled caches, warmed up. A context manager; what they stored goes with it.

    Args:
        task: the work of all.
        specs: the systems.
        path: a directory on the disk to measure.
        limit: of memory.
        warm_up: steps before the limit is set and anything is measured.
        keep: steps whose logits are kept.
        is_seeded: whether the caches are filled and warmed up at once.

    Attributes:
        logits: a directory for each system, with the logits of kept steps.
        facts: by system, what it said when it was opened.
        ids: by system, the tokens that it chose, step by step.
    """

    def __init__(
        self,
        task: Task,
        specs: list[Spec],
        path: Path,
        limit: Limit,
        warm_up: int,
        keep: list[int],
        say: Say,
        *,
        is_seeded: bool = True,
    ):
        super().__init__()
        self.task, self.specs, self.keep = task, specs, keep
        self.facts: dict[str, dict[str, Any]] = {}
        self.ids: dict[str, list[list[int]]] = {spec.name: [] for spec in specs}
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(folder_in(scratch_parent(path))))
            stored = Path(stack.enter_context(folder_in(path)))
            self.logits = scratch / "logits"
            write_weights(task, scratch / "weights")
            for spec in specs:  # they start side by side: most of that time is Python's imports
                limited = limit.kind != "ample"
                group = (
                    stack.enter_context(memory_group(spec.name, _no_limit())) if limited else None
                )
                self._workers[spec.name] = stack.enter_context(Worker("kv", spec.name, group))
            for spec in specs:
                if is_seeded:
                    say(
                        f"    {spec.name}: {format_size(task.kv_bytes(task.context))} of rows are "
                        "written"
                    )
                worker = self._workers[spec.name]
                (self.logits / spec.name).mkdir(parents=True)
                (stored / spec.name).mkdir()
                self.facts[spec.name] = worker.ask(
                    "open",
                    kind=spec.kind,
                    task=task.words(),
                    weights=str(scratch / "weights"),
                    storage=str(stored / spec.name),
                    options=dict(spec.options),
                )
                if is_seeded:
                    self.facts[spec.name] |= worker.ask("seed")
            for spec in specs if is_seeded else []:
                peak_bytes = self.steps(spec.name, warm_up, do="warm_up")["peak_bytes"]
                if limit.kind != "ample":
                    self._limit(
                        self._workers[spec.name], limit.size_bytes or self._enough(spec, peak_bytes)
                    )
            self._stack = stack.pop_all()

    def _enough(self, spec: Spec, peak_bytes: int) -> int:
        """What a process allocates, and a part of the KV for the page cache."""
        room = max(self.task.kv_bytes(self.task.context) // CACHE_PART, _CACHE_LEAST_BYTES)
        # it grows by each new token, and by what is left between the tensors that are made anew for
        # it
        if spec.in_memory:
            room += 2 * self.task.kv_bytes(self.task.steps)
        return peak_bytes + room

    def _limit(self, worker: Worker, size_bytes: int) -> None:
        if worker.group is not None:
            file = worker.group.limit
            try:
                file.write_text(str(size_bytes))
            except OSError as error:
                raise PathUnavailableError(
                    "cannot limit memory",
                    got=f"{error.strerror} for {file.name}",
                    fix="--memory ample",
                ) from error

    def steps(self, name: str, count: int, do: str = "steps") -> dict[str, Any]:
        """Lets a system decode. Raises WorkerError."""
        answer = self._workers[name].ask(
            do, count=count, keep=self.keep, folder=str(self.logits / name)
        )
        self.ids[name] += answer["ids"]
        return answer

    def worker(self, spec: Spec) -> Worker:
        return self._workers[spec.name]

    def ask(self, name: str, do: str, **arguments: Any) -> dict[str, Any]:
        return self._workers[name].ask(do, **arguments)


def folder_in(parent: Path) -> tempfile.TemporaryDirectory[str]:
    """A folder of this benchmark's own; it goes at the end."""
    return tempfile.TemporaryDirectory(
        prefix="espnx-bench-kv-", dir=parent, ignore_cleanup_errors=True
    )


def scratch_parent(path: Path) -> Path:
    """Weights that all processes map lie in memory, not on the disk that is measured; where there
    is no room, there they lie."""
    if (
        _SHARED_MEMORY.is_dir()
        and os.access(_SHARED_MEMORY, os.W_OK)
        and shutil.disk_usage(_SHARED_MEMORY).free > 8 << 30
    ):
        return _SHARED_MEMORY
    return path


def _no_limit() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
