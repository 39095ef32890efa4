"""Stores: what is mutated, and what is done with it (see tests/mutations.py)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import espnx
from espnx import errors
from espnx.storage.stream import crc32c
from tests.mutations import Trial, mutated, read_manifest, write_manifest
from tests.retrieval.common import build, corpus, queries

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
    for what, changed in mutated(read_manifest(sound / "s" / "MANIFEST.json")):
        yield what, lambda path, changed=changed: write_manifest(path / "s" / "MANIFEST.json", changed)  # type: ignore[misc]


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
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        build(path / "s", DOCUMENTS)
    return search(path)


def states(sound: Path) -> Iterator[tuple[str, Callable[[Path], None]]]:
    fields = json.loads((sound / "s" / "building" / "STATE.json").read_text())
    del fields["crc32c"]
    for what, changed in mutated(fields):
        whole = changed | {"crc32c": crc32c(json.dumps(changed, sort_keys=True).encode())}
        text = json.dumps(whole, sort_keys=True)
        yield what, lambda path, text=text: (path / "s" / "building" / "STATE.json").write_text(text)  # type: ignore[misc]


STORES = {
    "store manifests": Trial(make_store, store_manifests, use_store),
    "interrupted builds": Trial(make_interrupted, states, use_interrupted),
}
