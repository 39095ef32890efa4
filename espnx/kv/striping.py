"""Several devices as one: head h of sequence s lies on device (s x heads + h) mod devices, so that
all of them work on every layer."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass, replace

import torch

from .. import errors
from ..device.interface import (
    ChecksLater,
    DeviceStats,
    FilePath,
    RowDevice,
    Segment,
    SegmentPlace,
    SegmentView,
    Show,
)
from ..device.row_layout import RowLayout
from ..device.several import files_of, stats_of, together
from ..device.workers import Job, Workers, wait
from ..ops.attention import Queries, RowsInMemory
from ..streams import Stream, current_stream, on

Storage = str | os.PathLike[str] | Sequence[str | os.PathLike[str]]


def directories_of(storage: Storage) -> list[str]:
    """One for each device. Raises InvalidInputError."""
    try:
        found = [
            os.fspath(each)
            for each in ([storage] if isinstance(storage, (str, os.PathLike)) else storage)
        ]
    except TypeError as error:
        raise errors.InvalidInputError(
            "storage", got=repr(storage), expected="a directory, or several"
        ) from error
    is_right = all(isinstance(each, str) and each and "\0" not in each for each in found)
    if not found or not is_right:
        raise errors.InvalidInputError(
            "storage", got=repr(storage), expected="a directory, or several"
        )
    return found


@dataclass(eq=False, slots=True)
class StripedSegment:
    """A segment, and which of the devices it lies on.

    Attributes:
        segment: as the device knows it; of a kept cache whose devices are not open yet: its
            `SegmentPlace`.
        references: how many sequences look at it.
    """

    device: int
    segment: Segment
    references: int = 1


class StripedDevices:
    """Devices that share the rows of a cache. They are opened when it is known where rows are
    computed on.

    Args:
        count: of devices, at least one.
        open_device: makes one of them, by number, that computes in the memory of such a torch
            device.

    Attributes:
        count: as given.
        devices: those that are open: all, or none yet.
        checks_later: devices that can (`ChecksLater`) look at rows whose checksums `check` waits
            for, once for all; before that nothing may leave that was made of them.
    """

    def __init__(self, count: int, open_device: Callable[[int, torch.device], RowDevice]):
        self.count, self.devices = count, list[RowDevice]()
        self.checks_later = False
        self._open_device = open_device
        self._kept: list[StripedSegment] = []  # of a published state, to be restored
        # by the first device's ticket, where devices share the tail
        self._views: dict[int, Sequence[Sequence[SegmentView]]] = {}
        self._pool = ThreadPoolExecutor(count, "espnx-device") if count > 1 else None

    @property
    def is_open(self) -> bool:
        return bool(self.devices)

    def open(self, compute: torch.device) -> None:
        """Opens the devices, unless they are open. Raises what a device raises; none is open
        then."""
        if self.devices:
            return
        with ExitStack() as undo:
            undo.callback(self.devices.clear)
            for number in range(self.count):
                device = self._open_device(number, compute)
                undo.callback(device.close)
                self.devices.append(device)
            self._restore_kept()
            undo.pop_all()

    def restore(self, segments: Sequence[StripedSegment]) -> None:
        """What a published state names, as `SegmentPlace`: restored now, or when the devices are
        opened. Raises as `Space.restore`."""
        self._kept = list(segments)
        if self.devices:
            self._restore_kept()

    def _restore_kept(self) -> None:
        found = []
        for number, device in enumerate(self.devices):
            mine = [each for each in self._kept if each.device == number]
            places = [each.segment for each in mine if isinstance(each.segment, SegmentPlace)]
            found += list(zip(mine, device.space.restore(places), strict=True)) if places else []
        for each, segment in found:
            each.segment = segment
            if not each.references:  # cropped away since
                self.devices[each.device].release(segment)
        self._kept = []

    def place(self, each: StripedSegment) -> SegmentPlace:
        """The place of a segment, to be written down."""
        if isinstance(each.segment, SegmentPlace):
            return each.segment
        return self.devices[each.device].space.place(each.segment)

    def put(
        self, layout: RowLayout, k: torch.Tensor, v: torch.Tensor | None, first_sequence: int = 0
    ) -> list[list[StripedSegment]]:
        """Starts writing k [sequences, heads, n, d] and v, of sequences from `first_sequence` on.
        For each its segments.

        Raises what a device's put raises; nothing is kept then.
        """
        n_sequences, n_heads = k.shape[:2]
        found: list[list[StripedSegment]] = [[] for _ in range(n_sequences)]
        try:
            for device, heads, sequences in self._shares(first_sequence, n_sequences, n_heads):
                mine = (
                    slice(sequences.start, None, sequences.step),
                    slice(heads.start, None, heads.step),
                )
                segments = self.devices[device].put(
                    layout, k[mine], None if v is None else v[mine], heads
                )
                for sequence, segment in zip(sequences, segments, strict=True):
                    found[sequence].append(StripedSegment(device, segment))
        except BaseException:
            for parts in found:
                for each in parts:
                    self.release(each)
            raise
        return found

    def join(self, segments: Sequence[StripedSegment]) -> StripedSegment:
        """One segment with the rows of several, which stay. Raises as a device's join."""
        device = segments[0].device
        return StripedSegment(
            device, self.devices[device].join([each.segment for each in segments])
        )

    def release(self, each: StripedSegment) -> None:
        """A sequence does not look at this segment any more; with the last one it goes."""
        each.references -= 1
        if each.references == 0 and self.devices:
            self.devices[each.device].release(each.segment)

    def memory(
        self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Memory for rows that wait, uninitialised: on the host, a device's own. Rows outlive the
        mode in which they come: tensors of inference mode could not be written to outside of it.
        Raises OutOfMemoryError."""
        with torch.inference_mode(False):
            if device.type != "cpu" or not self.devices:
                return torch.empty(shape, dtype=dtype, device=device)
            size_bytes = math.prod(shape) * dtype.itemsize
            try:
                return self.devices[0].memory(size_bytes).view(dtype).view(shape)
            except MemoryError as error:
                raise errors.OutOfMemoryError(
                    "rows that wait", needed_bytes=size_bytes, fix="a smaller spill_interval"
                ) from error

    def _shares(
        self, first_sequence: int, n_sequences: int, n_heads: int
    ) -> list[tuple[int, range, range]]:
        """(device, heads, sequences, from 0 on) that are put together."""
        count = self.count
        period = count // math.gcd(count, n_heads)  # after which sequences lie alike
        found = []
        for sequence in range(min(period, n_sequences)):
            for device in range(count):
                first = (device - (first_sequence + sequence) * n_heads) % count
                if first < n_heads:
                    found.append(
                        (device, range(first, n_heads, count), range(sequence, n_sequences, period))
                    )
        return found

    def is_written(self, each: StripedSegment) -> bool:
        return not self.devices or self.devices[each.device].is_written(each.segment)

    def ahead(self, layout: RowLayout, views: Sequence[Sequence[SegmentView]]) -> list[int]:
        """A ticket of each device."""
        tickets = [
            device.ahead(layout, part) for device, part in zip(self.devices, views, strict=True)
        ]
        if self.count > 1 and all(
            device.capabilities.attends_part_of_tail for device in self.devices
        ):
            self._views[tickets[0]] = views
        return tickets

    def lacks(self, queries: Queries, layout: RowLayout) -> tuple[str, ...]:
        """What some device lacks to attend with these queries; empty: all take them."""
        return tuple(
            dict.fromkeys(
                name
                for device in self.devices
                for name in device.capabilities.lacks(queries, layout)
            )
        )

    def attend(
        self, tickets: list[int], queries: Queries, tail: RowsInMemory | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Each device over its own rows, at the same time; merged by log-sum-exp."""
        attend = _attend_unchecked if self.checks_later else _attend
        if self._pool is None:
            return attend(self.devices[0], tickets[0], queries, tail)
        tails = self._tails(tickets[0], queries, tail)
        stream = current_stream(queries.q.device)
        with Workers(self.devices) as workers:
            jobs = list[Job[tuple[torch.Tensor, torch.Tensor]]]()
            try:
                for device, ticket, own in zip(self.devices, tickets, tails, strict=True):
                    job = workers.submit(
                        self._pool, _attend_on, stream, attend, device, ticket, queries, own
                    )
                    jobs.append(job)
                # also where one has failed: nobody may still be at work when the caller goes on
                wait(jobs)
            except BaseException:  # Ctrl-C, or no thread could be had
                self.forget()  # wakes whoever waits for a read
                wait(jobs)
                raise
            return together(job.result() for job in jobs)

    def _tails(
        self, ticket: int, queries: Queries, tail: RowsInMemory | None
    ) -> list[RowsInMemory | None]:
        """What of the rows in memory each device attends to: the first to all of them, or, where
        all can, each to those of the heads whose newest stored rows it has. A head that lies on one
        device whole is then computed by that one, whole."""
        views = self._views.pop(ticket, None)
        if views is None or tail is None:
            return [tail, *[None] * (self.count - 1)]
        owner = torch.zeros(queries.q.shape[:2], dtype=torch.int64)
        newest = torch.full(queries.q.shape[:2], -1)
        for device, part in enumerate(views):
            for view in part:
                heads = torch.tensor(view.segment.heads)
                later = heads[newest[view.sequence, heads] < view.first_position]
                owner[view.sequence, later], newest[view.sequence, later] = (
                    device,
                    view.first_position,
                )
        return [replace(tail, counts=owner == device) for device in range(self.count)]

    def visit(self, tickets: list[int], show: Show, *, may_check_later: bool = False) -> None:
        """Shows the rows of each device, one device after the other; their reads run at the same
        time all the same. `may_check_later`: `show` computes on them and nothing else, so that they
        may be checked as those that are attended to."""
        self._views.pop(tickets[0], None)
        for device, ticket in zip(self.devices, tickets, strict=True):
            later = _that_checks_later(device) if may_check_later and self.checks_later else None
            if later is None:
                device.visit(ticket, show)
            else:
                later.visit_unchecked(ticket, show)

    def check(self) -> None:
        """Waits until all that was looked at is checked. Raises ChecksumError."""
        for device in self.devices:
            if (later := _that_checks_later(device)) is not None:
                later.check_looked_at()

    def forget_checks(self) -> None:
        """What was made of rows so far is thrown away, whether they were right or not."""
        for device in self.devices:
            if (later := _that_checks_later(device)) is not None:
                later.forget_checks()

    def are_next(self, tickets: list[int]) -> bool:
        return self.is_open and all(
            device.front() == ticket for device, ticket in zip(self.devices, tickets, strict=True)
        )

    def reach(self, size_bytes: int) -> None:
        """Lets reads go so many bytes ahead, of all devices together, on those that can
        (`Reaches`); on none less far than it goes of itself."""
        for device in self.devices:
            # not by the protocol, which from Python 3.12 on does not see through a recorded device
            if callable(reach := getattr(device, "reach", None)):
                reach(size_bytes // self.count)

    def forget(self) -> None:
        self._views.clear()
        for device in self.devices:
            device.forget()

    def flush(self) -> None:
        for device in self.devices:
            device.flush()

    def stats(self) -> DeviceStats:
        """The stats of all devices together."""
        return stats_of(self.devices)

    def path_report(self) -> list[FilePath]:
        """The paths of all files of all devices."""
        return files_of(self.devices)

    @property
    def may_land(self) -> bool:
        """Whether something may still be written to files that stay, though the devices are
        closed."""
        return any(getattr(device, "may_land", False) for device in self.devices)

    def close(self) -> None:
        with ExitStack() as stack:
            for device in self.devices:
                stack.callback(device.close)
            if self._pool is not None:
                self._pool.shutdown()


Attend = Callable[[RowDevice, int, Queries, RowsInMemory | None], tuple[torch.Tensor, torch.Tensor]]


def _attend(
    device: RowDevice, ticket: int, queries: Queries, tail: RowsInMemory | None
) -> tuple[torch.Tensor, torch.Tensor]:
    return device.attend(ticket, queries, tail)


def _attend_unchecked(
    device: RowDevice, ticket: int, queries: Queries, tail: RowsInMemory | None
) -> tuple[torch.Tensor, torch.Tensor]:
    later = _that_checks_later(device)
    if later is None:
        return device.attend(ticket, queries, tail)
    return later.attend_unchecked(ticket, queries, tail)


def _that_checks_later(device: RowDevice) -> ChecksLater | None:
    """The device, if it can check later itself: one that stands in front of such a device (a trace,
    say) hands on what it does not know, and would be passed by."""
    knows = hasattr(type(device), "attend_unchecked")
    return device if knows and isinstance(device, ChecksLater) else None


def _attend_on(
    stream: Stream | None,
    attend: Attend,
    device: RowDevice,
    ticket: int,
    queries: Queries,
    tail: RowsInMemory | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attends in a thread of the pool, whose current stream is not the caller's."""
    with on(stream):
        return attend(device, ticket, queries, tail)
