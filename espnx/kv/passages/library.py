"""A library of passages: a data file in each of its directories with an extent for each passage,
in the first one an index beside it, and locks of what is in use.

Any number of processes read and fill it. What was killed while it wrote leaves a place that is
handed out again; what is damaged is found by its checksums, and by nobody afterwards. A place whose
write was given up, at its deadline, is nobody's until nothing of that write is in flight: it would
land in what came to lie there.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...ops.crc32c import crc32c_ranges
from ...storage import NativeEngine, Plan
from ...storage.engine import FileHandle, Future
from ...storage.files import make_given_directory, write_error
from ...storage.native import NativeFuture
from ...storage.parse import check_plain_file
from ..striping import Storage, directories_of
from .extent import Extent, Identity, Rows, RowShape, front_of, read_front
from .index import Index, Place
from .pins import Pins

INDEX, LOCKS = "index.sqlite", "PINS"
#: The data file of the first directory.
DATA = "passages.bin"
_POLL_S = 0.02
#: Checksums of so many bytes are looked at together.
_VERIFY_BYTES = 8 << 20
#: Locks that outlive their library: of places where a write that was given up may still land.
_HELD = set[Pins]()


def data_name(directory: int) -> str:
    """The data file's name in a directory, by its number: directories that are given in another
    order are seen."""
    return DATA if not directory else f"passages-{directory}.bin"


@dataclass(frozen=True)
class Damaged:
    """An extent that was found damaged: its place in a data file."""

    offset_bytes: int
    size_bytes: int


class Library:
    """The extents of one model's passages, in a directory that others may share.

    Args:
        storage: a directory, or one for each SSD, always in the same order; made where it is
            missing.
        space: SHA-256 of the model, the shape of its rows and its tokenizer: extents of other
            spaces are never looked at.
        said: what the space is, in words.
        shape: of the rows.
        limit_bytes: of all data files together, shared equally; None: as far as the disks go.
        engine: ``auto``, ``uring`` or ``posix``, or how to make an engine.
        deadline_s: of each transfer.

    Attributes:
        directories: of `storage`.
        engine: of all files.
        files: the data file of each directory.
        shape, deadline_s: as given.
        damaged: what was found damaged so far.

    Raises:
        FormatError: the index is damaged, or something is no plain file.
        WriteError, DiskFullError, StoreBusyError.
    """

    def __init__(
        self,
        storage: Storage,
        space: bytes,
        said: dict[str, Any],
        shape: RowShape,
        *,
        limit_bytes: int | None = None,
        engine: str | Callable[[], Any] = "auto",
        deadline_s: float = 30.0,
    ):
        self.directories, self.shape, self.space = directories_of(storage), shape, space
        count = len(self.directories)
        self._limit_bytes = None if limit_bytes is None else limit_bytes // count
        self._lock, self.damaged = threading.RLock(), list[Damaged]()
        self._writers = dict[int, ExtentWriter]()  # by the number of their extent
        # extents that came to nothing, with what may still land in their places
        self._late = dict[int, list[NativeFuture]]()
        self._unmarked = set[int]()  # of these, those that the index does not know of yet
        self.deadline_s, self._is_closed, self._process = deadline_s, False, os.getpid()
        self.engine: NativeEngine = (
            NativeEngine(engine, pool_bytes=_VERIFY_BYTES) if isinstance(engine, str) else engine()
        )
        try:
            for each in self.directories:
                make_given_directory(each)
            first = self.directories[0]
            self._pins = Pins(os.path.join(first, LOCKS))
            try:
                self._index = Index(os.path.join(first, INDEX), self._pins)
                self._check_directories(self._index.directories())
                self.files = [self._opened(number) for number in range(count)]
                self._index.note_space(space, said)
            except BaseException:
                self._pins.close()
                raise
        except BaseException:
            self.engine.close()
            raise

    def _opened(self, number: int) -> FileHandle:
        path = os.path.join(self.directories[number], data_name(number))
        _make_file(path)
        return self.engine.open(path, "r+")

    def _check_directories(self, used: int) -> None:
        """Raises FormatError where extents lie in directories that were not given, or were given in
        another order."""
        missing = [
            number
            for number in range(1, used)
            if number >= len(self.directories)
            or not os.path.lexists(os.path.join(self.directories[number], data_name(number)))
        ]
        if missing:
            raise errors.FormatError(
                "the directories of a library",
                path=self.directories[0],
                got=f"{len(self.directories)}, without {data_name(missing[0])} in its place",
                expected=f"the {used} that it was filled with, in the same order",
                fix="give all of them as they were",
            )

    # --- what is there ---

    def find(
        self,
        wanted: Sequence[tuple[Identity, np.ndarray]],
        *,
        known: Mapping[int, Extent] | None = None,
        is_use: bool = True,
        begun: Callable[[Future], object] | None = None,
    ) -> list[Extent | None]:
        """The extents of these texts, pinned until `leave`; None where there is none, or where its
        front is damaged.

        Args:
            known: by number, extents that the caller has pinned: their fronts are not read again.
            is_use: counts as a use of each, by which it is kept longer.
            begun: is told of each read that is waited for, before it is, to call it off.

        Raises DeadlineExceededError; TransferCancelledError for a read that was called off.
        """
        with self._lock:
            places = self._index.find(wanted, is_use=is_use)
            there = [
                (place, identity)
                for place, (identity, _) in zip(places, wanted, strict=True)
                if place is not None
            ]
            try:
                by_number = self._fronts(there, known or {}, begun)
            except BaseException:
                for place, _ in there:
                    self._pins.leave(place.number)
                raise
        return [None if place is None else by_number.get(place.number) for place in places]

    def _fronts(
        self,
        there: Sequence[tuple[Place, Identity]],
        known: Mapping[int, Extent],
        begun: Callable[[Future], object] | None,
    ) -> dict[int, Extent]:
        """Reads and checks what lies in front of extents that are pinned; those that are damaged
        are left."""
        shape = self.shape
        found = {place.number: known[place.number] for place, _ in there if place.number in known}
        once = {
            place.number: (place, identity)
            for place, identity in there
            if place.number not in found
        }
        files = [self.files[place.directory] for place, _ in once.values()]
        offsets = [place.offset_bytes for place, _ in once.values()]
        sizes = [shape.front_bytes(identity.tokens) for _, identity in once.values()]
        begins = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        memory = self.engine.memory(max(int(begins[-1]), 1))
        is_read = not once or self._read(files, offsets, sizes, memory, begun)
        for number, (place, identity) in enumerate(once.values()):
            size, front = sizes[number], memory[int(begins[number]) : int(begins[number + 1])]
            if not is_read and not self._read(
                files[number : number + 1], [offsets[number]], [size], front, begun
            ):
                read = None
            else:
                read = read_front(shape, identity, front.numpy())
            if read is None or place.size_bytes != shape.extent_bytes(identity.tokens):
                self._damage(place.number, place.offset_bytes, size)
                continue
            found[place.number] = Extent(
                place.number, identity, place.directory, place.offset_bytes, place.size_bytes, *read
            )
        for place, _ in there:
            if place.number not in found:
                self._pins.leave(place.number)
        return found

    def _read(
        self,
        files: Sequence[FileHandle],
        offsets: Sequence[int],
        sizes: Sequence[int],
        memory: torch.Tensor,
        begun: Callable[[Future], object] | None = None,
    ) -> bool:
        """Whether bytes could be read, which come one after the other."""
        begins = np.concatenate([[0], np.cumsum(sizes)])[: len(sizes)].astype(np.int64)
        try:
            plan = Plan.of(list(files), list(offsets), list(sizes), begins.tolist())
            # somebody waits for it: ahead of rows that may be wanted later
            future = self.engine.read(plan, memory, priority=1, deadline_s=self.deadline_s)
            if begun is not None:
                begun(future)
            future.wait()
        except (errors.ReadError, errors.TruncatedFileError):
            return False
        return True

    def begin_read(self, extent: Extent, layer: int) -> Future:
        """Starts reading the blocks of a layer of an extent that is pinned, unchecked: [heads,
        blocks, block bytes] in the future's memory."""
        place = extent.places(self.shape)[layer]
        plan = Plan.of(self.files[extent.directory], [place.offset_bytes], [place.size_bytes], [0])
        memory = self.engine.memory(place.size_bytes)
        return self.engine.read(plan, memory, deadline_s=self.deadline_s)

    def rows(self, extent: Extent, layer: int) -> Rows:
        """All rows of a layer of an extent that is pinned, checked. Raises ReadError,
        TruncatedFileError, ChecksumError, DeadlineExceededError."""
        parts = [extent.packed[layer]] if extent.packed else []
        if extent.block_tokens:
            layout, heads = self.shape.layout, self.shape.heads
            memory = self.begin_read(extent, layer).wait()
            self.check(extent, layer, memory)
            blocks = memory.view(1, heads, -1, layout.block_bytes)
            parts.insert(0, layout.unpack(blocks, extent.block_tokens))
        k, v = (torch.cat([each[i] for each in parts], dim=2) for i in (0, 1))
        return k, v

    def check(self, extent: Extent, layer: int, memory: torch.Tensor) -> None:
        """Raises ChecksumError unless these are the blocks of a layer of an extent."""
        size_bytes = self.shape.layout.block_bytes
        found, wanted = block_sums(memory, size_bytes), extent.sums[layer].reshape(-1)
        for i in np.flatnonzero(found != wanted)[:1].tolist():
            raise errors.ChecksumError(
                "stored rows are damaged",
                path=self.files[extent.directory].path,
                offset_bytes=extent.places(self.shape)[layer].offset_bytes + i * size_bytes,
                size_bytes=size_bytes,
                got=f"CRC32C {found[i]}",
                expected=f"CRC32C {wanted[i]}",
            )

    def _damage(self, number: int, offset_bytes: int, size_bytes: int) -> None:
        self.damaged.append(Damaged(offset_bytes, size_bytes))
        self._index.damage(number)

    def damage(self, extent: Extent, offset_bytes: int, size_bytes: int) -> None:
        """Rows of an extent are damaged: nobody gets it any more."""
        with self._lock:
            self._damage(extent.number, offset_bytes, size_bytes)

    def leave(self, extents: Sequence[Extent]) -> None:
        """The end of as many pins. Does nothing once the library is closed, nor in a child process:
        the pins are the parent's."""
        if self._has_ended:
            return
        with self._lock:
            if not self._is_closed:
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
        until, shape, tokens = time.monotonic() + wait_s, self.shape, identity.tokens
        size_bytes, row_bytes = shape.extent_bytes(tokens), tokens * shape.token_bytes
        full = set[int]()  # directories on whose disk there is no room
        while True:
            with self._lock:
                self._free_late()
                place = self._index.reserve(
                    identity,
                    ids,
                    size_bytes,
                    row_bytes,
                    cost,
                    self._limit_bytes,
                    [each for each in range(len(self.files)) if each not in full],
                )
                if place is None:
                    return None
                if place.is_own:
                    if self._make_room(place, full):
                        self._writers[place.number] = ExtentWriter(self, place, identity)
                        return self._writers[place.number]
                    continue
                if place.is_ready and (found := self.find([(identity, ids)])[0]) is not None:
                    return found
            if time.monotonic() > until:
                return None
            time.sleep(_POLL_S)  # another process writes it

    def _make_room(self, place: Place, full: set[int]) -> bool:
        """Space in the file for an extent. Where the disk is full the place is given back: False.
        The other directories are tried then, and when all are full, something is evicted, so that
        the next place may be a hole. Raises DiskFullError where nothing can be."""
        try:
            self.engine.allocate(self.files[place.directory], place.offset_bytes + place.size_bytes)
        except errors.DiskFullError:
            self._index.abandon(place.number)
            full.add(place.directory)
            if len(full) == len(self.files):
                full.clear()
                if not self._index.evict_one():
                    raise
            return False
        except BaseException:
            self._index.abandon(place.number)
            raise
        return True

    @property
    def _has_ended(self) -> bool:
        """Whether it is closed, or this is a child process, which shares the locks with its parent:
        whatever it unlocked would be unlocked there. To be asked before the lock is taken, which
        another thread of the parent may have had when the child was made."""
        return self._is_closed or os.getpid() != self._process

    def _give_up(self, number: int, writes: Sequence[NativeFuture]) -> None:
        """An extent comes to nothing, while some of its writes may be in flight. Its text may be
        written at once, elsewhere. Where the index is busy, that is left for the next call that
        asks (`_free_late`)."""
        if self._has_ended:
            return
        with self._lock:
            if self._is_closed or self._writers.pop(number, None) is None:
                return
            for each in writes:
                each.cancel()
            self._late[number] = late = [each for each in writes if not each.is_over()]
            if late:
                self._unmarked.add(number)
                _HELD.add(self._pins)
            self._free_late()

    def _free_late(self) -> None:
        """Gives back the places where nothing can land any more; the others are nobody's. Where the
        index is busy, the rest is left for the next time."""
        with suppress(errors.StoreBusyError):
            for number, writes in list(self._late.items()):
                if all(each.is_over() for each in writes):
                    self._index.abandon(number)
                    del self._late[number]
                    self._unmarked.discard(number)
                elif number in self._unmarked:
                    self._index.damage(number)
                    self._unmarked.remove(number)
        if not self._late:
            _HELD.discard(self._pins)

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
        """Bytes read of an extent; what is damaged is noted. The front was read when it was
        found."""
        layout, front = (self.shape.layout, self.shape.front_bytes(extent.identity.tokens))
        sums, step = extent.sums.reshape(-1), max(1, _VERIFY_BYTES // layout.block_bytes)
        file = self.files[extent.directory]
        for first in range(0, sums.size, step):
            wanted = sums[first : first + step]
            size = wanted.size * layout.block_bytes
            memory = self.engine.memory(size)
            begin = extent.offset_bytes + front + first * layout.block_bytes
            if not self._read([file], [begin], [size], memory) or not np.array_equal(
                block_sums(memory, layout.block_bytes), wanted
            ):
                self.damage(extent, begin, size)
                break
        return extent.size_bytes

    def stats(self) -> dict[str, int]:
        """Extents of all spaces, their bytes, those of rows alone, the length of the data files,
        how many were found damaged by this library, and how many places wait for a write of its own
        that was given up."""
        with self._lock:
            self._free_late()
            return self._index.totals() | {"damaged": len(self.damaged), "late": len(self._late)}

    def close(self) -> None:
        """Leaves everything, once nothing of it is in flight: it waits for seconds at most, and
        places where a write may land even then stay locked until the process ends. May be called
        again."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            try:
                self.engine.close()
            finally:
                self._let_go()

    def _let_go(self) -> None:
        """Ends the locks and the index, whose engine is closed."""
        writing = {each: list(writer.writes) for each, writer in self._writers.items()} | self._late
        if os.getpid() != self._process:  # the locks and what is in flight are the parent's
            writing.clear()
        late = [
            number
            for number, writes in writing.items()
            if not all(each.is_over() for each in writes)
        ]
        try:
            # the others are; an error leaves these locked, so that nobody else gets them
            with suppress(errors.EspnxError):
                for number in late:
                    if number in self._writers or number in self._unmarked:
                        self._index.damage(number)
            self._index.close()
        finally:
            if late:
                self._pins.keep_only(late)
                _HELD.add(self._pins)
            else:
                _HELD.discard(self._pins)
                self._pins.close()


class ExtentWriter:
    """Writes the rows of one text into its extent, layer by layer, some tokens at a time. A context
    manager: what is not finished comes to nothing.

    Args:
        library, place, identity: what it is written for.

    Attributes:
        writes: that may be in flight.
    """

    def __init__(self, library: Library, place: Place, identity: Identity):
        self._library, self._place, self._identity = library, place, identity
        self.writes = list[NativeFuture]()
        shape = library.shape
        self._sums = np.zeros(
            (shape.layers, shape.heads, shape.blocks(identity.tokens)), dtype=np.uint32
        )
        self._written = [0] * shape.layers  # tokens
        self._packed: list[Rows | None] = [None] * shape.layers
        self._is_open = True

    def __enter__(self) -> ExtentWriter:
        return self

    def rows(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes the next tokens of a layer: k [1, heads, n, d] and v [1, heads, n, dv]; whole
        blocks, but for the last ones of the text. Raises WriteError, DeadlineExceededError."""
        shape, tokens = self._library.shape, self._identity.tokens
        layout, n = shape.layout, k.shape[2]
        first = self._written[layer]
        if first % layout.block_rows or (
            (first + n < tokens and n % layout.block_rows) or first + n > tokens
        ):
            raise errors.InvalidInputError(
                "rows of an extent", got=f"{n} after {first}", expected="whole blocks"
            )
        in_blocks = min(max(shape.block_tokens(tokens) - first, 0), n)
        if in_blocks:
            self._blocks(layer, k[0, :, :in_blocks], v[0, :, :in_blocks])
        if in_blocks < n:  # they wait for the front, which comes last
            self._packed[layer] = k[:, :, in_blocks:].clone(), v[:, :, in_blocks:].clone()
        self._written[layer] += n

    def _blocks(self, layer: int, k: torch.Tensor, v: torch.Tensor) -> None:
        """Writes rows [heads, n, ...] in blocks."""
        library, shape, tokens = self._library, self._library.shape, self._identity.tokens
        layout, at = shape.layout, self._written[layer] // shape.layout.block_rows
        blocks = layout.blocks(k.shape[1])
        size_bytes = blocks * layout.block_bytes
        engine = library.engine
        memory = engine.memory(shape.heads * size_bytes)
        layout.pack(k.cpu(), v.cpu(), memory.view(shape.heads, blocks, layout.block_bytes))
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
            library.files[self._place.directory],
            offsets,
            [size_bytes] * shape.heads,
            [head * size_bytes for head in range(shape.heads)],
        )
        self._write(plan, memory)

    def _write(self, plan: Plan, memory: torch.Tensor) -> None:
        """Writes, and waits for it. Raises WriteError, DeadlineExceededError."""
        library = self._library
        with library._lock:  # who closes the library sees what is in flight
            found = library.engine.write(plan, memory, deadline_s=library.deadline_s)
            self.writes.append(found)
        found.wait()
        self.writes.remove(found)

    def finish(self) -> Extent:
        """The extent is whole, on disk, and pinned. Raises WriteError, DeadlineExceededError,
        StateError where rows are missing."""
        library, identity, place = self._library, self._identity, self._place
        if self._written != [identity.tokens] * library.shape.layers:
            raise errors.StateError(
                "an extent that is finished before all its rows have come",
                got=min(self._written),
                expected=f"{identity.tokens} tokens in every layer",
            )
        packed = library.shape.pack([each for each in self._packed if each is not None])
        front = front_of(library.shape, identity, self._sums, packed)
        memory = library.engine.memory(front.size)
        memory.copy_(torch.from_numpy(front))
        file = library.files[place.directory]
        plan = Plan.of(file, [place.offset_bytes], [front.size], [0])
        self._write(plan, memory)
        library.engine.sync(file)
        with library._lock:
            library._index.finish(place.number)
            library._writers.pop(place.number, None)
        self._is_open = False
        tokens = library.shape.packed_tokens(identity.tokens)
        return Extent(
            place.number,
            identity,
            place.directory,
            place.offset_bytes,
            place.size_bytes,
            self._sums,
            library.shape.unpack(packed, tokens) if tokens else [],
        )

    def __exit__(self, *error: object) -> None:
        if self._is_open:
            self._is_open = False
            self._library._give_up(self._place.number, self.writes)


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
