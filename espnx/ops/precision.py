"""float32 that stays float32: what a program allows for its own matrix products does not hold for
ours."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

_lock = threading.Lock()
_users = 0
_before: tuple[Any, ...] = ()


def _after_fork() -> None:
    """Forgets threads in a child: those of the parent that were within would stay within for good,
    and one may have had the lock."""
    global _lock, _users
    _lock, users, _users = threading.Lock(), _users, 0
    if users:
        _restore(*_before)


os.register_at_fork(after_in_child=_after_fork)


@contextmanager
def whole_float32() -> Iterator[None]:
    """Keeps float32 matrix products of this process from being rounded to TF32 or bfloat16 as long
    as it is open, whatever `torch.set_float32_matmul_precision` or `torch.backends` allow; then
    what was set before holds again.

    torch keeps one setting for all threads: the first to come sets it, the last to go restores it.
    Products of other threads are meanwhile as exact as ours.
    """
    global _users, _before
    with _lock:
        if _users == 0:
            _before = _settings()
            torch.set_float32_matmul_precision("highest")
        _users += 1
    try:
        yield
    finally:
        with _lock:
            _users = max(0, _users - 1)  # of a child that was forked within there are none
            if _users == 0:
                _restore(*_before)


def _settings() -> tuple[Any, ...]:
    try:
        whole = torch.get_float32_matmul_precision()
    except RuntimeError:
        # the program has set the backends one by one, and torch has no word for both
        whole = None
    return (
        whole,
        torch.backends.cuda.matmul.fp32_precision,
        torch.backends.mkldnn.matmul.fp32_precision,
    )


def _restore(whole: str | None, cuda: str, mkldnn: str) -> None:
    if whole is not None:
        torch.set_float32_matmul_precision(whole)
    torch.backends.cuda.matmul.fp32_precision = cuda
    torch.backends.mkldnn.matmul.fp32_precision = mkldnn
