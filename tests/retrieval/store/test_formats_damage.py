"""Damage to stores in every record format, in both tiers: a typed error that names the place, from
search and from verify, or no effect."""

from __future__ import annotations

import json
import os
import random
import shutil
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load, save

import espnx
from espnx import errors
from espnx.retrieval.search.result import Hit
from espnx.retrieval.store.store import EmbeddingStore
from espnx.retrieval.store.tier import Tier
from espnx.storage import NativeEngine
from espnx.storage.files import crc32c
from tests.retrieval.common import (
    D_CLS,
    EVERYTHING,
    build,
    corpus,
    memory_folder,
    queries,
    replace_section,
    section_places,
)

DIM, COUNT = 32, 24
#: Each format of the records with one of the coarse tier, so that all of both occur.
COARSE = {
    "fp32": "bit1", "fp16": "int8", "bf16": "residual1", "int8": "residual2",
    "bit1": "residual4", "residual1": "bit1", "residual2": "residual1", "residual4": "int8",
}  # fmt: skip
RESIDUAL_TIERS = [
    (fmt, tier)
    for fmt, coarse in COARSE.items()
    for tier, name in (("full", fmt), ("coarse", coarse))
    if name.startswith("residual")
]
QUERY = queries(1, dim=DIM)[0]
FILES = {"full": "segment-00000.bin", "coarse": "coarse-00000.bin"}


@dataclass
class Victim:
    """A store that is damaged and mended again while an index of it stays open.

    Attributes:
        tier: the one that suffers. right: hits of `search`.
    """

    path: Path
    index: espnx.Index
    tier_name: str
    right: list[Hit]

    @property
    def tier(self) -> Tier:
        tier = self.index.store.full if self.tier_name == "full" else self.index.store.coarse
        assert tier is not None
        return tier

    @property
    def file(self) -> Path:
        return self.path / "gen-000001" / FILES[self.tier_name]

    @property
    def meta(self) -> Path:
        return self.path / "gen-000001/part.bin"

    def search(self, **options: Any) -> list[Hit]:
        """Reads every record of the tier, unless told otherwise."""
        return search(self.index, self.tier_name, **options)

    def verify(self) -> int:
        return self.index.store.verify()

    def place(self, number: int) -> tuple[int, int]:
        """(offset, size) of a record."""
        _, offset, size = self.tier.locate(np.array([number]))
        return int(offset[0]), int(size[0])

    def n_tokens(self, number: int) -> int:
        return int(self.tier.n_tokens[number])

    @contextmanager
    def bent(self, change: Callable[[bytearray], None]) -> Iterator[None]:
        """The file is another one, until the end of the block; then everything is as it was."""
        original = self.file.read_bytes()
        data = bytearray(original)
        change(data)
        overwrite(self.file, bytes(data))
        try:
            yield
        finally:
            overwrite(self.file, original)
        assert self.search() == self.right

    def seal(self, data: bytearray, number: int) -> None:
        """Gives a record the checksum of what it holds now."""
        at, size = self.place(number)
        struct.pack_into("<I", data, at, crc32c(bytes(data[at + 4 : at + size]), self.tier.salt))

    def assert_noticed(self, number: int, kind: type[errors.StorageError]) -> None:
        """Search and verify name this record, its file and its place."""
        for attempt in (self.search, self.verify):
            with pytest.raises(errors.StorageError) as caught:
                attempt()
            error = caught.value
            assert type(error) is kind, error
            assert (error.path, error.offset_bytes, error.size_bytes) == (
                str(self.file),
                *self.place(number),
            )
            assert f"record {number} is not what was written" in str(error)
            assert str(self.file) in str(error)


def search(index: espnx.Index, tier: str, **options: Any) -> list[Hit]:
    cascade = {} if tier == "full" else {"cascade": 5}
    return index.search(
        QUERY, **{"k": COUNT, "candidates": EVERYTHING, "nprobe": EVERYTHING, **cascade, **options}
    ).hits


def overwrite(path: Path, data: bytes) -> None:
    """In place: an open index sees it."""
    with open(path, "r+b") as file:
        file.write(data)
        file.truncate()


