"""What plots are drawn of: rows of results, each with the memory of its machine. Apart, because
what draws them and what lists the plots (plots.py) both need it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..harness.result import Row
from .looks import SYSTEMS


@dataclass(frozen=True)
class Found:
    """A row for a plot, and the memory of the machine that it was measured on."""

    row: Row
    machine_bytes: int

    def memory_bytes(self, name: str) -> int:
        """What systems could use: the limit of that name where it is a number, else the machine's
        memory."""
        limit = self.row.params[name]
        return limit if isinstance(limit, int) else self.machine_bytes


def alike(found: Sequence[Found], *names: str) -> list[Found]:
    """Those whose parameters of these names are the first one's."""
    return [
        each
        for each in found
        if all(each.row.params.get(name) == found[0].row.params.get(name) for name in names)
    ]


def by_system(found: Sequence[Found]) -> Mapping[str, list[Row]]:
    """Rows of the systems that have a look of their own, in that order."""
    lines = {
        system: [each.row for each in found if each.row.system == system] for system in SYSTEMS
    }
    return {system: rows for system, rows in lines.items() if rows}
