"""The storage engine as a system of the disk benchmark: plans in flight one behind the other, so
that the disk never idles."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from espnx import storage
from espnx.errors import StorageError
from espnx.storage import Engine, Plan
from espnx.storage.engine import Future

from ..harness.runner import Sample
from ..machine import page_cache
from ..machine.counters import read_counters
from .content import BLOCK_BYTES, aligned_memory
from .work import Work

REQUEST_BYTES = 960 * 1024
LARGE_BYTES = 256 * 1024
VERIFIED_BYTES_MAX = 32 << 20
DEADLINE_S = 120.0

OpenEngine = Callable[..., Engine]


def windows_of(block_bytes: int, queue_depth: int) -> tuple[int, int]:
    """How a run is cut into plans: items of a plan, and plans under way at a time.

    Together they are a little more than the queue's depth (fio keeps exactly that many buffers), so
    that the queue stays full while a plan that has arrived is checked, and no more: buffers that
    fit the processor's caches fill up to a tenth faster than others.
    """
    if block_bytes >= LARGE_BYTES:
        return max(1, queue_depth // 4), 5
    # A plan costs its caller 30 us, however many items it has: not fewer than 256 KiB.
    return max(LARGE_BYTES // block_bytes, queue_depth // 2), 4


class EngineSystem:
    """Moves the items of a `Work` through an engine, several plans in flight, into memory that is
    allocated before and used again.

    The measured time goes from the first submission to the last completion with its checksum
    checked. Plans are built before.
    """

    def __init__(
        self,
        path: str,
        work: Work,
        *,
        checksums: bool = True,
        cache_state: str = "cold",
        open_engine: OpenEngine = storage.open_engine,
        **options: Any,
    ):
        self.name = self.group = f"espnx-{path}"
        self.work, self.checksums, self.cache_state = work, checksums, cache_state
        block, depth = work.point.block_bytes, work.point.queue_depth
        self._engine = open_engine(
            path,
            **(
                {"queue_depth": depth, "threads": min(depth, 128), "request_bytes": REQUEST_BYTES}
                | options
            ),
        )
        self._file = self._engine.open(work.data.path, "r" if work.point.op == "read" else "r+")
        self.requested_path, self.effective_path = path, self._file.effective
        self._window, self._windows_in_flight = windows_of(block, depth)
        self._memory = torch.from_numpy(
            aligned_memory(self._windows_in_flight * self._window * block)
        )
        self._plans: list[Plan] = []

    def verify(self) -> str | None:
        """Reads (or writes and reads back) up to 32 MiB of the items and compares every byte; the
        engine compares checksums besides."""
        size, reading = self.work.point.block_bytes, self.work.point.op == "read"
        offsets = self.work.offsets(0)[: max(1, VERIFIED_BYTES_MAX // size)]
        at_once = len(self._memory) // size
        try:
            for first in range(0, len(offsets), at_once):
                part = offsets[first : first + at_once]
                if problem := self._verify_read(part) if reading else self._verify_write(part):
                    return problem
        except StorageError as error:
            return str(error)
        return None

    def _verify_read(self, offsets: np.ndarray) -> str | None:
        size = self.work.point.block_bytes
        self._memory.fill_(0xA5)
        plan = self._plan(offsets, np.arange(len(offsets)), self._crcs(offsets))
        memory = self._engine.read(plan, self._memory, deadline_s=DEADLINE_S).wait()
        found = memory.numpy()[: len(offsets) * size].reshape(len(offsets), size)
        return self._difference(offsets, found, generation=0)

    def _verify_write(self, offsets: np.ndarray) -> str | None:
        size, content = self.work.point.block_bytes, self.work.data.content
        memory = self._memory.numpy()[: len(offsets) * size]
        # Two generations, so that what the file held before cannot pass for what was written.
        for generation in (1, 2):
            memory[:] = content.blocks(self._block_numbers(offsets), generation).reshape(-1)
            self._engine.write(
                self._plan(offsets, np.arange(len(offsets)), None),
                self._memory,
                deadline_s=DEADLINE_S,
            ).wait()
            if problem := self._difference(offsets, self._read_back(offsets), generation):
                return problem
        return None

    def _read_back(self, offsets: np.ndarray) -> np.ndarray:
        """uint8 [n, block]: what stands in the file now, read without the engine; through it where
        the file exists in its memory alone."""
        size = self.work.point.block_bytes
        if self.effective_path == "memory":
            self._memory.fill_(0xA5)
            self._engine.read(
                self._plan(offsets, np.arange(len(offsets)), None), self._memory
            ).wait()
            return self._memory.numpy()[: len(offsets) * size].reshape(len(offsets), size)
        page_cache.drop(self.work.data.path)
        with open(self.work.data.path, "rb", buffering=0) as file:
            return np.stack(
                [
                    np.frombuffer(os.pread(file.fileno(), size, offset), dtype=np.uint8)
                    for offset in offsets.tolist()
                ]
            )

    def _difference(self, offsets: np.ndarray, found: np.ndarray, generation: int) -> str | None:
        size = self.work.point.block_bytes
        for number, offset in enumerate(offsets):
            expected = self.work.data.content.blocks(
                self._block_numbers(offsets[number : number + 1]), generation
            ).reshape(-1)
            if not np.array_equal(found[number], expected):
                first = int(np.argmax(found[number] != expected))
                return (
                    f"item at offset {offset}, {size} bytes: byte {first} is "
                    f"{found[number][first]}, expected {expected[first]}"
                )
        return None

    def _block_numbers(self, offsets: np.ndarray) -> np.ndarray:
        blocks = np.arange(self.work.point.block_bytes // BLOCK_BYTES)
        return (offsets[:, None] // BLOCK_BYTES + blocks).reshape(-1)

    def _crcs(self, offsets: np.ndarray) -> np.ndarray:
        return self.work.data.content.item_crcs(offsets, self.work.point.block_bytes)

    def prepare(self, turn: int) -> str:
        offsets = self.work.offsets(turn)
        check = self.checksums and self.work.point.op == "read"
        crcs = self._crcs(offsets) if check else None
        self._plans = list(self._windows(offsets, crcs))
        if self.effective_path == "memory":
            return "warm"
        return page_cache.prepare(self.work.data.path, self.cache_state)

    def _windows(self, offsets: np.ndarray, crcs: np.ndarray | None) -> Iterator[Plan]:
        for number, first in enumerate(range(0, len(offsets), self._window)):
            part = slice(first, first + self._window)
            places = number % self._windows_in_flight * self._window + np.arange(len(offsets[part]))
            yield self._plan(offsets[part], places, None if crcs is None else crcs[part])

    def _plan(self, offsets: np.ndarray, places: np.ndarray, crcs: np.ndarray | None) -> Plan:
        size = self.work.point.block_bytes
        sizes = torch.full((len(offsets),), size, dtype=torch.int64)
        checks = None if crcs is None else torch.from_numpy(crcs)
        return Plan.of(
            self._file, torch.from_numpy(offsets), sizes, torch.from_numpy(places * size), checks
        )

    def run(self) -> Sample:
        submit = self._engine.read if self.work.point.op == "read" else self._engine.write
        pending: deque[Future] = deque()
        moved_bytes = requests = 0
        before = read_counters()
        begin = time.perf_counter()
        for plan in self._plans:
            if len(pending) == self._windows_in_flight:
                done = pending.popleft()
                done.wait()
                moved_bytes, requests = (
                    moved_bytes + done.bytes_moved,
                    requests + done.request_count,
                )
            pending.append(submit(plan, self._memory, deadline_s=DEADLINE_S))
        for done in pending:
            done.wait()
            moved_bytes, requests = moved_bytes + done.bytes_moved, requests + done.request_count
        seconds = time.perf_counter() - begin
        spent = read_counters() - before
        return sample_of(
            self.work,
            seconds,
            spent.cpu_s,
            spent.device_bytes(self.work.point.op),
            moved_bytes,
            {"requests": requests},
        )

    def close(self) -> None:
        self._engine.close()


def sample_of(
    work: Work,
    seconds: float,
    cpu_s: float,
    device_bytes: int | None,
    own_bytes: int,
    more: dict[str, float],
) -> Sample:
    """A sample with the metrics that all systems of the disk benchmark share."""
    metrics = {
        "iops": work.items / seconds,
        "bytes_per_s": work.bytes_asked / seconds,
        "cpu_s": cpu_s,
        "cpu_us_per_item": cpu_s / work.items * 1e6,
        "own_bytes_moved": own_bytes,
        **more,
    }
    if device_bytes is not None:
        metrics["device_bytes"] = device_bytes
    return Sample(
        seconds, work.bytes_asked, own_bytes if device_bytes is None else device_bytes, metrics
    )
