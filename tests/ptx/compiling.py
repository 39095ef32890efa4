"""From an instruction to a function of a block: what the builders of each kind of instruction
share.

A builder is registered by an opcode's first word. It takes the instruction and the program's slots
and gives a function that executes it, or raises ``Unknown`` for a form that it does not know.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from tests.ptx.block import STORED, Block
from tests.ptx.program import Fault, Instruction, Operand, Program

#: Executes an instruction; the number of the next one, None for the one that follows.
Step = Callable[[Block], int | None]
Builder = Callable[[Instruction, "Slots"], Step]
BUILDERS: dict[str, Builder] = {}
LETTERS = {"b": "u", "u": "u", "s": "i", "f": "f"}


class Unknown(Exception):  # noqa: N818
    """A form of an instruction that nothing here executes."""


def builds(*words: str) -> Callable[[Builder], Builder]:
    def register(builder: Builder) -> Builder:
        BUILDERS.update(dict.fromkeys(words, builder))
        return builder

    return register


def dtype_of(kind: str) -> np.dtype:
    """NumPy's type for b32, s64, f16, ..."""
    if kind == "pred":
        return np.dtype(np.bool_)
    if kind[0] not in LETTERS or not kind[1:].isdigit():
        raise Unknown(kind)
    return np.dtype(f"{LETTERS[kind[0]]}{int(kind[1:]) // 8}")


def bits_of(kind: str) -> int:
    return 1 if kind == "pred" else 8 * dtype_of(kind).itemsize


class Slots:
    """Where a block keeps each register; literals, parameters and special registers are registers
    that nobody writes."""

    def __init__(self, program: Program):
        self.program = program
        self.numbers: dict[str, int] = {}
        self.literals: dict[int, int] = {}  # slot: the bits
        self.literal_bits: dict[int, int] = {}
        self.specials: dict[int, str] = {}

    def __len__(self) -> int:
        return len(self.numbers)

    def _slot(self, key: str) -> int:
        return self.numbers.setdefault(key, len(self.numbers))

    def source(self, operand: Operand, kind: str) -> int:
        """The slot of what is read as this type."""
        if not isinstance(operand, str):
            raise Unknown(f"{operand}")
        if operand.startswith("%"):
            if operand.split(".")[0] in ("%tid", "%ctaid", "%nctaid", "%ntid", "%laneid"):
                return self.special(operand)
            return self._register(operand, bits_of(kind))
        bits = bits_of(kind)
        slot = self._slot(f"{operand} of {bits} bits")
        address = self.program.addresses.get(operand)
        number = _literal(operand, bits) if address is None else address
        self.literals[slot], self.literal_bits[slot] = number, bits
        return slot

    def special(self, name: str) -> int:
        """The slot of a parameter or of a thread's place."""
        slot = self._slot(name)
        self.specials[slot] = name
        return slot

    def target(self, operand: Operand) -> int:
        """The slot of a register that is written; -1 for ``_``."""
        if operand == "_":
            return -1
        if not isinstance(operand, str) or not operand.startswith("%"):
            raise Unknown(f"{operand}")
        return self._slot(operand)

    def _register(self, name: str, bits: int) -> int:
        if self.program.register_bits(name) < bits:
            raise Fault("unknown", f"{bits} bits of {name}")
        return self._slot(name)

    def constants(
        self, n_threads: int, specials: Mapping[str, np.ndarray]
    ) -> dict[int, np.ndarray]:
        """The values of slots that nobody writes."""
        found: dict[int, np.ndarray] = {
            slot: np.full(n_threads, bits, dtype=STORED[self.literal_bits[slot]])
            for slot, bits in self.literals.items()
        }
        for slot, name in self.specials.items():
            found[slot] = np.ascontiguousarray(np.broadcast_to(specials[name], n_threads))
        return found


def _literal(text: str, bits: int) -> int:
    """A literal's bits."""
    if text.startswith(("0f", "0F")):
        return int(text[2:], 16)
    if text.startswith(("0d", "0D")):
        return int(text[2:], 16)
    try:
        number = int(text.removesuffix("U"), 0)
    except ValueError:
        raise Unknown(text) from None
    return number & ((1 << bits) - 1)


def as_type(value: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A register's lowest bits as this type."""
    if value.dtype.itemsize == dtype.itemsize:
        return value.view(dtype)
    return value.astype(f"u{dtype.itemsize}").view(dtype)


def as_bits(value: np.ndarray, bits: int) -> np.ndarray:
    """As a register of so many bits holds it: smaller numbers keep their sign, if they have one."""
    stored = np.dtype(STORED[bits])
    if value.dtype.itemsize != stored.itemsize:
        value = value.view(f"u{value.dtype.itemsize}") if value.dtype.kind == "f" else value
        return value.astype(stored)
    return value if value.dtype == stored else value.view(stored)
