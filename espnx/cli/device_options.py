"""``--device`` and ``--record`` of the commands that ask near-storage devices."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..device.registry import Devices


def add_device_options(parser: argparse.ArgumentParser) -> None:
    """Those of `devices_of`."""
    parser.add_argument("--device", metavar="NAME", help="near-storage device (`espnx device ls`), or a spec (default: this machine's)")
    parser.add_argument("--record", metavar="FILE", help="write what the device is asked, for `espnx device replay`")


@contextmanager
def devices_of(args: argparse.Namespace, directories: Sequence[str]) -> Iterator[Devices | None]:
    """Devices for directories, as a command's options name them: open while the block runs. None: nothing was said."""
    if args.record is None and args.device is None:
        yield None
        return
    from ..device.registry import open_together

    with ExitStack() as opened:
        found = open_together(args.device or "ssd", directories)
        for each in found:
            opened.callback(each.close)
        if args.record is not None:
            from ..device.trace.recorded import recorded
            from ..device.trace.writer import TraceWriter

            program = " ".join(["espnx", *sys.argv[1:]])
            found = recorded(found, opened.enter_context(TraceWriter(args.record, program, found)))
        yield found
