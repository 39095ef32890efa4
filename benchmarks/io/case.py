"""``espnx bench io``: the storage engine beside fio and mmap, on one file with known content."""

from __future__ import annotations

import contextlib
import dataclasses
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnx.errors import InvalidInputError, WriteError
from espnx.sizes import parse_size

from ..harness.arguments import choices
from ..harness.doubts import without_doubtful
from ..harness.registry import Case, Say
from ..harness.result import Row
from .table import table

if TYPE_CHECKING:
    from ..harness.runner import System
    from .content import DataFile
    from .engine import EngineSystem
    from .work import Point, Work

ENGINES = ("uring", "posix", "memory")
BASELINES = ("fio", "mmap")
OPS = ("read", "write")
PATTERNS = ("random", "sequential")
FILE_NAME, QUICK_NAME = "espnx-bench-io.data", "espnx-bench-io-quick.data"
# The throttle grants in slices of 0.1 s: a run that follows another at once inherits part of a
# slice, 2 % of a run of 4 s.
THROTTLE_SETTLE_S = 0.5
SCRATCH_NAME = "espnx-bench-io-write.data"
STAMP_SUFFIX = ".stamp.json"

DESCRIPTION = """The engine reads (or writes) blocks of a file with known content, and what it reads
is compared with that first. Then the engine and the baselines take turns, shuffled, --pairs times;
a ratio is the median over the pairs of the baseline's time over ours (above 1: ours is faster).
Against fio, ours includes the checking of a CRC32C per block; fio checks nothing.

  # the standard points, five to eight minutes
  espnx bench io --path /mnt/nvme --baseline fio,mmap
  # and a long read at a fixed rate (root, cgroup v1)
  espnx bench io --path /mnt/nvme --baseline fio --throttle 800MB/s
  # these points, every combination
  espnx bench io --path /mnt/nvme --block 4KiB,64KiB --queue-depth 1,128
  # the best settings for this disk, for --engine nvme.toml
  espnx bench io --path /mnt/nvme --tune nvme.toml

The baseline `fio` is the best, by median, of several ways to run it: 256KiB/QD32, 512KiB/QD16 and
960KiB/QD8 for sequential transfers of 256 KiB and more, one by one and in batches for small random
ones. Each way has a row of its own."""


@dataclass(frozen=True)
class Options:
    """The options of a run, read and checked."""

    path: Path
    size_bytes: int
    file_name: str
    points: list[Point]
    engines: list[str]
    baselines: list[str]
    pairs: int
    seed: int
    checksums: bool
    cache_state: str
    seconds: dict[str, float]


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--path",
        metavar="DIR",
        default=".",
        help="a directory on the disk to measure (default: the current one)",
    )
    parser.add_argument(
        "--size",
        metavar="SIZE",
        help="of the data file, made once and used again (default: 4GiB, with --quick 256MiB)",
    )
    parser.add_argument("--block", metavar="SIZE,...", help="block sizes, multiples of 4KiB")
    parser.add_argument("--pattern", metavar="P,...", help="random, sequential")
    parser.add_argument("--queue-depth", metavar="N,...", help="requests with the device at a time")
    parser.add_argument(
        "--engine", metavar="E,...", default="uring", help="uring (default), posix, memory"
    )
    parser.add_argument(
        "--op",
        metavar="OP,...",
        default="read",
        help="read (default), write (to a file of its own)",
    )
    parser.add_argument("--baseline", metavar="B,...", default="", help="fio, mmap")
    parser.add_argument(
        "--throttle",
        metavar="RATE",
        help=(
            "slow the disk down, such as 800MB/s; the standard points get a throttled long transfer"
        ),
    )
    parser.add_argument(
        "--no-checksums",
        dest="checksums",
        action="store_false",
        help="no CRC32C while measuring (results are still verified first)",
    )
    parser.add_argument(
        "--checksums",
        action="store_true",
        default=True,
        help="check the CRC32C of every block (default)",
    )
    parser.add_argument(
        "--cache",
        choices=("cold", "warm"),
        default="cold",
        help="state of the page cache before each run (default: cold)",
    )
    parser.add_argument(
        "--tune",
        nargs="?",
        const="-",
        metavar="FILE.toml",
        help=(
            "try settings, instead of comparing, and write the best to a file that stands wherever "
            "an engine is named (none: print them)"
        ),
    )


