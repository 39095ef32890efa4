"""Of which alignments of tensors Triton compiles kernels once more: of those of rows and queries,
which are loaded 16 bytes at a time, and not of those of tables, which begin anywhere."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.compiler import CUDABackend
from triton.runtime.jit import create_function_from_signature

from espnx.kernels.attention import attention_kernel
from espnx.kernels.attention_merge import merge_kernel
from espnx.kernels.crc32c import crc32c_kernel
from espnx.kernels.int8_attention import int8_attention_kernel
from espnx.kernels.maxsim import maxsim_kernel
from espnx.kernels.turned_attention import turned_attention_kernel
from espnx.kernels.wide_attention import wide_attention_kernel
from tests.kernels.variants import POINTERS

DTYPES = {"*fp32": torch.float32, "*u8": torch.uint8, "*i64": torch.int64, "*i32": torch.int32}
ATTENTION_TABLES = {
    "block_offset_bytes_ptr",
    "n_rows_ptr",
    "visible_ptr",
    "last_position_ptr",
    "position_ptr",
    "slope_ptr",
}
TABLES = {
    attention_kernel: ATTENTION_TABLES,
    wide_attention_kernel: ATTENTION_TABLES,
    int8_attention_kernel: ATTENTION_TABLES,
    turned_attention_kernel: ATTENTION_TABLES,
    merge_kernel: {"place_ptr"},
    maxsim_kernel: {"offset_bytes_ptr", "n_tokens_ptr"},
    crc32c_kernel: {"offset_bytes_ptr", "size_bytes_ptr"},
}


def variant(kernel: Any, far: set[str]) -> str:
    """What Triton tells variants apart by, with tensors 8 bytes after a multiple of 16 (``far``)
    and the others at one."""
    backend = CUDABackend(GPUTarget("cuda", 90, 32))
    asked = create_function_from_signature(kernel.signature, kernel.params, backend)
    memory = torch.zeros(64, dtype=torch.uint8)
    memory = memory[-memory.data_ptr() % 16 :]
    given = {
        name: memory[8 if name in far else 0 :][:16].view(DTYPES[POINTERS[name]])
        if name in POINTERS
        else 7
        for name in kernel.arg_names
    }
    return str(asked(**given)[1])


@pytest.mark.parametrize("kernel", TABLES, ids=lambda kernel: kernel.__name__)
def test_tables_make_no_variants(kernel: Any) -> None:
    pointers, tables = POINTERS.keys() & set(kernel.arg_names), TABLES[kernel]
    plain = variant(kernel, set())
    some = itertools.chain.from_iterable(itertools.combinations(tables, n) for n in (1, 2))
    assert {variant(kernel, set(far)) for far in (*some, tables)} == {plain}
    for name in pointers - tables:
        assert variant(kernel, {name}) != plain
