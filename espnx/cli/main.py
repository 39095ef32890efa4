"""The command ``espnx``: finds the subcommand, imports it alone, runs it, and turns failures into
one paragraph and an exit code."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

from .._version import __version__
from .failures import FAILED, USAGE, Parser, UsageError, json_of, report
from .output import check_json
from .registry import COMMANDS, GROUPS

_EPILOG = """exit codes: 0 ok, 1 a check failed or an error, 2 wrong usage, 3 missing hardware,
4 not everything could be checked, 130 interrupted
Tables go to standard output, progress and messages to standard error; --json FILE writes the
result, or the error, for programs (docs/json.md). ESPNX_LOG=debug says which paths were taken, and
why; ESPNX_DEBUG=1 shows tracebacks."""


def build_parser(*chosen: str | None) -> argparse.ArgumentParser:
    """The parser of the whole command line. Only `chosen` commands (keys of `COMMANDS`) are
    imported and have their options."""
    parser = Parser(
        prog="espnx",
        description=(
            "Inference larger than memory: KV caches and multi-vector retrieval served from SSD."
        ),
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"espnx {__version__}")
    top = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    groups = {}
    for key, command in COMMANDS.items():
        words = key.split()
        where, name = top, words[-1]
        if len(words) == 2:
            if words[0] not in groups:
                text = GROUPS.get(words[0], "")
                group = top.add_parser(words[0], help=text, description=text)
                groups[words[0]] = group.add_subparsers(
                    dest="subcommand", metavar="COMMAND", title="commands", required=True
                )
            where = groups[words[0]]
        sub = where.add_parser(
            name,
            help=command.help,
            description=command.help,
            epilog=command.epilog,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        sub.set_defaults(parser=sub)
        if key in chosen:
            configure, run = command.load()
            configure(sub)
            sub.set_defaults(run=run)
    return parser


def chosen_command(argv: Sequence[str]) -> str | None:
    """The key of the command that the arguments name, or None. Options before the command
    (``--version``) take no values."""
    words = [word for word in argv if not word.startswith("-")]
    return next(
        (key for key in (" ".join(words[:2]), " ".join(words[:1])) if key in COMMANDS), None
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command line and returns its exit code; never lets a traceback out unless
    ESPNX_DEBUG is set."""
    argv = list(sys.argv[1:] if argv is None else argv)
    try:
        try:
            return _run(argv)
        finally:
            # a closed pipe shows here, where it can be caught, not while Python shuts down
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output (head, less) has gone; Python would complain once more while it
        # closes standard output.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return FAILED
    except (Exception, KeyboardInterrupt) as error:
        if os.environ.get("ESPNX_DEBUG") and isinstance(error, Exception):
            raise
        return report(error, command=chosen_command(argv), json=json_of(argv))


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The words of a command line, read. Raises UsageError."""
    try:
        args, unknown = build_parser(chosen_command(argv)).parse_known_args(argv)
        if unknown:  # argparse would show the usage of the whole program
            parser: argparse.ArgumentParser = (
                args.parser if hasattr(args, "parser") else build_parser()
            )
            parser.error(f"unrecognized arguments: {' '.join(unknown)}")
    except UsageError as error:  # a mistyped option shows as one that is missing, too
        raise UsageError(
            error.parser, "; ".join([str(error), *error.parser.meant_by(argv)])
        ) from None
    return args


def _run(argv: list[str]) -> int:
    args = parse(argv)
    run: Callable[[argparse.Namespace], int] | None = getattr(args, "run", None)
    if run is None:
        build_parser().print_help(sys.stderr)
        return USAGE
    if getattr(args, "json", None) is not None:
        check_json(args.json)  # not after minutes of work
    return run(args)
