"""Loads the compiled extension, and registers the ops, once, on first use."""

from __future__ import annotations

import contextlib
import functools
import importlib
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, cast

import torch
from torch.autograd import profiler

from ..compiled import load_compiled
from ..errors import MissingDependencyError

# names that torch does not promise: without one of them nobody can tell who looks on, and every
# call goes by the dispatcher
try:
    from torch._C import _get_tracing_state, _len_torch_dispatch_stack, _len_torch_function_stack
    from torch._C._functorch import maybe_current_level

    _CAN_TELL = hasattr(profiler, "_is_profiler_enabled")
except ImportError:
    _CAN_TELL = False

if TYPE_CHECKING:
    from .._C import Extension

_HERE: AbstractContextManager[object] = contextlib.nullcontext()
_BUILD = "run `make setup` (or `pip install -e .`) in the source tree"
# And the functions that the CPU versions call.
_OPS = {
    "maxsim": "maxsim",
    "crc32c": "crc32c_ranges",
    "gather": "gather",
    "attention": "attention",
    "accelerator": "accelerator",
    "distances": "distances",
    "postings": "scan_postings",
}


@functools.cache
def load_extension() -> Extension:
    """The compiled extension.

    Raises:
        MissingDependencyError: it is not built, or is older than this Python code.
    """
    extension = cast("Extension", load_compiled())
    for name in _OPS.values():
        if not hasattr(extension, name):
            raise MissingDependencyError(
                f"espnx's compiled part has no {name}",
                expected="one built from the same source as the package",
                fix=_BUILD,
            )
    return extension


@functools.cache
def load_ops() -> None:
    """Makes ``torch.ops.espnx.*`` callable on the CPU, and on CUDA where Triton is installed.
    Raises as `load_extension`."""
    load_extension()
    for op in _OPS:
        # Triton itself is imported at the first launch
        importlib.import_module(f"espnx.ops.{op}.dispatch")


def is_direct(*tensors: torch.Tensor, on: str = "cpu") -> bool:
    """Whether an op's version for ``cpu`` or ``cuda`` may be called past torch's dispatcher, which
    takes 7 us on its way to Python: the tensors are there, and nobody looks on who traces or times
    calls, records gradients or stands in for tensors."""
    if (
        not _CAN_TELL
        or torch.compiler.is_compiling()
        or _len_torch_dispatch_stack()
        or _len_torch_function_stack()
        or maybe_current_level() is not None
        or _get_tracing_state() is not None
        or profiler._is_profiler_enabled
    ):
        return False
    for each in tensors:
        if type(each) is not torch.Tensor or each.device.type != on or each.requires_grad:
            return False
        if each.is_neg():  # whose memory holds other numbers than it says
            return False
    return True


def on_current(device: torch.device) -> AbstractContextManager[object]:
    """Makes a CUDA device the thread's current one, on which kernels are launched; nothing happens
    where it is that already, or is no CUDA device."""
    if device.type != "cuda" or device.index == torch.cuda.current_device():
        return _HERE
    return torch.cuda.device(device)


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
            fix="pip install 'espnx[gpu]' (a CUDA build of torch brings the right version)",
        ) from error
