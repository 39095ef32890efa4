"""How fast a kernel can be at most, from the instructions of its main loop, whatever else a GPU
does: a bound, not a forecast.

Sources: NVIDIA's tuning guide for Hopper and its data sheets: 4 warp-instructions a cycle and
multiprocessor, 128 bytes a cycle of its shared memory, 65536 registers, 227 KiB of shared memory (1
KiB of each block is the system's), 64 warps, 32 blocks. Tensor cores: 4096 FLOP a cycle dense in
fp16, twice that in int8, of which ``mma.sync`` reaches about 0.6 (taken to be the same in int8).
"""

from __future__ import annotations

from typing import Any, NamedTuple

MULTIPROCESSORS, CLOCK_HZ = 132, 1.755e9
ISSUED = 4
SHARED_BYTES_A_CYCLE = 128
WGMMA_FLOP_A_CYCLE, MMA_FLOP_A_CYCLE = 4096, 0.6 * 4096
REGISTERS, SHARED_BYTES, WARPS, BLOCKS = 65536, 227 * 1024, 64, 32
RATE_MIN = 1.3  # of the memory's
IN_FLIGHT_MIN = 32 * 1024
MEMORY_BYTES_S = {"H100": 3.35e12, "H200": 4.8e12}


class Bounds(NamedTuple):
    """In bytes a second of rows, and bytes."""

    issue: float
    tensor: float
    shared: float
    in_flight_bytes: int
    resident_blocks: int

    @property
    def rate(self) -> float:
        return min(self.issue, self.tensor, self.shared)

    def meets(self, gpu: str) -> bool:
        """The bar for kernels that are to be as fast as memory is."""
        return self.rate >= RATE_MIN * MEMORY_BYTES_S[gpu] and self.in_flight_bytes >= IN_FLIGHT_MIN


def bounds(row: dict[str, Any]) -> Bounds:
    """Of a row of the table."""
    warps = row["threads"] // 32
    registers = -(-row["registers"] // 8) * 8 * row["threads"]
    resident = min(
        REGISTERS // registers, SHARED_BYTES // (row["shared_bytes"] + 1024), WARPS // warps, BLOCKS
    )
    cycles_a_second = MULTIPROCESSORS * CLOCK_HZ
    tensor = warps * (row["mma_flop"] / MMA_FLOP_A_CYCLE + row["wgmma_flop"] / WGMMA_FLOP_A_CYCLE)
    shared = row["shared_moved_bytes"] / SHARED_BYTES_A_CYCLE

    def rate(cycles: float) -> float:
        return row["tile_bytes"] / cycles * cycles_a_second if cycles else float("inf")

    return Bounds(
        rate(warps * row["instructions"] / ISSUED),
        rate(tensor),
        rate(shared),
        resident * row["in_flight_bytes"],
        resident,
    )
