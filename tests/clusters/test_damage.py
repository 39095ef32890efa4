"""Lists whose files are damaged, or of another kind, and reads that fail: typed errors, and never a
wrong neighbour."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.clusters
from espnx import errors
from espnx.device.clusters import write_clusters
from espnx.device.clusters.device import SsdClusterDevice
from espnx.storage import FaultRule, FaultyEngine
from espnx.storage.files import crc32c
from espnx.storage.manifest import _digest

DIM = 6


def base() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((400, DIM)).astype(np.float32)


@pytest.fixture(scope="module", params=["memory", "graph"])
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("lists") / request.param
    espnx.clusters.build(
        base(), path, n_lists=40, heads=request.param, vector_dtype="int8", threads=1
    )
    return path


@pytest.fixture
def copy(made: Path, folder: Path) -> Path:
    shutil.copytree(made, folder / "c")
    return folder / "c"


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 8
    path.write_bytes(data)


def change(directory: Path, **changes: Any) -> None:
    """Fields of what the index has in the manifest, with a checksum that is right."""
    path = directory / "MANIFEST.json"
    fields = json.loads(path.read_text())
    fields.pop("checksum")
    fields["index"].update(changes)
    path.write_text(json.dumps({**fields, "checksum": _digest(fields)}))


def sums(directory: Path) -> None:
    change(directory, heads_crc32c=crc32c((directory / "heads.bin").read_bytes()))


def of_no_number(directory: Path) -> None:
    values = np.fromfile(directory / "heads.bin", "<f4")
    values[-1] = np.nan
    values.tofile(directory / "heads.bin")
    sums(directory)


def links_that_lead_nowhere(directory: Path) -> None:
    path = directory / "heads.links"
    data = bytearray(path.read_bytes())
    data[60:64] = b"\xff\xff\x00\x00"
    path.write_bytes(data)
    said = json.loads((directory / "MANIFEST.json").read_text())["index"]["links"]
    change(directory, links={**said, "crc32c": crc32c(bytes(data))})


BOTH: list[tuple[str, Callable[[Path], Any], type[Exception], str]] = [
    ("memory graph", lambda d: (d / "heads.bin").unlink(), errors.FileMissingError, "heads"),
    ("memory", lambda d: flip(d / "heads.bin", 9), errors.ChecksumError, "heads of lists"),
    ("memory graph", lambda d: flip(d / "heads.bin", 9), errors.ChecksumError, "heads of lists"),
    ("memory graph", lambda d: os.truncate(d / "heads.bin", 4), errors.TruncatedFileError, "heads"),
    ("memory graph", of_no_number, errors.FormatError, "not finite"),
    ("memory", lambda d: flip(d / "heads.links", 99), errors.ChecksumError, "heads.links"),
    ("memory", lambda d: (d / "heads.links").unlink(), errors.FileMissingError, "heads.links"),
    ("memory", links_that_lead_nowhere, errors.FormatError, "links of an HNSW"),
    ("memory", lambda d: change(d, heads="graph"), errors.FormatError, "heads.bin; got"),
    ("graph", lambda d: change(d, heads="memory"), errors.TruncatedFileError, "heads.bin"),
    ("graph", lambda d: (d / "heads.graph").unlink(), errors.FileMissingError, "heads.graph"),
    ("graph", lambda d: os.truncate(d / "heads.graph", 4096), errors.TruncatedFileError, "graph"),
    ("graph", lambda d: change(d, graph={}), errors.FormatError, "index.graph.size_bytes"),
    ("memory graph", lambda d: change(d, n=9), errors.FormatError, "index.n"),
    ("memory graph", lambda d: change(d, n=10**6), errors.FormatError, "index.n"),
    ("memory graph", lambda d: change(d, step=-1.0), errors.FormatError, "index.step"),
    ("memory graph", lambda d: change(d, step=None), errors.FormatError, "index.step"),
    ("memory graph", lambda d: change(d, metric="l3"), errors.FormatError, "index.metric"),
    ("memory graph", lambda d: change(d, metric="ip"), errors.StorageError, "heads|graph"),
    ("memory graph", lambda d: change(d, packing="?"), errors.FormatError, "index.packing"),
    ("memory graph", lambda d: flip(d / "clusters.table", 3), errors.ChecksumError, "table"),
    (
        "memory graph",
        lambda d: os.truncate(d / "clusters.bin", 4),
        errors.TruncatedFileError,
        "bin",
    ),
    ("memory graph", lambda d: flip(d / "MANIFEST.json", 70), errors.FormatError, "manifest"),
    ("memory graph", lambda d: shutil.rmtree(d), errors.StoreNotFoundError, "no published store"),
]


@pytest.mark.parametrize("number", range(len(BOTH)))
def test_damaged_files(copy: Path, made: Path, number: int) -> None:
    kinds, damage, kind, message = BOTH[number]
    if made.name not in kinds:
        pytest.skip("[case] of heads elsewhere")
    if message != "heads of lists" or (copy / "heads.bin").stat().st_size > 9:
        damage(copy)
        with pytest.raises(kind, match=message):
            espnx.clusters.open(copy).search(base()[:3], 2)


def test_a_damaged_list_is_named(copy: Path) -> None:
    """By a search that reads it, and by `verify`; others are right."""
    with espnx.clusters.open(copy) as index:
        first = int(np.argmin(index.device.clusters.begin_bytes))
        flip(copy / "clusters.bin", 5)
        with pytest.raises(errors.ChecksumError, match=f"cluster {first} is not what was written"):
            index.search(base()[:1], 3, n_lists=index.facts.n_lists)
        with pytest.raises(errors.ChecksumError):
            index.verify()
        flip(copy / "clusters.bin", 5)
        assert index.search(base()[:1], 1, n_lists=5).ids.tolist() == [[0]]
        assert index.verify() == index.facts.n_lists


def test_ids_that_no_vector_has(copy: Path) -> None:
    """With every checksum right: refused, not handed out."""
    change(copy, n=399, replicas=8)
    with espnx.clusters.open(copy) as index:
        with pytest.raises(errors.FormatError, match="expected 0 to 398"):
            index.search(base()[399], 1, n_lists=index.facts.n_lists)
        with pytest.raises(errors.FormatError, match="expected 0 to 398"):
            index.verify()


def test_clusters_without_heads(folder: Path) -> None:
    write_clusters(folder / "c", np.arange(9), base()[:9], np.arange(9) % 3)
    for look in (espnx.clusters.open, espnx.clusters.info):
        with pytest.raises(errors.FormatError, match="clusters without heads"):
            look(folder / "c")
    with pytest.raises(errors.StoreNotFoundError):
        espnx.clusters.open(folder / "none")


def test_reads_that_fail(copy: Path) -> None:
    """The error of the read, whichever query's it is; the index can be searched again."""
    for nth in (1, 3, 6):
        rule = FaultRule(operation="read", path="*clusters.bin", nth=nth, count=1)
        with (
            FaultyEngine([rule]) as engine,
            SsdClusterDevice(copy, engine=engine) as device,
            espnx.clusters.open(copy, device=device, in_flight=3) as index,
        ):
            with pytest.raises(errors.ReadError):
                index.search(base()[:8], 3, n_lists=6)
            found = index.search(base()[:8], 1, n_lists=6)
            assert found.ids[:, 0].tolist() == list(range(8))


def test_a_child_process_is_told(copy: Path) -> None:
    with espnx.clusters.open(copy) as index:
        child = os.fork()
        if child == 0:
            try:
                index.search(base()[:1], 1)
            except errors.InvalidInputError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
