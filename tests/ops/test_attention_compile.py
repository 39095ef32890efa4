"""Compiles the Triton kernel of attention for sm_80 and sm_90 ahead of time, which needs no GPU, and looks at what came out."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this machine's processor")

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from espnx.kernels.attention import attention_kernel
from espnx.ops.attention.cuda import launch_shape, row_constants

SHARED_BYTES_MAX = {80: 163 * 1024, 90: 227 * 1024}
TYPES = {
    "query_ptr": "*fp32",
    "buffer_ptr": "*u8",
    "block_offset_bytes_ptr": "*i64",
    "n_rows_ptr": "*i64",
    "visible_ptr": "*u8",
    "last_position_ptr": "*i64",
    "o_ptr": "*fp32",
    "lse_ptr": "*fp32",
    **dict.fromkeys(("n_kv", "n_queries", "q_len", "n_blocks", "block_rows", "split_rows", "visible_stride"), "i32"),
}


@pytest.mark.parametrize("capability", SHARED_BYTES_MAX)
@pytest.mark.parametrize(
    ("fmt", "d", "dv", "n_queries", "align_bytes"),
    [
        ("fp16", 128, 128, 1, 16),
        ("bf16", 64, 64, 20, 16),
        ("int8", 128, 128, 8, 16),
        ("fp32", 64, 64, 8, 16),
        ("fp16", 256, 0, 8, 16),
        ("fp16", 24, 8, 3, 2),
    ],
)
def test_compiled_ahead_of_time(
    capability: int, fmt: str, d: int, dv: int, n_queries: int, align_bytes: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    switches = {"HAS_VISIBLE": align_bytes == 2, "HAS_LAST": n_queries > 8, "ALIGN_BYTES": align_bytes}
    constants = {**row_constants(fmt, d, dv), **launch_shape(n_queries, d, dv or d), **switches}
    signature = {name: TYPES.get(name, "constexpr") for name in attention_kernel.arg_names}
    aligned = {(i,): [["tt.divisibility", 16]] for i, name in enumerate(attention_kernel.arg_names) if name.endswith("_ptr")}
    source = ASTSource(fn=attention_kernel, signature=signature, constexprs=constants, attrs=aligned)
    options = {"enable_fp_fusion": True, "num_stages": 1}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    assert compiled.asm["cubin"][:4] == b"\x7fELF"
    assert compiled.metadata.shared <= SHARED_BYTES_MAX[capability]
    uses_tensor_cores = "tf32" in compiled.asm["ptx"]
    assert uses_tensor_cores == (fmt != "fp32"), "rows of 16 bits and fewer belong on tensor cores; fp32 must not be rounded to TF32"
