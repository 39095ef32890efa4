"""Traces of what a benchmark asks its devices (docs/trace-format.md): of one system, in a file of
its name."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from espnx.device.near_storage import NearStorageDevice
from espnx.device.trace.recording import recorded
from espnx.device.trace.writer import TraceWriter
from espnx.errors import InvalidInputError

#: Behind the name of a system that does what the one without it does, and writes it down.
SUFFIX = "-recorded"


def trace_folder(path: str | None) -> Path | None:
    """The folder that ``--record`` names. Raises InvalidInputError."""
    if path is not None and not Path(path).is_dir():
        raise InvalidInputError(
            "--record",
            got=repr(path),
            expected="an existing directory: traces are files in it, one for each system",
        )
    return None if path is None else Path(path).resolve()


def recording(
    file: str, program: str, devices: Sequence[NearStorageDevice], until: ExitStack
) -> list[NearStorageDevice]:
    """The same devices, whose commands are written to a file until a block ends. Raises
    WriteError."""
    return recorded(devices, until.enter_context(TraceWriter(file, program, devices)))
