"""Ids and texts of a part: groups of rows of any size, read in any order; tables that say something
else than the rows."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine
from tests.retrieval.common import build, corpus, replace_section, rows_of_part, section_places

COUNT = 300


def texts() -> list[str]:
    """Short ones by the dozen, empty ones, and some that are larger than a group or than
    several."""
    rng = random.Random(1)
    sizes = [
        rng.choice([0, 1, 7, 60, 60, 60, 900, 4000, 4084, 4096, 20_000]) if n > 150 else 5
        for n in range(COUNT)
    ]
    return [("é" * size)[:size] for size in sizes]


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[Any, str]]:
    path = tmp_path_factory.mktemp("texts") / "s"
    vectors = [document.vectors for document in corpus(COUNT)]
    ids = [n if n % 3 else f"doc-{n}" * (1 + n % 5) for n in range(COUNT)]
    build(
        path,
        [
            espnx.Document(i, text, each)
            for i, text, each in zip(ids, texts(), vectors, strict=True)
        ],
    )
    return path, dict(zip(ids, texts(), strict=True))


def part(path: Path) -> Path:
    return next(path.rglob("part.bin"))


def groups(path: Path) -> tuple[list[int], list[int]]:
    """(records, bytes) of each group."""
    place = section_places(part(path))["groups"]
    table = np.frombuffer(
        place.path.read_bytes()[place.offset_bytes : place.offset_bytes + place.size_bytes], "<i8"
    ).reshape(2, -1)
    records, sizes = np.diff(table).tolist()
    return records, sizes


def test_groups(store: tuple[Path, dict[Any, str]]) -> None:
    """No larger than a block unless of one row, and none is left smaller than it has to be."""
    records, sizes = groups(store[0])
    assert sum(records) == COUNT
    assert all(size <= 4096 or count == 1 for count, size in zip(records, sizes, strict=True))
    assert (min(records), max(records) > 9) == (1, True)
    rows = [len(row.data) for row in rows_of_part(part(store[0]))]
    for group in range(len(records) - 1):
        following = 4 + rows[sum(records[: group + 1])]
        assert records[group] == 64 or sizes[group] + following > 4096


def test_groups_of_short_rows(tmp_path: Path) -> None:
    build(
        tmp_path / "s",
        [espnx.Document(n, "", document.vectors) for n, document in enumerate(corpus(COUNT))],
    )
    records, sizes = groups(tmp_path / "s")
    assert records == [64, 64, 64, 64, 44]
    assert sizes == [count * (4 + 12 + 8) for count in records]


@pytest.mark.parametrize("engine", ["uring", "posix", "memory"])
def test_any_order(store: tuple[Path, dict[Any, str]], engine: str) -> None:
    path, known = store
    rng = random.Random(2)
    with NativeEngine(engine) as own, EmbeddingStore(path, own) as opened:
        before = opened.resident_bytes
        assert opened.texts.get([]) == []
        everything = opened.texts.get(range(COUNT))
        assert dict(everything) == known
        assert before < opened.resident_bytes <= before + 16 * (COUNT + 1)
        for _ in range(20):
            numbers = [rng.randrange(COUNT) for _ in range(rng.choice([1, 2, 10, 500]))]
            assert opened.texts.get(numbers) == [everything[number] for number in numbers]
        found = opened.texts.numbers([identifier for identifier, _ in everything]).tolist()
        assert found == list(range(COUNT))


def test_one_read_for_all_hits(
    store: tuple[Path, dict[Any, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with NativeEngine("posix") as own, EmbeddingStore(store[0], own) as opened:
        opened.texts.get([0])  # the table comes with the first
        reads = list[Any]()
        read = own.read
        monkeypatch.setattr(
            own, "read", lambda plan, **options: reads.append(plan) or read(plan, **options)
        )
        opened.texts.get([5, 299, 17, 160, 5])
        assert len(reads) == 1


@pytest.mark.parametrize(
    "change", ["shorter", "odd", "swapped", "shifted", "beyond", "negative", "empty"]
)
def test_a_table_that_does_not_fit(
    store: tuple[Path, dict[Any, str]], tmp_path: Path, change: str
) -> None:
    """Whole in itself, with every checksum right: no wrong text comes of it."""
    victim = tmp_path / "s"
    build(
        victim,
        [
            espnx.Document(n, text, document.vectors)
            for n, (text, document) in enumerate(zip(texts(), corpus(COUNT), strict=True))
        ],
    )
    place = section_places(part(victim))["groups"]
    data = place.path.read_bytes()[place.offset_bytes : place.offset_bytes + place.size_bytes]
    table = np.frombuffer(data, "<i8").reshape(2, -1).copy()
    if change == "swapped":
        table[1, [2, 3]] = table[1, [3, 2]]
    elif change == "shifted":
        table[1, 3] += 4
    elif change == "beyond":
        table[:, -1] += 1
    elif change == "negative":
        table[0, 1] = -1
    bent = {"shorter": table[:, :-1].tobytes(), "odd": data[:-8], "empty": b""}.get(
        change, table.tobytes()
    )
    replace_section(victim, part(victim), "groups", bent)
    with (
        NativeEngine("auto") as own,
        EmbeddingStore(victim, own) as opened,
        pytest.raises((errors.FormatError, errors.ChecksumError)),
    ):
        opened.texts.get(range(COUNT))
