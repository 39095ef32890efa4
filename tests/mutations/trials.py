"""Mutations of files that others may have made: one value at a time is another one, with checksums
that are right again. Nothing but a typed error may come of it, or the very results of the file as
it was.

Mutations run in children with a limit on memory and one on processor time, many in each. Run as a
program, every one is tried:

    python -m tests.mutations.trials all
"""

from __future__ import annotations

import copy
import json
import os
import resource
import shutil
import struct
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from espnx import errors
from espnx.storage.manifest import _digest
from tests.forks import serve

#: What a value may become.
VALUES: list[Any] = [
    0,
    -1,
    1,
    2,
    7,
    2**31,
    2**63,
    10**30,
    0.5,
    1e308,
    float("nan"),
    True,
    None,
    "",
    "..",
    "/",
    "/etc/passwd",
    "../decoy/gen-000001/segment-00000.bin",
    "a\0b",
    "\ud800",
    "x" * 100_000,
    [],
    {},
    [0],
    {"a": 1},
]
_DELETED = object()


def mutated(value: Any) -> Iterator[tuple[str, Any]]:
    """(what was done, a copy) of a JSON value, one change in each: every field gets every other
    value, goes, comes twice."""
    for path in _paths(value):
        changes: list[Any] = [each for each in VALUES if repr(each) != repr(_at(value, path))]
        old = _at(value, path)
        if type(old) is int:
            changes += [old + 1, old - 1, old * 2, -old, float(old), str(old)]
        if isinstance(old, list) and old:
            changes += [old + old[:1], old[:-1], old[::-1]]
        for change in [*changes, _DELETED]:
            yield (
                (
                    f"{'.'.join(map(str, path))} = "
                    f"{repr(change)[:60] if change is not _DELETED else 'gone'}"
                ),
                _changed(value, path, change),
            )


def _paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    if path:
        yield path
    for key in (
        value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    ):
        yield from _paths(value[key], (*path, key))


def _at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def _changed(value: Any, path: tuple[Any, ...], change: Any) -> Any:
    result = copy.deepcopy(value)
    owner = _at(result, path[:-1])
    if change is _DELETED:
        del owner[path[-1]]
    else:
        owner[path[-1]] = change
    return result


def put(name: str, data: bytes) -> Callable[[Path], None]:
    """Puts other bytes in place of a file."""

    def change(path: Path) -> None:
        (path / name).write_bytes(data)

    return change


def together(*changes: Callable[[Path], None]) -> Callable[[Path], None]:
    """All of them."""

    def change(path: Path) -> None:
        for each in changes:
            each(path)

    return change


def manifest_bytes(fields: dict[str, Any]) -> bytes:
    """With a checksum that is right."""
    return json.dumps(fields | {"checksum": _digest(fields)}).encode()


def read_manifest(path: Path) -> dict[str, Any]:
    fields: dict[str, Any] = json.loads(path.read_text())
    del fields["checksum"]
    return fields


def split_safetensors(data: bytes) -> tuple[dict[str, Any], bytes]:
    size = struct.unpack("<Q", data[:8])[0]
    return json.loads(data[8 : 8 + size]), data[8 + size :]


def join_safetensors(header: Any, body: bytes) -> bytes:
    text = json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + body


@dataclass
class Trial:
    """A kind of file.

    Attributes:
        make: makes what is sound, in a directory.
        changes: of what lies there: (what was done, how to do it to a copy in a directory).
        use: opens and uses a copy; what it returns must be what the sound one gives, unless
        is_content: what is changed are vectors, texts and the like, which are their author's to
            choose.
    """

    make: Callable[[Path], None]
    changes: Callable[[Path], Iterator[tuple[str, Callable[[Path], None]]]]
    use: Callable[[Path], Any]
    is_content: bool = False


@dataclass
class Outcome:
    """Of some mutations: counts, and those that are faults."""

    typed: int
    equal: int
    faults: list[str]