@pytest.fixture(scope="module")
def stores() -> Iterator[Path]:
    with memory_folder() as path:
        for fmt, coarse in COARSE.items():
            options: dict[str, Any] = {
                "dims": (D_CLS, DIM),
                "format": fmt,
                "coarse": coarse,
                "nlist": 2,
            }
            build(path / fmt, corpus(COUNT, dim=DIM, tokens=(1, 9)), **options)
        yield path


@pytest.fixture(
    scope="module", params=[(fmt, tier) for fmt in COARSE for tier in FILES], ids="-".join
)
def victim(request: pytest.FixtureRequest, stores: Path) -> Iterator[Victim]:
    yield from opened(stores, *request.param)


@pytest.fixture(scope="module", params=RESIDUAL_TIERS, ids="-".join)
def residual(request: pytest.FixtureRequest, stores: Path) -> Iterator[Victim]:
    yield from opened(stores, *request.param)


def opened(stores: Path, fmt: str, tier: str) -> Iterator[Victim]:
    with memory_folder() as folder:
        shutil.copytree(stores / fmt, folder / "s")
        with espnx.open(folder / "s") as index:
            yield Victim(folder / "s", index, tier, search(index, tier))


def flip(at: int, bit: int = 0) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        data[at] ^= 1 << bit % 8

    return change


def test_a_bit_anywhere_in_a_record(victim: Victim) -> None:
    """Header byte by byte, CLS vector, rows from the first to the last byte, padding."""
    schema = victim.tier.schema
    padded = next(
        (
            n
            for n in range(COUNT)
            if schema.fixed_bytes + victim.n_tokens(n) * schema.row_bytes < victim.place(n)[1]
        ),
        1,
    )
    for number in {0, padded, COUNT - 1}:
        begin, size = victim.place(number)
        rows, rows_end = (
            schema.fixed_bytes,
            schema.fixed_bytes + victim.n_tokens(number) * schema.row_bytes,
        )
        inside = {
            *range(16),
            16,
            rows - 1,
            rows,
            rows + 3,
            (rows + rows_end) // 2,
            rows_end - 1,
            rows_end,
            size - 1,
        } - {size}
        for at in sorted(inside):
            with victim.bent(flip(begin + at, bit=at)):
                victim.assert_noticed(number, errors.ChecksumError)


def test_bytes_that_belong_to_no_record(victim: Victim) -> None:
    places = [victim.place(number) for number in range(COUNT)]
    dead = set(range(4096, victim.file.stat().st_size)) - {
        at for begin, size in places for at in range(begin, begin + size)
    }
    for at in random.Random(1).sample(sorted(dead), 3):
        with victim.bent(flip(at)):
            assert victim.search() == victim.right
            assert victim.verify() == COUNT


def test_a_header_that_lies_under_a_right_checksum(victim: Victim) -> None:
    number = 5
    at, _ = victim.place(number)
    tokens, own = victim.n_tokens(number), victim.tier.schema.format_number
    right = struct.pack("<HBBQ", tokens, own, 0xE5, number)

    def said(header: bytes) -> str:
        n_tokens, fmt, magic, claimed = struct.unpack("<HBBQ", header)
        other = "" if fmt == own else rf" in format {fmt} \(\w+\)"
        return f"record {claimed} with {n_tokens} tokens{other}" + (
            "" if magic == 0xE5 else f", marked {magic:#04x}"
        )

    lies = [
        struct.pack("<HBBQ", *fields)
        for fields in (
            *((tokens + wrong, own, 0xE5, number) for wrong in (-1, 1, 60_000)),
            *((tokens, other, 0xE5, number) for other in (*range(10), 255) if other != own),
            (tokens, own, 0xE4, number),
            (tokens, own, 0xE5, number + 1),
            (tokens, own, 0xE5, number + (1 << 32)),
        )
    ]
    for lie in lies:

        def change(data: bytearray, lie: bytes = lie) -> None:
            data[at + 4 : at + 16] = lie
            victim.seal(data, number)

        with victim.bent(change):
            victim.assert_noticed(number, errors.StaleDataError)
            with pytest.raises(
                errors.StaleDataError,
                match=rf"got {said(lie)}; expected {said(right)} in format {own} \(\w+\)",
            ):
                victim.verify()


