"""Host memory that a device copies from: pinned memory in pieces of one size, each used again when
the copy out of it has run, and small tables."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch

from ... import errors
from ...storage.files import BLOCK_BYTES, aligned_empty
from ...streams import Event, streams_of

_TABLES_BYTES = 64 << 10
_ALIGN_BYTES = 16


@contextmanager
def typed_memory_errors(device: torch.device) -> Iterator[None]:
    """torch's errors of memory that is used up, on the device or pinned on the host, as ours."""
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, torch.OutOfMemoryError) and "out of memory" not in str(error):
            raise
        streams = streams_of(device)
        free_bytes = None if streams is None else streams.free_bytes(device)
        raise errors.OutOfMemoryError(
            f"memory for stored rows on {device}", free_bytes=free_bytes
        ) from error


def host_memory(size_bytes: int, device: torch.device) -> torch.Tensor:
    """uint8 [bytes], uninitialised, that direct I/O can use and a device can copy from and to
    without waiting."""
    streams = streams_of(device)
    if streams is None:
        return aligned_empty(size_bytes)
    raw = streams.pinned(size_bytes + BLOCK_BYTES)
    skip = -raw.data_ptr() % BLOCK_BYTES
    return raw[skip : skip + size_bytes]


@dataclass(eq=False)  # found again by what it is
class Slot:
    """A piece of pinned memory.

    Attributes:
        memory: uint8, as long as its staging's slots, or longer: then it is not used again.
        copied: behind the last copy out of it; None: nothing was copied.
    """

    memory: torch.Tensor
    copied: Event | None = None


class Staging:
    """Slots of one size, for reads that a device then copies. Pinning costs milliseconds and the
    pages stay, so that there are no more of them than reads in flight, and `spare`.

    Args:
        device: what copies.
        slot_bytes: of a slot. 4 KiB below a power of two wastes nothing: torch pins a power of two
            at least, of which alignment takes a block.
        spare: slots that may wait for their copies before one of these is waited for.
    """

    def __init__(self, device: torch.device, slot_bytes: int, spare: int = 2):
        self._device, self.slot_bytes, self._spare = device, slot_bytes, spare
        self._free: deque[Slot] = deque()
        self._lock = threading.Lock()

    def take(self, size_bytes: int) -> Slot:
        """A slot of at least that size, which nothing reads any more."""
        if size_bytes > self.slot_bytes:
            return Slot(host_memory(size_bytes, self._device))
        with self._lock:
            if (slot := self._copied()) is not None:
                return slot
            oldest = self._free.popleft() if len(self._free) > self._spare else None
        if oldest is None:
            return Slot(host_memory(self.slot_bytes, self._device))
        if oldest.copied is not None:
            oldest.copied.synchronize()
        return oldest

    def _copied(self) -> Slot | None:
        """The first slot whose copy has run."""
        for slot in self._free:
            if slot.copied is None or slot.copied.query():
                self._free.remove(slot)
                return slot
        return None

    def give_back(self, slot: Slot, copied: Event) -> None:
        """A slot from which everything was copied that was queued before the event."""
        if slot.memory.numel() == self.slot_bytes:
            slot.copied = copied
            with self._lock:
                self._free.append(slot)


class Tables:
    """Arrays that kernels look things up in, in pinned memory: a copy of pageable memory to a
    device may wait for all that is queued there. On a CPU they stay where they are."""

    def __init__(self, device: torch.device):
        self._device, self._is_pinned = device, streams_of(device) is not None
        self._room = torch.empty(0, dtype=torch.uint8)

    def put(self, array: np.ndarray) -> torch.Tensor:
        """The array as a host tensor that a device can copy without waiting."""
        found = torch.from_numpy(np.ascontiguousarray(array))
        if not self._is_pinned or found.numel() == 0:
            return found
        size_bytes = found.numel() * found.element_size()
        if self._room.numel() < size_bytes:
            self._room = host_memory(max(_TABLES_BYTES - BLOCK_BYTES, size_bytes), self._device)
        place = self._room[:size_bytes].view(found.dtype).view(found.shape)
        self._room = self._room[-(-size_bytes // _ALIGN_BYTES) * _ALIGN_BYTES :]
        return place.copy_(found)
