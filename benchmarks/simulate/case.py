"""``espnx bench simulate``: how fast the queues of `espnx simulate` walk, beside a plain heap in
C++; and what they say of recorded programs, beside what these take."""

from __future__ import annotations

import tempfile
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from espnx.errors import InvalidInputError

from ..harness.arguments import choices, positive, words
from ..harness.cells import metric, ratio
from ..harness.registry import Case, Say
from ..harness.result import Row

if TYPE_CHECKING:
    from ..harness.runner import Sample
    from .work import Reads

DESCRIPTION = """heap: reads of pages of a drive pass eight parts each, with the account of every
part's service, waiting and idle time. The plain heap is compiled by g++ before (-O3), walks the
same commands on one core, and keeps the same account; it has to end every command at the same
moment as ours, and ours twice at the same to the bit. Times are those of a processor, ours with
what Python hands over.

throttle: a model that decodes and a corpus that is searched run in turns with the disk free and
throttled, and take as long as is predicted of the free turns, or not (root, cgroup v1). device:
what `espnx bench device` records on emulated devices, predicted, beside the emulated time.

  espnx bench simulate
  espnx bench simulate --reads 1000000 --json simulate.json
  espnx bench simulate --show throttle,device --path /mnt/nvme --pairs 15 \\
      --json simulate-measured.json

throttle takes 10 GB of disk; its corpus stays below --path. --pairs are its turns."""
SHOWS = ("heap", "throttle", "device")
EMULATED = ("topology", "search", "postings")
READS = "300000"
#: Of the model of --quick.
SMALL = {
    "hidden_size": 128,
    "word_embed_proj_dim": 128,
    "ffn_dim": 128,
    "vocab_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}
READS_MAX = 10**7


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add(
        "--show",
        metavar="S,...",
        default="heap",
        help=f"what to measure: {', '.join(SHOWS)} (default: heap)",
    )
    add("--reads", metavar="N", default=READS, help=f"of pages (default: {READS}; --quick 3000)")
    add(
        "--path",
        metavar="DIR",
        default=".",
        help="throttle, device: a directory on the disk (default: the current one)",
    )
    add(
        "--throttle",
        metavar="RATE,...",
        default="800MB/s,400MB/s",
        help="throttle: each in turn (default: %(default)s)",
    )
    add(
        "--documents",
        type=int,
        metavar="N",
        default=100_000,
        help="throttle: that are searched (default: %(default)s)",
    )
    add(
        "--emulated",
        metavar="S,...",
        default=",".join(EMULATED),
        help="device: shows of `espnx bench device` (default: %(default)s)",
    )
    add(
        "--devices",
        metavar="N,...",
        default="1,2,4,8,16",
        help="device: how many (default: %(default)s)",
    )
    add(
        "--stretch",
        type=float,
        metavar="F",
        default=60.0,
        help="device: wall seconds of a virtual one, to begin with (default: %(default)g)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Raises InvalidInputError; MissingDependencyError: there is no compiler; PathUnavailableError:
    no throttle can be had."""
    shows = choices(args.show, SHOWS, "--show")
    measured = {"heap": _heap, "throttle": _throttled, "device": _emulated}
    return [row for show in shows for row in measured[show](args, say)]


def _heap(args: Namespace, say: Say) -> list[Row]:
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


def _throttled(args: Namespace, say: Say) -> list[Row]:
    from ..kv.systems.models import CONFIGS
    from ..machine.throttle import parse_rate
    from .throttled import Work, measure

    rates = [parse_rate(word) for word in words(args.throttle)]
    if not rates:
        raise InvalidInputError("--throttle", got=repr(args.throttle), expected="800MB/s, ...")
    path, name = Path(args.path).resolve(), "opt-125m"
    if not path.is_dir():
        raise InvalidInputError("--path", got=args.path, expected="an existing directory")
    documents = positive("--documents", args.documents)
    if args.quick:
        config = {**CONFIGS[name], **SMALL}
        work = Work(
            path, rates, 2, "a small opt", config, 2, 64, 2, 400, 4, 64, args.seed, 8 << 20, 0.02
        )
        return measure(work, say)
    turns = positive("--pairs", args.pairs)
    return measure(
        Work(
            path, rates, turns, name, dict(CONFIGS[name]), 4, 3840, 8, documents, 100, 1000,
            args.seed,
        ),
        say,
    )  # fmt: skip


def _emulated(args: Namespace, say: Say) -> list[Row]:
    from .emulated import measure

    shows = choices(args.emulated, EMULATED, "--emulated")
    return measure(Path(args.path), shows, args.devices, args.stretch, args, say)


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
    """A table of the rows of one kind: predictions and what they predict, or walks."""
    from .compared import table as compared

    if rows and "show" in rows[0].params:
        return compared([row for row in rows if "show" in row.params])
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
        if "reads" in row.params
    ]


def leaves(directory: Path) -> list[Path]:
    """The corpus, which is one of `espnx bench retrieval`."""
    return [note.parent for note in directory.glob("*/CORPUS.json")]


CASE = Case(
    name="simulate",
    summary="the queues of `espnx simulate`: their pace, and their predictions beside measurements",
    configure=configure,
    run=run,
    table=table,
    leaves=leaves,
)
