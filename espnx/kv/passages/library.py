"""A library of passages: one data file with an extent for each, an index beside it, locks of what
is in use.

Any number of processes read and fill it. What was killed while it wrote leaves a place that is
handed out again; what is damaged is found by its checksums, and by nobody afterwards.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.crc32c import crc32c_ranges
from ...storage import NativeEngine, Plan
from ...storage.files import make_given_directory, write_error
from ...storage.parse import check_plain_file
from .extent import Extent, Identity, RowShape, front_of, read_front
from .index import Index, Place
from .pins import Pins

DATA, INDEX, LOCKS = "passages.bin", "index.sqlite", "PINS"
_POLL_S = 0.02
#: Checksums of so many bytes are looked at together.
_VERIFY_BYTES = 8 << 20


@dataclass(frozen=True)
class Damaged:
    """An extent that was found damaged: its place in the data file."""

    offset_bytes: int
    size_bytes: int


class Library:
    """The extents of one model's passages, in a directory that others may share.

    Args:
        directory: made where it is missing.
        space: SHA-256 of the model, the shape of its rows and its tokenizer: extents of other
            spaces are never looked at.
        said: what the space is, in words.
        shape: of the rows.
        limit_bytes: the data file never grows beyond it; None: as far as the disk goes.
        engine: ``auto``, ``uring`` or ``posix``, or how to make an engine.
        deadline_s: of each transfer.

    Attributes:
        shape: as given.
        damaged: what was found damaged so far.

    Raises:
        FormatError: the index is damaged, or something is no plain file.
        WriteError, DiskFullError, StoreBusyError.
    """

    def __init__(
        self,
        directory: str | os.PathLike[str],
        space: bytes,
        said: dict[str, Any],
        shape: RowShape,
        *,
        limit_bytes: int | None = None,
        engine: str | Callable[[], Any] = "auto",
        deadline_s: float = 30.0,
    ):
        self.directory, self.shape, self.space = os.fspath(directory), shape, space
        self._limit_bytes, self._deadline_s = limit_bytes, deadline_s
        self._lock, self.damaged = threading.RLock(), list[Damaged]()
        make_given_directory(directory)
        self.path = os.path.join(self.directory, DATA)
        _make_file(self.path)
        self._engine: NativeEngine = (
            NativeEngine(engine, pool_bytes=_VERIFY_BYTES) if isinstance(engine, str) else engine()
        )
        try:
            self._file = self._engine.open(self.path, "r+")
            self._pins = Pins(os.path.join(self.directory, LOCKS))
            try:
                self._index = Index(os.path.join(self.directory, INDEX), self._pins)
                self._index.note_space(space, said)
            except BaseException:
                self._pins.close()
                raise
        except BaseException:
            self._engine.close()
            raise

    # --- what is there ---

    def find(self, wanted: Sequence[tuple[Identity, np.ndarray]]) -> list[Extent | None]:
        """The extents of these texts, pinned until `leave`; None where there is none, or where its
        front is damaged."""
        with self._lock:
            places = self._index.find(wanted)
            there = [
                (place, identity)
                for place, (identity, _) in zip(places, wanted, strict=True)
                if place is not None
            ]
            fronts = self._fronts(there)
        by_number = {extent.number: extent for extent in fronts}
        return [None if place is None else by_number.get(place.number) for place in places]

    def _fronts(self, there: Sequence[tuple[Place, Identity]]) -> list[Extent]:
        """Reads and checks what lies in front of extents that are pinned; those that are damaged
        are left."""
        found, shape = dict[int, Extent](), self.shape
        once = {place.number: (place, identity) for place, identity in there}
        sizes = [shape.front_bytes(identity.tokens) for _, identity in once.values()]
        begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        memory = self._engine.memory(max(int(begins[-1]), 1))
        is_read = self._read([place.offset_bytes for place, _ in once.values()], sizes, memory)
        for (place, identity), begin, size in zip(
            once.values(), begins.tolist(), sizes, strict=False
        ):
            front = memory[begin : begin + size]
            if not is_read and not self._read([place.offset_bytes], [size], front):
                sums = None
            else:
                sums = read_front(shape, identity, front.numpy())
            if sums is None or place.size_bytes != shape.extent_bytes(identity.tokens):
                self._damage(place.number, place.offset_bytes, size)
                continue
            found[place.number] = Extent(
                place.number, identity, place.offset_bytes, place.size_bytes, sums
            )
        for place, _ in there:
            if place.number not in found:
                self._pins.leave(place.number)
        return list(found.values())

    def _read(self, offsets: Sequence[int], sizes: Sequence[int], memory: torch.Tensor) -> bool:
        """Whether bytes could be read, which come one after the other."""
        begins = np.concatenate([[0], np.cumsum(sizes)])[: len(sizes)].astype(np.int64)
        try:
            plan = Plan.of(self._file, list(offsets), list(sizes), begins.tolist())
            self._engine.read(plan, memory, deadline_s=self._deadline_s).wait()
        except (errors.ReadError, errors.TruncatedFileError):
            return False
        return True

    def _damage(self, number: int, offset_bytes: int, size_bytes: int) -> None:
        self.damaged.append(Damaged(offset_bytes, size_bytes))
        self._index.damage(number)

    def damage(self, extent: Extent, offset_bytes: int, size_bytes: int) -> None:
        """Rows of an extent are damaged: nobody gets it any more."""
        with self._lock:
            self._damage(extent.number, offset_bytes, size_bytes)

    def leave(self, extents: Sequence[Extent]) -> None:
        """The end of as many pins. Does nothing once the library is closed."""
        with self._lock:
            if not self.is_closed:
                for each in extents:
                    self._pins.leave(each.number)

    # --- what comes ---

    def write(
        self, identity: Identity, ids: np.ndarray, cost: float, wait_s: float = 600.0
    ) -> ExtentWriter | Extent | None:
        """Begins to write the rows of a text.

        Returns:
            A writer; the extent, pinned, where somebody else has just written it; None: there is no
            room, and nothing can be evicted, or somebody else has been writing it for `wait_s`.

        Raises WriteError, StoreBusyError.
        """
        until, size_bytes = time.monotonic() + wait_s, self.shape.extent_bytes(identity.tokens)
        while True:
            with self._lock:
                place = self._index.reserve(identity, ids, size_bytes, cost, self._limit_bytes)
                if place is None:
                    return None
                if place.is_own:
                    if self._make_room(place):
                        return ExtentWriter(self, place, identity)
                    continue
                if place.is_ready and (found := self.find([(identity, ids)])[0]) is not None:
                    return found
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)  # another process writes it

    def _make_room(self, place: Place) -> bool:
        """Space in the file for an extent. Where the disk is full the place is given back, and
        something is evicted, so that the next place may be a hole: False. Raises DiskFullError
        where nothing can be."""
        try:
            self._engine.allocate(self._file, place.offset_bytes + place.size_bytes)
        except errors.DiskFullError:
            self._index.abandon(place.number)
            if not self._index.evict_one():
                raise
            return False
        except BaseException:
            self._index.abandon(place.number)
            raise
        return True

    # --- names ---

    def name(self, name: str, ids: np.ndarray) -> None:
        """Gives tokens a name. What had it before, if it was another text without a second name, is
        removed."""
        with self._lock:
            text = Identity.of(self.space, [], ids).text
            before = self._index.set_name(self.space, name, text, ids)
            if before is not None and not self._index.is_named(self.space, before):
                self._index.remove_text(self.space, before)

    def named(self, name: str) -> np.ndarray | None:
        """The tokens that have a name, int32 [n], or None."""
        with self._lock:
            return self._index.ids_of(self.space, name)

    def remove(self, name: str) -> bool:
        """Removes a name, and with its last one a text. False where nobody gave it."""
        with self._lock:
            text = self._index.remove_name(self.space, name)
            if text is not None and not self._index.is_named(self.space, text):
                self._index.remove_text(self.space, text)
            return text is not None

    # --- all of it ---

    def verify(self) -> tuple[int, int]:
        """Reads every extent of this space whole. Returns (bytes read, how many were damaged);
        these are not found any more."""
        read_bytes = damaged = 0
        for wanted in self._index.every(self.space):
            before = len(self.damaged)
            (extent,) = self.find([wanted])
            if extent is not None:
                try:
                    read_bytes += self._verify(extent)
                finally:
                    self.leave([extent])
            damaged += len(self.damaged) > before
        return read_bytes, damaged

    def _verify(self, extent: Extent) -> int:
        """Bytes read of an extent; what is damaged is noted."""
        layout, front = (self.shape.layout, self.shape.front_bytes(extent.identity.tokens))
        sums, step = extent.sums.reshape(-1), max(1, _VERIFY_BYTES // layout.block_bytes)
        for first in range(0, sums.size, step):
            wanted = sums[first : first + step]
            size = wanted.size * layout.block_bytes
            memory = self._engine.memory(size)
            begin = extent.offset_bytes + front + first * layout.block_bytes
            if not self._read([begin], [size], memory) or not np.array_equal(
                block_sums(memory, layout.block_bytes), wanted
            ):
                self.damage(extent, begin, size)
                break
        return extent.size_bytes

    def stats(self) -> dict[str, int]:
        """Extents of all spaces, their bytes, the length of the data file, and how many were found
        damaged by this library."""
        with self._lock:
            return self._index.totals() | {"damaged": len(self.damaged)}

    @property
    def is_closed(self) -> bool:
        """Nothing is open any more."""
        return self._pins.is_closed

    def close(self) -> None:
        """Leaves everything. May be called again."""
        with self._lock:
            if not self.is_closed:
                self._pins.close()
                try:
                    self._index.close()
                finally:
                    self._engine.close()


class ExtentWriter:
    """Writes the rows of one text into its extent, layer by layer, some tokens at a time. A context
    manager: what is not finished comes to nothing.

    Args:
        library, place, identity: what it is written for.
    """

    def __init__(self, library: Library, place: Place, identity: Identity):
        self._library, self._place, self._identity = library, place, identity
        shape = library.shape
        self._sums = np.zeros(
            (shape.layers, shape.heads, shape.blocks(identity.tokens)), dtype=np.uint32
        )
        self._written = [0] * shape.layers  # tokens
        self._is_open = True

    def __enter__(self) -> ExtentWriter:
        return self

    def rows(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the next tokens of a layer: k [1, heads, n, d] and v [1, heads, n, dv]; whole
        blocks, but for the last ones of the text. Raises WriteError, DeadlineExceededError."""
        library, shape, tokens = self._library, self._library.shape, self._identity.tokens
        layout, n = shape.layout, k.shape[2]
        first = self._written[layer]
        if first % layout.block_rows or (
            (first + n < tokens and n % layout.block_rows) or first + n > tokens
        ):
            raise errors.InvalidInputError(
                "rows of an extent", got=f"{n} after {first}", expected="whole blocks"
            )
        blocks, at = layout.blocks(n), first // layout.block_rows
        size_bytes = blocks * layout.block_bytes
        engine = library._engine
        memory = engine.memory(shape.heads * size_bytes)
        layout.pack(k[0].cpu(), v[0].cpu(), memory.view(shape.heads, blocks, layout.block_bytes))
        self._sums[layer, :, at : at + blocks] = block_sums(memory, layout.block_bytes).reshape(
            shape.heads, blocks
        )
        begin = self._place.offset_bytes + shape.front_bytes(tokens)
        offsets = [
            begin
            + (layer * shape.heads + head) * shape.head_bytes(tokens)
            + at * layout.block_bytes
            for head in range(shape.heads)
        ]
        plan = Plan.of(
            library._file,
            offsets,
            [size_bytes] * shape.heads,
            [head * size_bytes for head in range(shape.heads)],
        )
        engine.write(plan, memory, deadline_s=library._deadline_s).wait()
        self._written[layer] += n

    def finish(self) -> Extent:
        """The extent is whole, on disk, and pinned. Raises WriteError, StateError where rows are
        missing."""
        library, identity, place = self._library, self._identity, self._place
        if self._written != [identity.tokens] * library.shape.layers:
            raise errors.StateError(
                "an extent that is finished before all its rows have come",
                got=min(self._written),
                expected=f"{identity.tokens} tokens in every layer",
            )
        front = front_of(library.shape, identity, self._sums)
        memory = library._engine.memory(front.size)
        memory.copy_(torch.from_numpy(front))
        plan = Plan.of(library._file, [place.offset_bytes], [front.size], [0])
        library._engine.write(plan, memory, deadline_s=library._deadline_s).wait()
        library._engine.sync(library._file)
        with library._lock:
            library._index.finish(place.number)
        self._is_open = False
        return Extent(place.number, identity, place.offset_bytes, place.size_bytes, self._sums)

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self._is_open = False
            with self._library._lock:
                if not self._library.is_closed:
                    self._library._index.abandon(self._place.number)


def block_sums(memory: torch.Tensor, block_bytes: int) -> np.ndarray:
    """uint32: the CRC32C of each block of uint8 [bytes]."""
    offsets = torch.arange(0, memory.numel(), block_bytes)
    found = crc32c_ranges(memory, offsets, torch.full_like(offsets, block_bytes)).numpy()
    return np.asarray(found, dtype=np.uint32)


def _make_file(path: str) -> None:
    """An empty file that nobody else may read, unless there is one. Raises WriteError,
    FormatError."""
    try:
        if os.path.lexists(path):
            check_plain_file(path)
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise write_error("cannot create the data file of a library", path, error) from error
