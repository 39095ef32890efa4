"""Page reads of a drive: what both walk."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from espnx.simulate.queues import Part, Step

PAGE_BYTES = 16384
CHANNELS, WAYS, THREADS, OUTSTANDING = 8, 8, 64, 32


@dataclass(frozen=True, eq=False)
class Reads:
    """Attributes: parts, routes, route, client: as `espnx.simulate.queues.walk` takes them."""

    parts: tuple[Part, ...]
    routes: tuple[tuple[Step, ...], ...]
    route: np.ndarray
    client: np.ndarray

    @property
    def steps(self) -> int:
        """Parts that a read passes."""
        return len(self.routes[0])


def page_reads(n: int, seed: int) -> Reads:
    """So many, of threads that each wait for theirs: the host, a place in the drive until the end,
    firmware, a die that keeps its page until the channel has taken it, the channel, the correction
    of errors, the drive's memory, the link."""
    host, queue, firmware, correction, memory, link, first = range(7)
    n_dies = CHANNELS * WAYS
    parts = [
        Part(4096, 5e-6),
        Part(OUTSTANDING),
        Part(1, 2e-6),
        Part(2, 1e-6, 4e9),
        Part(1, 0.0, 12e9),
        Part(1, 0.0, 3.5e9),
        *(Part(1, 0.0, 800e6) for _ in range(CHANNELS)),
        *(Part(1, 40e-6) for _ in range(n_dies)),
    ]
    routes = tuple(
        (
            Step(host),
            Step(queue, until=7),
            Step(firmware),
            Step(first + CHANNELS + die, until=4),
            Step(first + die % CHANNELS, PAGE_BYTES),
            Step(correction, PAGE_BYTES),
            Step(memory, PAGE_BYTES),
            Step(link, PAGE_BYTES),
        )
        for die in range(n_dies)
    )
    dies = np.random.default_rng(seed).integers(0, n_dies, n)
    return Reads(tuple(parts), routes, dies, np.arange(n) % THREADS)
