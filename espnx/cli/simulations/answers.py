"""What all answers of `espnx simulate` end with: a text, a document, and a picture of it."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping
from typing import Any

from ..output import emit
from .plots import write_plot


def say(args: Namespace, text: str, document: Mapping[str, Any]) -> None:
    """Prints the text, writes what ``--json`` and ``--plot`` ask for. Raises WriteError."""
    if args.plot:
        write_plot(args.plot, document)
    emit(args, text, document)
