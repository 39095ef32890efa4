"""Asks devices for what a trace says, with rows and queries of the same shapes, and the host's work left out or waited for in between.

Commands that ran beside one another do so again: one begins once all have ended that had ended when it was recorded, and so much later.
"""

from __future__ import annotations

import base64
import functools
import threading
import time
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from ... import errors
from ...ops.attention import Queries, RowsInMemory
from ...storage.engine import FileHandle, Future
from ...storage.parse import Fields
from ..interface import Pairs, RecordQuery, RecordTicket, RowDevice, Segment, SegmentView
from ..near_storage import NearStorageDevice
from ..postings import PostingLists, PostingsDevice, ScanCommand
from ..record_layout import RecordSchema
from ..row_layout import DTYPES, RowLayout
from .reader import LINE_BYTES_MAX, Command, Trace

_ROWS_MAX = 1 << 31  # of one command, in values: what a trace asks for is made in memory


class Records(Protocol):
    """Records that are there to be asked for: a tier of an open index."""

    schema: RecordSchema
    files: Sequence[FileHandle]
    n_tokens: np.ndarray

    def maxsim(
        self, numbers: np.ndarray, queries: Sequence[RecordQuery], pairs: Pairs | None = None, **options: Any
    ) -> RecordTicket: ...  # fmt: skip

    def read(self, numbers: np.ndarray, *, gap_bytes: int) -> Future: ...


@dataclass
class VerbTimes:
    """Of all commands of one verb. Attributes: count; size_bytes; recorded_s and replayed_s: added up."""

    count: int = 0
    size_bytes: int = 0
    recorded_s: float = 0.0
    replayed_s: float = 0.0


@dataclass
class Replayed:
    """What a replay took.

    Attributes:
        recorded_s, replayed_s: from the first command's beginning to the last one's end, then and now, in wall seconds.
        host_s: of that, recorded between commands, and waited for again unless it was left out.
        verbs: by verb.
    """

    recorded_s: float
    replayed_s: float
    host_s: float
    verbs: dict[str, VerbTimes] = field(default_factory=lambda: defaultdict(VerbTimes))


def replay(
    trace: Trace, devices: Sequence[NearStorageDevice], records: Sequence[Records] = (), *, lists: Sequence[PostingLists] = (),
    with_host: bool = True, **row_options: Any,
) -> Replayed:  # fmt: skip
    """Runs a trace once.

    Args:
        trace: commands that failed when they were recorded are left out.
        devices: one for each of the trace's.
        records: those that its searches asked for; they are found by the names of their files.
        lists: posting lists that its searches scanned, found in the same way; they are opened on their devices.
        with_host: waits between commands as long as the host worked there.
        row_options: of `NearStorageDevice.open_rows`.

    Raises:
        InvalidInputError: other devices than the trace has, records or lists that are not there.
        FormatError: a line that says what cannot be.
        what a device raises.
    """
    if len(devices) != len(trace.devices):
        raise errors.InvalidInputError("devices for a trace", got=len(devices), expected=f"{len(trace.devices)}, as it was recorded on")
    run = _Replay(trace, devices, _Kept(records, lists), with_host, row_options)
    return run()


@dataclass(frozen=True)
class _Kept:
    """What is there to be asked for."""

    records: Sequence[Records]
    lists: Sequence[PostingLists]


