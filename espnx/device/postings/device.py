"""The plain SSD as a device for posting lists: a query's lists in one plan of a deep queue, scored
on this machine's cores."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ... import errors
from ...checks import check_finite
from ...storage import NativeEngine
from ...storage.native import load_native
from ..command import Part
from ..interface import Capabilities, DeviceStats, FilePath
from .command import DIGEST, PARTIAL, SCAN_REPLY, UNIT_BYTES, ScanCommand, ScanLists, Weights
from .interface import PostingLists

if TYPE_CHECKING:
    from ..._C import PostingsTicket

_COLUMNS = 12  # of a list that is wanted: see csrc/postings/plan.hpp


class SsdPostingsDevice(Part):
    """See `espnx.device.postings.interface.PostingsDevice`.

    Args:
        lists: that are scanned; their files are opened and closed here.
        engine: of the reads, which stays the caller's; a name opens one of its own.

    Raises what opening the files does, PathUnavailableError.
    """

    compute = torch.device("cpu")
    capabilities = Capabilities()

    def __init__(self, lists: PostingLists, *, engine: NativeEngine | str = "auto"):
        self.lists = lists
        self._owns_engine = isinstance(engine, str)
        self.engine = NativeEngine(engine) if isinstance(engine, str) else engine
        try:
            self._files = list(lists.open(self.engine))
        except BaseException:
            if self._owns_engine:
                self.engine.close()
            raise
        self._stored_bytes = sum(file.size_bytes for file in self._files)
        self._lock = threading.Lock()  # guards what follows
        self._live: weakref.WeakSet[SsdScanTicket] = weakref.WeakSet()
        self._done = DeviceStats()
        self._closed = False

    def scan(
        self,
        lists: ScanLists,
        weights: Weights,
        k: int,
        *,
        allowed: np.ndarray | None = None,
        deadline_s: float = 30.0,
    ) -> SsdScanTicket:
        """See `PostingsDevice`."""
        check_finite("deadline_s", deadline_s)
        self._check_allowed(allowed, k)
        command = ScanCommand(lists, weights, k, allowed=allowed)
        bits = (
            None
            if allowed is None
            else torch.from_numpy(np.require(allowed, requirements=["C", "W"]))
        )
        request = _request(
            command, self.lists.view(weights.rule, bits), self.lists.n_records, deadline_s
        )
        with self._lock:
            if self._closed:
                raise errors.EngineClosedError("the device is closed", fix="open it again")
            ticket = SsdScanTicket(self, command, request)
            self._live.add(ticket)
        return ticket

    def _check_allowed(self, allowed: np.ndarray | None, k: int) -> None:
        if allowed is None:
            return
        size = -(-self.lists.n_records // 8)
        if k == 0 or allowed.dtype != np.uint8 or allowed.shape != (size,):
            got = f"{allowed.dtype} {list(allowed.shape)}, k {k}"
            raise errors.InvalidInputError(
                "allowed", got=got, expected=f"uint8 [{size}], and a k of 1 or more"
            )

    def count(self, stats: DeviceStats) -> None:
        """Adds a scan that has ended."""
        with self._lock:
            self._done = self._done + stats

    def path_report(self) -> Sequence[FilePath]:
        """See `Device`."""
        return [
            FilePath(each.path, each.effective, self.engine.fallback_reason) for each in self._files
        ]

    def stats(self) -> DeviceStats:
        """See `Device`; of scans that have ended."""
        with self._lock:
            return replace(self._done, stored_bytes=self._stored_bytes)

    def forget(self) -> None:
        """See `Device`."""
        with self._lock:
            live = list(self._live)
        for ticket in live:
            ticket.cancel()

    def close(self) -> None:
        """See `Device`."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        self.forget()
        for file in self._files:
            self.engine.close_file(file)
        if self._owns_engine:
            self.engine.close()

    def __enter__(self) -> SsdPostingsDevice:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SsdScanTicket:
    """See `espnx.device.postings.interface.ScanTicket`."""

    def __init__(self, device: SsdPostingsDevice, command: ScanCommand, request: dict[str, Any]):
        self._device, self.command = device, command
        self.other_terms, self._stats = np.zeros(0, np.int64), DeviceStats()
        # The compiled part looks into its tensors for as long as a ticket lives.
        self._requests = (
            [_of_one_list(command, request, i) for i in range(len(command.lists))]
            if command.k == 0
            else [request]
        )
        native, engine = load_native(), device.engine.native
        self._tickets: list[PostingsTicket] = [
            native.PostingsTicket(engine, each) for each in self._requests
        ]

    def finish(self) -> np.ndarray:
        """See `ScanTicket`. The scan runs in the caller's thread."""
        found = self._partial() if self.command.k == 0 else self._best()
        self._device.count(self._stats)
        return found

    def _best(self) -> np.ndarray:
        numbers, scores = self._result(0, len(self.command.lists))
        best = np.empty(int((numbers >= 0).sum()), SCAN_REPLY)
        best["number"], best["score"] = numbers[: len(best)], scores[: len(best)]
        return best

    def _partial(self) -> np.ndarray:
        """A search of one list alone, with room for all of its records, gives what each posting
        adds to a sum."""
        parts = [np.empty(0, PARTIAL)]
        for place in range(len(self._tickets)):
            numbers, scores = self._result(place, 1)
            order = np.argsort(numbers[: int((numbers >= 0).sum())])
            part = np.empty(len(order), PARTIAL)
            part["number"], part["score"] = numbers[order], scores[order]
            parts.append(part)
        return np.concatenate(parts)

    def _result(self, place: int, n_lists: int) -> tuple[np.ndarray, np.ndarray]:
        numbers, scores, costs, others = self._tickets[place].result(n_lists)
        requests, asked, moved = costs.numpy()[0].tolist()
        self._stats = self._stats + DeviceStats(
            read_requests=requests, bytes_asked=asked, bytes_moved=moved
        )
        self.other_terms = np.concatenate([self.other_terms, others.numpy() + place])
        return numbers.numpy()[0], scores.numpy()[0]

    def cancel(self) -> None:
        """See `Ticket`."""
        for ticket in self._tickets:
            ticket.cancel()

    @property
    def stats(self) -> DeviceStats:
        """See `Ticket`; of a finished one."""
        return self._stats


