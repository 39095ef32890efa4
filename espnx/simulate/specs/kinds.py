"""What a file of each kind says. All are read as device specs are (docs/device-specs.md): every
figure has a unit, a source and a confidence, and a range where it is known within bounds only."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Annotated

from ...device.model.reader import (
    NAME,
    Compute,
    Count,
    Dollars,
    Figure,
    Rate,
    Share,
    Size,
    Time,
    Watts,
)

#: Where K and V are kept; what attends over them; what a program near storage may do beside it.
KEPT_IN = ("drives", "memory")
ATTENDS = ("drives", "cpu")
TECHNIQUES = ("writeback", "x-cache")
#: Anywhere, all dies alike; or page after page, from a place of each thread's own.
ORDERS = ("anywhere", "consecutive")


@dataclass(frozen=True)
class Power:
    """Electric power.

    Attributes:
        idle, busy: of all of it, without work and with as much as it can do.
    """

    idle: Watts
    busy: Watts


@dataclass(frozen=True)
class GpuSpec:
    """Attributes:
    name, title: short, and in words.
    memory, memory_bandwidth: its own.
    peak: of dense products in half precision.
    gemm_share: of the peak that products reach.
    link: from the host's memory, as copies reach it.
    power: None: not known.
    """

    name: Annotated[str, NAME]
    title: str
    memory: Size
    memory_bandwidth: Rate
    peak: Compute
    gemm_share: Share
    link: Rate
    power: Power | None = None


@dataclass(frozen=True)
class HostSpec:
    """Attributes:
    name, title: short, and in words.
    memory, memory_bandwidth: of it.
    power: of processors, memory and board, without drives and GPUs.
    """

    name: Annotated[str, NAME]
    title: str
    memory: Size
    memory_bandwidth: Rate
    power: Power | None = None


@dataclass(frozen=True)
class NetworkSpec:
    """Attributes:
    name, title: short, and in words.
    bandwidth: of one direction.
    latency: of what passes it.
    """

    name: Annotated[str, NAME]
    title: str
    bandwidth: Rate
    latency: Time


@dataclass(frozen=True)
class ProgramSpec:
    """A program that decodes, by what its way of doing so costs; what is None takes no time.

    Attributes:
        name, title: short, and in words.
        attention: of `ATTENDS`, what attends.
        resident_parameters: models of more keep their weights on drives, others in memory.
        working_memory: of the host that is neither weights nor K and V.
        copy_bandwidth: of the threads that copy between drives and memory, all together.
        cpu_bandwidth: at which processors attend over K and V, a row counted once for each query
            head that reads it.
        flash_share: of a drive's read bandwidth that reaches what computes in it.
        gpu_bandwidth: from all drives into the GPU, where it reads them itself.
        entry_time, entries_at_once: of a row of K or V that is written alone, and how many are
            under way.
        spill_tokens: that wait in memory and are written together.
        call_time: of a command to one drive.
    """

    name: Annotated[str, NAME]
    title: str
    attention: Annotated[str, ATTENDS]
    resident_parameters: Count
    working_memory: Size | None = None
    copy_bandwidth: Rate | None = None
    cpu_bandwidth: Rate | None = None
    flash_share: Share | None = None
    gpu_bandwidth: Rate | None = None
    entry_time: Time | None = None
    entries_at_once: Count | None = None
    spill_tokens: Count | None = None
    call_time: Time | None = None


@dataclass(frozen=True)
class Drives:
    """Attributes:
    device: name or file of the spec of each.
    count: of them.
    power: of each at work, beside its accelerator; None: what the spec says.
    chassis: the price of what they are plugged into, where it is not the host.
    """

    device: str
    count: Count
    power: Watts | None = None
    chassis: Dollars | None = None


@dataclass(frozen=True)
class SystemSpec:
    """The parts that a machine is made of. Names lead to presets, or to files beside this one.

    Attributes:
        name, title: short, and in words.
        host, gpu, program: names or files of their specs.
        drives: behind the switch ports and the uplink of their spec.
        kv: of `KEPT_IN`, where K and V are.
        techniques: of `TECHNIQUES`, what the program does.
        network: between the drives and the host; None: there is none.
    """

    name: Annotated[str, NAME]
    title: str
    host: str
    gpu: str
    program: str
    drives: Drives
    kv: Annotated[str, KEPT_IN]
    techniques: tuple[Annotated[str, TECHNIQUES], ...] = field(default=())
    network: str | None = None


@dataclass(frozen=True)
class ModelShape:
    """A decoder.

    Attributes:
        layers, hidden, intermediate, heads, kv_heads, head_dim: as usual.
        mlp_matrices: of an MLP, 2 or, gated, 3.
        experts, active_experts: of a layer that has them, and how many of them a token passes.
        expert_every: of so many layers one has experts.
    """

    layers: Count
    hidden: Count
    intermediate: Count
    heads: Count
    kv_heads: Count
    head_dim: Count
    mlp_matrices: Count
    experts: Count | None = None
    active_experts: Count | None = None
    expert_every: Count | None = None


@dataclass(frozen=True)
class ModelSpec:
    """A workload: text from a model, token by token.

    Attributes:
        name, title: short, and in words.
        model: its shape.
    """

    name: Annotated[str, NAME]
    title: str
    model: ModelShape


@dataclass(frozen=True)
class ClusterSpec:
    """A workload: distances of clusters of vectors, from drives that compute them.

    Attributes:
        name, title: short, and in words.
        clusters: share of each size; whatever they add up to is all.
        order: of `ORDERS`, where a thread's next cluster is.
        per_query: clusters that a query compares; None: no queries.
    """

    name: Annotated[str, NAME]
    title: str
    clusters: Mapping[int, Annotated[Figure, "share", "KiB"]]
    order: Annotated[str, ORDERS]
    per_query: Count | None = None
