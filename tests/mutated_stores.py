"""Stores: what is mutated, and what is done with it (see tests/mutations.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import espnx
from espnx import errors
from espnx.storage import ownership
from espnx.storage.stream import crc32c
from tests.mutations import Trial, manifest_bytes, mutated, put, read_manifest
from tests.retrieval.common import build, corpus, queries

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
    "interrupted builds": Trial(make_interrupted, states, use_interrupted),
}
