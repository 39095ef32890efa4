"""The forward passes that a cache takes part in: one at a time, whose turn it is, how long they
take; and what undoes one that failed."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from .... import errors


@dataclass
class ForwardPass:
    """A pass, and what the cache was when it began.

    Attributes:
        model: the outermost that was called with the cache.
        held: tokens in the cache.
        hidden: which of them are padding, bool [sequences, held]; None: none is.
        in_memory: the state of each layer that is kept in memory (`LayersInMemory.states`).
        reached: a layer has been given K and V.
        thread: that runs it.
    """

    model: torch.nn.Module
    held: int
    hidden: torch.Tensor | None
    in_memory: list[dict[str, Any]]
    reached: bool = False
    thread: int = field(default_factory=threading.get_ident)

    def check_thread(self) -> None:
        """Raises StateError in another thread than the one that runs it."""
        if self.thread != threading.get_ident() and any(
            each.ident == self.thread for each in threading.enumerate()
        ):
            raise errors.StateError(
                "a cache in two threads at once",
                got="a forward pass of another thread under way",
                expected="one after the other",
                fix="a cache for each thread",
            )


class PassGuard:
    """Lets one forward pass at a time into a cache. One that an error ended is taken out of the
    cache before anything else happens to it.

    Attributes:
        lock: to be held while a pass begins or is undone.
        times: of the passes so far.
    """

    def __init__(self) -> None:
        self._under_way: ForwardPass | None = None
        self.lock, self.times = threading.RLock(), PassTimes()

    @property
    def held(self) -> int | None:
        """Tokens in the cache when the pass under way began; None: none is under way."""
        return None if self._under_way is None else self._under_way.held

    def is_inside(self, model: torch.nn.Module) -> bool:
        """Whether the pass under way was begun for a model around this one. Raises StateError in
        another thread."""
        under_way = self._under_way
        if under_way is None or under_way.reached or under_way.model is model:
            return False
        under_way.check_thread()
        return True

    def begin(self, new: ForwardPass, ids: torch.Tensor | None, *, is_step: bool | None) -> None:
        """A pass begins, over these tokens (None: not known); a decoding step, or a part of the
        prompt (None: neither counts). The one before must have ended."""
        if is_step is not None:
            self.times.begin(ids, is_first=new.held == 0, is_step=is_step)
        self._under_way = new

    def reach(self) -> None:
        """A layer is given K and V. Raises StateError outside of a pass."""
        if self._under_way is None:
            raise errors.StateError(
                "a cache on SSD",
                got="a model that is not enabled",
                fix="espnx.enable_kv_cache(model)",
            )
        self._under_way.reached = True

    def is_of(self, model: torch.nn.Module) -> bool:
        """Whether the pass under way is this model's, and this thread's: where models are inside
        one another, the outermost one's."""
        return (
            self._under_way is not None
            and self._under_way.model is model
            and self._under_way.thread == threading.get_ident()
        )

    def end(self) -> None:
        """The model has returned."""
        self.times.end()
        self._under_way = None

    def abort(self) -> ForwardPass | None:
        """Ends the pass under way, if there is one, and returns it, to be undone. Raises StateError
        while another thread runs it."""
        if self._under_way is not None:
            self._under_way.check_thread()
        under_way, self._under_way = self._under_way, None
        return under_way


@dataclass
class Spent:
    """What the passes of one kind took: prefill, or decoding steps."""

    tokens: int = 0
    seconds: float = 0.0
    passes: int = 0


class PassTimes:
    """A pass lasts until the next one begins, so that the rest of `generate` counts too; the last
    one until its model returns."""

    def __init__(self) -> None:
        self._spent = {False: Spent(), True: Spent()}  # is it a decoding step?
        self._last: tuple[bool, int, float] | None = None  # is it a step, its tokens, when it began
        self._ended: float | None = None

    def begin(self, ids: torch.Tensor | None, *, is_first: bool, is_step: bool) -> None:
        """A pass over these tokens begins. `is_first`: into an empty cache; what came before led to
        nothing that is still there. `is_step`: of decoding."""
        now = time.perf_counter()
        if not is_first:
            self._spent = self._counted(now)
        self._ended = None
        self._last = None if ids is None else (is_step, ids.numel(), now)

    def accept(self, tokens: int) -> None:
        """Keeps so many of the last pass's tokens."""
        if self._last is not None:
            self._last = self._last[0], tokens, self._last[2]

    def end(self) -> None:
        """The model has returned."""
        self._ended = time.perf_counter()

    def _counted(self, until: float) -> dict[bool, Spent]:
        found = {kind: replace(spent) for kind, spent in self._spent.items()}
        if self._last is not None:
            is_step, tokens, begun = self._last
            spent = found[is_step]
            found[is_step] = Spent(
                spent.tokens + tokens, spent.seconds + until - begun, spent.passes + 1
            )
        return found

    def totals(self) -> dict[str, Any]:
        """Tokens and seconds of either kind, and the mean time of a decoding step (None: there was
        none)."""
        spent = self._spent if self._ended is None else self._counted(self._ended)
        prefill, decode = spent[False], spent[True]
        return {
            "prefill_tokens": prefill.tokens,
            "prefill_s": prefill.seconds,
            "decode_tokens": decode.tokens,
            "decode_s": decode.seconds,
            "step_s": decode.seconds / decode.passes if decode.passes else None,
        }