class _Replay:
    """One run: a thread for each device, which asks for that device's commands in order."""

    def __init__(self, trace: Trace, devices: Sequence[NearStorageDevice], kept: _Kept, with_host: bool, row_options: dict[str, Any]):
        self._commands = [each for each in trace.commands if not each.failed]
        self._devices, self._kept, self._with_host, self._row_options = devices, kept, with_host, row_options
        self._recorded_s = trace.wall_s
        by_end = sorted(self._commands, key=lambda each: each.end_s)
        self._ends = [each.end_s for each in by_end]
        self._place_by_end = {each.number: place for place, each in enumerate(by_end)}
        self._is_done = np.zeros(len(by_end), dtype=bool)
        self._leading = 0  # so many of `by_end` are done, without a gap
        self._changed = threading.Condition()
        self._failure: BaseException | None = None
        self._ended_at = 0.0
        self.found = Replayed(self._recorded_s, 0.0, sum(each.host_s for each in self._commands))

    def __call__(self) -> Replayed:
        threads = [threading.Thread(target=self._run, args=(number,), name="espnx-replay") for number in range(len(self._devices))]
        begun = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self._failure is not None:
            raise self._failure
        self.found.replayed_s = time.perf_counter() - begun
        return self.found

    def _run(self, device: int) -> None:
        player = _Player(self._devices[device], self._kept, self._row_options)
        try:
            for command in self._commands:
                if command.device == device:
                    ask = player.prepare(command)
                    self._wait_for(command)
                    begun = time.perf_counter()
                    ask()
                    self._end(command, time.perf_counter() - begun)
        except BaseException as error:
            with self._changed:
                self._failure = self._failure or error
                self._changed.notify_all()
        finally:
            player.close()

    def _wait_for(self, command: Command) -> None:
        before = bisect_right(self._ends, command.at_s)
        with self._changed:
            self._changed.wait_for(lambda: self._leading >= before or self._failure is not None)
            if self._failure is not None:
                raise errors.TransferCancelledError("a replay that failed elsewhere")
        if self._with_host and command.host_s:
            time.sleep(command.host_s)

    def _end(self, command: Command, took_s: float) -> None:
        with self._changed:
            self._is_done[self._place_by_end[command.number]] = True
            while self._leading < len(self._is_done) and self._is_done[self._leading]:
                self._leading += 1
            times = self.found.verbs[command.verb]
            times.count += 1
            times.size_bytes += command.size_bytes
            times.recorded_s += command.took_s
            times.replayed_s += took_s
            self._changed.notify_all()


