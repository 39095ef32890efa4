"""Options of drafts, alike in ``espnx generate`` and ``espnx plan``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from fractions import Fraction
from typing import Any

from ..errors import InvalidInputError
from ..kv.draft.tally import KINDS
from ..sizes import parse_size


def add_draft_options(add: Callable[..., Any]) -> None:
    """`add`: ``add_argument`` of a parser, or of a group of its options."""
    add(
        "--draft",
        choices=("none", *KINDS),
        default="none",
        help=(
            "propose several tokens for each pass over K and V: what followed in the text before "
            "(lookup); where that finds nothing, what the model says of the rows that weigh most "
            "(pages), or of all rows in four bits (4bit) (default: %(default)s)"
        ),
    )
    add(
        "--draft-memory",
        type=_share,
        metavar="PART",
        help="of K and V, that stays in memory for --draft pages, such as 1/8 (default: 1/16)",
    )
    add(
        "--draft-read-ahead",
        type=_size,
        metavar="SIZE",
        help=(
            "of memory, that is read into for a pass while the model drafts, at most, such as "
            "512MiB (default: as much as the draft's own rows take, and a quarter of what is free)"
        ),
    )


def check_draft(args: argparse.Namespace) -> None:
    """Raises InvalidInputError for memory of a draft that takes none, and for reads while one is
    made that takes no time."""
    if args.draft in ("none", "lookup") and args.draft_read_ahead is not None:
        raise InvalidInputError(
            "--draft-read-ahead",
            got=f"--draft {args.draft}",
            expected="a draft that takes time: --draft pages, --draft 4bit",
        )
    if args.draft != "pages" and args.draft_memory is not None:
        raise InvalidInputError(
            "--draft-memory",
            got=f"--draft {args.draft}",
            expected="--draft pages, whose memory alone is chosen",
        )


def _size(text: str) -> int:
    try:
        return parse_size(text)
    except InvalidInputError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _share(text: str) -> float:
    try:
        value = float(Fraction(text))
    except (ValueError, ZeroDivisionError):
        value = 0.0
    if not 0 < value <= 1:
        raise argparse.ArgumentTypeError(
            f"got {text!r}, expected a part above 0 and at most 1, such as 1/8 or 0.1"
        )
    return value
