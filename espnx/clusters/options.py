"""Options of a build, checked."""

from __future__ import annotations

from dataclasses import dataclass

from .. import errors
from ..checks import check_finite, check_whole
from ..device.clusters.layout import CLUSTER_BYTES_MAX, FORMATS, check_page_bytes, entry_bytes
from ..graph.format import METRICS
from ..graph.vectors import Vectors
from ..ops.distances import DIM_MAX

PACKINGS = ("order", "best-fit", "co-access")
HEADS_IN = ("memory", "graph")
REPLICAS_MAX = 8
#: Ids of entries are int32.
N_MAX = 2**31 - 1
#: Names of dtypes, and their formats.
DTYPES = {name: each for each, name in FORMATS.items()}


@dataclass(frozen=True)
class ClusterOptions:
    """The options of a build, as `espnx.clusters.build` describes them."""

    metric: str = "l2"
    n_lists: int | None = None
    heads_share: float = 0.125
    list_bytes: int = 12288
    page_bytes: int = 4096
    replicas: int = 8
    packing: str = "co-access"
    vector_dtype: str = "auto"
    heads: str = "memory"
    threads: int = 1
    seed: int = 0

    def heads_of(self, n: int) -> int:
        """Heads to begin with, of n vectors."""
        wanted = round(n * self.heads_share) if self.n_lists is None else self.n_lists
        return min(n, max(1, wanted))


def check_options(options: ClusterOptions, source: Vectors) -> tuple[str, bool]:
    """(the format that vectors are stored in, whether they are rounded to its steps). Raises
    InvalidInputError."""
    _choose("metric of lists", options.metric, METRICS)
    _choose("packing of lists", options.packing, PACKINGS)
    _choose("heads of lists", options.heads, HEADS_IN)
    check_finite("heads_share", options.heads_share)
    if not 0 < options.heads_share <= 1:
        raise errors.InvalidInputError(
            "heads_share", got=options.heads_share, expected="above 0, at most 1"
        )
    if options.n_lists is not None:
        check_whole("n_lists", options.n_lists, 1, N_MAX)
    check_page_bytes(options.page_bytes)
    check_whole("replicas, lists of a vector", options.replicas, 1, REPLICAS_MAX)
    check_whole("threads", options.threads, 1, 1024)
    check_whole("seed", options.seed, 0, 2**31 - 1)
    most = DIM_MAX - (options.metric == "ip")  # heads have a dimension more, see `ListCoding`
    if source.dim > most:
        raise errors.InvalidInputError(
            f"dimensions of vectors by {options.metric}", got=source.dim, expected=f"at most {most}"
        )
    if source.n > N_MAX:
        raise errors.InvalidInputError(
            "vectors of lists", got=source.n, expected=f"at most {N_MAX}: ids are int32"
        )
    format, is_rounded = _format_of(options, source)  # noqa: A001
    entry = entry_bytes(format, source.dim)
    check_whole("list_bytes, of a list", options.list_bytes, entry, CLUSTER_BYTES_MAX)
    return format, is_rounded


def _format_of(options: ClusterOptions, source: Vectors) -> tuple[str, bool]:
    is_whole = source.dtype.kind in "iu" and options.metric != "cosine"
    wanted = options.vector_dtype
    if wanted == "auto":
        wanted = source.dtype.name if is_whole else "float16"
    is_rounded = wanted == "int8" and not is_whole
    as_they_come = is_whole and wanted == source.dtype.name
    if wanted in ("float32", "float16") or as_they_come or is_rounded:
        return DTYPES[wanted], is_rounded
    raise errors.InvalidInputError(
        "vector_dtype",
        got=f"{options.vector_dtype!r} of {source.dtype} vectors, metric {options.metric}",
        expected=(
            "float32, float16, the vectors' own where they are whole numbers and the metric is not "
            "cosine, or int8 where they are not"
        ),
    )


def _choose(what: str, value: object, among: tuple[str, ...]) -> None:
    if value not in among:
        raise errors.InvalidInputError(what, got=repr(value), expected=", ".join(among))