def test_two_records_exchanged(victim: Victim) -> None:
    by_size: dict[int, list[int]] = {}
    for number in range(COUNT):
        by_size.setdefault(victim.place(number)[1], []).append(number)
    first, second = next(numbers[:2] for numbers in by_size.values() if len(numbers) > 1)
    (a, size), (b, _) = victim.place(first), victim.place(second)

    def change(data: bytearray) -> None:
        data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]

    with victim.bent(change):
        for attempt in (victim.search, victim.verify):
            with pytest.raises(errors.StaleDataError, match="is not what was written") as caught:
                attempt()
            assert (caught.value.path, caught.value.size_bytes) == (str(victim.file), size)
            assert caught.value.offset_bytes in (a, b)


def test_damage_that_no_query_touches(victim: Victim) -> None:
    """One record is rubbish: searches that do not need it go on, those that do are refused,
    whatever is read in passing."""
    number = victim.right[7].number
    at, size = victim.place(number)
    without = victim.search(exclude=[victim.right[7].id])
    exact, by_cascade = search(victim.index, "full"), search(victim.index, "coarse")
    first_five = {hit.id for hit in by_cascade[:5]}
    few = victim.search(k=3, include=[hit.id for hit in victim.right[:3]])

    def change(data: bytearray) -> None:
        data[at : at + size] = random.Random(2).randbytes(size)

    with victim.bent(change):
        assert victim.search(exclude=[victim.right[7].id]) == without
        assert victim.search(k=3, include=[hit.id for hit in victim.right[:3]]) == few
        victim.assert_noticed(number, errors.ChecksumError)
        if victim.tier_name == "full":  # a cascade reads the full records of its best five only
            assert victim.right[7].id not in first_five
            assert victim.search(cascade=5) == by_cascade
        else:
            assert search(victim.index, "full") == exact  # reads no coarse record
            with pytest.raises(errors.ChecksumError, match=f"record {number} ") as caught:
                espnx.open(victim.path, coarse="ram")
            assert caught.value.path == str(victim.file)


def test_everything_damaged_but_what_a_query_wants(victim: Victim) -> None:
    chosen = victim.right[2:5]
    spared = {
        at
        for hit in chosen
        for begin, size in [victim.place(hit.number)]
        for at in range(begin, begin + size)
    }
    wanted = victim.search(include=[hit.id for hit in chosen])

    def change(data: bytearray) -> None:
        data[4096:] = bytes(
            byte if at in spared else byte ^ 0xFF for at, byte in enumerate(data[4096:], 4096)
        )

    with victim.bent(change):
        assert victim.search(include=[hit.id for hit in chosen]) == wanted
        assert len(wanted) == 3
        for attempt in (victim.search, victim.verify):
            with pytest.raises(errors.ChecksumError) as caught:
                attempt()
            assert caught.value.path == str(victim.file)


@pytest.mark.parametrize("kept", ["header", "half", "nothing"])
def test_a_file_truncated_under_an_open_index(victim: Victim, kept: str) -> None:
    size = victim.file.stat().st_size
    keep = {"header": 4096, "half": 4096 + (victim.place(COUNT - 1)[0] - 4096) // 2, "nothing": 0}[
        kept
    ]

    def change(data: bytearray) -> None:
        del data[keep:]

    with victim.bent(change):
        for attempt in (victim.search, victim.verify):
            with pytest.raises(errors.StorageError) as caught:
                attempt()
            assert caught.value.path == str(victim.file)
    assert victim.file.stat().st_size == size


@pytest.mark.parametrize(
    "change", ["a byte", "a block", "the records", "everything", "a byte too many", "missing"]
)
def test_a_truncated_file_is_not_opened(victim: Victim, engine: NativeEngine, change: str) -> None:
    size, aside = victim.file.stat().st_size, victim.file.with_suffix(".aside")
    shutil.copyfile(victim.file, aside)
    if change == "missing":
        victim.file.rename(victim.file.with_suffix(".gone"))
    else:
        lost = {
            "a byte": 1,
            "a block": 4096,
            "the records": size - 4096,
            "everything": size,
            "a byte too many": -1,
        }[change]
        os.truncate(victim.file, size - lost)
    try:
        for attempt in (
            lambda: espnx.open(victim.path, engine=engine),
            lambda: EmbeddingStore(victim.path, engine),
        ):
            with pytest.raises(
                errors.FormatError if change == "missing" else errors.TruncatedFileError
            ) as caught:
                attempt()
            assert caught.value.path == str(victim.file)
    finally:
        if change == "missing":
            victim.file.with_suffix(".gone").rename(victim.file)
        overwrite(victim.file, aside.read_bytes())
        aside.unlink()
    assert victim.search() == victim.right


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    with NativeEngine() as opened:
        yield opened


