"""``espnx bench maxsim``: scoring on the CPU from records in place, in every token format, beside
maxsim-cpu and torch."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Sequence
from typing import TYPE_CHECKING

from espnx.errors import InvalidInputError

from ..harness.arguments import choices, words
from ..harness.cells import baselines_of, ratio
from ..harness.doubts import without_doubtful
from ..harness.registry import Case, Say
from ..harness.result import Row

if TYPE_CHECKING:
    import torch

    from ..harness.runner import System
    from .systems import Corpus

FORMATS = ("fp32", "fp16", "bf16", "int8", "bit1", "residual1", "residual2", "residual4")
BASELINES = ("maxsim-cpu", "torch-segment", "torch-padded", "torch-bf16")
TORCH_BASELINES = "torch-segment,torch-padded,torch-bf16"

DESCRIPTION = """Random unit tokens are stored in each format, in one buffer in random order, and
scored there; the baselines get them as fp32 (torch-bf16: as bf16) before the clock starts. Scores
are compared with the reference first. Then all systems take turns, shuffled, --pairs times; a ratio
is the median over the pairs of the baseline's time over ours (above 1: ours is faster).

  # 1000 documents x 100 tokens, d 32 and 128, 1 and 2 threads
  espnx bench maxsim
  # the package must be installed: pip install maxsim-cpu
  espnx bench maxsim --baseline maxsim-cpu,torch-padded
  # documents of 1 to twice --tokens tokens
  espnx bench maxsim --format fp16,int8 --dim 128 --ragged

