"""``espnx bench kv-quality``: what a trained model loses when its K and V are stored as int8 rows;
that it loses nothing otherwise."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence

from ..harness.registry import Case, Say
from ..harness.result import Row

DESCRIPTION = """Held-out text, and questions about a line far back in it (KEY garden: silver river
... GET garden:), go through a trained model piece by piece, what stands before a piece being read
back from the cache: transformers' DynamicCache in memory (dynamic), a KVCache on SSD with rows as
the model makes them (espnx), and one with int8 rows (espnx-int8).

  espnx bench kv-quality --model demo --dtype fp32,bf16
  espnx bench kv-quality --quick                                      does everything work here?

perplexity: of the second half of each window. recall: share of questions that greedy decoding
answers exactly, by the distance of the answer in tokens; the line stands in the half of the context
that is on SSD in whole blocks by then. espnx must give what dynamic gives, token by token, to the
rounding of the dtype; int8 is lossy, and the rows say by how much. --seed chooses the questions;
--pairs is not used."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--model",
        metavar="DIR",
        default="demo",
        help="folder of scripts/train_demo_model.py (default: demo, which comes with espnx)",
    )
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the SSD (default: the current one)",
    )
    add(
        "--dtype",
        metavar="D,...",
        default="fp32",
        help="of weights and of rows that are not int8: fp32, bf16, fp16 (default: fp32)",
    )
    add(
        "--windows",
        type=int,
        metavar="N",
        default=32,
        help="of held-out text, as long as the context (default: 32; with --quick 2)",
    )
    add(
        "--questions",
        type=int,
        metavar="N",
        default=64,
        help="at each distance (default: 64; with --quick 4)",
    )
    add("--batch", type=int, metavar="N", default=8, help="sequences at a time (default: 8)")
    add(
        "--piece",
        type=int,
        metavar="N",
        default=128,
        help="tokens of a piece of text (default: 128)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures. Raises InvalidInputError, FormatError (the model's folder)."""
    from .measure import measure, read_options

    return measure(read_options(args), say)


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    distances = sorted(
        {
            int(name.removeprefix("recall_"))
            for row in rows
            for name in row.metrics
            if name.startswith("recall_")
        }
    )
    headers = [
        "model",
        "dtype",
        "system",
        "path",
        "B/token",
        "on SSD",
        "perplexity",
        *(f"recall {distance}" for distance in distances),
    ]
    return [*headers, "other tokens", "largest difference", "questions", "correct"], [
        _cells(row, distances) for row in rows
    ]


def _cells(row: Row, distances: Sequence[int]) -> list[str]:
    found = row.metrics
    return [
        str(row.params["model"]),
        str(row.params["dtype"]),
        row.system,
        row.effective_path,
        f"{found['bytes_per_token']:.0f}",
        f"{found['stored_share']:.0%}",
        f"{found['perplexity']:.4f}",
        *(
            f"{found[f'recall_{distance}']:.1%}" if f"recall_{distance}" in found else "-"
            for distance in distances
        ),
        f"{found['other_tokens_share']:.3%}",
        f"{found['loss_difference_max']:.2g}",
        str(row.params["questions"]),
        "yes" if row.correct else "NO",
    ]


CASE = Case(
    "kv-quality",
    "perplexity and recall of a trained model with exact and int8 rows on SSD",
    configure,
    run,
    table,
)