def read_options(args: Namespace) -> Options:
    """Raises InvalidInputError."""
    from ..machine.throttle import parse_rate
    from .work import KIB, product_points, standard_points

    path = Path(args.path)
    ops = choices(args.op, OPS, "operation")
    rate = parse_rate(args.throttle) if args.throttle else None
    if args.block or args.pattern or args.queue_depth:
        blocks = [parse_size(word) for word in (args.block or "").split(",") if word] or [4 * KIB]
        depths = [_depth(word) for word in (args.queue_depth or "").split(",") if word] or [128]
        points = product_points(
            ops, choices(args.pattern or "random", PATTERNS, "pattern"), blocks, depths, rate
        )
    else:
        points = standard_points(ops, rate)
    seconds = {"random": 0.4, "sequential": 1.1, "throttled": 3.0}
    return Options(
        path=path,
        size_bytes=parse_size(args.size or ("256MiB" if args.quick else "4GiB")),
        file_name=QUICK_NAME if args.quick and not args.size else FILE_NAME,
        points=points,
        engines=choices(args.engine, ENGINES, "engine"),
        baselines=choices(args.baseline, BASELINES, "baseline"),
        pairs=args.pairs,
        seed=args.seed,
        checksums=args.checksums,
        cache_state=args.cache,
        seconds=dict.fromkeys(seconds, 0.02) if args.quick else seconds,
    )


