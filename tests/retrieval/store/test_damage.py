"""Every kind of damage to every file of a store: a typed error that names the file, or bytes that
mean nothing. Never a wrong hit."""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import espnx
from espnx import errors
from espnx.retrieval.store import part_file
from espnx.retrieval.store.store import EmbeddingStore
from espnx.storage import NativeEngine, manifest
from espnx.storage.documents import rows as part_texts
from tests.retrieval.common import (
    D_CLS,
    EVERYTHING,
    build,
    corpus,
    memory_folder,
    queries,
    replace_section,
    rows_of_part,
    section_places,
)

DIM = 16
FILES = ["MANIFEST.json", "part.bin", "segment-00000.bin", "segment-00001.bin", "segment-00002.bin"]
Ranking = list[tuple[object, float, str]]


@pytest.fixture(scope="module")
def engine() -> Iterator[NativeEngine]:
    with NativeEngine() as opened:
        yield opened


@pytest.fixture(scope="module")
def whole() -> Iterator[Path]:
    """A projected store of three data files, and beside it another one ("other") and the one before
    it ("older")."""
    from espnx.retrieval.build import builder as building

    cut, pieces = building.segment_bytes, building.pieces
    building.segment_bytes = lambda total_bytes, devices: 1
    building.pieces = lambda order, sizes, limit_bytes, room: pieces(order, sizes, 4096, room)  # type: ignore[assignment]
    options: dict[str, Any] = {"dims": (D_CLS, DIM), "pca": 8}
    try:
        with memory_folder() as folder:
            documents = corpus(150, dim=DIM)
            build(folder / "store", documents, **options)
            shutil.copytree(folder / "store", folder / "older")
            build(folder / "store", documents, replace=True, **options)
            build(folder / "other", documents, **options)
            yield folder
    finally:
        building.segment_bytes, building.pieces = cut, pieces


@pytest.fixture
def victim(whole: Path, folder: Path) -> Path:
    shutil.copytree(whole / "store", folder / "store")
    return folder / "store"


def find(store: Path, name: str) -> Path:
    return store / name if name == "MANIFEST.json" else next(store.glob(f"gen-*/{name}"))


def ranking(store: Path, engine: NativeEngine) -> Ranking:
    with espnx.open(store, engine=engine) as index:
        hits = index.search(
            queries(1, dim=DIM)[0], k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING
        ).hits
    return [(hit.id, hit.score, hit.text) for hit in hits]


@pytest.fixture(scope="module")
def right(whole: Path, engine: NativeEngine) -> Ranking:
    return ranking(whole / "store", engine)


def verify(store: Path, engine: NativeEngine) -> int:
    with EmbeddingStore(store, engine) as opened:
        return opened.verify()


def assert_names(error: errors.StorageError, path: Path) -> None:
    assert error.path is not None
    assert Path(error.path).name == path.name, f"{error} should name {path.name}"
    assert error.path in str(error)


def truncate(path: Path, size_bytes: int) -> None:
    os.truncate(path, size_bytes)


