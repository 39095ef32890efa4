"""Instructions of a warp, or of four, on matrices: loads and stores of 8 x 8 parts, and products.

With ``group = lane / 4`` and ``quad = lane % 4``, a thread holds of A, in 32-bit register i, row
``group + 8 (i % 2)``, of B column ``group``, of C and D row ``group + 8 (i / 2)`` and column ``2
quad + i % 2``. Products of fp16, bf16 and tf32 values are summed in fp32; of a tf32 operand the
lowest 13 bits count for nothing. Products of int8 values are summed in 32 bits, exactly, and wrap.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from tests.ptx.block import Block, Products
from tests.ptx.compiling import Slots, Step, Unknown, builds
from tests.ptx.movement import Place
from tests.ptx.program import Instruction
from tests.ptx.shared_memory import WARP

LANE = np.arange(WARP)
GROUP, QUAD = LANE // 4, LANE % 4
TF32 = np.uint32(0xFFFFE000)
HALVES = {"f16": 2, "bf16": 2, "tf32": 1, "s8": 4}  # how many numbers a register holds
PART_BYTES = 16  # a row of an 8 x 8 matrix of 16 bits
#: Whether tensor cores cut off each addend behind the last bit of the largest, as V100's do (Fasi
#: et al., below), which loses the most that any do, or the exact sum alone.
CUTS_ADDENDS = False
DESCRIPTOR_START, DESCRIPTOR_LEADING, DESCRIPTOR_STRIDE, DESCRIPTOR_SWIZZLE = 0, 16, 32, 62
SWIZZLES = {1: (128, 7), 2: (64, 3), 3: (32, 1)}  # bytes of a row, and which of its bits are mixed


def _inverse(places: np.ndarray) -> np.ndarray:
    """Of each place of a matrix, which of a warp's values stands there."""
    found = np.empty(places.size, dtype=np.int64)
    found[places.ravel()] = np.arange(places.size)
    return found


