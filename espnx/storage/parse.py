"""What stands in files that may come from elsewhere, as typed values.

Nothing in such a file is believed: a field has the type, the range and the characters that are
asked for, or there is a FormatError that names file, field, what was got and what was expected.
Whoever takes memory for a number from a file gives its limit here, before.
"""

from __future__ import annotations

import json
import os
import re
import stat
from collections.abc import Collection, Iterator
from typing import Any, NoReturn

from .. import errors

LARGEST = 2**62  # no size, count or offset in a file is above it; two of them can be added
_PLAIN_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,254}")


def parse_object(
    data: bytes, path: str | os.PathLike[str], *, what: str = "JSON", fix: str | None = None
) -> Fields:
    """The object that a JSON text holds. Raises FormatError for any other text."""
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:  # also a number of more digits than Python reads
        raise errors.FormatError(
            f"damaged {what}", path=path, got=str(error), expected="JSON", fix=fix
        ) from error
    if not isinstance(value, dict):
        raise errors.FormatError(
            f"damaged {what}", path=path, got=_shown(value), expected="a JSON object", fix=fix
        )
    return Fields(value, path, fix=fix)


def check_plain_file(path: str | os.PathLike[str]) -> int:
    """Size in bytes of a file that is neither a link nor a device nor a pipe: those could make a
    reader wait forever, and a writer write elsewhere. Raises FormatError; FileNotFoundError,
    PermissionError, ...: as the operating system says."""
    found = os.lstat(path)
    if not stat.S_ISREG(found.st_mode):
        kind = (
            "a symbolic link"
            if stat.S_ISLNK(found.st_mode)
            else "a directory"
            if stat.S_ISDIR(found.st_mode)
            else "a special file"
        )
        raise errors.FormatError(
            "not a plain file",
            path=path,
            got=kind,
            expected="a plain file",
            fix="put the file itself there",
        )
    return found.st_size


def check_file_size(path: str | os.PathLike[str], expected_bytes: int, what: str, fix: str) -> None:
    """Checks a file's size before memory is taken for it. Raises FileMissingError, ReadError,
    TruncatedFileError, FormatError unless a file of that size is there; `what`: it is, for
    messages."""
    try:
        size_bytes = check_plain_file(path)
    except FileNotFoundError:
        raise errors.FileMissingError(f"a {what} is missing", path=path, fix=fix) from None
    except PermissionError as error:
        raise errors.ReadError(f"cannot read a {what}", path=path, errno=error.errno) from error
    if size_bytes != expected_bytes:
        kind = errors.TruncatedFileError if size_bytes < expected_bytes else errors.FormatError
        raise kind(
            what, path=path, got=f"{size_bytes} bytes", expected=f"{expected_bytes}", fix=fix
        )


