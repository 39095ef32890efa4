"""The CUDA version of the attention op: checks, allocates, launches a kernel, and merges the parts
(``kernels/attention_merge.py``).

Long rows of 16 bits are for ``csrc/cuda/attention.cu`` where it is compiled (`by_slices`). Others
are for ``kernels/attention.py``; those of more than 256 values for ``kernels/wide_attention.py``,
and those of few queries for ``kernels/turned_attention.py`` or, of int8 rows,
``kernels/int8_attention.py``.
"""

from __future__ import annotations

import functools
import math
from typing import Any, NamedTuple

import torch

from ...errors import InvalidInputError
from .._native import load_kernel, on_current
from ..tables import on_device, on_host, unused
from . import by_slices
from .checks import ROW_FORMATS, BlocksFound, block_bytes, check_arguments, check_rows, look_inside

DIM_MAX = 1024  # a program holds the sums of whole rows
_NARROW_DIM_MAX = 256  # and rows up to this length as they come
#: Queries of a KV head for whom products are turned, by the format of rows.
_TURNED_QUERIES_MAX = {"int8": 16, "fp16": 8, "bf16": 8}
_TURNED_DIM_MAX = {"int8": _NARROW_DIM_MAX, "fp16": 128, "bf16": 128}
_TURNED_BLOCKS_MAX = 8  # of which a tile of 16-bit rows has some: each is a load and a choice
#: Warps, stages, programs on a multiprocessor and registers (0: as many as it takes) of turned
#: products of 16 bits, by the longest row.
_TURNED_16 = {64: (4, 5, 3, 168), 128: (4, 5, 2, 0)}
_SPLIT_ROWS_MIN = 512
_MULTIPROCESSORS = 132  # of an H100 or H200
#: Shared memory of a multiprocessor below which 64 queries do not fit: bf16's three parts of them,
#: of rows padded to 128, take 104 KiB of a block. An A100 has 164, others of 8.x and 12.x 100.
_MANY_QUERIES_BYTES = 106 << 10
_FEW_PARTS = 8  # to merge: many have a variant of their own
_MERGED_DIM = 64  # values of a row that a program merges
_SOFT_CAP_MIN = 2.0**-126  # fp32 holds it, and what scores are divided by it
_TABLE_DTYPES = (torch.int64, torch.int64, torch.uint8, torch.int64, torch.int64, torch.float32)
_HEADS_MAX = 2**31 - 1  # CUDA's largest grid; in its other two dimensions 65535
#: Kernels count rows in 32 bits, up to the end of a tile, or of a part, that begins within them;
#: and a head's queries.
_ROWS_END = 2**31 - 2**20


class ScoreRules(NamedTuple):
    """What changes the scores of the queries of a call, and which rows they see, beside masks.

    Attributes:
        soft_cap: a score s becomes soft_cap * tanh(s / soft_cap); 0: it stays.
        window: a query sees so many rows, its own the last; 0: all.
        position: int64 [B, q]: the row at which each query stands, counted from its sequence's
            first, and perhaps beyond its last; for a window and slopes, else None.
        slopes: float32 [B, H, q]: row t adds slope * (t - position) to its score; None: nothing.
    """

    soft_cap: float = 0.0
    window: int = 0
    position: torch.Tensor | None = None
    slopes: torch.Tensor | None = None


NO_RULES = ScoreRules()


def is_wide(d: int, dv: int) -> bool:
    """Whether rows of these lengths are for ``kernels/wide_attention.py``."""
    return max(d, dv) > _NARROW_DIM_MAX


def _wide_shape(dv: int, fmt: str) -> dict[str, int]:
    whole = 1 << (dv.bit_length() - 1)
    rest = dv - whole
    return {
        "BLOCK_Q": 16,
        "BLOCK_T": 32 if fmt in ("fp16", "bf16") else 16,
        "BLOCK_K": 64,
        "BLOCK_DV": max(16, whole),
        "BLOCK_REST": max(16, 1 << (rest - 1).bit_length()) if rest else 16,
    }


def turned_rows(d: int, dv: int) -> int:
    """Rows of a tile of ``kernels/turned_attention.py`` and ``kernels/int8_attention.py``."""
    widest = max(d, dv)
    return 128 if widest <= 64 else 64 if widest <= 128 else 32


