"""What a service makes of queries: the phases of one, queries a second, and what bounds them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from ...errors import InvalidInputError
from ...sizes import format_size
from .service import Service
from .walks import PROBED, distances_of, ef_of, hop_read_s, hops_of

#: In the order in which a query passes them; those of searching, and that of drives.
PHASES = ("encoding", "to the searcher", "reads", "comparing", "to the model", "passages", "model")
SEARCHING = ("encoding", "reads", "comparing")
READS = "reads"
PASSAGES_MAX, BATCH_MAX = 10**11, 4096
HALF_BYTES = 2


@dataclass(frozen=True)
class Answer:
    """Attributes:
    system, workload: by name.
    passages, batch: that are searched, queries at a time.
    phases_s: of a batch, by `PHASES`.
    queries_per_s: the highest rate at which queries can arrive without a queue that grows.
    bound: the phase that takes most.
    distances, hops: of a walk in one drive; None: there is none.
    is_extrapolated: the graph is larger than those on which the law of its walks was fitted.
    search_joules: of a query, of what encodes and searches.
    kept_bytes: of vectors or lists; of a memory no size is known, and it is taken to hold them.
    kept: of `HELD_IN`, where.
    """

    system: str
    workload: str
    passages: int
    batch: int
    phases_s: Mapping[str, float]
    queries_per_s: float
    bound: str
    distances: float | None
    hops: float | None
    is_extrapolated: bool
    search_joules: float
    kept_bytes: float
    kept: str

    @property
    def serial_s(self) -> float:
        return sum(self.phases_s.values())

    def share(self, phase: str) -> float:
        return self.phases_s[phase] / self.serial_s

    @property
    def search_share(self) -> float:
        return sum(self.phases_s[each] for each in SEARCHING) / self.serial_s


def answer(service: Service, passages: int, batch: int = 1) -> Answer:
    """Raises InvalidInputError: no such numbers; a model or lists that do not fit, by how many
    bytes."""
    for name, value, most in (("passages", passages, PASSAGES_MAX), ("a batch", batch, BATCH_MAX)):
        if not 1 <= value <= most:
            raise InvalidInputError(name, got=value, expected=f"1 to {most}")
    check_fits(service, passages, batch)
    without, found = service.without, _search(service, passages)
    crossing_s = 0.0 if without == "network" else service.get("network.latency")
    crossings = service.get("service.crossings", 0.0)
    phases_s = {
        "encoding": 0.0 if without == "encoding" else batch * encoding_s(service),
        "to the searcher": crossings * crossing_s,
        "reads": 0.0 if without == "reads" else batch * found.reads_s,
        "comparing": 0.0 if without == "comparing" else batch * found.comparing_s,
        "to the model": service.get("generation.crossings") * crossing_s,
        "passages": service.get("generation.passages"),
        "model": 0.0 if without == "generation" else generation_s(service, batch),
    }
    return Answer(
        service.service.name,
        service.retriever.name,
        passages,
        batch,
        phases_s,
        batch / sum(phases_s.values()),
        max(phases_s, key=lambda name: phases_s[name]),
        found.distances,
        found.hops,
        found.distances is not None and passages / service.n_drives > service.get("walk.walked"),
        _search_joules(service, phases_s) / batch,
        kept_bytes(service, passages),
        service.service.kept,
    )


def check_fits(service: Service, passages: int, batch: int) -> None:
    """Raises InvalidInputError for a model that does not fit its GPUs, and for vectors or lists
    that do not fit drives."""
    after = service.generation
    tokens = after.prompt.value + after.output.value
    model = after.parameters.value * HALF_BYTES + batch * tokens * after.kv.value
    has = service.gpu.memory.value * after.gpus.value
    _check(f"{after.name} for {batch} queries", model, service.gpu.name, has)
    capacity = None if service.device is None else service.device.capacity
    if capacity is not None:
        has = capacity.value * service.n_drives
        what = f"{service.retriever.name} of {passages:,} passages"
        _check(what, kept_bytes(service, passages), service.service.name, has)


def kept_bytes(service: Service, passages: int) -> float:
    """Bytes of all vectors or lists, without what leads to them."""
    kept = service.retriever.vector or service.retriever.lists
    return 0.0 if kept is None else passages * kept.value


def _check(what: str, size: float, where: str, has: float) -> None:
    if size > has:
        raise InvalidInputError(
            f"{what} does not fit {where}",
            got=f"{format_size(int(size - has))} too much",
            expected="all of it",
            fix="fewer, or a larger system",
        )


def encoding_s(service: Service) -> float:
    """Seconds of one query: products, or the weights from memory, whichever takes longer."""
    if service.retriever.parameters is None:
        return 0.0
    flops = 2 * service.get("retriever.parameters") * service.get("retriever.tokens")
    weights_s = service.get("retriever.weights") / service.get("encoder.weights_bandwidth")
    return service.get("encoder.call") + max(flops / service.get("encoder.compute"), weights_s)


def generation_s(service: Service, batch: int) -> float:
    """Seconds of a batch's answers, from the roofline: prompts are bound by products; a token by
    products, or by weights and K and V from the GPUs' memory."""
    n = service.get("generation.gpus")
    flops_per_s = n * service.get("gpu.peak") * service.get("gpu.gemm_share")
    share = service.get("generation.bandwidth_share")
    bytes_per_s = n * service.get("gpu.memory_bandwidth") * share
    parameters, prompt = service.get("generation.parameters"), service.get("generation.prompt")
    output = service.get("generation.output")
    weights = parameters * HALF_BYTES
    prompt_s = max(2 * parameters * prompt * batch / flops_per_s, weights / bytes_per_s)
    kv = batch * (prompt + output / 2) * service.get("generation.kv")
    token_s = max(2 * parameters * batch / flops_per_s, (weights + kv) / bytes_per_s)
    return prompt_s + output * token_s


