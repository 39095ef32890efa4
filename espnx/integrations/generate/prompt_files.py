"""Files of prompts, and of their results: JSON lines, written as batches end and found again by the
next run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ... import errors
from ...storage.files import write_error

_ANOTHER_OUT = "name another --out"


@dataclass(frozen=True)
class Prompt:
    id: str
    text: str

    @property
    def digest(self) -> str:
        """What a result is known by to be of this text."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def read_prompts(path: str | os.PathLike[str]) -> list[Prompt]:
    """One prompt a line; of a ``.jsonl`` file objects with ``prompt`` and, if they have one,
    ``id``.

    Raises InvalidInputError naming the line.
    """
    try:
        # JSON may hold other separators of lines
        lines = Path(path).read_text(encoding="utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise errors.InvalidInputError(
            "prompts", got=str(error), expected="a readable text file in UTF-8"
        ) from error
    prompts, seen = list[Prompt](), set[str]()
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        prompt = Prompt(str(number), line)
        if os.fspath(path).endswith(".jsonl"):
            try:
                found = json.loads(line)
                prompt = Prompt(str(found.get("id", number)), found["prompt"])
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
                raise errors.InvalidInputError(
                    f"line {number} of {path}",
                    got=repr(error),
                    expected='{"id": ..., "prompt": ...}',
                ) from error
        if prompt.id in seen or not isinstance(prompt.text, str):
            raise errors.InvalidInputError(
                f"line {number} of {path}",
                got=f"id {prompt.id!r} again, or no text",
                expected="ids of their own",
            )
        seen.add(prompt.id)
        prompts.append(prompt)
    return prompts


def check_writable(path: str | os.PathLike[str]) -> None:
    """Raises InvalidInputError, WriteError or DiskFullError where results could not be appended to
    `path`; leaves nothing there."""
    existed = os.path.lexists(path)
    # a pipe would wait for its reader, some devices never end
    if os.path.exists(path) and not os.path.isfile(path):
        raise errors.InvalidInputError(
            f"results in {path}",
            got="something that is no file",
            expected="a file",
            fix=_ANOTHER_OUT,
        )
    try:
        with open(path, "ab"):
            pass
        if not existed:
            os.unlink(path)
    except OSError as error:
        raise write_error("cannot write results", path, error, _ANOTHER_OUT) from error


def read_done(
    path: str | os.PathLike[str], settings: dict[str, Any], prompts: Sequence[Prompt]
) -> set[str]:
    """Ids of the results that an earlier run wrote; a last line that was cut short is taken away.

    Raises:
        InvalidInputError: they are of other settings or other prompts, or the file holds something
            else: nothing is changed then.
        WriteError, DiskFullError: no results can be written there.
    """
    check_writable(path)
    if not os.path.exists(path):
        return set()
    digests = {prompt.id: prompt.digest for prompt in prompts}
    whole, done = 0, set[str]()
    try:
        with open(path, "rb") as file:
            for number, line in enumerate(file, 1):
                if not line.endswith(b"\n") and (not line.strip() or line.startswith(b"{")):
                    break  # the last one
                done.add(_check_line(f"line {number} of {path}", line, settings, digests))
                whole += len(line)
        if whole < os.path.getsize(path):
            os.truncate(path, whole)
    except OSError as error:
        raise write_error("cannot go on after the results", path, error, _ANOTHER_OUT) from error
    return done


def _check_line(
    where: str, line: bytes, settings: dict[str, Any], digests: Mapping[str, str]
) -> str:
    """The id of a result, which must be one of these settings and, where its id is asked for still,
    of that prompt."""
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):  # also a number of more digits than Python reads
        found = None
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise errors.InvalidInputError(
            where, got="something else", expected="results of an earlier run", fix=_ANOTHER_OUT
        )
    if found.get("settings") != settings:
        got, expected = _differences(found.get("settings"), settings)
        fix = f"run with the options of those results, or {_ANOTHER_OUT}"
        raise errors.InvalidInputError(
            f"{where}, a result of other settings", got=got, expected=expected, fix=fix
        )
    name: str = found["id"]
    if name in digests and found.get("prompt_digest") != digests[name]:
        raise errors.InvalidInputError(
            f"results: {where}",
            got=f"a result for id {name!r} of another prompt",
            expected="that of the prompts file",
            fix=_ANOTHER_OUT,
        )
    return name


def _differences(found: Any, settings: Mapping[str, Any]) -> tuple[str, str]:
    """What differs, as it was found and as it is now."""
    if not isinstance(found, dict):
        return f"settings {found}", "those of this run"
    absent = object()
    names = [
        name
        for name in {**settings, **found}
        if found.get(name, absent) != settings.get(name, absent)
    ]
    return _named(found, names), _named(settings, names)


def _named(settings: Mapping[str, Any], names: Sequence[str]) -> str:
    return ", ".join(
        f"nothing of {name}"
        if name not in settings
        else f"no {name}"
        if settings[name] is None
        else f"{name} {settings[name]}"
        for name in names
    )


def append(path: str | os.PathLike[str], lines: Sequence[dict[str, Any]]) -> None:
    text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
    # half a surrogate pair, which JSON allows, becomes its escape again
    left = memoryview(text.encode("utf-8", "backslashreplace"))
    try:
        with open(path, "ab", buffering=0) as file:
            while left:
                left = left[file.write(left) :]
            os.fsync(file.fileno())
    except OSError as error:
        raise write_error(
            "cannot write results",
            path,
            error,
            "the same command goes on after the results that are whole",
        ) from error


def sort_results(path: str | os.PathLike[str], order: Mapping[str, int]) -> None:
    """Puts whole results into the order of their prompts, in one step; those of other prompts, of
    an earlier run, come last.

    Raises WriteError, DiskFullError: the results are as they were.
    """
    file = Path(os.path.realpath(path))
    lines = file.read_bytes().splitlines(keepends=True)
    ordered = sorted(lines, key=lambda line: order.get(json.loads(line)["id"], len(order)))
    if ordered == lines:
        return
    temporary = file.with_name(f"{file.name}.new")
    try:
        temporary.unlink(missing_ok=True)
        with open(temporary, "xb") as made:
            made.writelines(ordered)
            made.flush()
            os.fsync(made.fileno())
        shutil.copymode(file, temporary)
        os.replace(temporary, file)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise write_error(
            "cannot put results into the order of their prompts",
            path,
            error,
            "they are all there, as they came",
        ) from error
