"""Which options belong to which kind of answer: others are refused, not passed over.

A file of its own: kinds of answers do not know of one another, and this is what they differ in.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence

from ...errors import InvalidInputError

MACHINE = ("system", "workload", "vs")
LIST: Sequence[str] = ("list",)
VALIDATION = ("validation", "draws")
TRACE = ("trace", "system", "vs")
BOARD = (*MACHINE, "threads", "channels", "seed")
DECODER = (*MACHINE, "batch", "context", "output", "techniques")
SERVICE = (*MACHINE, "batch", "passages", "generation", "rate")
SERVER = (*MACHINE, "list_size", "streams")
#: Each once, in the order in which they are refused. `--json` and `--plot` belong to all.
ALL = tuple(dict.fromkeys((*LIST, *VALIDATION, *TRACE, *BOARD, *DECODER, *SERVICE, *SERVER)))


def check_options(args: Namespace, what: str, own: Sequence[str]) -> None:
    """`own`: options of what is asked for, which `what` names.

    Raises InvalidInputError: one that is given and does not belong there.
    """
    for name in ALL:
        value = getattr(args, name)
        if name not in own and value is not None and value is not False:
            raise InvalidInputError(
                f"--{name.replace('_', '-')}",
                got="given" if value is True else value,
                expected=f"none with {what}",
            )
