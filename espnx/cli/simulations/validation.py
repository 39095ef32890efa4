"""``espnx simulate --validation``: what papers have measured, predicted."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ...tables import render_table
from ..output import emit, json_document

if TYPE_CHECKING:
    from ...simulate.validation import Validation

US = 1e6


def run_validation(args: Namespace) -> int:
    from ...simulate import validation
    from ...simulate.decoding import validation as decoding
    from ...simulate.unpredicted import UNPREDICTED

    found = validation.validate(args.draws)
    rows = [*found.rows, *decoding.validate(args.draws), *UNPREDICTED]
    document = json_document(
        "simulate",
        kind="modelled",
        validation=[_row(row) for row in rows],
        fitted=dict(found.fitted),
        fitted_on=dict(found.fitted_on),
        check=dict(found.check),
    )
    emit(args, _validation_text(found, rows), document)
    return 0


def _row(row: Any) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(row)


def _validation_text(found: Validation, predicted: Sequence[object]) -> str:
    rows = [
        (row["id"], *(f"{row[name]:.2f}" for name in ("value", "low", "high")))
        if "value" in row
        else (row["id"], row["not_predicted"], None, None)
        for row in map(_row, predicted)
    ]
    table = render_table(["id", "value", "low", "high"], rows, right=["value", "low", "high"])
    fitted = ", ".join(f"{name} {value * US:.1f} us" for name, value in found.fitted.items())
    on = ", ".join(f"{name} = {value:g}" for name, value in found.fitted_on.items())
    check = found.check
    return (
        f"{table}\n\nfitted: {fitted}, on {on}\n"
        f"not fitted, beside it: {check['id']}: measured {check['measured']}, "
        f"predicted {check['predicted']:.1f}"
    )
