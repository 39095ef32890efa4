"""What files of graphs of vectors on drives say: a collection that is divided into clusters with a
graph each (AiSAQ's global index), and the server that searches it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...device.model.reader import NAME, Compute, Count, Share, Size, Time
from .kinds import Drives


@dataclass(frozen=True)
class CollectionSpec:
    """Vectors, and what a query asks of them.

    Attributes:
        name, title: short, and in words.
        dimensions: of a vector.
        segments, vectors: clusters with a graph each, and vectors of one.
        probed: of the segments, that a query searches.
        degree: neighbours of a vertex at most.
        code: bytes of the code of a neighbour, which leads.
        node_code: bytes of the code beside a vertex's neighbours, by which results are ranked.
        streams: of queries, each of which waits for its answer.
    """

    name: Annotated[str, NAME]
    title: str
    dimensions: Count
    segments: Count
    vectors: Count
    probed: Count
    degree: Count
    code: Size
    node_code: Size
    streams: Count


@dataclass(frozen=True)
class ServerSpec:
    """One machine that searches such graphs, all of whose parts are on its drives.

    Attributes:
        name, title: short, and in words.
        cores: of its processors.
        drives: a page is on any of them.
        network: name or file of its spec; a query crosses it twice.
        read: of one page, while no other is read.
        read_call: of a core, for a read: asking for it and taking it.
        lookup: of a core, for each byte of a code that is compared.
        compute: of a core, in products with middles of clusters and of codes.
        call: of a core, for a query beside its searches.
        beam: vertices that a search reads at a time.
        expanded: of those, whose neighbours' codes are read at a time.
        missed: share of the codes for which a page is read: others lie in a page that was.
    """

    name: Annotated[str, NAME]
    title: str
    cores: Count
    drives: Drives
    network: str
    read: Time
    read_call: Time
    lookup: Time
    compute: Compute
    call: Time
    beam: Count
    expanded: Count
    missed: Share