def _a_places(halves: int, depth: int) -> np.ndarray:
    """[lane, register, half] in a matrix of 16 rows; a register holds so many values."""
    i, h = np.arange(depth // (2 * halves))[:, None], np.arange(halves)
    rows = GROUP[:, None, None] + 8 * (i % 2)
    columns = halves * QUAD[:, None, None] + 4 * halves * (i // 2) + h
    return rows * depth + columns


def _b_places(halves: int, depth: int) -> np.ndarray:
    """[lane, register, half] in a matrix of 8 columns."""
    i, h = np.arange(depth // (4 * halves))[:, None], np.arange(halves)
    rows = halves * QUAD[:, None, None] + 4 * halves * i + h
    return rows * 8 + GROUP[:, None, None]


def _c_places(columns: int) -> np.ndarray:
    """[lane, register] in a matrix of 16 rows and so many columns."""
    i = np.arange(columns // 2)
    rows = GROUP[:, None] + 8 * (i // 2 % 2)
    return rows * columns + 8 * (i // 4) + 2 * QUAD[:, None] + i % 2


SHAPES = ((1, 8), (2, 16), (4, 16), (4, 32))  # values of a register, and of a row of A
A_OF = {shape: _inverse(_a_places(*shape)) for shape in SHAPES}
B_OF = {shape: _inverse(_b_places(*shape)) for shape in SHAPES}


def _as_fp32(bits: np.ndarray, kind: str) -> np.ndarray:
    """What 32 bits hold: a tf32 number, two of 16 bits, or four whole numbers of 8 bits."""
    if kind == "s8":
        return bits.view(np.int8).astype(np.float32)
    if kind == "tf32":
        return (bits & TF32).view(np.float32)
    if kind == "f16":
        return bits.view(np.float16).astype(np.float32)
    return (bits.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def _values(registers: list[np.ndarray], kind: str) -> np.ndarray:
    """A warp's operands, fp32 [warps, lane x register x half]."""
    found = _as_fp32(np.stack(registers, axis=1), kind)
    return found.reshape(-1, WARP * found.shape[1])


def _slots_of(operand: object, kind: str, slots: Slots) -> list[int]:
    if not isinstance(operand, tuple):
        raise Unknown(f"{operand}")
    return [slots.source(each, kind) for each in operand]


def _targets(operand: object, slots: Slots) -> list[int]:
    if not isinstance(operand, tuple):
        raise Unknown(f"{operand}")
    return [slots.target(each) for each in operand]


@builds("mma")
def product(instruction: Instruction, slots: Slots) -> Step:
    """A warp's D = A B + C, 16 x 8."""
    kinds = {
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32": "f16",
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32": "bf16",
        "mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32": "tf32",
        "mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32": "s8",
        "mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32": "s8",
    }
    if instruction.opcode not in kinds:
        raise Unknown(instruction.opcode)
    kind = kinds[instruction.opcode]
    is_short = ".m16n8k16." in instruction.opcode and kind == "s8"
    depth = 16 if is_short else 8 * HALVES[kind]
    shape = (HALVES[kind], depth)
    d, *rest = instruction.operands
    a, b, c = (_slots_of(each, "b32", slots) for each in rest)
    targets = _targets(d, slots)
    places = _c_places(8)
    c_of = _inverse(places)
    summed = np.int32 if kind == "s8" else np.float32

    def step(block: Block) -> None:
        block.check_whole_warps()

        def given(slot: int) -> np.ndarray:
            return block.chosen(block.get(slot))

        left = _values([given(each) for each in a], kind)[:, A_OF[shape]]
        right = _values([given(each) for each in b], kind)[:, B_OF[shape]]
        added = np.stack([given(each) for each in c], axis=1).view(summed)
        left = left.astype(np.float64).reshape(-1, 16, depth)
        right = right.reshape(-1, depth, 8)
        added = added.reshape(-1, 128)[:, c_of].reshape(-1, 16, 8)
        is_cut = CUTS_ADDENDS and kind != "s8"
        whole = sum_of_cut(left, right, added) if is_cut else left @ right + added
        found = whole.reshape(-1, 128)[:, places]
        _spread(block, targets, _wrapped(found) if kind == "s8" else _cut_off(found))

    return step


def sum_of_cut(left: np.ndarray, right: np.ndarray, added: np.ndarray) -> np.ndarray:
    """Products and what they are added to, as `CUTS_ADDENDS` says."""
    products = left[..., None] * right[:, None]
    addends = np.concatenate([products, added[:, :, None]], axis=2)
    last_bit = np.ldexp(1.0, np.frexp(np.abs(addends).max(axis=2, keepdims=True))[1] - 24)
    return (np.trunc(addends / last_bit) * last_bit).sum(axis=2)


def _cut_off(whole: np.ndarray) -> np.ndarray:
    """fp64 to fp32 towards 0, as tensor cores were found to round (Fasi et al., 2021, "Numerical
    behavior of NVIDIA tensor cores"): what is added to large sums is lost one-sidedly."""
    with np.errstate(over="ignore", invalid="ignore"):
        found = whole.astype(np.float32)
        is_above = np.abs(found) > np.abs(whole)
    found[is_above] = np.nextafter(found[is_above], np.float32(0))
    return found


def _wrapped(whole: np.ndarray) -> np.ndarray:
    """Whole numbers of fp64, which has them all, to 32 bits."""
    return (whole.astype(np.int64) & 0xFFFFFFFF).astype(np.uint32)


def _spread(block: Block, targets: list[int], whole: np.ndarray) -> None:
    """[warps, lane, register] to registers."""
    bits = whole.reshape(-1, len(targets)).view(np.uint32)
    for i, each in enumerate(targets):
        block.put(each, block.spread(np.ascontiguousarray(bits[:, i])))


def _part(instruction: Instruction, word: str) -> tuple[int, bool]:
    """How many 8 x 8 matrices, and whether they are transposed."""
    pattern = word + r"\.sync\.aligned\.m8n8\.x([124])(\.trans)?\.shared\.b16"
    found = re.fullmatch(pattern, instruction.opcode)
    if found is None:
        raise Unknown(instruction.opcode)
    return int(found[1]), bool(found[2])


def _row_threads(block: Block, count: int) -> np.ndarray:
    """Of the threads that execute those whose addresses name the rows, by their place among them:
    of matrix j lanes 8 j to 8 j + 7."""
    block.check_whole_warps()
    return np.flatnonzero(block.executing() % WARP < 8 * count)


@builds("ldmatrix")
def load_matrix(instruction: Instruction, slots: Slots) -> Step:
    """Lane l gets of each matrix row l / 4, columns 2 (l % 4) and the next."""
    count, is_transposed = _part(instruction, "ldmatrix")
    names, operand = instruction.operands
    targets = _targets(names, slots)
    place = Place(operand, slots, "shared")

    def step(block: Block) -> None:
        some = _row_threads(block, count)
        rows = block.shared.read(place.of(block)[some], PART_BYTES, block.executing()[some])
        parts = rows.view(np.uint16).reshape(-1, count, 8, 8)
        if is_transposed:
            parts = parts.transpose(0, 1, 3, 2)
        found = np.ascontiguousarray(parts).view(np.uint32)  # [warps, matrix, row, pair]
        for i, each in enumerate(targets):
            block.put(each, block.spread(found[:, i].reshape(-1)))

    return step


@builds("stmatrix")
def store_matrix(instruction: Instruction, slots: Slots) -> Step:
    count, is_transposed = _part(instruction, "stmatrix")
    operand, names = instruction.operands
    sources = _slots_of(names, "b32", slots)
    place = Place(operand, slots, "shared")

    def step(block: Block) -> None:
        some = _row_threads(block, count)
        pairs = [block.chosen(block.get(each)).reshape(-1, WARP) for each in sources]
        parts = np.stack(pairs, axis=1).view(np.uint16).reshape(-1, count, 8, 8)
        if is_transposed:
            parts = np.ascontiguousarray(parts.transpose(0, 1, 3, 2))
        rows = parts.view(np.uint8).reshape(-1, PART_BYTES)
        block.shared.write(place.of(block)[some], rows, block.executing()[some])

    return step


def _tile(block: Block, descriptor: int, shape: tuple[int, int], group: Products) -> np.ndarray:
    """A matrix in shared memory, uint8 [rows, bytes], where a descriptor says.

    Its rows lie in groups of 8, each a stride from the next; 16 bytes of a row are mixed by the
    row's number. Where a row is longer than one group is wide, its rest lies in further groups.
    """
    kind = descriptor >> DESCRIPTOR_SWIZZLE & 3
    if kind not in SWIZZLES:
        raise Unknown("matrices that are not swizzled")
    width, mask = SWIZZLES[kind]
    start, leading, stride = (
        (descriptor >> place & 0x3FFF) << 4
        for place in (DESCRIPTOR_START, DESCRIPTOR_LEADING, DESCRIPTOR_STRIDE)
    )
    row, column = np.arange(shape[0])[:, None], np.arange(0, shape[1], PART_BYTES)
    plain = start + row // 8 * stride + row % 8 * width
    plain = plain + column // width * leading + column % width
    addresses = plain ^ ((plain >> 7 & mask) << 4)
    data, held = block.shared.product_begins(addresses.ravel(), PART_BYTES)
    group.held.append(held)
    return data.reshape(shape)


def _uniform(values: np.ndarray) -> int:
    if (values != values[0]).any():
        raise Unknown("a descriptor that is not the same in all threads")
    return int(values[0])


@builds("wgmma")
def wide_product(instruction: Instruction, slots: Slots) -> Step:
    """Four warps' D = A B + D, 64 x N, asynchronous: its registers hold D after its group has been
    waited for."""
    simple: dict[str, Step] = {
        "wgmma.fence.sync.aligned": lambda block: block.check_whole("wgmma.fence"),
        "wgmma.commit_group.sync.aligned": _commit_products,
    }
    if instruction.opcode in simple:
        return simple[instruction.opcode]
    if instruction.opcode == "wgmma.wait_group.sync.aligned":
        n_left = int(str(instruction.operands[0]))
        return lambda block: block.end_products(n_left)
    pattern = (
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)"
        r"k(16\.f32\.f16\.f16|16\.f32\.bf16\.bf16|8\.f32\.tf32\.tf32)"
    )
    found = re.fullmatch(pattern, instruction.opcode)
    if found is None:
        raise Unknown(instruction.opcode)
    n, kind = int(found[1]), found[2].rpartition(".")[2]
    d, a, b, scale, *signs = instruction.operands
    is_transposed = signs == ["1", "1", "1"] and kind != "tf32"
    if not is_transposed and signs not in (["1", "1", "0"], ["1", "1", "0", "0"], ["1", "1"]):
        raise Unknown(instruction.text)
    shape = (16, 2 * n) if is_transposed else (n, 32)
    targets = _targets(d, slots)
    left = _left(a, kind, slots)
    right, scale_slot = slots.source(b, "b64"), slots.source(scale, "pred")
    places = _c_places(n)
    d_of = _inverse(places)

    def step(block: Block) -> None:
        block.check_whole("wgmma")
        group = block.open_products
        values = _numbers(_tile(block, _uniform(block.get(right)), shape, group), kind)
        whole = left(block, group) @ (values if is_transposed else values.T)
        if block.get(scale_slot).any():
            bits = np.stack([_awaited(block, each, group) for each in targets], axis=1)
            whole += bits.view(np.float32).reshape(4, -1)[:, d_of].reshape(64, n)
        result = whole.reshape(4, -1)[:, places].reshape(block.n_threads, -1).view(np.uint32)
        for i, each in enumerate(targets):
            block.registers[each] = np.ascontiguousarray(result[:, i])
            block.missing.pop(each, None)
            block.late[each] = group
            group.slots.add(each)

    return step


def _left(operand: object, kind: str, slots: Slots) -> Callable[[Block, Products], np.ndarray]:
    """A, fp32 [64, depth], from registers or from shared memory."""
    if isinstance(operand, tuple):
        sources = _slots_of(operand, "b32", slots)

        def from_registers(block: Block, group: Products) -> np.ndarray:
            values = _values([block.get(each) for each in sources], kind)
            depth = 8 * HALVES[kind]
            return values[:, A_OF[HALVES[kind], depth]].reshape(64, depth)

        return from_registers
    slot = slots.source(str(operand), "b64")

    def from_shared(block: Block, group: Products) -> np.ndarray:
        return _numbers(_tile(block, _uniform(block.get(slot)), (64, 32), group), kind)

    return from_shared


def _numbers(rows: np.ndarray, kind: str) -> np.ndarray:
    return _as_fp32(np.ascontiguousarray(rows).view(np.uint32), kind)


def _awaited(block: Block, slot: int, group: Products) -> np.ndarray:
    """A sum that products of the same shape continue needs no wait between them."""
    value = block.registers[slot]
    return block.get(slot) if value is None or slot not in block.late else value


def _commit_products(block: Block) -> None:
    block.check_whole("a group of products")
    block.products.append(block.open_products)
    block.open_products = Products()
