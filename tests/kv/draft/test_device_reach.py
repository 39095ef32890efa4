"""Reads that go further ahead for a while: no further than asked, the same rows, and the memory
comes back."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.device.interface import Reaches
from espnx.device.row_layout import RowLayout
from espnx.device.rows.file import UNIT_BYTES
from espnx.device.rows.ssd import SsdRowDevice
from espnx.storage import FaultRule, FaultyEngine
from tests.device.rows import Seen, assert_right, opened, put, queries
from tests.storage.common import until

LAYOUT = RowLayout("fp16", 64, 64)
HEADS, ROWS = range(2), 8000
WINDOW = 1 << 20
LAYER = 2 * ROWS * 256  # bytes of a ticket, whole blocks


def attended(device: SsdRowDevice, ticket: int, seen: list[Seen]) -> None:
    look = queries(LAYOUT, 1, len(HEADS), 1, torch.Generator().manual_seed(1))
    o, lse = device.attend(ticket, look)
    assert_right((o, lse), seen, look)


def read_ahead(device: SsdRowDevice, least: int) -> int:
    """What has been read and nobody has asked for yet, once it is so much."""
    assert until(lambda: device.stats().ahead_bytes >= least)
    return device.stats().ahead_bytes


@pytest.mark.parametrize("asked", [0, 1, WINDOW + 1, 3 << 20, 3 * LAYER, 1 << 40])
def test_as_far_as_asked_and_no_further(folder: Path, asked: int) -> None:
    with opened(folder, read_ahead_bytes=WINDOW) as device:
        assert isinstance(device, Reaches)
        seen = [put(device, LAYOUT, 1, HEADS, ROWS, torch.Generator())[0].use(0)]
        device.flush()
        kept_bytes = device.stats().buffer_bytes
        tickets = [device.ahead(LAYOUT, [each.use for each in seen]) for _ in range(3)]
        assert 0 < read_ahead(device, 1) <= WINDOW
        device.reach(asked)
        most = min(max(asked, WINDOW), 3 * LAYER)
        got = read_ahead(device, most - UNIT_BYTES)
        assert got <= most
        attended(device, tickets[0], seen)
        # and what each thread needs now, where the window is full of what others work on
        needed = torch.get_num_threads() * UNIT_BYTES
        assert device._stream.stats()["most_ahead_bytes"] <= max(asked, WINDOW) + needed
        device.reach(0)
        for ticket in tickets[1:]:
            attended(device, ticket, seen)
        assert device.stats().ahead_bytes == 0
        assert device.stats().bytes_asked == 3 * LAYER
        # what buffers of the wider window took is not kept
        assert device.stats().buffer_bytes <= max(kept_bytes, WINDOW + (8 << 20)) + 4 * UNIT_BYTES
        again = [device.ahead(LAYOUT, [each.use for each in seen]) for _ in range(2)]
        assert read_ahead(device, WINDOW - UNIT_BYTES) <= WINDOW
        for ticket in again:
            attended(device, ticket, seen)


def test_forgotten_reads_do_not_count(folder: Path) -> None:
    with opened(folder, read_ahead_bytes=WINDOW) as device:
        seen = [put(device, LAYOUT, 1, HEADS, ROWS, torch.Generator())[0].use(0)]
        device.ahead(LAYOUT, [each.use for each in seen])
        device.reach(LAYER)
        read_ahead(device, LAYER)
        device.forget()
        assert device.stats().ahead_bytes == 0
        ticket = device.ahead(LAYOUT, [each.use for each in seen])
        read_ahead(device, LAYER)
        attended(device, ticket, seen)


@pytest.mark.parametrize("value", [errno.EIO])
def test_a_read_ahead_that_fails_is_told_to_whoever_asks(folder: Path, value: int) -> None:
    """Not to those that ask for what came before it, and not when the window is widened."""
    rule = FaultRule("error", operation="read", nth=8, count=1, value=value)
    engine = FaultyEngine([rule], poison=True)
    with opened(folder, engine=engine, read_ahead_bytes=WINDOW) as device:
        seen = [put(device, LAYOUT, 1, HEADS, ROWS, torch.Generator())[0].use(0)]
        tickets = [device.ahead(LAYOUT, [each.use for each in seen]) for _ in range(2)]
        device.reach(2 * LAYER)
        assert until(lambda: engine.stats().fault_hits == 1)
        attended(device, tickets[0], seen)
        with pytest.raises(errors.ReadError):
            attended(device, tickets[1], seen)
        attended(device, device.ahead(LAYOUT, [each.use for each in seen]), seen)
    engine.close()
