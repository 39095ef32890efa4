"""What a recorded command asks of drives: bytes to read or to write, by how many rows that may lie
apart, and what is computed on them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from ...device.trace.reader import Command, Trace
from ...errors import InvalidInputError
from ...storage.parse import Fields
from ..system import meant

#: Nothing that its part reads ahead is wanted any more.
FORGET = "forget"
#: What is served by no drive: it names what is there, or lets go of it.
SAID = (
    "keep_records",
    "open_clusters",
    "open_graph",
    "open_walks",
    "keep_lists",
    "release",
    FORGET,
    "flush",
    "sync",
    "restore",
)
#: They wait until the rows are written that were put before.
ENDS_WRITES = ("flush", "sync")
WRITES = ("put", "join")
READS = ("ahead", "attend", "visit", "maxsim", "read", "search", "walk", "distances", "scan")
#: Verbs that a drive with an accelerator computes; other bytes pass to the host.
COMPUTED = ("attend", "maxsim", "search", "scan", "distances")
PAGE_BYTES = 4096


@dataclass(frozen=True)
class Request:
    """Attributes:
    verb: of the command.
    read_bytes, write_bytes: of flash.
    units: rows of so many sequences and heads, or so many pages, each of which lies in one drive.
    rounds: of reads that wait for one another.
    requests: that read it; 0: so few that they do not count.
    reading: number of the command whose reads it takes in; None: it reads on its own.
    query_heads: that share a pass over the rows.
    flops_per_byte: of what is computed on what is read.
    is_shown: what it reads goes to the host as it is.
    is_asynchronous: it has ended when it has begun, and its reads go on.
    window_bytes: that such reads of its part are ahead of their use at most; None: all of them.
    """

    verb: str
    read_bytes: int = 0
    write_bytes: int = 0
    units: int = 1
    rounds: int = 1
    requests: int = 0
    reading: int | None = None
    query_heads: int = 1
    flops_per_byte: float = 1.0
    is_shown: bool = False
    is_asynchronous: bool = False
    window_bytes: int | None = None

    @property
    def is_empty(self) -> bool:
        return not (self.read_bytes or self.write_bytes)


@dataclass(frozen=True)
class VerbTimes:
    """All commands of a verb. Attributes: count; read_bytes; write_bytes; recorded_s and
    predicted_s: added up, from a command's beginning to its end."""

    count: int = 0
    read_bytes: int = 0
    write_bytes: int = 0
    recorded_s: float = 0.0
    predicted_s: float = 0.0

    def with_one(self, request: Request, recorded_s: float, predicted_s: float) -> VerbTimes:
        """All of these, and one more command."""
        return VerbTimes(
            self.count + 1,
            self.read_bytes + request.read_bytes,
            self.write_bytes + request.write_bytes,
            self.recorded_s + recorded_s,
            self.predicted_s + predicted_s,
        )


def requests_of(trace: Trace) -> list[Request | None]:
    """What each command asks; None: it failed, and is asked for nothing.

    Raises:
        InvalidInputError: a verb that no part of any system serves.
        FormatError: a line that says what cannot be.
    """
    units, shown, dims = dict[int, int](), set[int](), dict[int, int]()
    for command in trace.commands:
        waits_for = _waits_for(command)
        if waits_for is not None and "queries" in command.detail:
            units[waits_for] = _units(command)
        if waits_for is not None and command.verb == "visit":
            shown.add(waits_for)
        if command.verb == "keep_records" and "dim" in command.detail:
            dims[command.part] = command.detail.whole("dim")
    return [
        None if command.failed else _request(command, units, shown, dims)
        for command in trace.commands
    ]


