"""What machine code says of itself: registers, and the instructions of its main loop by class."""

from __future__ import annotations

import functools
import itertools
import math
import re
import struct
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import triton

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
INSTRUCTION = re.compile(r"/\*[0-9a-f]+\*/\s+(?:@!?U?P\w+ )?\s*([A-Z][\w.]*)(.*?);")
LABEL = re.compile(r"\s*\.(L_x_\d+):")
TARGET = re.compile(r"`\(\.(L_x_\d+)\)")
WARP = 32
#: By an instruction's first word; what is not here is integer and other work.
CLASSES = {
    "tensor": ("HMMA", "IMMA", "HGMMA", "QGMMA"),
    "global": ("LDG", "LDGSTS", "STG", "UTMALDG"),
    "shared": ("LDS", "STS", "LDSM", "STSM"),
    "spill": ("LDL", "STL"),
    "float": ("FADD", "FMUL", "FFMA", "FMNMX", "FSEL", "FSETP", "HADD2", "HFMA2", "HMUL2"),
    "special": ("MUFU", "I2F", "F2I", "F2F", "F2FP", "SHFL", "REDUX", "I2FP", "VOTE"),
    "barrier": ("BAR", "DEPBAR", "LDGDEPBAR", "WARPSYNC"),
}
#: By an instruction's first word: copies that are asked for ahead, and products.
AHEAD = ("LDGSTS",)
TOGETHER = ("REDUX", "CREDUX")
_OF = {word: name for name, words in CLASSES.items() for word in words}


def mma_flop(opcode: str) -> tuple[int, int]:
    """FLOP of one warp's instruction, as if in fp16 (TF32 takes twice the time, int8 half of it):
    by ``mma.sync``, and by ``wgmma``, which is four warps' work."""
    if found := re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.(.*)", opcode):
        m, n, k = (int(each) for each in found.groups()[:3])
        return 0, 2 * m * n * k // 4 * (2 if "TF32" in found[4] else 1)
    if opcode.startswith("HMMA.16816"):
        return 2 * 16 * 8 * 16, 0
    if opcode.startswith("HMMA.1688"):
        return 2 * 16 * 8 * 8 * (2 if "TF32" in opcode else 1), 0
    if opcode.startswith("HMMA.1684"):
        return 2 * 16 * 8 * 4 * (2 if "TF32" in opcode else 1), 0
    if opcode.startswith("IMMA.16832.S8.S8"):
        return 2 * 16 * 8 * 32 // 2, 0
    if opcode.startswith("IMMA.16816.S8.S8"):
        return 2 * 16 * 8 * 16 // 2, 0
    if opcode.split(".")[0] in CLASSES["tensor"]:
        raise ValueError(f"{opcode} on tensor cores")
    return 0, 0


def wgmma_bytes(opcode: str, operands: str) -> int:
    """That four warps' ``wgmma`` takes from shared memory: its right operand, and the left one
    unless it comes from registers."""
    found = re.match(r"HGMMA\.(\d+)x(\d+)x(\d+)\.(.*)", opcode)
    if not found:
        return 0
    m, n, k = (int(each) for each in found.groups()[:3])
    size = 4 if "TF32" in found[4] else 2
    is_left_there = re.match(r"\s*R\w+,\s*R\w+,\s*gdesc", operands) is None
    return size * k * (n + (m if is_left_there else 0))


class Loop(NamedTuple):
    """Instructions ``begin`` to ``end``, the branch back the last of them."""

    begin: int
    end: int

    def holds(self, other: Loop) -> bool:
        return self != other and self.begin <= other.begin and other.end <= self.end


