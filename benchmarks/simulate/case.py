"""``espnx bench simulate``: page reads that the queues of `espnx simulate` walk in a second of a
processor, beside a plain heap in C++."""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from espnx.errors import InvalidInputError

from ..harness.cells import metric, ratio
from ..harness.registry import Case, Say
from ..harness.result import Row

if TYPE_CHECKING:
    from ..harness.runner import Sample
    from .work import Reads

DESCRIPTION = """Reads of pages of a drive pass eight parts each, with the account of every part's
service, waiting and idle time. The plain heap is compiled by g++ before (-O3), walks the same
commands on one core, and keeps the same account; it has to end every command at the same moment as
ours, and ours twice at the same to the bit. Times are those of a processor, ours with what Python
hands over.

  espnx bench simulate
  espnx bench simulate --reads 1000000 --json simulate.json"""
READS = "300000"
READS_MAX = 10**7


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--reads", metavar="N", default=READS, help=f"of pages (default: {READS}; --quick 3000)"
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Raises InvalidInputError; MissingDependencyError: there is no compiler."""
    from ..harness.runner import compare
    from .heap import compile_heap
    from .work import page_reads

    if not args.reads.isdigit() or not 1 <= int(args.reads) <= READS_MAX:
        raise InvalidInputError("--reads", got=args.reads, expected=f"1 to {READS_MAX}")
    n = 3000 if args.quick else int(args.reads)
    reads = page_reads(n, args.seed)
    with tempfile.TemporaryDirectory(prefix="espnx-bench-simulate") as folder:
        heap = Heap(reads, compile_heap(Path(folder)), Path(folder))
        return compare(
            "simulate",
            {"reads": n, "parts": reads.steps, "seed": args.seed},
            [Ours(reads, heap)],
            [heap],
            pairs=args.pairs,
            seed=args.seed,
            say=say,
        )


class _System:
    """What both have in common: nothing is read, reads are simulated."""

    group = requested_path = effective_path = "simulated"

    def __init__(self, name: str, reads: Reads) -> None:
        self.name, self.reads = name, reads

    def prepare(self, turn: int) -> str:
        return "warm"

    def sample(self, cpu_s: float) -> Sample:
        from ..harness.runner import Sample
        from .work import PAGE_BYTES

        n = len(self.reads.route)
        return Sample(cpu_s, n * PAGE_BYTES, 0, {"reads_per_cpu_s": n / cpu_s})

    def close(self) -> None:
        """Nothing is open."""


class Ours(_System):
    def __init__(self, reads: Reads, heap: Heap) -> None:
        super().__init__("espnx", reads)
        self._heap = heap

    def verify(self) -> str | None:
        """What is wrong: other ends than the heap's, or than its own of another time."""
        import numpy as np

        first, again = (self._walk().ended_s for _ in range(2))
        if first.tobytes() != again.tobytes():
            return "the same commands end at other times"
        plain = self._heap.ended_s()
        if not np.allclose(first, plain, rtol=1e-9, atol=0):
            return f"an end that is {np.abs(first - plain).max():g} s off"
        return None

    def run(self) -> Sample:
        began_s = time.process_time()
        self._walk()
        return self.sample(time.process_time() - began_s)

    def _walk(self):  # type: ignore[no-untyped-def]
        from espnx.simulate.queues import walk

        return walk(self.reads.parts, self.reads.routes, self.reads.route, self.reads.client)


class Heap(_System):
    group = "plain-heap"

    def __init__(self, reads: Reads, program: Path, folder: Path) -> None:
        from .heap import write_reads

        super().__init__("plain-heap", reads)
        self._program, self._asked, self._answered = program, folder / "asked", folder / "answered"
        write_reads(reads, self._asked)

    def ended_s(self):  # type: ignore[no-untyped-def]
        from .heap import walk_heap

        return walk_heap(self._program, self._asked, self._answered)[1]

    def verify(self) -> str | None:
        """What is wrong: a command that has not ended."""
        return None if (self.ended_s() > 0).all() else "a command without an end"

    def run(self) -> Sample:
        from .heap import walk_heap

        return self.sample(walk_heap(self._program, self._asked, self._answered)[0])


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    headers = ["system", "reads", "parts each", "reads/CPU s", "over the heap"]
    return headers, [
        [
            row.system,
            f"{row.params['reads']:,}",
            str(row.params["parts"]),
            metric("reads_per_cpu_s", 1, 0)(row),
            ratio(row, "plain-heap"),
        ]
        for row in rows
    ]


CASE = Case(
    name="simulate",
    summary="page reads that the queues of `espnx simulate` walk, beside a plain heap",
    configure=configure,
    run=run,
    table=table,
)
