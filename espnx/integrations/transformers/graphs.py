"""What is no part of a compiled graph: whatever reads storage, asks how much is stored, or looks at
the values of a mask.

A file of its own, so that attention, masks, caches and hooks say the same thing to `torch.compile`,
and say why.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch

F = TypeVar("F", bound=Callable[..., Any])

_WHY = (
    "attention over rows on SSD is no part of a graph: compile an espnx-enabled model with "
    "fullgraph=False (the default). What lies between its attentions is compiled."
)


def outside_graphs(function: F) -> F:
    """The function, which `torch.compile` calls between two graphs and never traces; with
    ``fullgraph=True`` it raises, and says why."""
    return cast(F, torch.compiler.disable(function, reason=_WHY))
