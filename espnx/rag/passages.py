"""What is asked of a library of passages. Nothing here imports a framework: it is anything with
`compose`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint
from typing import Any, Protocol

import torch

from .. import errors

# The library of passages lies in a room that imports transformers; it is looked up when wanted.
_ROOM = "espnx.integrations.transformers"
PASSAGE_KV = EntryPoint("passages", f"{_ROOM}.passages.passage_kv:PassageKV", "espnx")
FINGERPRINT = EntryPoint("models", f"{_ROOM}.identity.fingerprint:fingerprint", "espnx")


class ComposedCache(Protocol):
    """`past_key_values` that begin with passages."""

    @property
    def reused(self) -> Mapping[str, Any]:
        """What the rows came from."""
        ...

    def prompt(self, input_ids: torch.Tensor) -> Mapping[str, torch.Tensor]:
        """Arguments of `generate` for what follows, int64 [1, n]."""
        ...

    def passage_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """float32 [1, layers, passages]: the share of attention that tokens behind the passages
        paid to each, the mean over heads."""
        ...

    def watch_heads(self, heads: Sequence[tuple[int, int]] | None = None) -> None:
        """Keeps the attention of these heads, (layer, head), by themselves; None: of all, layer by
        layer. Raises InvalidInputError for one that the model does not have."""
        ...

    def head_mass(self, begin: int = 0, end: int | None = None) -> torch.Tensor:
        """float32 [1, heads, tokens, passages]: the same share by head and token."""
        ...

    def close(self) -> None: ...


class PassageLibrary(Protocol):
    """What keeps the K and V of passages behind one prefix. It may have `prefetch`, as `PassageKV`
    has it: `compose` is then given what that returned; and `compose` may take `repair`, `blend` and
    `check`, as there."""

    def compose(self, passages: Sequence[Sequence[int]], /) -> ComposedCache:
        """A cache that begins with the prefix and the passages, given as token ids."""
        ...


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether a function has an argument of this name."""
    return name in inspect.signature(function).parameters


def loaded(entry: EntryPoint) -> Any:
    """What lies in a room that imports transformers. Raises MissingDependencyError."""
    try:
        return entry.load()
    except ModuleNotFoundError as error:
        raise errors.MissingDependencyError(
            "Rag: kv", got=str(error), expected="PassageKV", fix="pip install 'espnx[kv]'"
        ) from error
