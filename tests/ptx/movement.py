"""Instructions that move values: between registers, to and from memory, between threads, and those
that wait."""

from __future__ import annotations

import numpy as np

from tests.ptx.block import Block
from tests.ptx.compiling import Slots, Step, Unknown, as_bits, as_type, bits_of, builds, dtype_of
from tests.ptx.program import Address, Fault, Instruction, Operand
from tests.ptx.shared_memory import WARP


@builds("cvta")
def to_address_space(instruction: Instruction, slots: Slots) -> Step:
    """Global memory has the same addresses as memory of any kind."""
    if instruction.opcode != "cvta.to.global.u64":
        raise Unknown(instruction.opcode)
    to, of = slots.target(instruction.operands[0]), slots.source(instruction.operands[1], "u64")
    return lambda block: block.put(to, block.look(of), block.unknown((of,)))


@builds("mov")
def move(instruction: Instruction, slots: Slots) -> Step:
    """A register's value, or that of several as the parts of one."""
    kind = instruction.parts[-1]
    target, source = instruction.operands
    if len(instruction.parts) != 2:
        raise Unknown(instruction.opcode)
    if isinstance(source, tuple):
        return _pack(slots.target(target), source, kind, slots)
    if isinstance(target, tuple):
        return _unpack([slots.target(each) for each in target], source, kind, slots)
    to, of = slots.target(target), slots.source(source, kind)
    return lambda block: block.put(to, block.look(of), block.unknown((of,)))


def _pack(target: int, parts: tuple[str, ...], kind: str, slots: Slots) -> Step:
    bits = bits_of(kind) // len(parts)
    sources = [slots.source(each, f"b{bits}") for each in parts]
    whole = dtype_of(kind)

    def step(block: Block) -> None:
        values = np.stack([block.look(each) for each in sources], axis=1)
        block.put(target, values.view(whole)[:, 0], block.unknown(sources))

    return step


def _unpack(targets: list[int], source: Operand, kind: str, slots: Slots) -> Step:
    slot, part = slots.source(source, kind), np.dtype(f"u{bits_of(kind) // len(targets) // 8}")

    def step(block: Block) -> None:
        parts = np.ascontiguousarray(block.look(slot)).view(part).reshape(block.n_threads, -1)
        for i, each in enumerate(targets):
            if each >= 0:
                block.put(each, np.ascontiguousarray(parts[:, i]), block.unknown((slot,)))

    return step


class Place:
    """An address operand: a register's value and a distance."""

    def __init__(self, operand: Operand, slots: Slots, space: str):
        if not isinstance(operand, Address):
            raise Unknown(f"{operand}")
        self.slot = slots.source(operand.base, "b64" if space == "global" else "b32")
        self.is_global = space == "global"
        offset = np.array(operand.offset, dtype=np.int64)
        self.offset = offset.view(np.uint64) if self.is_global else offset

    def of(self, block: Block) -> np.ndarray:
        """Of the threads that execute: uint64 in global memory, int64 in shared memory."""
        addresses = block.chosen(block.get(self.slot))
        if self.is_global:
            return addresses + self.offset
        return addresses.astype(np.int64) + self.offset


def _layout(instruction: Instruction) -> tuple[str, int, np.dtype]:
    """Space, count and type of a load or a store: ld.global.v4.b32."""
    words, kind = instruction.parts[1:-1], instruction.parts[-1]
    if words[:2] == ["global", "nc"] and instruction.parts[0] == "ld":
        words = ["global", *words[2:]]  # of memory that no thread writes, which is any input here
    count = next((int(each[1:]) for each in words if each in ("v2", "v4", "v8")), 1)
    spaces = [each for each in words if each in ("global", "shared", "param")]
    if len(spaces) != 1 or len(words) != 1 + (count > 1):
        raise Unknown(instruction.opcode)
    return spaces[0], count, dtype_of(kind)


