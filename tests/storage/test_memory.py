"""Memory of an engine: nothing lies over anything else, little more is mapped than was asked, and
large requests lie together."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx.storage import NativeEngine
from tests.storage.common import in_child

HUGE, KIB, MIB = 2 << 20, 1 << 10, 1 << 20
KEEP = 32 * MIB


@pytest.fixture
def engine() -> Iterator[NativeEngine]:
    with NativeEngine(pool_bytes=KEEP) as opened:
        yield opened


SIZES = [
    256 * KIB,
    400_001,
    512 * KIB,
    640 * KIB,
    683 * KIB,
    700 * KIB,
    960 * KIB,
    MIB,
    MIB + 1,
    1400 * KIB,
    1920 * KIB,
    HUGE,
]


@pytest.mark.parametrize("size_bytes", SIZES)
def test_large_requests_lie_in_huge_pages(engine: NativeEngine, size_bytes: int) -> None:
    """A drive takes a request in as many parts as its memory lies in: two at most, in as few huge
    pages as a quarter of waste allows."""
    held = [engine.memory(size_bytes) for _ in range(16)]
    pages = [{each.data_ptr() // HUGE, (each.data_ptr() + size_bytes - 1) // HUGE} for each in held]
    assert all(len(page) <= 2 for page in pages)
    assert len(set.union(*pages)) * HUGE <= 16 * 1.25 * size_bytes + 4 * HUGE


def test_at_most_a_quarter_is_wasted() -> None:
    for size_bytes in range(256 * KIB, HUGE + 1, 4 * KIB):
        # keeps nothing, so what is mapped is this one's
        with NativeEngine(pool_bytes=4096) as engine:
            memory = engine.memory(size_bytes)
            assert memory.numel() <= engine.mapped_bytes <= 1.25 * size_bytes


def test_little_address_space_is_enough_for_one() -> None:
    """Where huge pages to cut from have no room, what is asked for may have."""

    def work() -> list[object]:
        held = []
        with NativeEngine(pool_bytes=KEEP) as engine:
            engine.memory(1)
            used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
            resource.setrlimit(resource.RLIMIT_AS, (used + MIB, resource.RLIM_INFINITY))
            held.append(engine.memory(300 * KIB))
            # Each page; too few for torch to start threads, whose stacks have no room now.
            held[0][::4096] = 1
            try:
                held.append(engine.memory(4 * MIB))
            except MemoryError:
                return ["full", len(held), engine.mapped_bytes < MIB]
            return ["room", len(held), False]

    assert in_child(work) == ["full", 1, True]


def test_memory_of_one_size(engine: NativeEngine) -> None:
    """All that was cut is used before more is mapped; what goes is used again."""
    held = [engine.memory(960 * KIB) for _ in range(8)]
    mapped = engine.mapped_bytes
    assert mapped == 8 * MIB
    del held
    held = [engine.memory(960 * KIB) for _ in range(8)]
    assert engine.mapped_bytes == mapped
    assert len({each.data_ptr() for each in held}) == 8


def test_without_room_to_keep_nothing_is_cut() -> None:
    with NativeEngine(pool_bytes=4096) as engine:
        held = [engine.memory(300 * KIB) for _ in range(5)]
        assert engine.mapped_bytes < 5 * 400 * KIB
        del held
        assert engine.mapped_bytes <= 4096


@pytest.mark.parametrize("seed", range(4))
def test_random_sizes(engine: NativeEngine, seed: int) -> None:
    """Sizes of all kinds come and go: each keeps what was written to it, and what is mapped exceeds
    what was held by what may be kept."""
    rng = np.random.default_rng(seed)
    held = list[tuple[int, torch.Tensor]]()
    most_bytes = 0
    for step in range(600):
        if held and rng.random() < 0.48:
            wanted, memory = held.pop(int(rng.integers(len(held))))
            assert memory.eq(wanted).all()
        else:
            size_bytes = int(
                rng.choice(
                    [
                        1,
                        5000,
                        70_000,
                        262_144,
                        300_000,
                        699_050,
                        983_040,
                        1 << 20,
                        1_500_000,
                        HUGE,
                        5_000_000,
                    ]
                )
            )
            memory = engine.memory(size_bytes)
            assert memory.data_ptr() % 4096 == 0
            assert memory.numel() == size_bytes
            held.append((step % 256, memory.fill_(step % 256)))
        # At most twice of what is asked for, and 64 KiB at least.
        most_bytes = max(most_bytes, sum(max(2 * each.numel(), 64 * KIB) for _, each in held))
        assert engine.mapped_bytes <= most_bytes + KEEP
    assert all(memory.eq(wanted).all() for wanted, memory in held)
    held.clear()
    del memory
    assert engine.mapped_bytes <= KEEP
