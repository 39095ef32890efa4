"""The command of a scan, byte for byte: which lists, what each weighs, how counts become scores,
which records may be found."""

from __future__ import annotations

import base64
from dataclasses import KW_ONLY, dataclass, field
from typing import Any, ClassVar, NoReturn

import numpy as np

from ... import errors
from ...checks import check_finite, check_whole
from ...storage.parse import Fields
from ..command import Command

#: The opcode of `ScanCommand`: of those that NVMe leaves to vendors, the next one whose lowest bits
#: say that data goes both ways.
SCAN = 0x8B
#: Lists begin, and end, at multiples of so many bytes.
UNIT_BYTES = 64
#: What flash reads.
PAGE_BYTES = 4096
K_MAX = 1 << 24
#: Of a payload in a trace, in base64.
PAYLOAD_MAX = 64 << 20

#: A list: where it lies among the device's lists and how long it is, in units of 64 bytes; the
#: number of its term there; its postings; its first layer in units of 64 bytes, 0 where it has one;
#: bytes of its name, and `DIGEST` where that is a digest.
LIST = np.dtype(
    [
        ("offset", "<u4"),
        ("size", "<u4"),
        ("term", "<u4"),
        ("postings", "<u4"),
        ("first_layer", "<u2"),
        ("name", "<u2"),
    ]
)
DIGEST = 0x8000
#: What a list counts: a posting of a count gives float32(weight * part - absent), of an impact
#: float32(weight) * impact.
WEIGHT = np.dtype([("weight", "<f8"), ("absent", "<f8")])
#: An entry of a reply: 12 bytes. The best first, of equal scores the lower number first.
SCAN_REPLY = np.dtype([("score", "<f4"), ("number", "<i8")])
#: An entry of a reply of partial scores: 8 bytes. List after list, ascending by number within each.
PARTIAL = np.dtype([("score", "<f4"), ("number", "<u4")])

_HEADER = np.dtype(
    [
        ("n_lists", "<u4"),
        ("k", "<u4"),
        ("variant", "<u4"),
        ("constant", "<f4"),
        ("k1", "<f8"),
        ("b", "<f8"),
        ("delta", "<f8"),
        ("average_length", "<f8"),
        ("name_bytes", "<u4"),
        ("filter_bytes", "<u4"),
        ("zeros", "<u8"),
    ]
)
HEADER_BYTES = _HEADER.itemsize  # 64


@dataclass(frozen=True)
class Rule:
    """How counts become scores: BM25, of all records of all devices. Impacts need none.

    Attributes:
        variant: robertson, lucene, atire, bm25l, bm25+, counted from 0.
        k1, b, delta: of BM25.
        average_length: of records, in terms.

    Raises InvalidInputError.
    """

    variant: int = 1
    k1: float = 1.5
    b: float = 0.75
    delta: float = 0.5
    average_length: float = 0.0

    def __post_init__(self) -> None:
        check_whole("variant of BM25", self.variant, 0, 4)
        for name in ("k1", "b", "delta", "average_length"):
            check_finite(f"{name} of BM25", getattr(self, name))


