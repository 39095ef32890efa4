"""Instructions that compute with a thread's own registers.

Approximate ones (``ex2.approx``, ``div.full``) are exact here but for one rounding; a fused
multiply-add rounds a sum in fp64 once more to fp32.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from tests.ptx.block import Block
from tests.ptx.compiling import Slots, Step, Unknown, as_bits, as_type, bits_of, builds, dtype_of
from tests.ptx.program import Fault, Instruction

Function = Callable[..., np.ndarray]


def _shift(left: bool) -> Function:
    def shift(value: np.ndarray, by: np.ndarray) -> np.ndarray:
        bits = 8 * value.dtype.itemsize
        near = np.minimum(by, bits - 1).astype(value.dtype)
        if left:
            return np.where(by < bits, value << near, 0).astype(value.dtype)
        moved = value >> near
        return (
            moved if value.dtype.kind == "i" else np.where(by < bits, moved, 0).astype(moved.dtype)
        )

    return shift


def _divide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Towards zero."""
    if a.dtype.kind == "f":
        return a / b
    if (b == 0).any():
        raise Fault("division", "by zero")
    if a.dtype.kind == "u":
        return a // b
    whole = a // b
    return whole + ((whole < 0) & (whole * b != a)).astype(a.dtype)


def _remainder(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    return a - _divide(a, b) * b


TWO: dict[str, Function] = {
    "add": np.add,
    "sub": np.subtract,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "xor": np.bitwise_xor,
    "div": _divide,
    "rem": _remainder,
    "shl": _shift(True),
    "shr": _shift(False),
}
ONE: dict[str, Function] = {
    "neg": np.negative,
    "abs": np.abs,
    "not": np.invert,
    "ex2": np.exp2,
    "sqrt": np.sqrt,
    "lg2": np.log2,
    "rcp": np.reciprocal,
    "rsqrt": lambda value: np.float32(1) / np.sqrt(value),
}
COMPARE: dict[str, Function] = {
    "eq": np.equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "ne": lambda a, b: (a != b) & (a == a) & (b == b),
    "num": lambda a, b: (a == a) & (b == b),
    "nan": lambda a, b: (a != a) | (b != b),
    "equ": lambda a, b: ~((a != b) & (a == a) & (b == b)),
    "neu": np.not_equal,
    "ltu": lambda a, b: ~(a >= b),
    "leu": lambda a, b: ~(a > b),
    "gtu": lambda a, b: ~(a <= b),
    "geu": lambda a, b: ~(a < b),
}
UNSIGNED_COMPARE = {"lo": "lt", "ls": "le", "hi": "gt", "hs": "ge"}


def _known(parts: list[str], *allowed: str) -> str:
    """The type at the end of an opcode whose other words are allowed."""
    if not set(parts[1:-1]) <= set(allowed):
        raise Unknown(".".join(parts))
    return parts[-1]


def _flushed(value: np.ndarray) -> np.ndarray:
    """Numbers below fp32's normal range as zeros."""
    tiny = np.abs(value) < np.finfo(np.float32).tiny
    return np.where(tiny, np.copysign(np.float32(0), value), value)


def _apply(instruction: Instruction, slots: Slots, kinds: list[str], function: Function) -> Step:
    """A function of registers of these types, the result in a register of the target's width."""
    operands = instruction.operands
    if len(operands) != len(kinds) + 1 or not isinstance(operands[0], str):
        raise Unknown(instruction.opcode)
    target = slots.target(operands[0])
    bits = slots.program.register_bits(operands[0])
    sources = [
        (slots.source(each, kind), dtype_of(kind))
        for each, kind in zip(operands[1:], kinds, strict=True)
    ]
    flushes = "ftz" in instruction.parts and kinds[0] == "f32"
    if flushes:
        plain = function

        def function(*values: np.ndarray) -> np.ndarray:
            return _flushed(plain(*(_flushed(each) for each in values)))

    if len(sources) == 2:
        (first, first_type), (second, second_type) = sources

        def step_of_two(block: Block) -> None:
            a = as_type(block.look(first), first_type)
            b = as_type(block.look(second), second_type)
            missing = block.unknown((first, second)) if block.missing else None
            block.put(target, as_bits(function(a, b), bits), missing)

        return step_of_two

    def step(block: Block) -> None:
        values = (as_type(block.look(slot), dtype) for slot, dtype in sources)
        missing = block.unknown(slot for slot, _ in sources)
        block.put(target, as_bits(function(*values), bits), missing)

    return step


@builds(*TWO)
def two(instruction: Instruction, slots: Slots) -> Step:
    word = instruction.parts[0]
    if instruction.parts[1:] == ["f16x2"]:
        return _apply(instruction, slots, ["b32", "b32"], _pairwise(TWO[word], np.float16))
    if instruction.opcode in ("add.s16x2", "add.u16x2"):
        return _apply(instruction, slots, ["b32", "b32"], _pairwise(TWO[word], np.uint16))
    kind = _known(instruction.parts, "rn", "full", "approx", "ftz")
    second = "u32" if word in ("shl", "shr") else kind
    return _apply(instruction, slots, [kind, second], TWO[word])


@builds(*ONE)
def one(instruction: Instruction, slots: Slots) -> Step:
    word, kind = instruction.parts[0], instruction.parts[-1]
    if kind == "f16x2" and word == "abs":
        return _apply(instruction, slots, ["b32"], lambda value: value & np.uint32(0x7FFF7FFF))
    _known(instruction.parts, "rn", "approx", "ftz")
    return _apply(instruction, slots, [kind], ONE[word])


@builds("popc")
def count(instruction: Instruction, slots: Slots) -> Step:
    """Bits that are set."""
    if instruction.opcode != "popc.b32":
        raise Unknown(instruction.opcode)
    return _apply(
        instruction,
        slots,
        ["b32"],
        lambda value: np.unpackbits(value.view(np.uint8).reshape(-1, 4), axis=1).sum(
            axis=1, dtype=np.uint32
        ),
    )


@builds("lop3")
def of_three_bits(instruction: Instruction, slots: Slots) -> Step:
    """Looks places up: their bits a, b and c choose bit 4 a + 2 b + c of the last operand."""
    if instruction.opcode != "lop3.b32":
        raise Unknown(instruction.opcode)

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray, table: np.ndarray) -> np.ndarray:
        found = np.zeros_like(a)
        for i in range(8):
            chosen = [each if i & bit else ~each for each, bit in ((a, 4), (b, 2), (c, 1))]
            is_set = (table >> np.uint32(i)) & np.uint32(1)
            found |= np.bitwise_and.reduce(chosen) * is_set
        return found

    return _apply(instruction, slots, ["b32"] * 4, function)


