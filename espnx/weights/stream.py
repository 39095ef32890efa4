"""Layers' weights read ahead in the order in which they are used, over and over: after the last
layer comes the first of the next step."""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch

from .. import errors
from ..storage.engine import Engine, FileHandle, Future, Plan, paths_of
from ..storage.files import aligned_empty
from .layers import PAGE_BYTES, LayerWeights, Weight, put
from .safetensors_files import StoredTensor

_WINDOW_BYTES = 4 << 20
_LEAST_BYTES_PER_S = 16 << 20  # a device slower than this has stalled


@dataclass
class WeightCounters:
    """Since the files were opened.

    Attributes:
        bytes_asked: of weights that were read.
        bytes_moved: what crossed the queue for them.
        layer_reads: reads of streamed layers that ended well.
        waiting_s: time that computing stood still for reads.
        converting_s: time to put together and convert weights.
    """

    bytes_asked: int = 0
    bytes_moved: int = 0
    layer_reads: int = 0
    waiting_s: float = 0.0
    converting_s: float = 0.0


@dataclass(frozen=True)
class FileIdentity:
    """Which file it is, and as it was when. Attributes: changed_ns: the later of the times of its
    bytes and of its inode."""

    device: int
    inode: int
    size_bytes: int
    modified_ns: int
    changed_ns: int

    @classmethod
    def of(cls, path: str) -> FileIdentity:
        found = os.stat(path)
        return cls(
            found.st_dev,
            found.st_ino,
            found.st_size,
            found.st_mtime_ns,
            max(found.st_mtime_ns, found.st_ctime_ns),
        )


