"""What one request moves from a file to device memory, over as many completions as cuFile makes of
it: the one routine that says what a completion means, by the rules and names of csrc/io/piece.hpp.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ... import errors
from .cufile import CANCELED, COMPLETE, INVALID, TIMEOUT
from .file import OpenFile

IDLE_RETRIES = 16  # completions without progress before a piece is given up
_RETRY_FIX = "check the device (dmesg, smartctl), then try again; the engine is still usable"
_STATUS = {
    INVALID: "rejected as invalid",
    CANCELED: "cancelled",
    TIMEOUT: "timed out inside cuFile",
}

#: Makes the error, anew for each caller that it is raised for.
Failure = Callable[[], errors.EspnxError]


@dataclass
class Piece:
    """Attributes:
    expected_bytes: what must come of it.
    idle_retries: completions in a row that moved nothing.
    """

    file: OpenFile
    offset_bytes: int
    expected_bytes: int
    idle_retries: int = 0

    def place(self) -> dict[str, Any]:
        """What its errors say about where."""
        return {
            "path": self.file.path,
            "offset_bytes": self.offset_bytes,
            "size_bytes": self.expected_bytes,
        }


@dataclass(frozen=True)
class Progress:
    """Attributes:
    moved_bytes: that count: what is moved again will count then.
    failure: None where the piece is what is left of it now, to be submitted again.
    """

    moved_bytes: int = 0
    failure: Failure | None = None


def advance(piece: Piece, result: int, status: int, describe: Callable[[int], str]) -> Progress:
    """What the completion of a piece that is not whole means. A short read goes on from its last
    whole block, because direct reads cannot begin inside one.

    Args:
        result: bytes moved; negative where it failed: -errno or -CUfileOpError.
        status: CUfileStatus_t.
        describe: a CUfileOpError in words.
    """
    if result < 0 or status != COMPLETE:
        code = max(0, -result)
        passes = code in (errno.EAGAIN, errno.EINTR)
        if passes and piece.idle_retries < IDLE_RETRIES:
            piece.idle_retries += 1
            return Progress()
        status_said = f"cuFile status {status} ({_STATUS.get(status, 'failed')})"
        return Progress(failure=failed(piece, code, describe(code) if code else status_said))
    # A file that is being cut ends inside a block, where direct reads deliver the same few bytes
    # every time: a short read asks for the size.
    if piece.offset_bytes + piece.expected_bytes > piece.file.refresh_size():
        return Progress(failure=_truncated(piece))
    whole = result // piece.file.alignment_bytes * piece.file.alignment_bytes
    piece.idle_retries = 0 if whole > 0 else piece.idle_retries + 1
    if piece.idle_retries > IDLE_RETRIES:
        return Progress(failure=_short(piece))
    piece.offset_bytes += whole
    piece.expected_bytes -= whole
    return Progress(moved_bytes=whole)


def failed(piece: Piece, code: int, got: str) -> Failure:
    """The device or cuFile has refused the read with that code, errno or CUfileOpError."""
    place = piece.place()
    number = code if 0 < code < 5000 else None
    text = os.strerror(number) if number else got
    return lambda: errors.ReadError("read failed", **place, errno=number, got=text, fix=_RETRY_FIX)


def _truncated(piece: Piece) -> Failure:
    place, got = piece.place(), f"a file of {piece.file.size_bytes} bytes"
    expected = f"at least {piece.offset_bytes + piece.expected_bytes}"
    return lambda: errors.TruncatedFileError(
        "file ended during the read", **place, got=got, expected=expected
    )


def _short(piece: Piece) -> Failure:
    place, got = piece.place(), f"{IDLE_RETRIES} completions without progress"
    return lambda: errors.ShortReadError("read stays short", **place, got=got, fix=_RETRY_FIX)
