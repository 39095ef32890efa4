"""One thread that copies the items out of a memory-mapped file: what a program does that leaves the
reading to the kernel."""

from __future__ import annotations

import mmap
import time

import numpy as np

from ..harness.runner import Sample
from ..machine import page_cache
from ..machine.counters import read_counters
from .content import crc32c_rows
from .engine import sample_of
from .work import Work

VERIFIED_ITEMS = 16


class MmapSystem:
    """Reads the first items of a `Work`'s order, with MADV_RANDOM for random ones; the mapping is
    made anew for every run."""

    name = group = "mmap"
    requested_path = effective_path = "mmap"

    def __init__(self, work: Work, cache_state: str = "cold"):
        self.work, self.cache_state = work, cache_state
        self._offsets: list[int] = []
        self._buffer = np.zeros(work.point.block_bytes, dtype=np.uint8)

    def verify(self) -> str | None:
        offsets, size = self.work.offsets(0)[:VERIFIED_ITEMS], self.work.point.block_bytes
        found: list[np.ndarray] = []
        self._read(offsets.tolist(), found)
        wrong = np.flatnonzero(
            crc32c_rows(np.stack(found)) != self.work.data.content.item_crcs(offsets, size)
        )
        return (
            f"item at offset {offsets[wrong[0]]}, {size} bytes, has another checksum"
            if len(wrong)
            else None
        )

    def prepare(self, turn: int) -> str:
        self._offsets = self.work.offsets(turn).tolist()
        return page_cache.prepare(self.work.data.path, self.cache_state)

    def run(self) -> Sample:
        before = read_counters()
        begin = time.perf_counter()
        self._read(self._offsets)
        seconds = time.perf_counter() - begin
        spent = read_counters() - before
        return sample_of(
            self.work, seconds, spent.cpu_s, spent.device_bytes("read"), self.work.bytes_asked, {}
        )

    def _read(self, offsets: list[int], keep: list[np.ndarray] | None = None) -> None:
        size, buffer = self.work.point.block_bytes, self._buffer
        with (
            open(self.work.data.path, "rb") as file,
            mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ) as area,
        ):
            if self.work.point.pattern == "random":
                area.madvise(mmap.MADV_RANDOM)
            view = np.frombuffer(area, dtype=np.uint8)
            for offset in offsets:
                buffer[:] = view[offset : offset + size]
                if keep is not None:
                    keep.append(buffer.copy())
            del view  # the mapping cannot be closed while somebody looks at it

    def close(self) -> None:
        pass
