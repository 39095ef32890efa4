"""Rows that a drive reads before anybody has taken them: a window of bytes of them, in the order in
which they were asked for."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Wanted:
    """A part of what a drive reads. Attributes: verb, sizes, members: of the command of the walk
    that reads it; before: that have to end before."""

    verb: str
    drive: int
    size_bytes: float
    sizes: Mapping[str, float]
    members: Mapping[str, int]
    before: tuple[int, ...]


@dataclass(frozen=True)
class Piece:
    """Such a part whose read is in the walk. Attributes: command: of the walk; members: the parts
    of its drive."""

    command: int
    size_bytes: float
    members: Mapping[str, int]


class ReadsAhead:
    """What a part of a drive has been asked for and nobody has taken.

    Args:
        begin: brings a read into the walk, which waits for the commands that it is given.
    """

    def __init__(self, begin: Callable[[Wanted, tuple[int, ...]], Piece]):
        self._begin = begin
        self._begun: dict[int, list[Piece]] = {}  # by ticket
        # by ticket, those of which something waits; of each the last one is next
        self._waiting = OrderedDict[int, list[Wanted]]()
        self._size_bytes, self._window_bytes = 0.0, math.inf
        #: What the last one that was taken has come with, and who took it.
        self._taken: tuple[int, ...] = ()

    def ask(self, ticket: int, wanted: Sequence[Wanted], window_bytes: int | None) -> None:
        """Puts pieces in line. Of all that nobody has taken, as many are read as fit into the
        window (None: all)."""
        self._window_bytes = math.inf if window_bytes is None else window_bytes
        self._begun[ticket] = []
        if wanted:
            self._waiting[ticket] = list(reversed(wanted))
        self._fill()

    def take(self, ticket: int, by: int) -> list[Piece]:
        """A ticket's pieces. The command `by` takes one after another as they come, and the next
        ones in line begin."""
        taken: list[Piece] = []
        while True:
            if self._begun.get(ticket):
                piece = self._begun[ticket].pop(0)
            elif ticket in self._waiting:  # the window is full of others, and it is needed now
                self._next(ticket)
                continue
            else:
                break
            taken.append(piece)
            self._size_bytes -= piece.size_bytes
            self._taken = (piece.command, by)
            self._fill()
        self._begun.pop(ticket, None)
        return taken

    def forget(self) -> None:
        """Nobody will take any of them: what has begun is read all the same."""
        self._begun.clear()
        self._waiting.clear()
        self._size_bytes = 0.0

    def _fill(self) -> None:
        while self._waiting:
            ticket, waiting = next(iter(self._waiting.items()))
            size_bytes = self._size_bytes + waiting[-1].size_bytes
            if self._size_bytes > 0 and size_bytes > self._window_bytes:
                return
            self._next(ticket)

    def _next(self, ticket: int) -> None:
        wanted = self._waiting[ticket].pop()
        if not self._waiting[ticket]:
            del self._waiting[ticket]
        self._size_bytes += wanted.size_bytes
        self._begun[ticket].append(self._begin(wanted, self._taken))
