"""The log of a graph's changes: what was added and deleted since its pages were written. The
specification is docs/graph-format.md."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from ... import errors
from ...storage.files import crc32c
from ...storage.parse import check_plain_file
from ...storage.replacing import versioned
from ..format import CHANGES, N_MAX, ROWS_MAX, GraphFacts

MAGIC, VERSION = b"ESPNXLOG", 1
HEADER = np.dtype(
    [
        ("magic", "S8"),
        ("crc32c", "<u4"),
        ("version", "<u4"),
        ("salt", "<u8"),
        ("generation", "<u8"),
        ("dim", "<u4"),
        ("row_bytes", "<u4"),
    ]
)
RECORD_MAGIC = 0x43455247
RECORD = np.dtype(
    [
        ("magic", "<u4"),
        ("crc32c", "<u4"),
        ("body_bytes", "<u8"),
        ("number", "<u8"),
        ("synced", "<u8"),
        ("kind", "<u4"),
        ("count", "<u4"),
    ]
)
ADD, DELETE = 1, 2
_SUMMED = 8  # of a header and of a record: where what its checksum is of begins
_REBUILD = "restore the graph from a copy; or delete the log, which loses the changes in it"


@dataclass(frozen=True, eq=False)
class Change:
    """One record.

    Attributes:
        kind: `ADD` or `DELETE`. ids: int64 [m].
        rows: [m, dim], as `PageLayout.row_dtype`, of an addition; else None.
    """

    kind: int
    ids: np.ndarray
    rows: np.ndarray | None


@dataclass(frozen=True, eq=False)
class Log:
    """What a log holds.

    Attributes:
        path: of its file, which may not be there: then it is empty.
        changes: in their order. end_bytes: where the next record goes; 0: the header is missing.
        torn_bytes: behind that, of a record that was not written to its end.
        number: of the last record, from 1.
    """

    path: str
    changes: list[Change]
    end_bytes: int
    torn_bytes: int
    number: int


def log_path(facts: GraphFacts) -> str:
    """The file that holds a graph's changes, of a graph with a directory."""
    return os.path.join(facts.where, versioned(CHANGES, facts.generation))


def empty_log(facts: GraphFacts) -> Log:
    """A log that has no file yet."""
    return Log(log_path(facts), [], 0, 0, 0)


def header_of(facts: GraphFacts) -> bytes:
    """The first bytes of a graph's log."""
    made = np.zeros(1, HEADER)
    layout = facts.layout
    made["magic"], made["version"], made["salt"] = MAGIC, VERSION, facts.salt
    made["generation"], made["dim"] = facts.generation, layout.dim
    made["row_bytes"] = layout.dim * layout.row_dtype.itemsize
    data = bytearray(made.tobytes())
    return _with_sum(data, 8, data[12:])


def record_of(change: Change, number: int, synced: int) -> bytes:
    """A record as it is written. `synced`: the last record that was known to be on the device."""
    body = change.ids.astype("<i8").tobytes()
    if change.rows is not None:
        body += np.ascontiguousarray(change.rows).tobytes()
    body += bytes(-len(body) % 8)
    head = np.zeros(1, RECORD)
    head["magic"], head["body_bytes"], head["number"] = RECORD_MAGIC, len(body), number
    head["synced"], head["kind"], head["count"] = synced, change.kind, len(change.ids)
    data = bytearray(head.tobytes() + body)
    return _with_sum(data, 4, data[_SUMMED:])


def _with_sum(data: bytearray, at: int, summed: bytes | bytearray) -> bytes:
    data[at : at + 4] = crc32c(bytes(summed)).to_bytes(4, "little")
    return bytes(data)


