"""``espnx bench kernels``: GPU kernels on the device, beside what its memory and its arithmetic
allow, and beside other implementations."""

from __future__ import annotations

import dataclasses
import time
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from espnx.errors import EspnxError, InvalidInputError, MissingDependencyError

from ..harness.arguments import choices, positive, seconds
from ..harness.cells import ABSENT, baselines_of, metric, number, ratio
from ..harness.registry import Case, Say
from ..harness.result import Row

if TYPE_CHECKING:
    from .point import Point, Setting

PARTS = ("attention", "x", "maxsim", "crc32c", "gather", "projections")
_FP16_ROWS = "-fp16"  # behind the name of a peer of int8 rows
_COMPACT, _SHARE = ("int8", "bit1", "residual2"), "share_of_byte_ratio"
_OF_FORMATS = ("format", "what")  # parameters that differ between formats of one shape
_MIB = 1 << 20
_KEPT = 5  # points after which what there is is written
_QUICK_BYTES = 1 << 20

DESCRIPTION = """Every kernel on random rows, its results compared with float64 within the bounds of
docs/tolerances.md (checksums and copies: exactly) before anything is timed. Three input sets of
--data MiB each take turns. All systems of a point take turns, too, --pairs times, shuffled; a ratio
is the median over the pairs of the peer's time over ours, both the device's own work for a call.

The bound: what a large copy within the device's memory does to bytes, or a large product of
torch's to arithmetic, whichever takes longer; both are measured first. "byte ratio": bytes a second
of a compact format over those of fp16 rows, 1 where half the bytes take half the time.

Peers: torch's attention (the fastest of its backends, query heads as heads or as rows, and of plain
products), FlashInfer (compiled from the headers of its package; CUDA cores or tensor cores, the
faster), torch.compile on padded documents (compiled when nothing else runs, so that it chooses
well), flash-maxsim, late-interaction-kernels. Of several ways the fastest that is right stands for
a peer. One that is not installed, does not compile in time or refuses such rows has a row that says
so; one that is wrong is not compared.

  # on a machine with a GPU, about two minutes
  espnx bench kernels --json kernels.json
  # some of it
  espnx bench kernels --show maxsim --only fp16
  # tries the command on the CPU
  espnx bench kernels --device cpu --quick"""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--device", choices=("cuda", "cpu"), default="cuda", help="default: cuda")
    add(
        "--show",
        metavar="P,...",
        default=",".join(PARTS),
        help=f"{', '.join(PARTS)} (default: all)",
    )
    add("--only", metavar="TEXT", default="", help="points whose name holds this (default: all)")
    add(
        "--data",
        metavar="MIB",
        default="512",
        help="of an input set; several times the device's cache (default: 512)",
    )
    add(
        "--compile-limit",
        type=seconds,
        metavar="S",
        default=75.0,
        help="for all kernels but torch.compile's, before anything is measured, in other processes "
        "(default: 75)",
    )
    add(
        "--flashinfer",
        metavar="DIR",
        help="the folder `data` of flashinfer-python (default: that of an installed one)",
    )


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures every point. Raises InvalidInputError, MissingDependencyError (no such device)."""
    import torch

    from .catalogue import points
    from .point import Setting
    from .timing import Clock

    parts = choices(args.show, PARTS, "part")
    chosen = [each for each in points() if each.part in parts and args.only in each.name]
    if not chosen:
        raise InvalidInputError("no such point", got=repr(args.only), expected="part of a name")
    if args.device == "cuda" and not torch.cuda.is_available():
        raise MissingDependencyError(
            "espnx bench kernels needs a GPU",
            got="no CUDA device that torch sees",
            fix="--device cpu tries the command",
        )
    device = torch.device(args.device)
    args.machine_facts = _device_facts(device)
    size = _QUICK_BYTES if args.quick else positive("--data", args.data) * _MIB
    setting = Setting(Clock(device), size, args.seed)
    is_prepared = device.type == "cuda" and not args.quick
    setting, failed = _compiled(chosen, setting, args, say) if is_prepared else (setting, {})
    from .prepare import own_choices

    with own_choices():
        return _measured(chosen, setting, failed, args, say)


def _compiled(
    chosen: Sequence[Point], setting: Setting, args: Namespace, say: Say
) -> tuple[Setting, dict[tuple[str, str], str]]:
    """Everything that takes long to compile, beside each other, FlashInfer among it: the setting
    with it, and what could not be compiled."""
    import torch

    from . import flashinfer
    from .prepare import prepare

    begin = time.monotonic()
    data = Path(args.flashinfer) if args.flashinfer else flashinfer.sources()
    build, library, why = None, None, "not installed"
    if data is not None and any(each.part == "attention" for each in chosen):
        major, minor = torch.cuda.get_device_capability()
        library = flashinfer.library_path(data, Path.home() / ".cache" / "espnx")
        try:
            if not library.exists():
                build = flashinfer.begin_build(data, library, f"{major}{minor}")
        except (EspnxError, OSError) as error:
            library, why = None, f"cannot be compiled: {error}"
    names = {point.name: point.compiled_peers for point in chosen}
    failed = prepare(names, setting, args.compile_limit, say)
    if build is not None and library is not None:
        left_s = args.compile_limit + begin - time.monotonic()
        if (problem := flashinfer.end_build(build, library, left_s)) is not None:
            library, why = None, problem
            say(f"    flashinfer: {problem}")
    return dataclasses.replace(setting, flashinfer=library, why_no_flashinfer=why), failed


def _measured(
    chosen: Sequence[Point],
    setting: Setting,
    failed: Mapping[tuple[str, str], str],
    args: Namespace,
    say: Say,
) -> list[Row]:
    from .point import measure, measure_rates, rates_row

    keep: Callable[[Sequence[Row]], None] = getattr(args, "keep", lambda rows: None)
    rates = measure_rates(setting.clock, small=args.quick or setting.device.type == "cpu")
    rows = [rates_row(rates)]
    say(f"copy {rates.copy / 1e12:.2f} TB/s")
    for kind, flops in rates.matmul.items():
        say(f"product of {kind} matrices {flops / 1e12:.0f} TFLOP/s")
    for count, point in enumerate(chosen, 1):
        begin = time.monotonic()
        unprepared = {
            peer: failed[point.name, peer]
            for peer in point.compiled_peers
            if (point.name, peer) in failed
        }
        if setting.device.type == "cpu":
            unprepared = dict.fromkeys(point.compiled_peers, "tried on a GPU alone")
        peers = frozenset(point.compiled_peers) - set(unprepared)
        found = measure(point, setting, peers, unprepared, rates, args.pairs, say)
        rows += found
        took_s = time.monotonic() - begin
        say(f"[{count}/{len(chosen)}] {point.name}, {took_s:.1f} s: {_told(found)}")
        if count % _KEPT == 0 or count == len(chosen):
            # a machine that is lent for a while may be gone before the end
            keep(with_byte_ratios(rows))
        _free(setting)
    return with_byte_ratios(rows)


def with_byte_ratios(rows: Sequence[Row]) -> list[Row]:
    """Our rows of compact formats with their rate of bytes over that of fp16 rows of the same shape
    among the metrics: 1 where fewer bytes are as much less time."""

    def shape(row: Row) -> str:
        params = {name: value for name, value in row.params.items() if name not in _OF_FORMATS}
        return repr((row.system, sorted(params.items())))

    rates = {
        shape(row): row.metrics["bytes_per_s"]
        for row in rows
        if row.params.get("format") == "fp16" and "bytes_per_s" in row.metrics
    }
    return [
        dataclasses.replace(
            row, metrics={**row.metrics, _SHARE: row.metrics["bytes_per_s"] / rates[shape(row)]}
        )
        if row.params.get("format") in _COMPACT
        and row.system == "espnx"
        and "bytes_per_s" in row.metrics
        and shape(row) in rates
        else row
        for row in rows
    ]


def _free(setting: Setting) -> None:
    import gc

    import torch

    gc.collect()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def _device_facts(device: Any) -> dict[str, Any]:
    """What a reader of the result file must know of a GPU."""
    import torch

    if device.type != "cuda":
        return {}
    found = torch.cuda.get_device_properties(device)
    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    return {
        "gpu": found.name,
        "gpu_memory_bytes": found.total_memory,
        "multiprocessors": found.multi_processor_count,
        "cuda": torch.version.cuda,
        "triton": version,
    }


def _told(rows: Sequence[Row]) -> str:
    row = rows[0]
    if not row.median_s:
        return str(row.params.get("why", "wrong"))
    return ", ".join(
        [
            f"{row.metrics['share_of_roofline']:.2f} of its bound",
            f"{row.metrics['bytes_per_s'] / 1e12:.2f} TB/s",
            *(f"{value:.2f}x {name}" for name, value in row.ratio.items()),
            *(
                f"{other.system}: {other.params.get('why', 'WRONG')}"
                for other in rows[1:]
                if not other.n
            ),
        ]
    )


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Every row."""
    shown = sorted(baselines_of(rows))
    headers = ["what", "system", "vs bound", *_COLUMNS, "n", "correct"]
    cells = [
        [
            row.params["what"],
            row.params.get("variant", row.system),
            _share(row),
            *(column(row) for column in _COLUMNS.values()),
            str(row.n),
            row.params.get("why", "yes") if row.correct else row.params.get("why", "NO"),
            *(ratio(row, name) for name in shown),
        ]
        for row in rows
    ]
    return headers + [f"vs {name} [IQR]" for name in shown], cells


