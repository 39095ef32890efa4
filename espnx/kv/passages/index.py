"""The index of a library (SQLite): which extents there are, where they lie, what they cost to
compute, and the names that a caller gave to texts.

Several processes share it. Whatever changes what lies where is one transaction, and an extent that
somebody writes, uses or removes is locked (`pins`) before the transaction ends.
"""

from __future__ import annotations

import json
import os
import sqlite3
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from ... import errors
from ...storage.files import write_error
from ...storage.native import free_bytes
from ...storage.parse import check_plain_file
from .extent import Identity
from .pins import Pins

VERSION = 2
BUSY_S = 30.0
WRITING, READY, DAMAGED = 0, 1, -1
_FIX = "remove the library's directory; passages are computed again as they are asked for"
_SCHEMA = (
    "CREATE TABLE about (name TEXT PRIMARY KEY, value REAL NOT NULL)",
    "CREATE TABLE spaces (digest BLOB PRIMARY KEY, said TEXT NOT NULL)",
    (
        "CREATE TABLE extents (number INTEGER PRIMARY KEY AUTOINCREMENT, space BLOB NOT NULL, "
        "context BLOB NOT NULL, text BLOB NOT NULL, ids BLOB NOT NULL, first_position INTEGER NOT "
        "NULL, directory INTEGER NOT NULL, offset_bytes INTEGER NOT NULL, size_bytes INTEGER NOT "
        "NULL, row_bytes INTEGER NOT NULL, state INTEGER NOT NULL, cost REAL NOT NULL, uses "
        "INTEGER NOT NULL, priority REAL NOT NULL, last_used_s REAL NOT NULL)"
    ),
    "CREATE UNIQUE INDEX identities ON extents (space, context, text) WHERE state >= 0",
    # what is asked of all extents is answered without their texts
    "CREATE INDEX places ON extents (directory, offset_bytes, size_bytes, row_bytes, state)",
    "CREATE INDEX priorities ON extents (priority, number) WHERE state = 1",
    "CREATE INDEX unfinished ON extents (number) WHERE state <> 1",
    (
        "CREATE TABLE names (space BLOB NOT NULL, name TEXT NOT NULL, text BLOB NOT NULL, ids BLOB "
        "NOT NULL, PRIMARY KEY (space, name))"
    ),
)


@dataclass(frozen=True)
class Place:
    """The place of an extent in a data file.

    Attributes:
        number: in the index.
        directory: whose data file it is, from 0.
        is_ready: its rows are there.
        is_own: it was taken, to be written by whoever asked.
    """

    number: int
    directory: int
    offset_bytes: int
    size_bytes: int
    is_ready: bool
    is_own: bool = False


@contextmanager
def typed(path: str) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name == "SQLITE_FULL":
            free = free_bytes(os.path.dirname(path) or ".")
            raise errors.DiskFullError(
                "no room for the index of a library",
                needed_bytes=max(free + 1, 1 << 20),
                free_bytes=free,
                path=path,
            ) from error
        if name.startswith(("SQLITE_BUSY", "SQLITE_LOCKED")):
            raise errors.StoreBusyError(
                "the index of a library is being changed",
                path=path,
                got=f"no turn in {BUSY_S:.0f} s",
                fix="try again when the other process is done",
            ) from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise errors.FormatError(
                "the index of a library is damaged", path=path, got=str(error), fix=_FIX
            ) from error
        is_write = any(word in name for word in ("WRITE", "FSYNC", "READONLY", "CANTOPEN"))
        kind = errors.WriteError if is_write else errors.ReadError
        raise kind("the index of a library", path=path, got=str(error)) from error