def read_log(facts: GraphFacts) -> Log:
    """All of a graph's log.

    A record at the end that is not whole is left out: nobody was told that it is there. One with
    a later record behind it that was written when this one was on the device is damage.

    Raises:
        ForeignFileError: a log of another graph, or of another version of this one.
        ChecksumError, FormatError, ReadError: damaged, or not readable.
    """
    path = log_path(facts)
    try:
        check_plain_file(path)
        with open(path, "rb") as file:
            data = file.read()
    except FileNotFoundError:
        return empty_log(facts)
    except OSError as error:
        if isinstance(error, errors.EspnxError):
            raise
        raise errors.ReadError("cannot read a log", path=path, errno=error.errno) from error
    if len(data) < HEADER.itemsize and header_of(facts).startswith(data):
        return Log(path, [], 0, len(data), 0)  # torn before there was any record
    _check_header(facts, path, data)
    changes: list[Change] = []
    at = HEADER.itemsize
    while (found := _record_at(facts, data, at, len(changes) + 1)) is not None:
        change, _, size = found
        changes.append(change)
        at += size
    _check_tail(facts, path, data, at, len(changes))
    return Log(path, changes, at, len(data) - at, len(changes))


def _check_header(facts: GraphFacts, path: str, data: bytes) -> None:
    expected = header_of(facts)
    if data[: len(expected)] == expected:
        return
    if data[:8] == MAGIC and len(data) >= HEADER.itemsize:
        found = np.frombuffer(data, HEADER, 1)[0]
        if crc32c(data[12 : HEADER.itemsize]) == found["crc32c"]:
            if found["version"] != VERSION:
                raise errors.FormatError(
                    "version of a log", path=path, got=int(found["version"]), expected=VERSION
                )
            raise errors.ForeignFileError(
                "a log of changes of another graph",
                path=path,
                got=f"salt {found['salt']:016x}, generation {found['generation']}",
                expected=f"salt {facts.salt:016x}, generation {facts.generation}",
                fix="put the log back that belongs to this graph, or remove this one",
            )
    raise errors.ChecksumError(
        "header of a log of changes",
        path=path,
        offset_bytes=0,
        got=data[:8].hex(),
        expected="the header of this graph's log",
        fix=_REBUILD,
    )


def _record_at(
    facts: GraphFacts, data: bytes, at: int, number: int
) -> tuple[Change, int, int] | None:
    """(the change; `synced`; bytes) of a whole record of at least that number; None: none is
    there."""
    if len(data) - at < RECORD.itemsize:
        return None
    head = np.frombuffer(data, RECORD, 1, at)[0]
    body_bytes, count = int(head["body_bytes"]), int(head["count"])
    end = at + RECORD.itemsize + body_bytes
    if head["magic"] != RECORD_MAGIC or end > len(data) or head["number"] < number:
        return None
    if crc32c(data[at + _SUMMED : end]) != head["crc32c"]:
        return None
    layout = facts.layout
    held = layout.dim * layout.row_dtype.itemsize if head["kind"] == ADD else 0
    size = count * (8 + held)
    if head["kind"] not in (ADD, DELETE) or body_bytes != size + -size % 8:
        return None
    ids = np.frombuffer(data, "<i8", count, at + RECORD.itemsize).astype(np.int64)
    rows = None
    if head["kind"] == ADD:
        begin = at + RECORD.itemsize + 8 * count
        rows = np.frombuffer(data, layout.row_dtype, count * layout.dim, begin)
        rows = rows.reshape(count, layout.dim)
    return Change(int(head["kind"]), ids, rows), int(head["synced"]), end - at


def _check_tail(facts: GraphFacts, path: str, data: bytes, at: int, number: int) -> None:
    """Raises ChecksumError where record `number` + 1 was on the device, and is not whole."""
    for later in _candidates(data, at + 1):
        found = _record_at(facts, data, later, number + 1)
        if found is not None and found[1] > number:
            raise errors.ChecksumError(
                f"record {number + 1} of a log of changes",
                path=path,
                offset_bytes=at,
                got="a damaged one, with whole ones behind it",
                expected="whole ones",
                fix=_REBUILD,
            )


def _candidates(data: bytes, at: int) -> Iterator[int]:
    magic = RECORD_MAGIC.to_bytes(4, "little")
    while (at := data.find(magic, at)) >= 0:
        yield at
        at += 1


def check_ids(facts: GraphFacts, ids: np.ndarray) -> bool:
    """Whether all may be ids of a graph."""
    most = N_MAX if facts.clusters is None else ROWS_MAX
    return not ids.size or (int(ids.min()) >= 0 and int(ids.max()) < most)
