"""What a build under way notes of itself, so that the same call can go on: STATE.json, parsed into
types and never just believed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from ... import errors
from ...storage import NativeEngine
from ...storage.files import crc32c, read_file, replace_file
from ...storage.parse import Fields, check_plain_file, parse_object
from ..store.part import Segment
from ..store.places import ARRANGED, DIGESTS, N_TOKENS, ORDER, RECORDS, STATE, VECTORS
from .documents import DIGEST_BYTES

PHASES = ("spool", "arrange", "write")
_LIMIT_BYTES = 64 << 20
_COUNT_MAX = 1 << 24
_FIX = "discard it: build again with restart"


@dataclass(frozen=True)
class BuildSettings:
    """What a build was asked for.

    Attributes:
        spooled: what the spool's bytes depend on, in words: encoder, dimensions, format, pooling.
        later: what only the passes after it depend on. `directories`, where data segments go, are
            of these too.
    """

    spooled: dict[str, str]
    later: dict[str, str]
    directories: list[str] = field(default_factory=list)

    def differences(self, other: BuildSettings) -> list[str]:
        """``name=ours instead of theirs`` for each setting that differs."""
        ours, theirs = self._all(), other._all()
        return [
            f"{name}={ours.get(name)} instead of {theirs.get(name)}"
            for name in sorted(ours)
            if ours[name] != theirs.get(name)
        ]

    def _all(self) -> dict[str, str]:
        return {**self.spooled, **self.later, "directories": repr(self.directories)}


def in_words(settings: Mapping[str, object]) -> dict[str, str]:
    """Values as `BuildSettings` has them."""
    return {name: repr(value) for name, value in settings.items()}


@dataclass(frozen=True)
class SpoolFile:
    """How much of a file of the spool is known to be on disk. `sums`: CRC32C of each of its 4 MiB
    windows, where it has no other."""

    size_bytes: int
    sums: list[int] | None = None


@dataclass(frozen=True)
class Arranged:
    """What the second pass found.

    Attributes:
        files: of the order and the first stage's sections, by name; none without documents.
        first_stage: what its `describe` says once all is measured; JSON.
        trained: CRC32C of the file of what was trained. is_normalised: see `Trained`. Both are of
            no use without documents.
    """

    files: dict[str, SpoolFile]
    first_stage: dict[str, Any]
    trained: int
    is_normalised: bool


@dataclass
class BuildState:
    """A checkpoint of a build.

    Attributes:
        phase: the pass that is under way, one of `PHASES`.
        documents: in the spool, on disk for good.
        spool: its files by name.
        arranged: once the second pass is through.
        segments: finished data files of each tier.
    """

    settings: BuildSettings
    store_id: str
    generation: int
    phase: str = "spool"
    documents: int = 0
    spool: dict[str, SpoolFile] = field(default_factory=dict)
    arranged: Arranged | None = None
    segments: dict[str, list[Segment]] = field(default_factory=dict)

    def back_to_spool(self) -> None:
        """Forgets everything that the passes after the spool made."""
        self.phase, self.arranged, self.segments = "spool", None, {}


def read_state(engine: NativeEngine, directory: str) -> BuildState | None:
    """The last checkpoint of a build, or None. A damaged one is a FormatError (`discard` the
    build)."""
    path = os.path.join(directory, STATE)
    if not os.path.lexists(path):
        return None
    size = check_plain_file(path)
    if size > _LIMIT_BYTES:
        raise errors.FormatError(
            "state of a build too large",
            path=path,
            got=f"{size} bytes",
            expected=f"at most {_LIMIT_BYTES}",
            fix=_FIX,
        )
    text, _, stated = read_file(engine, path).rpartition(b"\n")
    if stated != _checksum(text):
        raise errors.FormatError(
            "damaged state of an interrupted build",
            path=path,
            got=f"checksum {stated[:40]!r}",
            fix=_FIX,
        )
    return _parse(parse_object(text, path, what="state of an interrupted build", fix=_FIX))


def write_state(engine: NativeEngine, directory: str, state: BuildState) -> None:
    """Replaces the checkpoint, atomically."""
    text = json.dumps(asdict(state), sort_keys=True).encode()
    replace_file(engine, os.path.join(directory, STATE), text + b"\n" + _checksum(text))


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
        settings=BuildSettings(
            _texts(settings.inner("spooled")), _texts(settings.inner("later")), directories
        ),
        store_id=found.hexadecimal("store_id", 32),
        generation=found.whole("generation", 1),
        phase=found.choice("phase", PHASES),
        documents=found.whole("documents"),
        spool={name: _spool_file(spool.inner(name)) for name in spool},
        arranged=_arranged(found.inner("arranged")) if "arranged" in found else None,
        segments={
            name: [_segment(each) for each in segments.each(name, count=_COUNT_MAX)]
            for name in segments
        },
    )
    _check_spool(found, state)
    if (state.phase == "write") != (state.arranged is not None) or (
        state.segments and state.phase != "write"
    ):
        found.refuse("phase", "that of its results")
    order = state.arranged.files.get(ORDER) if state.arranged is not None else None
    if state.arranged is not None and (order.size_bytes if order else 0) != 8 * state.documents:
        found.refuse(
            "arranged",
            f"an order of {state.documents} documents",
            f"{order.size_bytes if order else 0} bytes",
        )
    return state


def _check_spool(found: Fields, state: BuildState) -> None:
    """Either nothing was spooled yet, or every file is known, and those of so many bytes a document
    have that size."""
    if not state.spool and not state.documents and state.phase == "spool":
        return
    if set(state.spool) != {RECORDS, VECTORS, N_TOKENS, DIGESTS}:
        found.refuse("spool", f"the files of {state.documents} documents")
    for name, each_bytes in ((N_TOKENS, 2), (DIGESTS, DIGEST_BYTES)):
        if state.spool[name].size_bytes != each_bytes * state.documents:
            found.refuse("documents", f"as many as {name} has")


def _texts(found: Fields) -> dict[str, str]:
    return {name: found.text(name) for name in found}


def _spool_file(found: Fields) -> SpoolFile:
    return SpoolFile(
        found.whole("size_bytes"),
        found.wholes("sums", 0, 2**32 - 1, count=_COUNT_MAX) if "sums" in found else None,
    )


def _arranged(found: Fields) -> Arranged:
    files = found.inner("files")
    for name in files:
        if ARRANGED.fullmatch(name) is None:
            files.refuse(name, f"names such as {ORDER}", name)
    return Arranged(
        files={name: _spool_file(files.inner(name)) for name in files},
        first_stage=found.inner("first_stage").values(),
        trained=found.whole("trained", 0, 2**32 - 1),
        is_normalised=found.flag("is_normalised"),
    )


def _segment(found: Fields) -> Segment:
    return Segment(
        found.text("path"),
        found.whole("first_record"),
        found.whole("records", 1),
        found.whole("size_bytes", 1),
    )
