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


class Touched:
    """Who has touched each piece last: a thread and its warp, or several; in which epoch (between
    two barriers of the block) and turn (between two of a warp)."""

    def __init__(self, n: int):
        self.thread = np.full(n, NOBODY)
        self.warp = np.full(n, NOBODY)
        self.epoch = np.full(n, -1)
        self.turn = np.full(n, -1)

    def clashes(
        self, pieces: np.ndarray, threads: np.ndarray, epoch: int, turn: int
    ) -> np.ndarray | None:
        """bool like ``pieces``: whether another thread has touched it since the last barrier that
        both have passed; None: no piece has been touched in this epoch."""
        recent = self.epoch[pieces] == epoch
        if not recent.any():
            return None
        apart = (self.warp[pieces] != threads // WARP) | (self.turn[pieces] >= turn)
        found: np.ndarray = recent & (self.thread[pieces] != threads) & apart
        return found

    def note(
        self, pieces: np.ndarray, threads: np.ndarray, epoch: int, turn: int, *, joins: bool
    ) -> None:
        """``joins``: those who touched a piece in this epoch stay beside the new ones (reads);
        otherwise the new ones follow them (writes)."""
        thread = np.broadcast_to(threads, pieces.shape)
        warp = thread // WARP
        if joins:
            old_warp, old = self.warp[pieces], self.thread[pieces]
            is_over = (self.epoch[pieces] != epoch) | (
                (old_warp == warp) & (self.turn[pieces] < turn)
            )
            thread = np.where(is_over | (old == thread), thread, SEVERAL)
            warp = np.where(is_over | (old_warp == warp), warp, SEVERAL)
        self.thread[pieces], self.warp[pieces] = thread, warp
        self.epoch[pieces], self.turn[pieces] = epoch, turn
        # several threads of this very instruction: only one of them was kept
        self.thread[pieces[self.thread[pieces] != thread]] = SEVERAL
        self.warp[pieces[self.warp[pieces] != warp]] = SEVERAL


class SharedMemory:
    """Bytes from address 0 on, in pieces of ``granule`` bytes."""

    def __init__(self, size: int, granule: int):
        n = -(-size // granule)
        self.size, self.granule = size, granule
        self.data = np.zeros(size, dtype=np.uint8)
        self.is_written = np.zeros(n, dtype=bool)
        self.writes, self.reads = Touched(n), Touched(n)
        self.copies, self.products = np.zeros(n, dtype=np.int64), np.zeros(n, dtype=np.int64)
        self.fences_before = np.zeros(n, dtype=np.int64)
        self.epoch = self.turn = self.fences = 0

    def block_barrier(self) -> None:
        self.epoch += 1
        self.turn += 1

    def warp_barrier(self) -> None:
        self.turn += 1

    def fence(self) -> None:
        """What has been written becomes visible to asynchronous products."""
        self.fences += 1

    def read(self, addresses: np.ndarray, n_bytes: int, threads: np.ndarray) -> np.ndarray:
        """uint8 [threads, n_bytes]."""
        pieces = self._pieces(addresses, n_bytes)
        self._check_readable(pieces)
        clash = self.writes.clashes(pieces, threads[:, None], self.epoch, self.turn)
        self._check(clash, "race", "is read without a barrier after another thread's write", pieces)
        self.reads.note(pieces, threads[:, None], self.epoch, self.turn, joins=True)
        found: np.ndarray = self.data[addresses[:, None] + np.arange(n_bytes)]
        return found

    def write(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        """``values``: uint8 [threads, bytes]."""
        pieces = self._pieces(addresses, values.shape[1])
        self._check(self.copies[pieces] > 0, "in flight", "is written during a copy", pieces)
        self._check_writable(pieces, threads)
        self._store(addresses, values, threads, pieces)

    def copy_begins(self, addresses: np.ndarray, n_bytes: int, threads: np.ndarray) -> None:
        """From now on an asynchronous copy may write there."""
        pieces = self._pieces(addresses, n_bytes)
        self._check(self.copies[pieces] > 0, "in flight", "is the target of two copies", pieces)
        self._check_writable(pieces, threads)
        np.add.at(self.copies, pieces, 1)

    def copy_ends(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        """It has written, as its own thread sees it."""
        pieces = self._pieces(addresses, values.shape[1])
        np.subtract.at(self.copies, pieces, 1)
        self._store(addresses, values, threads, pieces)

    def product_begins(self, addresses: np.ndarray, n_bytes: int) -> tuple[np.ndarray, np.ndarray]:
        """What an asynchronous product of the whole block reads, uint8 [addresses, n_bytes], and
        the pieces that it holds until it has been waited for."""
        pieces = self._pieces(addresses, n_bytes)
        self._check_readable(pieces)
        recent = self.writes.epoch[pieces] == self.epoch
        self._check(recent, "race", "is multiplied without a barrier after its write", pieces)
        unfenced = self.fences_before[pieces] >= self.fences
        self._check(unfenced, "unfenced", "is multiplied without a fence after its write", pieces)
        held = np.unique(pieces)
        self.products[held] += 1
        return self.data[addresses[:, None] + np.arange(n_bytes)], held

    def product_ends(self, held: np.ndarray) -> None:
        self.products[held] -= 1

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

    def _check(
        self, is_wrong: np.ndarray | None, kind: str, message: str, pieces: np.ndarray
    ) -> None:
        if is_wrong is not None and is_wrong.any():
            first = int(pieces[is_wrong][0]) * self.granule
            raise Fault(kind, f"shared memory at byte {first} {message}")

    def _check_readable(self, pieces: np.ndarray) -> None:
        self._check(self.copies[pieces] > 0, "in flight", "is read before its copy ends", pieces)
        self._check(~self.is_written[pieces], "unwritten", "is read before it is written", pieces)

    def _check_writable(self, pieces: np.ndarray, threads: np.ndarray) -> None:
        self._check(self.products[pieces] > 0, "in flight", "is written during a product", pieces)
        for touched, what in ((self.writes, "write"), (self.reads, "read")):
            clash = touched.clashes(pieces, threads[:, None], self.epoch, self.turn)
            message = f"is written without a barrier after another thread's {what}"
            self._check(clash, "race", message, pieces)

    def _store(
        self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray, pieces: np.ndarray
    ) -> None:
        places = addresses[:, None] + np.arange(values.shape[1])
        self.data[places] = values
        if (self.data[places] != values).any():
            raise Fault("race", "two threads write different values to the same shared bytes")
        self.is_written[pieces] = True
        self.fences_before[pieces] = self.fences
        self.writes.note(pieces, threads[:, None], self.epoch, self.turn, joins=False)
