"""A block of threads while it runs: a register is an array over the threads, as bits.

What a thread has not written into a register (``missing``) may be passed on and computed with, as
lanes do that a reduction leaves out; it must not get into memory, an address, a matrix or a branch.
A register that an asynchronous product is still to write (``late``) must not be touched.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from tests.ptx.global_memory import GlobalMemory
from tests.ptx.program import Fault
from tests.ptx.shared_memory import WARP, SharedMemory

STORED = {1: np.bool_, 8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}


class Copies(NamedTuple):
    """Asynchronous copies under way: where to, what, by which threads, and in which of its groups
    each of them has it."""

    addresses: np.ndarray
    values: np.ndarray
    threads: np.ndarray
    groups: np.ndarray

    def of(self, which: np.ndarray) -> Copies:
        return Copies(*(each[which] for each in self))


@dataclass
class Products:
    """Asynchronous products of one group: registers that they write, and shared memory that they
    read."""

    slots: set[int] = field(default_factory=set)
    held: list[np.ndarray] = field(default_factory=list)


class Block:
    """Registers by slot, and what is under way."""

    def __init__(
        self,
        constants: dict[int, np.ndarray],
        n_slots: int,
        n_threads: int,
        shared: SharedMemory,
        memory: GlobalMemory,
        number: int,
    ):
        self.registers: list[np.ndarray | None] = [None] * n_slots
        for slot, value in constants.items():
            self.registers[slot] = value
        self.missing: dict[int, np.ndarray] = {}
        self.late: dict[int, Products] = {}
        self.n_threads, self.number = n_threads, number
        self.threads = np.arange(n_threads)
        self.shared, self.memory = shared, memory
        self.active: np.ndarray | None = None  # of the threads: which execute; None: all
        self.copies = list[Copies]()
        self.n_groups = np.zeros(n_threads, dtype=np.int64)  # that a thread has made of its copies
        self.open_products, self.products = Products(), list[Products]()
        self.fragments: dict[int, np.ndarray] = {}  # threads that went another way, by where to

    def get(self, slot: int) -> np.ndarray:
        """A register's value, which all threads that execute must have written."""
        missing = self.missing.get(slot) if self.missing else None
        if missing is not None and self.chosen(missing).any():
            raise Fault("unwritten", "what a register holds that was not written matters here")
        return self.look(slot)

    def look(self, slot: int) -> np.ndarray:
        """A register's value; who passes it on passes on, too, which threads have not written it
        (`unknown`)."""
        if self.late and slot in self.late:
            raise Fault("in flight", "a register is used before the product that writes it ends")
        value = self.registers[slot]
        if value is None:
            raise Fault("unwritten", "a register is read before it is written")
        return value

    def unknown(self, slots: Iterable[int]) -> np.ndarray | None:
        """bool of the threads: whose value of a register is not written, for any of these."""
        if not self.missing:
            return None
        masks = [self.missing[each] for each in slots if each in self.missing]
        return np.logical_or.reduce(masks) if masks else None

    def put(self, slot: int, value: np.ndarray, missing: np.ndarray | None = None) -> None:
        """Writes a register; ``missing``: for which threads what is written means nothing."""
        if self.late and slot in self.late:
            raise Fault("in flight", "a register is written before the product that writes it ends")
        if self.active is not None:
            old = self.registers[slot]
            was_missing = self.missing.get(slot)
            if old is None:
                old, was_missing = value, np.ones(self.n_threads, dtype=bool)
            value = np.where(self.active, value, old)
            if missing is not None or was_missing is not None:
                none = np.zeros(self.n_threads, dtype=bool)
                missing = np.where(
                    self.active,
                    none if missing is None else missing,
                    none if was_missing is None else was_missing,
                )
        self.registers[slot] = value
        if missing is not None and missing.any():
            self.missing[slot] = missing
        elif self.missing:
            self.missing.pop(slot, None)

    def executing(self) -> np.ndarray:
        """The numbers of the threads that execute."""
        return self.threads if self.active is None else self.threads[self.active]

    def chosen(self, values: np.ndarray) -> np.ndarray:
        """Of the threads that execute."""
        return values if self.active is None else values[self.active]

    def spread(self, values: np.ndarray) -> np.ndarray:
        """Values of the threads that execute as those of all; others hold 0."""
        if self.active is None:
            return values
        whole = np.zeros((self.n_threads, *values.shape[1:]), dtype=values.dtype)
        whole[self.active] = values
        return whole

    def check_whole_warps(self) -> None:
        if self.active is not None:
            lanes = self.active.reshape(-1, WARP).sum(axis=1)
            if (lanes % WARP).any():
                raise Fault("divergent", "an instruction of a whole warp by some of its threads")

    def check_whole(self, what: str) -> None:
        if self.active is not None:
            raise Fault("divergent", f"{what} by some threads of the block")

    def begin_copies(self, addresses: np.ndarray, values: np.ndarray, threads: np.ndarray) -> None:
        self.shared.copy_begins(addresses, values.shape[1], threads)
        self.copies.append(Copies(addresses, values, threads, self.n_groups[threads]))

    def close_copies(self) -> None:
        """What the threads that execute copy from now on is of another group."""
        self.n_groups[self.executing()] += 1

    def end_copies(self, n_left: int) -> None:
        """Of the threads that execute all groups but the newest so many have arrived."""
        least = self.n_groups - n_left
        if self.active is not None:
            least = np.where(self.active, least, 0)
        left = []
        for copies in self.copies:
            has_arrived = copies.groups < least[copies.threads]
            if has_arrived.any():
                found = copies.of(has_arrived)
                self.shared.copy_ends(found.addresses, found.values, found.threads)
            if not has_arrived.all():
                left.append(copies.of(~has_arrived))
        self.copies = left

    def end_products(self, n_left: int) -> None:
        while len(self.products) > n_left:
            group = self.products.pop(0)
            for slot in group.slots:
                if self.late.get(slot) is group:
                    del self.late[slot]
            for held in group.held:
                self.shared.product_ends(held)
