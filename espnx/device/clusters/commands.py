"""What a part that keeps clusters is asked for."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, ClassVar

import numpy as np
import torch

from ...ops.distances.checks import query_dtype
from ...storage.parse import Fields
from ..command import Command
from ..vectors.interface import Clusters, query_said


@dataclass(frozen=True, eq=False)
class DistancesCommand(Command):
    """The distances of a query to all vectors of some clusters: a `DistanceCommand` for each that
    is not empty.

    Attributes: see `ClusterDevice.distances`.
    """

    verb: ClassVar[str] = "distances"
    query: torch.Tensor
    clusters: Sequence[int] | np.ndarray
    _: KW_ONLY
    metric: str = "l2"
    deadline_s: float = 30.0

    def values(self, found: np.ndarray) -> np.ndarray:
        """See `Command`."""
        distances: np.ndarray = found["distance"]
        return distances

    def begin_line(self, stored: Clusters, memo: dict[Any, Any]) -> dict[str, Any]:
        """See `Command`."""
        wanted = np.asarray(self.clusters, dtype=np.int64)
        vectors = np.asarray(stored.n_vectors)[wanted]
        return {
            "bytes": int(stored.new_pages(wanted).sum()) * stored.page_bytes,
            "clusters": wanted.tolist(),
            "vectors": int(vectors.sum()),
            "metric": self.metric,
            "payload": base64.b64encode(self.query.numpy().tobytes()).decode(),
        }

    @classmethod
    def of_line(cls, said: Fields, stored: Clusters, memo: dict[Any, Any]) -> DistancesCommand:
        """See `Command`. A line without a query is measured against zeros, which takes as long."""
        format, dim = stored.format, stored.dim  # noqa: A001
        query = (
            query_said(said, format, dim)
            if "payload" in said
            else torch.zeros(dim, dtype=query_dtype(format))
        )
        wanted = said.wholes("clusters", most=len(stored.n_vectors) - 1, count=1 << 24)
        return cls(query, wanted, metric=said.text("metric") if "metric" in said else "l2")
