"""Options of a build, and what they make of the vectors that come in."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .. import errors
from ..checks import check_finite, check_whole
from ..ops.distances import DIM_MAX, VECTOR_FORMATS, vector_bytes
from .codes.coding import from_bfloat16, to_bfloat16
from .format import METRICS, N_MAX
from .layout import CODES_IN, MAX_DEGREE_MAX
from .vectors import Vectors

_ALPHA_MAX = 4.0
_FP16_MAX = 65504.0
#: Of a vector: the squared distance of two such is at most four times as large, and float32 still
#: holds it.
SQUARES_MAX = 2.0**125


@dataclass(frozen=True)
class GraphOptions:
    """The options of a build, as `espnx.graph.build` describes them."""

    metric: str = "l2"
    max_degree: int = 64
    list_size: int = 100
    alpha: float = 1.2
    codes: str = "inline"
    inline_pq: int | None = None
    pq_bytes: int | None = None
    vector_dtype: str = "auto"
    num_entry_points: int = 1000
    threads: int = 1
    seed: int = 0
    device: str = "cpu"
    disk_pq_bytes: int | None = None
    use_opq: bool = True


def check_options(options: GraphOptions, source: Vectors, n_max: int = N_MAX) -> str:
    """The format that vectors are stored in, of `espnx.graph.layout.NODE_FORMATS`. Raises
    InvalidInputError."""
    if options.metric not in METRICS:
        raise errors.InvalidInputError(
            "metric of a graph", got=repr(options.metric), expected=" or ".join(METRICS)
        )
    if options.codes not in CODES_IN:
        raise errors.InvalidInputError(
            "codes of a graph", got=repr(options.codes), expected=", ".join(CODES_IN)
        )
    check_whole("max_degree", options.max_degree, 1, MAX_DEGREE_MAX)
    if options.inline_pq is not None:
        check_whole("inline_pq", options.inline_pq, -1, options.max_degree)
        if options.codes == "inline" and options.inline_pq != options.max_degree:
            raise errors.InvalidInputError(
                "inline_pq",
                got=options.inline_pq,
                expected="max_degree where all codes are inline",
                fix='codes="paged" or "memory"',
            )
    check_whole("list_size", options.list_size, 1, 1 << 16)
    check_finite("alpha", options.alpha)
    if not 1 <= options.alpha <= _ALPHA_MAX:
        raise errors.InvalidInputError("alpha", got=options.alpha, expected=f"1 to {_ALPHA_MAX:g}")
    check_whole("num_entry_points", options.num_entry_points, 1, 65536)
    check_whole("threads", options.threads, 1, 1024)
    check_whole("seed", options.seed, 0, 2**63 - 1)
    # edges are chosen with a dimension more, see `measured_rows`
    most = DIM_MAX - (options.metric == "ip")
    if source.dim > most:
        raise errors.InvalidInputError(
            f"dimensions of vectors by {options.metric}", got=source.dim, expected=f"at most {most}"
        )
    if source.n > n_max:
        raise errors.InvalidInputError(
            "vectors of a graph",
            got=source.n,
            expected=f"at most {n_max}",
            fix="build a graph for each cluster (clusters=)" if n_max == N_MAX else None,
        )
    if options.pq_bytes is not None:
        check_whole("pq_bytes", options.pq_bytes, 1, source.dim)
    if (wanted := options.vector_dtype) == "pq" or options.disk_pq_bytes is not None:
        if wanted not in ("auto", "pq"):
            raise errors.InvalidInputError(
                "vector_dtype", got=repr(wanted), expected='"pq" where there are disk_pq_bytes'
            )
        check_whole(
            "disk_pq_bytes, of the codes in place of vectors", options.disk_pq_bytes, 1, source.dim
        )
        return "pq"
    formats = {str(dtype).removeprefix("torch."): name for name, dtype in VECTOR_FORMATS.items()}
    is_whole = source.dtype.kind in "iu"
    if wanted == "auto":
        wanted = source.dtype.name if is_whole and options.metric != "cosine" else "float16"
    if wanted not in formats or (
        wanted in ("uint8", "int8") and (wanted != source.dtype.name or options.metric == "cosine")
    ):
        raise errors.InvalidInputError(
            "vector_dtype",
            got=f"{options.vector_dtype!r} of {source.dtype} vectors, metric {options.metric}",
            expected=(
                "float32, float16, bfloat16 or pq, or the vectors' own where they are whole "
                "numbers and the metric is not cosine"
            ),
        )
    if vector_bytes(formats[wanted], source.dim) > 1 << 16:
        raise errors.InvalidInputError(
            "a vector",
            got=f"{vector_bytes(formats[wanted], source.dim)} bytes",
            expected="at most 64 KiB",
        )
    return formats[wanted]


def stored_rows(block: np.ndarray, first: int, metric: str, format: str) -> np.ndarray:  # noqa: A002
    """Vectors [m, dim] of the input, the first of them number `first`, as they will be stored, but
    for the rounding to float16, and for codes in their place.

    Raises InvalidInputError for one that cannot be.
    """
    if block.dtype.kind in "iu" and metric != "cosine":
        return block
    values = np.asarray(block, dtype=np.float32)
    if not np.isfinite(values).all():
        row, dim = (int(each[0]) for each in np.nonzero(~np.isfinite(values)))
        raise errors.InvalidInputError(
            f"vector {first + row}, value {dim}",
            got=float(values[row, dim]),
            expected="a finite number",
        )
    squares = np.square(values.astype(np.float64)).sum(axis=1)
    if squares.size and squares.max() > SQUARES_MAX:
        row = int(np.argmax(squares))
        raise errors.InvalidInputError(
            f"vector {first + row}",
            got=f"length {np.sqrt(squares[row]):.3g}",
            expected=f"at most {np.sqrt(SQUARES_MAX):.3g}",
            fix="scale the vectors: distances between such overflow float32",
        )
    if metric == "cosine":
        length = np.linalg.norm(values.astype(np.float64), axis=1, keepdims=True)
        if not length.all():
            raise errors.InvalidInputError(
                f"vector {first + int(np.argmin(length))}",
                got="length 0",
                expected="a vector that has a direction, for metric cosine",
                fix="leave it out, or build by metric ip",
            )
        values = (values / length).astype(np.float32)
    if format == "fp16" and values.size and (most := float(np.abs(values).max())) > _FP16_MAX:
        raise errors.InvalidInputError(
            "a vector's value",
            got=most,
            expected=f"at most {_FP16_MAX:g} as float16",
            fix='vector_dtype="float32" or "bfloat16"',
        )
    return from_bfloat16(to_bfloat16(values)) if format == "bf16" else values


def measured_rows(
    rows: np.ndarray,
    metric: str,
    format: str,  # noqa: A002
    most: float | None = None,
) -> tuple[np.ndarray, str]:
    """What the graph is built of, and its format. By inner product: with a dimension more, in which
    all vectors have one length, so that the nearest by distance has the largest product with any
    query (Bachrach et al., Speeding up the Xbox recommender system).

    Args:
        rows: [m, dim], as they are stored.
        most: the largest squared length of all vectors; None: of these.
    """
    if metric != "ip":
        return rows, format
    squares = np.square(rows.astype(np.float32)).sum(axis=1)
    most = max(most or 0.0, float(squares.max())) if len(rows) else 0.0
    rest = np.sqrt(np.maximum(np.float32(most) - squares, 0))
    return np.concatenate([rows.astype(np.float32), rest[:, None]], axis=1), "fp32"
