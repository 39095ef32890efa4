"""A server's specs and a collection's together, with the values that their figures have in one
run."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from ...device.model.reader import SUFFIXES
from ...device.model.spec import DeviceSpec, load_spec
from ...errors import InvalidInputError
from ...sizes import format_size
from ..figures import Range
from ..specs.graphs import CollectionSpec, ServerSpec
from ..specs.kinds import NetworkSpec
from ..specs.load import as_range, figures, load
from ..specs.rag import GraphWalkSpec

#: What a read moves, and a neighbour's number (AiSAQ's files).
PAGE, ID_BYTES = 4096, 4
#: Each has a part of its own in a walk.
DRIVES_MAX = 64


@dataclass(frozen=True)
class Server:
    """Attributes:
    server, collection, walk, network, device: specs.
    values: of their figures, by names that `Specs.ranges` has.
    """

    server: ServerSpec
    collection: CollectionSpec
    walk: GraphWalkSpec
    network: NetworkSpec
    device: DeviceSpec
    values: Mapping[str, float]

    def get(self, name: str) -> float:
        """The value of a figure, such as ``server.read``. Raises InvalidInputError: it is not
        known."""
        kind, _, path = name.partition(".")
        found = self.values.get(f"{getattr(self, kind).name}.{path}")
        if found is None:
            raise InvalidInputError(
                f"what {self.server.name} is computed with", got=f"no {name}", expected="given"
            )
        return found

    def count(self, name: str) -> int:
        """A figure that counts, as the whole number that is nearest, 1 at least."""
        return max(1, round(self.get(name)))

    @property
    def node_bytes(self) -> int:
        """A vertex: its code, how many neighbours it has, and which."""
        return int(self.get("collection.node_code")) + ID_BYTES * (
            1 + self.count("collection.degree")
        )

    @property
    def stored_bytes(self) -> float:
        """The whole index: vertices that cross no page they need not, and codes likewise."""
        each = _pages(self.node_bytes) + _pages(int(self.get("collection.code")))
        return each * PAGE * self.get("collection.segments") * self.get("collection.vectors")


def _pages(size_bytes: int) -> float:
    """How many pages one thing takes of many that lie one after another."""
    return 1 / (PAGE // size_bytes) if size_bytes <= PAGE else float(math.ceil(size_bytes / PAGE))


@dataclass(frozen=True)
class Specs:
    """Those of one server and one collection, without values."""

    server: ServerSpec
    collection: CollectionSpec
    walk: GraphWalkSpec
    network: NetworkSpec
    device: DeviceSpec

    @functools.cached_property
    def ranges(self) -> dict[str, Range]:
        """The ranges of all figures, by the name of their spec and the fields that lead to them."""
        found: dict[str, Range] = {}
        for spec in (self.server, self.collection, self.walk, self.network, self.device):
            found |= {name: as_range(each) for name, each in figures(spec, spec.name).items()}
        return found

    def given(self, values: Mapping[str, float]) -> Server:
        return Server(self.server, self.collection, self.walk, self.network, self.device, values)


def load_server(source: str, collection: str) -> Specs:
    """A server by name or path with what it is made of, and a collection.

    Raises:
        InvalidInputError: a name that is none; drives that say no rate of random reads; more of
            anything than there is.
        FileMissingError, ReadError, FormatError: as they say.
    """
    server = load(ServerSpec, source)
    beside = source if source.endswith(SUFFIXES) else None
    device = server.drives.device
    if beside is not None and device.endswith(SUFFIXES):
        device = str(Path(beside).parent / device)
    specs = Specs(
        server,
        load(CollectionSpec, collection),
        load(GraphWalkSpec, "hnsw"),
        load(NetworkSpec, server.network, beside),
        load_spec(device),
    )
    _check(specs)
    return specs


def _check(specs: Specs) -> None:
    server, collection = specs.server, specs.collection
    if server.drives.count.value > DRIVES_MAX:
        raise InvalidInputError(
            f"drives of {server.name}", got=str(server.drives.count), expected=f"1 to {DRIVES_MAX}"
        )
    if specs.device.flash.random_reads is None:
        raise InvalidInputError(
            f"what {server.name} is computed with",
            got=f"no flash.random_reads of {specs.device.name}",
            expected="given",
        )
    if collection.probed.value > collection.segments.value:
        raise InvalidInputError(
            f"segments of {collection.name} that a query searches",
            got=str(collection.probed),
            expected=f"at most {collection.segments}",
        )
    if server.expanded.value > server.beam.value:
        raise InvalidInputError(
            f"vertices that {server.name} expands at a time",
            got=str(server.expanded),
            expected=f"at most {server.beam}, which it reads at a time",
        )
    named = [each.name for each in vars(specs).values() if hasattr(each, "name")]
    if len(set(named)) != len(named):
        raise InvalidInputError(
            f"specs of {server.name}",
            got=f"a name twice: {', '.join(named)}",
            expected="each its own, since figures are known by it",
        )


def check_fits(server: Server) -> None:
    """Raises InvalidInputError: an index that the drives do not hold, by how many bytes."""
    if server.device.capacity is None:
        return
    has = server.device.capacity.value * server.server.drives.count.value
    if server.stored_bytes > has:
        raise InvalidInputError(
            f"{server.collection.name} does not fit the drives of {server.server.name}",
            got=f"{format_size(int(server.stored_bytes - has))} too much",
            expected="all of it",
            fix="fewer vectors, shorter codes, or more drives",
        )