@dataclass(frozen=True, eq=False)
class ScanLists:
    """Posting lists of a device, in the order in which they are summed.

    Attributes:
        places: `LIST` [n].
        names: of the terms, one after the other: bytes, or a digest of longer ones. A list of
            another name is another term's, which shares a hash with the one that was meant.
    """

    places: np.ndarray
    names: bytes

    def __post_init__(self) -> None:
        if self.places.dtype != LIST or self.places.ndim != 1:
            raise errors.InvalidInputError(
                "lists of a scan",
                got=f"{self.places.dtype} {list(self.places.shape)}",
                expected="LIST [n]",
            )
        if int(self.name_sizes.sum()) != len(self.names):
            raise errors.InvalidInputError(
                "names of lists",
                got=f"{len(self.names)} bytes",
                expected=int(self.name_sizes.sum()),
            )

    def __len__(self) -> int:
        return len(self.places)

    @property
    def name_sizes(self) -> np.ndarray:
        """int64 [n]: bytes of each name."""
        return (self.places["name"] & ~np.uint16(DIGEST)).astype(np.int64)

    @property
    def n_postings(self) -> int:
        """Postings of all lists."""
        return int(self.places["postings"].sum(dtype=np.int64))

    @property
    def size_bytes(self) -> int:
        """Bytes of all lists."""
        return int(self.places["size"].sum(dtype=np.int64)) * UNIT_BYTES

    @property
    def flash_bytes(self) -> int:
        """Bytes of the pages in which the lists lie; a page that two of them share counts twice."""
        begin = self.places["offset"].astype(np.int64) * UNIT_BYTES
        end = begin + self.places["size"].astype(np.int64) * UNIT_BYTES
        return int((-(-end // PAGE_BYTES) - begin // PAGE_BYTES).sum()) * PAGE_BYTES


@dataclass(frozen=True, eq=False)
class Weights:
    """What lists count.

    Attributes:
        lists: `WEIGHT` [n], of each.
        constant: added to every sum: what a record gets of terms that it has not (bm25l, bm25+).
        rule: of counts.
    """

    lists: np.ndarray
    constant: float = 0.0
    rule: Rule = field(default_factory=Rule)


@dataclass(frozen=True, eq=False)
class ScanCommand(Command):
    """Asks a device to score the records of some lists. The payload lies in the data buffer when
    the command is sent, and the reply when it is done: `SCAN_REPLY` of the k best, or `PARTIAL` of
    every posting where k is 0.

    Attributes:
        lists, weights, k, deadline_s: see `PostingsDevice.scan`.
        allowed: uint8: bit i % 8 of byte i / 8 says whether record i may be found; None: all may.
        opcode: `SCAN`.
    """

    verb: ClassVar[str] = "scan"
    opcode: ClassVar[int] = SCAN
    lists: ScanLists
    weights: Weights
    k: int
    _: KW_ONLY
    allowed: np.ndarray | None = None
    deadline_s: float = 30.0

    def __post_init__(self) -> None:
        """Raises InvalidInputError."""
        check_whole("k", self.k, 0, K_MAX)
        weights = self.weights.lists
        if weights.dtype != WEIGHT or weights.shape != (len(self.lists),):
            raise errors.InvalidInputError(
                "weights of lists",
                got=f"{weights.dtype} {list(weights.shape)}",
                expected=f"WEIGHT [{len(self.lists)}]",
            )

    @property
    def payload(self) -> bytes:
        """What is sent: a header of 64 bytes, 20 bytes and a weight of 16 for each list, names, and
        the filter if there is one."""
        rule, allowed = self.weights.rule, b"" if self.allowed is None else self.allowed.tobytes()
        header = np.zeros(1, _HEADER)
        header[0] = (
            len(self.lists),
            self.k,
            rule.variant,
            self.weights.constant,
            rule.k1,
            rule.b,
            rule.delta,
            rule.average_length,
            len(self.lists.names),
            len(allowed),
            0,
        )
        return b"".join(
            (
                header.tobytes(),
                self.lists.places.tobytes(),
                self.weights.lists.tobytes(),
                self.lists.names,
                allowed,
            )
        )

    @property
    def payload_bytes(self) -> int:
        """Bytes of `payload`."""
        each = LIST.itemsize + WEIGHT.itemsize
        return (
            HEADER_BYTES
            + len(self.lists) * each
            + len(self.lists.names)
            + (0 if self.allowed is None else self.allowed.nbytes)
        )

    @property
    def data_len(self) -> int:
        """Bytes of the reply, which come to the host: 12 for each of the k best, or 8 for each
        posting."""
        n_postings = self.lists.n_postings
        return (
            min(self.k, n_postings) * SCAN_REPLY.itemsize
            if self.k
            else n_postings * PARTIAL.itemsize
        )

    @property
    def flash_bytes(self) -> int:
        """Bytes that the device reads of its own flash: whole pages."""
        return self.lists.flash_bytes

    @property
    def flop(self) -> float:
        """Operations in floating point: for each posting a sum, a quotient, a product and a
        difference, and the addition to its record's score; an impact takes two of them. Unpacking
        is not among them."""
        return 5.0 * self.lists.n_postings

    def values(self, found: np.ndarray) -> np.ndarray:
        """See `Command`."""
        scores: np.ndarray = found["score"]
        return scores

    def begin_line(self, stored: Any, memo: dict[Any, Any]) -> dict[str, Any]:
        """See `Command`."""
        places = np.stack([self.lists.places["offset"], self.lists.places["size"]], axis=1)
        return {
            "bytes": self.lists.size_bytes,
            "k": self.k,
            "postings": self.lists.n_postings,
            "lists": (places.astype(np.int64) * UNIT_BYTES).tolist(),
            "sent": self.payload_bytes,
            "reply": self.data_len,
            "payload": base64.b64encode(self.payload).decode(),
            "waited_s": 0.0,
            "read_bytes": self.flash_bytes,
            "requests": len(self.lists.places),
        }

    @classmethod
    def of_line(cls, said: Fields, stored: Any, memo: dict[Any, Any]) -> ScanCommand:
        """See `Command`."""
        text = said.text("payload", most=PAYLOAD_MAX)
        try:
            return cls.parse(base64.b64decode(text, validate=True))
        except (ValueError, errors.FormatError) as error:
            said.refuse("payload", "the command of a scan, in base64", str(error))

    @classmethod
    def parse(cls, payload: bytes) -> ScanCommand:
        """What `payload` says. Raises FormatError for bytes that are no command."""
        if len(payload) < HEADER_BYTES:
            _refuse(f"{len(payload)} bytes", f"at least {HEADER_BYTES}")
        header = np.frombuffer(payload, _HEADER, 1)[0]
        n, name_bytes, filter_bytes = (
            int(header[name]) for name in ("n_lists", "name_bytes", "filter_bytes")
        )
        expected = HEADER_BYTES + n * (LIST.itemsize + WEIGHT.itemsize) + name_bytes + filter_bytes
        if expected != len(payload):
            _refuse(f"{len(payload)} bytes", expected)
        at = HEADER_BYTES
        places = np.frombuffer(payload, LIST, n, at)
        weights = np.frombuffer(payload, WEIGHT, n, at + places.nbytes)
        at += places.nbytes + weights.nbytes
        allowed = (
            np.frombuffer(payload, np.uint8, filter_bytes, at + name_bytes).copy()
            if filter_bytes
            else None
        )
        try:
            rule = Rule(
                int(header["variant"]),
                *(float(header[name]) for name in ("k1", "b", "delta", "average_length")),
            )
            lists = ScanLists(places, payload[at : at + name_bytes])
            return cls(
                lists,
                Weights(weights, float(header["constant"]), rule),
                int(header["k"]),
                allowed=allowed,
            )
        except errors.InvalidInputError as error:
            raise errors.FormatError(
                "command of a scan", got=str(error), expected="one that was sent"
            ) from error


def _refuse(got: object, expected: object) -> NoReturn:
    raise errors.FormatError("command of a scan", got=got, expected=expected)
