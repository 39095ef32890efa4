"""A forward pass that a cache takes part in: what it was before, and whose turn it is."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .. import errors


@dataclass
class ForwardPass:
    """Under way from `begin_pass` to `end_pass`; one that an error ended is taken out of the cache before anything else happens to it.

    Attributes:
        model: the outermost that was called with the cache.
        held: tokens in the cache when it began.
        hidden: of the masks, then.
        before: what each layer in memory was.
        reached: a layer has been given K and V.
        thread: that runs it.
    """

    model: torch.nn.Module
    held: int
    hidden: torch.Tensor | None
    before: list[dict[str, Any]]
    reached: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def check_thread(self) -> None:
        """Raises InvalidInputError in another thread than the one that runs it."""
        if self.thread != threading.get_ident() and any(each.ident == self.thread for each in threading.enumerate()):
            raise errors.InvalidInputError(
                "a cache in two threads at once", got="a forward pass of another thread under way", expected="one after the other",
                fix="a cache for each thread",
            )  # fmt: skip


def states_of(layers: Sequence[Any]) -> list[dict[str, Any]]:
    """What `restore` needs. An update makes new tensors of rows that grow; states, which it changes in place, stand in dicts of theirs."""
    return [{name: _copied(value) if isinstance(value, dict) else value for name, value in vars(layer).items()} for layer in layers]


def _copied(states: dict[Any, Any]) -> dict[Any, Any]:
    return {key: value.detach().clone() if isinstance(value, torch.Tensor) else value for key, value in states.items()}


def restore(layers: Sequence[Any], before: Sequence[dict[str, Any]]) -> None:
    """Layers in memory become what they were."""
    for layer, then in zip(layers, before, strict=True):
        vars(layer).clear()
        vars(layer).update(then)


class InferenceOnly(torch.autograd.Function):
    """What attention over stored rows returns: they keep no graph, and a backward pass that met them would lose gradients silently."""

    @staticmethod
    def forward(ctx: Any, o: torch.Tensor, query: torch.Tensor) -> torch.Tensor:
        return o.view_as(o)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        raise errors.InvalidInputError("a backward pass through a cache on SSD", got="gradients", expected="inference", fix="no cache")