def tile_blocks(d: int, dv: int, block_rows: int, n_blocks: int) -> int:
    """Counts the blocks of which a tile of `turned_rows` has rows, at most.

    Args:
        n_blocks: of a sequence's head.
    """
    if n_blocks == 1:
        return 1
    rows = turned_rows(d, dv)
    # Tiles begin at multiples of the divisor within a block, the latest at its last one.
    return (rows - 1 - math.gcd(rows, block_rows)) // block_rows + 2


def is_turned(
    n_queries: int, d: int, dv: int, fmt: str, block_rows: int, n_blocks: int = 2
) -> bool:
    """Whether these rows are for ``kernels/turned_attention.py``, or for
    ``kernels/int8_attention.py``, whose tiles are each of one whole block: they share its
    scales."""
    if max(d, dv) > _TURNED_DIM_MAX.get(fmt, 0) or n_queries > _TURNED_QUERIES_MAX[fmt]:
        return False
    if fmt == "int8":
        return block_rows % turned_rows(d, dv) == 0
    return tile_blocks(d, dv, block_rows, n_blocks) <= _TURNED_BLOCKS_MAX


def _turned_shape(n_queries: int, d: int, dv: int) -> dict[str, int]:
    return {
        "BLOCK_Q": 8 if n_queries <= 8 else 16,
        "BLOCK_T": turned_rows(d, dv),
        "BLOCK_D": max(32, 1 << (d - 1).bit_length()),
        "BLOCK_DV": max(32, 1 << (dv - 1).bit_length()),
    }


def launch_shape(
    n_queries: int, d: int, dv: int, fmt: str, *, turned: bool = False, has_room: bool = True
) -> dict[str, int]:
    """Block sizes. The least that a tensor core takes is 16 each way; wide rows and many queries
    come in smaller tiles, or they would not fit in registers.

    Args:
        turned: products are turned, see `is_turned`.
        has_room: a multiprocessor has `_MANY_QUERIES_BYTES` of shared memory.
    """
    if turned:
        return _turned_shape(n_queries, d, dv)
    if is_wide(d, dv):
        return _wide_shape(dv, fmt)
    widest = max(d, dv)
    is_fp32 = fmt == "fp32"
    is_tight = fmt == "bf16" and widest > 64 and not has_room
    queries_max = 16 if is_fp32 else 64 if widest <= 128 and not is_tight else 32
    queries = min(max(16, 1 << (n_queries - 1).bit_length()), queries_max)
    if widest > 128:
        rows = 16 if is_fp32 else 32
    elif is_fp32:
        rows = 32
    else:
        rows = 128 if queries == 16 and has_long_tiles(d, dv, fmt) else 64
    return {
        "BLOCK_Q": queries,
        "BLOCK_T": rows,
        "BLOCK_D": max(16, 1 << (d - 1).bit_length()),
        "BLOCK_DV": max(16, 1 << (dv - 1).bit_length()),
    }


def has_long_tiles(d: int, dv: int, fmt: str) -> bool:
    """Whether few queries take 128 rows at a time: queries and weights are read from shared memory
    once a tile, so that shared memory allows more rows a second."""
    widest = max(d, dv)
    # Rows that are padded to a power of two spill their registers at that length.
    is_padded = d & (d - 1) or dv & (dv - 1)
    long_to = {"int8": 128, "bf16": 128, "fp16": 64}.get(fmt, 0)
    is_long = widest <= long_to and (fmt == "int8" or (widest > 32 and not is_padded))
    return is_long and not fits_four(d, dv, fmt)


def fits_four(d: int, dv: int, fmt: str) -> bool:
    """Whether few queries are for four programs on a multiprocessor, of two tiles each that are
    loaded ahead."""
    return fmt == "bf16" and 32 < max(d, dv) <= 64 and not (d & (d - 1) or dv & (dv - 1))


def _turned_16(d: int, dv: int) -> tuple[int, int, int, int]:
    return _TURNED_16[64 if max(d, dv) <= 64 else 128]


