"""``espnx bench``: runs a registered benchmark, and renders documents' tables from result files."""

from __future__ import annotations

import platform
import shlex
import sys
from argparse import ArgumentParser, Namespace, RawDescriptionHelpFormatter
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from ..benchmarks.harness.registry import cases
from ..benchmarks.harness.result import make_document
from ..errors import MissingDependencyError
from . import host
from .env import git_state, package_root
from .output import add_json_option, emit, render_table

MISSING = 3
QUICK_PAIRS = 3

DESCRIPTION = """Runs a benchmark beside its baselines. Results are verified first; a wrong result has no ratio and makes the exit code 1.
Without a case: the list of cases."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.formatter_class = RawDescriptionHelpFormatter
    parser.add_argument(
        "--render",
        nargs="*",
        metavar="FILE",
        help="fill the tables of README.md and docs/ from these result files (default: all in benchmarks/results)",
    )
    parser.add_argument("--check", action="store_true", help="with --render: write nothing, end with 1 if a table is stale")
    parser.set_defaults(case=None)
    commands = parser.add_subparsers(dest="case", metavar="CASE", title="cases")
    for case in cases().values():
        sub = commands.add_parser(case.name, help=case.summary, description=case.summary, formatter_class=RawDescriptionHelpFormatter)
        case.configure(sub)
        sub.add_argument("--pairs", type=int, metavar="N", help="runs of each system (default: 15; with --quick 3)")
        sub.add_argument("--seed", type=int, default=1, help="of data and order (default: 1)")
        sub.add_argument("--quick", action="store_true", help="tiny runs: everything is tried, nothing worth quoting is measured")
        sub.add_argument(
            "--render", dest="render_after", action="store_true", help="then fill the documents' tables from benchmarks/results"
        )
        add_json_option(sub)


def run(args: Namespace) -> int:
    if args.render is not None and args.case is None:
        return render(args.render, check=args.check)
    if args.case is None:
        print(render_table(["CASE", ""], [[case.name, case.summary] for case in cases().values()]))
        return 0
    if args.pairs is None:
        args.pairs = QUICK_PAIRS if args.quick else 15
    try:
        return run_case(args)
    except MissingDependencyError as error:  # a baseline's program is missing, like hardware that is missing
        print(f"espnx: error: {' '.join(str(error).split())}", file=sys.stderr)
        return MISSING


def run_case(args: Namespace) -> int:
    case = cases()[args.case]
    text = case.standalone(args, say)
    if text is not None:
        print(text, end="")
        return 0
    command = command_line(sys.argv[1:])
    before = git_state(package_root())  # a result file written into the tree must not make it dirty
    rows = case.run(args, say)
    document = make_document(command, before.get("commit"), before.get("dirty"), machine(args), rows)
    headers, cells = case.table(rows)
    emit(args, render_table(headers, cells, right=headers[4:10]), document)
    if args.render_after:
        render([], check=False)
    return 0 if all(row.correct for row in rows) else 1


def say(text: str) -> None:
    """Progress goes to standard error."""
    print(text, file=sys.stderr, flush=True)


def render(files: Sequence[str], *, check: bool) -> int:
    """Fills the documents' tables, or checks that they are up to date."""
    from ..benchmarks.report.render import render_all, result_files, source_root

    root = source_root()
    stale = render_all(root, [Path(file) for file in files] or result_files(root), write=not check)
    for path in stale:
        print(f"{path.relative_to(root)}: {'is stale: run `espnx bench --render`' if check else 'rendered'}")
    if not check:
        _draw(root, [Path(file) for file in files] or result_files(root))
    return 1 if check and stale else 0


def _draw(root: Path, files: Sequence[Path]) -> None:
    """The documents' plots; without matplotlib the tables alone are rendered."""
    from ..benchmarks.harness.result import load
    from ..benchmarks.report.plots import draw_all

    try:
        for path in draw_all(root, {file: load(file) for file in files}):
            print(f"{path.relative_to(root)}: drawn")
    except MissingDependencyError as error:
        say(f"no plots: {' '.join(str(error).split())}")


def command_line(argv: Sequence[str]) -> str:
    """The command as it was typed, with directories left out: results are published, other people's paths are not."""
    words = [Path(word).name if "/" in word and not word.startswith("-") and Path(word).is_absolute() else word for word in argv]
    return shlex.join(["espnx", *words])


def machine(args: Namespace) -> dict[str, Any]:
    """What a reader must know of this machine."""
    from ..benchmarks.io.fio import version

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
    }


def describe_disk(device: str | None, facts: Mapping[str, Any]) -> str:
    """``vda (virtio, not rotational, scheduler mq-deadline)``."""
    if device is None:
        return "no block device"
    return f"{device} ({', '.join(f'{name} {value}' for name, value in facts.items() if value not in (None, ''))})"


def load_average() -> float | None:
    text = host.read_text("/proc/loadavg")
    return float(text.split()[0]) if text else None


def torch_version() -> str | None:
    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return None
