"""What a build under way notes of itself, so that the same call can go on: STATE.json, parsed into types and never just believed."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, TypeVar

from .. import errors
from ..storage import NativeEngine
from ..storage.stream import crc32c, read_file, replace_file
from .store import Segment

STATE_NAME = "STATE.json"
PHASES = ("spool", "arrange", "write")
_LIMIT_BYTES = 64 << 20
_WHOLE_MAX = 2**63 - 1
Scalar = str | int | float | bool | None
T = TypeVar("T")


@dataclass(frozen=True)
class BuildSettings:
    """What a build was asked for.

    Attributes:
        spooled: what the spool's bytes depend on: encoder, dimensions, format, pooling.
        later: what only the passes after it depend on. `directories`, where data segments go, are of these too.
    """

    spooled: dict[str, Scalar]
    later: dict[str, Scalar]
    directories: list[str] = field(default_factory=list)

    def differences(self, other: BuildSettings) -> list[str]:
        """``name=ours instead of theirs`` for each setting that differs."""
        ours, theirs = self._all(), other._all()
        return [f"{name}={ours.get(name)!r} instead of {theirs.get(name)!r}" for name in sorted(ours) if ours[name] != theirs.get(name)]

    def _all(self) -> dict[str, Any]:
        return {**self.spooled, **self.later, "directories": self.directories}


@dataclass(frozen=True)
class SpoolFile:
    """How much of a file of the spool is known to be on disk. `sums`: CRC32C of each of its 4 MiB windows, where it has no other."""

    size_bytes: int
    sums: list[int] | None = None


@dataclass(frozen=True)
class Arranged:
    """What the second pass found.

    Attributes:
        sums: of the file of list numbers. sizes: documents of each list.
        nprobe, steps: see `probing.measure`.
        first_stage: size and CRC32C of its file; None for a store without documents.
    """

    sums: list[int]
    sizes: list[int]
    nprobe: int
    steps: dict[str, float]
    first_stage: tuple[int, int] | None


@dataclass
class BuildState:
    """A checkpoint of a build.

    Attributes:
        phase: the pass that is under way, one of `PHASES`.
        documents: in the spool, on disk for good.
        spool: its files by name.
        projection, codebooks: CRC32C of their files, once made. is_normalised: whether projected rows are brought to the length they had.
        arranged: once the second pass is through.
        segments: finished data files of each tier.
    """

    settings: BuildSettings
    store_id: str
    generation: int
    phase: str = "spool"
    documents: int = 0
    spool: dict[str, SpoolFile] = field(default_factory=dict)
    projection: int | None = None
    is_normalised: bool = False
    codebooks: int | None = None
    arranged: Arranged | None = None
    segments: dict[str, list[Segment]] = field(default_factory=dict)

    def back_to_spool(self) -> None:
        """Forgets everything that the passes after the spool made."""
        self.phase, self.is_normalised, self.segments = "spool", False, {}
        self.projection = self.codebooks = self.arranged = None


def read_state(engine: NativeEngine, directory: str) -> BuildState | None:
    """The last checkpoint of a build, or None. A damaged one is a FormatError (`discard` the build)."""
    path = os.path.join(directory, STATE_NAME)
    if not os.path.exists(path):
        return None
    fix = "discard it: build again with restart"
    size = os.path.getsize(path)
    if size > _LIMIT_BYTES:
        raise errors.FormatError("state of a build too large", path=path, got=f"{size} bytes", expected=f"at most {_LIMIT_BYTES}", fix=fix)
    try:
        found = _mapping(json.loads(read_file(engine, path)))
        if found.pop("crc32c", None) != _sum(found):
            raise ValueError("checksum")
        return _parse(found)
    except (ValueError, TypeError, RecursionError) as error:
        raise errors.FormatError("damaged state of an interrupted build", path=path, got=str(error), fix=fix) from error


def write_state(engine: NativeEngine, directory: str, state: BuildState) -> None:
    """Replaces the checkpoint, atomically."""
    fields = json.loads(json.dumps(asdict(state)))
    fields["crc32c"] = _sum(fields)
    replace_file(engine, os.path.join(directory, STATE_NAME), json.dumps(fields, sort_keys=True).encode())


def _sum(fields: Mapping[str, Any]) -> int:
    return crc32c(json.dumps(fields, sort_keys=True).encode())


def _parse(found: dict[str, Any]) -> BuildState:
    """Raises ValueError for whatever is not as `write_state` writes it."""
    settings = _mapping(found["settings"]) if "settings" in found else {}
    _only(found, BuildState)
    _only(settings, BuildSettings)
    phase, store_id = found["phase"], found["store_id"]
    if phase not in PHASES:
        raise ValueError(f"phase {phase!r}")
    if not isinstance(store_id, str) or re.fullmatch("[0-9a-f]{32}", store_id) is None:
        raise ValueError(f"store_id {store_id!r}")
    if not isinstance(found["is_normalised"], bool):
        raise ValueError("is_normalised")
    state = BuildState(
        settings=BuildSettings(
            {name: _scalar(value) for name, value in _mapping(settings["spooled"]).items()},
            {name: _scalar(value) for name, value in _mapping(settings["later"]).items()},
            _list(settings["directories"], _absolute),
        ),
        store_id=store_id,
        generation=_whole(found["generation"], 1),
        phase=phase,
        documents=_whole(found["documents"]),
        spool={name: _spool_file(value) for name, value in _mapping(found["spool"]).items()},
        projection=_maybe(found["projection"], _whole),
        is_normalised=found["is_normalised"],
        codebooks=_maybe(found["codebooks"], _whole),
        arranged=_maybe(found["arranged"], _arranged),
        segments={name: _list(value, _segment) for name, value in _mapping(found["segments"]).items()},
    )
    if (state.phase == "write") != (state.arranged is not None) or (state.segments and state.phase != "write"):
        raise ValueError(f"phase {state.phase} with the results of another")
    if state.arranged is not None and sum(state.arranged.sizes) != state.documents:
        raise ValueError(f"lists of {sum(state.arranged.sizes)} documents, of {state.documents}")
    return state


def _only(found: Mapping[str, Any], kind: type) -> None:
    """Raises ValueError unless the keys are the fields of a dataclass."""
    if set(found) != set(kind.__dataclass_fields__):  # type: ignore[attr-defined]
        raise ValueError(f"fields {sorted(set(found) ^ set(kind.__dataclass_fields__))}")  # type: ignore[attr-defined]


def _spool_file(value: Any) -> SpoolFile:
    found = _mapping(value)
    _only(found, SpoolFile)
    return SpoolFile(_whole(found["size_bytes"]), _maybe(found["sums"], lambda sums: _list(sums, _whole)))


def _arranged(value: Any) -> Arranged:
    found = _mapping(value)
    _only(found, Arranged)
    stage = _maybe(found["first_stage"], lambda pair: _list(pair, _whole))
    if stage is not None and len(stage) != 2:
        raise ValueError("first_stage")
    steps = {name: _number(share) for name, share in _mapping(found["steps"]).items()}
    return Arranged(
        _list(found["sums"], _whole),
        _list(found["sizes"], _whole),
        _whole(found["nprobe"]),
        steps,
        None if stage is None else (stage[0], stage[1]),
    )


def _segment(value: Any) -> Segment:
    found = _mapping(value)
    _only(found, Segment)
    if not isinstance(found["path"], str):
        raise ValueError(f"path {found['path']!r}")
    return Segment(found["path"], _whole(found["first_record"]), _whole(found["records"], 1), _whole(found["size_bytes"], 1))


def _mapping(value: Any) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"{type(value).__name__} where an object belongs")
    return value


def _list(value: Any, parse: Callable[[Any], T]) -> list[T]:
    if not isinstance(value, list):
        raise ValueError(f"{type(value).__name__} where a list belongs")
    return [parse(item) for item in value]


def _maybe(value: Any, parse: Callable[[Any], T]) -> T | None:
    return None if value is None else parse(value)


def _whole(value: Any, least: int = 0) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= _WHOLE_MAX:
        raise ValueError(f"{value!r} where a whole number of at least {least} belongs")
    return value


def _number(value: Any) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ValueError(f"{value!r} where a number belongs")
    return value


def _scalar(value: Any) -> Scalar:
    if value is not None and not isinstance(value, str | int | float):
        raise ValueError(f"{type(value).__name__} where a setting belongs")
    return value


def _absolute(value: Any) -> str:
    if not isinstance(value, str) or not os.path.isabs(value) or "\0" in value:
        raise ValueError(f"directory {value!r}")
    return value
