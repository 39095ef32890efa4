"""Reads a trace. It may come from elsewhere: it is parsed, never believed."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from ... import errors
from ...storage.parse import Fields
from .writer import VERSION

#: A line of a search for a million records; longer ones are none of ours.
LINE_BYTES_MAX = 64 << 20
_DEVICES_MAX = 4096
_WITHOUT_END, _ALONE = 1, 2  # versions
_READ = (_WITHOUT_END, _ALONE, VERSION)
_ROUNDED_S = 1e-6  # times are written with seven places


@dataclass(frozen=True)
class Command:
    """One line.

    Attributes:
        number: in the order in which commands began.
        device: which of the trace's. verb: as docs/trace-format.md names it. part: of the device;
            -1: none.
        at_s, took_s: from the trace's beginning, and to the command's end.
        host_s: the host's work since a command last began or ended. Of versions before 3 since one
            last ended, and 0 while another ran.
        size_bytes: that it asked for.
        failed: the error it ended with, or empty.
        detail: the whole line.
    """

    number: int
    device: int
    verb: str
    part: int
    at_s: float
    took_s: float
    host_s: float
    size_bytes: int
    failed: str
    detail: Fields

    @property
    def end_s(self) -> float:
        return self.at_s + self.took_s


@dataclass(frozen=True)
class Trace:
    """Attributes: program: that ran; devices: ``name``, ``kind`` and ``path`` of each; commands: in
    the order of their numbers; is_whole: it has an end. Of version 1, which has none, nobody can
    say; has_all_host_s: the host's work is there where another command ran, too; stretch: wall
    seconds of a virtual one, of emulated devices, whose times are the wall's all the same (0: the
    wall had no part in them)."""

    program: str
    devices: list[dict[str, str]]
    commands: list[Command] = field(repr=False)
    is_whole: bool = True
    has_all_host_s: bool = True
    stretch: float | None = None

    @property
    def wall_s(self) -> float:
        """Seconds from the beginning of the first command to the end of the last."""
        return max((each.end_s for each in self.commands), default=0.0) - min(
            (each.at_s for each in self.commands), default=0.0
        )


def read_trace(path: str | os.PathLike[str]) -> Trace:
    """A whole trace. Raises FileMissingError, ReadError, FormatError (which names the line)."""
    lines = _lines(path)
    head = next(lines, None)
    if head is None or "espnx_trace" not in head:
        raise errors.FormatError(
            "no trace",
            path=path,
            got="a file without its first line",
            expected='{"espnx_trace": ...}',
        )
    if (version := head.whole("espnx_trace")) not in _READ:
        raise errors.FormatError(
            "version of a trace",
            path=path,
            got=version,
            expected=f"one of {', '.join(map(str, _READ))}",
            fix="record it again",
        )
    devices = [
        {name: each.text(name) for name in ("name", "kind", "path")}
        for each in head.each("devices", count=_DEVICES_MAX)
    ]
    if version == _WITHOUT_END:
        commands = [_command(line, len(devices)) for line in lines]
        for command in commands:
            _check_host(command, 0.0)
    else:
        commands = _whole(lines, len(devices), path)
    commands.sort(key=lambda command: command.number)
    for before, command in pairwise(commands):
        if command.number == before.number:
            command.detail.refuse("n", "a number that no other line has")
    stretch = head.real("stretch") if "stretch" in head else None
    if stretch is not None and stretch < 0:
        head.refuse("stretch", "0 or more")
    return Trace(
        head.text("program"),
        devices,
        commands,
        version != _WITHOUT_END,
        version == VERSION,
        stretch,
    )


def _whole(lines: Iterator[Fields], n_devices: int, path: str | os.PathLike[str]) -> list[Command]:
    """The commands up to the end that says how many they are. Each has ended after those before it,
    and begun after the one it names."""
    commands, ends_s, last_s = list[Command](), {-1: 0.0}, 0.0
    for line in lines:
        if "end" in line:
            if (count := line.whole("end")) != len(commands):
                line.refuse(
                    "end", f"{len(commands)}, as many as there are lines of commands", count
                )
            if next(lines, None) is not None:
                line.refuse("end", "the last line", "lines behind it")
            return commands
        command = _command(line, n_devices)
        if command.end_s < last_s - _ROUNDED_S:
            line.refuse(
                "took_s",
                f"an end after that of the line before, which is at {last_s:.7f} s",
                f"one at {command.end_s:.7f} s",
            )
        after = line.whole("after", least=-1)
        if after not in ends_s or ends_s[after] > command.at_s + _ROUNDED_S:
            line.refuse("after", "-1, or a command that had ended", after)
        _check_host(command, ends_s[after])
        ends_s[command.number] = last_s = command.end_s
        commands.append(command)
    raise errors.FormatError(
        "a trace without an end",
        path=path,
        got=f"{len(commands)} commands",
        expected='{"end": ...} as its last line',
        fix="the program that wrote it was stopped: record it again",
    )


def _check_host(command: Command, since_s: float) -> None:
    """The host cannot have worked for longer than has passed since a command ended."""
    passed_s = command.at_s - since_s
    if command.host_s > passed_s + 2 * _ROUNDED_S:
        command.detail.refuse(
            "host_s", f"at most the {max(passed_s, 0.0):.7f} s that have passed", command.host_s
        )


def _lines(path: str | os.PathLike[str]) -> Iterator[Fields]:
    try:
        with open(path, "rb") as file:
            number, fix = 0, "record it again"
            while text := file.readline(LINE_BYTES_MAX):
                number += 1
                if not text.endswith(b"\n"):
                    raise errors.FormatError(
                        f"line {number} of a trace",
                        path=path,
                        got=f"{len(text)} bytes without an end",
                        expected="whole lines",
                        fix=f"the program that wrote it was stopped: {fix}",
                    )
                try:
                    value: Any = json.loads(text)
                except (ValueError, RecursionError) as error:
                    raise errors.FormatError(
                        f"line {number} of a trace", path=path, got=str(error), expected="JSON"
                    ) from error
                is_head = number == 1 and isinstance(value, dict)
                if is_head and value.get("espnx_trace") == _WITHOUT_END:
                    fix = "cut the last line off"
                yield Fields(value, path, where=f"line {number}: ")
    except FileNotFoundError as error:
        raise errors.FileMissingError("no such trace", path=path) from error
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.ReadError("cannot read the trace", path=path, errno=error.errno) from error


def _command(line: Fields, n_devices: int) -> Command:
    times = {name: line.real(name) for name in ("at_s", "took_s", "host_s")}
    for name, value in times.items():
        if value < 0:
            line.refuse(name, "0 or more")
    optional = {
        name: line.whole(name) if name in line else missing
        for name, missing in (("part", -1), ("bytes", 0))
    }
    return Command(
        line.whole("n"),
        line.whole("device", most=n_devices - 1),
        line.text("verb", most=32),
        optional["part"],
        **times,
        size_bytes=optional["bytes"],
        failed=line.text("failed") if "failed" in line else "",
        detail=line,
    )
