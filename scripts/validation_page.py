"""Renders docs/measured/predictions.md and its plot from benchmarks/results/validation.json, which
`espnx simulate --validation --json benchmarks/results/validation.json` writes.

    python scripts/validation_page.py
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "validation.json"
#: Of programs that ran here, by `espnx bench simulate --show throttle,device`, where it is there.
MEASURED = ROOT / "benchmarks" / "results" / "simulate-measured.json"
PAGE = ROOT / "docs" / "measured" / "predictions.md"
PLOT = ROOT / "docs" / "plots" / "predictions.svg"
#: Of the plot: a model that memory does not hold.
PLOTTED = "opt-66b"
#: What moves an id by less is not shown.
SHOWN = 0.02
#: What is no mechanism: fewer models.
ALONE = "opt models alone"
#: By how much a prediction may be off that nothing was fitted on, before it is called missed.
NEAR = 0.15

HEAD = """\
# Papers, predicted

What `espnx simulate --validation` predicts of measurements in papers; what was measured is not in
the program, but for what was fitted on and what is shown beside a prediction and not scored
([how far to believe it](../simulate.md#how-far-to-believe-it)). All of it is
**modelled**. A value is computed with the middles of all ranges, `low` and `high` are the 5th and
95th percentile of draws from them. Beside each stands what becomes of it with one mechanism
switched off, or one figure 10 % up, where that moves it by 2 % or more. No range behind `hilos` or
`ragx` was changed after its predictions were first computed, but for two things of `ragx`: the law
of walks was fitted on more walks, up to 500,000 vectors in place of 20,000; and vectors of clusters
are read one by one, as all others are, where they were first read cluster by cluster.

Rendered from `benchmarks/results/validation.json` by `python scripts/validation_page.py`.
"""


def page(document: Mapping[str, Any], measured: Path = MEASURED) -> str:
    """The page of such a document, and of a result file of programs that ran here if there is
    one."""
    rows = document["validation"]
    predicted = [row for row in rows if "value" in row]
    parts = [HEAD]
    for paper in dict.fromkeys(_paper(row) for row in predicted):
        own = [row for row in predicted if _paper(row) == paper]
        parts.append(_table(paper, own))
        parts.append(_moves(own))
    parts.append(_aisaq(document["aisaq"]))
    parts.append(_fitted(document))
    parts.append(_orders(document["orders"]))
    parts.append(_not_predicted(rows))
    if measured.exists():
        parts.append(_measured(measured))
    return "\n".join(parts)


def _paper(row: Mapping[str, Any]) -> str:
    return str(row["id"]).partition(".")[0]


def _table(paper: str, rows: list[dict[str, Any]]) -> str:
    lines = [f"## `{paper}`\n", "| id | value | low | high | by | from |"]
    lines.append("| --- | --- | --- | --- | --- | --- |")
    for row in rows:
        numbers = " | ".join(f"{row[name]:.2f}" for name in ("value", "low", "high"))
        lines.append(f"| `{row['id']}` | {numbers} | {row['mechanism']} | {row['basis']} |")
    return "\n".join(lines) + "\n"


def _moves(rows: list[dict[str, Any]]) -> str:
    lines = ["| id | what it becomes |", "| --- | --- |"]
    for row in rows:
        moved = [
            f"{what}: {value:.2f}"
            for what, value in row["moved"].items()
            if abs(value - row["value"]) >= SHOWN * abs(row["value"])
        ]
        lines.append(f"| `{row['id']}` | {', '.join(moved) or 'nothing moves it'} |")
    still = [row for row in rows if not _by_mechanism(row)]
    if still:
        lines += ["", "No mechanism and no figure moves these, which show nothing:\n"]
        lines += [f"- `{row['id']}`, {row['value']:.2f}: {row['mechanism']}" for row in still]
    return "\n".join(lines) + "\n"


def _by_mechanism(row: Mapping[str, Any]) -> bool:
    """Whether something moves it that is not which models are asked for."""
    return any(
        abs(value - row["value"]) >= SHOWN * abs(row["value"])
        for what, value in row["moved"].items()
        if what != ALONE
    )


def _aisaq(shown: Mapping[str, Any]) -> str:
    published, streams = shown["published"], shown["figures"]["falcon-4.8b.streams"]["value"]
    lines = [
        "## `aisaq`, shown and not scored\n",
        f"4.8 billion vectors on one server ({published['source']}): P95",
        f"{published['p95_s'] * 1e3:g} ms and {published['queries_per_s']:g} queries/s at 90 %",
        "recall@10, with 9 streams and 14 of 320 clusters. The list with which that recall was",
        "reached is not published, nor is recall modelled: below are lists of the lengths that",
        "were tried. Nothing is fitted on it, and nothing of it counts.\n",
        "| list | P95 ms | range | queries/s | range | bound by | reads of a query | core ms |",
        "| --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for row in shown["rows"]:
        cells = [f"{row['list_size']}"]
        for name, factor in (("p95_s", 1e3), ("queries_per_s", 1.0)):
            value, low, high = (factor * row[name][each] for each in ("value", "low", "high"))
            cells += [f"{value:.1f}", f"{low:.1f} to {high:.1f}"]
        found = row["answer"]
        cells += [found["bound"], f"{found['reads']:,.0f}", f"{found['core_s'] * 1e3:.0f}"]
        lines.append(f"| {' | '.join(cells)} |")
    blind = ", ".join(
        f"{each['value']:.2f} with a list of {each['list_size']}" for each in shown["blind_over"]
    )
    lines += [
        "",
        "Searching 60 shards of 80 million blindly takes a P95 that is",
        f"{published['blind_over']:g} times as long (published); predicted: {blind}.\n",
        "All queries ask the same of every cluster here, so P95 is hardly above the mean.",
        f"Published: {streams:g} streams and {published['queries_per_s']:g} queries/s, a mean of",
        f"{streams / published['queries_per_s'] * 1e3:.0f} ms. Computed with (what is not here,",
        "such as sizes, is as the publication's set-up has it):\n",
        "| figure | value | range | basis | source |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name, each in shown["figures"].items():
        if each["confidence"] != "paper":
            numbers = f"{each['value']:.4g} | {each['low']:.4g} to {each['high']:.4g}"
            lines.append(f"| `{name}` | {numbers} | {each['confidence']} | {each['source']} |")
    return "\n".join(lines) + "\n"


def _fitted(document: Mapping[str, Any]) -> str:
    lines = ["## What was fitted\n", "| figure | seconds |", "| --- | --- |"]
    lines += [f"| `{name}` | {value:.4g} |" for name, value in document["fitted"].items()]
    lines += ["", "They were fitted on these alone:\n"]
    lines += [f"- {name}: {value:g}" for name, value in document["fitted_on"].items()]
    lines += ["", "What papers say beside that, on which nothing was fitted:\n"]
    lines += ["| | measured | predicted | |", "| --- | --- | --- | --- |"]
    for each in (document["check"], *document["checks"]):
        is_near = abs(each["predicted"] / each["measured"] - 1) <= NEAR
        word = "" if is_near else "**missed**"
        lines.append(f"| {each['id']} | {each['measured']:g} | {each['predicted']:.4g} | {word} |")
    return "\n".join(lines) + "\n"


def _orders(orders: list[dict[str, Any]]) -> str:
    image = f"../plots/{PLOT.name}"
    lines = ["## Which system is faster\n", "Tokens a second when decoding, batches of 16.\n"]
    lines.append(f'<img src="{image}" alt="tokens a second over the context, {PLOTTED}">\n')
    lines += ["| model | context | fastest first |", "| --- | --- | --- |"]
    for each in orders:
        order = ", ".join(f"{name} {rate:.3g}" for name, rate in each["tokens_per_s"].items())
        lines.append(f"| {each['model']} | {each['context']:,} | {order} |")
    return "\n".join(lines) + "\n"


def _not_predicted(rows: list[dict[str, Any]]) -> str:
    reasons: dict[str, list[str]] = {}
    for row in rows:
        if "not_predicted" in row:
            reasons.setdefault(row["not_predicted"], []).append(f"`{row['id']}`")
    if not reasons:
        return ""
    lines = ["## Not predicted\n"]
    lines += [f"- {reason}: {', '.join(ids)}" for reason, ids in reasons.items()]
    return "\n".join(lines) + "\n"


def _measured(file: Path) -> str:
    from espnx.benchmarks.harness.result import load, rows_of
    from espnx.benchmarks.simulate.compared import table

    headers, cells = table(rows_of(load(file)))
    lines = [
        "## On one machine\n",
        "Programs that ran in turns with the disk free and throttled: what is predicted of free",
        "turns under a throttle, beside the turns under it; and programs on emulated devices,",
        "predicted beside the emulated time",
        f"(`{file.name}`, `espnx bench simulate --show throttle,device`). What took is measured or",
        "emulated, the predictions are **modelled**. Where n is 0 the run's results were not those",
        "of the free run, so that it has no time to hold the prediction against.\n",
        f"| {' | '.join(headers)} |",
        f"|{' --- |' * len(headers)}",
    ]
    return "\n".join([*lines, *(f"| {' | '.join(each)} |" for each in cells)]) + "\n"


def draw(document: Mapping[str, Any], path: Path) -> None:
    """The systems that hold all contexts of one model."""
    from espnx.benchmarks.report import looks

    looks.use_style()
    points: dict[str, list[tuple[float, float]]] = {}
    for each in document["orders"]:
        if each["model"] == PLOTTED:
            for name, rate in each["tokens_per_s"].items():
                points.setdefault(name, []).append((each["context"] / 1000, rate))
    first, last = (points[name][-1][1] for name in ("smartssd-16", "flexgen-4ssd"))
    figure, axes = looks.new_axes(
        f"Attention in 16 drives decodes {first / last:.1f} times as fast as FlexGen "
        f"({PLOTTED}, batches of 16, modelled)",
        "context, thousand tokens",
        "tokens/s",
        looks.WHOLE_INCHES,
    )
    for name, line in points.items():
        colour = looks.ESPNX if name.startswith("smartssd") else looks.OTHER
        looks.line(axes, looks.Look(name, colour), line)
    looks.logarithmic(axes, looks.plain, looks.plain)
    looks.name_ends(axes)
    figure.savefig(path, metadata={"Date": None})


def main() -> None:
    document = json.loads(RESULTS.read_text())
    PAGE.write_text(page(document))
    draw(document, PLOT)


if __name__ == "__main__":
    main()
