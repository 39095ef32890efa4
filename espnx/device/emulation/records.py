"""Embedding records on an emulated device: read and scored by this machine, handed out when the device would have had them.

A device whose accelerator scores records (MaxSim) takes queries and gives scores back; of any other the records pass its link, and the host
scores them. Scores are those of the plain device either way, to the bit.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...storage import FileHandle, Future
from ..interface import Capabilities, DeviceStats, FilePath, KeptRecords, Pairs, RecordDevice, RecordQuery, RecordTicket
from ..record_layout import RecordLayout
from .topology import Topology, Transfer

#: Records of a request come in groups of so many bytes: large enough for flash, small enough that scores come as they are ready.
GROUP_BYTES = 1 << 20
_PAGE_BYTES = 4096
_SCORE_BYTES = 8  # a float32, and the record's number


class EmulatedRecordDevice:
    """See `espnx.device.interface.RecordDevice`.

    Args:
        inner: does the work; closed with this one.
        topology, number: which device of it.
        scores_records: its accelerator computes MaxSim.
    """

    capabilities = Capabilities()

    def __init__(self, inner: RecordDevice, topology: Topology, number: int, *, scores_records: bool):
        self.compute, self.engine = inner.compute, inner.engine
        self._inner, self._pacing = inner, _Pacing(topology, number, scores_records)

    def open(self, path: str) -> FileHandle:
        """See `RecordDevice`."""
        return self._inner.open(path)

    def close_file(self, file: FileHandle) -> None:
        """See `RecordDevice`."""
        self._inner.close_file(file)

    def keep_records(self, layout: RecordLayout) -> KeptRecords:
        """See `RecordDevice`."""
        return _EmulatedRecords(self._inner.keep_records(layout), layout, self._pacing)

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return self._inner.path_report()

    def stats(self) -> DeviceStats:
        """See `Device`. Of the real reads; what passed the links is the topology's to say."""
        return self._inner.stats()

    def forget(self) -> None:
        """See `Device`."""
        self._inner.forget()

    def close(self) -> None:
        """See `Device`."""
        self._inner.close()


@dataclass(frozen=True)
class _Pacing:
    """What requests cost one device of a topology."""

    topology: Topology
    device: int
    scores_records: bool

    def queries(self, queries: Sequence[RecordQuery]) -> Transfer | None:
        """To the device, where it scores."""
        if not self.scores_records:
            return None
        size_bytes = sum(each.tokens.nbytes + each.cls.nbytes for each in queries)
        return self.topology.transfer(self.device, "host_to_device", size_bytes)

    def group(self, size_bytes: int, flop: float, scores: int, asked: Transfer | None) -> Transfer:
        """Records from flash to where they are scored, and what goes to the host."""
        if asked is None:
            return self.topology.transfer(self.device, "flash_to_host", size_bytes)
        read = self.topology.transfer(self.device, "flash_read", size_bytes, after=asked)
        scored = self.topology.compute(self.device, flop, size_bytes, after=read)
        return self.topology.transfer(self.device, "device_to_host", scores * _SCORE_BYTES, after=scored)


