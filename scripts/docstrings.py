#!/usr/bin/env python3
"""A corpus that every machine has: the documentation of its installed Python libraries.

Walks the standard library and site-packages of the running interpreter, parses the sources (nothing
is imported or run), and writes the docstring of every module, class and function as one JSON line
``{"_id": "numpy.linalg._linalg.svd", "text": "..."}``. The same files give the same lines in the
same order. Tests and vendored copies are left out, and so is a text that was written before.

    python scripts/docstrings.py --out corpus.jsonl --packages numpy,torch,json --limit 5000
    python scripts/docstrings.py --out passages.jsonl --slice-tokens 100
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import itertools
import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

SOURCE_SIZE_BYTES_MAX = 2 << 20  # larger ones are tables of data
LEFT_OUT = {
    "__pycache__",
    "test",
    "tests",
    "testing",
    "idlelib",
    "lib2to3",
    "_vendor",
    "vendored",
    "site-packages",
    "dist-packages",
}
TOKEN = re.compile(r"\w+|[^\w\s]")
Documented = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef


def default_roots() -> list[Path]:
    """Standard library and site-packages of the running interpreter."""
    paths = sysconfig.get_paths()
    folders = [
        Path(path) for path in dict.fromkeys(paths[key] for key in ("stdlib", "purelib", "platlib"))
    ]
    return [folder for folder in folders if folder.is_dir()]


def documents(
    roots: Iterable[Path] | None = None,
    *,
    packages: Iterable[str] | None = None,
    min_chars: int = 40,
    max_chars: int | None = None,
    slice_tokens: int | None = None,
) -> Iterator[dict[str, str]]:
    """Docstrings as ``{"id", "text"}``, sorted by root, then path, then place in the file.

    Args:
        roots: folders that hold top-level modules and packages. Default: :func:`default_roots`.
        packages: names of top-level modules and packages to keep to, in this order. Default: all,
            sorted.
        min_chars: shorter docstrings are skipped.
        max_chars: longer ones too.
        slice_tokens: cut every docstring into passages of at most so many words and punctuation
            marks, of nearly equal length; ids become ``name@0``, ``name@1``, ...

    A name that occurs again (a property and its setter) gets ``#2``, ``#3``, ... in the order met.
    """
    times_met: dict[str, int] = {}
    texts_met: set[bytes] = set()
    for module, path in sources(default_roots() if roots is None else roots, packages):
        for name, text in docstrings(module, path):
            digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
            if (
                len(text) < min_chars
                or (max_chars is not None and len(text) > max_chars)
                or digest in texts_met
            ):
                continue
            texts_met.add(digest)
            times_met[name] = times_met.get(name, 0) + 1
            unique = name if times_met[name] == 1 else f"{name}#{times_met[name]}"
            if slice_tokens is None:
                yield {"id": unique, "text": text}
            else:
                yield from (
                    {"id": f"{unique}@{number}", "text": part}
                    for number, part in enumerate(slices(text, slice_tokens))
                )


def sources(
    roots: Iterable[Path], packages: Iterable[str] | None = None
) -> Iterator[tuple[str, Path]]:
    """Module name and path of every source file under ``roots``."""
    roots = list(roots)
    if packages is None:
        tops = [(root, top) for root in roots for top in sorted(packages_of(root))]
    else:
        tops = [(root, top) for top in packages for root in roots]
    for root, top in tops:
        if (root / f"{top}.py").is_file():
            yield top, root / f"{top}.py"
        for path in python_files(root / top):
            parts = path.relative_to(root).with_suffix("").parts
            yield ".".join(parts[:-1] if parts[-1] == "__init__" else parts), path


def packages_of(root: Path) -> set[str]:
    """Names that can be imported from ``root``; folders without ``__init__.py`` hold data as often
    as modules and are left out."""
    return {
        entry.stem
        for entry in root.iterdir()
        if entry.stem not in LEFT_OUT
        and entry.stem.isidentifier()
        and (entry.suffix == ".py" or (entry / "__init__.py").is_file())
    }


def python_files(folder: Path) -> Iterator[Path]:
    """``*.py`` under ``folder``, sorted; a package before its modules, modules before its
    sub-packages."""
    for place, folders, files in os.walk(folder):
        folders[:] = sorted(
            name for name in folders if name not in LEFT_OUT and name.isidentifier()
        )
        for name in sorted(files, key=lambda name: (name != "__init__.py", name)):
            if name.endswith(".py") and name[:-3].isidentifier():
                yield Path(place, name)


def docstrings(module: str, path: Path) -> Iterator[tuple[str, str]]:
    """Qualified name and cleaned docstring of everything in one file that has one; nothing for a
    file that this Python cannot parse."""
    try:
        if path.stat().st_size > SOURCE_SIZE_BYTES_MAX:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # invalid escapes in other people's strings
            found = list(_of_node(ast.parse(path.read_bytes()), module))
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
        # also undecodable, null bytes, nested too deeply
        return
    yield from found


def _of_node(node: ast.AST, name: str) -> Iterator[tuple[str, str]]:
    if isinstance(node, Documented) and (text := ast.get_docstring(node)):
        yield name, text.encode("utf-8", "replace").decode()  # lone surrogates, written as escapes
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _of_node(child, f"{name}.{child.name}")
        elif isinstance(child, (ast.stmt, ast.excepthandler, ast.match_case)):
            # definitions under if, try, except, with, match
            yield from _of_node(child, name)


def slices(text: str, tokens: int) -> list[str]:
    """``text`` cut between tokens into the fewest passages of at most ``tokens`` each, whose
    lengths differ by at most one token."""
    starts = [match.start() for match in TOKEN.finditer(text)]
    count = max(1, -(-len(starts) // tokens))
    cuts = [starts[len(starts) * number // count] for number in range(1, count)]
    return [text[begin:end].strip() for begin, end in itertools.pairwise([0, *cuts, len(text)])]


def arguments() -> argparse.Namespace:
    """Options, checked."""
    parser = argparse.ArgumentParser(
        description="Docstrings of the installed Python libraries as JSON lines."
    )
    parser.add_argument("--out", type=Path, help="file to write (default: stdout)")
    parser.add_argument(
        "--root",
        type=Path,
        action="append",
        help="folder to walk, repeatable (default: standard library and site-packages)",
    )
    parser.add_argument(
        "--packages", help="top-level names, comma-separated, in this order (default: all)"
    )
    parser.add_argument("--limit", type=int, help="stop after so many documents")
    parser.add_argument(
        "--min-chars", type=int, default=40, help="skip shorter docstrings (default: 40)"
    )
    parser.add_argument("--max-chars", type=int, help="skip longer docstrings")
    parser.add_argument(
        "--slice-tokens",
        type=int,
        help="cut into passages of at most so many words and punctuation marks",
    )
    options = parser.parse_args()
    options.root = options.root or default_roots()
    options.packages = options.packages.split(",") if options.packages else None
    for root in options.root:
        if not root.is_dir():
            parser.error(f"--root: got {root}, expected a folder")
    installed = set().union(*map(packages_of, options.root))
    if options.packages and (
        unknown := [name for name in options.packages if name not in installed]
    ):
        parser.error(
            f"--packages: got {', '.join(unknown)}, expected modules or packages in "
            f"{', '.join(map(str, options.root))}"
        )
    for name in ("limit", "min_chars", "max_chars", "slice_tokens"):
        if (value := getattr(options, name)) is not None and value < 1:
            parser.error(f"--{name.replace('_', '-')}: got {value}, expected at least 1")
    return options


def main() -> int:
    options = arguments()
    found = documents(
        options.root,
        packages=options.packages,
        min_chars=options.min_chars,
        max_chars=options.max_chars,
        slice_tokens=options.slice_tokens,
    )
    count = characters = 0
    out = sys.stdout if options.out is None else options.out.open("w", encoding="utf-8")
    with out:
        for document in itertools.islice(found, options.limit):
            out.write(json.dumps({"_id": document["id"], "text": document["text"]}) + "\n")
            count, characters = count + 1, characters + len(document["text"])
    print(f"{count:,} documents, {characters:,} characters", file=sys.stderr)
    return 0 if count else 1


if __name__ == "__main__":
    raise SystemExit(main())
