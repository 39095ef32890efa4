"""Which files of tests can see what has changed, by what imports what: what `make check` runs.

    python -m tests.reach [--base REV] [--seconds 25]

prints the files for pytest, and says on standard error what it leaves to `make test`. The nearest
come first: files of tests that have changed, those that import what has changed, those that import
what imports it; of those equally near, one of every folder before the second of any, until the time
is spent. What a file takes is what it took when it last ran here.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path

from espnx import _HOME
from tests.layers import NATIVE_USERS, ROOT, imported, modules, parsed

#: Rules of the whole tree, which no graph of imports knows: they are always run.
ALWAYS = [
    "tests/test_front.py::test_every_name_is_what_a_type_checker_is_told",
    "tests/test_layering.py::test_imports_point_down",
    "tests/test_layering.py::test_no_module_imports_one_that_imports_it",
    "tests/test_layering.py::test_no_room_imports_one_that_imports_it",
    "tests/test_style.py::test_every_file_keeps_the_rules",
    "tests/test_style.py::test_own_cpp_compiles_without_a_warning",
    "tests/test_style.py::test_small_files_are_ideas_of_their_own",
    "tests/test_tests.py",
]
#: Every test imports it, by way of pytest, and it looks at every room: it counts only when it has
#: changed itself.
SHARED = "tests/conftest.py"
#: Folders of csrc/ whose room has another name.
ROOMS_OF_CPP = {"io": "storage", "cpu": "ops"}
#: Where what the files took is kept (of pytest's cache, by tests/conftest.py), and what one takes
#: that has not run here yet.
SECONDS_KEY, UNKNOWN_SECONDS = "espnx/seconds", 6.0
FRONT = re.compile(r"\bespnx\.(\w+)")

#: Files, by their path from the root, and what each of them imports or names.
Edges = Mapping[str, set[str]]


def git(*words: str) -> list[str]:
    done = subprocess.run(["git", "-C", str(ROOT), *words], capture_output=True, text=True)
    return [name for name in done.stdout.split("\0") if name] if done.returncode == 0 else []


def changed(base: str | None) -> list[str]:
    """Files that differ between a commit and the working tree, new ones too. Without a commit:
    where this branch left main."""
    start = (git("merge-base", "HEAD", "main") or ["HEAD"])[0].strip() if base is None else base
    return sorted(
        {
            *git("diff", "--name-only", "-z", start, "--"),
            *git("ls-files", "--others", "--exclude-standard", "-z"),
        }
    )


def files() -> list[str]:
    return git("ls-files", "--cached", "--others", "--exclude-standard", "-z")


def names_of_modules(paths: Iterable[str]) -> dict[str, tuple[str, bool]]:
    """The path of each Python module of ours, and whether it is a package's ``__init__``."""
    found = {
        module: (path.relative_to(ROOT).as_posix(), is_package)
        for path, module, is_package in modules()
    }
    for path in paths:
        if path.endswith(".py") and path.startswith(("tests/", "scripts/", "examples/")):
            found[path.removesuffix(".py").replace("/", ".")] = path, False
    return found


def edges(paths: list[str]) -> dict[str, set[str]]:
    """What each Python file imports, wherever in it, or names in a string: a module, a file or a
    folder (a process that it starts, a page that it reads). The front page ``espnx`` counts for
    nothing: a name that is taken from it leads to where the name is defined."""
    known = names_of_modules(paths)
    homes = {name: known[f"espnx.{module}"][0] for module, names in _HOME.items() for name in names}
    named = defaultdict(set)  # what a string may mean
    for module, (path, _) in known.items():
        named[module].add(path)
    for path in paths:
        if not path.startswith(("espnx/", "csrc/", "benchmarks/", "kernels/")) and path != SHARED:
            for part in (Path(path), *Path(path).parents):
                named[part.name].add(path)
    for common in ("", "tests"):
        named.pop(common, None)
    found = {}
    for module, (path, is_package) in known.items():
        text = (ROOT / path).read_text(encoding="utf-8")
        targets = {homes[name] for name in FRONT.findall(text) if name in homes}
        for base, name, _ in imported(text, module, is_package=is_package):
            whole = f"{base}.{name}"
            targets |= (
                {known[whole if whole in known else base][0]}
                if whole in known or base in known
                else set()
            )
            targets |= {homes[name]} if base == "espnx" and name in homes else set()
        if path.startswith(("tests/", "espnx/cli/")):
            for node in ast.walk(parsed(text)):
                if isinstance(node, ast.Constant) and isinstance(node.value, str):
                    targets |= named.get(node.value.partition(":")[0].rpartition("/")[2], set())
        found[path] = targets - {path, "espnx/__init__.py"}
        if path.startswith("tests/"):
            found[path] |= {
                f"{folder}/conftest.py" for folder in map(str, Path(path).parents)
            } & set(paths) - {SHARED, path}
    return found