def run(
    trial: Trial,
    folder: Path,
    *,
    every: int = 1,
    shift: int = 0,
    memory_bytes: int = 3 << 30,
    seconds: int = 20,
) -> Outcome:
    """Tries the `shift`-th of every `every` mutations, each in a fork of its own that is killed at
    its limits."""
    sound = folder / "sound"
    sound.mkdir()
    trial.make(sound)
    decoy = _decoy(folder / "decoy")
    shutil.copytree(sound, folder / "copy", symlinks=True)
    expected = _in_child(trial, folder / "copy", memory_bytes, seconds)
    assert expected.startswith("result "), expected
    outcome = Outcome(0, 0, [])
    for number, (what, change) in enumerate(trial.changes(sound)):
        if number % every != shift % every:
            continue
        shutil.rmtree(folder / "copy")
        shutil.copytree(sound, folder / "copy", symlinks=True)
        change(folder / "copy")
        found = _in_child(trial, folder / "copy", memory_bytes, seconds)
        if found == expected or (trial.is_content and found.startswith("result ")):
            outcome.equal += 1
        elif found.startswith("typed "):
            outcome.typed += 1
        else:
            outcome.faults.append(f"{what}: {found[:300]}")
        if _contents(folder / "decoy") != decoy:
            outcome.faults.append(f"{what}: the directory beside it has changed")
            shutil.rmtree(folder / "decoy")
            decoy = _decoy(folder / "decoy")
    return outcome


def _decoy(place: Path) -> dict[str, bytes]:
    """Somebody's directory, with names like ours in it."""
    for name in (
        "gen-000001/segment-00000.bin",
        "building/STATE.json",
        "rows.bin",
        "MANIFEST.json",
    ):
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_text("mine")
    return _contents(place)


def _contents(place: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in sorted(place.rglob("*")) if path.is_file()}


def _in_child(trial: Trial, path: Path, memory_bytes: int, seconds: int) -> str:
    """``result ...``, ``typed ...``, or what went wrong."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        text = "no answer"
        try:
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + memory_bytes, used + memory_bytes))
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            text = f"result {trial.use(path)!r}"
        except errors.EspnxError as error:
            text = f"typed {type(error).__name__}"
        except BaseException as error:
            text = f"{type(error).__name__}: {error}"
        finally:
            os.write(writing, text.encode(errors="replace")[:60_000])
            os._exit(0)
    os.close(writing)
    parts = []
    while part := os.read(reading, 1 << 16):
        parts.append(part)
    os.close(reading)
    _, status = os.waitpid(child, 0)
    code = os.waitstatus_to_exitcode(status)
    return b"".join(parts).decode() if code == 0 else f"ended by {code}"


def trials() -> dict[str, Trial]:
    import faiss
    import torch

    from tests.mutations.caches import CACHES
    from tests.mutations.generation import GENERATION
    from tests.mutations.stores import STORES

    torch.set_num_threads(1)  # a fork has no other threads
    faiss.omp_set_num_threads(1)
    return {**STORES, **CACHES, **GENERATION}


def job(options: dict[str, Any]) -> int:
    """Of tests/forks.py: one mutation in `every` of a kind; what was found goes to the file
    `report`."""
    outcome = run(
        trials()[options["kind"]],
        Path(options["folder"]),
        every=options["every"],
        shift=options["shift"],
    )
    Path(options["report"]).write_text(
        "\n".join(outcome.faults) or f"{outcome.typed} typed, {outcome.equal} as it was"
    )
    return int(bool(outcome.faults) or outcome.typed == 0)


PACKAGES = ()


def jobs() -> None:
    trials()
    serve(job)


def main(kinds: list[str]) -> int:
    known, code = trials(), 0
    for kind in known if kinds == ["all"] else kinds:
        with tempfile.TemporaryDirectory(
            dir="/dev/shm" if os.path.isdir("/dev/shm") else None
        ) as folder:
            outcome = run(known[kind], Path(folder))
        print(
            f"{kind}: {outcome.typed} typed, {outcome.equal} as it was, {len(outcome.faults)} "
            "faults",
            flush=True,
        )
        print("\n".join(f"  {fault}" for fault in outcome.faults), flush=True)
        code |= bool(outcome.faults)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or ["all"]))
