"""Rows of fp32 by which tensor cores that take parts of fp16 are off the most."""

from __future__ import annotations

import torch


def lost_rows(d: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A query ``[1, d]`` and rows ``[d, d]``, one for each place of the large value.

    Beside its product each other one is just less than the last bit of an fp32 number, where tensor
    cores cut off what they add. Of the large value and the query's, two parts of fp16 miss as much
    as they can, and the product of both second parts is nearly as large as it can be; all are
    missing from the same side.
    """
    large = 1 + 4093 * 2.0**-23
    rows = torch.full((d, d), (1 - 2.0**-10) * 2.0**-23)
    return torch.full((1, d), large), rows.fill_diagonal_(large)