class WeightFiles:
    """Opens each file once, and reads weights that are to stay in memory."""

    def __init__(self, engine: Engine):
        self.engine, self.counters = engine, WeightCounters()
        self._files: dict[str, FileHandle] = {}
        self._identities: dict[str, FileIdentity] = {}

    def file(self, path: str) -> FileHandle:
        if path not in self._files:
            self._files[path] = self.engine.open(path)
            self._identities[path] = FileIdentity.of(path)
        return self._files[path]

    def identity(self, path: str) -> FileIdentity:
        """The identity of the file that is read, as it is now; of one that another has replaced
        under its name, as it was when it was opened."""
        self.file(path)
        opened = self._identities[path]
        try:
            now = FileIdentity.of(path)
        except OSError:
            return opened
        return now if (now.device, now.inode) == (opened.device, opened.inode) else opened

    @property
    def effective_path(self) -> str:
        """The path that the weights' bytes take, of all files."""
        return paths_of(file.effective for file in self._files.values()) or self.engine.effective

    def start(
        self, layer: LayerWeights, memory: torch.Tensor, ahead_bytes: int = 0
    ) -> list[Future]:
        """Starts reading a layer's pages into memory that direct I/O can use. `ahead_bytes`: what
        is read before."""
        deadline_s = 30 + (ahead_bytes + layer.buffer_bytes) / _LEAST_BYTES_PER_S
        pages: list[tuple[FileHandle, int, int, int]] = []
        rest: list[tuple[FileHandle, int, int, int]] = []
        for extent in layer.extents:
            file = self.file(extent.path)
            size = min(extent.size_bytes, file.size_bytes - extent.offset_bytes)
            whole = size // PAGE_BYTES * PAGE_BYTES
            if whole:
                pages.append((file, extent.offset_bytes, whole, extent.place_bytes))
            # the end of the file; in a plan of its own, for one unaligned item makes a copy of all
            # of them
            if size > whole:
                rest.append(
                    (file, extent.offset_bytes + whole, size - whole, extent.place_bytes + whole)
                )
        futures = []
        for items in (pages, rest):
            if items:
                files, offsets, sizes, places = zip(*items, strict=True)
                plan = Plan.of(
                    list(files), list(offsets), list(sizes), out_offset_bytes=list(places)
                )
                futures.append(self.engine.read(plan, memory, deadline_s=deadline_s))
        return futures

    def finish(self, layer: LayerWeights, futures: list[Future]) -> None:
        """Waits. Raises what a read raises."""
        for future in futures:
            future.wait()
            self.counters.bytes_moved += future.bytes_moved
        self.counters.bytes_asked += layer.stored_bytes

    def resident(self, weight: Weight) -> torch.Tensor:
        """Reads a weight into memory of its own."""
        layer = LayerWeights([weight])
        if weight.is_view:
            memory = aligned_empty(layer.buffer_bytes)
            self.finish(layer, self.start(layer, memory))
            return layer.tensors(memory, memory)[weight.name]
        flat = torch.empty(weight.size_bytes // weight.dtype.itemsize, dtype=weight.dtype)
        for piece in weight.pieces:
            for first, data in self.windows(piece.source):
                put(flat, piece.begin + first, data, piece.source.dtype)
        return flat.view(weight.shape)

    def windows(self, source: StoredTensor) -> Iterator[tuple[int, torch.Tensor]]:
        """(number of the first element, bytes) of a stored tensor from its beginning on, some MiB
        at a time. Raises what a read raises."""
        step = _WINDOW_BYTES // source.dtype.itemsize
        for first in range(0, source.size_bytes // source.dtype.itemsize, step):
            begin = first * source.dtype.itemsize
            size = min(_WINDOW_BYTES, source.size_bytes - begin)
            future = self.engine.read(
                Plan.of(self.file(source.path), [source.offset_bytes + begin], [size])
            )
            at = int(future.position_bytes[0])
            yield first, future.wait()[at : at + size]
            self.counters.bytes_moved += future.bytes_moved
            self.counters.bytes_asked += size


@dataclass
class _Coming:
    """A layer that is being read, or that is in use."""

    layer: int
    memory: torch.Tensor
    futures: list[Future]
    is_here: bool = False


class WeightStream:
    """Reads layers in turn into a few buffers. For one thread at a time.

    Args:
        files: to read from.
        layers: by number; their order is the order of use.
        slots: buffers; all but the one in use are read ahead.
        slot_bytes, converted_bytes: of a buffer, and of the memory for weights that are not views
            of it.
    """

    def __init__(
        self,
        files: WeightFiles,
        layers: Mapping[int, LayerWeights],
        *,
        slots: int,
        slot_bytes: int,
        converted_bytes: int,
    ):
        self.files, self.layers = files, dict(layers)
        self._order = sorted(self.layers)
        self._after = dict(zip(self._order, self._order[1:] + self._order[:1], strict=True))
        # `aligned_empty` adds a page
        self._slot_bytes, self._slots = slot_bytes - PAGE_BYTES, slots
        self._converted = torch.empty(converted_bytes, dtype=torch.uint8)
        self._free: list[torch.Tensor] = []
        self._line: deque[_Coming] = deque()

    @property
    def buffer_bytes(self) -> int:
        """Bytes of all buffers that exist now."""
        buffers = [*self._free, *(coming.memory for coming in self._line)]
        return sum(memory.untyped_storage().nbytes() for memory in buffers) + self._converted.nbytes

    def take(self, layer: int) -> dict[str, torch.Tensor]:
        """A layer's weights by name, valid until `give_back`. The next layers are being read
        meanwhile.

        Raises:
            ReadError, ShortReadError, TruncatedFileError, DeadlineExceededError, EngineClosedError:
                nothing is in use then, and the next `take` begins anew.
        """
        try:
            while self._line and self._line[0].layer != layer:
                self._drop(self._line.popleft())
            self._fill(layer)
            coming, counters = self._line[0], self.files.counters
            begun = time.perf_counter()
            if not coming.is_here:
                self.files.finish(self.layers[layer], coming.futures)
                coming.is_here = True
                counters.layer_reads += 1
            here = time.perf_counter()
            counters.waiting_s += here - begun
            tensors = self.layers[layer].tensors(coming.memory, self._converted)
            counters.converting_s += time.perf_counter() - here
            return tensors
        except BaseException:
            self.forget()
            raise

    def give_back(self, layer: int) -> None:
        """The layer has computed: its buffer takes the next one. What goes wrong there is raised
        when that one is taken."""
        if self._line and self._line[0].layer == layer and self._line[0].is_here:
            following = self._line[1].layer if len(self._line) > 1 else self._after[layer]
            self._drop(self._line.popleft())
            with contextlib.suppress(errors.EspnxError):
                self._fill(following)

    def _fill(self, first: int) -> None:
        """Begins reads, from `first` on or after what is in line, until every buffer has one."""
        while len(self._line) < self._slots:
            number = self._after[self._line[-1].layer] if self._line else first
            memory = self._free.pop() if self._free else aligned_empty(self._slot_bytes)
            ahead = sum(self.layers[coming.layer].buffer_bytes for coming in self._line)
            self._line.append(
                _Coming(number, memory, self.files.start(self.layers[number], memory, ahead))
            )

    def _drop(self, coming: _Coming) -> None:
        """Its memory is used again only where no read can write to it any more; else it belongs to
        the engine until the device lets go."""
        if coming.is_here:
            self._free.append(coming.memory)
            return
        for future in coming.futures:
            future.cancel()

    def forget(self) -> None:
        """Nothing that was read ahead is wanted any more."""
        while self._line:
            self._drop(self._line.popleft())
