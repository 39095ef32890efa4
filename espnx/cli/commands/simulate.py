"""``espnx simulate``: what a machine that is not here would bring, and how far to believe it."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter

from ...errors import InvalidInputError
from ..output import add_json_option, check_json
from ..simulations.boards import SEED, THREADS, run_board
from ..simulations.decoders import add_decoder_options, run_decoder
from ..simulations.options import (
    BOARD,
    DECODER,
    LIST,
    SERVER,
    SERVICE,
    TRACE,
    VALIDATION,
    check_options,
)
from ..simulations.plots import check_plot
from ..simulations.programs import run_program
from ..simulations.servers import add_server_options, run_server
from ..simulations.services import add_service_options, run_service
from ..simulations.shown import run_list, run_validation

DESCRIPTION = """Commands pass a machine's parts in simulated time: nothing is measured, nothing is
waited for, and the same words give the same numbers. Rates are modelled, from figures of papers and
from ranges that are shown (--validation says how far to believe them).

Systems: cosmos, an SSD with processing elements on its flash channels, asked for clusters of
vectors (sift, spacev, stress); machines that decode with a model's K and V on drives; services that
find passages for a model's answer; servers that search graphs of vectors on drives. All but the
first are files (--list names those that come along; others by their path)."""
BOARDS = ("cosmos",)


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    add = parser.add_argument
    add("--system", metavar="NAME", help="what is simulated: a name, or a .yaml file")
    add("--workload", metavar="NAME", help="what it is asked for: a name, or a .yaml file")
    add("--trace", metavar="FILE", help="in place of a workload: a program that `--record` wrote")
    add(
        "--list",
        action="store_true",
        help="in place of an answer: systems, workloads and what they are made of",
    )
    add("--vs", metavar="NAME[,NAME...]", help="systems beside it; not of cosmos")
    add(
        "--batch",
        metavar="N[,N...]",
        help="sequences or queries at a time; several are a sweep (default: 16 sequences, 1 query)",
    )
    add_decoder_options(parser)
    add_service_options(parser)
    add_server_options(parser)
    clusters = parser.add_argument_group("of cosmos")
    clusters.add_argument(
        "--threads",
        metavar="N[,N...]",
        help=f"that ask, each with one command under way; several are a sweep (default: {THREADS})",
    )
    clusters.add_argument(
        "--channels", type=int, metavar="N", help="of flash, with the same bandwidth (default: 8)"
    )
    clusters.add_argument("--seed", type=int, metavar="N", help=f"of places (default: {SEED})")
    add(
        "--validation",
        action="store_true",
        help="in place of an answer: what papers have measured, predicted, with ranges",
    )
    add("--draws", type=int, metavar="N", help="for a range, 10 to 1,000 (default: 20)")
    add("--plot", metavar="FILE", help="also draw the answer: an .svg file (needs matplotlib)")
    add_json_option(parser)


def run(args: Namespace) -> int:
    if args.json:
        check_json(args.json)
    if args.plot:
        _check_plot(args)
    if args.list:
        check_options(args, "--list", LIST)
        return run_list(args)
    if args.validation:
        check_options(args, "--validation", VALIDATION)
        return run_validation(args)
    if args.trace is not None:
        check_options(args, "--trace", TRACE)
        return run_program(args)
    for name in ("system", "workload"):
        if getattr(args, name) is None:
            raise InvalidInputError(
                "simulate",
                got=f"no --{name}",
                expected="--system and --workload or --trace, or --list, or --validation",
            )
    if args.system in BOARDS:
        check_options(args, args.system, BOARD)
        return run_board(args)
    from ...simulate.specs.graphs import ServerSpec
    from ...simulate.specs.load import is_a
    from ...simulate.specs.rag import ServiceSpec

    if is_a(ServerSpec, args.system):
        check_options(args, f"{args.system}, a server", SERVER)
        return run_server(args)
    if is_a(ServiceSpec, args.system):
        check_options(args, f"{args.system}, a service", SERVICE)
        return run_service(args)
    check_options(args, f"{args.system}, a machine that decodes", DECODER)
    return run_decoder(args)


def _check_plot(args: Namespace) -> None:
    if args.list or args.validation or args.trace is not None:
        raise InvalidInputError(
            "--plot",
            got="--list, --validation or --trace",
            expected="an answer of --system and --workload",
        )
    check_plot(args.plot)