def _request(
    command: ScanCommand, view: dict[str, Any], n_records: int, deadline_s: float
) -> dict[str, Any]:
    """What the compiled part is asked."""
    places, weights, n = command.lists.places, command.weights, len(command.lists)
    rows = np.zeros((n, _COLUMNS), np.int64)
    rows[:, 1] = places["term"]
    for column, name in ((2, "offset"), (3, "size"), (4, "first_layer")):
        rows[:, column] = places[name].astype(np.int64) * UNIT_BYTES
    rows[:, 6] = (places["name"] & DIGEST) > 0
    rows[:, 7] = weights.lists["weight"].copy().view(np.int64)
    rows[:, 8] = weights.lists["absent"].copy().view(np.int64)
    rows[:, 9] = np.arange(n)
    rule, ends = weights.rule, np.cumsum(command.lists.name_sizes).tolist()
    return {
        "variant": rule.variant,
        "k1": rule.k1,
        "delta": rule.delta,
        "segments": [view],
        "lists": torch.from_numpy(rows),
        "constants": torch.tensor([weights.constant], dtype=torch.float32),
        "names": [
            command.lists.names[begin:end] for begin, end in zip([0, *ends], ends, strict=False)
        ],
        "k": max(1, min(command.k or n_records, command.lists.n_postings, n_records)),
        "threads": 1,
        "deadline_s": float(deadline_s),
    }


def _of_one_list(command: ScanCommand, request: dict[str, Any], i: int) -> dict[str, Any]:
    """The same of one of its lists, and of all of that."""
    return request | {
        "lists": request["lists"][i : i + 1].clone(),
        "constants": torch.zeros(1),
        "k": max(1, min(request["k"], int(command.lists.places["postings"][i]))),
    }
