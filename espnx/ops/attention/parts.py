"""Attention of the same queries over different rows, merged: parts wait until there are many, so
that a device is given one merge of all of them and not one for each. A file of its own: nothing
here knows of rows."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

from .cuda import merge_results

There = Callable[[np.ndarray], torch.Tensor]
_BYTES_MAX = 32 << 20  # of waiting parts' results, laid side by side


class Parts:
    """What some queries found, in parts of which each is of some of the (sequence, head) pairs.

    Args:
        n_pairs: sequences x heads.
        n, dv: queries of a pair, and the length of their results.
        device: of all results.
    """

    def __init__(self, n_pairs: int, n: int, dv: int, device: torch.device):
        self._shape, self._device = (n_pairs, n, dv), device
        self._waiting: list[tuple[np.ndarray, torch.Tensor, torch.Tensor]] = []
        self._count = np.zeros(n_pairs, dtype=np.int64)  # of waiting parts, by pair

    def add(self, pair: np.ndarray, o: torch.Tensor, lse: torch.Tensor, there: There) -> None:
        """A part: o float32 [k, n, dv] and lse [k, n], of k pairs, int64 [k], ascending; a pair may
        be there several times. `there` brings a table to the device."""
        if not len(pair):
            return
        self._waiting.append((pair, o, lse))
        np.add.at(self._count, pair, 1)
        n_pairs, n, dv = self._shape
        if len(self._waiting) > 1 and int(self._count.max()) * n_pairs * n * dv * 4 > _BYTES_MAX:
            self._merge(there)

    def merged(self, there: There) -> tuple[torch.Tensor, torch.Tensor]:
        """(o float32 [pairs, n, dv], lse [pairs, n]) of everything so far: 0 and -inf where a pair
        has no part."""
        n_pairs, n, dv = self._shape
        if not self._waiting:
            o = torch.zeros(n_pairs, n, dv, dtype=torch.float32, device=self._device)
            return o, torch.full((n_pairs, n), -torch.inf, device=self._device)
        self._merge(there)
        _, o, lse = self._waiting[0]
        return o, lse

    def _merge(self, there: There) -> None:
        """All parts become one, of every pair. Those of a pair are added in the order in which they
        came."""
        n_pairs = self._shape[0]
        every = np.arange(n_pairs)
        if len(self._waiting) == 1 and np.array_equal(self._waiting[0][0], every):
            return
        pair = np.concatenate([pair for pair, _, _ in self._waiting])
        order = np.argsort(pair, kind="stable")
        turn = np.empty(len(pair), dtype=np.int64)
        turn[order] = np.arange(len(pair)) - np.searchsorted(pair[order], pair[order])
        place = np.full((int(turn.max()) + 1, n_pairs), -1)
        place[turn, pair] = np.arange(len(pair))
        o, lse = (
            torch.cat(each) if len(each) > 1 else each[0].contiguous()
            for each in zip(*((o, lse) for _, o, lse in self._waiting), strict=True)
        )
        merged = merge_results if o.device.type == "cuda" else _merged_by_torch
        self._waiting = [(every, *merged(o, lse, there(place)))]
        self._count[:] = 1


def _merged_by_torch(
    o: torch.Tensor, lse: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """`merge_results` on any device."""
    # the last is a part without rows, for pairs that have fewer than others
    o = torch.cat([o, o.new_zeros((1, *o.shape[1:]))])[place]
    lse = torch.cat([lse, lse.new_full((1, lse.shape[1]), -torch.inf)])[place]
    whole = torch.logsumexp(lse, dim=0)
    weights = torch.exp(lse - torch.where(whole == -torch.inf, 0.0, whole))
    return (weights[..., None] * o).sum(dim=0), whole
