"""The database (SQLite) in which a build under way keeps ids and texts in the order in which they
came."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from ... import errors
from ...storage.documents.ids import DocumentId
from ...storage.files import crc32c
from ...storage.native import free_bytes
from ...storage.parse import check_plain_file

_TABLE = (
    "CREATE TABLE docs (number INTEGER PRIMARY KEY, id UNIQUE NOT NULL, text TEXT NOT NULL, crc32c "
    "INTEGER NOT NULL)"
)
_ROWS_AT_ONCE = 500  # SQLite takes so many parameters, whatever its version
_REBUILD = "check the device; build again, discarding what is there (restart=True, --restart)"


def _checksum(number: int, identifier: DocumentId, text: str, salt: int) -> int:
    """The checksum of a row, its number and store included: a row found under another number, or in
    another store's file, is no hit's text."""
    return crc32c(f"{number}:{type(identifier).__name__}:{identifier}\0{text}".encode(), salt)


@contextmanager
def _typed(path: str, what: str) -> Iterator[None]:
    """SQLite's errors as ours."""
    try:
        yield
    except sqlite3.IntegrityError:
        raise
    except UnicodeDecodeError as error:
        # from the sqlite3 module, for damage that shows in SQLite's own message
        raise errors.FormatError(
            "damaged text database", path=path, got=str(error), fix=_REBUILD
        ) from error
    except sqlite3.Error as error:
        name = getattr(error, "sqlite_errorname", "") or ""
        if name == "SQLITE_FULL":
            free = free_bytes(os.path.dirname(path) or ".")
            raise errors.DiskFullError(
                what, needed_bytes=max(free + 1, 1 << 20), free_bytes=free, path=path
            ) from error
        if name.startswith(("SQLITE_CORRUPT", "SQLITE_NOTADB")):
            raise errors.FormatError(
                "damaged text database", path=path, got=str(error), fix=_REBUILD
            ) from error
        kind = (
            errors.WriteError
            if "WRITE" in name or "FSYNC" in name or "READONLY" in name or "CANTOPEN" in name
            else errors.ReadError
        )
        raise kind(what, path=path, got=str(error)) from error


def _distrust(db: sqlite3.Connection) -> None:
    """What a file's schema says is run as little as can be: no functions with effects, and damaged
    pages are found before they are used."""
    db.execute("PRAGMA trusted_schema=OFF")
    db.execute("PRAGMA cell_size_check=ON")


def _check_schema(db: sqlite3.Connection, path: str) -> None:
    """Raises FormatError unless the file holds the one table that we make: no triggers, no views,
    no other columns."""
    found = db.execute("SELECT type, name, sql FROM sqlite_master").fetchall()
    own = [("table", "docs", _TABLE), ("index", "sqlite_autoindex_docs_1", None)]
    if found != own:
        raise errors.FormatError(
            "text database of another make",
            path=path,
            got=", ".join(f"{kind} {name}"[:40] for kind, name, _ in found[:5]),
            expected="the table docs alone",
            fix=_REBUILD,
        )


class TextWriter:
    """Ids and texts by number. Also the build's spool of them.

    Rows become durable at `commit`. Raises DiskFullError, WriteError, FormatError;
    InvalidInputError for an id that came before.
    """

    def __init__(self, path: str, salt: int, keep: int = 0):
        """`salt`: seeds the rows' checksums. `keep`: continues a file, keeping numbers below it; 0
        begins anew."""
        self.path, self._salt = path, salt
        for name in (path, f"{path}-journal"):
            if not os.path.lexists(name):
                continue
            if keep:
                check_plain_file(name)  # a link would lead what is written elsewhere
            else:
                os.unlink(name)
        with _typed(path, "cannot create text database"):
            self._db = sqlite3.connect(path, isolation_level=None)
            try:
                self._begin(keep)
            except BaseException:
                self._db.close()
                raise

    def _begin(self, keep: int) -> None:
        _distrust(self._db)
        self._db.execute("PRAGMA synchronous=FULL")
        self._db.execute("PRAGMA cache_size=-8192")
        if keep:
            _check_schema(self._db, self.path)
        else:
            self._db.execute(_TABLE)
        self._db.execute("BEGIN")
        self._db.execute("DELETE FROM docs WHERE number >= ?", (keep,))

    def add(self, rows: Sequence[tuple[int, DocumentId, str]]) -> None:
        """Appends (number, id, text)."""
        with _typed(self.path, "cannot write texts"):
            for number, identifier, text in rows:
                try:
                    self._db.execute(
                        "INSERT INTO docs VALUES (?, ?, ?, ?)",
                        (number, identifier, text, _checksum(number, identifier, text, self._salt)),
                    )
                except sqlite3.IntegrityError as error:
                    raise errors.InvalidInputError(
                        f"document id {identifier!r} occurs twice",
                        got=f"again as document {number}",
                        expected="unique ids",
                        fix="rename or drop one of the two",
                    ) from error

    def commit(self) -> None:
        with _typed(self.path, "cannot write texts"):
            self._db.execute("COMMIT")
            self._db.execute("BEGIN")

    def close(self) -> None:
        """Drops what was not committed."""
        with _typed(self.path, "cannot close text database"):
            self._db.close()


class TextReader:
    """Reads ids and texts by number; every row is checked. Usable from any thread."""

    def __init__(self, path: str, salt: int):
        self.path, self._salt = path, salt
        if not os.path.exists(path):
            raise errors.FileMissingError("text database missing", path=path, fix=_REBUILD)
        uri = (
            "file:"
            + path.replace("%", "%25").replace("?", "%3f").replace("#", "%23")
            + "?mode=ro&immutable=1"
        )
        with _typed(path, "cannot open text database"):
            self._db = sqlite3.connect(uri, uri=True, check_same_thread=False)
            try:
                _distrust(self._db)
                _check_schema(self._db, path)
            except BaseException:
                self._db.close()
                raise

    def get(self, numbers: Sequence[int]) -> list[tuple[DocumentId, str]]:
        """(id, text) of each number, in order. Raises FormatError for a missing row, ChecksumError
        for a damaged one."""
        wanted, rows = list(numbers), dict[int, Sequence[Any]]()
        with _typed(self.path, "cannot read texts"):
            for first in range(0, len(wanted), _ROWS_AT_ONCE):
                part = wanted[first : first + _ROWS_AT_ONCE]
                marks = ",".join("?" * len(part))
                found = self._db.execute(
                    f"SELECT number, id, text, crc32c FROM docs WHERE number IN ({marks})", part
                )
                rows.update((number, row) for number, *row in found)
        return [self._checked(number, rows.get(number)) for number in wanted]

    def rows(self, numbers: np.ndarray) -> Iterator[tuple[DocumentId, str]]:
        """(id, text) of each number, in order. Holds a few hundred at a time."""
        for begin in range(0, len(numbers), _ROWS_AT_ONCE):
            yield from self.get(numbers[begin : begin + _ROWS_AT_ONCE].tolist())

    def _checked(self, number: int, row: Sequence[Any] | None) -> tuple[DocumentId, str]:
        if row is None:
            raise errors.FormatError(
                f"text of document {number} missing", path=self.path, fix=_REBUILD
            )
        if (
            not isinstance(row[0], (int, str))
            or not isinstance(row[1], str)
            or row[2] != _checksum(number, row[0], row[1], self._salt)
        ):
            raise errors.ChecksumError(
                f"damaged text of document {number}", path=self.path, fix=_REBUILD
            )
        return row[0], row[1]

    def close(self) -> None:
        self._db.close()
