"""Compiles variants of MaxSim for sm_80 and sm_90 ahead of time, which needs no GPU, and looks at
what came out; those of the table (tests/kernels) are looked at where they are compiled for it."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from espnx.kernels import maxsim
from espnx.ops import token_format
from espnx.ops.attention import by_slices
from espnx.ops.attention import cuda as attention_cuda
from espnx.ops.maxsim.cuda import launch_options, launch_shape, row_constants
from tests.kernels.variants import assert_multiplies_well, attending

SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024}


pytestmark = pytest.mark.usefixtures("triton_cache")
CAPABILITIES = pytest.mark.parametrize("capability", SHARED_BYTES_MAX)


def compile_for(
    capability: int,
    kernel: Any,
    types: dict[str, str],
    constants: dict[str, Any],
    options: dict[str, int],
) -> Any:
    signature = {name: types.get(name, "constexpr") for name in kernel.arg_names}
    # What a launch with tensors from torch's allocator tells the compiler: every pointer is a
    # multiple of 16.
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(kernel.arg_names)
        if types.get(name, "").startswith("*")
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=aligned)
    compiled = triton.compile(
        source,
        target=GPUTarget("cuda", capability, 32),
        options={"enable_fp_fusion": True, **options},
    )
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert compiled.metadata.shared <= SHARED_BYTES_MAX[capability]
    return compiled


def test_shared_memory_is_of_whole_blocks_of_values() -> None:
    """A kept query of 392 values has 13 blocks of 32: 105 KiB with two stages, and a block has 99
    on every GPU."""
    assert launch_shape(32, 392, 300, "int8")["BLOCK_D"] == 32
    assert launch_options(32, 384, "int8")["num_stages"] == 2
    assert launch_options(32, 392, "int8")["num_stages"] == 1


@pytest.mark.sampled(1)
@CAPABILITIES
@pytest.mark.parametrize(
    ("fmt", "d", "n_query_tokens", "align_bytes"),
    [
        ("fp16", 24, 1, 2),
        ("fp32", 128, 32, 16),
        ("fp16", 65536, 64, 16),
        ("bf16", 128, 32, 16),
        ("int8", 128, 32, 16),
        ("bit1", 128, 32, 16),
        ("residual1", 24, 5, 1),
        ("residual4", 128, 32, 16),
    ],
)
def test_maxsim(capability: int, fmt: str, d: int, n_query_tokens: int, align_bytes: int) -> None:
    types = {
        "query_ptr": "*fp32",
        "buffer_ptr": "*u8",
        "offset_bytes_ptr": "*i64",
        "n_tokens_ptr": "*i64",
        "centroid_ptr": "*fp32",
        "weight_ptr": "*fp32",
        "score_ptr": "*fp32",
        "n_docs": "i32",
        "n_queries": "i32",
        "Lq": "i32",
        "n_centroids": "i32",
    }
    shape = launch_shape(n_query_tokens, d, 300, fmt)
    constants = {"ALIGN_BYTES": align_bytes, **row_constants(token_format(fmt), d), **shape}
    options = launch_options(n_query_tokens, d, fmt)
    ptx = compile_for(capability, maxsim.maxsim_kernel, types, constants, options).asm["ptx"]
    assert_multiplies_well(ptx, fmt, align_bytes)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("fmt", "d"), [("bf16", 128), ("bf16", 96), ("fp16", 128)])
def test_attention_of_many_queries_fits_where_there_is_little_room(fmt: str, d: int) -> None:
    """A block has 99 KiB of shared memory on GPUs of 8.6, 8.9 and 12.0, and Triton launches none
    that takes more."""
    compiled = attending(fmt, d, n_queries=64, has_room=False).compile(86)
    assert compiled.metadata.shared <= 99 * 1024


@pytest.mark.parametrize("kib", [100, 164, 228])
def test_how_much_room_there_is_says_the_device(kib: int, monkeypatch: pytest.MonkeyPatch) -> None:
    class SeenError(Exception):
        pass

    def variant(*given: Any) -> None:
        raise SeenError(given[-1])

    monkeypatch.setattr(by_slices, "shared_bytes_of", lambda device: kib << 10)
    monkeypatch.setattr(attention_cuda, "_variant", variant)
    query, table = torch.zeros(1, 1, 64, 128), torch.zeros(1, 1, 1, dtype=torch.int64)
    given = (query, torch.zeros(9000, dtype=torch.uint8), table, torch.ones(1, dtype=torch.int64))
    with pytest.raises(SeenError, match=str(kib > 100)):
        attention_cuda.attention_inside_triton(*given, 1, 16, 16, "bf16", 1.0, 128)
