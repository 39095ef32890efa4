"""Stores: what is mutated, and what is done with it (see tests/mutations/trials.py)."""

from __future__ import annotations

import contextlib
import json
import sqlite3
import struct
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import espnx
from espnx import errors
from espnx.storage import ownership
from espnx.storage.files import crc32c
from tests.mutations.trials import Trial, manifest_bytes, mutated, put, read_manifest, together
from tests.retrieval.common import build, corpus, queries

_TABLE_BYTES = 72  # where the table of sections begins in a header
MANIFEST, STATE, TEXTS = "s/MANIFEST.json", "s/building/STATE.json", "s/building/texts.sqlite"
DOCUMENTS = corpus(40)


def make_store(path: Path) -> None:
    build(path / "s", DOCUMENTS, coarse="bit1")
    espnx.add(path / "s", corpus(45)[40:])
    espnx.delete(path / "s", ["doc-3"])


def _engine_threads() -> None:
    import faiss

    faiss.omp_set_num_threads(1)


def search(path: Path) -> Any:
    with espnx.open(path / "s") as index:
        result = index.search(queries(1)[0], k=5, candidates=1000, nprobe=1000)
        return [(hit.id, hit.text, round(hit.score, 4)) for hit in result.hits]


def use_store(path: Path) -> Any:
    """Searches, verifies, changes, and builds anew over it, whatever came of the rest."""
    _engine_threads()
    try:
        found = search(path)
        espnx.delete(path / "s", ["doc-5"])
        espnx.compact(path / "s")
        return found, search(path)
    finally:
        try:
            build(path / "s", DOCUMENTS[:3], replace=True, restart=True)
        except errors.EspnxError:
            pass


