"""Tickets that wait in line hold what they were asked for, and nothing for each block that it
takes."""

from __future__ import annotations

from pathlib import Path

import torch

from espnx.benchmarks.machine.memory import rss_bytes
from espnx.device.interface import SegmentView
from espnx.device.row_layout import RowLayout
from espnx.device.rows.ssd import SsdRowDevice


def test_tickets_of_long_rows(tmp_path: Path) -> None:
    """A plan of these 2,048 blocks, made for every ticket at once, came to 40 KiB, most of it
    checksums and their numbers."""
    with_rows = 512
    layout = RowLayout("fp16", 4096, 4096)
    k = torch.zeros(1, 4, with_rows, 4096, dtype=torch.float16)
    device = SsdRowDevice(tmp_path, read_ahead_bytes=1 << 20)
    try:
        (segment,) = device.put(layout, k, k, range(4))
        device.flush()
        assert segment.memory_bytes >= 4 * 2048
        uses = [SegmentView(segment, 0, with_rows, 0)]
        for _ in range(4):
            device.ahead(layout, uses)
        before = rss_bytes()
        for _ in range(1000):
            device.ahead(layout, uses)
        assert rss_bytes() - before < 8 << 20
    finally:
        device.close()
