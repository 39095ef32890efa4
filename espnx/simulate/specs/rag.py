"""What files of retrieval for language models say: retrievers, walks of graphs, what searches,
services that are made of it, and the model that answers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from ...device.model.reader import NAME, Compute, Count, Rate, Share, Size, Time
from .kinds import Drives, Power

#: What stands for a passage; where it is kept; what leads to it.
REPRESENTATIONS = ("vectors", "lists")
HELD_IN = ("drives", "memory")
INDEXES = ("graph", "clusters")


@dataclass(frozen=True)
class RetrieverSpec:
    """What a retriever keeps of passages, and what a query asks of it.

    Attributes:
        name, title: short, and in words.
        representation: of `REPRESENTATIONS`.
        parameters, tokens: of the network that encodes a query, and what goes through it; None:
            words are cut, nothing is encoded.
        weights: bytes of that network.
        vector: bytes of one; of `vectors`.
        lists: bytes of posting lists for each passage; of `lists`, as all that follows.
        touched: share of all postings that a query's lists have.
        postings: for each passage.
        terms: lists that a query has.
        longest: share of a query's postings that its longest list has.
    """

    name: Annotated[str, NAME]
    title: str
    representation: Annotated[str, REPRESENTATIONS]
    parameters: Count | None = None
    tokens: Count | None = None
    weights: Size | None = None
    vector: Size | None = None
    lists: Size | None = None
    touched: Share | None = None
    postings: Count | None = None
    terms: Count | None = None
    longest: Share | None = None


@dataclass(frozen=True)
class GraphWalkSpec:
    """How many vectors a walk of a graph compares: a law that was fitted on walks.

    Attributes:
        name, title: short, and in words.
        vectors, ef: of the walk at which the law begins.
        distances: that it compares.
        more_vectors, more_ef: the power of either with which they grow.
        walked: vectors of the largest graph on which it was fitted; beyond it is extrapolated.
        descent: vertices that are expanded beside ef.
        private_ef: of a graph that holds one of several shares of the vectors, over that of one
            that holds them all.
    """

    name: Annotated[str, NAME]
    title: str
    vectors: Count
    ef: Count
    distances: Count
    more_vectors: Share
    more_ef: Share
    walked: Count
    descent: Count
    private_ef: Share


@dataclass(frozen=True)
class SearcherSpec:
    """What encodes queries and compares, one query at a time.

    Attributes:
        name, title: short, and in words.
        compute: that a network for encoding reaches.
        weights_bandwidth: at which its weights are read.
        call: what encoding takes beside.
        hop: a vertex of a walk, beside its vectors.
        distance, posting: a vector of a walk, a posting; None: it is fitted.
        scan: bytes of vectors that are compared one after another.
        power: of it while it searches, and while it waits for drives.
    """

    name: Annotated[str, NAME]
    title: str
    compute: Compute
    weights_bandwidth: Rate
    call: Time
    hop: Time
    scan: Rate
    power: Power
    distance: Time | None = None
    posting: Time | None = None


@dataclass(frozen=True)
class Flash:
    """What a searcher in a drive reads from; its bus is that of the drive's spec.

    Attributes:
        dies: of it.
        cell_read: of a page.
        unit: that a read moves at least.
    """

    dies: Count
    cell_read: Time
    unit: Size


@dataclass(frozen=True)
class ServiceSpec:
    """What finds passages.

    Attributes:
        name, title: short, and in words.
        encoder, searcher: names or files of what encodes a query, and of what compares.
        kept: of `HELD_IN`, where vectors and lists are.
        index: of `INDEXES`, what leads to vectors.
        drives: None: there are none.
        read: of one read on the host; they are one after another.
        read_ahead: bytes that a read of a list brings.
        flash: of a searcher in the drive; None: it is outside.
        crossings: of the network between encoder and searcher; None: there are none.
    """

    name: Annotated[str, NAME]
    title: str
    encoder: str
    searcher: str
    kept: Annotated[str, HELD_IN]
    index: Annotated[str, INDEXES] = "graph"
    drives: Drives | None = None
    read: Time | None = None
    read_ahead: Size | None = None
    flash: Flash | None = None
    crossings: Count | None = None


@dataclass(frozen=True)
class GenerationSpec:
    """What comes after the passages are known.

    Attributes:
        name, title: short, and in words.
        gpu: name or file of its spec.
        gpus: of them, which share a model.
        parameters: of it, two bytes each.
        kv: bytes of K and V of a token.
        prompt, output: tokens.
        bandwidth_share: of the GPU's memory bandwidth that decoding reaches.
        passages: reading their text from object storage, all at once.
        network: name or file of its spec.
        crossings: of it, from what searches to what answers.
    """

    name: Annotated[str, NAME]
    title: str
    gpu: str
    gpus: Count
    parameters: Count
    kv: Size
    prompt: Count
    output: Count
    bandwidth_share: Share
    passages: Time
    network: str
    crossings: Count
