"""``espnx bench``: runs a registered benchmark, and renders documents' tables from result files."""

from __future__ import annotations

import platform
import shlex
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Callable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ...benchmarks.harness.doubts import doubtful, is_unsteady, without_doubtful
from ...benchmarks.harness.registry import Case, cases
from ...benchmarks.harness.result import Row, make_document
from ...errors import InvalidInputError, MissingDependencyError
from ...origin import source_state
from ...sizes import format_size
from ...tables import render_table
from .. import host
from ..failures import MISSING_HARDWARE, report
from ..output import add_json_option, emit, json_document, write_json

QUICK_PAIRS = 3

DESCRIPTION = """Runs a benchmark beside its baselines. Results are verified first; a wrong result
has no ratio and makes the exit code 1. Without a case: the list of cases."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--render",
        nargs="*",
        metavar="FILE",
        help=(
            "fill the tables of README.md and docs/ from these result files (default: all in "
            "benchmarks/results)"
        ),
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="with --render: write nothing, end with 1 if a table is stale",
    )
    parser.set_defaults(case=None)
    commands = parser.add_subparsers(dest="case", metavar="CASE", title="cases")
    for case in cases().values():
        sub = commands.add_parser(
            case.name,
            help=case.summary,
            description=case.summary,
            formatter_class=RawDescriptionHelpFormatter,
        )
        case.configure(sub)
        sub.add_argument(
            "--pairs",
            type=int,
            metavar="N",
            help="runs of each system (default: 15; with --quick 3)",
        )
        sub.add_argument("--seed", type=int, default=1, help="of data and order (default: 1)")
        sub.add_argument(
            "--quick",
            action="store_true",
            help="tiny runs: everything is tried, nothing worth quoting is measured",
        )
        sub.add_argument(
            "--note",
            metavar="TEXT",
            help="kept in the result file: what was special about this run",
        )
        sub.add_argument(
            "--render",
            dest="render_after",
            action="store_true",
            help="then fill the documents' tables from benchmarks/results",
        )
        add_json_option(sub)
        sub.set_defaults(parser=sub)
    _configure_others(commands)


def _configure_others(commands: Any) -> None:
    """Words that stand where a case would."""
    ls = commands.add_parser("ls", help="list the cases", description="The cases, a line each.")
    clean = commands.add_parser(
        "clean",
        help="remove what benchmarks left in a directory to be used again",
        description="Data files and corpora: listed, and removed.",
    )
    clean.add_argument(
        "--path",
        metavar="DIR",
        default=".",
        help="as it was given to the benchmarks (default: the current directory)",
    )
    clean.add_argument("--dry-run", action="store_true", help="list them, and remove nothing")
    for sub, run_it in ((ls, _list), (clean, _clean)):
        add_json_option(sub)
        sub.set_defaults(parser=sub, other=run_it)


def run(args: Namespace) -> int:
    if args.render is not None and args.case is None:
        return render(args.render, check=args.check)
    if args.case is None:
        print(_cases_table())
        return 0
    if hasattr(args, "other"):
        other: Callable[[Namespace], int] = args.other
        return other(args)
    if args.pairs is None:
        args.pairs = QUICK_PAIRS if args.quick else 15
    try:
        return run_case(args)
    except MissingDependencyError as error:
        # a baseline's program is missing, like hardware that is missing
        return report(error, command=f"bench {args.case}", json=args.json, code=MISSING_HARDWARE)


def _cases_table() -> str:
    return render_table(["CASE", ""], [[case.name, case.summary] for case in cases().values()])


def _list(args: Namespace) -> int:
    emit(
        args,
        _cases_table(),
        json_document("bench ls", cases={case.name: case.summary for case in cases().values()}),
    )
    return 0


def _clean(args: Namespace) -> int:
    from ...benchmarks.harness.leftovers import found, remove, size_bytes

    directory = Path(args.path)
    if not directory.is_dir():
        raise InvalidInputError(
            "bench clean", got=repr(args.path), expected="an existing directory", fix="--path DIR"
        )
    left = [(path, size_bytes(path)) for path in found(directory, cases())]
    gone = {path: not args.dry_run and remove(path) for path, _ in left}
    rows = [
        (
            path,
            format_size(size),
            "removed" if gone[path] else "kept" if args.dry_run else "holds other files, too",
        )
        for path, size in left
    ]
    document = json_document(
        "bench clean",
        removed=[{"path": str(path), "size_bytes": size} for path, size in left if gone[path]],
    )
    emit(
        args,
        render_table(("", "", ""), rows) if rows else f"nothing of a benchmark in {directory}",
        document,
    )
    return 0


def run_case(args: Namespace) -> int:
    case = cases()[args.case]
    path = getattr(args, "path", None)
    if path is not None and not Path(path).is_dir():  # now, not after what takes minutes
        raise InvalidInputError(
            f"bench {args.case} needs a directory",
            got=repr(path),
            expected="an existing one",
            fix="--path DIR",
        )
    text = case.standalone(args, say)
    if text is not None:
        print(text, end="")
        return 0
    command = command_line(sys.argv[1:])
    before = source_state()  # a result file written into the tree must not make it dirty

    def document(found: Sequence[Row]) -> dict[str, Any]:
        state = before.get("commit"), before.get("dirty")
        return make_document(command, *state, machine(args), found, note=args.note)

    def keep(found: Sequence[Row]) -> None:
        """What there is so far, for a case whose run may be cut short."""
        if args.json not in (None, "-"):
            write_json(args.json, document(without_doubtful(found)))

    args.keep = keep
    rows = without_doubtful(case.run(args, say))
    headers, cells = case.table(rows)
    emit(args, render_table(headers, cells, right=headers[4:10]), document(rows))
    _tell_doubts(rows)
    _tell_leftovers(case, args)
    if args.render_after:
        render([], check=False)
    return 0 if all(row.correct for row in rows) else 1


def _tell_doubts(rows: Sequence[Row]) -> None:
    """Why there are fewer ratios than were measured."""
    if unsteady := [row for row in rows if is_unsteady(row)]:
        systems = ", ".join(dict.fromkeys(row.system for row in unsteady))
        say(
            f"{len(unsteady)} of {len(rows)} rows are unsteady ({systems}): their runs spread by "
            "more than half of the median"
        )
    if any(doubtful(row) for row in rows):
        say(
            "some ratios are withheld: their spread is above half of them (unsteady), or more "
            "threads made the baseline slower, so that something else had the cores. Measure again "
            "on an idle machine, with more --pairs"
        )


def _tell_leftovers(case: Case, args: Namespace) -> None:
    directory = Path(getattr(args, "path", "."))
    if left := case.leaves(directory):
        shown = ", ".join(str(path) for path in left[:3]) + (
            f" and {len(left) - 3} more" if len(left) > 3 else ""
        )
        say(f"kept for the next run: {shown}; `espnx bench clean --path {directory}` removes it")


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(text, file=sys.stderr, flush=True)


def render(files: Sequence[str], *, check: bool) -> int:
    """Fills the documents' tables, or checks that they are up to date."""
    from ...benchmarks.report.render import render_all, result_files, source_root

    root = source_root()
    stale = render_all(root, [Path(file) for file in files] or result_files(root), write=not check)
    for path in stale:
        print(
            f"{path.relative_to(root)}: "
            f"{'is stale: run `espnx bench --render`' if check else 'rendered'}"
        )
    if not check:
        _draw(root, [Path(file) for file in files] or result_files(root))
    return 1 if check and stale else 0


