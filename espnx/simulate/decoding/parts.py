"""A machine's parts as queues, and the ways over them: which part takes what of a read near
storage, a copy through memory, a product."""

from __future__ import annotations

from ...device.model.spec import Accelerator
from ...errors import InvalidInputError
from ..system import ROOT, Leg, PartGroup, System
from .machine import Machine

#: Commands that wait for nothing but themselves.
MANY = 4096
#: A network, drives first: its bandwidth, and its latency, in which others may be under way.
NETWORK = ("network", "network latency")
#: Groups in which commands pass time and nothing is busy.
DELAYS = ("network latency out", "network latency in")


def decoder_system(machine: Machine, group: int) -> System:
    """Parts and verbs; what a verb's command brings, by the names of its legs' sizes, is in bytes,
    but for ``flops``, ``seconds`` (of the GPU) and ``rows`` (written alone).

    Args:
        group: query heads that share K and V.
    """
    groups = _host(machine) + _drives(machine, group)
    known = {each.name for each in groups}
    verbs = {}
    for name, legs in _verbs(machine).items():
        there = tuple(leg for leg in legs if leg.group in known)
        if there:
            verbs[name] = there
    return System(machine.system.name, tuple(groups), verbs)


def _host(machine: Machine) -> list[PartGroup]:
    program, without = machine.program, machine.without
    copies = None if without == "copy threads" else machine.get("program.copy_bandwidth")
    reads = None if without == "gpu reads" else machine.get("program.gpu_bandwidth")
    attends = None if without == "cpu attention" else machine.get("program.cpu_bandwidth")
    groups = [
        PartGroup(ROOT, None, 1, 1, 0.0, machine.need("host.memory_bandwidth")),
        PartGroup("gpu link", ROOT, 1, 1, 0.0, machine.need("gpu.link")),
        PartGroup("gpu link out", ROOT, 1, 1, 0.0, machine.need("gpu.link")),
        PartGroup("gpu", "gpu link", 1, 1, 0.0, 1.0),
    ]
    if program.copy_bandwidth is not None:
        groups.append(PartGroup("copy threads", ROOT, 1, 1, 0.0, copies))
    if program.cpu_bandwidth is not None:
        groups.append(PartGroup("cpu", ROOT, 1, 1, 0.0, attends))
    if program.gpu_bandwidth is not None:
        groups.append(PartGroup("gpu reads", ROOT, 1, 1, 0.0, reads))
    if program.entry_time is not None:
        rows_per_s = machine.need("program.entries_at_once") / machine.need("program.entry_time")
        lone = None if without == "lone writes" else rows_per_s
        groups.append(PartGroup("lone writes", ROOT, 1, 1, 0.0, lone))
    if program.call_time is not None:
        groups.append(PartGroup("calls", ROOT, 1, MANY, machine.need("program.call_time")))
    return groups


def _drives(machine: Machine, group: int) -> list[PartGroup]:
    """The parts of both directions of every link, which do not hinder one another."""
    n, device, groups = machine.n_drives, machine.device, list[PartGroup]()
    ends = {"out": ROOT, "in": ROOT}

    def link(
        name: str, count: int, bytes_per_s: float | None, *, places: int = 1, latency_s: float = 0.0
    ) -> None:
        for way, behind in ends.items():
            own = PartGroup(f"{name} {way}", behind, count, places, latency_s, bytes_per_s)
            groups.append(own)
            ends[way] = f"{name} {way}"

    if machine.network is not None:
        link("network latency", 1, None, places=MANY, latency_s=machine.need("network.latency"))
        link("network", 1, machine.need("network.bandwidth"))
    if device.links.uplink is not None:
        link("uplink", 1, machine.get("device.links.uplink"))
    if device.links.switch_port is not None and device.links.devices_per_port is not None:
        ports = -(-n // int(device.links.devices_per_port.value))
        link("port", ports, machine.get("device.links.switch_port"))
    link("link", n, machine.get("device.links.device"))
    groups.append(PartGroup("flash", "link out", n, 1, 0.0, flash_bytes_per_s(machine)))
    if machine.is_near_storage and device.accelerator is not None:
        memory = machine.get("device.memory.bandwidth")
        groups.append(PartGroup("drive memory", "flash", n, 1, 0.0, memory))
        flops_per_s = _kernel_flops_per_s(machine, device.accelerator, group)
        groups.append(PartGroup("accelerator", "drive memory", n, 1, 0.0, flops_per_s))
    return groups


def _kernel_flops_per_s(machine: Machine, accelerator: Accelerator, group: int) -> float:
    """Raises InvalidInputError: no kernel of the device shares a pass among so many."""
    if accelerator.rates and group > accelerator.max_group:
        raise InvalidInputError(
            f"query heads that share a pass in the drives of {machine.system.name}",
            got=f"{group}, where the largest kernel of {machine.device.name} has "
            f"{accelerator.max_group}",
            expected=f"1 to {accelerator.max_group}",
            fix="a model whose query heads share less, or drives with such a kernel",
        )
    return accelerator.flops_per_s(group)


def flash_bytes_per_s(machine: Machine) -> float:
    """The rate at which a drive's flash is read: by what computes beside it if something does."""
    raw = machine.need("device.flash.read_bandwidth")
    share = machine.get("program.flash_share") if machine.is_near_storage else None
    return raw if share is None else raw * share


def _verbs(machine: Machine) -> dict[str, tuple[Leg, ...]]:
    def over(way: str, size: str) -> tuple[Leg, ...]:
        """The route from a drive to the host, or back."""
        names = ["link", "port", "uplink", *NETWORK]
        ordered = names if way == "out" else names[::-1]
        return tuple(Leg(f"{name} {way}", size) for name in ordered)

    out = (Leg("flash", "bytes"), *over("out", "bytes"))
    if machine.is_near_storage:
        kept = (*out, Leg("gpu reads", "bytes"), Leg("gpu link", "bytes"))
    else:
        kept = (*out, Leg("copy threads", "bytes"), Leg(ROOT, "bytes"), Leg("gpu link", "bytes"))
    return {
        "product": (Leg("gpu", "seconds"),),
        "weights from memory": (Leg(ROOT, "bytes"), Leg("gpu link", "bytes")),
        "weights from drives": kept,
        "rows to memory": (*out, Leg("copy threads", "bytes"), Leg(ROOT, "bytes")),
        "attend on the cpu": (Leg("cpu", "bytes"),),
        "attend": (
            Leg("flash", "bytes"),
            Leg("drive memory", "twice"),
            Leg("accelerator", "flops"),
        ),
        "regenerate": (*kept, Leg("gpu", "seconds")),
        "lone rows": (Leg("lone writes", "rows"),),
        "hand over": (Leg("calls"), Leg("gpu link out", "bytes"), *over("in", "bytes")),
        "collect": (*over("out", "bytes"), Leg("gpu link", "bytes")),
        "keep in memory": (Leg("gpu link out", "bytes"), Leg(ROOT, "bytes")),
        "write": (
            Leg("gpu link out", "bytes"),
            Leg("copy threads", "bytes"),
            *over("in", "bytes"),
            Leg("flash", "flash time"),
        ),
    }
