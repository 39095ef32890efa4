"""``espnx report``: one HTML page of benchmark results."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ...errors import InvalidInputError
from ..output import add_json_option, check_writable, emit, json_document, write_whole
from ..progress import ProgressLine

DESCRIPTION = """Makes one page of result files: of each the machine, the command, its tables, and
pictures of the same numbers (which need matplotlib). It needs nothing beside it, so that it can be
sent as it is."""
_PAGE, _OTHER_OUT = "cannot write the page", "name another file with --out"


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument(
        "results",
        nargs="+",
        metavar="PATH",
        help="result files of `espnx bench --json`, or directories of them",
    )
    parser.add_argument(
        "--out", metavar="FILE", default="report.html", help="the page (default: %(default)s)"
    )
    parser.add_argument("--replace", action="store_true", help="write over the page that is there")
    add_json_option(parser)


def run(args: Namespace) -> int:
    from ...benchmarks.harness.result import load
    from ...benchmarks.report.page import render_page

    out = Path(args.out)
    check_writable(out, _PAGE, _OTHER_OUT)
    if out.is_file() and not args.replace:
        raise InvalidInputError(
            f"page {out}",
            got="a file that is there already",
            expected="a new one",
            fix=f"--replace, or {_OTHER_OUT}",
        )
    files = [file for name in args.results for file in _files(Path(name))]
    results = {file: load(file) for file in dict.fromkeys(files)}
    with ProgressLine() as progress:
        page = render_page(
            results,
            lambda done, total: progress.update("tables and pictures of result files", done, total),
        )
    write_whole(out, page, _PAGE, _OTHER_OUT)
    rows = sum(len(document["rows"]) for document in results.values())
    document = json_document(
        "report", out=str(out), files=[str(file) for file in results], rows=rows
    )
    emit(args, f"{out}: {len(results)} result files, {rows} rows", document)
    return 0


def _files(path: Path) -> list[Path]:
    """Raises InvalidInputError where there are none."""
    from ...benchmarks.harness.result import files_in

    if path.is_file():
        return [path]
    found = files_in(path)
    if not found:
        got = "no *.json in it" if path.is_dir() else "no such file or directory"
        raise InvalidInputError(
            f"results in {path}", got=got, expected="files of `espnx bench ... --json FILE`"
        )
    return found
