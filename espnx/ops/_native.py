"""Loads the compiled extension, which registers the ops, once, on first use."""

from __future__ import annotations

import functools
import importlib
from typing import Any

import torch

from ..errors import MissingDependencyError

_BUILD = "run `make setup` (or `pip install --no-build-isolation -e .`) in the source tree"


@functools.cache
def load_ops() -> None:
    """Makes ``torch.ops.espnx.*`` callable on the CPU, and on CUDA where Triton is installed.

    Raises:
        MissingDependencyError: the extension is not built, or is older than this Python code.
    """
    try:
        importlib.import_module("espnx._C")
    except ImportError as error:
        raise MissingDependencyError("espnx's compiled ops cannot be loaded", got=str(error), fix=_BUILD) from error
    for op in ("maxsim", "crc32c", "attention"):
        if not hasattr(torch.ops.espnx, op):
            raise MissingDependencyError(
                f"espnx's compiled extension has no op {op}", expected="an extension built from the same source as the package", fix=_BUILD
            )
        # Only now, since there must be an op to register with. Triton itself is imported at the first launch.
        importlib.import_module(f"espnx.ops.{op}.dispatch")


@functools.cache
def load_extension() -> Any:
    """The compiled extension itself, for what is no torch op. Raises as `load_ops`."""
    load_ops()
    return importlib.import_module("espnx._C")


def load_kernel(name: str) -> object:
    """The module ``espnx.kernels.<name>``.

    Raises:
        MissingDependencyError: Triton is not installed.
    """
    try:
        return importlib.import_module(f"espnx.kernels.{name}")
    except ImportError as error:
        raise MissingDependencyError(
            f"the CUDA version of {name} needs Triton",
            got=str(error),
            fix="pip install triton (a CUDA build of torch brings the right version)",
        ) from error
