"""``--device`` and ``--record`` of the commands that ask near-storage devices."""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

from ..errors import InvalidInputError

if TYPE_CHECKING:
    from ..device.registry import Devices


def at_least_0(text: str) -> float:
    """An option's number."""
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < math.inf:
        raise argparse.ArgumentTypeError(f"got {text!r}, expected a finite number, at least 0")
    return value


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Those of `devices_of`."""
    parser.add_argument(
        "--device",
        metavar="NAME",
        help="near-storage device (`espnx device ls`), or a spec (default: this machine's)",
    )
    parser.add_argument(
        "--stretch",
        type=at_least_0,
        metavar="X",
        help="of an emulated device: how many seconds one of its own takes; 0: do not wait",
    )
    parser.add_argument(
        "--record", metavar="FILE", help="write what the device is asked, for `espnx device replay`"
    )


@contextmanager
def devices_of(
    args: argparse.Namespace, directories: Sequence[str], *, idle: Callable[[], str] = str
) -> Iterator[Devices | None]:
    """Devices for directories, as a command's options name them: open while the block runs. None:
    nothing was said. Warns of a trace that holds no command: `idle` says in the end why the devices
    were asked for nothing."""
    if args.record is None and args.device is None:
        if args.stretch is not None:
            raise InvalidInputError(
                "--stretch",
                got="no --device",
                expected="the name of an emulated one",
                fix="--device smartssd",
            )
        yield None
        return
    from ..device.registry import open_together

    with ExitStack() as opened:
        options = {} if args.stretch is None else {"stretch": args.stretch}
        found = open_together(args.device or "ssd", directories, **options)
        for each in found:
            opened.callback(each.close)
        if args.record is not None:
            from ..device.trace.recording import recorded
            from ..device.trace.writer import TraceWriter

            program = " ".join(["espnx", *sys.argv[1:]])
            writer = opened.enter_context(TraceWriter(args.record, program, found))
            found = recorded(found, writer)
        yield found
        if args.record is not None and not writer.commands:
            print(
                f"espnx: warning: the trace {args.record} is empty: "
                f"{idle() or 'no device was asked for anything'}",
                file=sys.stderr,
            )
