#!/usr/bin/env python3
"""Before a release: README's page exactly as it is read, in a fresh clone and environment, compiled
as pip compiles for a user; then what a release says of itself.

    make release-check
    .venv/bin/python scripts/release_check.py [--editable] [--keep DIR]

The lines of README's section Install run as they stand, its Python and shell blocks are pasted in
the clone's root and in an empty folder, both twice, and must print what the page shows. Takes the
minutes of a compilation; what it installs and its sizes are printed.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))

from wheels import ROOT, cpu_torch

BLOCK = re.compile(
    r"^```(python|bash)\n(.*?)^```\n(?:\n```text\n(.*?)^```\n)?", re.MULTILINE | re.DOTALL
)
INSTALL = re.compile(r"^## Install\n.*?^```\n(.*?)^```", re.MULTILINE | re.DOTALL)
ALL_MB_MAX = 1700  # what the first line installs, with a CPU build of torch


class Shell:
    """Commands as a user types them, with an environment activated; nothing of the surrounding one
    is seen."""

    def __init__(self, environment: Path):
        left_out = ("PYTHONPATH", "VIRTUAL_ENV", "PYTHONHOME")
        self.environment = {
            name: value for name, value in os.environ.items() if name not in left_out
        }
        self.environment |= {
            "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
            "VIRTUAL_ENV": str(environment),
        }

    def run(self, command: str, where: Path, pasted: str | None = None) -> str:
        """What it prints; ends the program where it fails."""
        begun = time.perf_counter()
        done = subprocess.run(
            ["bash", "-ec", command],
            cwd=where,
            env=self.environment,
            input=pasted or "",
            capture_output=True,
            text=True,
        )
        print(
            f"  {time.perf_counter() - begun:6.1f} s  {where.name}$ {command.splitlines()[0]}",
            flush=True,
        )
        if done.returncode:
            raise SystemExit(
                f"{pasted or command}\nended with {done.returncode}\n{done.stdout[-4000:]}\n"
                f"{done.stderr[-4000:]}"
            )
        return done.stdout


def lines_of_install(readme: str, editable: bool) -> list[str]:
    (block,) = INSTALL.findall(readme)
    lines = [line.partition("  #")[0].strip() for line in block.splitlines()]
    return [
        line.replace("pip install ", "pip install -e ", 1) if editable else line
        for line in lines
        if line
    ]


def check_page(scratch: Path, *, editable: bool) -> None:
    """Raises SystemExit where a line of the page fails, or a block prints something else than the
    page shows."""
    clone, empty = scratch / "clone", scratch / "empty"
    empty.mkdir()
    subprocess.run(["git", "clone", "-q", str(ROOT), str(clone)], check=True)
    subprocess.run([sys.executable, "-m", "venv", str(scratch / "env")], check=True)
    shell, readme = Shell(scratch / "env"), (clone / "README.md").read_text()
    shell.run(f"pip install -q --progress-bar off {cpu_torch()}", clone)
    for number, line in enumerate(lines_of_install(readme, editable)):
        shell.run(line, clone)
        size_mb = int(shell.run("du -s --block-size=1000000 .", scratch / "env").split()[0])
        print(f"  the environment has {size_mb:,} MB", flush=True)
        if number == 0 and size_mb > ALL_MB_MAX:
            raise SystemExit(f"{line}: got {size_mb:,} MB; expected at most {ALL_MB_MAX:,}")
    for where in (clone, empty) * 2:
        for kind, text, shown in BLOCK.findall(readme):
            said = shell.run("python", where, text) if kind == "python" else shell.run(text, where)
            if shown and said != shown:
                raise SystemExit(f"{text}\nin {where} printed\n{said}\nand the page shows\n{shown}")


def check_release() -> None:
    """One version; a dated heading and a tag of it where this commit is released."""
    version = re.findall(
        r'^__version__ = "(.+)"$', (ROOT / "espnx" / "_version.py").read_text(), re.MULTILINE
    )[0]
    number, note = re.findall(
        r"^## (\S+) \((.*)\)$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )[0]
    done = subprocess.run(
        ["git", "-C", str(ROOT), "tag", "--points-at", "HEAD", "v*"], capture_output=True, text=True
    )
    tags = done.stdout.split()
    if number != version or (tags and tags != [f"v{version}"]):
        raise SystemExit(
            f"espnx/_version.py says {version}, CHANGELOG.md {number}, tags of this commit {tags}"
        )
    is_dated = re.fullmatch(r"\d{4}-\d\d-\d\d", note) is not None
    if bool(tags) != is_dated:
        raise SystemExit(
            f"CHANGELOG.md says {version} ({note}), tags of this commit are {tags}: a release has "
            "a date and a tag"
        )
    to_do = f"{note}; to release it: a date in CHANGELOG.md, then git tag v{version}"
    print(f"{version}: {'released as ' + tags[0] if tags else to_do}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--editable", action="store_true", help="pip install -e in place of the page's pip install"
    )
    parser.add_argument(
        "--keep",
        type=Path,
        metavar="DIR",
        help="leave clone and environment there (default: a folder that goes)",
    )
    args = parser.parse_args()
    check_release()
    with contextlib.ExitStack() as stack:
        scratch = args.keep or Path(stack.enter_context(tempfile.TemporaryDirectory()))
        scratch.mkdir(parents=True, exist_ok=True)
        check_page(scratch.resolve(), editable=args.editable)
    print("the page works as it stands")
    return 0


if __name__ == "__main__":
    sys.exit(main())
