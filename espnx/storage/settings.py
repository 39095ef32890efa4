"""Settings of an engine in a file: what `espnx bench io --tune` found to be best for a disk, to be
named wherever an engine is.

[storage]
path = "uring"
queue_depth = 64
request_bytes = 983040
"""

from __future__ import annotations

import difflib
import os
import tomllib
from dataclasses import asdict, dataclass, fields

from .. import errors
from ..checks import check_path, check_whole

SUFFIX = ".toml"
SECTION = "storage"
PATHS = ("auto", "uring", "posix", "memory")
_SIZE_MAX = 1 << 16


@dataclass(frozen=True)
class EngineSettings:
    """Settings of a `NativeEngine`, whose arguments these are; None: its default."""

    path: str = "auto"
    queue_depth: int | None = None
    threads: int | None = None
    request_bytes: int | None = None
    pool_bytes: int | None = None

    def __post_init__(self) -> None:
        if self.path not in PATHS:
            raise errors.InvalidInputError(
                "path of engine settings", got=repr(self.path), expected=", ".join(PATHS)
            )
        for name in ("queue_depth", "threads", "request_bytes", "pool_bytes"):
            if (value := getattr(self, name)) is not None:
                check_whole(f"{name} of engine settings", value, 0)

    def text(self, comment: str = "") -> str:
        """The settings as a file has them. `comment`: before them."""
        lines = [f"# {line}" for line in comment.splitlines()] + [f"[{SECTION}]"]
        given = {name: value for name, value in asdict(self).items() if value is not None}
        return "\n".join(
            [*lines, *(f"{name} = {_toml(value)}" for name, value in given.items()), ""]
        )


def _toml(value: str | int) -> str:
    return f'"{value}"' if isinstance(value, str) else str(value)


def is_file(path: object) -> bool:
    """Whether what was given for an engine's path names a file of settings."""
    return isinstance(path, os.PathLike) or (isinstance(path, str) and path.endswith(SUFFIX))


def load(path: str | os.PathLike[str]) -> EngineSettings:
    """Raises InvalidInputError where there is no such file, or it has other settings than there
    are; FormatError where it is no TOML."""
    name = check_path("engine settings", path)
    try:
        with open(name, "rb") as file:
            data = file.read(_SIZE_MAX + 1)
    except OSError as error:
        fix = "make it: espnx bench io --path DIR --tune"
        raise errors.InvalidInputError(
            f"engine settings {name}", got=error.strerror, expected="a readable file", fix=fix
        ) from error
    try:
        if len(data) > _SIZE_MAX:
            raise ValueError(f"more than {_SIZE_MAX} bytes")
        found = tomllib.loads(data.decode())
    except (ValueError, RecursionError) as error:
        raise errors.FormatError(
            "cannot read engine settings", path=name, got=str(error), expected="TOML"
        ) from error
    table = found.get(SECTION)
    if not isinstance(table, dict) or len(found) > 1:
        raise errors.InvalidInputError(
            f"engine settings {name}",
            got=", ".join(found) or "nothing",
            expected=f"a table [{SECTION}] alone",
        )
    known = [field.name for field in fields(EngineSettings)]
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, 1)
            raise errors.InvalidInputError(
                f"engine settings {name}: {key!r}",
                expected=", ".join(known),
                fix=f"did you mean {near[0]}?" if near else None,
            )
    try:
        return EngineSettings(**table)
    except errors.InvalidInputError as error:
        raise errors.InvalidInputError(
            f"{error.what} {name}", got=error.got, expected=error.expected
        ) from None
