"""The kinds of parts that devices have: how each is opened, which verbs it has, and what these
cost.

A kind is a value, so that a device of any sort (plain, emulated, recorded, several as one) opens
parts of all kinds by one call (`NearStorageDevice.open_part`), and a package may bring a kind of
its own (docs/device-plugin.md).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

import torch

from .. import errors
from ..storage import Engine
from ..storage.native import host_engine
from .clusters.commands import DistancesCommand
from .command import Command, Watch
from .cost.distances import distances
from .cost.maxsim import maxsim
from .cost.scan import scan
from .cost.search import search
from .cost.work import Work
from .interface import KeptRecords
from .model.spec import Accelerator
from .postings.command import ScanCommand
from .record_layout import RecordLayout
from .records.commands import MaxsimCommand, ReadCommand
from .rows.commands import ROW_COMMANDS, RowSpace
from .vectors.interface import SearchCommand
from .workers import Clock, clock_of
from .wrapper import PartWrapper, topologies_of

#: What a command costs on a device that stores such things, whose accelerator has the verb (None:
#: the host computes).
Cost = Callable[[Any, Any, Accelerator | None], Work]
#: Puts something in front of a part: (the part, what it stores) -> the part as it is seen from
#: there.
Front = Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Verb:
    """Attributes:
    command: of it.
    cost: None: it takes an emulated device no time.
    """

    command: type[Command]
    cost: Cost | None = None


@dataclass(frozen=True, eq=False)
class PartKind:
    """Attributes:
    name: of the kind, in checks and in errors.
    keeps: what such a part keeps, in words.
    opens: the call of a device that opens one, where it has one of its own.
    verbs: by name.
    open: a plain one, which this machine computes on: (directory of the device, what, options) ->
        the part.
    stored: what costs and traces must know of what an open part keeps.
    says: the line of a trace that says what a part is; empty: none does.
    facts: of that line, beside ``files``.
    files: of that line, by what a part stores; None: what `path_report` names.
    is_open: a replay is given such parts, not what they are opened of.
    fronts: puts something in front of an open part, or of the parts that it opens in turn.
    mixins: of what stands in front of such a part, beside its calls.
    checks: by name: (device) -> None, or what it has to say; they raise NotConformingError
        (`espnx device verify`).
    reads_wait: its commands are made of reads that wait for one another: an emulated device whose
        spec has no latency of a read opens none.
    """

    name: str
    keeps: str
    opens: str
    verbs: Mapping[str, Verb]
    open: Callable[..., Any]
    stored: Callable[[Any], Any] = lambda part: None
    says: str = ""
    facts: Callable[[Any], dict[str, Any]] = lambda stored: {}
    files: Callable[[Any], list[str]] | None = None
    is_open: bool = False
    fronts: Callable[[Any, Front], Any] | None = None
    mixins: tuple[type, ...] = ()
    checks: Mapping[str, Callable[[Any], Any]] = field(default_factory=dict)
    reads_wait: bool = False

    def open_on(self, device: Any, *what: Any, **options: Any) -> Any:
        """A part on a device, by the device's own call where it has one."""
        call = getattr(device, self.opens, None)
        return device.open_part(self, *what, **options) if call is None else call(*what, **options)

    def front(self, part: Any, make: Front) -> Any:
        """What `make` puts in front of a part that was opened."""
        return make(part, self.stored(part)) if self.fronts is None else self.fronts(part, make)

    def wrap(self, wrapper: Any, *args: Any, **options: Any) -> Any:
        """Something that stands in front of parts of this kind, made with a call for each verb,
        which makes a command."""
        return _with_calls(wrapper, self)(*args, **options)


@functools.cache
def _with_calls(wrapper: Any, kind: PartKind) -> Any:
    calls = {name: _call(verb.command) for name, verb in kind.verbs.items()}
    return type(
        f"{wrapper.__name__}Of{kind.name.title()}",
        (*kind.mixins, wrapper),
        {"__doc__": wrapper.__doc__, **calls},
    )


def _call(command: Any) -> Callable[..., Any]:
    def call(part: Any, *args: Any, watch: Watch | None = None, **options: Any) -> Any:
        ticket = part.submit(command(*args, **options), watch)
        return ticket.finish() if command.is_done else ticket

    call.__doc__ = command.__doc__
    return call