class Index:
    """The index of one library. Not for several threads at once.

    Args:
        path: of the database; made where it is missing.
        pins: the locks of its extents.

    Raises:
        FormatError: it is damaged, or of another version.
        WriteError, DiskFullError, StoreBusyError.
    """

    def __init__(self, path: str, pins: Pins):
        self.path, self._pins = path, pins
        try:
            if os.path.lexists(path):
                check_plain_file(path)
            # token ids are the text: nobody else may read them
            os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600))
        except OSError as error:
            if isinstance(error, errors.EspnxError):
                raise
            raise write_error("cannot open the index of a library", path, error) from error
        with typed(path):
            self._db = sqlite3.connect(
                path, isolation_level=None, check_same_thread=False, timeout=BUSY_S
            )
            try:
                self._begin()
            except BaseException:
                self._db.close()
                raise

    def _begin(self) -> None:
        self._db.execute("PRAGMA trusted_schema=OFF")
        self._db.execute("PRAGMA cell_size_check=ON")
        self._db.execute("PRAGMA journal_mode=WAL")
        # A power cut may undo the last changes; fronts and checksums show what lies elsewhere now.
        self._db.execute("PRAGMA synchronous=NORMAL")
        with self.change():
            if not self._db.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
                for statement in _SCHEMA:
                    self._db.execute(statement)
                self._db.executemany(
                    "INSERT INTO about VALUES (?, ?)", [("version", VERSION), ("clock", 0.0)]
                )
            found = {
                sql for (sql,) in self._db.execute("SELECT sql FROM sqlite_master WHERE sql > ''")
            }
            wanted = set(_SCHEMA)
            said = {sql for sql in found if not sql.startswith("CREATE TABLE sqlite_sequence")}
            version = (
                self._db.execute("SELECT value FROM about WHERE name = 'version'").fetchone()
                if said == wanted
                else None
            )
            if version != (VERSION,):
                raise errors.FormatError(
                    "the index of a library",
                    path=self.path,
                    got="another version" if version else "tables that are not a library's",
                    expected=f"version {VERSION}",
                    fix=_FIX,
                )

    @contextmanager
    def change(self) -> Iterator[None]:
        """A transaction; nobody else changes the index meanwhile."""
        with typed(self.path):
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    # --- names and spaces ---

    def note_space(self, digest: bytes, said: dict[str, Any]) -> None:
        """Writes down what a space is of, for people."""
        with self.change():
            self._db.execute(
                "INSERT OR IGNORE INTO spaces VALUES (?, ?)",
                (digest, json.dumps(said, sort_keys=True, default=str)),
            )

    def set_name(self, space: bytes, name: str, text: bytes, ids: np.ndarray) -> bytes | None:
        """Gives a text a name. Returns the digest of the text that had it before, if it was another
        one."""
        with self.change():
            known = self._db.execute(
                "SELECT text FROM names WHERE space = ? AND name = ?", (space, name)
            ).fetchone()
            if known == (text,):
                return None
            self._db.execute(
                "INSERT OR REPLACE INTO names VALUES (?, ?, ?, ?)",
                (space, name, text, _bytes_of(ids)),
            )
        return None if known is None else bytes(known[0])

    def ids_of(self, space: bytes, name: str) -> np.ndarray | None:
        """The tokens, int32 [n], that have a name; None: nobody gave it."""
        with typed(self.path):
            found = self._db.execute(
                "SELECT ids FROM names WHERE space = ? AND name = ?", (space, name)
            ).fetchone()
        return None if found is None else np.frombuffer(found[0], "<i4").astype(np.int32)

    def remove_name(self, space: bytes, name: str) -> bytes | None:
        """Takes a name away; the digest of its text, or None where nobody gave it."""
        with self.change():
            found = self._db.execute(
                "DELETE FROM names WHERE space = ? AND name = ? RETURNING text", (space, name)
            ).fetchone()
        return None if found is None else bytes(found[0])

    def is_named(self, space: bytes, text: bytes) -> bool:
        """Whether a text has a name."""
        with typed(self.path):
            return (
                self._db.execute(
                    "SELECT 1 FROM names WHERE space = ? AND text = ? LIMIT 1", (space, text)
                ).fetchone()
                is not None
            )

    # --- extents ---

    def find(
        self, wanted: Sequence[tuple[Identity, np.ndarray]], *, is_use: bool = True
    ) -> list[Place | None]:
        """The extents that are ready, pinned; None where there is none. Each is used once more from
        here on, unless `is_use` says that somebody may only be about to use it."""
        found = list[Place | None]()
        try:
            with self.change():
                for identity, ids in wanted:
                    place = self._place(identity, ids)
                    if place is None or not place.is_ready or not self._pins.use(place.number):
                        found.append(None)
                        continue
                    found.append(place)
                    if is_use:
                        self._count_use(place)
        except BaseException:
            for place in found:
                if place is not None:
                    self._pins.leave(place.number)
            raise
        return found

    def _count_use(self, place: Place) -> None:
        self._db.execute(
            "UPDATE extents SET uses = uses + 1, last_used_s = ?, priority = (uses + 1) * cost / "
            "size_bytes + (SELECT value FROM about WHERE name = 'clock') WHERE number = ?",
            (time.time(), place.number),
        )

    def _place(self, identity: Identity, ids: np.ndarray) -> Place | None:
        row = self._db.execute(
            "SELECT number, directory, offset_bytes, size_bytes, state, ids, first_position FROM "
            "extents WHERE space = ? AND context = ? AND text = ? AND state >= 0",
            (identity.space, identity.context, identity.text),
        ).fetchone()
        if row is None or row[5:] != (_bytes_of(ids), identity.first_position):
            return None
        return Place(row[0], row[1], row[2], row[3], row[4] == READY)

    def reserve(
        self,
        identity: Identity,
        ids: np.ndarray,
        size_bytes: int,
        row_bytes: int,
        cost: float,
        limit_bytes: int | None,
        directories: Sequence[int] = (0,),
    ) -> Place | None:
        """A place for an extent that is to be written, taken by this library alone.

        Args:
            size_bytes, row_bytes: of the extent; of rows alone.
            cost: what computing it takes; extents whose bytes cost little are evicted first.
            limit_bytes: of each data file; extents that nobody uses are evicted for it.
            directories: where it may lie. The one with the fewest bytes that has room takes it.

        Returns:
            The place; that of the same extent, not taken, where it is ready or somebody else writes
            it; None: there is no room, and nobody can be evicted.
        """
        with self.change():
            known = self._place(identity, ids)
            if known is not None and (known.is_ready or not self._pins.take(known.number)):
                return known
            if known is not None:  # whoever wrote it was killed
                self._forget(known.number)
            self._sweep()
            while (found := self._room(size_bytes, limit_bytes, directories)) is None:
                if size_bytes > (limit_bytes or 0) or not self._evict_one():
                    return None
            directory, offset = found
            (clock,) = self._db.execute("SELECT value FROM about WHERE name = 'clock'").fetchone()
            number = self._db.execute(
                "INSERT INTO extents (space, context, text, ids, first_position, directory, "
                "offset_bytes, size_bytes, row_bytes, state, cost, uses, priority, last_used_s) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?, ?, ?, 1, ?, ?)",
                (
                    identity.space,
                    identity.context,
                    identity.text,
                    _bytes_of(ids),
                    identity.first_position,
                    directory,
                    offset,
                    size_bytes,
                    row_bytes,
                    WRITING,
                    cost,
                    clock + cost / size_bytes,
                    time.time(),
                ),
            ).lastrowid
            if number is None or not self._pins.take(number):
                raise errors.StateError("an extent that is new, and in use", got=number)
        return Place(number, directory, offset, size_bytes, is_ready=False, is_own=True)

    def _room(
        self, size_bytes: int, limit_bytes: int | None, directories: Sequence[int]
    ) -> tuple[int, int] | None:
        """(directory, offset) for so many bytes, or None."""
        used = dict.fromkeys(directories, 0) | dict(
            self._db.execute("SELECT directory, sum(size_bytes) FROM extents GROUP BY directory")
        )
        for directory in sorted(directories, key=lambda each: (used[each], each)):
            offset = self._gap(directory, size_bytes)
            if limit_bytes is None or offset + size_bytes <= limit_bytes:
                return directory, offset
        return None

    def _gap(self, directory: int, size_bytes: int) -> int:
        """The beginning of the first hole that is large enough, or the end."""
        end = 0
        for offset, size in self._db.execute(
            "SELECT offset_bytes, size_bytes FROM extents WHERE directory = ? ORDER BY "
            "offset_bytes",
            (directory,),
        ):
            if offset - end >= size_bytes:
                break
            end = max(end, offset + size)
        return end

    def _sweep(self) -> None:
        """Forgets what nobody writes any more, and what is damaged and in nobody's use."""
        rows = self._db.execute("SELECT number FROM extents WHERE state <> 1").fetchall()
        for (number,) in rows:
            if self._pins.take(number):
                self._forget(number)

    def _forget(self, number: int) -> None:
        """Removes an extent that was taken."""
        self._db.execute("DELETE FROM extents WHERE number = ?", (number,))
        self._pins.drop(number)

    def _evict_one(self) -> bool:
        """Removes the extent that costs least to compute for its bytes and uses, of those that
        nobody uses; False: there is none."""
        for number, priority in self._db.execute(
            "SELECT number, priority FROM extents WHERE state = 1 ORDER BY priority, number"
        ).fetchall():
            if self._pins.take(number):
                self._forget(number)
                # GreedyDual: what stays has to be used again to be worth as much as what comes
                self._db.execute(
                    "UPDATE about SET value = max(value, ?) WHERE name = 'clock'", (priority,)
                )
                return True
        return False

    def evict_one(self) -> bool:
        """Evicts one extent; False: all are used."""
        with self.change():
            return self._evict_one()

    def finish(self, number: int) -> None:
        """An extent that was reserved is written; it is pinned from here on."""
        with self.change():
            self._db.execute("UPDATE extents SET state = ? WHERE number = ?", (READY, number))
        self._pins.share(number)

    def abandon(self, number: int) -> None:
        """An extent that was reserved comes to nothing."""
        with self.change():
            self._forget(number)

    def damage(self, number: int) -> None:
        """An extent is damaged: nobody gets it any more. Its place is used again when nobody uses
        it."""
        with self.change():
            self._db.execute("UPDATE extents SET state = ? WHERE number = ?", (DAMAGED, number))

    def remove_text(self, space: bytes, text: bytes) -> None:
        """Removes the extents of a text, whatever stood before it. Those in use are not found any
        more, and go when they are left."""
        with self.change():
            self._db.execute(
                "UPDATE extents SET state = ? WHERE space = ? AND text = ? AND state = ?",
                (DAMAGED, space, text, READY),
            )
            self._sweep()

    def every(self, space: bytes) -> list[tuple[Identity, np.ndarray]]:
        """All extents of a space that are ready."""
        with typed(self.path):
            rows = self._db.execute(
                "SELECT context, text, ids, first_position FROM extents WHERE space = ? AND state "
                "= ? ORDER BY directory, offset_bytes",
                (space, READY),
            ).fetchall()
        found = list[tuple[Identity, np.ndarray]]()
        for context, text, raw, first in rows:
            ids = np.frombuffer(raw, "<i4").astype(np.int32)
            found.append((Identity(space, bytes(context), bytes(text), len(ids), first), ids))
        return found

    def totals(self) -> dict[str, int]:
        """Extents that are ready, of all spaces, their bytes and those of their rows alone, and how
        long the data files are up to the last of them."""
        with typed(self.path):
            count, size, rows = self._db.execute(
                "SELECT count(*), coalesce(sum(size_bytes), 0), coalesce(sum(row_bytes), 0) FROM "
                "extents WHERE state = ?",
                (READY,),
            ).fetchone()
            (end,) = self._db.execute(
                "SELECT coalesce(sum(most), 0) FROM (SELECT max(offset_bytes + size_bytes) AS most "
                "FROM extents WHERE state = ? GROUP BY directory)",
                (READY,),
            ).fetchone()
        return {"extents": count, "stored_bytes": size, "row_bytes": rows, "file_bytes": end}

    def directories(self) -> int:
        """How many directories the extents lie in, by the last of them."""
        with typed(self.path):
            (last,) = self._db.execute(
                "SELECT coalesce(max(directory), -1) FROM extents"
            ).fetchone()
        return int(last) + 1

    def close(self) -> None:
        """Ends the connection."""
        with typed(self.path):
            self._db.close()


def _bytes_of(ids: np.ndarray) -> bytes:
    return np.ascontiguousarray(ids, dtype="<i4").tobytes()
