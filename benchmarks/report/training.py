"""How the demo's model was trained, from the record in its folder: a table for documents, between ``<!-- training -->`` and
``<!-- /training -->``, with a plot of the losses below it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espnx.errors import FormatError

RECORD = "models/demo/training.json"
PLOT = "demo-model-loss"
BLOCK = re.compile(r"(<!-- training -->\n).*?(<!-- /training -->)", re.DOTALL)


def load_record(root: Path) -> dict[str, Any] | None:
    """What scripts/train_demo_model.py wrote; None where there is no model. Raises FormatError."""
    path = root / RECORD
    if not path.is_file():
        return None
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        _lines(found)
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError("cannot read the record of a training", path=path, got=repr(error), expected="training.json") from error
    return dict(found)


def fill(text: str, root: Path) -> str:
    """The text with its marked blocks filled; without a model they are empty."""
    if not BLOCK.search(text):
        return text
    record = load_record(root)
    plot = f"![Loss and answers over the training](plots/{PLOT}.svg)"  # for a page in docs/
    table = "" if record is None else "\n".join(["", "| | |", "| --- | --- |", *_lines(record), "", plot, "", ""])
    return BLOCK.sub(lambda match: f"{match[1]}{table}{match[2]}", text)


def _lines(record: Mapping[str, Any]) -> list[str]:
    return [f"| {name} | {value} |" for name, value in _facts(record["settings"], record["corpus"], record["results"], record["command"])]


def _facts(settings: Mapping[str, Any], corpus: Mapping[str, Any], results: Mapping[str, Any], command: str) -> Iterator[tuple[str, str]]:
    shape = f"{settings['layers']} layers, {settings['hidden']} wide, {settings['heads']} query heads and {settings['kv_heads']} KV heads"
    yield "parameters", f"{results['parameters']:,} in bfloat16, {results['model_bytes'] / 1e6:.1f} MB"
    yield "shape", f"{shape}, {settings['vocabulary']:,} tokens of vocabulary, context {settings['context']:,}"
    yield "text", f"{corpus['documents']:,} docstrings, {corpus['characters'] / 1e6:.1f} million characters, {corpus['tokens']:,} tokens"
    yield "held out", f"{corpus['held_out_documents']:,} docstrings, {corpus['held_out_tokens']:,} tokens"
    yield "trained on", f"{results['tokens'] / 1e6:.1f} million tokens, {results['steps']:,} steps"
    yield "time", f"{results['minutes']:.0f} minutes of {settings['threads']} threads, {results['tokens_per_second']:,.0f} tokens a second"
    yield "training loss at the end", f"{results['train_loss']:.3f}"
    yield "held-out loss", f"{results['validation_loss']:.3f} (perplexity {results['validation_perplexity']:.1f})"
    far, near = results["last_quarter_loss"], results["last_quarter_loss_half_context"]
    yield "held-out loss, last quarter of the context", f"{far:.3f}; without the first half of the context {near:.3f}"
    recalls = ", ".join(f"{share:.1%} at {distance}" for distance, share in results["recall_exact_match"].items())
    yield f"exact recall of held-out words, {settings['recall_samples']} questions each, by distance in tokens", recalls
    yield "command", f"`{command}`"


def loss_curve(record: Mapping[str, Any]) -> Any:
    """Training loss over tokens, and the share of answer tokens that were right; lines where the context grew. None without points."""
    from matplotlib.figure import Figure

    points = record["curve"]
    if not points:
        return None
    figure = Figure(figsize=(6.4, 3.6), layout="constrained")
    axes = figure.add_subplot()
    axes.set(title="Training of the demo model", xlabel="million tokens", ylabel="loss (plain text)")
    axes.grid(alpha=0.3)
    other = axes.twinx()
    other.set(ylabel="answer tokens right", ylim=(0, 1.02))
    for side, name, colour, label in ((axes, "train_loss", "tab:blue", "loss"), (other, "answer_tokens_right", "tab:orange", "answers")):
        known = [(point["tokens"] / 1e6, point[name]) for point in points if point[name] is not None]
        if known:
            side.plot(*zip(*known, strict=True), color=colour, label=label, linewidth=1)
    for before, after in itertools.pairwise(points):
        if after["context"] != before["context"]:
            at = before["tokens"] / 1e6
            axes.axvline(at, color="grey", linewidth=0.8, linestyle=":")
            place: dict[str, Any] = {"xycoords": ("data", "axes fraction"), "ha": "left", "va": "bottom", "fontsize": "x-small"}
            axes.annotate(f"context {after['context']}", (at, 0.03), **place)
    figure.legend(loc="outside lower center", ncols=2, fontsize="small")
    return figure
