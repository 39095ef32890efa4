"""Tensors that ``torch.save`` wrote, read without running what a pickle may ask for."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import torch

from ..errors import FormatError


def load_torch(path: Path) -> Any:
    """What ``torch.save`` wrote to `path`: tensors, mapped from the file and read when they are
    used, and containers of them.

    Only tensors, numbers, strings and plain containers are accepted (``weights_only``); anything
    else in the file is an error.

    Raises:
        FormatError: the file is damaged, is of the format before torch 1.6, or holds something
            else.
    """
    with path.open("rb"):  # a missing or unreadable file is the caller's to explain, by OSError
        pass
    if not zipfile.is_zipfile(path):
        raise FormatError(
            "read tensors",
            path=path,
            got="no archive, or a cut one",
            expected="a whole file that torch.save wrote (torch 1.6 or later)",
        )
    try:
        return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except Exception as error:
        # pickle.UnpicklingError, RuntimeError, KeyError, EOFError, ValueError, ...: whatever the
        # bytes provoke
        raise FormatError(
            "read tensors",
            path=path,
            got=_reason(error),
            expected="tensors that torch.save wrote, and nothing else",
        ) from error


def _reason(error: Exception) -> str:
    """One line; of torch's advice on refused files, which is to run what is in them, the part that
    says what was refused."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [
        type(error).__name__
    ]
    return next(
        (
            line.partition(". Please use")[0]
            for line in lines
            if line.startswith("WeightsUnpickler error")
        ),
        lines[0],
    )
