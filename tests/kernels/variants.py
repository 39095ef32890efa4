"""Variants of every kernel, Triton's and those of csrc/cuda, compiled ahead of time for GPUs that
need not be there."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from espnx.kernels.attention import attention_kernel
from espnx.kernels.attention_merge import merge_kernel
from espnx.kernels.crc32c import crc32c_kernel
from espnx.kernels.int8_attention import int8_attention_kernel
from espnx.kernels.maxsim import maxsim_kernel
from espnx.kernels.turned_attention import turned_attention_kernel
from espnx.kernels.wide_attention import wide_attention_kernel
from espnx.ops import token_format
from espnx.ops.attention import by_slices
from espnx.ops.attention import cuda as attention
from espnx.ops.attention.checks import ROW_FORMATS
from espnx.ops.crc32c.cuda import LANES, SHARED_BYTES, THREADS, WARPS
from espnx.ops.maxsim import by_warps
from espnx.ops.maxsim import cuda as maxsim
from tests.ptx.nvcc import compiled

CAPABILITIES = (80, 90)
BLOCK_ROWS = 1024  # of int8 blocks: a multiple of every tile's rows, as those of caches are
POINTERS = {
    "query_ptr": "*fp32",
    "buffer_ptr": "*u8",
    "block_offset_bytes_ptr": "*i64",
    "n_rows_ptr": "*i64",
    "visible_ptr": "*u8",
    "last_position_ptr": "*i64",
    "position_ptr": "*i64",
    "slope_ptr": "*fp32",
    "o_ptr": "*fp32",
    "lse_ptr": "*fp32",
    "place_ptr": "*i64",
    "whole_o_ptr": "*fp32",
    "whole_lse_ptr": "*fp32",
    "offset_bytes_ptr": "*i64",
    "size_bytes_ptr": "*i64",
    "n_tokens_ptr": "*i64",
    "centroid_ptr": "*fp32",
    "weight_ptr": "*fp32",
    "score_ptr": "*fp32",
    "round_shift_ptr": "*i32",
    "lane_shift_ptr": "*i32",
    "crc_ptr": "*i64",
}


@dataclass(frozen=True)
class Variant:
    """One that a launcher makes.

    Attributes:
        name: in the table.
        tile_bytes: of rows (or ranges) that one iteration of its main loop reads.
        inner_trips: how often a loop within the main loop runs, in each of its iterations, or each
            of several in their order; 0: there is none.
        has_bar: it has to compute well ahead of memory (`bounds.RATE_MIN`).
        tiles_ahead: under way while one is multiplied.
    """

    name: str
    kernel: Any = field(repr=False)
    constants: dict[str, Any] = field(repr=False)
    options: dict[str, Any] = field(repr=False)
    tile_bytes: int
    inner_trips: int = 0
    has_bar: bool = False
    tiles_ahead: int = 1

    def compile(self, capability: int) -> Any:
        """The variant as Triton compiles it; pointers are multiples of 16, as torch's are, where it
        asks."""
        names = self.kernel.arg_names
        signature = {
            name: "constexpr" if name in self.constants else POINTERS.get(name, "i32")
            for name in names
        }
        aligned = {
            (i,): [["tt.divisibility", 16]]
            for i, param in enumerate(self.kernel.params)
            if param.name in POINTERS and not param.do_not_specialize_on_alignment
        }
        source = ASTSource(
            fn=self.kernel, signature=signature, constexprs=self.constants, attrs=aligned
        )
        options = {"enable_fp_fusion": True, **self.options}
        return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


@dataclass(frozen=True)
class DeviceVariant:
    """A kernel of csrc/cuda; attributes as `Variant`'s.

    Attributes:
        has_ring: also if it is of two stages, so that one tile alone is under way.
    """

    name: str
    source: str
    entry: str
    threads: int
    tile_bytes: int
    shared_bytes: int = 0
    inner_trips: int | tuple[int, ...] = 0
    has_bar: bool = True
    tiles_ahead: int = 1
    has_ring: bool = False

    def compile(self, capability: int) -> Any:
        """What stands for it as Triton's compiled kernels do."""
        return SimpleNamespace(
            asm={"cubin": compiled(self.source, "cubin", capability)},
            metadata=SimpleNamespace(shared=self.shared_bytes, num_warps=self.threads // 32),
            entry=self.entry,
        )


def attending(
    fmt: str,
    d: int,
    dv: int | None = None,
    n_queries: int = 8,
    *,
    align_bytes: int = 16,
    rules: attention.ScoreRules = attention.NO_RULES,
    rules_name: str = "",
    has_bar: bool = False,
    block_rows: int = BLOCK_ROWS,
    has_room: bool = True,
) -> Variant:
    """A variant of attention; ``dv`` 0: X rows."""
    dv = d if dv is None else dv
    width = dv or d
    is_wide = attention.is_wide(d, width)
    turned = attention.is_turned(n_queries, d, width, fmt, block_rows)
    shape = attention.launch_shape(n_queries, d, width, fmt, turned=turned, has_room=has_room)
    row_bytes = (d + dv) * ROW_FORMATS[fmt].itemsize + (4 if fmt == "int8" else 0)
    return Variant(
        " ".join(
            (
                f"attention {fmt} d {d}",
                *((f"dv {dv}",) if dv not in (0, d) else ()),
                *(("X",) if dv == 0 else ()),
                f"{shape['BLOCK_Q']} queries",
                *((f"aligned to {align_bytes}",) if align_bytes < 16 else ()),
                *((rules_name,) if rules_name else ()),
                *((f"blocks of {block_rows}",) if block_rows != BLOCK_ROWS else ()),
            )
        ),
        _kernel(fmt, turned=turned, is_wide=is_wide),
        {
            "ALIGN_BYTES": align_bytes,
            **attention.block_constants(d, width, fmt, block_rows, 2, shape["BLOCK_T"], turned),
            **(attention.turned_constants if turned else attention.row_constants)(fmt, d, dv),
            **attention.rule_constants(rules),
            **shape,
        },
        attention.launch_options(n_queries, d, width, fmt, turned=turned),
        shape["BLOCK_T"] * row_bytes,
        -(-d // shape["BLOCK_K"]) if is_wide else 0,
        has_bar,
    )


def _kernel(fmt: str, *, turned: bool, is_wide: bool) -> Any:
    if turned:
        return int8_attention_kernel if fmt == "int8" else turned_attention_kernel
    return wide_attention_kernel if is_wide else attention_kernel


def merging(n_parts: int, dv: int) -> Variant:
    """A variant of the merge of attention's parts."""
    shape = attention.merge_shape(n_parts, dv)
    return Variant(
        f"merge of {shape['BLOCK_P']} parts at a time, dv {dv}",
        merge_kernel,
        {"DV": dv, **shape},
        attention.merge_options(n_parts),
        shape["BLOCK_P"] * (shape["BLOCK_DV"] + 1) * 4,
    )


def scoring(
    fmt: str,
    d: int,
    n_query_tokens: int = 32,
    *,
    align_bytes: int = 16,
    has_bar: bool = False,
    tokens_max: int = 300,
) -> Variant:
    """A variant of MaxSim."""
    shape = maxsim.launch_shape(n_query_tokens, d, tokens_max, fmt)
    constants = maxsim.row_constants(token_format(fmt), d)
    pieces = -(-d // shape["BLOCK_D"])
    return Variant(
        f"maxsim {fmt} d {d} {n_query_tokens} query tokens"
        + (f" aligned to {align_bytes}" if align_bytes < 16 else ""),
        maxsim_kernel,
        {"ALIGN_BYTES": align_bytes, **constants, **shape},
        maxsim.launch_options(n_query_tokens, d, fmt),
        shape["BLOCK_T"] * constants["ROW_BYTES"],
        0 if shape["IS_WHOLE"] or pieces == 1 else pieces,
        has_bar,
    )


def scoring_by_warps(fmt: str, d: int) -> DeviceVariant:
    """A kernel of MaxSim in csrc/cuda. In bit1 a loop takes one tile of a stage after another."""
    tiles, stages = by_warps.RINGS[fmt, d]
    is_residual = token_format(fmt).needs_codebook
    return DeviceVariant(
        f"maxsim {fmt} d {d} by warps",
        by_warps.source_of(fmt),
        by_warps.name_of(fmt, d),
        32 * by_warps.WARPS,
        by_warps.WARPS * 16 * tiles * token_format(fmt).token_row_bytes(d),
        by_warps.shared_bytes(fmt, d, by_warps.WARPS),
        tiles if fmt == "bit1" else 0,
        has_bar=not is_residual,
        tiles_ahead=stages - 1,
    )


def scoring_by_slices(fmt: str, d: int) -> DeviceVariant:
    """A kernel of MaxSim over long rows in csrc/cuda."""
    plan = by_warps.sliced(fmt, d)
    assert plan is not None
    return DeviceVariant(
        f"maxsim {fmt} d {d} by slices",
        by_warps.SLICED,
        plan.kernel,
        32 * plan.warps,
        32 * token_format(fmt).token_row_bytes(d),
        plan.shared_bytes,
        tiles_ahead=plan.stages - 1,
        has_ring=True,
    )


def attending_by_slices(
    fmt: str, d: int, dv: int = 0, n_queries: int = 16, *, has_bar: bool = True
) -> DeviceVariant:
    """A kernel of attention in csrc/cuda; ``dv`` 0: rows that are K and V at once. Its inner loops
    copy pieces of rows of K and, where they are apart, of V, of 8 rows in so many turns; take two
    queries at a time; for these the shares of four warps, or of two where registers are few; and
    multiply 16 rows at a time with weights."""
    plan = by_slices.plan(n_queries, d, dv, fmt)
    assert plan is not None
    copies, turns = plan.slice_dims // 32, -(-plan.queries // (2 * plan.warps))
    shares = plan.warps // (2 if fmt == "bf16" and plan.slice_dims == 64 else 4)
    return DeviceVariant(
        f"attention {fmt} d {d}{'' if dv else ' X'} {plan.queries} queries by slices",
        "attention",
        plan.kernel,
        32 * plan.warps,
        by_slices.TILE_ROWS * (d + dv) * 2,
        plan.shared_bytes,
        (copies, copies if dv else 0, turns, shares, by_slices.TILE_ROWS // 16),
        has_bar,
        tiles_ahead=plan.stages - 1,
    )


def summing(*, words: bool) -> Variant:
    """A variant of CRC32C."""
    return Variant(
        f"crc32c of {'words' if words else 'bytes'}",
        crc32c_kernel,
        {"LANES": LANES, "WORDS": words},
        {"num_warps": WARPS},
        4 * LANES,
    )


_POSITION = torch.zeros(1, 1, dtype=torch.int64)
CAP_AND_WINDOW = attention.ScoreRules(soft_cap=50.0, window=4096, position=_POSITION)
WINDOW = attention.ScoreRules(window=128, position=_POSITION)
SLOPES = attention.ScoreRules(position=_POSITION, slopes=torch.zeros(1, 1, 1))

#: By nvcc. A block of gather has 8 warps, of which each lane loads 4 pieces of 16 bytes or 8 words;
#: one of crc32c has 32, of which each lane takes 2 pieces of 16 bytes in an iteration.
DEVICE_VARIANTS = (
    DeviceVariant("gather aligned to 16", "gather", "espnx_gather_16", 256, 8 * 32 * 4 * 16),
    DeviceVariant("gather aligned to 4", "gather", "espnx_gather_4", 256, 8 * 32 * 8 * 4),
    DeviceVariant("gather of bytes", "gather", "espnx_gather_1", 256, 8 * 32 * 8 * 4),
    DeviceVariant(
        "crc32c by warps", "crc32c", "espnx_crc32c", THREADS, THREADS * 2 * 16, SHARED_BYTES
    ),
    *(scoring_by_warps(fmt, d) for fmt, d in by_warps.RINGS),
    *(scoring_by_slices(fmt, d) for d in (256, 384) for fmt in ("bf16", "int8")),
    *(scoring_by_slices(fmt, d) for d in (512, 768, 1024) for fmt in by_warps.SLICED_FORMATS),
    *(attending_by_slices(fmt, d) for fmt in by_slices.FORMATS for d in (256, 576, 1024)),
    *(attending_by_slices(fmt, 256, 256, 8) for fmt in by_slices.FORMATS),
)
#: Compiled by the tests, too.
TESTED = (
    attending("fp16", 128, has_bar=True),
    attending("fp16", 128, has_bar=True, block_rows=16),
    attending("int8", 128, has_bar=True),
    attending("fp32", 64),
    attending("fp16", 576, 0, 16),
    attending("fp16", 256, rules=CAP_AND_WINDOW, rules_name="cap, window"),
    attending("fp16", 24, 8, 3, align_bytes=2),
    merging(64, 128),
    scoring("fp16", 128, has_bar=True),
    scoring("residual2", 128),
    scoring("bit1", 8, 1, align_bytes=1),
    summing(words=True),
    summing(words=False),
)
VARIANTS = (
    *TESTED,
    attending("fp16", 128, n_queries=16, has_bar=True),
    attending("bf16", 128, n_queries=16, has_bar=True),
    attending("fp16", 64, n_queries=16, has_bar=True),
    attending("bf16", 64, n_queries=16, has_bar=True),
    attending("fp16", 64, has_bar=True),
    attending("bf16", 64, has_bar=True),
    attending("bf16", 128, has_bar=True),
    attending("int8", 64, has_bar=True),
    *(
        attending(fmt, d, has_bar=True, block_rows=rows)
        for d, rows in ((128, 16), (64, 32))
        for fmt in ("fp16", "bf16")
        if (fmt, d) != ("fp16", 128)
    ),
    attending("fp16", 32, block_rows=64),
    attending("bf16", 128, block_rows=48),
    attending("fp16", 64, block_rows=19),
    attending("bf16", 64, rules=WINDOW, rules_name="window", block_rows=32),
    attending("bf16", 128, rules=CAP_AND_WINDOW, rules_name="cap, window", block_rows=16),
    attending("fp16", 128, rules=SLOPES, rules_name="slopes", block_rows=16),
    attending("fp16", 80),
    attending("bf16", 96),
    attending("fp32", 128),
    attending("bf16", 64, rules=WINDOW, rules_name="window"),
    attending("fp16", 128, rules=SLOPES, rules_name="slopes"),
    attending("fp16", 256),
    attending("bf16", 256),
    attending("fp16", 256, 0),
    attending("bf16", 576, 0, 16),
    attending("bf16", 1024, 0, 16),
    attending("int8", 128, n_queries=16),
    attending("int8", 256),
    attending("fp16", 320),
    attending("int8", 320),
    attending("bf16", 64, n_queries=20),
    attending("fp16", 128, n_queries=64),
    attending("fp32", 256, n_queries=32),
    merging(8, 128),
    merging(64, 24),
    scoring("bf16", 128, has_bar=True),
    scoring("int8", 128, has_bar=True),
    scoring("bit1", 128, has_bar=True),
    scoring("fp32", 128, has_bar=True),
    scoring("fp16", 384),
    scoring("bf16", 384),
    scoring("int8", 384),
    scoring("residual1", 128),
    scoring("residual4", 128),
    scoring("fp16", 24, 1, align_bytes=2),
    *DEVICE_VARIANTS,
)


def assert_multiplies_well(ptx: str, fmt: str, align_bytes: int) -> None:
    """MaxSim over rows of a format, that begin at multiples of so many bytes: rows of 16 bits and
    fewer belong on tensor cores, fp32 must not be rounded to TF32, and 16 bytes are loaded at a
    time where they may be."""
    uses_tensor_cores = "mma.sync" in ptx or "wgmma" in ptx
    assert uses_tensor_cores == (fmt in ("fp16", "bf16", "int8", "bit1"))
    loads_16_bytes = "cp.async.cg" in ptx or "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx
    assert loads_16_bytes or align_bytes < 16
