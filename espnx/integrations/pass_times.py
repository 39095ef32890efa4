"""How long forward passes take, prefill and decode apart."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch


@dataclass
class Spent:
    """Of passes of one kind."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0


class PassTimes:
    """A pass lasts until the next one begins, so that sampling and the rest of `generate` count too; the last one until its model returns.

    Attributes:
        begun: whether there was a pass.
    """

    def __init__(self) -> None:
        self.begun = False
        self._spent = {False: Spent(), True: Spent()}  # is it a decoding step?
        self._last: tuple[bool, int, float] | None = None  # is it a step, its tokens, when it began
        self._ended: float | None = None

    def begin(self, ids: torch.Tensor | None, *, is_first: bool) -> None:
        """A pass over these tokens begins. `is_first`: into an empty cache; what came before led to nothing that is still there."""
        now = time.perf_counter()
        if not is_first:
            self._spent = self._counted(now)
        self.begun, self._ended = True, None
        self._last = None if ids is None else (ids.shape[1] == 1 and not is_first, ids.numel(), now)

    def end(self) -> None:
        """The model has returned."""
        self._ended = time.perf_counter()

    def _counted(self, until: float) -> dict[bool, Spent]:
        found = {kind: replace(spent) for kind, spent in self._spent.items()}
        if self._last is not None:
            is_step, tokens, begun = self._last
            spent = found[is_step]
            found[is_step] = Spent(spent.tokens + tokens, spent.seconds + until - begun, spent.passes + 1)
        return found

    def totals(self) -> dict[str, Any]:
        """Tokens and seconds of either kind, and the mean time of a decoding step (None: there was none)."""
        spent = self._spent if self._ended is None else self._counted(self._ended)
        prefill, decode = spent[False], spent[True]
        return {
            "prefill_tokens": prefill.tokens, "prefill_s": prefill.seconds, "decode_tokens": decode.tokens, "decode_s": decode.seconds,
            "step_s": decode.seconds / decode.passes if decode.passes else None,
        }  # fmt: skip
