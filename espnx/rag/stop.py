"""When an answer is given up: its deadline has passed, or nobody waits for it any more. A file of
its own: what retrieves and what generates share it."""

from __future__ import annotations

import threading
import time

import torch

from .. import errors


class Stop:
    """Asked between steps; `generate` of transformers asks after each token (a stopping criterion).

    Args:
        deadline_s: seconds from now; None: none.
    """

    def __init__(self, deadline_s: float | None = None):
        self._given_s = deadline_s
        self._at = None if deadline_s is None else time.monotonic() + deadline_s
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        """Nobody waits for the answer any more."""
        self._cancelled.set()

    @property
    def is_over(self) -> bool:
        return self._cancelled.is_set() or self.left_s(1.0) <= 0

    def left_s(self, most: float) -> float:
        """Seconds that are left, at most so many."""
        return most if self._at is None else min(most, self._at - time.monotonic())

    def check(self) -> None:
        """Raises TransferCancelledError or DeadlineExceededError where it is over."""
        if self._cancelled.is_set():
            raise errors.TransferCancelledError("the answer was called off")
        if self.left_s(1.0) <= 0:
            raise errors.DeadlineExceededError(
                "no answer yet",
                got=f"{self._given_s} s",
                expected="an answer within deadline_s",
                fix="a longer deadline_s, fewer passages, or fewer max_new_tokens",
            )

    def take(self, lock: threading.Lock) -> None:
        """Takes a lock, unless it is over first. Raises what `check` raises."""
        while not lock.acquire(timeout=max(0.0, self.left_s(0.05))):
            self.check()

    def __call__(self, input_ids: torch.Tensor, scores: object, **_: object) -> torch.Tensor:
        """bool [sequences]: for `generate`."""
        return torch.full((len(input_ids),), self.is_over, device=input_ids.device)
