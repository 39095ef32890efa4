"""Traces of what a benchmark asks its devices (docs/trace-format.md): of one system, in a file of
its name, and beside it when its steps began and ended."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from espnx.device.near_storage import NearStorageDevice
from espnx.device.trace.recording import recorded
from espnx.device.trace.writer import TraceWriter
from espnx.errors import FormatError, InvalidInputError

#: Behind the name of a system that does what the one without it does, and writes it down.
SUFFIX = "-recorded"
_STEPS = ".steps.json"


def trace_folder(path: str | None) -> Path | None:
    """The folder that ``--record`` names. Raises InvalidInputError."""
    if path is not None and not Path(path).is_dir():
        raise InvalidInputError(
            "--record",
            got=repr(path),
            expected="an existing directory: traces are files in it, one for each system",
        )
    return None if path is None else Path(path).resolve()


class Steps:
    """When what a benchmark times began and ended: a step, a turn, a search."""

    def __init__(self) -> None:
        self._walls: list[tuple[float, float]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Lasts as long as the block."""
        begin = time.perf_counter()
        yield
        self._walls.append((begin, time.perf_counter()))

    def forget(self) -> None:
        """Those that there were did not count."""
        self._walls.clear()

    def write(self, trace: str, begun_s: float) -> None:
        """Into a file beside a trace that began at that moment, in the trace's own time."""
        steps = [(begin - begun_s, end - begun_s) for begin, end in self._walls]
        Path(f"{trace}{_STEPS}").write_text(json.dumps({"steps": steps}), encoding="utf-8")


def read_steps(trace: Path) -> list[tuple[float, float]]:
    """(begin, end) of each step beside a trace, in seconds of its time. Raises FormatError."""
    file = Path(f"{trace}{_STEPS}")
    try:
        return [(float(begin), float(end)) for begin, end in json.loads(file.read_text())["steps"]]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise FormatError(
            "the steps of a trace",
            path=file,
            got=str(error),
            expected="what a benchmark writes beside it",
        ) from error


def recording(
    file: str,
    program: str,
    devices: Sequence[NearStorageDevice],
    until: ExitStack,
    steps: Steps | None = None,
) -> list[NearStorageDevice]:
    """The same devices, whose commands are written to a file until a block ends; `steps`, too.
    Raises WriteError."""
    writer = until.enter_context(TraceWriter(file, program, devices))
    if steps is not None:
        until.callback(steps.write, file, writer.begun_s)
    return recorded(devices, writer)
