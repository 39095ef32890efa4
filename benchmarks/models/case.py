"""``espnx bench models``: every causal model of the installed transformers, tiny, with a cache on
SSD beside the framework's own."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from ..harness.registry import Case, Say
from ..harness.result import Row

OUTCOMES = ("equal", "refused", "not run")

DESCRIPTION = """Each model of transformers' mapping of causal models is made tiny and random
(tests/data/models.json), in all its variants (windows on and off, sparse layers), and generates
from padded prompts that are longer than what waits in memory. Either the tokens are those of
DynamicCache, without a KVCache, with one, and with X rows by default and asked for; or
`enable_kv_cache` refuses it and names why.

  espnx bench models --json benchmarks/results/kv-models.json
  espnx bench models --model llama,gemma4_text

An interrupted run goes on where it was (--progress FILE)."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--model",
        metavar="M,...",
        default="",
        help="default: all that the installed transformers has",
    )
    parser.add_argument(
        "--progress",
        metavar="FILE",
        default=".cache/models.jsonl",
        help="outcomes so far (default: .cache/models.jsonl)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    from .sweep import names, sweep

    asked = args.model.split(",") if args.model else names()
    progress = Path(args.progress)
    progress.parent.mkdir(parents=True, exist_ok=True)
    done = {}
    if progress.is_file() and not args.model:
        done = {
            found["model"]: found
            for found in map(json.loads, progress.read_text(encoding="utf-8").splitlines())
        }
    for name, found, seconds in sweep(asked, done):
        done[name] = {"model": name, "variants": found, "seconds": seconds}
        with progress.open("a", encoding="utf-8") as file:
            file.write(json.dumps(done[name]) + "\n")
        say(f"{name}: {', '.join(each['outcome'] for each in found)} ({seconds:.1f} s)")
    rows = [
        _row(name, each, done[name]["seconds"] / len(done[name]["variants"]))
        for name in asked
        for each in done[name]["variants"]
    ]
    if not args.model:
        progress.unlink(missing_ok=True)
    return rows


def _row(name: str, found: dict[str, Any], seconds: float) -> Row:
    import transformers

    ran = found["outcome"] == "equal"
    return Row(
        case="models",
        params={
            "model": name,
            "variant": found["variant"],
            "transformers": transformers.__version__,
            "outcome": found["outcome"],
            "why": found["why"],
            "x_rows": found.get("x_rows", {}),
        },
        system="espnx",
        kind="measured",
        requested_path="auto",
        effective_path="",
        cache="warm",
        n=1 if ran else 0,
        median_s=seconds if ran else None,
        p99_s=None if not ran else seconds,
        iqr_s=0.0 if ran else None,
        bytes_asked=found.get("bytes_asked", 0),
        bytes_moved=0,
        correct=found["outcome"] in OUTCOMES,
        metrics={name: found.get(name, 0) for name in ("layers_on_ssd", "layers_in_memory")},
    )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    cells = []
    for row in rows:
        layers = (
            f"{row.metrics['layers_on_ssd']:.0f} / {row.metrics['layers_in_memory']:.0f}"
            if row.n
            else "-"
        )
        x_rows = row.params["x_rows"].get("2", "-") if row.n else "-"
        model = row.params["model"] + (
            f", {row.params['variant']}" if row.params["variant"] else ""
        )
        cells.append(
            [
                model,
                row.params["outcome"],
                layers,
                x_rows,
                "" if row.params["outcome"] == "equal" else _reason(row.params["why"]),
            ]
        )
    return [
        "model",
        "outcome",
        "layers on SSD / in memory",
        "X rows asked for: 2",
        "why not",
    ], cells


def _reason(why: str) -> str:
    """What was got, as far as it is the model's own doing."""
    got = why.split("; got ", 1)[-1].split("; expected", 1)[0].split(". Fix:", 1)[0]
    return got.replace("|", "/").replace("<", "&lt;")[:160]


CASE = Case(
    "models",
    "all causal models of transformers: a cache on SSD, or a refusal in words",
    configure,
    run,
    table,
)
