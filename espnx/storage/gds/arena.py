"""Device memory that is registered with cuFile once and handed out in slices: registering costs far
more than a small read.

A slice belongs to a `Lease`. Tensors over it keep the lease alive, views of them too, so a slice
comes back exactly when nobody can look at it any more; and it is handed out again only when the
kernels that were queued to read it have run, because DMA does not wait for streams.
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from bisect import insort
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from ... import errors
from .cufile import BLOCK_BYTES, CallFailedError, CuFile
from .memory import Fence

_GPU_PAGE_BYTES = 64 * 1024  # what nvidia-fs pins
_LOOK_S = 0.0001
# how long kernels that read what would do are waited for: another arena costs about that, and stays
_KERNELS_LIMIT_S = 0.05
_LAST_LIMIT_S = 10.0  # the same, where there is no memory for another arena

#: Arenas that cuFile did not let go of: their memory is never used for anything else.
kept: list[Arena] = []


@dataclass
class Arena:
    """One registered allocation and what of it is free: disjoint ranges in ascending order, never
    two that touch."""

    memory: torch.Tensor
    pointer: int
    size_bytes: int
    registered: bool
    free: list[tuple[int, int]] = field(default_factory=list)

    def take(self, size_bytes: int) -> int | None:
        """Takes a slice of that size; returns where it begins, None if there is none. First fit."""
        for i, (begin, end) in enumerate(self.free):
            if end - begin >= size_bytes:
                self.free[i : i + 1] = (
                    [(begin + size_bytes, end)] if end - begin > size_bytes else []
                )
                return begin
        return None

    def give_back(self, begin: int, size_bytes: int) -> None:
        insort(self.free, (begin, begin + size_bytes))
        merged: list[tuple[int, int]] = []
        for low, high in self.free:
            if merged and merged[-1][1] == low:
                merged[-1] = (merged[-1][0], high)
            else:
                merged.append((low, high))
        self.free = merged


class Lease:
    """A slice of an arena.

    Attributes:
        base: the registered pointer, which cuFile wants to see.
        begin_bytes: where the slice begins behind it.
        size_bytes: how long it is.
        streams: streams on which it may be in use; its next user waits for them.
    """

    def __init__(self, arena: Arena, begin_bytes: int, size_bytes: int):
        self.base, self.begin_bytes, self.size_bytes = arena.pointer, begin_bytes, size_bytes
        self.streams: set[Any] = set()

    @property
    def pointer(self) -> int:
        return self.base + self.begin_bytes


class Pool:
    """Arenas of device memory. Grows by whole arenas when they are full and waiting for kernels
    would not help; none is given up before `close`.

    Args:
        cufile: registers them.
        arena_bytes: size of an arena; larger ones are made for larger slices.
        must_register: raise where cuFile cannot register memory. Otherwise it goes through buffers
            of its own; `unregistered` says why.
        poison: fill slices with 0xA5 before use (tests).
    """

    def __init__(
        self, cufile: CuFile, arena_bytes: int, *, must_register: bool, poison: bool = False
    ):
        self._cufile, self._arena_bytes, self._must_register, self._poison = (
            cufile,
            arena_bytes,
            must_register,
            poison,
        )
        self._arenas: list[Arena] = []
        self._lock = threading.Lock()
        self._returned: deque[tuple[Fence, Arena, int, int]] = deque()
        self._process = os.getpid()
        self.unregistered = ""

    def take(self, size_bytes: int) -> Lease:
        """A slice of at least that size, 4 KiB aligned. Raises CallFailedError,
        OutOfMemoryError."""
        wanted = max(-(-size_bytes // BLOCK_BYTES) * BLOCK_BYTES, BLOCK_BYTES)
        with self._lock:
            arena, begin = self._find_patiently(wanted, _KERNELS_LIMIT_S) or self._grow(wanted)
        lease = Lease(arena, begin, wanted)
        # Not by the lease itself: what it is given back with must not keep it alive.
        weakref.finalize(lease, self._give_back, arena, begin, wanted, lease.streams).atexit = False
        if self._poison:
            arena.memory[begin : begin + wanted].fill_(0xA5)
            self._cufile.memory.settle()
        return lease

    def _grow(self, wanted: int) -> tuple[Arena, int]:
        try:
            arena = self._allocate(max(self._arena_bytes, wanted))
        except errors.OutOfMemoryError:
            found = self._find_patiently(wanted, _LAST_LIMIT_S)
            if found is None:
                raise
            return found
        self._arenas.append(arena)
        arena.free = [(wanted, arena.size_bytes)] if wanted < arena.size_bytes else []
        return arena, 0

    def _find_patiently(self, size_bytes: int, limit_s: float) -> tuple[Arena, int] | None:
        """A free slice; waits for kernels if what they read would do."""
        until = time.monotonic() + limit_s
        self._collect()
        found = self._find(size_bytes)
        while found is None and self._would_do(size_bytes) and time.monotonic() < until:
            time.sleep(_LOOK_S)
            self._collect()
            found = self._find(size_bytes)
        return found

    def _would_do(self, size_bytes: int) -> bool:
        """Whether there were room if all that came back were free."""
        trial = {
            id(arena): Arena(arena.memory, arena.pointer, arena.size_bytes, False, list(arena.free))
            for arena in self._arenas
        }
        for _, arena, begin, length in list(self._returned):
            if id(arena) in trial:
                trial[id(arena)].give_back(begin, length)
        return any(arena.take(size_bytes) is not None for arena in trial.values())

    def _find(self, size_bytes: int) -> tuple[Arena, int] | None:
        for arena in self._arenas:
            begin = arena.take(size_bytes)
            if begin is not None:
                return arena, begin
        return None

    def _allocate(self, size_bytes: int) -> Arena:
        raw = self._cufile.memory.allocate(size_bytes + _GPU_PAGE_BYTES)
        skip = -raw.data_ptr() % _GPU_PAGE_BYTES
        memory = raw[skip : skip + size_bytes]
        registered = True
        try:
            self._cufile.register_memory(memory.data_ptr(), size_bytes)
        except CallFailedError as error:
            if self._must_register:
                raise
            registered, self.unregistered = False, str(error)
        return Arena(memory, memory.data_ptr(), size_bytes, registered, [(0, size_bytes)])

    def _give_back(self, arena: Arena, begin: int, size_bytes: int, streams: set[Any]) -> None:
        # Runs wherever the last reference goes, perhaps inside the garbage collector of a thread
        # that holds the lock: no lock here.
        if self._process == os.getpid():  # CUDA does not survive a fork
            self._returned.append((self._cufile.memory.fence(streams), arena, begin, size_bytes))

    def _collect(self) -> None:
        for _ in range(len(self._returned)):
            fence, arena, begin, size_bytes = self._returned.popleft()
            if fence.passed():
                arena.give_back(begin, size_bytes)
            else:
                self._returned.append((fence, arena, begin, size_bytes))

    def held_bytes(self) -> int:
        """Memory that is out, or waits for kernels that may still read it."""
        with self._lock:
            self._collect()
            return sum(
                arena.size_bytes - sum(end - begin for begin, end in arena.free)
                for arena in self._arenas
            )

    def close(self) -> None:
        """Unregisters everything. The memory itself goes with the last tensor over it."""
        with self._lock:
            for arena in self._arenas:
                if arena.registered and not self._cufile.forget_memory(arena.pointer):
                    kept.append(arena)
            self._arenas.clear()
