"""The data file: its checksums are CRC32C, its content follows from the seed, and a stale file is
made anew."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from espnx.benchmarks.io.content import (
    BLOCK_BYTES,
    Content,
    DataFile,
    aligned_memory,
    crc32c_rows,
    ensure_file,
)
from espnx.errors import DiskFullError, InvalidInputError


def said() -> tuple[list[str], object]:
    lines: list[str] = []
    return lines, lines.append


@pytest.mark.parametrize(
    ("text", "crc"),
    [
        (b"123456789", 0xE3069283),
        (bytes(32), 0x8A9136AA),
        (b"\xff" * 32, 0x62A8AB43),
        (bytes(range(32)), 0x46DD794E),
        (b"", 0),
    ],
)
def test_crc32c_of_published_vectors(text: bytes, crc: int) -> None:
    """The check value of the polynomial and the vectors of RFC 3720, B.4."""
    assert crc32c_rows(np.frombuffer(text, dtype=np.uint8)[None])[0] == crc


@pytest.mark.parametrize("generation", [0, 3, 2**63 - 1])
def test_block_sums_equal_those_of_the_bytes(generation: int) -> None:
    content = Content(seed=5)
    numbers = np.array([0, 1, 1023, 1024, 2**32 + 7, 2**51], dtype=np.int64)
    assert np.array_equal(
        content.block_crcs(numbers, generation), crc32c_rows(content.blocks(numbers, generation))
    )


@pytest.mark.parametrize("blocks", [1, 2, 17])
def test_item_sums_equal_those_of_the_bytes(blocks: int) -> None:
    content = Content(seed=5)
    first = np.array([0, 77, 1020], dtype=np.int64)
    items = np.stack(
        [content.blocks(np.arange(number, number + blocks)).reshape(-1) for number in first]
    )
    assert np.array_equal(
        content.item_crcs(first * BLOCK_BYTES, blocks * BLOCK_BYTES), crc32c_rows(items)
    )


def test_blocks_differ_by_number_generation_and_seed() -> None:
    content = Content(seed=5)
    crcs = content.block_crcs(np.arange(20_000))
    assert len(np.unique(crcs)) > 19_990  # 32 bits: a handful of the 2e8 pairs may collide
    blocks = content.blocks(np.array([3, 3 + 1024, 3]))
    assert not np.array_equal(blocks[0], blocks[1])
    assert not np.array_equal(blocks[0], content.blocks(np.array([3]), generation=1)[0])
    assert not np.array_equal(blocks[0], Content(seed=6).blocks(np.array([3]))[0])


def test_the_file_holds_the_content(data: DataFile) -> None:
    stored = np.fromfile(data.path, dtype=np.uint8).reshape(-1, BLOCK_BYTES)
    assert len(stored) == data.block_count
    assert np.array_equal(stored, data.content.blocks(np.arange(data.block_count)))


def test_a_current_file_is_used_again(data: DataFile) -> None:
    lines, say = said()
    before = data.path.stat()
    ensure_file(data.path, data.size_bytes, 1, say)
    assert not lines
    assert data.path.stat().st_ino == before.st_ino


@pytest.mark.parametrize(
    "damage",
    [
        "touched",
        "grown",
        "other size",
        "other seed",
        "no stamp",
        "half a stamp",
        "replaced",
        "missing",
    ],
)
def test_a_stale_file_is_made_anew(data: DataFile, damage: str) -> None:
    stamp, path, size_bytes, seed = (
        data.path.with_name("data.stamp.json"),
        data.path,
        data.size_bytes,
        1,
    )
    if damage == "touched":
        with open(path, "r+b") as file:
            file.write(b"x")
    elif damage == "grown":
        status = path.stat()
        with open(path, "ab") as file:
            file.write(bytes(4096))
        os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
    elif damage == "other size":
        size_bytes //= 2
    elif damage == "other seed":
        seed = 2
    elif damage == "no stamp":
        stamp.unlink()
    elif damage == "half a stamp":
        stamp.write_text(stamp.read_text()[:20])
    elif damage == "replaced":
        status, copy = path.stat(), path.with_name("copy")
        copy.write_bytes(bytes(size_bytes))
        os.utime(copy, ns=(status.st_atime_ns, status.st_mtime_ns))
        os.replace(copy, path)
    else:
        path.unlink()
    lines, say = said()
    fresh = ensure_file(path, size_bytes, seed, say)
    assert len(lines) == 1
    stored = np.fromfile(path, dtype=np.uint8).reshape(-1, BLOCK_BYTES)
    assert np.array_equal(stored, fresh.content.blocks(np.arange(fresh.block_count)))
    assert json.loads(stamp.read_text())["size_bytes"] == size_bytes


@pytest.mark.parametrize("size_bytes", [0, -4096, 4097])
def test_sizes_that_no_file_has(tmp_path: Path, size_bytes: int) -> None:
    with pytest.raises(InvalidInputError, match="multiple of 4096"):
        ensure_file(tmp_path / "data", size_bytes, 1, lambda text: None)


def test_a_full_disk_is_noticed_before_anything_is_written(tmp_path: Path) -> None:
    with pytest.raises(DiskFullError) as caught:
        ensure_file(tmp_path / "data", 1 << 60, 1, lambda text: None)
    assert caught.value.needed_bytes == 1 << 60
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("size_bytes", [1, 4096, 3 << 20])
def test_memory_is_aligned_and_writable(size_bytes: int) -> None:
    memory = aligned_memory(size_bytes)
    assert memory.shape == (size_bytes,)
    assert memory.ctypes.data % 4096 == 0
    assert (memory == 0xA5).all()
