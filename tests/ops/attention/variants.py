"""The attention kernel's variants, compiled ahead of time, and what each takes of a multiprocessor.

``python -m tests.ops.attention.variants`` compiles all of them and writes the table that
test_compile.py compares some with.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from espnx.kernels.attention import attention_kernel
from espnx.ops.attention.cuda import launch_options, launch_shape, row_constants

CAPABILITIES = (80, 90)
TABLE = Path(__file__).resolve().parents[2] / "data" / "attention_kernel.json"
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
TYPES = {
    "query_ptr": "*fp32",
    "buffer_ptr": "*u8",
    "block_offset_bytes_ptr": "*i64",
    "n_rows_ptr": "*i64",
    "visible_ptr": "*u8",
    "last_position_ptr": "*i64",
    "o_ptr": "*fp32",
    "lse_ptr": "*fp32",
    **dict.fromkeys(
        (
            "n_kv",
            "n_queries",
            "q_len",
            "n_blocks",
            "block_rows",
            "split_rows",
            "visible_stride",
            "has_last",
        ),
        "i32",
    ),
}


class Variant(NamedTuple):
    format: str
    d: int
    dv: int
    n_queries: int
    align_bytes: int


#: Compiled by the tests, too.
TESTED = (
    Variant("fp16", 128, 128, 1, 16),
    Variant("bf16", 64, 64, 20, 16),
    Variant("int8", 128, 128, 8, 16),
    Variant("fp32", 64, 64, 8, 16),
    Variant("fp16", 256, 0, 8, 16),
    Variant("fp16", 24, 8, 3, 2),
)
VARIANTS = (
    *TESTED,
    Variant("bf16", 128, 128, 1, 16),
    Variant("fp16", 128, 128, 64, 16),
    Variant("fp16", 256, 256, 1, 16),
    Variant("fp32", 128, 128, 64, 16),
    Variant("fp32", 256, 256, 32, 16),
)


def compiled(variant: Variant, capability: int) -> Any:
    """The variant as Triton compiles it for such a GPU; none is needed."""
    fmt, d, dv, n_queries, align_bytes = variant
    constants = {
        **row_constants(fmt, d, dv),
        **launch_shape(n_queries, d, dv or d, fmt),
        "ALIGN_BYTES": align_bytes,
        "IN_BLOCK": fmt == "int8",
    }
    signature = {name: TYPES.get(name, "constexpr") for name in attention_kernel.arg_names}
    aligned = {
        (i,): [["tt.divisibility", 16]]
        for i, name in enumerate(attention_kernel.arg_names)
        if name.endswith("_ptr")
    }
    source = ASTSource(
        fn=attention_kernel, signature=signature, constexprs=constants, attrs=aligned
    )
    options = {"enable_fp_fusion": True, **launch_options(n_queries, d, dv or d, fmt)}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


def resources(kernel: Any) -> dict[str, int]:
    """Registers of a thread, its stack in bytes (what is spilled goes there), shared memory of a
    block in bytes."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        done = subprocess.run(
            [CUOBJDUMP, "--dump-resource-usage", file.name],
            capture_output=True,
            text=True,
            check=True,
        )
    found = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", done.stdout)}
    return {
        "registers": found["REG"],
        "stack_bytes": found["STACK"],
        "shared_bytes": int(kernel.metadata.shared),
    }


def row_key(variant: Variant, capability: int) -> dict[str, Any]:
    return {"sm": capability, **variant._asdict()}


def main() -> None:
    rows = []
    for variant in VARIANTS:
        for capability in CAPABILITIES:
            rows.append(
                {**row_key(variant, capability), **resources(compiled(variant, capability))}
            )
            print(rows[-1], flush=True)
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    TABLE.write_text(f'{{"triton": {json.dumps(triton.__version__)}, "rows": [\n{lines}\n]}}\n')


if __name__ == "__main__":
    main()
