"""What a C++ file of ours is made of: itself and the headers of ours that it includes, and that
those include. What was compiled from it stays as it is while these do."""

from __future__ import annotations

import functools
import hashlib
import re
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc"
INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


def own_files(source: Path) -> list[Path]:
    """The file first. Includes are looked for where the compiler does: in the file's own folder,
    then in csrc/; one that is nowhere is the compiler's to complain of."""
    found, waiting = dict.fromkeys([source]), [source]
    while waiting:
        for path in includes(waiting.pop()):
            if path not in found and path.is_file():
                found[path] = None
                waiting.append(path)
    return [source, *sorted(found.keys() - {source})]


@functools.cache
def includes(path: Path) -> tuple[Path, ...]:
    candidates = (
        (path.parent / name, CSRC / name)
        for name in INCLUDE.findall(path.read_text(encoding="utf-8"))
    )
    return tuple(
        next((each.resolve() for each in pair if each.is_file()), pair[1]) for pair in candidates
    )


def own_text(source: Path) -> bytes:
    """Names and bytes of them all."""
    return b"".join(path.name.encode() + b"\0" + path.read_bytes() for path in own_files(source))


def standard_headers() -> str:
    """A header of those of the language that files of ours include most."""
    names = "algorithm atomic chrono cmath condition_variable cstdint cstring deque functional"
    names += " limits memory mutex optional random string thread tuple unordered_map utility vector"
    return "".join(f"#include <{name}>\n" for name in names.split())


@functools.cache
def version(compiler: str) -> bytes:
    return subprocess.run([compiler, "-dumpversion"], capture_output=True, check=True).stdout


def text_hash(source: Path, compiler: str) -> str:
    """Of a source, the headers of ours that it reads, and the compiler's version: as setup.py
    notes it beside what was compiled without a warning."""
    return hashlib.sha256(version(compiler) + own_text(source)).hexdigest()