class _Player:
    """Turns lines into calls of one device."""

    def __init__(self, device: NearStorageDevice, there: _Kept, row_options: dict[str, Any]):
        self._device, self._there, self._row_options = device, there, row_options
        self._rows = dict[int, RowDevice]()
        self._segments = dict[tuple[int, int], Segment]()
        self._tickets = dict[tuple[int, int], tuple[int, Fields]]()
        self._kept = dict[int, Records]()
        self._lists = dict[int, PostingsDevice]()
        self._verbs: dict[str, Callable[[Command], Callable[[], Any]]] = {
            "put": self._put, "restore": self._put, "join": self._join, "release": self._release, "ahead": self._ahead,
            "attend": self._attend, "visit": self._visit, "forget": self._forget,
            "flush": lambda command: self._of(command).flush, "sync": lambda command: self._of(command).sync,
            "keep_records": self._keep_records, "maxsim": self._maxsim, "read": self._read,
            "keep_lists": self._keep_lists, "scan": self._scan,
        }  # fmt: skip

    def prepare(self, command: Command) -> Callable[[], Any]:
        """Makes what a command needs of the host, and returns the call."""
        verb = self._verbs.get(command.verb)
        if verb is None:
            command.detail.refuse("verb", " or ".join(self._verbs))
        return verb(command)

    def close(self) -> None:
        for part in (*self._rows.values(), *self._lists.values()):
            part.close()

    def _of(self, command: Command) -> RowDevice:
        if command.part not in self._rows:
            self._rows[command.part] = self._device.open_rows(**self._row_options)
        return self._rows[command.part]

    def _segment(self, command: Command, number: int) -> Segment:
        if (command.part, number) not in self._segments:
            command.detail.refuse("segment", "one that was put before", number)
        return self._segments[command.part, number]

    def _put(self, command: Command) -> Callable[[], None]:
        rows, said = self._of(command), command.detail.each("segments", count=1 << 24)
        layouts = [_layout(each) for each in said]
        # Segments of one put are alike; those of a state that was restored need not be.
        alike = defaultdict[tuple[RowLayout, range, int], list[int]](list)
        for each, layout in zip(said, layouts, strict=True):
            alike[layout, _heads(each), each.whole("n_rows")].append(each.whole("number"))
        made = [(key, numbers, *_some_rows(key[0], len(numbers), len(key[1]), key[2], command)) for key, numbers in alike.items()]

        def ask() -> None:
            for (layout, heads, _), numbers, k, v in made:
                for number, segment in zip(numbers, rows.put(layout, k, v, heads), strict=True):
                    self._segments[command.part, number] = segment

        return ask

    def _join(self, command: Command) -> Callable[[], None]:
        rows, of = self._of(command), command.detail.wholes("of", count=1 << 20)
        segments = [self._segment(command, number) for number in of]
        said = command.detail.each("segments", count=1)
        if not said:
            command.detail.refuse("segments", "the one that is made")
        (into,) = said

        def ask() -> None:
            self._segments[command.part, into.whole("number")] = rows.join(segments)

        return ask

    def _release(self, command: Command) -> Callable[[], None]:
        number = command.detail.whole("segment")
        segment = self._segment(command, number)
        del self._segments[command.part, number]
        return functools.partial(self._of(command).release, segment)

    def _ahead(self, command: Command) -> Callable[[], None]:
        rows, layout, views = self._of(command), _layout(command.detail), list[SegmentView]()
        values = command.detail.values().get("views")
        if not isinstance(values, list):
            command.detail.refuse("views", "a list")
        for each in values:
            if not (isinstance(each, list) and len(each) == 4 and all(type(number) is int and number >= 0 for number in each)):
                command.detail.refuse("views", "[segment, sequence, n_rows, first_position]", each)
            views.append(SegmentView(self._segment(command, each[0]), *each[1:]))

        def ask() -> None:
            self._tickets[command.part, command.detail.whole("ticket")] = rows.ahead(layout, views), command.detail

        return ask

    def _ticket(self, command: Command) -> tuple[int, Fields]:
        known = self._tickets.pop((command.part, command.detail.whole("ticket")), None)
        if known is None:
            command.detail.refuse("ticket", "one of an `ahead` before")
        return known

    def _attend(self, command: Command) -> Callable[[], Any]:
        rows, (ticket, asked) = self._of(command), self._ticket(command)
        layout, shape = _layout(asked), command.detail.wholes("queries", count=4)
        if len(shape) != 4:
            command.detail.refuse("queries", "[sequences, KV heads, rows, d]", shape)
        _check_size(shape, command)
        sequences, heads, n, d = shape
        queries = Queries(torch.zeros(sequences, heads, n, d), command.detail.whole("dv", 1, 1 << 20))
        tail_rows = command.detail.whole("tail_rows")
        tail = None
        if tail_rows:
            _check_size([sequences, heads, tail_rows, layout.d + layout.dv], command)
            k = torch.zeros(sequences, heads, tail_rows, layout.d, dtype=DTYPES.get(layout.format, torch.float16))
            v = k if layout.is_shared else torch.zeros(sequences, heads, tail_rows, layout.dv, dtype=k.dtype)
            tail = RowsInMemory(k, v, 0, tail_rows, 0)
        return functools.partial(rows.attend, ticket, queries, tail)

    def _visit(self, command: Command) -> Callable[[], None]:
        rows, (ticket, _) = self._of(command), self._ticket(command)
        in_s, left_bytes = command.detail.real("host_in_s"), max(command.size_bytes, 1)

        def show(memory: torch.Tensor, pieces: np.ndarray) -> None:
            time.sleep(in_s * min(memory.numel() / left_bytes, 1.0))

        return functools.partial(rows.visit, ticket, show)

    def _forget(self, command: Command) -> Callable[[], None]:
        for key in [key for key in self._tickets if key[0] == command.part]:
            del self._tickets[key]
        return self._of(command).forget

    def _keep_records(self, command: Command) -> Callable[[], None]:
        files = sorted(command.detail.texts("files", count=1 << 20))
        for each in self._there.records:
            if sorted(file.path for file in each.files) == files:
                self._kept[command.part] = each
                return lambda: None
        raise errors.InvalidInputError(
            "records that a trace asks for", got="an index of other files" if self._there.records else "no index",
            expected=", ".join(files[:3]), fix="name the index that was searched (--index)",
        )  # fmt: skip

    def _asked(self, command: Command) -> tuple[Records, np.ndarray]:
        if command.part not in self._kept:
            command.detail.refuse("part", "one that `keep_records` names")
        kept = self._kept[command.part]
        return kept, np.array(command.detail.wholes("places", most=max(len(kept.n_tokens) - 1, 0), count=1 << 28), dtype=np.int64)

    def _maxsim(self, command: Command) -> Callable[[], Any]:
        kept, numbers = self._asked(command)
        lengths = command.detail.wholes("queries", most=1 << 20, count=1 << 20)
        _check_size([sum(lengths), kept.schema.dim], command)
        queries = [RecordQuery(torch.zeros(1, kept.schema.d_cls), torch.zeros(n, kept.schema.dim), 1.0) for n in lengths]
        pairs = None
        if len(queries) != 1:
            count = command.detail.whole("pairs", most=1 << 31)
            if count and not (len(numbers) and queries):
                command.detail.refuse("pairs", "0 without records or queries")
            which = np.arange(count, dtype=np.int64)
            pairs = Pairs(which * len(numbers) // max(count, 1), which % max(len(queries), 1))
        options = {
            "gap_bytes": command.detail.whole("gap_bytes") if "gap_bytes" in command.detail else 0,
            "is_urgent": command.detail.flag("is_urgent") if "is_urgent" in command.detail else True,
        }  # fmt: skip
        return lambda: kept.maxsim(numbers, queries, pairs, **options).finish()

    def _read(self, command: Command) -> Callable[[], Any]:
        kept, numbers = self._asked(command)
        return lambda: kept.read(numbers, gap_bytes=0).wait()

    def _keep_lists(self, command: Command) -> Callable[[], None]:
        files = command.detail.texts("files", count=1)
        found = next((each for each in self._there.lists if [each.path] == files), None)
        if found is None:
            raise errors.InvalidInputError(
                "posting lists that a trace asks for", got="others" if self._there.lists else "none", expected=", ".join(files),
                fix="name the directories of the collection that was searched (--postings)",
            )  # fmt: skip
        self._lists[command.part] = self._device.open_postings(found)
        return lambda: None

    def _scan(self, command: Command) -> Callable[[], Any]:
        if command.part not in self._lists:
            command.detail.refuse("part", "one that `keep_lists` names")
        text = command.detail.text("payload", most=LINE_BYTES_MAX)
        try:
            asked = ScanCommand.parse(base64.b64decode(text, validate=True))
        except (ValueError, errors.FormatError) as error:
            command.detail.refuse("payload", "the command of a scan, in base64", str(error))
        held = self._lists[command.part]
        return lambda: held.scan(asked.lists, asked.weights, asked.k, allowed=asked.allowed).finish()


def _layout(said: Fields) -> RowLayout:
    shape = said.inner("layout")
    return RowLayout(
        shape.choice("format", DTYPES), shape.whole("d", 1, 1 << 20), shape.whole("dv", 1, 1 << 20), shape.flag("is_shared"),
        shape.whole("least_rows", 1, 1 << 20),
    )  # fmt: skip


def _heads(said: Fields) -> range:
    found = said.wholes("heads", most=1 << 20, count=3)
    if len(found) != 3 or not found[2]:
        said.refuse("heads", "[start, stop, step], the step above 0", found)
    start, stop, step = found
    return range(start, stop, step)


def _check_size(shape: Sequence[int], command: Command) -> None:
    values = 1
    for each in shape:
        values *= each
    if values > _ROWS_MAX:
        command.detail.refuse("queries", f"at most {_ROWS_MAX} values", list(shape))


def _some_rows(layout: RowLayout, sequences: int, heads: int, n: int, command: Command) -> tuple[torch.Tensor, torch.Tensor | None]:
    _check_size([sequences, heads, n, layout.d + layout.dv], command)
    dtype = DTYPES.get(layout.format, torch.float16)
    dtype = dtype if dtype.is_floating_point else torch.float16
    k = torch.zeros(sequences, heads, n, layout.d, dtype=dtype)
    return k, None if layout.is_shared else torch.zeros(sequences, heads, n, layout.dv, dtype=dtype)
