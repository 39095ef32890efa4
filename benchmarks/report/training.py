"""How the demo's model was trained, from the record in its folder: a table for documents, between
``<!-- training -->`` and ``<!-- /training -->``, with a plot of the losses below it."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from espnx.errors import FormatError

from .looks import ESPNX, MEMORY, OTHER, WHOLE_INCHES, new_axes

RECORD = "espnx/models/demo/training.json"
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
        raise FormatError(
            "cannot read the record of a training",
            path=path,
            got=repr(error),
            expected="training.json",
        ) from error
    return dict(found)


def fill(text: str, root: Path) -> str:
    """The text with its marked blocks filled; without a model they are empty."""
    if not BLOCK.search(text):
        return text
    record = load_record(root)
    plot = f"![Loss and answers over the training](plots/{PLOT}.svg)"  # for a page in docs/
    table = (
        ""
        if record is None
        else "\n".join(["", "| | |", "| --- | --- |", *_lines(record), "", plot, "", ""])
    )
    return BLOCK.sub(lambda match: f"{match[1]}{table}{match[2]}", text)


def _lines(record: Mapping[str, Any]) -> list[str]:
    return [
        f"| {name} | {value} |"
        for name, value in _facts(
            record["settings"], record["corpus"], record["results"], record["command"]
        )
    ]


def _facts(
    settings: Mapping[str, Any], corpus: Mapping[str, Any], results: Mapping[str, Any], command: str
) -> Iterator[tuple[str, str]]:
    shape = (
        f"{settings['layers']} layers, {settings['hidden']} wide, {settings['heads']} query heads "
        f"and {settings['kv_heads']} KV heads"
    )
    yield (
        "parameters",
        f"{results['parameters']:,} in bfloat16, {results['model_bytes'] / 1e6:.1f} MB",
    )
    yield (
        "shape",
        (
            f"{shape}, {settings['vocabulary']:,} tokens of vocabulary, context "
            f"{settings['context']:,}"
        ),
    )
    yield (
        "text",
        (
            f"{corpus['documents']:,} docstrings, {corpus['characters'] / 1e6:.1f} million "
            f"characters, {corpus['tokens']:,} tokens"
        ),
    )
    yield (
        "held out",
        f"{corpus['held_out_documents']:,} docstrings, {corpus['held_out_tokens']:,} tokens",
    )
    yield "trained on", f"{results['tokens'] / 1e6:.1f} million tokens, {results['steps']:,} steps"
    yield (
        "time",
        (
            f"{results['minutes']:.0f} minutes of {settings['threads']} threads, "
            f"{results['tokens_per_second']:,.0f} tokens a second"
        ),
    )
    yield "training loss at the end", f"{results['train_loss']:.3f}"
    yield (
        "held-out loss",
        f"{results['validation_loss']:.3f} (perplexity {results['validation_perplexity']:.1f})",
    )
    far, near = results["last_quarter_loss"], results["last_quarter_loss_half_context"]
    yield (
        "held-out loss, last quarter of the context",
        f"{far:.3f}; without the first half of the context {near:.3f}",
    )
    recalls = ", ".join(
        f"{share:.1%} at {distance}" for distance, share in results["recall_exact_match"].items()
    )
    yield (
        (
            f"exact recall of held-out words, {settings['recall_samples']} questions each, by "
            "distance in tokens"
        ),
        recalls,
    )
    yield "command", f"`{command}`"


def loss_curve(record: Mapping[str, Any]) -> Any:
    """Training loss over tokens, and the share of answer tokens that were right; lines where the
    context grew. None without points."""
    points = record["curve"]
    if not points:
        return None
    figure, axes = new_axes(
        _finding(record["results"]),
        "million tokens; dotted: the context grows",
        "loss of plain text",
        WHOLE_INCHES,
    )
    other = axes.twinx()
    other.set(ylabel="answer tokens right", ylim=(0, 1.02))
    other.grid(visible=False)
    for side, name, colour in ((axes, "train_loss", ESPNX), (other, "answer_tokens_right", MEMORY)):
        known = [
            (point["tokens"] / 1e6, point[name]) for point in points if point[name] is not None
        ]
        if known:
            side.plot(*zip(*known, strict=True), color=colour, linewidth=1.4)
        side.yaxis.label.set_color(colour)
    for before, after in itertools.pairwise(points):
        if after["context"] != before["context"]:
            at = before["tokens"] / 1e6
            axes.axvline(at, color=OTHER, linewidth=0.8, linestyle=":")
            axes.annotate(
                f"{after['context']:,}",
                (at, 1.01),
                xycoords=("data", "axes fraction"),
                ha="center",
                va="bottom",
                size=8,
            )
    return figure


def _finding(results: Mapping[str, Any]) -> str:
    minutes = (
        f"{results['minutes'] / 60:.0f} hours"
        if results["minutes"] >= 120
        else f"{results['minutes']:.0f} minutes"
    )
    recalls = sorted(
        (int(distance), share) for distance, share in results["recall_exact_match"].items()
    )
    known = (
        ", ".join(
            f"{share:.0%} {distance:,} tokens back" for distance, share in (recalls[0], recalls[-1])
        )
        if recalls
        else ""
    )
    return f"{minutes} of training" + (f": words found again, {known}" if known else "")