def ours(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Our rows alone, beside their peers."""
    mine = [row for row in rows if row.system.startswith("espnx")]
    peers = dict.fromkeys(
        row.system.removesuffix(_FP16_ROWS) for row in rows if not row.system.startswith("espnx")
    )
    shown = [name for name in peers if name != "torch"]
    headers = ["what", "system", "vs bound", *(f"vs {name} [IQR]" for name in shown), *_COLUMNS]
    cells = [
        [
            row.params["what"],
            row.system,
            _share(row),
            *(_against(row, name, rows) for name in shown),
            *(column(row) for column in _COLUMNS.values()),
        ]
        for row in mine
    ]
    return headers, cells


_COLUMNS: dict[str, Callable[[Row], str]] = {
    "TB/s": metric("bytes_per_s", 1e12),
    "TFLOP/s": metric("flops_per_s", 1e12, 0),
    "byte ratio": metric(_SHARE),
    "kernel, us": metric("kernel_s", 1e-6, 1),
    "work, us": lambda row: number(row.median_s, 1e-6, 1),
    "whole call, us": metric("call_s", 1e-6, 0),
}


def _share(row: Row) -> str:
    share = row.metrics.get("share_of_roofline")
    return ABSENT if share is None else f"{share:.2f}x"


def _against(row: Row, peer: str, rows: Sequence[Row]) -> str:
    """The ratio to a peer, or why there is none."""
    for name, note in ((peer, ""), (peer + _FP16_ROWS, " (fp16 rows)")):
        if (text := ratio(row, name)) != ABSENT:
            return text + note
    at_point = [other for other in rows if other.params["what"] == row.params["what"]]
    for other in at_point:
        if other.system.removesuffix(_FP16_ROWS) == peer and not other.n:
            return str(other.params.get("why", "wrong"))
    return ABSENT


CASE = Case(
    "kernels",
    "GPU kernels on the device, beside its memory's rate and other implementations",
    configure,
    run,
    table,
    views={"ours": ours},
)