@builds("shf")
def funnel(instruction: Instruction, slots: Slots) -> Step:
    """32 of the 64 bits of two registers, the lower one first, from a place below 32 on."""
    if instruction.opcode != "shf.r.wrap.b32":
        raise Unknown(instruction.opcode)

    def function(low: np.ndarray, high: np.ndarray, by: np.ndarray) -> np.ndarray:
        both = low.astype(np.uint64) | (high.astype(np.uint64) << np.uint64(32))
        return (both >> (by & np.uint32(31)).astype(np.uint64)).astype(np.uint32)

    return _apply(instruction, slots, ["b32"] * 3, function)


@builds("min", "max")
def extremes(instruction: Instruction, slots: Slots) -> Step:
    """A number beside a NaN is the result, unless the instruction says NaN."""
    is_min, keeps_nan = instruction.parts[0] == "min", "NaN" in instruction.parts
    kind = _known(instruction.parts, "NaN", "ftz", "relu")
    plain = np.minimum if is_min else np.maximum
    function = plain if kind[0] != "f" or keeps_nan else np.fmin if is_min else np.fmax
    if "relu" in instruction.parts:  # then nothing below 0
        if kind != "s32":
            raise Unknown(instruction.opcode)
        return _apply(instruction, slots, [kind, kind], lambda a, b: np.maximum(function(a, b), 0))
    return _apply(instruction, slots, [kind, kind], function)


@builds("mul")
def multiply(instruction: Instruction, slots: Slots) -> Step:
    kind = _known(instruction.parts, "rn", "ftz", "lo", "wide", "hi")
    if "wide" in instruction.parts:
        return _apply(instruction, slots, [kind, kind], _wide)
    if "hi" in instruction.parts:
        if kind not in ("u32", "s32"):
            raise Unknown(instruction.opcode)
        return _apply(
            instruction, slots, [kind, kind], lambda a, b: (_wide(a, b) >> 32).astype(a.dtype)
        )
    return _apply(instruction, slots, [kind, kind], np.multiply)


