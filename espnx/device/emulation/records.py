"""Embedding records on an emulated device: read and scored by this machine, handed out when the device would have had them.

A device whose accelerator scores records (MaxSim) takes queries and gives scores back; of any other the records pass its link, and the host
scores them. Scores are those of the plain device either way, to the bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from ... import errors
from ...storage import FileHandle, Future
from ..interface import KeptRecords, Pairs, RecordDevice, RecordQuery, RecordTicket
from ..record_layout import RecordLayout
from .faults import Guard
from .paced import Group, PacedDevice, PacedTicket, groups_of, page_reads
from .topology import Topology, Transfer

_SCORE_BYTES = 8  # a float32, and the record's number


class EmulatedRecordDevice(PacedDevice[RecordDevice]):
    """See `espnx.device.interface.RecordDevice`.

    Args:
        inner: does the work; closed with this one.
        topology, number: which device of it.
        scores_records: its accelerator computes MaxSim.
        guard: what goes wrong on it.
    """

    def __init__(self, inner: RecordDevice, topology: Topology, number: int, *, scores_records: bool, guard: Guard | None = None):
        super().__init__(inner, topology)
        self.engine = inner.engine
        self._pacing = _Pacing(topology, number, scores_records, guard or Guard(topology, number, ""))

    def open(self, path: str) -> FileHandle:
        """See `RecordDevice`."""
        return self._inner.open(path)

    def close_file(self, file: FileHandle) -> None:
        """See `RecordDevice`."""
        self._inner.close_file(file)

    def keep_records(self, layout: RecordLayout) -> KeptRecords:
        """See `RecordDevice`."""
        return _EmulatedRecords(self._inner.keep_records(layout), layout, self._pacing)


@dataclass(frozen=True)
class _Pacing:
    """What requests cost one device of a topology."""

    topology: Topology
    device: int
    scores_records: bool
    guard: Guard

    def queries(self, queries: Sequence[RecordQuery]) -> Transfer | None:
        """To the device, where it scores."""
        if not self.scores_records:
            return None
        size_bytes = sum(each.tokens.nbytes + each.cls.nbytes for each in queries)
        return self.topology.transfer(self.device, "host_to_device", size_bytes)

    def group(self, size_bytes: int, requests: int, flop: float, scores: int, asked: Transfer | None) -> Transfer:
        """Records from flash to where they are scored, and what goes to the host."""
        if asked is None:
            return self.topology.transfer(self.device, "flash_to_host", size_bytes, requests=requests)
        read = self.topology.transfer(self.device, "flash_read", size_bytes, requests=requests, after=asked)
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
        fault = self._pacing.guard.begin("maxsim")
        numbers = np.ascontiguousarray(numbers, dtype=np.int64)
        layout, pacing = self._layout, self._pacing
        file, offset_bytes, size_bytes = (each.numpy() for each in layout.locate(numbers))
        reads, moved_bytes = page_reads(file, offset_bytes, size_bytes, gap_bytes)
        wanted = np.ones(len(numbers), np.int64) if pairs is None else np.bincount(pairs.item, minlength=len(numbers))
        tokens = sum(len(each.tokens) for each in queries) / max(len(queries), 1)
        flop = 2.0 * layout.schema.dim * tokens * layout.n_tokens[numbers] * wanted
        asked, groups = pacing.queries(queries), list[Group]()
        for begin, end in groups_of(moved_bytes):
            part = slice(begin, end)
            sent = int(reads[part].sum()), float(flop[part].sum()), int(wanted[part].sum())
            transfer = pacing.group(int(moved_bytes[part].sum()), *sent, asked)
            groups.append(Group(begin, end, transfer))
        inner = self._inner.maxsim(numbers, queries, pairs, gap_bytes=gap_bytes, is_urgent=is_urgent, deadline_s=deadline_s)
        wall_s = deadline_s * max(pacing.topology.stretch, 1.0)
        hold = partial(pacing.guard.wait, fault, "maxsim", wall_s)
        look = partial(pacing.guard.reply, fault, "maxsim")
        return _PacedRecords(inner, len(numbers), groups, pacing.topology, wall_s, hold, look)

    def read(self, numbers: np.ndarray, *, gap_bytes: int = 0, deadline_s: float = 30.0) -> Future:
        """See `KeptRecords`. Not paced: whole records are for whoever checks or copies a store."""
        return self._inner.read(numbers, gap_bytes=gap_bytes, deadline_s=deadline_s)

    def release(self) -> None:
        """See `KeptRecords`."""
        self._inner.release()


class _PacedRecords(PacedTicket):
    """See `espnx.device.interface.RecordTicket`."""

    def __init__(self, inner: RecordTicket, *paced: Any):
        super().__init__(inner, *paced[:-1])
        self._inner, self._look = inner, paced[-1]

    @property
    def scores(self) -> np.ndarray:
        """See `RecordTicket`."""
        scores: np.ndarray = self._look(self._inner.scores)
        return scores

    def finish(self) -> np.ndarray:
        """See `RecordTicket`."""
        scores: np.ndarray = self._look(super().finish())
        return scores

    def add(self, pairs: Pairs) -> None:
        """See `RecordTicket`."""
        self._inner.add(pairs)

    @property
    def records(self) -> tuple[torch.Tensor, torch.Tensor]:
        """See `RecordTicket`."""
        raise errors.InvalidInputError("records of an emulated device", got="scores alone", expected="a device that hands out records")

    @property
    def finished_at(self) -> float:
        """See `RecordTicket`."""
        return self._finished_at
