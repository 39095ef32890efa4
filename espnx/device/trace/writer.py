"""Writes a trace: a line for each command of a device, with what it moved, what it came after, and
the host's work between; at the end how many there are, so that a trace that was cut off is seen to
be."""

from __future__ import annotations

import json
import os
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Self, TextIO

from ... import errors
from ..near_storage import NearStorageDevice

#: Of the lines; the first one names it as `espnx_trace`.
VERSION = 3
_PROGRAM_CHARS = 200  # enough to know it by: a prompt on a command line may be any length


class TraceWriter:
    """A context manager. Calls may come from any thread.

    Args:
        path: of the file, which is replaced.
        program: what runs, for whoever reads the trace.
        devices: in the order in which the lines number them.

    Raises WriteError where the file cannot be written, also from later calls.
    """

    def __init__(
        self, path: str | os.PathLike[str], program: str, devices: Sequence[NearStorageDevice]
    ):
        self.path = os.fspath(path)
        self._lock = threading.Lock()
        self._begun = time.perf_counter()
        self._count = 0
        self._last = -1  # the command that ended last
        # when a command has begun or ended last, and what has passed since without being the
        # program's work: it waited, or this wrote
        self._since_s = self._waited_s = 0.0
        self._parts = self._lines = 0
        # that have ended, in that order, and wait to be written
        self._ended = deque[dict[str, Any]]()
        self._complete = set[int]()  # of them, by number: those whose lines say all
        try:
            self._file: TextIO | None = open(self.path, "w", encoding="utf-8", buffering=1 << 16)  # noqa: SIM115
        except OSError as error:
            raise errors.WriteError(
                "cannot write the trace", path=self.path, errno=error.errno
            ) from error
        head = {
            "espnx_trace": VERSION,
            "program": _readable(program),
            "devices": [
                {"name": each.name, "kind": each.kind, "path": os.path.abspath(each.path)}
                for each in devices
            ],
        }
        # of emulated devices, which together have one topology
        topology = getattr(devices[0], "topology", None) if devices else None
        self._write(head if topology is None else head | {"stretch": topology.stretch})

    @property
    def begun_s(self) -> float:
        """`time.perf_counter` when recording began."""
        return self._begun

    @property
    def commands(self) -> int:
        """How many have begun."""
        return self._count

    def part(self) -> int:
        """A number for a part of a device (`open_rows`, `open_records`, `keep_records`) that the
        lines can name."""
        with self._lock:
            self._parts += 1
            return self._parts - 1

    def begin(self, device: int, verb: str) -> dict[str, Any]:
        """The line of a command that begins now; given back to `stop` and `write`, or to `end`."""
        with self._lock:
            now = time.perf_counter() - self._begun
            line = {
                "n": self._count,
                "device": device,
                "verb": verb,
                "at_s": now,
                "after": self._last,
                "host_s": max(now - self._since_s - self._waited_s, 0.0),
            }
            self._count += 1
            self._since_s, self._waited_s = now, 0.0
            return line

    def waited(self, seconds: float) -> None:
        """The host has waited for a part of a command's result, or has written down what it asks,
        which is no work of its own."""
        with self._lock:
            self._waited_s += seconds

    def stop(self, line: dict[str, Any]) -> None:
        """A command has ended."""
        with self._lock:
            now = time.perf_counter() - self._begun
            self._last = line["n"]
            self._since_s, self._waited_s = now, 0.0
            line["took_s"] = now - line["at_s"]
            self._ended.append(line)

    def write(self, line: dict[str, Any], *, failed: str | None = None) -> None:
        """The line of a command that has ended. It is written once those of all that ended before
        are."""
        if failed is not None:
            line["failed"] = failed
        with self._lock:
            begun = time.perf_counter()
            self._complete.add(line["n"])
            while self._ended and self._ended[0]["n"] in self._complete:
                self._write_next()
            self._waited_s += time.perf_counter() - begun

    def end(self, line: dict[str, Any], *, failed: str | None = None) -> None:
        """Both."""
        self.stop(line)
        self.write(line, failed=failed)

    @contextmanager
    def command(self, device: int, verb: str) -> Iterator[dict[str, Any]]:
        """A command that lasts as long as the block. What the block puts into the line is written
        with it."""
        line = self.begin(device, verb)
        try:
            yield line
        except BaseException as error:
            self.end(line, failed=type(error).__name__)
            raise
        self.end(line)

    def _write_next(self) -> None:
        line = self._ended.popleft()
        self._complete.discard(line["n"])
        self._lines += 1
        self._write(line)

    def _write(self, line: dict[str, Any]) -> None:
        if self._file is None:
            return  # of a request that was cancelled when the program ended
        for name in ("at_s", "took_s", "host_s", "waited_s"):
            if name in line:
                line[name] = round(line[name], 7)
        try:
            self._file.write(json.dumps(line, separators=(",", ":")) + "\n")
        except OSError as error:
            raise errors.WriteError(
                "cannot write the trace", path=self.path, errno=error.errno
            ) from error

    def close(self) -> None:
        """Ends the file. May be called again."""
        with self._lock:
            if self._file is None:
                return
            try:
                for line in self._ended:
                    if line["n"] not in self._complete:
                        line["failed"] = "cancelled"  # nobody has taken its result
                while self._ended:
                    self._write_next()
                self._write({"end": self._lines})
            finally:
                file, self._file = self._file, None
                try:
                    file.close()
                except OSError as error:
                    raise errors.WriteError(
                        "cannot write the trace", path=self.path, errno=error.errno
                    ) from error

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


def _readable(program: str) -> str:
    """A command line as a reader takes it: not too long, and without what is no text."""
    shown = program.replace("\0", "").encode("utf-8", "replace").decode()
    return shown if len(shown) <= _PROGRAM_CHARS else shown[:_PROGRAM_CHARS] + " ..."