@builds("ld")
def load(instruction: Instruction, slots: Slots) -> Step:
    space, count, dtype = _layout(instruction)
    target, operand = instruction.operands
    names = target if isinstance(target, tuple) else (target,)
    if len(names) != count or not isinstance(operand, Address):
        raise Unknown(instruction.text)
    targets = [(slots.target(each), slots.program.register_bits(str(each))) for each in names]
    if space == "param":
        (to, bits), of = targets[0], slots.special(operand.base)
        return lambda block: block.put(to, as_bits(as_type(block.get(of), dtype), bits))
    place, n_bytes = Place(operand, slots, space), dtype.itemsize * count

    def step(block: Block) -> None:
        addresses = place.of(block)
        if place.is_global:
            found = block.memory.read(addresses, n_bytes)
        else:
            found = block.shared.read(addresses, n_bytes, block.executing())
        values = block.spread(found).view(dtype)
        for i, (slot, bits) in enumerate(targets):
            block.put(slot, as_bits(np.ascontiguousarray(values[:, i]), bits))

    return step


@builds("st")
def store(instruction: Instruction, slots: Slots) -> Step:
    space, count, dtype = _layout(instruction)
    operand, source = instruction.operands
    names = source if isinstance(source, tuple) else (source,)
    if len(names) != count or space == "param":
        raise Unknown(instruction.text)
    kind = f"b{8 * dtype.itemsize}"
    sources = [slots.source(each, kind) for each in names]
    place = Place(operand, slots, space)

    def step(block: Block) -> None:
        parts = [block.chosen(block.get(slot)).astype(f"u{dtype.itemsize}") for slot in sources]
        values = np.stack(parts, axis=1).view(np.uint8)
        if place.is_global:
            block.memory.write(place.of(block), values, block.number)
        else:
            block.shared.write(place.of(block), values, block.executing())

    return step


@builds("atom")
def atomic(instruction: Instruction, slots: Slots) -> Step:
    """A word that blocks share is counted up, one thread after another; what was there before."""
    if instruction.opcode != "atom.global.inc.u32":
        raise Unknown(instruction.opcode)
    target, operand, most = instruction.operands
    to, place, of = (
        slots.target(str(target)),
        Place(operand, slots, "global"),
        slots.source(most, "u32"),
    )

    def step(block: Block) -> None:
        limits = block.chosen(block.get(of)).astype(np.uint32)
        block.put(to, block.spread(block.memory.count(place.of(block), limits)))

    return step


@builds("cp")
def copy(instruction: Instruction, slots: Slots) -> Step:
    """Asynchronous copies to shared memory: they arrive when their group is waited for, no
    sooner."""
    if instruction.opcode == "cp.async.commit_group":
        return lambda block: block.close_copies()
    if instruction.opcode == "cp.async.wait_group":
        n_left = int(str(instruction.operands[0]))
        return lambda block: block.end_copies(n_left)
    if instruction.opcode not in ("cp.async.ca.shared.global", "cp.async.cg.shared.global"):
        raise Unknown(instruction.opcode)
    to, of, size, *rest = instruction.operands
    target, source, n_bytes = (
        Place(to, slots, "shared"),
        Place(of, slots, "global"),
        int(str(size), 0),
    )
    size_slot = slots.source(rest[0], "u32") if rest else None

    def step(block: Block) -> None:
        addresses, threads = target.of(block), block.executing()
        sizes = np.full(threads.size, n_bytes)
        if size_slot is not None:
            sizes = block.chosen(block.get(size_slot)).astype(np.int64)
        values, sources = np.zeros((threads.size, n_bytes), dtype=np.uint8), source.of(block)
        if (sources & np.uint64(n_bytes - 1)).any():
            raise Fault("misaligned", f"{n_bytes} bytes from an address that is no multiple")
        whole = sizes == n_bytes
        values[whole] = block.memory.read(sources[whole], n_bytes)
        for i in np.flatnonzero((sizes > 0) & ~whole):  # the rest is zeros, and is not read
            place = sources[i] + np.arange(sizes[i], dtype=np.uint64)
            values[i, : sizes[i]] = block.memory.read(place, 1)[:, 0]
        block.begin_copies(addresses, values, threads)

    return step