def _request(
    command: Command, units: Mapping[int, int], shown: Collection[int], dims: Mapping[int, int]
) -> Request:
    verb, size_bytes = command.verb, command.size_bytes
    if verb in SAID:
        return Request(verb)
    if verb in WRITES:
        heads = sum(_heads(each) for each in command.detail.each("segments", count=1 << 20))
        reads = size_bytes if verb == "join" else 0
        return Request(verb, reads, size_bytes, max(1, heads))
    if verb not in READS:
        raise InvalidInputError(
            "a verb of a trace that no part of a system serves",
            got=verb,
            expected=", ".join((*READS, *WRITES, *SAID)),
            fix=meant(verb, (*READS, *WRITES, *SAID)),
        )
    if verb == "ahead":
        own = units.get(command.number, 1)
        return Request(
            verb,
            size_bytes,
            units=own,
            is_shown=command.number in shown,
            is_asynchronous=True,
            window_bytes=_window_bytes(command),
        )
    if verb in ("attend", "visit"):
        shared = _shape(command)[2] if "queries" in command.detail else 1
        own, reading = _units(command), _waits_for(command)
        read = size_bytes if reading is None else 0
        # rows of half precision, a product and a sum for each value and query head
        return Request(
            verb,
            read,
            units=own,
            reading=reading,
            query_heads=shared,
            flops_per_byte=float(shared),
            is_shown=verb == "visit",
        )
    if "read_bytes" in command.detail:
        size_bytes = command.detail.whole("read_bytes")
    pages = max(1, math.ceil(size_bytes / PAGE_BYTES))
    flops = _maxsim_flops(command, dims) if verb == "maxsim" else None
    requests = command.detail.whole("requests") if "requests" in command.detail else 0
    return Request(
        verb,
        size_bytes,
        units=pages,
        rounds=_rounds(command),
        requests=requests,
        flops_per_byte=1.0 if flops is None or not size_bytes else flops / size_bytes,
    )


def _maxsim_flops(command: Command, dims: Mapping[int, int]) -> float | None:
    """A product and a sum for each value of the records and each token of the queries that want
    them. None: the trace does not say."""
    detail = command.detail
    dim = dims.get(command.part)
    if dim is None or not all(name in detail for name in ("tokens", "queries", "pairs", "places")):
        return None
    lengths = detail.wholes("queries", count=1 << 20)
    records = len(detail.wholes("places", count=1 << 24))
    if not lengths or not records:
        return 0.0
    wanted = detail.whole("pairs") / records
    return 2.0 * dim * detail.whole("tokens") * sum(lengths) / len(lengths) * wanted


def _waits_for(command: Command) -> int | None:
    if command.verb not in ("attend", "visit") or "waits_for" not in command.detail:
        return None
    number = command.detail.whole("waits_for", least=-1)
    return None if number < 0 else number


def _window_bytes(command: Command) -> int | None:
    if "read_ahead_bytes" not in command.detail:
        return None
    return command.detail.whole("read_ahead_bytes", least=1)


def _units(command: Command) -> int:
    """Sequences times heads that share K and V."""
    if "queries" not in command.detail:
        return 1
    sequences, heads, _, _ = _shape(command)
    return sequences * heads


def _shape(command: Command) -> list[int]:
    """How many sequences, heads, rows of each head and dimensions queries have."""
    shape = command.detail.wholes("queries", 1, count=4)
    if len(shape) != 4:
        command.detail.refuse("queries", "four numbers", shape)
    return shape


def _heads(segment: Fields) -> int:
    """Whose rows a segment has."""
    said = segment.wholes("heads", count=3)
    if len(said) != 3 or not said[2]:
        segment.refuse("heads", "start, stop and step", said)
    return max(1, len(range(*said)))


def _rounds(command: Command) -> int:
    detail = command.detail
    if command.verb == "search" and "rounds" in detail:
        return max(1, len(detail.values()["rounds"]))
    if command.verb == "walk" and "pages" in detail:
        pages = max(detail.wholes("pages", count=1 << 24), default=1)
        return max(1, math.ceil(pages / detail.whole("beam", least=1)))
    return 1
