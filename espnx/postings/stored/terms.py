"""Terms as an index knows them: bytes, a hash to look them up by, and what stands in their list to
tell them from others of that hash."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np

from ... import errors

#: Longer terms are in their list by a digest of 32 bytes. ``csrc/cpu/postings/list.hpp`` has the
#: same number.
NAME_BYTES_MAX = 256
TERM_BYTES_MAX = 2**31 - 1


def term_bytes(term: str | int) -> bytes:
    """The bytes of a term: UTF-8, in which a half of a character has a form of its own. A number
    stands for its decimal digits.

    Raises InvalidInputError for what is neither.
    """
    if isinstance(term, str):
        data = term.encode("utf-8", "surrogatepass")
    elif isinstance(term, (int, np.integer)) and not isinstance(term, bool):
        data = str(int(term)).encode()
    else:
        raise errors.InvalidInputError(
            "term", got=type(term).__name__, expected="a str, or a whole number"
        )
    if len(data) > TERM_BYTES_MAX:
        raise errors.InvalidInputError(
            "term", got=f"{len(data)} bytes", expected=f"at most {TERM_BYTES_MAX}"
        )
    return data


def term_text(data: bytes) -> str:
    """What `term_bytes` was given."""
    return data.decode("utf-8", "surrogatepass")


def hash_of(data: bytes) -> int:
    """64 bits; two terms may share them, which every reader checks."""
    return int.from_bytes(hashlib.blake2b(data, digest_size=8).digest(), "little")


def hashes_of(terms: Sequence[bytes]) -> np.ndarray:
    """uint64 [n]."""
    return np.fromiter((hash_of(term) for term in terms), np.uint64, len(terms))


def name_of(data: bytes) -> tuple[bytes, bool]:
    """What stands in a term's list, and whether it is a digest."""
    if len(data) <= NAME_BYTES_MAX:
        return data, False
    return hashlib.blake2b(data, digest_size=32).digest(), True
