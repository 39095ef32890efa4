"""What drafts attend to in memory, in place of the rows on SSD: what its two kinds have in common,
and which sequences have none."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from ...ops.attention import Queries, RowsInMemory, attend_rows, merge


@dataclass
class Lost:
    """The sequences for whose rows there was no memory, in some layer: no layer keeps any of theirs
    from the next pass on, and the model proposes nothing for them.

    Attributes:
        sequences: their numbers.
    """

    sequences: set[int] = field(default_factory=set)

    def left(self, n_sequences: int) -> list[int]:
        """The others of a batch."""
        return [i for i in range(n_sequences) if i not in self.sequences]

    def select(self, sequences: Sequence[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""
        self.sequences = {i for i, old in enumerate(sequences) if old in self.sequences}


class Tier(Protocol):
    """Rows of one layer that drafts attend to.

    Attributes:
        end: the tier stands for the rows before this position; later ones are in memory anyway. 0:
            no pass has brought it rows yet.
    """

    end: int

    @property
    def memory_bytes(self) -> int: ...

    def attend(
        self, queries: Queries, rows: RowsInMemory | None, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Attention over what is there, and over rows in memory behind it: (o float32 [sequences,
        KV heads, n, dv], lse). A sequence that has nothing here attends to its rows alone."""

    def select(self, sequences: list[int]) -> None:
        """Sequence i becomes what `sequences[i]` was."""


#: Makes the tier of a layer, which says in `Lost` for whom it found no memory.
MakeTier = Callable[[Lost], Tier]


def for_as_many(
    sequences: list[int], lost: Lost, make: Callable[[list[int]], tuple[torch.Tensor, ...]]
) -> tuple[list[int], tuple[torch.Tensor, ...]]:
    """Memory for as many of some sequences as there is memory for; the rest, the last first, are
    lost.

    Args:
        make: the tensors of so many sequences. Raises MemoryError or RuntimeError (as PyTorch says
            of memory on the CPU and on GPUs) where they do not fit.

    Returns:
        (the sequences, what `make` gave for them); ([], ()) where not one of them fits.
    """
    while sequences:
        try:
            return sequences, make(sequences)
        except (MemoryError, RuntimeError):
            lost.sequences.add(sequences[-1])
            sequences = sequences[:-1]
    return [], ()


#: Attention of some queries over what a tier has for them, and over rows in memory.
Own = Callable[[Queries, RowsInMemory | None], tuple[torch.Tensor, torch.Tensor]]


def attend_some(
    queries: Queries, rows: RowsInMemory | None, places: list[int], attend: Own, threads: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of all sequences over rows in memory, and of those that have a place over what is
    there.

    Args:
        places: of each sequence; -1: none. Those that there are ascend.
        attend: of the queries of those that have one.
    """
    there = [i for i, place in enumerate(places) if place >= 0]
    if len(there) == len(places):
        return attend(queries, rows)
    o, lse = attend_rows(queries, rows, threads=threads)
    if there:
        o[there], lse[there] = merge(o[there], lse[there], *attend(queries.chosen(there), None))
    return o, lse