class _EmulatedRecords:
    """See `espnx.device.interface.KeptRecords`."""

    def __init__(self, inner: KeptRecords, layout: RecordLayout, pacing: _Pacing):
        self._inner, self._layout, self._pacing = inner, layout, pacing

    def maxsim(
        self,
        numbers: np.ndarray,
        queries: Sequence[RecordQuery],
        pairs: Pairs | None = None,
        *,
        gap_bytes: int = 0,
        is_urgent: bool = True,
        deadline_s: float = 30.0,
    ) -> RecordTicket:
        """See `KeptRecords`. `deadline_s` is of the real reads, and in virtual seconds of the device's."""
        numbers = np.ascontiguousarray(numbers, dtype=np.int64)
        layout, pacing = self._layout, self._pacing
        pages = layout.locate(numbers)[2].numpy()
        pages = -(-pages // _PAGE_BYTES) * _PAGE_BYTES
        wanted = np.ones(len(numbers), np.int64) if pairs is None else np.bincount(pairs.item, minlength=len(numbers))
        tokens = sum(len(each.tokens) for each in queries) / max(len(queries), 1)
        flop = 2.0 * layout.schema.dim * tokens * layout.n_tokens[numbers] * wanted
        asked, groups = pacing.queries(queries), deque[_Group]()
        for begin, end in _groups(pages):
            part = slice(begin, end)
            transfer = pacing.group(int(pages[part].sum()), float(flop[part].sum()), int(wanted[part].sum()), asked)
            groups.append(_Group(begin, end, transfer))
        inner = self._inner.maxsim(numbers, queries, pairs, gap_bytes=gap_bytes, is_urgent=is_urgent, deadline_s=deadline_s)
        return _PacedTicket(inner, len(numbers), groups, pacing.topology, deadline_s * max(pacing.topology.stretch, 1.0))

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """See `KeptRecords`. Not paced: whole records are for whoever checks or copies a store."""
        return self._inner.read(numbers, gap_bytes=gap_bytes, deadline_s=deadline_s)

    def release(self) -> None:
        """See `KeptRecords`."""
        self._inner.release()


def _groups(sizes: np.ndarray) -> list[tuple[int, int]]:
    """Consecutive places whose sizes add up to `GROUP_BYTES`, the last of each beyond it."""
    if not len(sizes):
        return []
    ends = np.flatnonzero(np.diff(np.cumsum(sizes) // GROUP_BYTES, append=-1)) + 1
    return list(zip([0, *ends[:-1].tolist()], ends.tolist(), strict=True))


@dataclass(frozen=True)
class _Group:
    """Places `begin` to `end` among a request's numbers, and when they are there."""

    begin: int
    end: int
    transfer: Transfer


class _PacedTicket:
    """See `espnx.device.interface.RecordTicket`. Scores come in the order of the numbers."""

    def __init__(self, inner: RecordTicket, count: int, groups: deque[_Group], topology: Topology, deadline_s: float):
        self._inner, self._groups, self._topology, self._deadline_s = inner, groups, topology, deadline_s
        self._is_scored = np.zeros(count, dtype=bool)
        self._has_ended = False  # the real work
        self._finished_at = time.perf_counter()

    def next(self, at_least: int = 1, timeout_s: float | None = None) -> tuple[np.ndarray, bool]:
        """See `RecordTicket`."""
        asked_s, until = self._topology.now(), None if timeout_s is None else time.monotonic() + timeout_s
        found, count = list[np.ndarray](), 0
        try:
            while self._groups and count < max(at_least, 1):
                group = self._groups[0]
                if not self._score(group, until) or not self._arrive(group, asked_s, until):
                    break
                self._groups.popleft()
                self._finished_at = time.perf_counter()
                found.append(np.arange(group.begin, group.end))
                count += group.end - group.begin
            if not self._groups and not self._has_ended:
                self._has_ended = self._inner.next(1, None if until is None else max(until - time.monotonic(), 0.0))[1]
        except BaseException:
            self.cancel()
            raise
        return np.concatenate([np.empty(0, np.int64), *found]), not self._groups and self._has_ended

    def _score(self, group: _Group, until: float | None) -> bool:
        """Whether this machine has scored the whole group by then."""
        while not self._is_scored[group.begin : group.end].all():
            left_s = None if until is None else until - time.monotonic()
            if left_s is not None and left_s < 0:
                return False
            items, self._has_ended = self._inner.next(1, left_s)
            self._is_scored[items] = True
        return True

    def _arrive(self, group: _Group, asked_s: float, until: float | None) -> bool:
        """Whether the device has them on the host by then."""
        if until is None:
            self._topology.wait(group.transfer, asked_s=asked_s, deadline_s=self._deadline_s)
            return True
        if self._topology.done(group.transfer):
            return True
        try:
            self._topology.wait(group.transfer, asked_s=asked_s, deadline_s=max(until - time.monotonic(), 0.0))
        except errors.DeadlineExceededError:
            return False
        return True

    @property
    def scores(self) -> np.ndarray:
        """See `RecordTicket`."""
        return self._inner.scores

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._inner.add(pairs)

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        while not self.next(2**62)[1]:
            pass
        return self._inner.finish()

    def cancel(self) -> None:
        """See `RecordTicket`."""
        self._inner.cancel()
        for group in self._groups:
            self._topology.cancel(group.transfer)

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        raise errors.InvalidInputError("records of an emulated device", got="scores alone", expected="a device that hands out records")

    @property
    def stats(self) -> DeviceStats:
        """See `RecordTicket`."""
        return self._inner.stats

    @property
    def finished_at(self) -> float:
        """See `RecordTicket`."""
        return self._finished_at
