"""All records of a store at one range of addresses, as other systems have them: read into memory,
or mapped from the files."""

from __future__ import annotations

import ctypes
import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from espnx.retrieval.store.store import EmbeddingStore

PAGE_BYTES = mmap.PAGESIZE
_READ_BYTES = 16 << 20
_MAP_FIXED, _MAP_NORESERVE, _MADV_RANDOM, _MADV_WILLNEED, _MADV_HUGEPAGE = 0x10, 0x4000, 1, 3, 14


class AddressableStore:
    """The data files of a store one after another in memory, in the store's own layout.

    Args:
        store: open.
        mapped: map the files (MADV_RANDOM: no read-ahead around a fault) instead of reading them
            into anonymous memory.
        huge: ask for huge pages; for memory that is not to be swapped.

    Attributes:
        memory: uint8, everything.
    """

    def __init__(self, store: EmbeddingStore, *, mapped: bool, huge: bool = False):
        self._store = store
        paths = [Path(store.path, segment.path) for segment in store.segments]
        sizes = [-(-path.stat().st_size // PAGE_BYTES) * PAGE_BYTES for path in paths]
        self._begins = torch.tensor([0, *np.cumsum(sizes)[:-1].tolist()], dtype=torch.int64)
        self._libc = ctypes.CDLL(None, use_errno=True)
        self._libc.mmap.restype = ctypes.c_void_p
        self._libc.mmap.argtypes = [
            ctypes.c_void_p,
            ctypes.c_size_t,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_long,
        ]
        self._libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
        protection = mmap.PROT_READ if mapped else mmap.PROT_READ | mmap.PROT_WRITE
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_NORESERVE
        self._size = sum(sizes)
        self._base = self._map(None, self._size, protection, flags, -1)
        self._view = np.ctypeslib.as_array((ctypes.c_uint8 * self._size).from_address(self._base))
        self.memory = torch.from_numpy(self._view)
        if huge:
            self._libc.madvise(self._base, self._size, _MADV_HUGEPAGE)
        for path, begin, size in zip(paths, self._begins.tolist(), sizes, strict=True):
            with open(path, "rb", buffering=0) as file:
                if mapped:
                    self._map(
                        self._base + begin,
                        size,
                        protection,
                        mmap.MAP_SHARED | _MAP_FIXED,
                        file.fileno(),
                    )
                else:
                    _read_into(self._view[begin : begin + path.stat().st_size], file.fileno())
        if mapped:
            self._libc.madvise(self._base, self._size, _MADV_RANDOM)

    def _map(
        self, address: int | None, size: int, protection: int, flags: int, descriptor: int
    ) -> int:
        found = self._libc.mmap(address, size, protection, flags, descriptor, 0)
        if found is None or found == ctypes.c_void_p(-1).value:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code), f"mmap of {size} bytes")
        return int(found)

    def locate(self, numbers: np.ndarray) -> tuple[torch.Tensor, torch.Tensor]:
        """(position in `memory`, size) of records, int64 [m] each."""
        segment, offset_bytes, size_bytes = self._store.full.locate(numbers)
        return self._begins[segment] + offset_bytes, size_bytes

    def touch(
        self,
        positions: np.ndarray,
        sizes: np.ndarray,
        helpers: ThreadPoolExecutor | None,
        threads: int,
    ) -> None:
        """Brings every page of the records into memory, each thread a part of them: one byte is
        read of each page."""
        first, last = positions // PAGE_BYTES, (positions + sizes - 1) // PAGE_BYTES
        counts = last - first + 1
        ends = np.cumsum(counts)
        pages = np.arange(ends[-1] if len(ends) else 0) + np.repeat(first - (ends - counts), counts)
        parts = np.array_split(pages * PAGE_BYTES, threads)
        tasks = [helpers.submit(np.take, self._view, part) for part in parts[1:]] if helpers else []
        np.take(self._view, parts[0])
        for task in tasks:
            task.result()

    def will_need(self, positions: np.ndarray, sizes: np.ndarray) -> None:
        """MADV_WILLNEED for the pages of each record: the kernel starts reading, and this
        returns."""
        first = positions // PAGE_BYTES * PAGE_BYTES
        madvise, base = self._libc.madvise, self._base
        for begin, size in zip(
            (first + base).tolist(), (positions + sizes - first).tolist(), strict=True
        ):
            madvise(begin, size, _MADV_WILLNEED)


def _read_into(target: Any, descriptor: int) -> None:
    """Reads a file without leaving it in the page cache."""
    done = 0
    while done < len(target):
        count = os.preadv(descriptor, [memoryview(target)[done : done + _READ_BYTES]], done)
        if count == 0:
            raise OSError(f"file ends after {done} of {len(target)} bytes")
        os.posix_fadvise(descriptor, done, count, os.POSIX_FADV_DONTNEED)
        done += count
