"""What a random program puts on a device for rows and asks of it: drawn from a seed, and from what
the device offers. Small shapes prevail."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch

from ...ops.attention import RowsInMemory
from ..interface import Capabilities
from ..row_layout import RowLayout
from .known_rows import Kept, Seen, normal

#: Of sequences, heads and rows.
SEQUENCES, HEADS, ROWS = 16, 16, 100_000
_FORMATS, _WIDTHS = ("fp16", "fp32", "bf16", "int8"), (64, 128, 8, 24, 32, 40, 80, 96, 256)
#: Values of K and V together: of what is put or looked at in most calls, and in a few. 100,000 rows
#: of 128 and 128 values are of the few.
FEW_VALUES, _MANY_VALUES = 1 << 16, 26 << 20


@dataclass(eq=False)
class Kind:
    """Rows of one layout and number of heads, whose heads lie in one segment or in two; those that
    are stored, by part."""

    layout: RowLayout
    n_heads: int
    parts: list[range]
    stored: list[list[Kept]] = field(init=False)
    unseen: set[Kept] = field(default_factory=set)  # no visit has shown them whole yet

    def __post_init__(self) -> None:
        self.stored = [[] for _ in self.parts]

    @property
    def row_values(self) -> int:
        """Values of a row of one head."""
        return self.layout.d + (0 if self.layout.is_shared else self.layout.dv)


class Draws:
    """Draws from what a device can do.

    Args:
        can: of the device.
        draws, values: of shapes and choices, and of tensors.
    """

    def __init__(self, can: Capabilities, draws: random.Random, values: torch.Generator):
        self._can, self._draws, self._values = can, draws, values

    def kind(self) -> Kind:
        """Rows of any layout."""
        layout = self._layout()
        n_heads = 1 if layout.is_shared else self.small(HEADS)
        every, half = range(n_heads), n_heads // 2
        parts = self._draws.choice(
            ([every], [every[::2], every[1::2]], [every[:half], every[half:]])
        )
        return Kind(layout, n_heads, [part for part in parts if part])

    def _layout(self) -> RowLayout:
        """One of those that the device attends over, or, now and then, any."""
        can, choice, chance = self._can, self._draws.choice, self._draws.random()
        formats, widths = (
            (_FORMATS, _WIDTHS)
            if chance < 0.15
            else (can.attends_formats or _FORMATS, can.attends_widths or _WIDTHS)
        )
        name, d, dv = choice(formats), choice(widths), choice(widths)
        if name != "int8" and self._draws.random() < (
            0.15 if can.attends_latent or chance < 0.15 else 0
        ):
            return RowLayout(name, d, d, is_shared=True)
        return RowLayout(name, d, dv if can.attends_unlike_widths and chance < 0.6 else d)

    def small(self, most: int) -> int:
        """1 to `most`, mostly 1 or 2."""
        chance = self._draws.random()
        return 1 if chance < 0.6 else self._draws.randint(1, 4 if chance < 0.92 else most)

    def n_rows(self, kind: Kind, n_sequences: int) -> int:
        """How many to put."""
        chance, randint, block = self._draws.random(), self._draws.randint, kind.layout.block_rows
        if chance < 0.6:
            n = randint(0, 40)
        elif chance < 0.95:
            # on and beside the borders of blocks, and of what kernels take at a time
            n = self._draws.choice((block, block, 64, 128, 256)) * randint(
                1, 4
            ) + self._draws.choice((-1, 0, 0, 1))
        elif chance < 0.99:
            n = round(math.exp(self._draws.uniform(3, 8)))
        else:
            n = self._draws.choice(
                (
                    ROWS,
                    (1 << 16) + randint(-1, 1),
                    round(math.exp(self._draws.uniform(8, math.log(ROWS)))),
                )
            )
        most = _MANY_VALUES if chance >= 0.99 else 4 * FEW_VALUES
        return min(n, most // (n_sequences * kind.n_heads * kind.row_values))

    def views(self, kind: Kind, n_sequences: int) -> tuple[list[Seen], int]:
        """(views of segments, or of their first rows; the first position behind all of them)."""
        draws, seen, positions = self._draws, list[Seen](), 0
        # rows of one head
        left = (_MANY_VALUES if draws.random() < 0.02 else FEW_VALUES) // kind.row_values
        for sequence in range(n_sequences):
            for heads, stored in zip(kind.parts, kind.stored, strict=True):
                first = draws.randint(1, 200) if draws.random() < 0.1 else 0
                for each in draws.sample(
                    stored, min(len(stored), draws.choice((0, 1, 1, 1, 2, 3)))
                ):
                    n = (
                        each.segment.n_rows
                        if draws.random() < 0.6
                        else draws.randint(0, each.segment.n_rows)
                    )
                    n = min(n, left // len(heads))
                    left -= n * len(heads)
                    seen.append(each.use(sequence, n, first))
                    first += n + (draws.randint(1, 20) if draws.random() < 0.1 else 0)
                positions = max(positions, first)
        return seen, positions

    def masks(self, kind: Kind, n_sequences: int, n: int, positions: int) -> dict[str, Any]:
        """Arguments of `known_rows.queries`."""
        can, chance, rng = self._can, self._draws.random, self._values
        found: dict[str, Any] = {"position": torch.arange(positions - n, positions)}
        if chance() < 0.3:
            found["last_position"] = torch.randint(-1, positions, (n,), generator=rng)
        if chance() < 0.2:
            found["first_visible"] = torch.randint(0, positions, (n_sequences,), generator=rng)
        if chance() < 0.2:
            found["visible"] = (torch.rand(n_sequences, positions, generator=rng) < 0.8).to(
                torch.uint8
            )
        if can.attends_window and chance() < 0.2:
            found["window"] = self._draws.randint(1, positions)
        if can.attends_soft_cap and chance() < 0.2:
            found["soft_cap"] = self._draws.choice((1.0, 20.0))
        if can.attends_slopes and chance() < 0.2:
            found["slopes"] = torch.rand(kind.n_heads, n, generator=rng) * 0.1
        return found

    def tail(self, kind: Kind, n_sequences: int, first: int) -> RowsInMemory:
        """Rows that wait on the host, from about position `first` on."""
        n, skip, layout = self._draws.randint(0, 20), self._draws.randint(0, 3), kind.layout
        dtype = torch.float16 if layout.format == "int8" else layout.dtype
        k, v = (
            normal(n_sequences, kind.n_heads, skip + n + 2, width, rng=self._values).to(dtype)
            for width in (layout.d, layout.dv)
        )
        return RowsInMemory(
            k, k if layout.is_shared else v, skip, n, first + self._draws.randint(0, 4)
        )
