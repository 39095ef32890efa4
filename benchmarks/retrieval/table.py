"""Rows of the retrieval benchmark as tables, for the terminal and for documents."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from espnx.sizes import format_size

from ..harness.cells import ABSENT, baselines_of, metric, number, ratio
from ..harness.result import Row

Table = tuple[list[str], list[list[str]]]


def _memory(row: Row) -> str:
    limit = row.params.get("memory_bytes")
    return "ample" if limit is None else format_size(limit)


def _hit_rate(row: Row) -> str:
    digits = 4 if "difference" in row.metrics else 2
    return (
        number(row.metrics.get("hit_rate"), 1, digits) if row.system.startswith("espnx") else ABSENT
    )


def what(row: Row) -> str:
    """``exact 1000, nprobe 104``."""
    params = row.params
    if params.get("cascade") is not None:
        text = f"cascade {params['cascade']} of {params.get('candidates')}"
    elif params.get("rerank") is not None:
        text = f"re-rank {params['rerank']}"
    else:
        text = f"exact {params.get('candidates')}"
    text += f", nprobe {params.get('nprobe')}"
    if params.get("batch", 1) > 1:
        text += f", batch {params['batch']}"
    if params.get("callers"):
        text += f", {params['callers']} callers"
    if params.get("threads"):
        text += f", {params['threads']} thread{'s' if params['threads'] > 1 else ''}"
    if params.get("throttle_bytes_per_s"):
        text += f", at {params['throttle_bytes_per_s'] / 1e6:g} MB/s"
    return text


# Columns that have something to say in one of the rows are shown.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("corpus", lambda row: str(row.params.get("corpus", ABSENT))),
    ("what", what),
    ("system", lambda row: row.system),
    ("memory", _memory),
    ("ms", lambda row: number(row.median_s, 1e-3)),
    ("IQR", lambda row: number(row.iqr_s, 1e-3)),
    (
        "p95 ms",
        lambda row: (
            number(row.metrics.get("p95_s"), 1e-3)
            if row.params.get("show") == "callers"
            else ABSENT
        ),
    ),
    ("queries/s", metric("queries_per_s", 1, 0)),
    (
        "x memory",
        lambda row: (
            number(1 / row.ratio["memory"]) if "memory" in row.ratio else ratio(row, "memory")
        ),
    ),
    ("x bound", metric("over_bound")),
    ("hit rate", _hit_rate),
    ("of FAISS", metric("hit_rate_faiss", 1, 4)),
    ("recall", metric("recall", 1, 4)),
    (
        "MB",
        lambda row: (
            number(row.metrics["rss_growth_bytes"], 1e6, 0)
            if row.params.get("show") == "index-memory"
            else ABSENT
        ),
    ),
    ("records per index", metric("records_per_index", 1, 1)),
    ("bytes/document", metric("bytes_per_document", 1, 0)),
    ("nDCG@10", metric("nDCG@10", 1, 4)),
    ("MRR@10", metric("MRR@10", 1, 4)),
    ("recall@100", metric("recall@100", 1, 4)),
    ("MB moved", lambda row: number(row.bytes_moved, 1e6, 1) if row.bytes_moved else ABSENT),
    ("requests", metric("requests", 1, 0)),
    ("requests of id order", metric("requests_per_id_order")),
    ("batch limit (eq. 4)", metric("query_batch_threshold", 1, 1)),
    ("n", lambda row: str(row.n)),
    ("correct", lambda row: "yes" if row.correct else "NO"),
)
# of a table with a column for each system
_FIRST = ("memory", "espnx", "cascade-ssd-64", "mmap-1", "mmap-willneed")
_COMPARED = ("mmap", "swap", "no-prefetch", "id-order", "fp16")


def table(rows: Sequence[Row]) -> Table:
    """Headers and cells, one line per row."""
    cells = [[cell(row) for _, cell in _COLUMNS] for row in rows]
    shown = [i for i in range(len(_COLUMNS)) if any(line[i] != ABSENT for line in cells)]
    baselines = [
        name for name in dict.fromkeys(row.system for row in rows) if name.startswith(_COMPARED)
    ]
    baselines = [name for name in baselines if name in baselines_of(rows)]
    versus = [[ratio(row, name).split(" [")[0] for name in baselines] for row in rows]
    headers = [_COLUMNS[i][0] for i in shown] + [f"vs {name}" for name in baselines]
    return headers, [
        [line[i] for i in shown] + extra for line, extra in zip(cells, versus, strict=True)
    ]


def by_memory(rows: Sequence[Row]) -> Table:
    """ESPN's table 4 in shape: a line for each system, a column for each amount of memory; median
    milliseconds, and the multiple of ``memory`` in brackets. One depth of re-ranking after the
    other."""
    rows = [
        row for row in rows if row.params.get("show") == "table" and row.params.get("batch") == 1
    ]
    points = list(
        dict.fromkeys(
            (row.params["corpus"], row.params["rerank"], row.params["threads"]) for row in rows
        )
    )
    limits = sorted({_memory(row) for row in rows}, key=lambda text: text != "ample", reverse=True)
    lines = []
    for corpus, rerank, threads in points:
        here = [
            row
            for row in rows
            if (row.params["corpus"], row.params["rerank"], row.params["threads"])
            == (corpus, rerank, threads)
        ]
        for system in dict.fromkeys(row.system for row in here):
            found = {_memory(row): row for row in here if row.system == system}
            lines.append(
                [
                    corpus,
                    what(here[0]),
                    system,
                    *(_milliseconds(found.get(limit), here) for limit in limits),
                ]
            )
    return ["corpus", "what", "system", *(f"{limit}, ms" for limit in limits)], lines


def by_size(rows: Sequence[Row]) -> Table:
    """A line for each size of the records, a column for each system: median milliseconds, and the
    recall@10 that they gave."""
    found = list(dict.fromkeys(row.system for row in rows))
    systems = [name for name in _FIRST if name in found] + [
        name for name in found if name not in _FIRST
    ]
    points: dict[tuple[str, int, str], list[Row]] = {}
    for row in rows:
        points.setdefault((row.params["corpus"], row.params["documents"], _memory(row)), []).append(
            row
        )
    lines = []
    for (corpus, documents, memory), here in points.items():
        size = here[0].metrics.get("record_bytes")
        times = {
            row.system: f"{number(row.median_s, 1e-3)}{_recall(row)}" if row.correct else "WRONG"
            for row in here
        }
        lines.append(
            [
                corpus,
                f"{documents:,}",
                number(size, 1e9),
                memory,
                *(times.get(system, ABSENT) for system in systems),
            ]
        )
    headers = [
        "corpus",
        "documents",
        "records, GB",
        "memory",
        *(f"{system}, ms" for system in systems),
    ]
    # one corpus, one limit: the page and the command below say which
    if len({(line[0], line[3]) for line in lines}) == 1:
        return [headers[at] for at in (1, 2, *range(4, len(headers)))], [
            [*line[1:3], *line[4:]] for line in lines
        ]
    return headers, lines


def _recall(row: Row) -> str:
    """Behind its time, where it was measured."""
    return f" at {row.metrics['recall@10']:.3f}" if "recall@10" in row.metrics else ""


def _milliseconds(row: Row | None, everyone: Sequence[Row]) -> str:
    if row is None or row.median_s is None:
        return ABSENT if row is None or row.correct else "WRONG"
    if "memory" in row.ratio:
        return f"{1e3 * row.median_s:.2f} ({1 / row.ratio['memory']:.2f}x)"
    base = next(
        (
            r.median_s
            for r in everyone
            if r.system == "memory"
            and r.params.get("memory_bytes") == row.params.get("memory_bytes")
        ),
        None,
    )
    return f"{1e3 * row.median_s:.2f}" + (
        f" ({row.median_s / base:.2f}x)" if base and row.system != "memory" else ""
    )
