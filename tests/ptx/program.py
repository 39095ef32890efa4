"""PTX as data: a kernel's instructions in order, its labels, and how wide its registers are.

Text is read as far as compilers write it, Triton's and nvcc's: one instruction a statement.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

REGISTERS = re.compile(r"\.reg\s+\.(\w+)\s+(%\w+?)<\d+>")
ADDRESS = re.compile(r"\[\s*([%\w.$]+)\s*(?:\+\s*(-?\w+)\s*)?\]")
STATEMENT = re.compile(r"(?:@(!?)(%\w+)\s+)?([a-z][\w.:]*)\s*(.*)", re.DOTALL)
LABEL = re.compile(r"([$\w]+):")
DYNAMIC_SHARED = re.compile(r"\.extern\s+\.shared\s[^;]*?([\w$]+)\[\];")
#: Where shared memory begins that a launch gives to a kernel of nvcc's: the first bytes are the
#: system's on sm_90. Triton's name for its own stands for address 0 here.
DYNAMIC_SHARED_BEGIN = 1024
TRITON_SHARED = "global_smem"
SHARED_WIDTHS = re.compile(r"(?:ld|st)\.shared\S*\.[bsuf](8|16|32|64|128)\b")


class Fault(AssertionError):  # noqa: N818
    """What a GPU need not forgive. ``kind`` is one word for it."""

    def __init__(self, kind: str, message: str):
        super().__init__(f"{kind}: {message}")
        self.kind = kind


@dataclass(frozen=True)
class Address:
    """An operand in brackets: a register or a name, and a distance in bytes."""

    base: str
    offset: int


Operand = str | Address | tuple[str, ...]


@dataclass(frozen=True)
class Instruction:
    """One statement. ``guard``: the register that must hold (or, negated, must not)."""

    line: int
    text: str
    opcode: str
    operands: tuple[Operand, ...]
    guard: str | None = None
    is_negated: bool = False

    @property
    def parts(self) -> list[str]:
        return self.opcode.split(".")


@dataclass
class Program:
    """A kernel."""

    instructions: list[Instruction] = field(default_factory=list)
    labels: dict[str, int] = field(default_factory=dict)
    widths: dict[str, int] = field(default_factory=dict)
    parameters: list[str] = field(default_factory=list)
    addresses: dict[str, int] = field(default_factory=dict)  # of names that stand for one
    n_threads: int = 0

    def register_bits(self, name: str) -> int:
        """1 for a predicate."""
        return self.widths[name.rstrip("0123456789")]

    @property
    def shared_granule_bytes(self) -> int:
        """The least that the program reads or writes of shared memory at a time."""
        texts = (SHARED_WIDTHS.search(each.opcode) for each in self.instructions)
        return min([4, *(int(found[1]) // 8 for found in texts if found)])


def parse(ptx: str, entry: str = "") -> Program:
    """The kernel of that name, or the only one of a module."""
    program = Program()
    found = re.search(rf"\.entry\s+{entry}(?=\s*\()" if entry else r"\.entry", ptx)
    if found is None:
        raise Fault("unknown", f"no kernel {entry}")
    header, rest = ptx[: found.start()], ptx[found.end() :]
    program.addresses = {
        name: 0 if name == TRITON_SHARED else DYNAMIC_SHARED_BEGIN
        for name in DYNAMIC_SHARED.findall(header)
    }
    body_line = header.count("\n") + 1
    if found := re.search(r"\.reqntid\s+(\d+)", rest):
        program.n_threads = int(found[1])
    program.parameters = re.findall(r"\.param\s[^,)]*?(\w+)\s*(?=[,)])", rest.partition("{")[0])
    for line, text in _statements(rest, body_line):
        if found := LABEL.fullmatch(text):
            program.labels[found[1]] = len(program.instructions)
        elif text.startswith("."):
            if registers := REGISTERS.match(text):
                kind = registers[1]
                program.widths[registers[2]] = 1 if kind == "pred" else int(kind[1:])
        else:
            program.instructions.append(parse_instruction(line, text))
    return program


def _statements(text: str, first_line: int) -> Iterator[tuple[int, str]]:
    """Statements and labels of the body, each with its line."""
    is_body, waiting, begin = False, "", 0
    for number, whole in enumerate(text.splitlines(), first_line):
        line = whole.partition("//")[0].strip()
        if not is_body:
            is_body = line == "{"
            continue
        if line == "}":
            return
        if not line or line.startswith((".loc", ".pragma")):
            continue
        if not waiting and LABEL.fullmatch(line):
            yield number, line
            continue
        begin = begin if waiting else number
        waiting = f"{waiting} {line}".strip()
        while ";" in waiting:
            statement, _, waiting = waiting.partition(";")
            # Braces around assembly of a kernel's own keep its registers' names to it.
            waiting = waiting.strip().removeprefix("}")
            yield begin, statement.strip().removeprefix("{").strip()


def parse_instruction(line: int, text: str) -> Instruction:
    found = STATEMENT.fullmatch(text)
    if found is None:
        raise Fault("unknown", f"line {line}: {text}")
    negated, guard, opcode, rest = found.groups()
    operands = tuple(_operand(each) for each in _split(rest))
    return Instruction(line, text, opcode, operands, guard, negated == "!")


def _split(text: str) -> list[str]:
    """By the commas outside braces."""
    return [each.strip() for each in re.split(r",(?![^{]*\})", text) if each.strip()]


def _operand(text: str) -> Operand:
    if text.startswith("{"):
        return tuple(each.strip() for each in text.strip("{}").split(","))
    if found := ADDRESS.fullmatch(text):
        return Address(found[1], int(found[2] or "0", 0))
    return text
