"""Layers whose heads are unlike in width attend to unlike parts of a batch at a time, and what is
read ahead is what they ask for: no byte is read for nobody."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.kv import attention
from espnx.kv.cache import SsdCache
from espnx.kv.options import CacheOptions
from espnx.storage import NativeEngine
from tests.kv.naive import Naive, Shape, assert_right
from tests.storage.common import until

WIDTHS = (16, 64)  # of every other layer
HEADS, GROUP, TOKENS, SEQUENCES = 2, 2, 17, 6


class Batch:
    """A cache of four layers, and what one would write first of each two of them."""

    def __init__(self, folder: Path):
        self.engine = NativeEngine()
        self.cache = SsdCache(folder, 4, CacheOptions(engine=lambda: self.engine))
        self.like = [
            Naive(
                Shape(2, SEQUENCES, HEADS, GROUP, width, width),
                torch.Generator().manual_seed(width),
            )
            for width in WIDTHS
        ]

    def run(self, n: int) -> None:
        """A pass of so many new tokens."""
        before = self.like[0].count
        steps: list[Any] = [
            each
            for pair in zip(*(naive.step(n) for naive in self.like), strict=True)
            for each in pair
        ]
        self.cache.begin(before)
        found = [self.cache.attend(number, step) for number, (step, _, _) in enumerate(steps)]
        self.cache.end()
        assert_right(found, steps, before)

    def for_nobody(self) -> int:
        """Bytes that were read, and that no pass has asked for or will."""
        said = self.cache.striped.stats()
        return (
            self.engine.stats().bytes_asked
            - said.bytes_written
            - said.bytes_asked
            - (said.ahead_bytes)
        )


def test_no_byte_is_read_for_nobody(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a first pass over what is stored; behind one; where reads are put in line between passes;
    and where no pass has come to the later layers, as when a kept cache is opened."""
    # the queries of four sequences of the narrow layers, and of one of the wide ones
    monkeypatch.setattr(attention, "_PART_BYTES", 4 * 4 * HEADS * GROUP * WIDTHS[0] * TOKENS)
    batch = Batch(folder)
    cache = batch.cache
    try:
        batch.run(130)
        cache.propose(most_tokens=TOKENS)
        assert cache.proposal is not None
        for number in range(4):
            cache.proposal.ends = [batch.like[0].count] * SEQUENCES  # nothing may be rejected
            batch.run(1 + number)
            assert until(lambda: batch.for_nobody() == 0, 5.0), f"{batch.for_nobody()} bytes"
        for is_resumed in (True, False):
            cache.ahead.forget()
            lost = batch.for_nobody()
            if is_resumed:
                cache.read_ahead(0)
            else:
                cache.ahead.query_heads = 0
                for rows in cache.rows.every:
                    rows.query_heads = 0
            batch.run(1)
            assert until(lambda lost=lost: batch.for_nobody() == lost, 5.0), (
                f"{batch.for_nobody() - lost} bytes, {is_resumed}"
            )
        assert [len(cache.ahead._parts(rows, SEQUENCES)) for rows in cache.rows.every] == [
            2,
            6,
            2,
            6,
        ]
    finally:
        cache.close()
        batch.engine.close()