@dataclass(frozen=True)
class _Found:
    """Attributes:
    reads_s, comparing_s: of a query.
    distances, hops: of a walk in one drive; None: there is none.
    """

    reads_s: float
    comparing_s: float
    distances: float | None = None
    hops: float | None = None


def _search(service: Service, passages: int) -> _Found:
    if service.retriever.representation == "lists":
        return _lists(service, passages)
    return (_clusters if service.service.index == "clusters" else _graph)(service, passages)


def _graph(service: Service, passages: int) -> _Found:
    """A walk in each drive at once, of as many vectors as it has."""
    n = service.n_drives if service.is_near_storage else 1
    ef = ef_of(passages) * (service.get("walk.private_ef") if n > 1 else 1.0)
    distances, hops = distances_of(service, passages / n, ef), hops_of(service, ef)
    size = service.get("retriever.vector")
    comparing_s = hops * service.get("searcher.hop") + distances * service.get("searcher.distance")
    reads_s = 0.0
    if service.is_near_storage:
        unit = service.get("service.flash.unit")
        cell_s = 1e-9 if service.without == "cells" else service.get("service.flash.cell_read")
        reads_s = hops * hop_read_s(
            int(service.get("service.flash.dies")),
            distances / hops,
            cell_s,
            math.ceil(size / unit) * unit,
            service.get("device.flash.read_bandwidth"),
        )
    elif service.service.kept == "drives":
        reads_s = distances * _host_read_s(service, size)
    return _Found(reads_s, comparing_s, distances, hops)


def _clusters(service: Service, passages: int) -> _Found:
    """There are as many clusters as vectors in each. Their middles are compared in memory; vectors
    of those that are probed are read and compared as those of a walk are."""
    n = math.sqrt(passages)
    probed = math.ceil(PROBED * n) * n
    size = service.get("retriever.vector")
    comparing_s = n * size / service.get("searcher.scan")
    comparing_s += probed * service.get("searcher.distance")
    reads_s = 0.0
    if service.service.kept == "drives":
        reads_s = probed * _host_read_s(service, size)
    return _Found(reads_s, comparing_s)


def _lists(service: Service, passages: int) -> _Found:
    """All of a query's lists; spread over drives by terms, the longest is one drive's."""
    n = service.n_drives if service.is_near_storage else 1
    share = max(1 / n, service.get("retriever.longest")) if n > 1 else 1.0
    touched = passages * service.get("retriever.touched") * share
    size = touched * service.get("retriever.lists")
    comparing_s = touched * service.get("retriever.postings") * service.get("searcher.posting")
    reads_s = 0.0
    if service.is_near_storage:
        reads_s = size / service.get("device.flash.read_bandwidth")
        if service.without != "cells":
            reads_s += service.get("service.flash.cell_read")
    elif service.service.kept == "drives":
        ahead = service.get("service.read_ahead")
        reads = max(service.get("retriever.terms"), size / ahead)
        reads_s = reads * _host_read_s(service, size / reads)
    return _Found(reads_s, comparing_s)


def _host_read_s(service: Service, size_bytes: float) -> float:
    """Seconds of one read, beside which no other is under way; its own time has its first page."""
    passing_s = size_bytes / service.get("device.flash.read_bandwidth")
    if service.without == "reads one by one":
        return passing_s
    return service.get("service.read") + passing_s


def _search_joules(service: Service, phases_s: Mapping[str, float]) -> float:
    """Joules of what encodes and what searches; it has less power while it waits for drives."""
    idle_w, busy_w = (service.get(f"searcher.power.{each}") for each in ("idle", "busy"))
    encoder_w = service.get("encoder.power.busy")
    return (
        phases_s["encoding"] * encoder_w
        + phases_s["comparing"] * busy_w
        + phases_s["reads"] * idle_w
    ) * (service.n_drives if service.is_near_storage else 1)
