"""Where a program's rows lie on a machine's drives, and whether they fit."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from ...device.trace.reader import Command, Trace
from ...errors import InvalidInputError
from ...sizes import format_size
from ..decoding.machine import Machine
from .requests import WRITES, Request

#: A part of a device; with its number a segment.
_Part = tuple[int, int]


def shares(n_drives: int, n_devices: int, command: Command, units: int) -> list[tuple[int, float]]:
    """(drive, its share) of so many rows or pages of a command, one after another over all drives;
    where there are as many as in the trace, each keeps its own."""
    if n_drives == n_devices:
        return [(command.device, 1.0)]
    counts = [(units + n_drives - 1 - drive) // n_drives for drive in range(n_drives)]
    return [(drive, count / units) for drive, count in enumerate(counts) if count]


def check_fits(machine: Machine, trace: Trace, asked: Sequence[tuple[Command, Request]]) -> None:
    """What a program writes and has not let go of yet, beside what its drives hold. What lay there
    before is in no trace.

    Raises InvalidInputError: rows are kept in memory; drives do not hold them, by how many bytes.
    """
    if machine.system.kv != "drives":
        raise InvalidInputError(
            f"a trace on {machine.system.name}, whose K and V are in {machine.system.kv}",
            got=f"kv: {machine.system.kv}",
            expected="kv: drives, as the program's were",
            fix="a system with drives, such as flexgen-4ssd",
        )
    capacity = machine.get("device.capacity")
    if capacity is None:
        return
    kept = _Kept(machine.n_drives, len(trace.devices))
    for command, request in asked:
        kept.take(command, request)
        missing = sum(max(0.0, each - capacity) for each in kept.drives)
        if missing > 0:
            raise InvalidInputError(
                f"what {trace.program} keeps does not fit the drives of {machine.system.name}",
                got=f"{format_size(-int(-missing // 1))} too much, at command {command.number}",
                expected=f"at most {format_size(int(capacity))} in each of {machine.n_drives}",
                fix="a system with more or larger drives",
            )


class _Kept:
    """Bytes that drives hold.

    Attributes:
        drives: of each.
    """

    def __init__(self, n_drives: int, n_devices: int) -> None:
        self.drives = [0.0] * n_drives
        self._n_devices = n_devices
        self._parts: dict[_Part, dict[int, list[tuple[int, float]]]] = defaultdict(dict)

    def take(self, command: Command, request: Request) -> None:
        """What a command writes, and what it lets go of."""
        segments = self._parts[command.device, command.part]
        detail = command.detail
        if request.verb in WRITES:
            each = shares(len(self.drives), self._n_devices, command, request.units)
            made = detail.each("segments", count=1 << 20)
            for segment in made:
                own = [(drive, request.write_bytes / len(made) * share) for drive, share in each]
                # a number that comes again is of other rows: both are there
                segments.setdefault(segment.whole("number"), []).extend(own)
                for drive, size_bytes in own:
                    self.drives[drive] += size_bytes
            if request.verb == "join" and "of" in detail:
                new = {segment.whole("number") for segment in made}
                for number in detail.wholes("of", count=1 << 20):
                    if number not in new:
                        self._drop(segments, number)
        elif request.verb == "release" and "segment" in detail:
            self._drop(segments, detail.whole("segment"))
        elif request.verb == "forget":
            for number in list(segments):
                self._drop(segments, number)

    def _drop(self, segments: dict[int, list[tuple[int, float]]], number: int) -> None:
        for drive, size_bytes in segments.pop(number, ()):
            self.drives[drive] -= size_bytes
