"""A kernel executed block after block, all threads of a block in lock step.

Where threads part, those at the lowest instruction go on until they meet others, and before what
they are to do together (`TOGETHER`) they wait for those that can still come; at a barrier of the
block also for warps that do something together before it. If one does not come, it is a fault.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Mapping

import numpy as np

# the builders of all instructions register themselves
from tests.ptx import arithmetic, matrix, movement  # noqa: F401
from tests.ptx.block import Block
from tests.ptx.compiling import BUILDERS, Slots, Step, Unknown
from tests.ptx.global_memory import GlobalMemory
from tests.ptx.program import Fault, Instruction, Program, parse, parse_instruction
from tests.ptx.shared_memory import WARP, SharedMemory

#: Instructions of whole warps or blocks, by their first word.
TOGETHER = {"bar", "cp", "ldmatrix", "mma", "redux", "shfl", "stmatrix", "vote", "wgmma"}
STEPS_MAX = 2_000_000  # of a block: one that takes more will not end


class Executable:
    """A kernel's PTX, ready to run.

    Args:
        ptx: a module.
        shared_bytes: of a block.
        entry: the kernel's name; empty: the module's only one.
        n_threads: of a block; 0: as the module says.
    """

    def __init__(self, ptx: str, shared_bytes: int, entry: str = "", n_threads: int = 0):
        self.program: Program = parse(ptx, entry)
        self.program.n_threads = n_threads or self.program.n_threads
        self.shared_bytes = shared_bytes + max(self.program.addresses.values(), default=0)
        self.granule_bytes = self.program.shared_granule_bytes
        self.slots = Slots(self.program)
        self.steps = [_step(each, self.slots) for each in self.program.instructions]
        #: What threads wait for each other at: instructions of warps, of the block, and the end.
        self.together = {
            number: 2 if each.opcode == "bar.sync" else 1
            for number, each in enumerate(self.program.instructions)
            if each.parts[0] in TOGETHER
        } | {len(self.steps): 3}

    def changed(self, line: int, text: str) -> Executable:
        """This program with another text in one of its lines, which holds an instruction; an empty
        text: without it."""
        (at,) = (
            number for number, each in enumerate(self.program.instructions) if each.line == line
        )
        other = copy.copy(self)
        other.program, other.steps = copy.copy(self.program), list(self.steps)
        other.program.instructions = list(self.program.instructions)
        if statement := text.partition("//")[0].strip().removesuffix(";"):
            instruction = parse_instruction(line, statement)
            other.program.instructions[at] = instruction
            other.steps[at] = _step(instruction, self.slots)
        else:
            other.steps[at] = lambda block: None
        return other

    def like(self, before: str, after: str) -> Executable:
        """This program, of PTX of which one line has become another, in this kernel or in one
        beside it."""
        lines = zip(before.splitlines(), after.splitlines(), strict=True)
        changed = [(number, new) for number, (old, new) in enumerate(lines, 1) if new != old]
        own = {each.line for each in self.program.instructions}
        if not changed or changed[0][0] not in own:
            return self
        [(line, text)] = changed
        return self.changed(line, text)

    def run(
        self, grid: tuple[int, int, int], parameters: Mapping[str, np.ndarray], memory: GlobalMemory
    ) -> int:
        """Runs every block; the number of instructions, each counted once for all threads of a
        block.

        Raises:
            Fault: what a GPU need not forgive.
        """
        n_threads, n_steps = self.program.n_threads, 0
        specials: dict[str, np.ndarray] = {
            "%tid.x": np.arange(n_threads, dtype=np.uint32),
            "%laneid": np.arange(n_threads, dtype=np.uint32) % WARP,
            "%ntid.x": np.array(n_threads, dtype=np.uint32),
            **parameters,
        }
        for axis, n in zip("xyz", grid, strict=True):
            specials[f"%nctaid.{axis}"] = np.array(n, dtype=np.uint32)
            specials[f"%ctaid.{axis}"] = np.array(0, dtype=np.uint32)
        values = self.slots.constants(n_threads, specials)
        with np.errstate(all="ignore"):
            for number, at in enumerate(itertools.product(*(range(n) for n in grid[::-1]))):
                for axis, place in zip("zyx", at, strict=True):
                    if (slot := self.slots.numbers.get(f"%ctaid.{axis}")) is not None:
                        values[slot] = np.full(n_threads, place, dtype=np.uint32)
                shared = SharedMemory(self.shared_bytes, self.granule_bytes, n_threads)
                block = Block(values, len(self.slots), n_threads, shared, memory, number)
                n_steps += self._run(block)
        memory.check_whole()
        return n_steps

    def _run(self, block: Block) -> int:
        steps, end, count, at = self.steps, len(self.steps), 0, 0
        while True:
            if at == end:
                return count
            try:
                following = steps[at](block)
            except Fault as fault:
                instruction = self.program.instructions[at]
                raise Fault(
                    fault.kind,
                    f"{str(fault).partition(': ')[2]}; line {instruction.line}, "
                    f"block {block.number}: {instruction.text[:120]}",
                ) from None
            at = at + 1 if following is None else following
            if block.fragments:
                at = _next_fragment(block, at, self.together)
            count += 1
            if count > STEPS_MAX:
                raise Fault("endless", f"block {block.number} takes more than {STEPS_MAX} steps")


def _next_fragment(block: Block, at: int, together: dict[int, int]) -> int:
    """Of the threads that have parted, those at the lowest instruction go on that is not done
    together, if there are any, else one of a warp; those at the same one go on together."""
    assert block.active is not None
    before = block.fragments.get(at)
    block.fragments[at] = block.active if before is None else block.active | before
    lowest = min(block.fragments, key=lambda each: (together.get(each, 0), each))
    active = block.fragments.pop(lowest)
    block.active = None if active.all() else active
    return lowest


def _step(instruction: Instruction, slots: Slots) -> Step:
    """The function that executes an instruction, for the threads whose guard holds."""
    word = instruction.parts[0]
    try:
        plain = BUILDERS[word](instruction, slots)
    except (KeyError, ValueError, Unknown) as error:
        raise Fault(
            "unknown", f"line {instruction.line}: {instruction.text} ({error!r})"
        ) from error
    if instruction.guard is None:
        return plain
    guard, is_negated = slots.source(instruction.guard, "pred"), instruction.is_negated
    return (_branching if word in ("bra", "ret", "exit") else _guarded)(plain, guard, is_negated)


def _holding(block: Block, guard: int, is_negated: bool) -> np.ndarray:
    holds = block.get(guard)
    holds = ~holds if is_negated else holds
    return holds if block.active is None else holds & block.active


def _guarded(plain: Step, guard: int, is_negated: bool) -> Step:
    def step(block: Block) -> None:
        before, holds = block.active, _holding(block, guard, is_negated)
        if holds.any():
            block.active = None if holds.all() else holds
            plain(block)
            block.active = before

    return step


def _branching(plain: Step, guard: int, is_negated: bool) -> Step:
    def step(block: Block) -> int | None:
        holds = _holding(block, guard, is_negated)
        stays = ~holds if block.active is None else block.active & ~holds
        if not stays.any():
            return plain(block)
        if holds.any():
            target = plain(block)
            assert target is not None
            before = block.fragments.get(target)
            block.fragments[target] = holds if before is None else holds | before
            block.active = stays
        return None

    return step