@builds("shfl")
def shuffle(instruction: Instruction, slots: Slots) -> Step:
    """Another lane's value, of the whole warp; and perhaps whether there is such a lane."""
    target, value, lane, clamp, members = instruction.operands
    mode = instruction.parts[2]
    if instruction.opcode not in ("shfl.sync.bfly.b32", "shfl.sync.idx.b32"):
        raise Unknown(instruction.opcode)
    names = str(target).split("|")
    to, of, by = slots.target(names[0]), slots.source(value, "b32"), slots.source(lane, "b32")
    is_there = slots.target(names[1]) if len(names) == 2 else -1
    limits = [(slots.source(each, "b32"), n) for each, n in ((clamp, 31), (members, 0xFFFFFFFF))]

    def step(block: Block) -> None:
        block.check_whole_warps()
        if any((block.chosen(block.get(slot)) != n).any() for slot, n in limits):
            raise Fault("unknown", "a shuffle within a part of a warp")
        if is_there >= 0:
            block.put(is_there, np.ones(block.n_threads, dtype=bool))
        asked = block.get(by).astype(np.int64)
        own = block.threads % WARP
        there = asked % WARP if mode == "idx" else own ^ asked
        sources, missing = block.threads - own + there % WARP, block.unknown((of,))
        value = block.look(of)[sources]
        block.put(to, value, None if missing is None else missing[sources])

    return step


@builds("vote")
def ballot(instruction: Instruction, slots: Slots) -> Step:
    """A bit for each lane of the whole warp."""
    if instruction.opcode != "vote.sync.ballot.b32":
        raise Unknown(instruction.opcode)
    to, of = slots.target(instruction.operands[0]), slots.source(instruction.operands[1], "pred")
    members = slots.source(instruction.operands[2], "b32")

    def step(block: Block) -> None:
        block.check_whole_warps()
        if (block.chosen(block.get(members)) != 0xFFFFFFFF).any():
            raise Fault("unknown", "a vote of a part of a warp")
        bits = block.get(of).reshape(-1, WARP).astype(np.uint32) << np.arange(WARP, dtype=np.uint32)
        block.put(to, np.repeat(np.bitwise_or.reduce(bits, axis=1), WARP))

    return step


@builds("redux")
def reduce(instruction: Instruction, slots: Slots) -> Step:
    """One value of a warp's."""
    functions = {"xor.b32": np.bitwise_xor, "min.s32": np.minimum, "max.s32": np.maximum}
    function = functions.get(instruction.opcode.removeprefix("redux.sync."))
    if function is None:
        raise Unknown(instruction.opcode)
    to, of = slots.target(instruction.operands[0]), slots.source(instruction.operands[1], "b32")
    members, dtype = slots.source(instruction.operands[2], "b32"), dtype_of(instruction.parts[-1])

    def step(block: Block) -> None:
        block.check_whole_warps()
        if (block.get(members) != 0xFFFFFFFF).any():
            raise Unknown("a reduction over a part of a warp")
        joined = function.reduce(block.get(of).view(dtype).reshape(-1, WARP), axis=1)
        block.put(to, np.repeat(joined, WARP).view(np.uint32))

    return step


@builds("bar")
def barrier(instruction: Instruction, slots: Slots) -> Step:
    """Of the block, or of each warp: here they meet."""
    if (instruction.opcode, instruction.operands) == ("bar.sync", ("0",)):

        def block_step(block: Block) -> None:
            block.check_whole("a barrier of the block is reached")
            block.shared.block_barrier()

        return block_step
    if (instruction.opcode, instruction.operands) == ("bar.warp.sync", ("-1",)):

        def warp_step(block: Block) -> None:
            block.check_whole_warps()
            block.shared.warp_barrier(block.executing())

        return warp_step
    raise Unknown(instruction.text)


@builds("fence")
def fence(instruction: Instruction, slots: Slots) -> Step:
    if instruction.opcode != "fence.proxy.async.shared::cta":
        raise Unknown(instruction.opcode)
    return lambda block: block.shared.fence()


@builds("bra")
def branch(instruction: Instruction, slots: Slots) -> Step:
    """Taken by the threads that execute; a guard's others are `running`'s matter."""
    target = slots.program.labels[str(instruction.operands[0])]
    return lambda block: target


@builds("ret", "exit")
def end(instruction: Instruction, slots: Slots) -> Step:
    target = len(slots.program.instructions)
    return lambda block: target
