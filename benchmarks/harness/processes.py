"""The processes of a benchmark as their parent sees them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, ClassVar, Protocol, Self

from espnx.errors import EspnxError

from ..machine.cgroup import MemoryGroup

_END_S = 30.0
_ROOT = Path(__file__).resolve().parents[2]


class WorkerError(EspnxError):
    """A process of the benchmark could not do what it was told."""


class Closing(ABC):
    """A context manager whose end is `close`."""

    @abstractmethod
    def close(self) -> None: ...

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Answering(Protocol):
    """Answers a line for each line it is told. Attributes: number: of its process."""

    number: int

    def ask(self, line: str) -> str:
        """Empty where it ended over it. BrokenPipeError: it had ended before."""

    def ending(self) -> str:
        """How it ended."""

    def close(self) -> None: ...


class Process:
    """A process that answers on its standard output."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str]):
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            cwd=_ROOT,
        )
        self.number = self._process.pid

    def ask(self, line: str) -> str:
        stdin, stdout = self._process.stdin, self._process.stdout
        if stdin is None or stdout is None:
            return ""
        stdin.write(line + "\n")
        stdin.flush()
        return stdout.readline()

    def ending(self) -> str:
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


class Worker(Closing):
    """One process.

    Args:
        session: one of `worker.SESSIONS`.
        group: to put it into.
        program: that answers as `worker` does, in an environment of its own, instead of `worker` in
            ours. OSError: there is no such file.

    Attributes:
        number: of it.
        instead: what answers for a session where no program is named, instead of a process.
    """

    instead: ClassVar[Callable[[str], Answering] | None] = None

    def __init__(
        self,
        session: str,
        name: str,
        group: MemoryGroup | None = None,
        *,
        program: Sequence[str] = (),
    ):
        self.name, self.group = name, group
        command = [*program] or [sys.executable, "-m", "espnx.benchmarks.harness.worker", session]
        if group is not None:
            command += ["--procs", str(group.procs)]
        environment = {**os.environ, "OMP_WAIT_POLICY": "passive"}
        if program:
            environment.pop("PYTHONPATH", None)
        self._answering = (
            Process(command, environment)
            if program or Worker.instead is None
            else Worker.instead(session)
        )
        self.number = self._answering.number

    def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        """Raises WorkerError."""
        try:
            line = self._answering.ask(json.dumps({"do": do, **arguments}))
        except BrokenPipeError:
            raise WorkerError(
                f"{self.name}: the process has ended", got=self._answering.ending()
            ) from None
        if not line:
            raise WorkerError(
                f"{self.name}: the process ended while it was asked to {do}",
                got=self._answering.ending(),
            )
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise WorkerError(f"{self.name}: {do} failed", got=answer["error"])
        return answer

    def close(self) -> None:
        self._answering.close()


class Workers(Closing):
    """Processes by name. They end together, and what else is on the stack goes with them."""

    _stack: ExitStack

    def __init__(self) -> None:
        self._workers: dict[str, Worker] = {}

    def close(self) -> None:
        self._stack.close()
