"""Reads that run ahead over layers and steps, and the sequences of a batch that attend together.

Rows do not depend on the query. So the reads of the next layers, and after the last one those of
the next step, are under way while this layer computes: the device never waits for the dense layers,
and decoding takes as long as the device needs for the bytes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..ops.attention import RowsInMemory
from .rows import LayerRows
from .striping import StripedDevices


@dataclass
class _Ahead:
    """Reads that are under way: for each part of the batch its sequences and tickets; how many
    tokens they bring; and whether that does not depend on when writes ended."""

    parts: list[tuple[range, list[int]]]
    covered: int
    is_by_position: bool


@dataclass(frozen=True)
class Arrived:
    """What some sequences attend to.

    Attributes:
        tickets: of rows that are read, or None.
        tail: rows in memory.
    """

    sequences: range
    tickets: list[int] | None
    whole_tail: RowsInMemory | None

    @property
    def tail(self) -> RowsInMemory | None:
        return (
            None
            if self.whole_tail is None
            else self.whole_tail.part(self.sequences.start, self.sequences.stop)
        )


class ReadAhead:
    """The reads of a cache's rows.

    Args:
        striped: the devices.
        every: all rows there are, in the order in which a forward pass asks for them.

    Attributes:
        part_bytes: the queries of so many bytes attend at a time, or those of one sequence. By
            layer: they are not equally long in all layers of a model.
        tokens: new ones of a forward pass.
        query_heads: of the last layer that was attended to, which stand for those of layers that no
            pass has come to yet; 0: there was none.
    """

    def __init__(self, striped: StripedDevices, every: Callable[[], list[LayerRows]]):
        self._striped, self._every = striped, every
        self._ahead: dict[LayerRows, _Ahead] = {}
        self.part_bytes = self.tokens = 1
        self.query_heads = 0

    def take(self, rows: LayerRows, n_sequences: int) -> list[Arrived]:
        """What a batch attends to in these rows, part by part. Their reads are taken out of the
        line: attention has to ask for the tickets in this order."""
        ahead = self._arriving(rows)
        self._ahead.pop(rows, None)
        if ahead is None:
            everything = rows.tail(0)
            return [Arrived(part, None, everything) for part in self._parts(rows, n_sequences)]
        return [Arrived(part, tickets, rows.tail(ahead.covered)) for part, tickets in ahead.parts]

    def _arriving(self, rows: LayerRows) -> _Ahead | None:
        """The reads of some rows, at the front of every device's line; None where nothing needs to
        be read."""
        if not rows.runs:
            return None
        ahead = self._ahead.get(rows)
        fits = (
            ahead is not None
            and [part for part, _ in ahead.parts] == self._parts(rows, rows.sequences)
            and (ahead.is_by_position or not rows.is_by_position)
        )
        if ahead is None or not fits or not self._striped.are_next(ahead.parts[0][1]):
            self.forget()
            every = self._every()
            for later in every[every.index(rows) :]:
                self.look(later)
            # None: the first write is still under way, and all rows are in memory
            ahead = self._ahead.get(rows)
        return ahead

    def look(self, rows: LayerRows) -> None:
        """Puts the reads for the next time in line."""
        covered = rows.covered()
        if covered:
            parts = [
                (part, self._striped.ahead(rows.layout, rows.views(covered, part)))
                for part in self._parts(rows, rows.sequences)
            ]
            self._ahead[rows] = _Ahead(parts, covered, rows.is_by_position)
            rows.trim(covered)

    def resume(self) -> None:
        """Puts the reads of the next pass in line, where what was in line is forgotten (sequences
        have left): the next pass would do it, and the disk had nothing to do until then."""
        if not self._ahead and self._striped.is_open:
            for rows in self._every():
                self.look(rows)

    def forget(self) -> None:
        """Nothing that was read ahead is wanted any more."""
        self._striped.forget()
        self._ahead.clear()

    def _parts(self, rows: LayerRows, n_sequences: int) -> list[range]:
        """The sequences that attend together over some rows."""
        width = max(rows.layout.d, rows.layout.dv)
        each_bytes = 4 * (rows.query_heads or self.query_heads) * width * self.tokens
        step = max(1, self.part_bytes // each_bytes) if each_bytes else 1
        return [
            range(begin, min(begin + step, n_sequences)) for begin in range(0, n_sequences, step)
        ]
