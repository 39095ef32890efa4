"""Devices whose commands are written into a trace: of every verb, as the command describes itself.
What they do is what the devices inside do."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from ..command import Command, Watch
from ..kinds import PartKind
from ..near_storage import NearStorageDevice
from ..vectors.encoding import Encoding
from ..workers import Clock, clock_of
from ..wrapper import PartWrapper, Wrapper
from .writer import TraceWriter

if TYPE_CHECKING:
    from ..emulation.topology import Topology

T = TypeVar("T")


def recorded(devices: Sequence[NearStorageDevice], writer: TraceWriter) -> list[NearStorageDevice]:
    """The same devices, whose commands `writer` writes."""
    return [RecordedDevice(device, number, writer) for number, device in enumerate(devices)]


class RecordedDevice(NearStorageDevice):
    """See `espnx.device.near_storage.NearStorageDevice`. Encoding passes unrecorded.

    Args:
        inner: does the work; is closed with this one.
        number: of the device in the trace.
    """

    def __init__(self, inner: NearStorageDevice, number: int, writer: TraceWriter):
        super().__init__(inner.path)
        self.name, self.kind, self.capabilities, self.kinds = (
            inner.name,
            inner.kind,
            inner.capabilities,
            inner.kinds,
        )
        self._inner, self._number, self._writer = inner, number, writer

    @property
    def topology(self) -> Topology | None:
        """The topology of an emulated device."""
        return getattr(self._inner, "topology", None)

    @property
    def clock(self) -> Clock | None:
        """See `clock_of`."""
        return clock_of(self._inner)

    def offers(self, kind: PartKind) -> bool:
        """See `NearStorageDevice`."""
        return self._inner.offers(kind)

    def refuses(self, kind: PartKind) -> str:
        """See `NearStorageDevice`."""
        return self._inner.refuses(kind)

    def check(
        self, directory: str | None = None, *, engine: Any = "auto", name: str | None = None
    ) -> None:
        """See `NearStorageDevice`."""
        self._inner.check(directory, engine=engine, name=name)

    def open_part(self, kind: PartKind, *what: Any, **options: Any) -> Any:
        """See `NearStorageDevice`."""

        def recording(part: Any, stored: Any) -> Any:
            return kind.wrap(RecordingPart, part, stored, kind, self._number, self._writer)

        return kind.front(kind.open_on(self._inner, *what, **options), recording)

    def encode(
        self,
        encode: Callable[[Sequence[str]], T],
        texts: Sequence[str],
        *,
        flop: float | None = None,
    ) -> Encoding[T]:
        """See `NearStorageDevice`."""
        return self._inner.encode(encode, texts, flop=flop)

    def describe(self) -> dict[str, Any]:
        """See `NearStorageDevice`."""
        return self._inner.describe()

    def close(self) -> None:
        """See `NearStorageDevice`."""
        self._inner.close()


class RecordingPart(PartWrapper):
    """Writes a line for each command.

    Args:
        inner: does the work; closed with this one.
        stored: what it keeps.
        device: its number in the trace.
    """

    def __init__(self, inner: Any, stored: Any, kind: PartKind, device: int, writer: TraceWriter):
        super().__init__(inner)
        self._stored, self._device, self._writer, self._part, self._memo = (
            stored,
            device,
            writer,
            writer.part(),
            dict[Any, Any](),
        )
        if kind.says:
            with writer.command(device, kind.says) as line:
                files = (
                    [each.path for each in inner.path_report()]
                    if kind.files is None
                    else kind.files(stored)
                )
                line |= {"part": self._part, "files": files, **kind.facts(stored)}

    def submit(self, command: Command, watch: Watch | None = None) -> Any:
        """See `Part`."""
        line = self._writer.begin(self._device, command.verb) | {"part": self._part}
        try:
            ticket = command.ask(self._inner, watch)
            asked = time.perf_counter()
            line |= command.begin_line(self._stored, self._memo)
            self._writer.waited(time.perf_counter() - asked)
        except BaseException as error:
            command.end_line(line, None, None, self._memo)
            self._writer.end(line, failed=type(error).__name__)
            raise
        return RecordingTicket(ticket, command, line, self._memo, self._writer)


class RecordingTicket(Wrapper):
    """A command ends when all is there; its line is written then, or, where more may be asked for
    meanwhile, with `finish`."""

    def __init__(
        self,
        inner: Any,
        command: Command,
        line: dict[str, Any],
        memo: dict[Any, Any],
        writer: TraceWriter,
    ):
        super().__init__(inner)
        self._command, self._line, self._memo, self._writer = command, line, memo, writer
        self._is_running = self._is_open = True

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `espnx.device.interface.RecordTicket`."""
        found: tuple[np.ndarray, bool] = self._waited(self._inner.next, at_least, timeout_s)
        if found[1]:
            self._stop()
            if not self._command.takes_more:
                self._end()
        return found

    def finish(self, *timeout_s: float | None) -> Any:
        """Waits for all of it."""
        found = self._waited(self._inner.finish, *timeout_s)
        self._stop()
        if self._is_open:
            ended = time.perf_counter()
            self._command.end_line(self._line, self._inner, found, self._memo)
            self._writer.waited(time.perf_counter() - ended)
        self._end()
        return found

    def _waited(self, call: Callable[..., Any], *args: Any) -> Any:
        begun = time.perf_counter()
        try:
            return call(*args)
        except BaseException as error:
            self._end(type(error).__name__)
            raise
        finally:
            waited_s = time.perf_counter() - begun
            self._writer.waited(waited_s)
            if "waited_s" in self._line:
                self._line["waited_s"] += waited_s

    def _stop(self) -> None:
        if self._is_running:
            self._is_running = False
            self._writer.stop(self._line)

    def _end(self, failed: str | None = None) -> None:
        self._stop()
        if self._is_open:
            self._is_open = False
            self._writer.write(self._line, failed=failed)

    def add(self, more: Any) -> None:
        """See `espnx.device.interface.RecordTicket`."""
        self._line["pairs"] += len(more)
        self._inner.add(more)

    def cancel(self) -> None:
        """Whoever waits, or will, gets TransferCancelledError."""
        self._inner.cancel()
        self._end("cancelled")