class Fields:
    """An object of a JSON file, read field by field.

    Every method takes the name of a field and returns its value; it raises FormatError for a value
    that is missing or not as asked for.

    Args:
        value: what the JSON text holds.
        path: of the file, for messages.
        where: of the object in the file, for messages: ``parts[3].``.
        fix: for messages.
    """

    def __init__(
        self, value: Any, path: str | os.PathLike[str], *, where: str = "", fix: str | None = None
    ):
        self.path, self._where, self._fix = os.fspath(path), where, fix
        if not isinstance(value, dict):
            raise errors.FormatError(
                f"field {where.rstrip('.') or 'of a file'}",
                path=path,
                got=_shown(value),
                expected="an object",
                fix=fix,
            )
        self._values: dict[str, Any] = value

    def __contains__(self, name: str) -> bool:
        """Whether the field is there and not null."""
        return self._values.get(name) is not None

    def __iter__(self) -> Iterator[str]:
        """Names of the fields."""
        return iter(self._values)

    def values(self) -> dict[str, Any]:
        """The object as it is, for whoever parses it later."""
        return dict(self._values)

    def refuse(self, name: str, expected: object, got: object = None) -> NoReturn:
        """Raises the FormatError that says so of a field."""
        shown = _shown(self._values.get(name)) if got is None else got
        raise errors.FormatError(
            f"field {self._where}{name}",
            path=self.path,
            got=shown,
            expected=expected,
            fix=self._fix,
        )

    def whole(self, name: str, least: int = 0, most: int = LARGEST) -> int:
        """A whole number, `least` <= n <= `most`."""
        return self._whole(name, self._values.get(name), least, most)

    def _whole(self, name: str, value: Any, least: int, most: int) -> int:
        if type(value) is not int or not least <= value <= most:
            self.refuse(name, f"a whole number from {least} to {most}", _shown(value))
        return value

    def real(self, name: str) -> float:
        """A finite number."""
        value = self._values.get(name)
        if (
            isinstance(value, bool)
            or not isinstance(value, (int, float))
            or not abs(value) <= 1e300
        ):
            self.refuse(name, "a finite number")
        return float(value)

    def flag(self, name: str) -> bool:
        value = self._values.get(name)
        if not isinstance(value, bool):
            self.refuse(name, "true or false")
        return value

    def text(self, name: str, *, most: int = 4096) -> str:
        """A text of at most so many characters that UTF-8 can hold, none of them NUL."""
        return self._text(name, self._values.get(name), most)

    def _text(self, name: str, value: Any, most: int) -> str:
        if (
            not isinstance(value, str)
            or len(value) > most
            or "\0" in value
            or _has_surrogates(value)
        ):
            self.refuse(name, f"text of at most {most} characters", _shown(value))
        return value

    def texts(self, name: str, *, most: int = 4096, count: int = 1024) -> list[str]:
        """A list of at most `count` of them."""
        return [self._text(name, value, most) for value in self._list(name, count)]

    def choice(self, name: str, among: Collection[str]) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or value not in among:
            self.refuse(name, "one of " + ", ".join(among))
        return value

    def hexadecimal(self, name: str, digits: int) -> str:
        value = self._values.get(name)
        if not isinstance(value, str) or re.fullmatch(f"[0-9a-f]{{{digits}}}", value) is None:
            self.refuse(name, f"{digits} hexadecimal digits")
        return value

    def file_name(self, name: str) -> str:
        """A name that stays inside whatever directory it is put behind: no separator, no ``..``,
        nothing hidden."""
        value = self._values.get(name)
        if not isinstance(value, str) or _PLAIN_NAME.fullmatch(value) is None:
            self.refuse(name, "a plain file name")
        return value

    def wholes(self, name: str, least: int = 0, most: int = LARGEST, *, count: int) -> list[int]:
        """A list of at most `count` whole numbers."""
        return [self._whole(name, value, least, most) for value in self._list(name, count)]

    def _list(self, name: str, count: int) -> list[Any]:
        value = self._values.get(name)
        if not isinstance(value, list) or len(value) > count:
            self.refuse(name, f"a list of at most {count}")
        return value

    def inner(self, name: str) -> Fields:
        """An object."""
        return Fields(
            self._values.get(name), self.path, where=f"{self._where}{name}.", fix=self._fix
        )

    def each(self, name: str, *, count: int) -> list[Fields]:
        """A list of at most `count` objects."""
        return [
            Fields(value, self.path, where=f"{self._where}{name}[{number}].", fix=self._fix)
            for number, value in enumerate(self._list(name, count))
        ]


def _has_surrogates(text: str) -> bool:
    return not text.isascii() and re.search("[\ud800-\udfff]", text) is not None


def _shown(value: Any) -> str:
    """A value in a message: short, whatever it is."""
    if isinstance(value, (dict, list)):
        return f"{'an object' if isinstance(value, dict) else 'a list'} of {len(value)}"
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**30:
        return f"a number of {value.bit_length()} bits"
    shown = repr(value)
    return shown if len(shown) <= 80 else f"{shown[:77]}..."
