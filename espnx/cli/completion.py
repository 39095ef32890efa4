"""``espnx completion``: a script by which a shell completes what is typed. Static: while it
completes, no Python runs."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

from ..errors import MissingDependencyError
from .registry import COMMANDS

SHELLS = ("bash", "zsh", "fish")

_FILES = {"FILE", "PATH", "STORE"}
_DIRECTORIES = {"DIR"}
#: Positional words that name something on disk.
_PLACES = {"store", "graph", "postings", "vectors", "queries", "prefix"}


def configure(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="which one")


def run(args: argparse.Namespace) -> int:
    try:
        import shtab
    except ImportError as error:
        raise MissingDependencyError(
            "espnx completion", got=str(error), expected="shtab", fix="pip install shtab"
        ) from error
    from .main import build_parser  # which imports this module when it is asked for

    parser = build_parser(*COMMANDS)
    for each in _actions(parser):
        wanted = shtab.DIRECTORY if each.metavar in _DIRECTORIES else shtab.FILE
        is_place = each.metavar in _FILES | _DIRECTORIES or (
            not each.option_strings and each.dest in _PLACES
        )
        if is_place and each.choices is None:
            each.complete = wanted  # where shtab looks
    print(shtab.complete(parser, shell=args.shell))
    return 0


def _actions(parser: argparse.ArgumentParser) -> Iterator[Any]:
    """All options and words of a command line, those of commands too."""
    for each in parser._actions:
        yield each
        if isinstance(each, argparse._SubParsersAction):
            for inner in each.choices.values():
                yield from _actions(inner)