class RecordsAround(PartWrapper):
    """See `espnx.device.interface.RecordDevice`. Something stands in front of all records that it
    keeps."""

    def __init__(self, inner: Any, make: Front):
        super().__init__(inner)
        self._make = make

    @property
    def clock(self) -> Clock | None:
        """See `clock_of`: of what is put in front, else of the inner one."""
        return clock_of(self._make) or clock_of(self._inner)

    @property
    def topologies(self) -> Sequence[Any]:
        """See `topologies_of`."""
        return topologies_of(self._make, self._inner)

    def keep_records(self, layout: RecordLayout) -> KeptRecords:
        """See `RecordDevice`."""
        found: KeptRecords = self._make(self._inner.keep_records(layout), layout)
        return found


def _plain_records(path: str, engine: Engine, compute: torch.device) -> Any:
    if compute.type != "cpu":
        from .gpu.records import TensorRecordDevice

        return TensorRecordDevice(engine, compute)
    from .records.ssd import SsdRecordDevice

    native = host_engine(engine)
    if native is None:
        raise errors.InvalidInputError(
            "records would lie in GPU memory",
            got="compute='cpu'",
            fix="open the index with compute='cuda'",
        )
    return SsdRecordDevice(native)


def _plain_clusters(path: str, *args: Any, **options: Any) -> Any:
    from .clusters.device import SsdClusterDevice

    return SsdClusterDevice(*args, **options)


def _plain_graph(path: str, *args: Any, **options: Any) -> Any:
    from .graph.device import SsdGraphDevice

    return SsdGraphDevice(*args, **options)


def _plain_lists(path: str, *args: Any, **options: Any) -> Any:
    from .postings.device import SsdPostingsDevice

    return SsdPostingsDevice(*args, **options)


def _plain_rows(path: str, directory: str | None = None, **options: Any) -> Any:
    from .rows.ssd import SsdRowDevice

    return SsdRowDevice(directory or path, **options)


ROWS = PartKind(
    "rows",
    "rows of KV caches",
    "open_rows",
    {each.verb: Verb(each) for each in ROW_COMMANDS},
    _plain_rows,
    # a part of somebody else's need not say
    stored=lambda part: getattr(part, "read_ahead_bytes", None),
    mixins=(RowSpace,),
)
RECORDS = PartKind(
    "records",
    "embedding records",
    "open_records",
    {"maxsim": Verb(MaxsimCommand, maxsim), "read": Verb(ReadCommand)},
    _plain_records,
    says="keep_records",
    fronts=RecordsAround,
    files=lambda layout: [file.path for file in layout.files],
    facts=lambda layout: {
        "records": len(layout.n_tokens),
        "format": layout.schema.format,
        "dim": layout.schema.dim,
        "d_cls": layout.schema.d_cls,
    },
    is_open=True,
)
CLUSTERS = PartKind(
    "clusters",
    "clusters of vectors",
    "open_clusters",
    {"distances": Verb(DistancesCommand, distances)},
    _plain_clusters,
    attrgetter("clusters"),
    says="open_clusters",
    facts=lambda held: {"clusters": len(held.n_vectors), "format": held.format, "dim": held.dim},
)
GRAPHS = PartKind(
    "graphs",
    "graphs",
    "open_graph",
    {"search": Verb(SearchCommand, search)},
    _plain_graph,
    attrgetter("graph"),
    says="open_graph",
    facts=lambda graph: {
        "nodes": graph.n_nodes,
        "format": graph.format,
        "dim": graph.dim,
        "metric": graph.metric,
    },
    reads_wait=True,
)
POSTINGS = PartKind(
    "postings",
    "posting lists",
    "open_postings",
    {"scan": Verb(ScanCommand, scan)},
    _plain_lists,
    attrgetter("lists"),
    says="keep_lists",
    facts=lambda lists: {"records": lists.n_records, "begin_bytes": lists.begin_bytes},
    files=lambda lists: [lists.path],
)

#: Those that every device may have, in the order in which they are checked.
KINDS: Sequence[PartKind] = (ROWS, RECORDS, CLUSTERS, GRAPHS, POSTINGS)