def unknown_centroid(victim: Victim, number: int, value: int) -> Callable[[bytearray], None]:
    """The record's last row names it, under a right checksum."""

    def change(data: bytearray) -> None:
        schema = victim.tier.schema
        at = (
            victim.place(number)[0]
            + schema.fixed_bytes
            + (victim.n_tokens(number) - 1) * schema.row_bytes
        )
        struct.pack_into("<i", data, at, value)
        victim.seal(data, number)

    return change


def search_from_ram(victim: Victim) -> list[Hit]:
    with espnx.open(victim.path, coarse="ram") as index:
        return search(index, victim.tier_name)


@pytest.mark.parametrize("value", ["first unknown", 2**31 - 1, -1, -(2**31)])
def test_a_row_that_names_an_unknown_centroid(residual: Victim, value: int | str) -> None:
    book = residual.tier.codebook
    assert book is not None
    number = residual.right[7].number
    without = residual.search(exclude=[residual.right[7].id])
    with residual.bent(
        unknown_centroid(residual, number, book.n_centroids if isinstance(value, str) else value)
    ):
        attempts: list[Callable[[], Any]] = [
            residual.search,
            residual.verify,
            lambda: search_from_ram(residual),
        ]
        if residual.tier_name == "full":
            attempts.append(lambda: search(residual.index, "full", rerank=0, explain=True))
        for attempt in attempts:
            with pytest.raises(
                errors.FormatError, match=f"record {number} names a centroid"
            ) as caught:
                attempt()
            error = caught.value
            assert (error.path, error.offset_bytes, error.size_bytes) == (
                str(residual.file),
                *residual.place(number),
            )
        assert residual.search(exclude=[residual.right[7].id]) == without
    # the last one there is
    with residual.bent(unknown_centroid(residual, number, book.n_centroids - 1)):
        assert residual.verify() == COUNT
        assert len(residual.search()) == COUNT


Tensors = dict[str, np.ndarray]


@contextmanager
def rewritten(store: Path, change: Callable[[Tensors], None]) -> Iterator[None]:
    """The store with other metadata tensors, all checksums made right again."""
    meta, top = store / "gen-000001/part.bin", store / "MANIFEST.json"
    before, place = (meta.read_bytes(), top.read_bytes()), section_places(meta)["model"]
    tensors = dict(load(before[0][place.offset_bytes : place.offset_bytes + place.size_bytes]))
    change(tensors)
    replace_section(
        store,
        meta,
        "model",
        save({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}),
    )
    try:
        yield
    finally:
        overwrite(meta, before[0])
        overwrite(top, before[1])


def assert_not_used(victim: Victim, engine: NativeEngine, match: str, file: Path) -> None:
    """Neither search nor verify of the store, opened anew, does anything but raise, and name the
    file."""

    def searched(where: str) -> None:
        with espnx.open(victim.path, engine=engine, coarse=where) as index:
            search(index, victim.tier_name)

    def verified() -> None:
        with EmbeddingStore(victim.path, engine) as store:
            store.verify()

    for attempt in (lambda: searched("ssd"), lambda: searched("ram"), verified):
        with pytest.raises(errors.FormatError, match=match) as caught:
            attempt()
        assert caught.value.path == str(file)


@pytest.mark.parametrize("name", ["centroids", "bucket_cutoffs", "bucket_weights"])
def test_a_codebook_tensor_missing(residual: Victim, engine: NativeEngine, name: str) -> None:
    def change(tensors: Tensors) -> None:
        del tensors[f"{residual.tier_name}.{name}"]

    with rewritten(residual.path, change):
        assert_not_used(
            residual, engine, f"codebook of the {residual.tier_name} records missing", residual.meta
        )


