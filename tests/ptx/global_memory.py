"""The tensors that a kernel was given, and nothing else: each is a region at an address far from
every other's, and an access outside them, or one that is not aligned, is a fault."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tests.ptx.program import Fault

#: Regions lie so far apart that no offset gets from one to the next, and above what 32 bits hold.
DISTANCE_BITS = 41
#: Of a region's address those bits are the tensor's own, so that it is aligned as the tensor is.
OWN_BITS = 0xFF


@dataclass
class Region:
    """A tensor's bytes. ``writer``: of an output, the block that has written each byte, -1 for none
    yet; None: an input. ``is_counter``: of words that
    any block counts up, and that nobody reads or writes in another way."""

    name: str
    data: np.ndarray
    base: int
    writer: np.ndarray | None = None
    is_counter: bool = False


class GlobalMemory:
    """Regions by their number."""

    def __init__(self) -> None:
        self.regions: list[Region] = []

    def add(self, name: str, data: np.ndarray, *, is_output: bool, is_counter: bool = False) -> int:
        """The address of bytes that are now accessible."""
        base = (len(self.regions) + 1 << DISTANCE_BITS) + (data.ctypes.data & OWN_BITS)
        writer = np.full(data.size, -1) if is_output else None
        self.regions.append(Region(name, data, base, writer, is_counter))
        return base

    def read(self, addresses: np.ndarray, n_bytes: int) -> np.ndarray:
        """uint8 [threads, n_bytes]."""
        found = np.empty((addresses.size, n_bytes), dtype=np.uint8)
        for region, threads, offsets in self._offsets(addresses, n_bytes):
            if region.is_counter:
                raise Fault("race", f"{region.name} is read while others count")
            if region.writer is None and region.base % n_bytes == 0:  # all at once
                words = region.data[: region.data.size // n_bytes * n_bytes].view(f"V{n_bytes}")
                read = words[offsets // n_bytes].view(np.uint8).reshape(-1, n_bytes)
                found[threads] = read
                continue
            places = offsets[:, None] + np.arange(n_bytes)
            if region.writer is not None and (region.writer[places] < 0).any():
                raise Fault("unwritten", f"{region.name} is read before it is written")
            found[threads] = region.data[places]
        return found

    def write(self, addresses: np.ndarray, values: np.ndarray, block: int) -> None:
        """``values``: uint8 [threads, bytes]."""
        for region, threads, offsets in self._offsets(addresses, values.shape[1]):
            places = offsets[:, None] + np.arange(values.shape[1])
            if region.writer is None:
                raise Fault("outside", f"a store into {region.name}, which is an input")
            others = region.writer[places]
            if ((others >= 0) & (others != block)).any():
                raise Fault("race", f"two blocks write the same bytes of {region.name}")
            region.data[places], region.writer[places] = values[threads], block
            if (region.data[places] != values[threads]).any():
                raise Fault("race", f"two threads write the same bytes of {region.name}")

    def count(self, addresses: np.ndarray, most: np.ndarray) -> np.ndarray:
        """Adds 1 to words of counters, one thread after another, or makes 0 of what is the most or
        above it; uint32: what they were before."""
        before = np.empty(most.size, dtype=np.uint32)
        for region, threads, offsets in self._offsets(addresses, 4):
            if not region.is_counter:
                raise Fault("outside", f"{region.name} is no counter")
            words = region.data.view(np.uint32)
            for i, offset in zip(np.arange(most.size)[threads], offsets, strict=True):
                before[i] = words[offset // 4]
                words[offset // 4] = before[i] + 1 if before[i] < most[i] else 0
        return before

    def check_whole(self) -> None:
        """Every byte of every output has been written."""
        for region in self.regions:
            if region.writer is not None and (region.writer < 0).any():
                missing = int((region.writer < 0).sum())
                raise Fault("unwritten", f"{missing} bytes of {region.name} are never written")

    def _offsets(
        self, addresses: np.ndarray, n_bytes: int
    ) -> list[tuple[Region, np.ndarray | slice, np.ndarray]]:
        """For each region that is meant: which threads mean it, and from which of its bytes on."""
        if (addresses & np.uint64(n_bytes - 1)).any():
            raise Fault("misaligned", f"{n_bytes} bytes at an address that is no multiple of them")
        numbers = (addresses >> np.uint64(DISTANCE_BITS)).astype(np.int64) - 1
        if not numbers.size:
            return []
        if (numbers == numbers[0]).all():
            groups: list[tuple[int, np.ndarray | slice]] = [(int(numbers[0]), slice(None))]
        else:
            groups = [(int(each), np.flatnonzero(numbers == each)) for each in np.unique(numbers)]
        found = []
        for number, threads in groups:
            if not 0 <= number < len(self.regions):
                address = int(addresses[threads][0])
                raise Fault("outside", f"address {address:#x} is in no tensor")
            region = self.regions[number]
            offsets = (addresses[threads] - np.uint64(region.base)).astype(np.int64)
            wrong = (offsets < 0) | (offsets > region.data.size - n_bytes)
            if wrong.any():
                raise Fault(
                    "outside",
                    f"{n_bytes} bytes at byte {int(offsets[wrong][0])} of {region.name}, which has "
                    f"{region.data.size}",
                )
            found.append((region, threads, offsets))
        return found