def store_manifests(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for what, changed in mutated(read_manifest(sound / MANIFEST)):
        if what.startswith("cls_weight") and isinstance(changed.get("cls_weight"), (int, float)):
            continue  # any finite weight is its author's to choose
        yield what, put(MANIFEST, manifest_bytes(changed))


def part_sections(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Words of every section of the parts' files, and of their headers' tables; the checksums are
    right again."""
    for file in sorted((sound / "s").glob("gen-*/part.bin")):
        data, name = file.read_bytes(), str(file.relative_to(sound))
        count = struct.unpack_from("<I", data, 44)[0]
        for number in range(count):
            entry = _TABLE_BYTES + 64 * number
            title, begin, size, _ = struct.unpack_from("<40sQQQ", data, entry)
            words = sorted({0, 8, 16, size // 16 * 8, size // 32 * 8, max(size - 8, 0) // 8 * 8})
            for at in words if size >= 8 else ():
                for value in (0, 1, -1, 2**31, 2**62, -(2**63)):
                    new = bytearray(data)
                    struct.pack_into("<q", new, begin + min(at, size - 8), value)
                    struct.pack_into(
                        "<Q", new, entry + 56, crc32c(bytes(new[begin : begin + size]))
                    )
                    yield (
                        f"{name} {title.rstrip(bytes(1)).decode()}[{at}] = {value}",
                        put(name, _sealed(new)),
                    )
            for field in (40, 48):
                for value in (0, 1, 4096, size + 1, 2**31, 2**63, 2**64 - 1):
                    new = bytearray(data)
                    struct.pack_into("<Q", new, entry + field, value)
                    yield f"{name} table[{number}]+{field} = {value}", put(name, _sealed(new))


def _sealed(data: bytearray) -> bytes:
    struct.pack_into("<I", data, 4092, crc32c(bytes(data[:4092])))
    return bytes(data)


def make_deleted(path: Path) -> None:
    make_store(path)
    espnx.delete(path / "s", ["doc-12", "doc-30"])


def deleted_records(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """The bitmap of deleted records, byte by byte, shorter and longer, with the manifest that fits:
    its checksum and size are right, and in every second one the number of documents is too."""
    fields = read_manifest(sound / MANIFEST)
    name, total = f"s/{fields['deleted']['path']}", sum(part["count"] for part in fields["parts"])
    old = (sound / name).read_bytes()
    bitmaps = {
        f"byte {at} = {value}": old[:at] + bytes([value]) + old[at + 1 :]
        for at in range(len(old))
        for value in (0, 1, 0x80, 0xFF)
    }
    bitmaps |= {
        f"{size} bytes": (old + bytes(64))[:size]
        for size in (0, 1, len(old) - 1, len(old) + 1, len(old) + 64)
    }
    for what, data in bitmaps.items():
        gone = sum(byte.bit_count() for byte in data)
        for count in {fields["records"]["count"], total - gone}:
            for records in {fields["deleted"]["records"], 8 * len(data)}:
                changed = fields | {"records": fields["records"] | {"count": count}}
                changed["deleted"] = fields["deleted"] | {
                    "size_bytes": len(data),
                    "crc32c": crc32c(data),
                    "records": records,
                }
                yield (
                    f"{what}, count {count}, of {records}",
                    together(put(name, data), put(MANIFEST, manifest_bytes(changed))),
                )


def make_spooled(path: Path) -> None:
    """A build that stopped before its last pass."""

    def stops(phase: str, done: int, total: int | None) -> None:
        if phase == "write":
            raise KeyboardInterrupt

    try:
        build(path / "s", DOCUMENTS, progress=stops)
    except KeyboardInterrupt:
        pass


def spooled(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    """Its state, and a database of ids and texts with more in it than our table."""
    yield from states(sound)
    for what in (
        "CREATE TRIGGER more AFTER DELETE ON docs BEGIN DELETE FROM docs; END",
        "CREATE VIEW more AS SELECT * FROM docs",
        "DROP TABLE docs",
        "ALTER TABLE docs ADD COLUMN more",
        "DELETE FROM docs WHERE number = 3",
        "UPDATE docs SET id = x'00' WHERE number = 3",
        "UPDATE docs SET id = 0.5 WHERE number = 3",
        "UPDATE docs SET text = x'ff' WHERE number = 3",
        "UPDATE docs SET number = 2000 WHERE number = 3",
        "CREATE TABLE more (x)",
        "PRAGMA user_version = 7",
    ):
        yield what, partial(_execute, what)
    for elsewhere in ("../decoy/MANIFEST.json", "../../decoy/rows.bin", "/dev/zero"):
        yield f"a link to {elsewhere}", partial(_link, elsewhere)


def _execute(statement: str, path: Path) -> None:
    with contextlib.closing(sqlite3.connect(path / TEXTS)) as db:
        db.execute(statement)
        db.commit()


def _link(target: str, path: Path) -> None:
    (path / TEXTS).unlink()
    (path / TEXTS).symlink_to(target)


def make_interrupted(path: Path) -> None:
    """A build that stopped after its spool."""

    def stops(phase: str, done: int, total: int | None) -> None:
        if phase == "arrange":
            raise KeyboardInterrupt

    try:
        build(path / "s", DOCUMENTS, progress=stops)
    except KeyboardInterrupt:
        pass


def use_interrupted(path: Path) -> Any:
    import warnings

    _engine_threads()
    mark = ownership.read_mark(str(path / "s" / "building"))
    assert mark is not None
    # as if it had been begun here
    ownership.set_mark(str(path / "s" / "building"), mark.name, str(path / "s"))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(path / "s", DOCUMENTS)
    return search(path)


def states(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    for what, changed in mutated(json.loads((sound / STATE).read_bytes().rpartition(b"\n")[0])):
        text = json.dumps(changed, sort_keys=True).encode()
        yield what, put(STATE, text + f"\ncrc32c {crc32c(text):08x}".encode())


STORES = {
    "store manifests": Trial(make_store, store_manifests, use_store),
    "parts": Trial(make_store, part_sections, use_store, is_content=True),
    "deleted records": Trial(make_deleted, deleted_records, use_store, is_content=True),
    "interrupted builds": Trial(make_interrupted, states, use_interrupted),
    "spooled builds": Trial(make_spooled, spooled, use_interrupted),
}