BLUNT: dict[str, Callable[[Path], None]] = {
    "missing": lambda path: path.unlink(),
    "empty": lambda path: truncate(path, 0),
    "one byte short": lambda path: truncate(path, path.stat().st_size - 1),
    "half": lambda path: truncate(path, path.stat().st_size // 2),
    "a byte longer": lambda path: truncate(path, path.stat().st_size + 1),
    "a block longer": lambda path: truncate(path, path.stat().st_size + 4096),
    "zeroed": lambda path: path.write_bytes(bytes(path.stat().st_size)),
    "a directory": lambda path: (path.unlink(), path.mkdir())[1],
}


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("damage", BLUNT)
def test_blunt_damage(
    victim: Path, engine: NativeEngine, right: Ranking, name: str, damage: str
) -> None:
    path = find(victim, name)
    BLUNT[damage](path)
    # the last byte is the newline after the JSON
    if damage == "one byte short" and name == "MANIFEST.json":
        assert ranking(victim, engine) == right
        return
    for attempt in (ranking, verify):
        with pytest.raises(errors.StorageError) as caught:
            attempt(victim, engine)
        if (damage, name) == ("missing", "MANIFEST.json"):
            assert isinstance(caught.value, errors.StoreNotFoundError)
            assert str(victim) in str(caught.value)
        else:
            assert_names(caught.value, path)


def positions(path: Path, store: Path, engine: NativeEngine) -> list[int]:
    """About 64 places of a file; in a data file every region has its share."""
    rng, size = random.Random(path.name), path.stat().st_size
    chosen = {0, size - 1, *(rng.randrange(size) for _ in range(40)), *range(0, min(size, 100), 5)}
    if path.name == "part.bin":
        for place in section_places(path).values():
            last = place.offset_bytes + place.size_bytes - 1
            chosen |= {
                place.offset_bytes,
                last,
                *(rng.randrange(place.offset_bytes, last + 1) for _ in range(6)),
            }
    elif path.suffix == ".bin":
        inside, between = regions(path, store, engine)
        for begin, _, cls_end, end in rng.sample(inside, 5):
            chosen |= {
                begin,
                begin + 4,
                begin + 6,
                begin + 7,
                begin + 15,
                rng.randrange(begin + 16, cls_end),
                rng.randrange(cls_end, end),
                end - 1,
            }
        chosen |= set(between[:4])
    return sorted(chosen)


def between_sections(path: Path) -> set[int]:
    """The bytes of a part's file that mean nothing."""
    dead = set(range(4096, path.stat().st_size))
    for place in section_places(path).values():
        dead -= set(range(place.offset_bytes, place.offset_bytes + place.size_bytes))
    return dead


def regions(
    path: Path, store: Path, engine: NativeEngine
) -> tuple[list[tuple[int, int, int, int]], list[int]]:
    """(begin, after the header, after CLS, end) of each record with tokens in a data file, and the
    bytes that belong to no record."""
    with EmbeddingStore(store, engine) as opened:
        number = next(
            i for i, segment in enumerate(opened.segments) if segment.path.endswith(path.name)
        )
        segment, offset, size = opened.full.locate(range(opened.count))  # type: ignore[arg-type]
        mine = [
            (int(at), int(at) + int(length))
            for which, at, length in zip(segment, offset, size, strict=True)
            if which == number
        ]
        fixed = opened.full.schema.fixed_bytes
    dead = set(range(4096, path.stat().st_size))
    for begin, end in mine:
        dead -= set(range(begin, end))
    return [
        (begin, begin + 16, begin + fixed, end) for begin, end in mine if end - begin > fixed
    ], sorted(dead)


@pytest.mark.parametrize("name", FILES)
def test_a_bit_anywhere(victim: Path, engine: NativeEngine, right: Ranking, name: str) -> None:
    path = find(victim, name)
    lookups = set[int]()  # what a search does not look at
    if name == "part.bin":
        dead = between_sections(path)
        for place in [section_places(path)[each] for each in ("ids", "fences")]:
            lookups |= set(range(place.offset_bytes, place.offset_bytes + place.size_bytes))
    else:
        dead = set(regions(path, victim, engine)[1]) if path.suffix == ".bin" else set()
    original = path.read_bytes()
    for number, at in enumerate(positions(path, victim, engine)):
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(bytes([original[at] ^ 1 << number % 8]))
        try:
            assert ranking(victim, engine) == right, f"wrong hits after a flip at byte {at}"
            assert at in dead | lookups, f"byte {at} was not missed"
        except errors.StorageError as error:
            assert_names(error, path)
            assert at not in dead
        if at in dead:
            assert verify(victim, engine) == 150
        else:
            with pytest.raises(errors.StorageError) as caught:
                verify(victim, engine)
            assert_names(caught.value, path)
        with open(path, "r+b") as file:
            file.seek(at)
            file.write(original[at : at + 1])
    assert ranking(victim, engine) == right


def test_texts_and_ids_piece_by_piece(victim: Path, engine: NativeEngine, right: Ranking) -> None:
    """Whatever is made of damaged rows and tables, no hit has a wrong id or text, and no id is
    found under a wrong number, or is not."""
    path = find(victim, "part.bin")
    original = path.read_bytes()
    rng = random.Random(1)
    places = [section_places(path)[name] for name in ("rows", "groups", "ids", "fences")]
    noticed = 0
    for turn in range(150):
        bent, place = bytearray(original), places[turn % 4]
        length = rng.choice([1, 2, 16, 300, 4096])
        at = place.offset_bytes + rng.randrange(place.size_bytes)
        end = min(at + length, place.offset_bytes + place.size_bytes)
        bent[at:end] = rng.choice(
            [rng.randbytes(end - at), bytes(end - at), original[4096 : 4096 + end - at]]
        )
        path.write_bytes(bent)
        try:
            assert ranking(victim, engine) == right
            with EmbeddingStore(victim, engine) as opened:
                numbers = opened.texts.numbers(
                    [f"doc-{n}" for n in range(150)] + ["nobody"]
                ).tolist()
                assert sorted(numbers) == [-1, *range(150)]
                assert [f"doc-{n}" for n in range(150)] == [
                    identifier for identifier, _ in opened.texts.get(numbers[:-1])
                ]
        except errors.StorageError as error:
            assert_names(error, path)
            noticed += 1
    assert noticed > 100


@pytest.mark.parametrize("name", ["part.bin", "segment-00001.bin"])
@pytest.mark.parametrize("origin", ["other", "older"])
def test_a_file_of_another_store(
    victim: Path, whole: Path, engine: NativeEngine, name: str, origin: str
) -> None:
    """Same documents, same sizes, all checksums intact: it still is not this store's file."""
    path = find(victim, name)
    foreign = find(whole / origin, name)
    shutil.copyfile(foreign, path)
    with pytest.raises(errors.ForeignFileError) as caught:
        ranking(victim, engine)
    assert_names(caught.value, path)


def test_two_rows_exchanged(victim: Path, engine: NativeEngine) -> None:
    """Ids, texts and their checksums intact, under another number: as a bit in the table of rows
    would leave them."""
    path = find(victim, "part.bin")
    rows, whole = rows_of_part(path), path.read_bytes()
    sizes = [len(row.data) for row in rows]
    first, second = next(
        (a, b) for a in range(150) for b in range(a + 1, 150) if sizes[a] == sizes[b]
    )
    bent = bytearray(whole)
    for source, target in ((first, second), (second, first)):
        at = rows[target].offset_bytes
        bent[at : at + sizes[target]] = rows[source].data
    path.write_bytes(bent)
    with pytest.raises(
        errors.ChecksumError, match=rf"damaged text of record ({first}|{second})"
    ) as caught:
        ranking(victim, engine)
    assert_names(caught.value, path)


def test_a_row_bent_before_its_section_was_summed(victim: Path, engine: NativeEngine) -> None:
    """The sum of the section was taken of damaged bytes and says nothing: every row is looked at,
    by verify too."""
    path = find(victim, "part.bin")
    place = section_places(path)["rows"]
    rows = bytearray(path.read_bytes()[place.offset_bytes : place.offset_bytes + place.size_bytes])
    rows[-1] ^= 1
    replace_section(victim, path, "rows", bytes(rows))
    for attempt in (verify, ranking):
        with pytest.raises(errors.ChecksumError, match="damaged text of record 149") as caught:
            attempt(victim, engine)
        assert_names(caught.value, path)


def test_an_id_that_is_not_found(victim: Path, engine: NativeEngine) -> None:
    """A table of ids that is whole in itself and lacks one: verify says so."""
    path = find(victim, "part.bin")
    salt = EmbeddingStore(victim, engine)
    salt.close()
    place = section_places(path)["ids"]
    block = bytearray(path.read_bytes()[place.offset_bytes : place.offset_bytes + place.size_bytes])
    block[0] ^= 1  # of the first hash
    data = bytes(block[:4080])
    replace_section(
        victim,
        path,
        "ids",
        data + part_texts._TAIL.pack(part_texts._block_sum(0, data, 150, salt.salt), 150),
    )
    with pytest.raises(errors.FormatError, match=r"id of record \d+ is not found"):
        verify(victim, engine)


def test_two_data_files_exchanged(victim: Path, engine: NativeEngine) -> None:
    first, second = find(victim, "segment-00000.bin"), find(victim, "segment-00001.bin")
    sizes = first.stat().st_size, second.stat().st_size
    for path, size in ((first, max(sizes)), (second, max(sizes))):
        truncate(path, size)
    first.rename(victim / "x")
    second.rename(first)
    (victim / "x").rename(second)
    with pytest.raises(errors.StorageError) as caught:
        ranking(victim, engine)
    assert_names(caught.value, first if sizes[0] <= sizes[1] else second) if sizes[0] != sizes[
        1
    ] else None


def test_a_data_file_of_another_number(victim: Path, engine: NativeEngine) -> None:
    """Header intact and of this very store and generation, but not the file that belongs here."""
    path = find(victim, "segment-00000.bin")
    with EmbeddingStore(victim, engine) as opened:
        each, manifest = opened.segments[0], opened.manifest
        facts = part_file.FileFacts(
            manifest.store_id,
            manifest.generation,
            1,
            each.first_record,
            each.records,
            each.size_bytes,
        )
        wrong = part_file.file_header(facts, {})
    path.write_bytes(wrong + path.read_bytes()[4096:])
    with pytest.raises(errors.FormatError, match="does not fit the manifest") as caught:
        ranking(victim, engine)
    assert not isinstance(caught.value, errors.ForeignFileError)


def twins(store: Path, engine: NativeEngine) -> tuple[Path, list[tuple[int, int, int]]]:
    """Two records of one length in the first data file: (number, offset, size)."""
    with EmbeddingStore(store, engine) as opened:
        _, offset, size = (
            part.tolist() for part in opened.full.locate(range(opened.segments[0].records))
        )  # type: ignore[arg-type]
        by_size: dict[int, list[tuple[int, int, int]]] = {}
        for number, (at, length) in enumerate(zip(offset, size, strict=True)):
            by_size.setdefault(length, []).append((number, at, length))
        pair = next(group[:2] for group in by_size.values() if len(group) > 1)
        return Path(opened._files[0].path), pair


def test_two_records_exchanged(victim: Path, engine: NativeEngine) -> None:
    path, [(first, a, size), (second, b, _)] = twins(victim, engine)
    data = bytearray(path.read_bytes())
    data[a : a + size], data[b : b + size] = data[b : b + size], data[a : a + size]
    path.write_bytes(data)
    for attempt in (ranking, verify):
        with pytest.raises(errors.StaleDataError) as caught:
            attempt(victim, engine)
        assert_names(caught.value, path)
        assert (caught.value.offset_bytes, caught.value.size_bytes) in ((a, size), (b, size))
        assert f"record {first}" in str(caught.value) or f"record {second}" in str(caught.value)


@pytest.mark.parametrize("origin", ["other", "older"])
def test_a_record_of_another_store(
    victim: Path, whole: Path, engine: NativeEngine, origin: str
) -> None:
    """The same document under the same number: only the salt tells."""
    path, [(_, at, size), _] = twins(victim, engine)
    data, foreign = (
        bytearray(path.read_bytes()),
        find(whole / origin, "segment-00000.bin").read_bytes(),
    )
    assert data[at + 4 : at + size] == foreign[at + 4 : at + size]
    data[at : at + size] = foreign[at : at + size]
    path.write_bytes(data)
    with pytest.raises(errors.ChecksumError) as caught:
        ranking(victim, engine)
    assert (caught.value.offset_bytes, caught.value.size_bytes) == (at, size)


@pytest.mark.parametrize(
    ("field", "value", "said"),
    [
        ("magic", "espnx-kv-cache", "not a manifest of this kind"),
        ("magic", None, "not a manifest of this kind"),
        ("version", 2, "another version"),
        ("version", "1", "another version"),
        ("byte_order", "big", "byte order"),
        ("store_id", "0" * 32, "another store"),
    ],
)
def test_a_signed_manifest_of_another_kind(
    victim: Path, engine: NativeEngine, field: str, value: object, said: str
) -> None:
    path = victim / "MANIFEST.json"
    fields = json.loads(path.read_text())
    del fields["checksum"]
    fields[field] = value
    path.write_text(json.dumps(fields | {"checksum": manifest._digest(fields)}))
    with pytest.raises(errors.FormatError, match=said):
        ranking(victim, engine)


@pytest.mark.parametrize(
    "text",
    ["[]", "null", "1", '"x"', "{}", "[" * 100_000, '{"magic": "espnx-embedding-store"}', "\udcff"],
)
def test_a_manifest_that_is_other_json(victim: Path, engine: NativeEngine, text: str) -> None:
    path = victim / "MANIFEST.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(errors.FormatError) as caught:
        ranking(victim, engine)
    assert_names(caught.value, path)


def test_a_manifest_without_checksum_or_too_large(victim: Path, engine: NativeEngine) -> None:
    path = victim / "MANIFEST.json"
    fields = json.loads(path.read_text())
    for checksum in (None, "", 5, "sha256:" + "0" * 64):
        path.write_text(json.dumps(fields | {"checksum": checksum}))
        with pytest.raises(errors.FormatError, match="damaged manifest"):
            ranking(victim, engine)
    truncate(path, 65 << 20)
    with pytest.raises(errors.FormatError, match="too large"):
        ranking(victim, engine)


@pytest.mark.parametrize("content", [b"", b"{}", b"[]", b"null", b'{"crc32c": 1}', b"\xff\xfe"])
def test_a_damaged_state_says_restart(folder: Path, content: bytes) -> None:
    (folder / "s" / "building").mkdir(parents=True)
    (folder / "s" / "building" / "STATE.json").write_bytes(content)
    with pytest.raises(errors.FormatError, match="restart") as caught:
        build(folder / "s", corpus(5))
    assert_names(caught.value, folder / "s" / "building" / "STATE.json")
    build(folder / "s", corpus(5), restart=True)
