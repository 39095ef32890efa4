"""Rows of the KV benchmark as a table, for the terminal and for documents."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from espnx.sizes import format_size

from ..harness.cells import ABSENT, baselines_of, metric, number, ratio
from ..harness.result import Row

Table = Callable[[Sequence[Row]], tuple[list[str], list[list[str]]]]


def what(row: Row) -> str:
    """``opt-1.3b fp16, 4 x 3840``."""
    params = row.params
    if params.get("show") in ("attend", "x"):
        return str(params["shape"])
    text = (
        f"{' '.join(str(params[name]) for name in ('model', 'dtype') if name in params)}, "
        f"{params['batch']} x {params['context']}"
    )
    if params.get("throttle_bytes_per_s"):
        text += f", {params['throttle_bytes_per_s'] / 1e6:g} MB/s"
    if params.get("draft_read_ahead_bytes"):
        text += f", {format_size(params['draft_read_ahead_bytes'])} ahead"
    return text


def _first_token_s(row: Row) -> str:
    if "first_token_s" not in row.metrics or row.median_s is None or row.iqr_s is None:
        return ABSENT
    return f"{row.median_s:.3f} ({row.iqr_s:.3f})"


def _step_ms(row: Row) -> str:
    if "first_token_s" in row.metrics:
        return ABSENT
    if "step_s" not in row.metrics or row.iqr_s is None or not row.median_s:
        return number(row.median_s, 1e-3)
    return (
        f"{row.metrics['step_s'] * 1e3:.2f} "
        f"({row.iqr_s / row.median_s * row.metrics['step_s'] * 1e3:.2f})"
    )


def _moved(row: Row) -> str:
    steps = (
        row.bytes_asked / row.metrics["asked_per_step"] if "asked_per_step" in row.metrics else 1
    )
    return number(row.bytes_moved / steps, 1e6, 1) if row.n else ABSENT


def _asked(row: Row) -> str:
    return number(row.metrics.get("asked_per_step", row.bytes_asked), 1e6, 1) if row.n else ABSENT


def _bound(row: Row) -> str:
    is_disk = row.metrics.get("is_disk_bound")
    return ABSENT if is_disk is None else "disk" if is_disk else "compute"


def _x_rows(row: Row) -> str:
    """The X rows, with a mark where the scheduler would have it so: what decides for itself has
    done so."""
    is_choice = bool(row.metrics.get("is_scheduled")) or (
        "x_rows" in row.metrics and row.system.endswith("-auto")
    )
    if not row.metrics.get("x_rows") and not is_choice and "is_scheduled" not in row.metrics:
        return ABSENT
    return f"{int(row.metrics['x_rows'])}{' *' if is_choice else ''}"


def _memory(name: str) -> Callable[[Row], str]:
    return lambda row: format_size(int(row.metrics[name])) if name in row.metrics else ABSENT


def _share(name: str) -> Callable[[Row], str]:
    return lambda row: f"{row.metrics[name]:.3f}" if name in row.metrics else ABSENT


# Columns that have something to say in one of the rows are shown; those after "system" and before
# "bound" are numbers.
_COLUMNS: tuple[tuple[str, Callable[[Row], str]], ...] = (
    ("show", lambda row: str(row.params.get("show", ABSENT))),
    ("what", what),
    ("system", lambda row: row.system),
    ("cache", lambda row: row.cache),
    ("ms/step (IQR)", _step_ms),
    ("first token s (IQR)", _first_token_s),
    ("tokens computed", metric("computed_tokens", 1, 0)),
    ("MB of K and V", metric("kv_bytes", 1e6, 1)),
    ("tokens/s", metric("tokens_per_s", 1, 1)),
    ("MB asked", _asked),
    ("MB read", _moved),
    ("wait ms", metric("waiting_s_per_step", 1e-3)),
    ("compute ms", metric("computing_s_per_step", 1e-3)),
    ("x fio", metric("over_fio")),
    ("MB/s read", metric("read_bytes_per_s", 1e6, 1)),
    ("break-even MB/s", metric("break_even_bytes_per_s", 1e6, 1)),
    ("tokens a pass", metric("tokens_a_pass")),
    ("gamma", metric("gamma", 1, 0)),
    ("x the best fixed", metric("over_best")),
    ("best fixed gamma", metric("best_gamma", 1, 0)),
    ("one by one ms", metric("one_by_one_s", 1e-3)),
    ("given text", metric("forced_tokens_a_pass")),
    ("quoted text", metric("forced_tokens_a_pass_quoted")),
    ("asked over K and V", _share("asked_share")),
    ("given: of K and V", _share("forced_asked_share")),
    ("bytes of drafts", metric("draft_bytes", 1, 0)),
    ("draft memory", _memory("draft_memory_bytes")),
    ("read ahead at most", _memory("read_ahead_limit_bytes")),
    ("MB read in drafts", metric("read_ahead_per_step", 1e6, 1)),
    ("bound", _bound),
    ("X rows (* chosen)", _x_rows),
    ("predicted ms", metric("predicted_s", 1e-3)),
    ("GB/s", metric("bytes_per_s", 1e9, 1)),
    ("GFLOP", metric("flop", 1e9)),
    ("GFLOP/s", metric("flop_per_s", 1e9, 0)),
    ("write requests", metric("requests_written", 1, 0)),
    ("MB written", metric("bytes_written", 1e6, 2)),
    ("write amplification", metric("write_amplification")),
    ("peak memory", _memory("peak_bytes")),
    ("peak of the group", _memory("group_peak_bytes")),
    ("stored", _memory("stored_bytes")),
    ("memory after", _memory("more_bytes")),
    ("memory/stored", metric("memory_over_stored", 1, 4)),
    ("same tokens", metric("same_tokens", 1, 3)),
    ("logit error", metric("logit_error", 1, 4)),
    ("n", lambda row: str(row.n)),
    ("correct", lambda row: "yes" if row.correct else "NO"),
)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    columns = [(name, [cell(row) for row in rows]) for name, cell in _COLUMNS]
    columns = [(name, cells) for name, cells in columns if set(cells) != {ABSENT}]
    for name in _rivals(rows):
        columns.append((f"vs {name} [IQR]", [ratio(row, name) for row in rows]))
    return [name for name, _ in columns], [
        list(line) for line in zip(*(cells for _, cells in columns), strict=True)
    ]


def _rivals(rows: Sequence[Row]) -> list[str]:
    return sorted(name for name in baselines_of(rows) if not name.startswith("fio-"))


def _view(*names: str) -> Table:
    """A table for documents: these columns, ratios, and of fio only its best variant."""

    def show(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
        rows = [row for row in rows if not row.system.startswith("fio-")]
        headers, lines = table(rows)
        kept = [
            i for i, header in enumerate(headers) if header in names or header.startswith("vs ")
        ]
        return [headers[i].removesuffix(" [IQR]") for i in kept], [
            [line[i].split(" [")[0] for i in kept] for line in lines
        ]

    return show


_RESUMED = (
    "first token s (IQR)",
    "tokens computed",
    "MB of K and V",
    "MB read",
    "MB/s read",
    "break-even MB/s",
)
_ACCEPTED = ("given text", "quoted text", "given: of K and V", "bytes of drafts", "draft memory")
#: For documents, by name.
VIEWS: Mapping[str, Table] = {
    "decode": _view("what", "system", "ms/step (IQR)", "MB read", "x fio", "bound"),
    "x": _view(
        "what", "system", "X rows (* chosen)", "ms/step (IQR)", "predicted ms", "MB read", "bound"
    ),
    "ops": _view("what", "system", "ms/step (IQR)", "GB/s", "GFLOP", "GFLOP/s"),
    "spill": _view(
        "what", "system", "ms/step (IQR)", "write requests", "MB written", "write amplification"
    ),
    "speculation": _view(
        "what",
        "system",
        "ms/step (IQR)",
        "tokens a pass",
        "asked over K and V",
        "x fio",
        "draft memory",
    ),
    "gamma": _view(
        "what",
        "system",
        "ms/step (IQR)",
        "gamma",
        "tokens a pass",
        "x the best fixed",
        "best fixed gamma",
    ),
    "long": _view(
        "what",
        "system",
        "ms/step (IQR)",
        "one by one ms",
        "tokens a pass",
        "asked over K and V",
        "x fio",
        "draft memory",
        "peak of the group",
    ),
    "acceptance": _view("what", "system", *_ACCEPTED),
    "resume": _view("what", "system", *_RESUMED, "same tokens"),
    "growth": _view("what", "system", "stored", "memory after"),
    "rss": _view("what", "system", "peak memory", "stored", "memory/stored"),
}
