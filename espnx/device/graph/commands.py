"""The calls of a part that walks over a graph, as commands."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..vectors.interface import Round, SearchCommand, SearchTicket


class GraphCalls:
    """See `espnx.device.vectors.interface.GraphDevice`."""

    if TYPE_CHECKING:
        submit: Callable[..., Any]

    def search(
        self, query: torch.Tensor, L: int, k: int, *, beam: int = 4, deadline_s: float = 30.0,
        watch: Callable[[Round], None] | None = None,
    ) -> SearchTicket:  # fmt: skip
        """See `GraphDevice`."""
        found: SearchTicket = self.submit(SearchCommand(query, L, k, beam, deadline_s), watch)
        return found