MALFORMED: dict[str, tuple[str, Callable[[np.ndarray], np.ndarray]]] = {
    "flat": ("centroids", lambda tensor: tensor.reshape(-1)),
    "no centroid": ("centroids", lambda tensor: tensor[:0]),
    "20 dimensions": ("centroids", lambda tensor: tensor[:, :20]),
    "float64": ("centroids", lambda tensor: tensor.astype(np.float64)),
    "float16": ("bucket_weights", lambda tensor: tensor.astype(np.float16)),
    "NaN": (
        "centroids",
        lambda tensor: np.where(np.arange(tensor.shape[1]) == 3, np.nan, tensor).astype(np.float32),
    ),
    "infinite": ("bucket_weights", lambda tensor: tensor * np.float32(np.inf)),
    "too few weights": ("bucket_weights", lambda tensor: tensor[:-1]),
    "too many cutoffs": ("bucket_cutoffs", lambda tensor: np.r_[tensor, tensor[-1:]]),
    "two-dimensional cutoffs": ("bucket_cutoffs", lambda tensor: tensor[None]),
}


@pytest.mark.parametrize("what", MALFORMED)
def test_a_codebook_tensor_of_another_shape(
    residual: Victim, engine: NativeEngine, what: str
) -> None:
    name, bend = MALFORMED[what]

    def change(tensors: Tensors) -> None:
        tensors[f"{residual.tier_name}.{name}"] = bend(tensors[f"{residual.tier_name}.{name}"])

    with rewritten(residual.path, change):
        assert_not_used(residual, engine, f"codebook of the {residual.tier_name}", residual.meta)


def other_buckets(tensors: Tensors, tier: str) -> None:
    """A codebook of codes of another width, whole in itself."""
    count = 4 if len(tensors[f"{tier}.bucket_weights"]) != 4 else 16
    tensors[f"{tier}.bucket_weights"] = np.linspace(-1, 1, count, dtype=np.float32)
    tensors[f"{tier}.bucket_cutoffs"] = np.linspace(-1, 1, count - 1, dtype=np.float32)


def other_dim(tensors: Tensors, tier: str, dim: int) -> None:
    tensors[f"{tier}.centroids"] = np.resize(tensors[f"{tier}.centroids"], (500, dim)).astype(
        np.float32
    )


MISFITS: dict[str, Callable[[Tensors, str], None]] = {
    "other codes": other_buckets,
    "24 dimensions": lambda tensors, tier: other_dim(tensors, tier, 24),
    "40 dimensions": lambda tensors, tier: other_dim(tensors, tier, 40),
    "a single centroid": lambda tensors, tier: tensors.update(
        {f"{tier}.centroids": tensors[f"{tier}.centroids"][:1]}
    ),
}


@pytest.mark.parametrize("what", MISFITS)
def test_a_codebook_of_other_records(residual: Victim, engine: NativeEngine, what: str) -> None:
    """Right in itself, and not what these records were coded with: nothing is scored by it."""
    with rewritten(residual.path, lambda tensors: MISFITS[what](tensors, residual.tier_name)):
        if what == "a single centroid":  # whole, and of the right shape: the records tell
            assert_not_used(
                residual, engine, "names a centroid that is not in the codebook", residual.file
            )
        else:
            assert_not_used(
                residual,
                engine,
                f"codebook of the {residual.tier_name}.*rows of another codebook",
                residual.meta,
            )
    with espnx.open(residual.path, engine=engine) as index:
        assert search(index, residual.tier_name) == residual.right


def test_a_bit_of_a_codebook(residual: Victim, engine: NativeEngine) -> None:
    """Anywhere in the three tensors, and in what names them."""
    meta = residual.meta
    original = meta.read_bytes()
    start = section_places(meta)["model"].offset_bytes
    header_end = start + 8 + int.from_bytes(original[start : start + 8], "little")
    header = json.loads(original[start + 8 : header_end])
    places = [original.index(f"{residual.tier_name}.centroids".encode())]
    for name in ("centroids", "bucket_cutoffs", "bucket_weights"):
        begin, end = header[f"{residual.tier_name}.{name}"]["data_offsets"]
        places += [header_end + begin, header_end + (begin + end) // 2, header_end + end - 1]
    for at in places:
        data = bytearray(original)
        flip(at, at)(data)
        overwrite(meta, bytes(data))
        try:
            for attempt in (
                lambda: espnx.open(residual.path, engine=engine),
                lambda: EmbeddingStore(residual.path, engine),
            ):
                with pytest.raises(errors.ChecksumError) as caught:
                    attempt()
                assert caught.value.path == str(meta)
        finally:
            overwrite(meta, original)