def programs_wanted(d: int, dv: int, fmt: str, *, turned: bool = False) -> int:
    """So many as fit on the multiprocessors at once: more would wait for the first."""
    if turned and fmt != "int8":
        return _MULTIPROCESSORS * _turned_16(d, dv)[2]
    if turned or fits_four(d, dv, fmt):
        return _MULTIPROCESSORS * 4
    if is_wide(d, dv):
        return _MULTIPROCESSORS
    is_large = fmt == "int8" or max(d, dv) > 128 or has_long_tiles(d, dv, fmt)
    return _MULTIPROCESSORS * (2 if is_large else 3)


def launch_options(
    n_queries: int, d: int, dv: int, fmt: str, *, turned: bool = False
) -> dict[str, int]:
    """Stages of the loop over tiles (where rows are is loaded a stage before them: 3 stages hold
    one tile, 5 two), and registers: so many that as many programs fit on a multiprocessor as
    `programs_wanted` says."""
    if turned and fmt != "int8":
        warps, stages, _, registers = _turned_16(d, dv)
        options = {"num_stages": stages, "num_warps": warps}
        if registers:
            options["maxnreg"] = registers
    elif turned:
        # Every warp reads all queries and weights from shared memory: the fewer, the less.
        is_small = n_queries <= 8 and max(d, dv) <= 128
        options = {"num_stages": 5 if is_small else 2, "num_warps": 2}
    elif is_wide(d, dv):
        options = {"num_stages": 1, "num_warps": 8}
    elif max(d, dv) > 128:
        options = {"num_stages": 1}
    elif fmt == "int8" or n_queries > 16:
        options = {"num_stages": 2}
    elif fits_four(d, dv, fmt):
        options = {"num_stages": 5, "maxnreg": 128}
    elif has_long_tiles(d, dv, fmt):
        options = {"num_stages": 5 if max(d, dv) <= 64 else 2}
    else:
        options = {"num_stages": 3, "maxnreg": 168}
    return options


def row_constants(fmt: str, d: int, dv: int) -> dict[str, Any]:
    """What the kernel is told about rows; ``dv = 0`` for X rows."""
    return {
        "K_BEGIN": 4 * d if fmt == "int8" else 0,
        "D": d,
        "DV": dv or d,
        "FORMAT": fmt,
        "PRECISION": "tf32x3",  # fp32, and what of int8 is not multiplied in fp16
        "IS_X": dv == 0,
        "ITEM_BYTES": ROW_FORMATS[fmt].itemsize,
    }


def turned_constants(fmt: str, d: int, dv: int) -> dict[str, Any]:
    """What ``kernels/turned_attention.py`` and ``kernels/int8_attention.py`` are told about rows;
    ``dv = 0`` for X rows."""
    if fmt == "int8":
        return {"K_BEGIN": 4 * d, "D": d, "DV": dv or d}
    return {name: each for name, each in row_constants(fmt, d, dv).items() if name != "PRECISION"}


def block_constants(
    d: int, dv: int, fmt: str, block_rows: int, n_blocks: int, tile_rows: int, turned: bool
) -> dict[str, Any]:
    """What a kernel is told about the blocks that a tile's rows are of: whether it is one, whose
    scales they share; of the turned kernels `tile_blocks`, and whether they are whole."""
    if is_wide(d, dv) or (turned and fmt == "int8"):
        return {}
    if not turned:
        return {"IN_BLOCK": fmt == "int8" and block_rows % (4 if n_blocks == 1 else tile_rows) == 0}
    blocks = tile_blocks(d, dv, block_rows, n_blocks)
    # How long other blocks are is no constant, or each length would make a variant.
    return {"BLOCKS": blocks, "WHOLE": blocks > 1 and blocks * block_rows == tile_rows}


def rule_constants(rules: ScoreRules) -> dict[str, Any]:
    """What the kernel is told about a model's scores."""
    return {
        "SOFT_CAP": float(rules.soft_cap),
        "HAS_WINDOW": rules.window != 0,
        "HAS_SLOPES": rules.slopes is not None,
    }


class Variant(NamedTuple):
    """How a kernel of Triton's takes rows.

    Attributes:
        turned: products are turned, see `is_turned`.
        block_queries, tile_rows: of a program, and of what it takes at a time.
        programs: as many as are wanted.
        constants: and options of a launch, beside alignment and rules.
    """

    turned: bool
    block_queries: int
    tile_rows: int
    programs: int
    constants: dict[str, Any]


