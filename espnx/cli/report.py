"""``espnx report``: one HTML page of benchmark results."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

from ..errors import InvalidInputError, WriteError
from .output import add_json_option, emit, json_document

DESCRIPTION = """Makes one page of result files: of each the machine, the command, its tables, and pictures of the same numbers (which need
matplotlib). It needs nothing beside it, so that it can be sent as it is."""


def configure(parser: ArgumentParser) -> None:
    parser.description = DESCRIPTION
    parser.add_argument("results", nargs="+", metavar="PATH", help="result files of `espnx bench --json`, or directories of them")
    parser.add_argument("--out", metavar="FILE", default="report.html", help="the page (default: %(default)s)")
    add_json_option(parser)


def run(args: Namespace) -> int:
    from ..benchmarks.harness.result import load
    from ..benchmarks.report.page import render_page

    files = [file for name in args.results for file in _files(Path(name))]
    results = {file: load(file) for file in dict.fromkeys(files)}
    page, out = render_page(results), Path(args.out)
    try:
        out.write_text(page, encoding="utf-8")
    except OSError as error:
        raise WriteError("cannot write the page", path=out, errno=error.errno, fix="name another file with --out") from error
    rows = sum(len(document["rows"]) for document in results.values())
    document = json_document("report", out=str(out), files=[str(file) for file in results], rows=rows)
    emit(args, f"{out}: {len(results)} result files, {rows} rows", document)
    return 0


def _files(path: Path) -> list[Path]:
    """Raises InvalidInputError where there are none."""
    if path.is_file():
        return [path]
    found = sorted(path.glob("*.json"))
    if not found:
        got = "no *.json in it" if path.is_dir() else "no such file or directory"
        raise InvalidInputError(f"results in {path}", got=got, expected="files of `espnx bench ... --json FILE`")
    return found
