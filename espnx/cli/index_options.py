"""Words of an index's options, known before anything that knows them is imported."""

from __future__ import annotations

from argparse import Namespace
from typing import Any

from ..errors import InvalidInputError

FORMATS = ("fp32", "fp16", "bf16", "int8", "bit1", "residual1", "residual2", "residual4")
POOLINGS = ("cls", "mean", "muvera")


def first_stages_of(args: Namespace) -> list[str] | dict[str, dict[str, Any]]:
    """What ``--first-stages`` and ``--stage-option`` say, as `espnx.build` takes it. Raises
    InvalidInputError."""
    from ..retrieval.first_stage.settings import settings_of_words

    named, options = args.first_stages.split(","), settings_of_words(args.stage_option)
    if strange := sorted(options.keys() - set(named)):
        raise InvalidInputError(
            "--stage-option",
            got=", ".join(strange),
            expected=f"of --first-stages {args.first_stages}",
        )
    if not options or len(set(named)) < len(named):  # which is refused where it is checked
        return named
    return {kind: options.get(kind, {}) for kind in named}
