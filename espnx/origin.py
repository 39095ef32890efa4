"""Which sources this copy of espnx is of: what git says where it runs from a clone, and what was
written down at build time where it was installed. Standard library only, and no other module of
ours: setup.py runs this file before anything is built."""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

#: Beside this file, in a wheel and in a source archive alone.
RECORD = "_origin.json"
_PACKAGE = Path(__file__).resolve().parent


def git_state(folder: Path) -> dict[str, Any]:
    """``commit``, and ``dirty``: whether tracked files differ from it. None for what git cannot
    tell; nothing where this is no clone."""
    if not (folder / ".git").exists():
        return {}
    commit = _git(folder, "rev-parse", "HEAD")
    status = _git(folder, "status", "--porcelain", "--untracked-files=no")
    return {"commit": commit or None, "dirty": None if status is None else bool(status)}


def _git(folder: Path, *words: str) -> str | None:
    command = ["git", "-C", str(folder), *words]
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, timeout=20, stdin=subprocess.DEVNULL
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None


def sources_digest(root: Path) -> str | None:
    """A hash over names and bytes of what the extension is compiled from; None where these files
    are not there."""
    files = sorted(path for path in (root / "csrc").rglob("*") if path.suffix in (".cpp", ".hpp"))
    digest = hashlib.sha256()
    for path in files:
        digest.update(
            f"{path.relative_to(root).as_posix()}\n{path.stat().st_size}\n".encode()
            + path.read_bytes()
        )
    return digest.hexdigest() if files else None


def read_record(package: Path) -> dict[str, Any]:
    """What was written down when that installation was built; nothing where nothing was, or where
    it cannot be read."""
    try:
        found = json.loads((package / RECORD).read_text())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def make_record(root: Path) -> dict[str, Any]:
    """Records which tree is being built: a clone, or a source archive, which brings the record of
    the clone that it was made of."""
    state = git_state(root) or {
        name: read_record(root / "espnx").get(name) for name in ("commit", "dirty")
    }
    return {**state, "sources": sources_digest(root)}


def write_record(package: Path, record: Mapping[str, Any]) -> None:
    (package / RECORD).write_text(json.dumps(record, indent=2) + "\n")


def source_state() -> dict[str, Any]:
    """``commit`` and ``dirty`` of this copy, from git or from the record; nothing where neither
    knows."""
    recorded = read_record(_PACKAGE)
    return git_state(_PACKAGE.parent) or {
        name: recorded[name] for name in ("commit", "dirty") if name in recorded
    }