bytes_asked is the size of the tokens in fp32, the same for every system; bytes_moved is what a
system really reads. torch-padded and torch-bf16 are the faster of two orders of the product."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--format", metavar="F,...", default=",".join(FORMATS), help="token formats (default: all)"
    )
    parser.add_argument(
        "--baseline",
        metavar="B,...",
        default=TORCH_BASELINES,
        help=f"{', '.join(BASELINES)} (default: those of torch)",
    )
    parser.add_argument(
        "--dim", metavar="D,...", default="32,128", help="dimensions of a token (default: 32,128)"
    )
    parser.add_argument(
        "--threads", metavar="N,...", default="1,2", help="threads of every system (default: 1,2)"
    )
    parser.add_argument(
        "--documents", metavar="N", default="1000", help="default: 1000; with --quick 50"
    )
    parser.add_argument("--tokens", metavar="N", default="100", help="of a document (default: 100)")
    parser.add_argument("--query-tokens", metavar="N", default="32", help="default: 32")
    parser.add_argument(
        "--ragged",
        action="store_true",
        help="documents of 1 to twice --tokens tokens instead of equal ones",
    )


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of a run, read and checked."""

    formats: list[str]
    baselines: list[str]
    dims: list[int]
    threads: list[int]
    documents: int
    tokens: int
    query_tokens: int
    ragged: bool
    calls: int
    pairs: int
    seed: int


def read_options(args: Namespace) -> Options:
    """Raises InvalidInputError."""
    dims = _numbers(args.dim, "dimension", 65536)
    if bad := [d for d in dims if d % 8]:
        raise InvalidInputError("dimension", got=bad[0], expected="a multiple of 8")
    return Options(
        formats=choices(args.format, FORMATS, "token format"),
        baselines=choices(args.baseline, BASELINES, "baseline"),
        dims=dims,
        threads=_numbers(args.threads, "number of threads", 1024),
        documents=50 if args.quick else _numbers(args.documents, "number of documents", 10**7)[0],
        tokens=_numbers(args.tokens, "number of tokens", 32767)[0],
        query_tokens=_numbers(args.query_tokens, "number of query tokens", 65535)[0],
        ragged=args.ragged,
        calls=1 if args.quick else 5,
        pairs=args.pairs,
        seed=args.seed,
    )


def _numbers(text: str, what: str, most: int) -> list[int]:
    found = words(text)
    if not found or any(not word.isdigit() or not 1 <= int(word) <= most for word in found):
        raise InvalidInputError(what, got=repr(text), expected=f"1 to {most}")
    return [int(word) for word in found]


def run(args: Namespace, say: Say) -> list[Row]:
    """Measures every point. Raises MissingDependencyError (maxsim-cpu was asked for and is not
    there)."""
    from .systems import require_maxsim_cpu

    options = read_options(args)
    if "maxsim-cpu" in options.baselines:
        require_maxsim_cpu()
    rows: list[Row] = []
    points = list(itertools.product(options.dims, options.threads))
    for number, (d, threads) in enumerate(points, 1):
        say(f"[{number}/{len(points)}] d = {d}, {threads} thread(s)")
        found = measure_point(d, threads, options, say)
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


def measure_point(d: int, threads: int, options: Options, say: Say) -> list[Row]:
    """The rows of one dimension and number of threads."""
    from ..harness.runner import compare
    from .systems import Corpus, EspnxSystem

    corpus = Corpus.random(
        d, _lengths(options), options.query_tokens, threads, options.calls, options.seed
    )
    with contextlib.ExitStack() as stack:
        ours = [EspnxSystem(fmt, corpus, options.seed) for fmt in options.formats]
        baselines = [
            system for name in options.baselines for system in _baseline(name, corpus, stack)
        ]
        params = {
            "d": d,
            "threads": threads,
            "documents": options.documents,
            "tokens": options.tokens,
            "query_tokens": options.query_tokens,
            "ragged": options.ragged,
        }
        rows = compare(
            "maxsim", params, ours, baselines, pairs=options.pairs, seed=options.seed, say=say
        )
    return _beside_fp16(rows)


def _lengths(options: Options) -> torch.Tensor:
    import torch

    if not options.ragged:
        return torch.full((options.documents,), options.tokens)
    return torch.randint(
        1,
        2 * options.tokens,
        (options.documents,),
        generator=torch.Generator().manual_seed(options.seed),
    )


def _baseline(name: str, corpus: Corpus, stack: contextlib.ExitStack) -> Sequence[System]:
    from .systems import MaxsimCpuSystem, torch_systems

    if name != "maxsim-cpu":
        return torch_systems(name, corpus)
    system = MaxsimCpuSystem(corpus)
    stack.callback(system.close)
    return [system]


def _beside_fp16(rows: Sequence[Row]) -> list[Row]:
    """Rows of espnx with the median time of fp16 over theirs among the metrics."""
    fp16_s = next((row.median_s for row in rows if row.system == "espnx-fp16"), None)
    if fp16_s is None:
        return list(rows)
    return [
        dataclasses.replace(
            row, metrics={**row.metrics, "fp16_median_over_median": fp16_s / row.median_s}
        )
        if row.system.startswith("espnx-") and row.median_s
        else row
        for row in rows
    ]


def table(rows: Sequence[Row]) -> tuple[list[str], list[list[str]]]:
    """Headers and cells, one line per row."""
    shown = [name for name in BASELINES if name in baselines_of(rows)]
    headers = [
        "d",
        "threads",
        "documents",
        "system",
        "B/document",
        "ms",
        "(IQR)",
        "documents/s",
        "vs fp16",
        "n",
        "correct",
    ]
    return headers + [f"vs {name} [IQR]" for name in shown], [_cells(row, shown) for row in rows]


def _cells(row: Row, baselines: Sequence[str]) -> list[str]:
    params, metrics = row.params, row.metrics
    kind = "1 to " + str(2 * params["tokens"] - 1) if params["ragged"] else str(params["tokens"])
    cells = [
        str(params["d"]),
        str(params["threads"]),
        f"{params['documents']} x {kind}",
        row.system,
        f"{metrics['bytes_per_document']:.0f}" if "bytes_per_document" in metrics else "-",
        "-" if row.median_s is None else f"{row.median_s * 1e3:.2f}",
        "-" if row.iqr_s is None else f"({row.iqr_s * 1e3:.2f})",
        f"{metrics['documents_per_s']:.0f}" if "documents_per_s" in metrics else "-",
        f"{metrics['fp16_median_over_median']:.2f}x"
        if "fp16_median_over_median" in metrics
        else "-",
        str(row.n),
        "yes" if row.correct else "NO",
    ]
    return cells + [ratio(row, name) for name in baselines]


CASE = Case(
    "maxsim",
    "MaxSim on the CPU from records in place, beside maxsim-cpu and torch",
    configure,
    run,
    table,
)
