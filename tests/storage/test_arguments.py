"""What is wrong with a plan, an option or a name is said at once, as InvalidInputError or its
neighbour, and nothing is read."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import PATHS, FaultRule, NativeEngine, Plan
from espnx.storage import open_engine as open_by_name
from tests.storage.common import CANARY, OpenEngine, make_file, raw, read_bytes

I64 = torch.int64
LARGEST = 2**63 - 1


@pytest.fixture
def engine(path: str, open_engine: OpenEngine) -> NativeEngine:
    return open_engine(path)


def numbers(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=I64)


@pytest.mark.parametrize(
    "field", ["file", "offset_bytes", "size_bytes", "out_offset_bytes", "crc32c"]
)
@pytest.mark.parametrize(
    "bad",
    [
        torch.zeros(2, dtype=torch.int32),
        torch.zeros(2, dtype=torch.float64),
        torch.zeros(2, dtype=torch.uint8),
        torch.zeros(3, dtype=I64),
        torch.zeros(1, dtype=I64),
        torch.zeros(0, dtype=I64),
        torch.zeros(2, 1, dtype=I64),
        torch.tensor(0, dtype=I64),
        torch.zeros(2, dtype=I64, device="meta"),
    ],
    ids=[
        "int32",
        "float64",
        "uint8",
        "too long",
        "too short",
        "empty",
        "two dimensions",
        "no dimension",
        "meta device",
    ],
)
def test_columns_of_a_plan(
    engine: NativeEngine, field: str, bad: torch.Tensor, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    columns = {
        "file": numbers(file.number, file.number),
        "offset_bytes": numbers(0, 1),
        "size_bytes": numbers(1, 1),
        "out_offset_bytes": numbers(0, 1),
        "crc32c": numbers(0, 0),
    }
    columns[field] = bad
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan(**columns), torch.zeros(2, dtype=torch.uint8))
    assert engine.stats().requests == 0


def test_columns_need_not_be_contiguous(engine: NativeEngine, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    table = numbers(3, 7, 20, 9).reshape(2, 2)
    future = engine.read(Plan(numbers(file.number).expand(2), table[:, 0], table[:, 1]))
    memory, places = future.wait(), future.position_bytes.tolist()
    assert [raw(memory[at : at + n]) for at, n in zip(places, [7, 9], strict=True)] == [
        data[3:10],
        data[20:29],
    ]


@pytest.mark.parametrize(
    ("offset", "size"),
    [
        (-1, 1),
        (0, -1),
        (-1, -1),
        (-(2**63), 1),
        (0, -(2**63)),
        (LARGEST, 1),
        (1, LARGEST),
        (LARGEST, LARGEST),
        (LARGEST - 8192, 1),
        (2**62, 2**62),
    ],
)
def test_numbers_out_of_range(engine: NativeEngine, offset: int, size: int, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    plan = Plan.of(file, [0, offset], [1, size])
    with pytest.raises((errors.InvalidInputError, errors.TruncatedFileError)):
        engine.read(plan)
    target = engine.open(tmp_path / "w", "w", direct=False)
    with pytest.raises(errors.InvalidInputError):
        engine.write(
            Plan.of(target, [0, offset], [1, size], [0, 0]), torch.zeros(100, dtype=torch.uint8)
        )
    assert engine.stats().requests == 0


@pytest.mark.parametrize(
    ("to", "size"),
    [(-1, 1), (0, 11), (10, 1), (11, 0), (LARGEST, 1), (-(2**63), 1), (5, 6)],
    ids=str,
)
def test_places_outside_the_callers_memory(
    engine: NativeEngine, to: int, size: int, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    out = torch.full((10,), CANARY, dtype=torch.uint8)
    with pytest.raises(errors.InvalidInputError, match="descriptor 1"):
        engine.read(Plan.of(file, [0, 0], [10, size], [0, to]), out)
    writable = engine.open(tmp_path / "w", "w", direct=False)
    with pytest.raises(errors.InvalidInputError, match="descriptor 1"):
        engine.write(Plan.of(writable, [0, 0], [10, size], [0, to]), out)
    assert raw(out) == bytes([CANARY]) * 10


def test_sums_of_sizes_do_not_overflow(
    disk_path: str, open_engine: OpenEngine, tmp_path: Path
) -> None:
    """A sparse file can be longer than any memory, and eight times 2**61 bytes are 0 in 64 bits."""
    folder = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else tmp_path
    sparse = folder / f"espnx-sparse-{os.getpid()}"
    size = 2**61
    try:
        with open(sparse, "wb") as stream:
            try:
                stream.truncate(2**62)
            except OSError:
                stream.truncate(size := 2**43)
        engine = open_engine(disk_path)
        file = engine.open(sparse)
        count = 8 if size == 2**61 else 2**10
        with pytest.raises((errors.InvalidInputError, MemoryError)):
            engine.read(
                Plan.of(
                    file,
                    [4096 * i for i in range(count)],
                    [size // 4 if size < 2**61 else size] * count,
                )
            )
        assert engine.stats().requests == 0
        assert read_bytes(engine, file, 10, 100) == bytes(100)
    finally:
        sparse.unlink(missing_ok=True)


@pytest.mark.parametrize(
    "memory",
    [
        torch.zeros(10, dtype=torch.int8),
        torch.zeros(10, dtype=torch.float32),
        torch.zeros(20, dtype=torch.uint8)[::2],
        torch.zeros(10, dtype=torch.uint8, device="meta"),
    ],
    ids=["int8", "float32", "strided", "meta device"],
)
def test_memory_of_the_wrong_kind(
    engine: NativeEngine, memory: torch.Tensor, tmp_path: Path
) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan.of(file, [0], [10], [0]), memory)


def test_memory_and_places_come_together(engine: NativeEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    writable = engine.open(tmp_path / "w", "w")
    memory = torch.zeros(10, dtype=torch.uint8)
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan.of(file, [0], [10]), memory)
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan.of(file, [0], [10], [0]))
    with pytest.raises(errors.InvalidInputError):
        engine.write(Plan.of(writable, [0], [10]), memory)


@pytest.mark.parametrize(
    "options",
    [{"gap_bytes": -1}, {"deadline_s": 0.0}, {"deadline_s": -1.0}, {"deadline_s": float("nan")}],
    ids=str,
)
def test_options_of_a_read(engine: NativeEngine, options: dict[str, float], tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan.of(file, [0], [10]), **options)
    assert (
        read_bytes(engine, file, 0, 10, deadline_s=float("inf"))
        == (tmp_path / "a").read_bytes()[:10]
    )


@pytest.mark.parametrize("value", [-1, 2**32, -(2**63), LARGEST])
def test_a_checksum_is_a_32_bit_number(engine: NativeEngine, value: int, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan.of(file, [0], [10], crc32c=[value]))


@pytest.mark.parametrize(
    "options",
    [
        {"queue_depth": 0},
        {"queue_depth": 4097},
        {"threads": 0},
        {"threads": 1025},
        {"request_bytes": 0},
        {"request_bytes": 4095},
        {"request_bytes": 4097},
        {"request_bytes": -4096},
        {"request_bytes": 2**31},
        {"rules": [FaultRule("catch fire")]},
    ],
    ids=str,
)
def test_options_of_an_engine(path: str, options: dict[str, int]) -> None:
    with pytest.raises(errors.InvalidInputError):
        NativeEngine(path, **options)


@pytest.mark.parametrize("name", ["", "URING", "gdsx", "posix "])
def test_unknown_paths(name: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=", ".join(PATHS)):
        open_by_name(name)
    with pytest.raises(errors.InvalidInputError):
        NativeEngine(name)


def test_a_closed_file(engine: NativeEngine, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file, other = engine.open(tmp_path / "a"), engine.open(tmp_path / "a")
    engine.close_file(file)
    for call in (
        lambda: engine.read(Plan.of(file, [0], [10])),
        lambda: engine.read(Plan.of([other, file], [0, 0], [10, 0])),
        lambda: engine.close_file(file),
        lambda: engine.sync(file),
        lambda: engine.truncate(file, 10),
        lambda: engine.allocate(file, 10),
    ):
        with pytest.raises(errors.InvalidInputError):
            call()
    assert len(read_bytes(engine, other, 0, 10)) == 10


@pytest.mark.parametrize("number", [-1, 1, 2**31, LARGEST, -(2**63)])
def test_a_file_that_never_was(engine: NativeEngine, number: int, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    number = max(-(2**63), min(LARGEST, number + (file.number if abs(number) < 2**40 else 0)))
    with pytest.raises(errors.InvalidInputError):
        engine.read(Plan(numbers(number), numbers(0), numbers(10)))


def test_the_file_of_another_engine(path: str, open_engine: OpenEngine, tmp_path: Path) -> None:
    """Both engines' first file: reading one through the other would be the wrong bytes without a
    word."""
    one, other = open_engine(path), open_engine(path)
    make_file(tmp_path / "a", 100, seed=1)
    make_file(tmp_path / "b", 100, seed=2)
    mine, theirs = one.open(tmp_path / "a"), other.open(tmp_path / "b")
    assert mine.number != theirs.number
    for call in (
        lambda: one.read(Plan.of(theirs, [0], [10])),
        lambda: one.sync(theirs),
        lambda: one.close_file(theirs),
    ):
        with pytest.raises(errors.InvalidInputError):
            call()


def test_writing_what_is_open_for_reading(engine: NativeEngine, tmp_path: Path) -> None:
    data = make_file(tmp_path / "a", 8192)
    file = engine.open(tmp_path / "a")
    with pytest.raises(errors.InvalidInputError, match="reading"):
        engine.write(Plan.of(file, [0], [4096], [0]), torch.zeros(4096, dtype=torch.uint8))
    assert (tmp_path / "a").read_bytes() == data


@pytest.mark.parametrize(
    ("offset", "size"), [(0, 101), (100, 1), (101, 1), (99, 2), (2**40, 10), (0, 5000)]
)
def test_reading_past_the_end(engine: NativeEngine, offset: int, size: int, tmp_path: Path) -> None:
    make_file(tmp_path / "a", 100)
    file = engine.open(tmp_path / "a")
    with pytest.raises(errors.TruncatedFileError) as caught:
        engine.read(Plan.of(file, [0, offset], [10, size]))
    assert (caught.value.path, caught.value.offset_bytes, caught.value.size_bytes) == (
        str(tmp_path / "a"),
        offset,
        size,
    )
    assert "100" in str(caught.value)


def test_names(engine: NativeEngine, tmp_path: Path) -> None:
    """A missing file, a directory, a FIFO, a name with a zero byte, an unknown mode; and names that
    are not UTF-8, which are good."""
    with pytest.raises(errors.FileMissingError) as missing:
        engine.open(tmp_path / "missing")
    assert not isinstance(missing.value, errors.StoreNotFoundError), "a file is not a store"
    assert (missing.value.path, missing.value.errno) == (str(tmp_path / "missing"), errno.ENOENT)
    with pytest.raises(FileNotFoundError):
        engine.open("")
    with pytest.raises(errors.StorageError):
        engine.open(tmp_path)
    with pytest.raises(errors.StorageError):
        engine.open(tmp_path / "no" / "such" / "folder", "r+")
    with pytest.raises(errors.InvalidInputError):
        engine.open(tmp_path / "a", "a+")
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(errors.StorageError):
        engine.open(tmp_path / "fifo")
    data = make_file(tmp_path / "a", 100)
    with pytest.raises(errors.InvalidInputError):
        engine.open(f"{tmp_path}/a\0b")
    odd = os.fsdecode(os.fsencode(tmp_path) + b"/\xff name \xfe")
    os.rename(tmp_path / "a", odd)
    file = engine.open(odd)
    assert read_bytes(engine, file, 0, 100) == data
    with pytest.raises(errors.TruncatedFileError) as caught:
        read_bytes(engine, file, 0, 101)
    assert caught.value.path == odd
    assert read_bytes(engine, engine.open(os.fsencode(odd)), 0, 100) == data
