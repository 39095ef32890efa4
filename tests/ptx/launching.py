"""Triton's kernels as their launchers call them, compiled for sm_90 and executed here.

``kernel[grid](...)`` compiles for the arguments as Triton does for those of a launch, and runs the
PTX on the tensors in place. So what is tested begins with the op's own Python.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.compiler import ASTSource

from tests.ptx.global_memory import GlobalMemory
from tests.ptx.running import Executable

TARGET = GPUTarget("cuda", 90, 32)
TYPES = {torch.float32: "*fp32", torch.uint8: "*u8", torch.int32: "*i32", torch.int64: "*i64"}
OPTIONS = ("enable_fp_fusion", "maxnreg", "num_stages", "num_warps")
#: Makes what is kept here another kernel than one that has been compiled to its end.
PTX_ALONE = {"ptx_options": "none"}


@functools.cache
def compiled(
    kernel: Any,
    signature: tuple[tuple[str, str], ...],
    aligned: tuple[int, ...],
    constants: tuple[tuple[str, Any], ...],
    options: tuple[tuple[str, Any], ...],
) -> tuple[str, int]:
    """The PTX, and the bytes of shared memory that a block takes."""
    source = ASTSource(
        fn=kernel,
        signature=dict(signature),
        constexprs=dict(constants),
        attrs={(i,): [["tt.divisibility", 16]] for i in aligned},
    )
    # machine code is half of the time, and not looked at
    with patch.object(CUDABackend, "make_cubin", lambda *args: b"none"):
        found = triton.compile(source, target=TARGET, options=dict(options) | PTX_ALONE)
    return found.asm["ptx"], found.metadata.shared


@functools.cache
def executable(ptx: str, shared_bytes: int) -> Executable:
    return Executable(ptx, shared_bytes)


class Launched:
    """A kernel that runs here.

    Args:
        kernel: as `triton.jit` makes it.
        change: what is done to a line of the PTX before it runs, as a test of the tests.
    """

    def __init__(self, kernel: Any, change: Any = None):
        self.kernel, self.change = kernel, change
        self.n_steps = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        x, y, z = (*grid, 1, 1)[:3]
        return functools.partial(self._launch, (x, y, z))

    def _launch(self, grid: tuple[int, int, int], *args: Any, **named: Any) -> None:
        options = {name: named.pop(name) for name in OPTIONS if name in named}
        values = dict(zip(self.kernel.arg_names, args, strict=False)) | named
        signature = {
            name: TYPES[value.dtype] if isinstance(value, torch.Tensor) else "i32"
            for name, value in values.items()
            if name not in named
        } | dict.fromkeys(named, "constexpr")
        # an argument that may be compiled for its value is none of these kernels'
        assert set(signature) - set(named) <= {
            each.name for each in self.kernel.params if each.do_not_specialize
        } | {name for name, value in values.items() if isinstance(value, torch.Tensor)}
        aligned = tuple(
            i
            for i, param in enumerate(self.kernel.params)
            if isinstance(value := values[param.name], torch.Tensor)
            and value.data_ptr() % 16 == 0
            and not param.do_not_specialize_on_alignment
        )
        ptx, shared_bytes = compiled(
            self.kernel,
            tuple((name, signature[name]) for name in self.kernel.arg_names),
            aligned,
            tuple(sorted(named.items())),
            tuple(sorted(options.items())),
        )
        program = executable(ptx, shared_bytes)
        if self.change is not None:
            program = program.like(ptx, self.change(ptx))
        self._run(
            program, grid, [values[name] for name, _ in signature.items() if name not in named]
        )

    def _run(self, program: Executable, grid: tuple[int, int, int], args: list[Any]) -> None:
        memory = GlobalMemory()
        outputs = stored_parameters(self.kernel)
        parameters: dict[str, np.ndarray] = {
            # of Triton's own: memory that these kernels do not ask for
            name: np.array(0, dtype=np.uint64)
            for name in program.program.parameters
        }
        names = self.kernel.arg_names[: len(args)]
        for parameter, name, value in zip(program.program.parameters, names, args, strict=False):
            if isinstance(value, torch.Tensor):
                assert value.is_contiguous()
                data = value.view(torch.uint8).reshape(-1).numpy()
                base = memory.add(name, data, is_output=name in outputs)
                parameters[parameter] = np.array(base, dtype=np.uint64)
            else:
                parameters[parameter] = np.array(value, dtype=np.int32).view(np.uint32)
        self.n_steps += program.run(grid, parameters, memory)


def stored_parameters(kernel: Any) -> set[str]:
    """Those of a kernel's tensors that it writes."""
    names = set(kernel.arg_names)
    whole = {"whole_o_ptr", "whole_lse_ptr"} & names
    return whole or {"score_ptr", "crc_ptr", "o_ptr", "lse_ptr"} & names


def module_of(launched: Sequence[Launched]) -> types.SimpleNamespace:
    """What stands in for the modules that an op's launcher asks for its kernels."""
    return types.SimpleNamespace(**{each.kernel.__name__: each for each in launched})