@functools.lru_cache(maxsize=16)  # modules of several kernels are asked for once
def tool(name: str, *options: str, cubin: bytes) -> str:
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [str(TOOLS / name), *options, file.name]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, its stack in bytes (what is spilled goes there), shared memory of a
    block in bytes, its threads."""
    text = tool("cuobjdump", "--dump-resource-usage", cubin=kernel.asm["cubin"])
    if entry := getattr(kernel, "entry", ""):
        text = text.partition(f"Function {entry}:")[2].partition("Function ")[0]
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", text)}
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": int(kernel.metadata.shared),
        "threads": WARP * int(kernel.metadata.num_warps),
    }


def symbol_number(cubin: bytes, name: str) -> int:
    """A symbol's place in an ELF file's table of symbols (System V ABI, "Symbol Table"), which is
    how `nvdisasm` is told to take one kernel of a module."""
    (at,) = struct.unpack_from("<Q", cubin, 0x28)
    size, n_sections = struct.unpack_from("<2H", cubin, 0x3A)
    sections = [struct.unpack_from("<2I4Q2I2Q", cubin, at + i * size) for i in range(n_sections)]
    _, _, _, _, begin, n_bytes, names, *_ = next(each for each in sections if each[1] == 2)
    starts = [struct.unpack_from("<I", cubin, begin + i)[0] for i in range(0, n_bytes, 24)]
    texts = cubin[sections[names][4] :][: sections[names][5]]
    found = [texts[start : texts.index(b"\0", start)] for start in starts]
    return found.index(name.encode())


def of_kernel(cubin: bytes, entry: str) -> str:
    """What `nvdisasm` says of one kernel of a module."""
    text = tool("nvdisasm", "-c", "-fun", str(symbol_number(cubin, entry)), cubin=cubin)
    return text.partition(f"\t.section\t.text.{entry},")[2].partition("\t.section\t.text.")[0]


class Assembly(NamedTuple):
    """Instructions (opcode, operands), the loops (what a branch back spans), and where to branches
    lead."""

    code: list[tuple[str, str]]
    loops: list[Loop]
    targets: dict[int, int]

    def holds(self, begin: int, end: int, words: tuple[str, ...]) -> bool:
        return any(opcode.split(".")[0] in words for opcode, _ in self.code[begin:end])


def parse(text: str) -> Assembly:
    code: list[tuple[str, str]] = []
    labels: dict[str, int] = {}
    branches: list[tuple[int, str]] = []
    for line in text.splitlines():
        if found := LABEL.match(line):
            labels[found[1]] = len(code)
        elif found := INSTRUCTION.search(line):
            if found[1].startswith("BRA") and (target := TARGET.search(found[2])):
                branches.append((len(code), target[1]))
            code.append((found[1], found[2]))
    # A branch to itself fills the end of the code.
    ends: dict[int, int] = {}
    for at, label in branches:
        if labels[label] < at:
            ends[labels[label]] = max(at, ends.get(labels[label], 0))
    targets = {at: labels[label] for at, label in branches}
    return Assembly(code, [Loop(begin, end) for begin, end in ends.items()], targets)


def loaded_bytes(opcode: str) -> int:
    """That one thread loads, or stores, by an instruction of memory."""
    words = opcode.split(".")
    if words[0] in ("LDSM", "STSM"):
        return 4 * int(words[-1]) if words[-1].isdigit() else 4
    for word in words:
        if word in ("U8", "S8"):
            return 1
        if word in ("U16", "S16"):
            return 2
        if word in ("64", "128"):
            return int(word) // 8
    return 4


def _loop_of(code: list[tuple[str, str]], loops: list[Loop], *, has_inner: bool) -> Loop:
    """Of the loops with a loop in them, or without one, the first that brings at least half as many
    bytes from global memory as any of them: what is rare comes last, and may bring more."""
    fitting = [loop for loop in loops if any(loop.holds(other) for other in loops) == has_inner]
    # With one in it: not those that hold such a one in turn.
    fitting = [
        loop
        for loop in fitting
        if not (has_inner and any(loop.holds(other) for other in fitting if other != loop))
    ]

    def brought(loop: Loop) -> int:
        return sum(
            loaded_bytes(opcode)
            for opcode, _ in code[loop.begin : loop.end + 1]
            if opcode.startswith("LDG") and opcode != "LDGDEPBAR"
        )

    most = max(map(brought, fitting))
    return next(each for each in sorted(fitting) if 2 * brought(each) >= most)


def _ring_loop(assembly: Assembly, *, counts_loops: bool) -> tuple[Loop, set[int]]:
    """Of the innermost loops that copy ahead and multiply the one that multiplies most, or the
    shorter one; and what of it is rare: what branches pass over that holds neither, nor asks all
    lanes, nor is a loop of those that count."""
    words = (AHEAD, CLASSES["tensor"])
    both = [
        each
        for each in assembly.loops
        if all(assembly.holds(each.begin, each.end + 1, some) for some in words)
    ]
    products = [opcode.split(".")[0] in words[1] for opcode, _ in assembly.code]
    loop = min(
        (each for each in both if not any(each.holds(other) for other in both)),
        key=lambda each: (-sum(products[each.begin : each.end + 1]), each.end - each.begin),
    )
    counting = [each for each in assembly.loops if counts_loops and loop.holds(each)]
    common = (*words[0], *words[1], *TOGETHER)
    at, rare = loop.begin, set[int]()
    while at <= loop.end:
        target = assembly.targets.get(at, 0)
        is_common = assembly.holds(at, target, common) or any(
            at < each.begin < target for each in counting
        )
        if at < target <= loop.end and not is_common:
            rare.update(range(at + 1, target))
            at = target
        else:
            at += 1
    return loop, rare


def main_loop(
    text: str, inner_trips: int | tuple[int, ...], threads: int, *, has_ring: bool = False
) -> dict[str, Any]:
    """Instructions that a warp issues in one iteration, by class, and its FLOP on tensor cores;
    bytes that a block moves through shared memory in it, and that it has asked of global memory
    when it waits for them. ``inner_trips``: of every loop within, or of each in the order of their
    beginnings, for an iteration of the one that holds it. ``has_ring``: warps with a ring of tiles,
    and what they do at a document's end alone, which does not count."""
    assembly = parse(text)
    code, loops, _ = assembly
    rare = set[int]()
    if has_ring:
        loop, rare = _ring_loop(assembly, counts_loops=isinstance(inner_trips, tuple))
    else:
        loop = _loop_of(code, loops, has_inner=inner_trips != 0)
    inner = sorted(other for other in loops if loop.holds(other)) if inner_trips else []
    counts: Counter[str] = Counter()
    shared = waiting = asked = run = mma = wgmma = 0
    for i, (opcode, operands) in enumerate(code[loop.begin : loop.end + 1], loop.begin):
        if i in rare:
            continue
        trips = _trips(inner, inner_trips, i)
        word = opcode.split(".")[0]
        counts[_OF.get(word, "integer")] += trips
        by_mma, by_wgmma = mma_flop(opcode)
        mma, wgmma = mma + trips * by_mma, wgmma + trips * by_wgmma
        size = threads * loaded_bytes(opcode)
        shared += trips * wgmma_bytes(opcode, operands) * (threads // (4 * WARP))
        if word in CLASSES["shared"] or word == "LDGSTS":
            shared += trips * size
        if word == "LDGSTS":
            asked += size * (trips if isinstance(inner_trips, tuple) else 1)
        elif word == "LDG":
            run += size
        elif word == "BAR":
            waiting, run = max(waiting, run), 0
    return {
        "instructions": sum(counts.values()),
        "by_class": dict(sorted(counts.items())),
        "mma_flop": mma,
        "wgmma_flop": wgmma,
        "shared_moved_bytes": shared,
        "in_flight_bytes": asked or max(waiting, run),
    }


def _trips(inner: list[Loop], trips: int | tuple[int, ...], at: int) -> int:
    """How often an instruction runs in an iteration of the main loop."""
    holding = [each.begin <= at <= each.end for each in inner]
    if isinstance(trips, tuple):
        return math.prod(itertools.compress(trips, holding))
    return trips if any(holding) else 1


def analysed(variant: Any, capability: int) -> dict[str, Any]:
    """A row of the table."""
    kernel = variant.compile(capability)
    found = resources(kernel)
    cubin, entry = kernel.asm["cubin"], getattr(kernel, "entry", "")
    text = of_kernel(cubin, entry) if entry else tool("nvdisasm", "-c", cubin=cubin)
    has_ring = (
        variant.tiles_ahead > 1
        or isinstance(variant.inner_trips, tuple)
        or getattr(variant, "has_ring", False)
    )
    loop = main_loop(text, variant.inner_trips, found["threads"], has_ring=has_ring)
    return {
        "variant": variant.name,
        "sm": capability,
        **found,
        "tile_bytes": variant.tile_bytes,
        **loop,
        # tables and masks are loaded too; of rows, so many tiles at most are under way
        "in_flight_bytes": min(loop["in_flight_bytes"], variant.tile_bytes) * variant.tiles_ahead,
    }
