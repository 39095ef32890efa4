"""How vectors of lists are stored, and in which space their heads are.

Heads are chosen, and found, by squared distance. By ``cosine`` vectors have length 1; by ``ip`` all
get one dimension more, in which they have one length, so that the nearest has the largest product
(`espnx.graph.options.measured_rows`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from .. import errors
from ..device.clusters.layout import FORMATS, entry_dtype
from ..graph.options import measured_rows, stored_rows
from ..graph.search.asked import checked_values
from ..graph.vectors import Vectors

#: Shares of the largest value that 127 steps may reach: where a few values are large, the others
#: are rounded less if these are cut.
_SHARES = np.geomspace(1.0, 0.01, 40)
#: Of the vectors, those that may be cut whatever they lose.
_OUTLIERS = 0.001
_SAMPLED = 16_384
_STEPS = 127


@dataclass(frozen=True, eq=False)
class Asked:
    """Queries.

    Attributes:
        native: [q, dim], as a device takes them. wide: float32 [q, head_dim], in the space of
            heads.
        worth, shift: float32 [q]: a device's distance times the one and plus the other is that of
            what stored vectors stand for.
    """

    native: torch.Tensor
    wide: np.ndarray
    worth: np.ndarray
    shift: np.ndarray


@dataclass(frozen=True, eq=False)
class ListCoding:
    """Attributes:
    format: of stored vectors, of `FORMATS`. dim: values of each. metric: of the index.
    most_squares: by ``ip``: the largest squared length of all vectors.
    step: where values are rounded (scalar quantisation): what a step is worth, else 0.
    centre: float32 [dim]: then what is taken off each value before.
    """

    format: str
    dim: int
    metric: str
    most_squares: float = 0.0
    step: float = 0.0
    centre: np.ndarray | None = None

    @property
    def head_dim(self) -> int:
        """Values of a head."""
        return self.dim + (self.metric == "ip")

    @property
    def entry(self) -> np.dtype:
        """See `entry_dtype`."""
        return entry_dtype(self.format, self.dim)

    @property
    def device_metric(self) -> str:
        """What a device measures by."""
        return "ip" if self.metric == "ip" else "l2"

    def _from_centre(self, values: np.ndarray) -> np.ndarray:
        return values if self.centre is None else values - self.centre

    def stored(self, rows: np.ndarray) -> np.ndarray:
        """Vectors as they lie in lists, of those that `checked_blocks` gives."""
        if not self.step:
            return rows.astype(FORMATS[self.format])
        steps = np.rint(self._from_centre(rows) / np.float32(self.step))
        return np.clip(steps, -_STEPS, _STEPS).astype(np.int8)

    def restored(self, stored: np.ndarray) -> np.ndarray:
        """float32: what stored vectors stand for."""
        values = stored.astype(np.float32)
        if self.step:
            values *= np.float32(self.step)
            if self.centre is not None:
                values += self.centre
        return values

    def wide(self, rows: np.ndarray) -> np.ndarray:
        """float32 [m, head_dim]: vectors in the space of heads."""
        found, _ = measured_rows(rows, self.metric, self.format, self.most_squares)
        return np.ascontiguousarray(found, np.float32)

    def queries(self, given: Any) -> Asked:
        """Queries, checked. Raises InvalidInputError."""
        format = "fp32" if self.step else self.format  # noqa: A001
        native, wide = checked_values(given, self.dim, format, self.metric)
        values = wide.numpy()
        worth, shift = np.ones(len(values), np.float32), np.zeros(len(values), np.float32)
        if self.step:
            step = np.full(len(values), self.step)
            if self.metric == "ip":
                largest = np.abs(values).max(axis=1, initial=0) / _STEPS
                own = np.where(largest > 0, largest, 1.0)
                steps, worth = values / own[:, None], (own * step).astype(np.float32)
                if self.centre is not None:  # of which all vectors' products have a share
                    shift = -(values.astype(np.float64) @ self.centre).astype(np.float32)
            else:
                steps = self._from_centre(values) / np.float32(self.step)
                worth = np.square(step).astype(np.float32)
            rounded = np.clip(np.rint(steps), -_STEPS - 1, _STEPS).astype(np.int8)
            native = torch.from_numpy(np.ascontiguousarray(rounded))
        elif self.format == "int8":
            native = native.view(torch.int8)
        if self.metric == "ip":
            values = np.concatenate([values, np.zeros((len(values), 1), np.float32)], axis=1)
        return Asked(native, np.ascontiguousarray(values), worth, shift)


def checked_blocks(source: Vectors, coding: ListCoding) -> Iterator[tuple[int, np.ndarray]]:
    """(number of the first, vectors as the metric has them: whole numbers, or float32), block by
    block. Raises InvalidInputError for a vector that cannot be stored, FormatError for more or
    fewer vectors than the source said."""
    format = "fp32" if coding.step else coding.format  # noqa: A001
    done = 0
    for block in source.blocks():
        yield done, stored_rows(block, done, coding.metric, format)
        done += len(block)
    if done != source.n:
        raise errors.FormatError(source.name, got=f"{done} vectors", expected=source.n)


def grid_of(sample: np.ndarray, least: np.ndarray, most: np.ndarray) -> tuple[float, np.ndarray]:
    """(what a step of rounded values is worth; what is taken off each before, float32 [dim]).

    Args:
        sample: float32 [m, dim], of the vectors.
        least, most: float32 [dim]: of all values.
    """
    count, dim = sample.shape
    middle = sample.mean(axis=0, dtype=np.float64) if count else np.zeros(dim)
    centre = middle.astype(np.float32)
    largest = np.maximum(most - centre, centre - least) if count else least[:0]
    return step_of(sample, largest, centre), centre


def step_of(sample: np.ndarray, largest: np.ndarray, centre: np.ndarray | None) -> float:
    """What a step of rounded values is worth: of some shares of the largest value the one that
    rounds the sample, float32 [m, dim], least, but for a few vectors far out.

    Args:
        largest: of the values' distances from the centre.
    """
    if len(sample) > _SAMPLED:
        sample = sample[:: len(sample) // _SAMPLED]
    values = sample if centre is None else sample - centre
    most = float(largest.max(initial=0))
    if not most:
        return 1.0
    kept = max(1, len(sample) - math.ceil(_OUTLIERS * len(sample)))
    losses = []
    for share in _SHARES:
        step = np.float32(most * share / _STEPS)
        rounded = np.clip(np.rint(values / step), -_STEPS, _STEPS) * step
        loss = np.square(values - rounded).sum(axis=1, dtype=np.float64)
        losses.append(float(np.partition(loss, kept - 1)[:kept].mean()))
    return most * float(_SHARES[int(np.argmin(losses))]) / _STEPS
