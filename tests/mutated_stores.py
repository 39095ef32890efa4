"""Stores: what is mutated, and what is done with it (see tests/mutations.py)."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import espnx
from espnx import errors
from espnx.storage import ownership
from espnx.storage.stream import crc32c
from tests.mutations import Trial, manifest_bytes, mutated, put, read_manifest
from tests.retrieval.common import build, corpus, queries

_TABLE_BYTES = 72  # where the table of sections begins in a header
MANIFEST, STATE = "s/MANIFEST.json", "s/building/STATE.json"
DOCUMENTS = corpus(40)


def make_store(path: Path) -> None:
    build(path / "s", DOCUMENTS, compact="bit1")
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
    """Words of every section of the parts' files, and of their headers' tables; the checksums are right again."""
    for file in sorted((sound / "s").glob("gen-*/part.bin")):
        data, name = file.read_bytes(), str(file.relative_to(sound))
        count = struct.unpack_from("<I", data, 44)[0]
        for number in range(count):
            entry = _TABLE_BYTES + 40 * number
            title, begin, size, _ = struct.unpack_from("<16sQQQ", data, entry)
            words = sorted({0, 8, 16, size // 16 * 8, size // 32 * 8, max(size - 8, 0) // 8 * 8})
            for at in words if size >= 8 else ():
                for value in (0, 1, -1, 2**31, 2**62, -(2**63)):
                    new = bytearray(data)
                    struct.pack_into("<q", new, begin + min(at, size - 8), value)
                    struct.pack_into("<Q", new, entry + 32, crc32c(bytes(new[begin : begin + size])))
                    yield f"{name} {title.rstrip(bytes(1)).decode()}[{at}] = {value}", put(name, _sealed(new))
            for field in (16, 24):
                for value in (0, 1, 4096, size + 1, 2**31, 2**63, 2**64 - 1):
                    new = bytearray(data)
                    struct.pack_into("<Q", new, entry + field, value)
                    yield f"{name} table[{number}]+{field} = {value}", put(name, _sealed(new))


def _sealed(data: bytearray) -> bytes:
    struct.pack_into("<I", data, 4092, crc32c(bytes(data[:4092])))
    return bytes(data)


def make_interrupted(path: Path) -> None:
    """A build that stopped after its spool."""

    def stops() -> Iterator[espnx.Document]:
        yield from DOCUMENTS
        raise KeyboardInterrupt

    try:
        build(path / "s", stops())
    except KeyboardInterrupt:
        pass


def use_interrupted(path: Path) -> Any:
    import warnings

    _engine_threads()
    mark = ownership.read_mark(str(path / "s" / "building"))
    assert mark is not None
    ownership.set_mark(str(path / "s" / "building"), mark.name, str(path / "s"))  # as if it had been begun here
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
    "interrupted builds": Trial(make_interrupted, states, use_interrupted),
}
