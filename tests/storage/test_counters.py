"""What was asked, what moved, in how many requests: exact numbers, so that merging and widening
cannot drift unnoticed."""

from __future__ import annotations

from pathlib import Path

import pytest

from espnx.storage import FaultRule, FileHandle, Plan
from tests.storage.common import BLOCK, Case, OpenEngine, make_file

KIB = 1024
SIZE = 1024 * KIB + 100  # the last block holds 100 bytes
LIMIT = 64 * KIB

# name, items (offset, size), gap_bytes, then (requests, bytes moved) with 4 KiB blocks and without
CASES = [
    ("inside a block", [(5, 10)], 0, (1, BLOCK), (1, 10)),
    ("across two blocks", [(4090, 10)], 0, (1, 2 * BLOCK), (1, 10)),
    ("a whole block", [(4096, 4096)], 0, (1, BLOCK), (1, 4096)),
    ("a byte more than a block", [(4096, 4097)], 0, (1, 2 * BLOCK), (1, 4097)),
    ("twice the same", [(5, 10), (5, 10)], 0, (1, BLOCK), (1, 10)),
    ("one inside the other", [(0, 5000), (100, 10)], 0, (1, 2 * BLOCK), (1, 5000)),
    ("overlapping", [(0, 5000), (4000, 5000)], 0, (1, 3 * BLOCK), (1, 9000)),
    ("neighbours", [(0, 4096), (4096, 4096)], 0, (1, 2 * BLOCK), (1, 8192)),
    ("neighbours, last first", [(4096, 4096), (0, 4096)], 0, (1, 2 * BLOCK), (1, 8192)),
    ("in neighbouring blocks", [(0, 10), (4106, 10)], 0, (1, 2 * BLOCK), (2, 20)),
    ("a hole of one block, no gap allowed", [(0, 10), (8192, 10)], 0, (2, 2 * BLOCK), (2, 20)),
    (
        "a hole of one block, a gap one byte too small",
        [(0, 10), (8192, 10)],
        4095,
        (2, 2 * BLOCK),
        (2, 20),
    ),
    ("a hole of one block, gap of a block", [(0, 10), (8192, 10)], 4096, (1, 3 * BLOCK), (2, 20)),
    ("a hole of 90 bytes, gap of 90", [(0, 10), (100, 10)], 90, (1, BLOCK), (1, 110)),
    ("a hole of 90 bytes, gap of 89", [(0, 10), (100, 10)], 89, (1, BLOCK), (2, 20)),
    (
        "a gap beyond any number",
        [(0, 10), (20 * KIB, 10)],
        2**63 - 1,
        (1, 6 * BLOCK),
        (1, 20 * KIB + 10),
    ),
    (
        "joined exactly as long as a request",
        [(0, 32 * KIB), (32 * KIB, 32 * KIB)],
        0,
        (1, LIMIT),
        (1, LIMIT),
    ),
    (
        "joined longer than a request",
        [(0, 32 * KIB), (32 * KIB, 36 * KIB)],
        0,
        (2, 68 * KIB),
        (2, 68 * KIB),
    ),
    ("exactly a request", [(0, LIMIT)], 0, (1, LIMIT), (1, LIMIT)),
    ("a byte more than a request", [(0, LIMIT + 1)], 0, (2, LIMIT + BLOCK), (2, LIMIT + 1)),
    (
        "five requests and a byte",
        [(0, 5 * LIMIT + 1)],
        0,
        (6, 5 * LIMIT + BLOCK),
        (6, 5 * LIMIT + 1),
    ),
    ("inside a long one", [(0, 3 * LIMIT), (2 * LIMIT, 100)], 0, (3, 3 * LIMIT), (3, 3 * LIMIT)),
    ("the end of the file", [(SIZE - 10, 10)], 0, (1, 100), (1, 10)),
    ("the end and the block before", [(SIZE - 110, 110)], 0, (1, BLOCK + 100), (1, 110)),
    ("nothing", [(0, 0), (SIZE, 0)], 4096, (0, 0), (0, 0)),
]


@pytest.mark.parametrize("case", CASES, ids=[case[0] for case in CASES])
def test_requests_and_bytes(
    disk_path: str, case: tuple, open_engine: OpenEngine, tmp_path: Path
) -> None:
    _, items, gap, in_blocks, in_bytes = case
    data = make_file(tmp_path / "a", SIZE)
    engine = open_engine(disk_path, request_bytes=LIMIT)
    for direct in (None, False):
        file = engine.open(tmp_path / "a", direct=direct)
        before = engine.stats()
        plan = Plan.of(file, [offset for offset, _ in items], [size for _, size in items])
        future = engine.read(plan, gap_bytes=gap)
        Case(plan, [data[offset : offset + size] for offset, size in items]).check(
            future.wait(), future.position_bytes
        )
        asked = sum(size for _, size in items)
        expected = in_blocks if file.alignment_bytes == BLOCK else in_bytes
        assert (future.request_count, future.bytes_moved, future.bytes_asked) == (
            *expected,
            asked,
        ), f"direct={file.direct}"
        after = engine.stats()
        assert (
            after.requests - before.requests,
            after.bytes_moved - before.bytes_moved,
            after.bytes_asked - before.bytes_asked,
        ) == (*expected, asked)
        assert (after.retries, after.failures) == (0, 0)


def test_files_are_never_merged(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    engine = open_engine(path)
    for name in "ab":
        make_file(tmp_path / name, 8192)
    files: list[FileHandle] = [engine.open(tmp_path / name) for name in "ab"]
    future = engine.read(
        Plan.of([files[0], files[1], files[0]], [0, 4096, 4096], [4096] * 3), gap_bytes=2**40
    )
    future.wait()
    assert future.request_count == 2


@pytest.mark.parametrize(
    ("moved_first", "continues_at"),
    [(4096, 4096), (5000, 4096), (8191, 4096), (8192, 8192), (1, 0), (0, 0)],
)
def test_a_short_read_goes_on_at_the_last_whole_block(
    disk_path: str, moved_first: int, continues_at: int, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """The engine counts what crossed the queue, retries included; the future counts each byte of
    the plan once."""
    data = make_file(tmp_path / "a", 16_384)
    engine = open_engine(
        disk_path, [FaultRule("short", operation="read", count=1, value=moved_first)]
    )
    file = engine.open(tmp_path / "a")
    future = engine.read(Plan.of(file, [0], [16_384]))
    assert future.wait().numpy().tobytes() == data
    stats = engine.stats()
    goes_on = continues_at if file.direct else moved_first
    assert stats.retries == 1
    assert stats.requests == 1
    assert stats.bytes_moved == moved_first + 16_384 - goes_on
    assert future.bytes_moved == 16_384
    assert stats.fault_hits == 1


def test_write_counters(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    import torch

    engine = open_engine(path, request_bytes=LIMIT)
    file = engine.open(tmp_path / "w", "w", direct=False)
    source = torch.zeros(3 * LIMIT + 5, dtype=torch.uint8)
    future = engine.write(Plan.of(file, [0, LIMIT], [10, 2 * LIMIT + 5], [0, LIMIT]), source)
    future.wait()
    assert (future.request_count, future.bytes_asked, future.bytes_moved) == (
        4,
        2 * LIMIT + 15,
        2 * LIMIT + 15,
    )
    stats = engine.stats()
    assert (stats.requests, stats.bytes_asked, stats.bytes_moved) == (
        4,
        2 * LIMIT + 15,
        2 * LIMIT + 15,
    )
