"""Changes to PTX that ought to be noticed: one barrier, wait, fence or mask less, or one branch
that nobody takes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import NamedTuple

BARRIERS = re.compile(r"\s*bar(?:\.warp)?\.sync\b")
WAITS = re.compile(r"\s*(?:cp\.async\.wait_group|wgmma\.wait_group|fence\.proxy\.async)\b")
MASKED = re.compile(r"\s*@!?%p\d+\s+(?=(?:ld|st)\.)")
ENTRY = re.compile(r"\.visible \.entry (\w+)\(")
BRANCH = re.compile(r"\s*@!?%p\d+\s+bra\b")
MASKED_COPY = re.compile(r"(cp\.async\.c[ag]\.shared\.global .*), %r\d+;")


class Change(NamedTuple):
    """What becomes of one line."""

    kind: str
    line: int
    before: str
    after: str

    def __call__(self, ptx: str) -> str:
        lines = ptx.splitlines()
        assert lines[self.line - 1] == self.before
        lines[self.line - 1] = self.after
        return "\n".join(lines) + "\n"


def changes(ptx: str, *, entry: str = "", branches: bool = False) -> Iterator[Change]:
    """``entry``: of this kernel of a module alone; ``branches``: of nvcc's code, too, whose masks
    are branches around what is masked."""
    is_within = not entry
    for number, line in enumerate(ptx.splitlines(), 1):
        if entry and (found := ENTRY.match(line)):
            is_within = found[1] == entry
        if not is_within:
            continue
        if BARRIERS.match(line):
            yield Change("barrier", number, line, "")
        elif branches and BRANCH.match(line):
            yield Change("branch", number, line, "")
        elif WAITS.match(line):
            yield Change("wait", number, line, "")
        elif MASKED.match(line):
            yield Change("mask", number, line, MASKED.sub("", line))
        elif MASKED_COPY.search(line):
            yield Change("mask", number, line, MASKED_COPY.sub(r"\1;", line))