def _wide(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    double = f"{a.dtype.kind}{2 * a.dtype.itemsize}"
    return a.astype(double) * b.astype(double)


@builds("mad")
def multiply_add(instruction: Instruction, slots: Slots) -> Step:
    kind = _known(instruction.parts, "lo", "wide")
    if "wide" in instruction.parts:
        wide = f"{kind[0]}{2 * int(kind[1:])}"
        return _apply(instruction, slots, [kind, kind, wide], lambda a, b, c: _wide(a, b) + c)
    return _apply(instruction, slots, [kind, kind, kind], lambda a, b, c: a * b + c)


@builds("fma")
def fused(instruction: Instruction, slots: Slots) -> Step:
    if _known(instruction.parts, "rn", "ftz") != "f32":
        raise Unknown(instruction.opcode)

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
        return (a.astype(np.float64) * b + c).astype(np.float32)

    return _apply(instruction, slots, ["f32"] * 3, function)


@builds("setp")
def compare(instruction: Instruction, slots: Slots) -> Step:
    if len(instruction.parts) != 3:
        raise Unknown(instruction.opcode)
    _, relation, kind = instruction.parts
    relation = UNSIGNED_COMPARE.get(relation, relation)
    if relation not in COMPARE:
        raise Unknown(instruction.opcode)
    if kind == "f16x2":
        return _compare_halves(instruction, slots, COMPARE[relation])
    return _apply(instruction, slots, [kind, kind], COMPARE[relation])


def _compare_halves(instruction: Instruction, slots: Slots, function: Function) -> Step:
    """The lower halves into the first of two predicates, ``%p1|%p2``, the upper into the second."""
    targets, *operands = instruction.operands
    if not isinstance(targets, str) or targets.count("|") != 1:
        raise Unknown(instruction.opcode)

    def of_half(half: int) -> Function:
        def compared(*values: np.ndarray) -> np.ndarray:
            return function(
                *(np.ascontiguousarray(each).view(np.float16)[half::2] for each in values)
            )

        return compared

    parts = [replace(instruction, operands=(each, *operands)) for each in targets.split("|")]
    first, second = (
        _apply(part, slots, ["b32", "b32"], of_half(half)) for half, part in enumerate(parts)
    )

    def step(block: Block) -> None:
        first(block)
        second(block)

    return step


@builds("selp")
def select(instruction: Instruction, slots: Slots) -> Step:
    kind = _known(instruction.parts)
    target = slots.target(instruction.operands[0])
    first, second = (slots.source(each, kind) for each in instruction.operands[1:3])
    choice, dtype = slots.source(instruction.operands[3], "pred"), dtype_of(kind)

    def step(block: Block) -> None:
        takes_first = block.get(choice)
        value = np.where(takes_first, block.look(first), block.look(second))
        missing = None
        if block.missing:
            none = np.zeros(block.n_threads, dtype=bool)
            one, other = (block.missing.get(each, none) for each in (first, second))
            missing = np.where(takes_first, one, other)
        block.put(target, value.astype(f"u{dtype.itemsize}", copy=False), missing)

    return step


@builds("bfe")
def extract(instruction: Instruction, slots: Slots) -> Step:
    """So many bits from a place on; of a signed type the highest of them is the sign."""
    kind = _known(instruction.parts)
    if kind not in ("u32", "s32"):
        raise Unknown(instruction.opcode)
    is_signed = kind == "s32"

    def function(value: np.ndarray, place: np.ndarray, count: np.ndarray) -> np.ndarray:
        at, n = (each.astype(np.int64) & 0xFF for each in (place, count))
        wide = value.astype(np.int64) & 0xFFFFFFFF
        bits = (wide >> np.minimum(at, 32)) & ((1 << np.minimum(n, 32)) - 1)
        sign = (bits >> np.maximum(n - 1, 0)) & 1 if is_signed else np.int64(0)
        return (bits - (sign << n)).astype(np.int64).astype(np.uint32)

    return _apply(instruction, slots, [kind, "u32", "u32"], function)


@builds("bfi")
def insert(instruction: Instruction, slots: Slots) -> Step:
    """The second operand with so many bits of the first from a place on."""
    if instruction.opcode != "bfi.b32":
        raise Unknown(instruction.opcode)

    def function(
        value: np.ndarray, into: np.ndarray, place: np.ndarray, count: np.ndarray
    ) -> np.ndarray:
        at, n = (each.astype(np.int64) & 0xFF for each in (place, count))
        mask = ((np.int64(1) << np.minimum(n, 32)) - 1) << np.minimum(at, 32)
        moved = (value.astype(np.int64) << np.minimum(at, 32)) & mask
        return (moved | (into.astype(np.int64) & ~mask)).astype(np.uint32)

    return _apply(instruction, slots, ["b32", "b32", "u32", "u32"], function)


@builds("prmt")
def permute(instruction: Instruction, slots: Slots) -> Step:
    """Four bytes of eight, chosen by a hexadecimal digit each."""
    if instruction.opcode != "prmt.b32":
        raise Unknown(instruction.opcode)

    def function(a: np.ndarray, b: np.ndarray, choice: np.ndarray) -> np.ndarray:
        both = a.astype(np.uint64) | (b.astype(np.uint64) << np.uint64(32))
        found = np.zeros_like(both)
        for i in range(4):
            digit = (choice.astype(np.uint64) >> np.uint64(4 * i)) & np.uint64(15)
            byte = (both >> (np.uint64(8) * (digit & np.uint64(7)))) & np.uint64(255)
            sign = np.where(byte >> np.uint64(7), np.uint64(255), np.uint64(0))
            found |= np.where(digit & np.uint64(8), sign, byte) << np.uint64(8 * i)
        return found.astype(np.uint32)

    return _apply(instruction, slots, ["b32"] * 3, function)


def rounded_to_tf32(value: np.ndarray) -> np.ndarray:
    """To 10 bits of mantissa, ties away from zero; NaN stays NaN."""
    bits = value.view(np.uint32)
    rounded = (bits + np.uint32(0x1000)) & np.uint32(0xFFFFE000)
    return np.where(np.isnan(value), np.uint32(0x7FFFE000), rounded)


@builds("cvt")
def convert(instruction: Instruction, slots: Slots) -> Step:
    *rounding, to, of = instruction.parts[1:]
    if rounding == ["rna"] and (to, of) == ("tf32", "f32"):
        return _apply(instruction, slots, ["f32"], rounded_to_tf32)
    if rounding == ["rn"] and (to, of) == ("f16x2", "f32"):
        return _apply(instruction, slots, ["f32", "f32"], _halves)
    if rounding == ["rn"] and (to, of) == ("bf16x2", "f32"):
        return _apply(instruction, slots, ["f32", "f32"], _bf16_halves)
    if rounding == ["rn"] and (to, of) == ("bf16", "f32"):
        return _apply(instruction, slots, ["f32"], lambda value: _bf16(value).astype(np.uint16))
    if rounding in (["rzi"], ["rni"]) and (to, of) == ("s32", "f32"):
        return _apply(instruction, slots, ["f32"], partial(_whole, rounding[0]))
    rounds = to[0] == "f" and (of[0] != "f" or bits_of(to) < bits_of(of))
    if rounding != (["rn"] if rounds else []) or (to[0] != "f" and of[0] == "f"):
        raise Unknown(instruction.opcode)
    dtype: Any = dtype_of(to)
    return _apply(instruction, slots, [of], lambda value: value.astype(dtype))


def _whole(rounding: str, value: np.ndarray) -> np.ndarray:
    """Towards zero, or to the nearest with ties to even, and to the nearest that there is; of a NaN
    0."""
    towards = np.trunc if rounding == "rzi" else np.rint
    whole = np.nan_to_num(towards(value.astype(np.float64)), nan=0.0)
    return np.clip(whole, -(2.0**31), 2.0**31 - 1).astype(np.int32)


def _bf16(value: np.ndarray) -> np.ndarray:
    """To the nearest, ties to even; NaN as the instruction makes it: uint32."""
    bits = value.view(np.uint32).astype(np.uint64)
    found = (bits + 0x7FFF + ((bits >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(value), np.uint64(0x7FFF), found).astype(np.uint32)


def _bf16_halves(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    return (_bf16(high) << np.uint32(16)) | _bf16(low)


def _pairwise(function: Function, dtype: type[np.generic]) -> Function:
    """Of both halves of registers that hold two numbers of 16 bits."""

    def both(*values: np.ndarray) -> np.ndarray:
        pairs = [np.ascontiguousarray(each).view(dtype) for each in values]
        return function(*pairs).astype(dtype).view(np.uint32)

    return both


def _halves(high: np.ndarray, low: np.ndarray) -> np.ndarray:
    bits = [each.astype(np.float16).view(np.uint16).astype(np.uint32) for each in (high, low)]
    return (bits[0] << np.uint32(16)) | bits[1]