def sources(path: str, graph: Edges) -> set[str]:
    """The nodes of the graph that a change of a file is a change of."""
    if path == SHARED:
        return {node for node in graph if is_test(node)}
    if path in graph:
        return {path}
    parts = Path(path).parts
    if parts[0] == "csrc":
        rooms = [ROOMS_OF_CPP.get(parts[1], parts[1]), *parts[2:-1]]
        for depth in range(len(rooms), 0, -1):
            if found := {
                node for node in graph if node.startswith(f"espnx/{'/'.join(rooms[:depth])}/")
            }:
                return found
        return {
            node
            for node in graph
            if node.split("/")[:1] == ["espnx"] and node.split("/")[1] in NATIVE_USERS
        }
    if parts[0] in ("espnx", "benchmarks"):  # data of a package, perhaps in a folder of its own
        for folder in Path(path).parents:
            if beside := {node for node in graph if Path(node).parent == folder}:
                return {path} | beside
    return {path}


def is_test(path: str) -> bool:
    return (
        Path(path).name.startswith("test_") and path.startswith("tests/") and path.endswith(".py")
    )


def distances(graph: Edges, start: Iterable[str]) -> dict[str, int]:
    """How many imports lie between a file and what has changed, of those that can see it."""
    importers = defaultdict(set)
    for path, targets in graph.items():
        for target in targets:
            importers[target].add(path)
    found = dict.fromkeys(start, 0)
    front = set(found)
    while front:
        front = {path for target in front for path in importers[target]} - found.keys()
        found |= dict.fromkeys(front, max(found.values()) + 1)
    return found


def nearness(graph: Edges, new: Iterable[str]) -> dict[str, float]:
    """Of each file of tests that can see something that has changed: one over the number of those
    that are as near to it or nearer, for what it is nearest to. So the few that know a small part
    come before the many that know what all know."""
    found: dict[str, float] = {}
    for changed_path in new:
        far = {
            path: count
            for path, count in distances(graph, sources(changed_path, graph)).items()
            if is_test(path)
        }
        within = Counter(far.values())
        for path, count in far.items():
            near = 1 / sum(number for distance, number in within.items() if distance <= count)
            found[path] = max(near, found.get(path, 0.0))
    return found


def chosen(near: Mapping[str, float], took: Mapping[str, float], budget: float) -> list[str]:
    """The files of tests to run, the nearest first, in no more than so many seconds of all
    processes together."""
    seconds = {path: took.get(path, UNKNOWN_SECONDS) for path in near}
    in_folder: Counter[tuple[float, str]] = Counter()
    turns = {}
    for path in sorted(seconds, key=lambda path: (seconds[path], path)):
        place = near[path], str(Path(path).parent)
        turns[path] = in_folder[place]
        in_folder[place] += 1
    found, spent = [], 0.0
    for path in sorted(seconds, key=lambda path: (-near[path], turns[path], seconds[path], path)):
        if spent + seconds[path] <= budget:
            found.append(path)
            spent += seconds[path]
    return found


def told(what: Iterable[str]) -> str:
    """How many files of each folder."""
    return ", ".join(
        f"{folder} {count}"
        for folder, count in sorted(Counter(str(Path(path).parent) for path in what).items())
    )


def main(words: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="the files of tests that can see what has changed")
    parser.add_argument(
        "--base", help="what to compare with (default: where this branch left main)"
    )
    parser.add_argument(
        "--seconds",
        type=float,
        default=25.0,
        help="how long they may take together, on every core (default: 25)",
    )
    asked = parser.parse_args(words)
    paths = files()
    graph, new = edges(paths), changed(asked.base)
    seen = {path: near for path, near in nearness(graph, new).items() if (ROOT / path).exists()}
    cache = ROOT / ".cache" / "pytest" / "v" / SECONDS_KEY
    took = json.loads(cache.read_text()) if cache.exists() else {}
    run = chosen(seen, took, asked.seconds * min(os.cpu_count() or 1, 4))
    print(
        f"check: {len(new)} files have changed; {len(seen)} files of tests can see it, of which "
        f"{len(run)} run",
        file=sys.stderr,
    )
    if left := seen.keys() - set(run):
        print(f"check: left to `make test`: {told(left)}", file=sys.stderr)
    print(*run, *(node for node in ALWAYS if node.partition("::")[0] not in run), sep="\n")


if __name__ == "__main__":
    main()
