"""What a build under way notes of itself, so that the same call can go on: STATE.json, parsed into types and never just believed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field

from .. import errors
from ..storage import NativeEngine
from ..storage.parse import Fields, check_plain_file, parse_object
from ..storage.stream import crc32c, read_file, replace_file
from .part import Segment

STATE_NAME = "STATE.json"
PHASES = ("spool", "arrange", "write")
_LIMIT_BYTES = 64 << 20
_COUNT_MAX = 1 << 24
_FIX = "discard it: build again with restart"


@dataclass(frozen=True)
class BuildSettings:
    """What a build was asked for.

    Attributes:
        spooled: what the spool's bytes depend on, in words: encoder, dimensions, format, pooling.
        later: what only the passes after it depend on. `directories`, where data segments go, are of these too.
    """

    spooled: dict[str, str]
    later: dict[str, str]
    directories: list[str] = field(default_factory=list)

    def differences(self, other: BuildSettings) -> list[str]:
        """``name=ours instead of theirs`` for each setting that differs."""
        ours, theirs = self._all(), other._all()
        return [f"{name}={ours.get(name)} instead of {theirs.get(name)}" for name in sorted(ours) if ours[name] != theirs.get(name)]

    def _all(self) -> dict[str, str]:
        return {**self.spooled, **self.later, "directories": repr(self.directories)}


def in_words(settings: Mapping[str, object]) -> dict[str, str]:
    """Values as `BuildSettings` has them."""
    return {name: repr(value) for name, value in settings.items()}


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
        trained: CRC32C of the file of what was trained. codes: of each window of the file of codes. Both are of no use without documents.
    """

    sums: list[int]
    sizes: list[int]
    nprobe: int
    steps: dict[str, float]
    trained: int
    codes: list[int]


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
    if not os.path.lexists(path):
        return None
    size = check_plain_file(path)
    if size > _LIMIT_BYTES:
        raise errors.FormatError("state of a build too large", path=path, got=f"{size} bytes", expected=f"at most {_LIMIT_BYTES}", fix=_FIX)
    text, _, stated = read_file(engine, path).rpartition(b"\n")
    if stated != _checksum(text):
        raise errors.FormatError("damaged state of an interrupted build", path=path, got=f"checksum {stated[:40]!r}", fix=_FIX)
    return _parse(parse_object(text, path, what="state of an interrupted build", fix=_FIX))


def write_state(engine: NativeEngine, directory: str, state: BuildState) -> None:
    """Replaces the checkpoint, atomically."""
    text = json.dumps(asdict(state), sort_keys=True).encode()
    replace_file(engine, os.path.join(directory, STATE_NAME), text + b"\n" + _checksum(text))


def _checksum(text: bytes) -> bytes:
    return f"crc32c {crc32c(text):08x}".encode()


def _parse(found: Fields) -> BuildState:
    """Raises FormatError for whatever is not as `write_state` writes it."""
    settings = found.inner("settings")
    directories = settings.texts("directories")
    if not all(os.path.isabs(directory) for directory in directories):
        settings.refuse("directories", "absolute paths", directories)
    spool, segments = found.inner("spool"), found.inner("segments")
    state = BuildState(
        settings=BuildSettings(_texts(settings.inner("spooled")), _texts(settings.inner("later")), directories),
        store_id=found.hexadecimal("store_id", 32),
        generation=found.whole("generation", 1),
        phase=found.choice("phase", PHASES),
        documents=found.whole("documents"),
        spool={name: _spool_file(spool.inner(name)) for name in spool},
        projection=_sum_or_none(found, "projection"),
        is_normalised=found.flag("is_normalised"),
        codebooks=_sum_or_none(found, "codebooks"),
        arranged=_arranged(found.inner("arranged")) if "arranged" in found else None,
        segments={name: [_segment(each) for each in segments.each(name, count=_COUNT_MAX)] for name in segments},
    )
    if (state.phase == "write") != (state.arranged is not None) or (state.segments and state.phase != "write"):
        found.refuse("phase", "that of its results")
    if state.arranged is not None and sum(state.arranged.sizes) != state.documents:
        found.refuse("arranged", f"lists of {state.documents} documents", f"lists of {sum(state.arranged.sizes)}")
    return state


def _texts(found: Fields) -> dict[str, str]:
    return {name: found.text(name) for name in found}


def _sum_or_none(found: Fields, name: str) -> int | None:
    return found.whole(name, 0, 2**32 - 1) if name in found else None


def _spool_file(found: Fields) -> SpoolFile:
    return SpoolFile(found.whole("size_bytes"), found.wholes("sums", 0, 2**32 - 1, count=_COUNT_MAX) if "sums" in found else None)


def _arranged(found: Fields) -> Arranged:
    steps = found.inner("steps")
    return Arranged(
        sums=found.wholes("sums", 0, 2**32 - 1, count=_COUNT_MAX),
        sizes=found.wholes("sizes", count=_COUNT_MAX),
        nprobe=found.whole("nprobe"),
        steps={name: steps.real(name) for name in steps},
        trained=found.whole("trained", 0, 2**32 - 1),
        codes=found.wholes("codes", 0, 2**32 - 1, count=_COUNT_MAX),
    )


def _segment(found: Fields) -> Segment:
    return Segment(found.text("path"), found.whole("first_record"), found.whole("records", 1), found.whole("size_bytes", 1))
