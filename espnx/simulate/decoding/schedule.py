"""For how many sequences X is kept in place of K and V: HILOS section 4.2."""

from __future__ import annotations

from .machine import Machine
from .parts import flash_bytes_per_s
from .shape import Shape

#: Which the scheduler chooses among: powers of two, and none.
SHARES = (0.0, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1.0)


def effective_s(machine: Machine, shape: Shape, batch: int, context: float, share: float) -> float:
    """max(T_GPU, T_SSD, T_PCI) of a layer, with X kept for that share of the sequences. K and V are
    two products, so that T_GPU is twice what the paper's formula has; weights that lie on drives
    take the same ways as rows do."""
    tokens = batch * context
    rows_bytes, x_bytes = 2.0 * shape.row_bytes * tokens, shape.x_bytes * tokens
    flash = flash_bytes_per_s(machine) * machine.n_drives
    gpu = machine.need("gpu.peak") * machine.need("gpu.gemm_share")
    weights = 0.0
    if machine.keeps_on_drives(shape.parameters):
        weights = shape.weight_bytes(batch) / shape.layers
    return max(
        share * shape.regeneration_flops * tokens / gpu,
        (share * x_bytes + (1 - share) * rows_bytes + weights) / flash,
        (share * x_bytes + weights) / _to_gpu_bytes_per_s(machine),
    )


def _to_gpu_bytes_per_s(machine: Machine) -> float:
    """The rate from all drives, over whatever is narrowest on the way."""
    known = {
        machine.need("program.gpu_bandwidth"),
        machine.need("gpu.link"),
        machine.need("device.links.device") * machine.n_drives,
        machine.get("device.links.uplink"),
        None if machine.network is None else machine.need("network.bandwidth"),
    }
    return min(each for each in known if each is not None)


def x_share(machine: Machine, shape: Shape, batch: int, context: float) -> float:
    """The one of `SHARES` with the least of that, of those that are whole sequences; of equals the
    least share."""
    if "x-cache" not in machine.techniques or machine.without == "x-cache":
        return 0.0
    whole = [share for share in SHARES if (batch * share).is_integer()]
    return min(whole, key=lambda share: (effective_s(machine, shape, batch, context, share), share))
