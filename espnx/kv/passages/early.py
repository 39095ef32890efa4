"""Reads of passages that a prompt may be composed of, while it is still being found out which it
will be: their first layers first, in memory until attention has used them once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch

from ... import errors
from ...storage.engine import Future
from .extent import Extent, Identity
from .library import Library

#: Reads that are started, over those that may be in memory: what candidates that come and go may
#: cost at most.
_STARTED_OVER_HELD = 1.5


@dataclass(frozen=True)
class _Read:
    extent: Extent
    size_bytes: int
    future: Future


class EarlyReads:
    """Reads that begin before a prompt is composed. Safe to use from several threads.

    Args:
        library: that has the passages.
        most_bytes: in memory at a time. All reads together take half as much again at most.

    Attributes:
        is_open: False once `close` was called: nothing is read any more.
        started_bytes: of all reads.
        used_bytes: of those that attention has used.
        wasted_bytes: of those that nobody will use: cancelled ones as if they had been read.
        arrived_bytes: of the prompt's passages, in memory when it was composed: what was hidden.
    """

    def __init__(self, library: Library, most_bytes: int):
        self.library, self._most_bytes = library, most_bytes
        self._lock = threading.Lock()
        # by extent and layer, in the order in which they were started
        self._reads = dict[tuple[int, int], _Read]()
        self._wanted = set[int]()
        self.extents = dict[int, Extent]()
        self._pins = list[Extent]()
        self._held_bytes = 0
        self.started_bytes = self.used_bytes = self.wasted_bytes = self.arrived_bytes = 0
        self.is_open = True
        self._front: Future | None = None  # the newest that `library.find` waits for

    def only(self, identities: Collection[Identity]) -> None:
        """Reads that are under way for other texts end, before anything else is waited for."""
        with self._lock:
            self._end_others(lambda extent: extent.identity in identities)

    def _end_others(self, is_wanted: Callable[[Extent], bool]) -> None:
        for key, read in list(self._reads.items()):
            if not is_wanted(read.extent) and not read.future.done():
                self._drop(key)

    def begun(self, front: Future) -> None:
        """A read that is waited for before there is anything to want: `close` ends it, too."""
        with self._lock:
            self._front = front
            if not self.is_open:
                front.cancel()

    def want(self, extents: Sequence[Extent]) -> None:
        """The passages that are likely now, the likeliest first, instead of those before. Reads
        that are under way for others end; what has arrived of these stays while there is room.

        Args:
            extents: pinned; the pins are this object's from here on.
        """
        with self._lock:
            self._pins, self._front = self._pins + list(extents), None
            if not self.is_open:
                self._leave()
                return
            self.extents |= {each.number: each for each in extents}
            self._wanted = {each.number for each in extents}
            self._end_others(lambda extent: extent.number in self._wanted)
            shape, once = self.library.shape, list({each.number: each for each in extents}.values())
            for layer in range(shape.layers):
                for extent in once:
                    size = shape.heads * shape.head_bytes(extent.identity.tokens)
                    if size and (extent.number, layer) not in self._reads:
                        if not self._has_room(size):
                            return
                        self._start(extent, layer, size)

    def _has_room(self, size_bytes: int) -> bool:
        """Whether so much more may be read; what arrived for passages that are not likely any more
        goes for it."""
        if self.started_bytes + size_bytes > _STARTED_OVER_HELD * self._most_bytes:
            return False
        stale = [key for key in self._reads if key[0] not in self._wanted]
        while stale and self._held_bytes + size_bytes > self._most_bytes:
            self._drop(stale.pop())
        return self._held_bytes + size_bytes <= self._most_bytes

    def _start(self, extent: Extent, layer: int, size_bytes: int) -> None:
        future = self.library.begin_read(extent, layer)
        self._reads[extent.number, layer] = _Read(extent, size_bytes, future)
        self.started_bytes += size_bytes
        self._held_bytes += size_bytes

    def _drop(self, key: tuple[int, int]) -> None:
        """Nobody will use this read."""
        read = self._reads.pop(key)
        read.future.cancel()
        self.wasted_bytes += read.size_bytes
        self._held_bytes -= read.size_bytes

    def keep(self, numbers: Sequence[int]) -> None:
        """A prompt is composed, of these extents: other reads end."""
        with self._lock:
            self._wanted = set(numbers)
            for key in [key for key in self._reads if key[0] not in self._wanted]:
                self._drop(key)
            self.arrived_bytes = sum(
                each.size_bytes for each in self._reads.values() if each.future.done()
            )

    def holds(self, number: int, layer: int) -> bool:
        """Whether a layer of an extent is in memory, or on its way."""
        with self._lock:
            return (number, layer) in self._reads

    def take(self, number: int, layer: int) -> torch.Tensor | None:
        """Blocks of a layer, checked, uint8 [heads x blocks x block bytes], which are not held here
        any more; waits for them. None: they could not be read, or are damaged, and whoever reads
        them again is told."""
        with self._lock:
            read = self._reads.pop((number, layer), None)
        if read is None:
            return None
        try:
            memory = read.future.wait()
            self.library.check(read.extent, layer, memory)
        except errors.EspnxError:
            memory = None
        except BaseException:
            read.future.cancel()
            raise
        with self._lock:
            self._held_bytes -= read.size_bytes
            if memory is None:
                self.wasted_bytes += read.size_bytes
            else:
                self.used_bytes += read.size_bytes
        return memory

    def close(self) -> None:
        """Ends what is under way. May be called again."""
        with self._lock:
            self.is_open = False
            if self._front is not None:
                self._front.cancel()
            for key in list(self._reads):
                self._drop(key)
            self._leave()

    def _leave(self) -> None:
        pins, self._pins = self._pins, []
        self.library.leave(pins)