@functools.lru_cache(maxsize=1024)
def _variant(
    n_queries: int, d: int, dv: int, fmt: str, block_rows: int, n_blocks: int, has_room: bool = True
) -> Variant:
    """``n_blocks``: 2 stands for more; ``has_room`` of `launch_shape`."""
    width = dv or d
    turned = is_turned(n_queries, d, width, fmt, block_rows, n_blocks)
    shape = launch_shape(n_queries, d, width, fmt, turned=turned, has_room=has_room)
    tile_rows = shape["BLOCK_T"]
    constants = {
        "enable_fp_fusion": True,
        **block_constants(d, width, fmt, block_rows, n_blocks, tile_rows, turned),
        **launch_options(n_queries, d, width, fmt, turned=turned),
        **(turned_constants if turned else row_constants)(fmt, d, dv),
        **shape,
    }
    programs = programs_wanted(d, width, fmt, turned=turned)
    return Variant(turned, shape["BLOCK_Q"], tile_rows, programs, constants)


def attention_triton(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    block_rows: int,
    fmt: str,
    scale: float,
    dv: int,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    threads: int = 0,
    *,
    n_splits: int | None = None,
    rules: ScoreRules = NO_RULES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`espnx.ops.attention` by Triton or ``csrc/cuda``: CUDA tensors, or CPU tensors in Triton's
    interpreter. ``threads`` has no meaning here."""
    check_arguments(query, buffer, block_offset_bytes, n_rows, visible, last_position)
    _check_rules(rules, query)
    d = query.shape[-1]
    check_rows(block_rows, d, dv, fmt)
    if max(d, dv) > DIM_MAX:
        raise InvalidInputError(
            "attention d and dv on CUDA",
            got=max(d, dv),
            expected=f"at most {DIM_MAX}",
            fix="use the CPU version",
        )
    at, many = on_host(block_offset_bytes, n_rows)
    size_bytes = block_bytes(block_rows, d, dv, fmt)
    found = look_inside(buffer, at, many, block_rows, size_bytes, visible)
    align_bytes = _alignment(found, fmt)
    given = (query, buffer, block_offset_bytes, n_rows, found.rows_max, align_bytes, block_rows)
    return attention_inside_triton(
        *given, fmt, scale, dv, visible, last_position, n_splits=n_splits, rules=rules
    )


def attention_inside_triton(
    query: torch.Tensor,
    buffer: torch.Tensor,
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    rows_max: int,
    align_bytes: int,
    block_rows: int,
    fmt: str,
    scale: float,
    dv: int,
    visible: torch.Tensor | None = None,
    last_position: torch.Tensor | None = None,
    threads: int = 0,
    *,
    n_splits: int | None = None,
    rules: ScoreRules = NO_RULES,
) -> tuple[torch.Tensor, torch.Tensor]:
    """`attention_triton` of arguments that are known to be right (`api.attention_inside`): looks
    at no entry of a table, and so does not wait for the device.

    Args:
        rows_max: the largest of `n_rows`.
        align_bytes: what every block's address is a multiple of: 16, or the size of an element
            (int8: of a scale).

    Raises:
        InvalidInputError: too many heads, queries or rows; nothing is launched.
    """
    batch, heads, q_len, d = query.shape
    n_kv, n_blocks = block_offset_bytes.shape[1:]
    n_heads, n_queries, width = batch * n_kv, heads // n_kv * q_len, dv or d
    if n_heads == 0 or n_queries == 0:
        return query.new_zeros((batch, heads, q_len, width), dtype=torch.float32), query.new_zeros(
            query.shape[:3], dtype=torch.float32
        )
    has_room = by_slices.shared_bytes_of(query.device) >= _MANY_QUERIES_BYTES
    variant = _variant(n_queries, d, dv, fmt, block_rows, min(n_blocks, 2), has_room)
    plan = None
    # Of many queries `attention.py` takes twice as many at a time, and so reads rows half as often.
    if n_queries <= by_slices.QUERIES_MAX or is_wide(d, dv):
        plan = by_slices.compiled_plan(n_queries, d, dv, fmt, align_bytes, query.device)
    turned, block_queries, tile_rows, wanted, constants = variant
    if plan is not None:
        block_queries, tile_rows = plan.queries, by_slices.TILE_ROWS
        wanted = _MULTIPROCESSORS * plan.resident
    q_blocks = -(-n_queries // block_queries)
    # csrc/cuda has all blocks in the grid's first dimension, Triton those of a head in its second
    blocks_max = 65535 if plan is None else _HEADS_MAX // n_heads
    _check_grid(n_heads, n_queries, min(blocks_max * block_queries, _ROWS_END - 1), rows_max)
    splits = n_splits or max(min(wanted // (n_heads * q_blocks), rows_max // _SPLIT_ROWS_MIN), 1)
    split_rows = -(-max(rows_max, 1) // splits // tile_rows) * tile_rows
    results = splits, n_heads, n_queries
    o = torch.empty((*results, width), dtype=torch.float32, device=query.device)
    lse = torch.empty(results, dtype=torch.float32, device=query.device)
    tables = _tables(block_offset_bytes, n_rows, visible, last_position, rules, query.device)
    scaled = query.float() if scale == 1.0 else query.float() * scale
    counts = (n_kv, n_queries, q_len, n_blocks, block_rows, split_rows)
    stride, has_last = 0 if visible is None else visible.shape[1], last_position is not None
    if plan is not None:
        by_slices.launch(
            plan,
            by_slices.Sizes(n_heads, *counts, d, dv),
            scaled.contiguous(),
            buffer,
            tables,
            o,
            lse,
            visible_stride=stride,
            has_last=has_last,
            window=rules.window,
            soft_cap=rules.soft_cap,
            has_slopes=rules.slopes is not None,
        )
    else:
        if turned and fmt == "int8":
            scaled = scaled.unflatten(-1, (-1, 2)).transpose(-1, -2)
        kernel = _kernel_for(d, width, fmt, turned=turned)
        with on_current(query.device):
            kernel[(n_heads, q_blocks, splits)](
                *(scaled.contiguous(), buffer, *tables, o, lse),
                *(*counts, stride, int(has_last), rules.window),
                ALIGN_BYTES=align_bytes,
                **constants,
                **rule_constants(rules),
            )
    if splits > 1:
        o, lse = _launch_merge(o, lse, splits, n_heads, None)
    return o.view(batch, heads, q_len, width), lse.view(batch, heads, q_len)


def _check_grid(n_heads: int, n_queries: int, queries_max: int, rows_max: int) -> None:
    """Raises InvalidInputError for more than a grid has room for, and rows that are not counted."""
    if n_heads > _HEADS_MAX or n_queries > queries_max:
        raise InvalidInputError(
            "attention queries on CUDA",
            got=n_queries,
            expected=f"at most {queries_max} for a KV head",
        )
    if rows_max >= _ROWS_END:
        raise InvalidInputError(
            "attention rows on CUDA",
            got=rows_max,
            expected=f"fewer than {_ROWS_END} of a sequence",
            fix="attend to its rows in parts, and merge their results",
        )


def _kernel_for(d: int, dv: int, fmt: str, *, turned: bool) -> Any:
    if turned and fmt != "int8":
        few: Any = load_kernel("turned_attention")
        return few.turned_attention_kernel
    if turned:
        int8: Any = load_kernel("int8_attention")
        return int8.int8_attention_kernel
    if is_wide(d, dv):
        wide: Any = load_kernel("wide_attention")
        return wide.wide_attention_kernel
    narrow: Any = load_kernel("attention")
    return narrow.attention_kernel


def _check_rules(rules: ScoreRules, query: torch.Tensor) -> None:
    """Raises InvalidInputError unless the rules fit the queries."""
    batch, heads, q_len, _ = query.shape
    if rules.soft_cap != 0 and not _SOFT_CAP_MIN <= rules.soft_cap <= 1 / _SOFT_CAP_MIN:
        raise InvalidInputError(
            "attention soft_cap",
            got=rules.soft_cap,
            expected=f"{_SOFT_CAP_MIN:g} to {1 / _SOFT_CAP_MIN:g}, or 0",
        )
    if not 0 <= rules.window < 2**31:
        raise InvalidInputError(
            "attention window", got=rules.window, expected="1 to 2147483647 rows, or 0"
        )
    if rules.position is None and (rules.window or rules.slopes is not None):
        raise InvalidInputError(
            "attention with a window or slopes",
            got="no position",
            expected=f"int64 [{batch}, {q_len}], where each query stands",
        )
    for name, tensor, dtype, shape in (
        ("position", rules.position, torch.int64, (batch, q_len)),
        ("slopes", rules.slopes, torch.float32, (batch, heads, q_len)),
    ):
        if tensor is not None and (tensor.dtype != dtype or tensor.shape != shape):
            raise InvalidInputError(
                f"attention {name}",
                got=f"{tensor.dtype} {list(tensor.shape)}",
                expected=f"{dtype} {list(shape)}",
            )


def _tables(
    block_offset_bytes: torch.Tensor,
    n_rows: torch.Tensor,
    visible: torch.Tensor | None,
    last_position: torch.Tensor | None,
    rules: ScoreRules,
    device: torch.device,
) -> list[torch.Tensor]:
    """The kernels' tables where the query is, those that are not there as memory that nobody looks
    at. Those of the host are copied together."""
    given = (block_offset_bytes, n_rows, visible, last_position, rules.position, rules.slopes)
    there = iter(on_device([each for each in given if each is not None], device))
    nothing = unused(device)
    return [
        nothing[dtype] if each is None else next(there)
        for each, dtype in zip(given, _TABLE_DTYPES, strict=True)
    ]


def merge_results(
    o: torch.Tensor, lse: torch.Tensor, place: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Results of the same queries over different rows as those over all of them, by
    ``kernels/attention_merge.py``.

    Args:
        o, lse: float32 [results, n_queries, dv] and [results, n_queries], contiguous.
        place: int64 [n_parts, n_heads], on the same device: which result is a head's part; below
            0: it has none.

    Returns:
        ``o`` [n_heads, n_queries, dv] and ``lse`` [n_heads, n_queries]: 0 and -inf where no part
        has seen a row.
    """
    return _launch_merge(o, lse, place.shape[0], place.shape[1], place)


def merge_shape(n_parts: int, dv: int) -> dict[str, int]:
    """Parts and values of a row that a program of ``kernels/attention_merge.py`` takes at once."""
    return {
        "BLOCK_P": _FEW_PARTS if n_parts <= _FEW_PARTS else 64,
        "BLOCK_DV": min(max(16, 1 << (dv - 1).bit_length()), _MERGED_DIM),
    }


def merge_options(n_parts: int) -> dict[str, int]:
    """Warps, so that loads of a whole block of parts are under way at once. Products are rounded
    before they are added, so that threads that hold the same sum have it to the last bit."""
    return {"num_warps": 1 if n_parts <= _FEW_PARTS else 4, "enable_fp_fusion": False}


def _launch_merge(
    o: torch.Tensor, lse: torch.Tensor, n_parts: int, n_heads: int, place: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    n_queries, dv = o.shape[-2:]
    whole = torch.empty((n_heads, n_queries, dv), dtype=torch.float32, device=o.device)
    whole_lse = torch.empty((n_heads, n_queries), dtype=torch.float32, device=o.device)
    if not whole_lse.numel():
        return whole, whole_lse
    shape = merge_shape(n_parts, dv)
    module: Any = load_kernel("attention_merge")
    with on_current(o.device):
        module.merge_kernel[(n_heads * n_queries, -(-dv // shape["BLOCK_DV"]))](
            o,
            lse,
            # not read where it stands for none
            unused(o.device)[torch.int64] if place is None else place,
            whole,
            whole_lse,
            n_parts,
            n_heads,
            n_queries,
            int(place is not None),
            DV=dv,
            **shape,
            **merge_options(n_parts),
        )
    return whole, whole_lse


def _alignment(found: BlocksFound, fmt: str) -> int:
    """What every needed block's address is a multiple of: 16, or the size of an element (int8: of a
    scale). Raises InvalidInputError."""
    if found.multiple >= 16:
        return 16
    element_bytes = max(ROW_FORMATS[fmt].itemsize, 4 if fmt == "int8" else 1)
    if found.multiple < element_bytes:
        raise InvalidInputError(
            "attention blocks on CUDA",
            got="an odd address",
            expected=f"multiples of {element_bytes} bytes",
            fix="align the blocks",
        )
    return element_bytes
