"""What a device has found out of records, on its way to the host: their scores, and what tells that
they are the right ones, in one copy that nobody waits for before it is needed."""

from __future__ import annotations

import numpy as np
import torch

from ...streams import Event, streams_of
from ..record_layout import Evidence
from .staging import host_memory


class Findings:
    """Copied behind what is queued on the current stream of their device, an accelerator.

    Args:
        evidence: of records, if they are not checked yet.
        scores: float32, in pieces, at least one of anything.
    """

    def __init__(self, evidence: Evidence | None, scores: list[torch.Tensor]):
        parts = list[torch.Tensor]()
        if evidence is not None:
            # those of long elements first: each begins at a multiple of its element
            parts = [evidence.crc32c, evidence.header]
            if evidence.unknown is not None:
                parts.insert(1, evidence.unknown)
        self._has_evidence = evidence is not None
        self._parts = [(part.shape, part.dtype) for part in parts]
        there = torch.cat([part.reshape(-1).view(torch.uint8) for part in (*parts, *scores)])
        self._here = host_memory(there.numel(), there.device).copy_(there, non_blocking=True)
        self._copied = event_behind_now(there.device)

    def wait(self) -> None:
        """Waits for the copy, unless it has run."""
        if not self._copied.query():
            self._copied.synchronize()

    def take(self) -> tuple[Evidence | None, np.ndarray]:
        """What was given, on the CPU, the scores one after the other; once the copy has run."""
        begin, found = 0, list[torch.Tensor]()
        for shape, dtype in self._parts:
            size_bytes = shape.numel() * dtype.itemsize
            found.append(self._here[begin : begin + size_bytes].view(dtype).view(shape))
            begin += size_bytes
        scores = self._here[begin:].view(torch.float32).numpy()
        if not self._has_evidence:
            return None, scores
        return Evidence(found[-1], found[0], found[1] if len(found) > 2 else None), scores


def event_behind_now(device: torch.device) -> Event:
    """An event behind what is queued on the current stream."""
    streams = streams_of(device)
    if streams is None:
        raise TypeError(f"{device} has no streams")
    return streams.event_behind(streams.current(device))
