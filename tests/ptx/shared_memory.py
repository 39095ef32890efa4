"""A block's shared memory, which knows of each piece who touched it last and since which barrier.

What one thread has written another may touch only after a barrier of both: ``bar.sync`` for the
block, ``bar.warp.sync`` for threads of one warp. What an asynchronous copy is to write, or an
asynchronous product still reads, nobody may touch before it has been waited for.
"""

from __future__ import annotations

import numpy as np

from tests.ptx.program import Fault

NOBODY, SEVERAL = -1, -2
WARP = 32
#: Several threads of one warp are that number and the warp's; single threads are below it.
SEVERAL_OF_WARP = 1 << 12
#: Types to move so many bytes at a time.
WORDS = {1: "u1", 2: "u2", 4: "u4", 8: "u8", 16: "V16", 32: "V32"}


def warps_of(who: np.ndarray) -> np.ndarray:
    """NOBODY and SEVERAL are of no warp."""
    return np.where(who < SEVERAL_OF_WARP, who // WARP, who - SEVERAL_OF_WARP)


class Touched:
    """Who has touched each piece last (a thread, several of a warp, or several), and in which turn:
    a warp's turns are between two of its barriers, and those of the block begin turns of all, too.
    They are numbered as they begin."""

    def __init__(self, n: int):
        self.who = np.full(n, NOBODY, dtype=np.int32)
        self.turn = np.full(n, -1, dtype=np.int32)
        self.last_turn = -1  # in which any was touched

    def since(self, pieces: np.ndarray, block_turn: int) -> np.ndarray | None:
        """bool like ``pieces``: which have been touched since the last barrier of the block, that
        began that turn; None: no piece at all has."""
        return None if self.last_turn < block_turn else self.turn[pieces] >= block_turn

    def clashes(
        self, pieces: np.ndarray, threads: np.ndarray, block_turn: int, turn: np.ndarray
    ) -> np.ndarray | None:
        """bool like ``pieces``: whether another thread has touched it since the last barrier that
        both have passed; None: no piece has been touched since the block's."""
        recent = self.since(pieces, block_turn)
        if recent is None or not recent.any():
            return None
        who = self.who[pieces]
        apart = (warps_of(who) != threads // WARP) | (self.turn[pieces] >= turn)
        found: np.ndarray = recent & (who != threads) & apart
        return found

    def note(
        self,
        pieces: np.ndarray,
        threads: np.ndarray,
        block_turn: int,
        turn: np.ndarray,
        *,
        joins: bool,
    ) -> None:
        """``joins``: those who touched a piece since the block's last barrier stay beside the new
        ones (reads); otherwise the new ones follow them (writes)."""
        now = np.broadcast_to(threads.astype(np.int32), pieces.shape)
        if joins and (recent := self.since(pieces, block_turn)) is not None and recent.any():
            old, warp = self.who[pieces], now // WARP
            is_same = warps_of(old) == warp
            is_over = ~recent | (is_same & (self.turn[pieces] < turn)) | (old == now)
            now = np.where(is_over, now, np.where(is_same, SEVERAL_OF_WARP + warp, SEVERAL))
        self.who[pieces], self.turn[pieces] = now, turn
        self.last_turn = max(self.last_turn, int(turn.max(initial=-1)))
        # several threads of this very instruction: only one of them was kept
        kept = self.who[pieces]
        lost = kept != now
        if lost.any():
            is_same = warps_of(kept) == warps_of(now)
            self.who[pieces[lost]] = SEVERAL_OF_WARP + warps_of(now[lost])
            self.who[pieces[lost & ~is_same]] = SEVERAL


class SharedMemory:
    """Bytes from address 0 on, in pieces of ``granule`` bytes."""

    def __init__(self, size: int, granule: int, n_threads: int):
        n = -(-size // granule)
        self.size, self.granule = size, granule
        self.data = np.zeros(size, dtype=np.uint8)
        self.is_written = np.zeros(n, dtype=bool)
        self.writes, self.reads = Touched(n), Touched(n)
        self.copies, self.products = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.n_copies = self.n_products = 0  # under way: where there are none, none is looked for
        self.fences_before = np.zeros(n, dtype=np.int64)
        self.last_turn = self.block_turn = self.fences = 0
        self.turns = np.zeros(n_threads, dtype=np.int32)  # that each thread is in

    def block_barrier(self) -> None:
        self.last_turn += 1
        self.block_turn = self.last_turn
        self.turns[:] = self.last_turn

    def warp_barrier(self, threads: np.ndarray) -> None:
        """``threads``: of whole warps."""
        self.last_turn += 1
        self.turns[threads] = self.last_turn

    def fence(self) -> None:
        """What has been written becomes visible to asynchronous products."""
        self.fences += 1

    def read(self, addresses: np.ndarray, n_bytes: int, threads: np.ndarray) -> np.ndarray:
        """uint8 [threads, n_bytes]."""
        pieces = self._pieces(addresses, n_bytes)
        self._check_readable(pieces)
        clash = self.writes.clashes(pieces, threads[:, None], self.block_turn, self._turn(threads))
        self._check(clash, "race", "is read without a barrier after another thread's write", pieces)
        self.reads.note(pieces, threads[:, None], self.block_turn, self._turn(threads), joins=True)
        return self._bytes(addresses, n_bytes)

    def write(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        """``values``: uint8 [threads, bytes]."""
        pieces = self._pieces(addresses, values.shape[1])
        self._check_copied(pieces, "is written during a copy")
        self._check_writable(pieces, threads)
        self._store(addresses, values, threads, pieces)

    def copy_begins(self, addresses: np.ndarray, n_bytes: int, threads: np.ndarray) -> None:
        """From now on an asynchronous copy may write there."""
        pieces = self._pieces(addresses, n_bytes)
        self._check_copied(pieces, "is the target of two copies")
        self._check_writable(pieces, threads)
        np.add.at(self.copies, pieces, 1)
        self.n_copies += pieces.size

    def copy_ends(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        """It has written, as its own thread sees it."""
        pieces = self._pieces(addresses, values.shape[1])
        np.subtract.at(self.copies, pieces, 1)
        self.n_copies -= pieces.size
        self._store(addresses, values, threads, pieces)

    def product_begins(self, addresses: np.ndarray, n_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """What an asynchronous product of the whole block reads, uint8 [addresses, n_bytes], and
        the pieces that it holds until it has been waited for."""
        pieces = self._pieces(addresses, n_bytes)
        self._check_readable(pieces)
        recent = self.writes.since(pieces, self.block_turn)
        self._check(recent, "race", "is multiplied without a barrier after its write", pieces)
        unfenced = self.fences_before[pieces] >= self.fences
        self._check(unfenced, "unfenced", "is multiplied without a fence after its write", pieces)
        held = np.unique(pieces)
        self.products[held] += 1
        self.n_products += 1
        return self._bytes(addresses, n_bytes), held

    def product_ends(self, held: np.ndarray) -> None:
        self.products[held] -= 1
        self.n_products -= 1

    def _turn(self, threads: np.ndarray) -> np.ndarray:
        found: np.ndarray = self.turns[threads][:, None]
        return found

    def _pieces(self, addresses: np.ndarray, n_bytes: int) -> np.ndarray:
        if addresses.size and int(addresses.max()) > self.size - n_bytes:
            where = f"at byte {int(addresses.max())} of shared memory, which has {self.size}"
            raise Fault("outside", f"{n_bytes} bytes {where}")
        if (addresses & (n_bytes - 1)).any():
            raise Fault("misaligned", f"{n_bytes} shared bytes at no multiple of them")
        found: np.ndarray = addresses[:, None] // self.granule + np.arange(
            max(n_bytes // self.granule, 1)
        )
        return found

    def _words(self, n_bytes: int) -> np.ndarray:
        """The bytes, so many as one; what is less at the end nobody addresses so."""
        return self.data[: self.size // n_bytes * n_bytes].view(WORDS[n_bytes])

    def _bytes(self, addresses: np.ndarray, n_bytes: int) -> np.ndarray:
        found: np.ndarray = self._words(n_bytes)[addresses // n_bytes]
        return found.view(np.uint8).reshape(-1, n_bytes)

    def _check(
        self, is_wrong: np.ndarray | None, kind: str, message: str, pieces: np.ndarray
    ) -> None:
        if is_wrong is not None and is_wrong.any():
            first = int(pieces[is_wrong][0]) * self.granule
            raise Fault(kind, f"shared memory at byte {first} {message}")

    def _check_copied(self, pieces: np.ndarray, message: str) -> None:
        if self.n_copies:
            self._check(self.copies[pieces] > 0, "in flight", message, pieces)

    def _check_readable(self, pieces: np.ndarray) -> None:
        self._check_copied(pieces, "is read before its copy ends")
        self._check(~self.is_written[pieces], "unwritten", "is read before it is written", pieces)

    def _check_writable(self, pieces: np.ndarray, threads: np.ndarray) -> None:
        if self.n_products:
            is_read = self.products[pieces] > 0
            self._check(is_read, "in flight", "is written during a product", pieces)
        for touched, what in ((self.writes, "write"), (self.reads, "read")):
            clash = touched.clashes(pieces, threads[:, None], self.block_turn, self._turn(threads))
            message = f"is written without a barrier after another thread's {what}"
            self._check(clash, "race", message, pieces)

    def _store(
        self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray, pieces: np.ndarray
    ) -> None:
        n_bytes = values.shape[1]
        given = np.ascontiguousarray(values)
        self._words(n_bytes)[addresses // n_bytes] = given.view(WORDS[n_bytes])[:, 0]
        kept = self._bytes(addresses, n_bytes)
        if (kept != given).any() and not _same_but_for_nan(kept, given):
            raise Fault("race", "two threads write different values to the same shared bytes")
        self.is_written[pieces] = True
        self.fences_before[pieces] = self.fences
        self.writes.note(
            pieces, threads[:, None], self.block_turn, self._turn(threads), joins=False
        )


def _same_but_for_nan(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether bytes differ only in NaNs of fp32: the host gives them signs and bits of their own,
    where a GPU makes the same of all."""
    if one.shape[1] % 4:
        return False
    a, b = (np.ascontiguousarray(each).view(np.uint32) for each in (one, other))
    of_nan = np.isnan(a.view(np.float32)) & np.isnan(b.view(np.float32))
    return bool(((a == b) | of_nan).all())
