"""How a failure leaves the command line: one paragraph on standard error, an exit code, and the
same as JSON where that was asked for."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from ..errors import (
    EspnxError,
    InvalidInputError,
    MissingDependencyError,
    PathUnavailableError,
    StorageError,
    WriteError,
)
from ..suggestions import nearest
from .output import json_document, write_json

OK, FAILED, USAGE, MISSING_HARDWARE, INTERRUPTED = 0, 1, 2, 3, 130
#: Nothing failed, but not everything could be checked: less than a pass.
NOT_WHOLE = 4


class UsageError(Exception):
    """Words that a parser does not take."""

    def __init__(self, parser: Parser, message: str):
        super().__init__(message)
        self.parser = parser


class Parser(argparse.ArgumentParser):
    """Raises `UsageError` where argparse would end the process, so that wrong usage can be told as
    JSON, too; and says what a mistyped word was meant to be."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(self, message)

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Commands, and options with choices: argparse would list them all."""
        if action.choices is not None and isinstance(value, str) and value not in action.choices:
            meant = nearest(value, map(str, action.choices))
            if meant is not None:
                raise argparse.ArgumentError(action, f"got {value!r}; did you mean {meant}?")
        super()._check_value(action, value)

    def usage_line(self) -> str:
        """What has to be given, in one line: argparse's own has every option, 30 lines of a large
        command."""
        formatter = argparse.HelpFormatter(self.prog, width=10_000)
        formatter.add_usage(
            None, [each for each in self._actions if each.required or not each.option_strings], []
        )
        options = "" if self._subparsers else f" [options]; `{self.prog} --help` lists them"
        return formatter.format_help().strip() + options

    def meant_by(self, words: Sequence[str]) -> list[str]:
        """A question for each unknown option among the words of a command line that looks like one
        there is."""
        known, found = self._option_string_actions, list[str]()
        for word in itertools.takewhile(lambda word: word != "--", words):
            name = word.partition("=")[0]
            # argparse takes options cut short
            is_known = any(each.startswith(name) for each in known)
            if name.startswith("--") and not is_known and (meant := nearest(name, known)):
                found.append(f"{name}: did you mean {meant}?")
        return found


def json_of(argv: Sequence[str]) -> str | None:
    """The file that a command line wants JSON in, whatever else it says; None: none."""
    for word, following in zip(argv, [*argv[1:], None], strict=True):
        if word == "--json":
            return following
        if word.startswith("--json="):
            return word.removeprefix("--json=")
    return None


def report(
    error: BaseException, *, command: str | None, json: str | None, code: int | None = None
) -> int:
    """Says what went wrong, and returns the exit code that belongs to it.

    Args:
        command: that was chosen, or None.
        json: where a document goes, as `write_json` takes it; None: nowhere.
        code: instead of the usual one.
    """
    code = code_of(error) if code is None else code
    if isinstance(error, UsageError):
        print(error.parser.usage_line(), file=sys.stderr)
        print(f"{error.parser.prog}: error: {error}", file=sys.stderr)
    else:
        print(
            f"espnx: {'' if isinstance(error, KeyboardInterrupt) else 'error: '}{sentence(error)}",
            file=sys.stderr,
        )
    # that would fail again
    if json is not None and not (isinstance(error, WriteError) and error.path == json):
        try:
            write_json(json, json_document(command or "", error=described(error, code)))
        except (EspnxError, OSError) as second:  # the first one is told already
            print(f"espnx: error: {sentence(second)}", file=sys.stderr)
    return code


def code_of(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, (UsageError, InvalidInputError)):
        return USAGE
    return MISSING_HARDWARE if isinstance(error, PathUnavailableError) else FAILED


def sentence(error: BaseException) -> str:
    """A failure as one paragraph, with what was noted on its way."""
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted; what was published before is intact"
    elif isinstance(error, EspnxError):
        text = " ".join(str(error).split())
    elif isinstance(error, ImportError) and not isinstance(error, MissingDependencyError):
        missing = error.name or "a package"
        text = (
            f"{missing} cannot be imported: {error}. `espnx doctor` says what is missing and how "
            "to get it"
        )
    elif isinstance(error, OSError):
        text = str(error)
    else:
        kind = type(error).__name__
        text = (
            f"unexpected {kind}: {error}. ESPNX_DEBUG=1 shows where; `espnx env` has what a report "
            "needs"
        )
    return "; ".join([text, *getattr(error, "__notes__", ())])


def described(error: BaseException, code: int) -> dict[str, Any]:
    """A failure as docs/schema.json has it."""
    kind = "Interrupted" if isinstance(error, KeyboardInterrupt) else type(error).__name__
    message = str(error) if isinstance(error, UsageError) else sentence(error)
    got = expected = fix = path = None
    if isinstance(error, EspnxError):
        got, expected = (
            None if value is None else str(value) for value in (error.got, error.expected)
        )
        fix, path = error.fix, error.path if isinstance(error, StorageError) else None
    what = error.what if isinstance(error, EspnxError) else message
    return {
        "class": kind, "message": message, "what": what, "got": got, "expected": expected,
        "fix": fix, "path": path, "exit_code": code,
    }  # fmt: skip
