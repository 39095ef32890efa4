"""Posting lists on a device whose scans are written into a trace: each with the whole command, so that a replay sends the same bytes."""

from __future__ import annotations

import base64
import time
from typing import Any

import numpy as np

from ..around import DeviceAround
from ..interface import DeviceStats
from ..postings import PostingLists, PostingsDevice, ScanCommand, ScanLists, ScanTicket, Weights
from ..postings.command import UNIT_BYTES
from .writer import TraceWriter


class RecordedPostings(DeviceAround[PostingsDevice]):
    """See `espnx.device.postings.interface.PostingsDevice`."""

    def __init__(self, inner: PostingsDevice, device: int, writer: TraceWriter):
        super().__init__(inner)
        self._device, self._writer, self._part = device, writer, writer.part()
        with writer.command(device, "keep_lists") as line:
            line |= {"part": self._part, "files": [inner.lists.path], "records": inner.lists.n_records}

    @property
    def lists(self) -> PostingLists:
        return self._inner.lists

    def scan(
        self, lists: ScanLists, weights: Weights, k: int, *, allowed: np.ndarray | None = None, deadline_s: float = 30.0
    ) -> ScanTicket:
        line = self._writer.begin(self._device, "scan")
        try:
            ticket = self._inner.scan(lists, weights, k, allowed=allowed, deadline_s=deadline_s)
            command, places = ticket.command, np.stack([lists.places["offset"], lists.places["size"]], axis=1)
            line |= {
                "part": self._part, "bytes": lists.size_bytes, "k": k, "postings": lists.n_postings,
                "lists": (places.astype(np.int64) * UNIT_BYTES).tolist(),
                "sent": command.payload_bytes, "reply": command.data_len, "payload": base64.b64encode(command.payload).decode(),
            }  # fmt: skip
        except BaseException as error:
            self._writer.end(line, failed=type(error).__name__)
            raise
        return _Ticket(ticket, line, self._writer)


class _Ticket:
    """See `espnx.device.postings.interface.ScanTicket`. The command ends with `finish`, or when it is cancelled."""

    def __init__(self, inner: ScanTicket, line: dict[str, Any], writer: TraceWriter):
        self._inner, self._line, self._writer = inner, line, writer
        self._is_open = True

    def finish(self) -> np.ndarray:
        begun, failed = time.perf_counter(), None
        try:
            return self._inner.finish()
        except BaseException as error:
            failed = type(error).__name__
            raise
        finally:
            self._line["waited_s"] = round(time.perf_counter() - begun, 7)
            self._end(failed)

    def _end(self, failed: str | None) -> None:
        if self._is_open:
            self._is_open = False
            self._writer.end(self._line, failed=failed)

    @property
    def command(self) -> ScanCommand:
        return self._inner.command

    @property
    def other_terms(self) -> np.ndarray:
        return self._inner.other_terms

    def cancel(self) -> None:
        self._inner.cancel()
        self._end("cancelled")

    @property
    def stats(self) -> DeviceStats:
        return self._inner.stats