def _depth(word: str) -> int:
    if not word.strip().isdigit() or not 1 <= int(word) <= 4096:
        raise InvalidInputError("queue depth", got=repr(word), expected="1 to 4096")
    return int(word)


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures every point. Raises MissingDependencyError (fio), PathUnavailableError (engine or
    throttle cannot be had), DiskFullError."""
    from .fio import require_fio

    options = read_options(args)
    if "fio" in options.baselines:
        require_fio()
    files = {op: _data_file(options, op, say) for op in {point.op for point in options.points}}
    rows: list[Row] = []
    for number, point in enumerate(options.points, 1):
        say(f"[{number}/{len(options.points)}] {point}")
        found = measure_point(point, files[point.op], options, say)
        for row in without_doubtful(found):
            if row.ratio:
                say(
                    "    "
                    + row.system
                    + ": "
                    + ", ".join(f"{value:.2f}x {name}" for name, value in row.ratio.items())
                )
        rows += found
    return rows


def _data_file(options: Options, op: str, say: Say) -> DataFile:
    from .content import ensure_file

    if op == "read":
        return ensure_file(options.path / options.file_name, options.size_bytes, options.seed, say)
    # Overwritten by the runs, so its stamp never fits again; what it held before does not matter.
    return ensure_file(options.path / SCRATCH_NAME, options.size_bytes, options.seed + 1, say)


def measure_point(point: Point, data: DataFile, options: Options, say: Say) -> list[Row]:
    """The rows of one point; the disk is throttled only while they are measured."""
    from ..harness.runner import compare
    from ..machine.throttle import throttled

    limit = point.throttle_bytes_per_s
    with contextlib.ExitStack() as stack:
        if limit:
            stack.enter_context(throttled(options.path, limit))
        work = size_work(point, data, options)
        ours = [
            _closing(stack, _engine_system(engine, work, options)) for engine in options.engines
        ]
        baselines = [_closing(stack, system) for system in _baselines(work, options, say)]
        params = point.params(data, options.checksums)
        settle_s = THROTTLE_SETTLE_S if limit else 0
        rows = compare(
            "io",
            params,
            ours,
            baselines,
            pairs=options.pairs,
            seed=options.seed,
            say=say,
            settle_s=settle_s,
        )
    for row in rows:
        if (
            limit
            and row.metrics.get("bytes_per_s", 0) > 1.15 * limit
            and row.effective_path != "memory"
        ):
            say(
                f"    {row.system} moved {row.metrics['bytes_per_s'] / 1e6:.0f} MB/s: the throttle "
                "does not hold it"
            )
    return rows


def _closing(stack: contextlib.ExitStack, system: Any) -> Any:
    stack.callback(system.close)
    return system


def _engine_system(engine: str, work: Work, options: Options) -> EngineSystem:
    from .engine import EngineSystem

    return EngineSystem(engine, work, checksums=options.checksums, cache_state=options.cache_state)


def size_work(point: Point, data: DataFile, options: Options) -> Work:
    """How much a run moves: as much as the first engine does in the wanted time, found by two short
    runs."""
    from .work import Work

    wanted_s = options.seconds["throttled" if point.throttle_bytes_per_s else point.pattern]
    pilot = Work(point, data, items=1, seed=options.seed)
    pilot = pilot.with_items(max(1, (1 << 20) // point.block_bytes))
    return _sized(pilot, wanted_s, lambda work: _engine_system(options.engines[0], work, options))


def _sized(pilot: Work, wanted_s: float, make: Callable[[Work], System]) -> Work:
    work = pilot
    for seconds in (wanted_s / 8, wanted_s):
        system = make(work)
        try:
            system.prepare(0)
            work = work.for_seconds(seconds, 1 / system.run().seconds_per_byte)
        finally:
            system.close()
    return work


def _baselines(work: Work, options: Options, say: Say) -> list[System]:
    from .fio import FioSystem, variants
    from .mmap import MmapSystem

    found: list[System] = []
    if "fio" in options.baselines:
        found += [FioSystem(work, variant, options.cache_state) for variant in variants(work.point)]
    if "mmap" in options.baselines and work.point.op == "write":
        say("    (mmap is a baseline of reads alone)")
    elif "mmap" in options.baselines:
        # One page fault at a time: the same time as ours is enough to know its rate, the same bytes
        # would take many times longer.
        pilot = dataclasses.replace(work, items=max(1, work.items // 64))
        wanted_s = options.seconds[
            "throttled" if work.point.throttle_bytes_per_s else work.point.pattern
        ]
        sized = _sized(pilot, wanted_s, lambda smaller: MmapSystem(smaller, options.cache_state))
        found.append(
            MmapSystem(sized.with_items(min(sized.items, work.items)), options.cache_state)
        )
    return found


def standalone(args: Namespace, say: Say) -> str | None:
    """``--tune``: measures settings, and writes the best, or returns them."""
    if not args.tune:
        return None
    from espnx.storage.settings import SUFFIX

    from .tune import tune

    if args.tune != "-" and not args.tune.endswith(SUFFIX):
        raise InvalidInputError(
            "--tune",
            got=repr(args.tune),
            expected=f"a name that ends with {SUFFIX}: an engine is known by that",
        )
    # not after a minute of measuring
    if not (folder := Path(args.tune).absolute().parent).is_dir():
        raise InvalidInputError(
            "--tune", got=f"no directory {folder}", expected="a file in a directory that is there"
        )
    options = read_options(args)
    text = tune(
        _data_file(options, "read", say), options.engines, quick=args.quick, seed=args.seed, say=say
    )
    if args.tune == "-":
        return text
    try:
        Path(args.tune).write_text(text, encoding="utf-8")
    except OSError as error:
        raise WriteError(
            "cannot write settings",
            path=args.tune,
            errno=error.errno,
            fix="name another file after --tune",
        ) from error
    return f"{text}# written to {args.tune}: --engine {args.tune}, or engine={args.tune!r}\n"


def leaves(directory: Path) -> list[Path]:
    """The data files, and what is noted of their contents beside them."""
    names = [
        name
        for data in (FILE_NAME, QUICK_NAME, SCRATCH_NAME)
        for name in (data, f"{data}{STAMP_SUFFIX}")
    ]
    return [directory / name for name in names if (directory / name).is_file()]


CASE = Case(
    "io",
    "reads and writes of the storage engine, beside fio and mmap",
    configure,
    run,
    table,
    standalone,
    leaves=leaves,
)