def _draw(root: Path, files: Sequence[Path]) -> None:
    """The documents' plots; without matplotlib the tables alone are rendered."""
    from ...benchmarks.harness.result import load
    from ...benchmarks.report.plots import draw_all

    try:
        for path in draw_all(root, {file: load(file) for file in files}):
            print(f"{path.relative_to(root)}: drawn")
    except MissingDependencyError as error:
        say(f"no plots: {' '.join(str(error).split())}")


def command_line(argv: Sequence[str]) -> str:
    """The command as it was typed, with directories left out: results are published, other people's
    paths are not."""
    words = [
        Path(word).name
        if "/" in word and not word.startswith("-") and Path(word).is_absolute()
        else word
        for word in argv
    ]
    return shlex.join(["espnx", *words])


def machine(args: Namespace) -> dict[str, Any]:
    """What a reader must know of this machine."""
    from ...benchmarks.io.fio import version

    cpu, mount = host.cpu(), host.mount_of(getattr(args, "path", "."))
    disk: Mapping[str, Any] = host.disk_of(mount.device) if mount.device else {}
    return {
        "cpu": cpu["model"],
        "cores": cpu["usable_cores"],
        "memory_bytes": host.memory_bytes().get("total", 0),
        "kernel": platform.release(),
        "disk": describe_disk(mount.device, disk),
        "fs": mount.file_system,
        "fio": version(),
        "python": platform.python_version(),
        "torch": torch_version(),
        "load_average": load_average(),
        **getattr(args, "machine_facts", {}),
    }


def describe_disk(device: str | None, facts: Mapping[str, Any]) -> str:
    """``vda (virtio, not rotational, scheduler mq-deadline)``."""
    if device is None:
        return "no block device"
    known = [f"{name} {value}" for name, value in facts.items() if value not in (None, "")]
    return f"{device} ({', '.join(known)})"


def load_average() -> float | None:
    text = host.read_text("/proc/loadavg")
    return float(text.split()[0]) if text else None


def torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
