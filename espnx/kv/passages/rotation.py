"""Rotary positions: rows that were rotated for one position serve any other, if the query is
rotated instead of them (RoPE is a group; shared by all that attends to passages).

The score of a query at position m and a key at p + o is (R_m q)' (R_(p + o) k) = (R_(m - o) q)'
(R_p k): a key that was stored at p is at p + o for a query that is rotated back by o. What is
stored stays as it was written, whoever looks at it and from wherever.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Rotation:
    """How a layer rotates its keys and queries.

    Attributes:
        radians: of each pair of values, for one position; angles are linear in the position.
        is_interleaved: a pair are neighbours, values 2 i and 2 i + 1 (GPT-J, Cohere, GLM); else
            values i and i + len(radians) (Llama, GPT-NeoX). Values behind the last pair are not
            rotated.
    """

    radians: tuple[float, ...]
    is_interleaved: bool

    @property
    def width(self) -> int:
        """Values of a row that are rotated, its first ones."""
        return 2 * len(self.radians)

    def turned(self, rows: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
        """Rows that stand elsewhere.

        Args:
            rows: float [parts or 1, ..., d], rotated for some position.
            positions: for each part, by how many positions it moves; may be negative.

        Returns:
            [parts, ..., d], contiguous, in the dtype of `rows`.
        """
        shape = (len(positions), *[1] * (rows.dim() - 2), len(self.radians))
        turns = _turns(self.radians, tuple(positions))
        cos, sin = (each.to(rows).view(shape) for each in turns)
        out = rows.new_empty(len(positions), *rows.shape[1:])
        out[..., self.width :] = rows[..., self.width :]
        first, second = self._halves(rows)
        to_first, to_second = self._halves(out)
        torch.mul(first, cos, out=to_first).addcmul_(second, sin, value=-1)
        torch.mul(second, cos, out=to_second).addcmul_(first, sin)
        return out

    def _halves(self, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The first and the second value of each pair: views."""
        if self.is_interleaved:
            return rows[..., 0 : self.width : 2], rows[..., 1 : self.width : 2]
        half = len(self.radians)
        return rows[..., :half], rows[..., half : self.width]


@functools.lru_cache(maxsize=256)
def _turns(
    radians: tuple[float, ...], positions: tuple[int, ...]
) -> tuple[torch.Tensor, torch.Tensor]:
    """float64 [positions, pairs]: the cosine and the sine of each angle. Every layer asks for the
    same."""
    # In fp64: in fp32 an angle of thousands of radians has lost the digits that count.
    angles = torch.tensor(positions, dtype=torch.float64, device="cpu")[:, None]
    angles = angles * torch.tensor(radians, dtype=torch.float64, device="cpu")
    return angles.cos(), angles.sin()
