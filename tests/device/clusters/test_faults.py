"""Clusters on storage that fails, and files that are damaged: a typed error that names the place,
and never a wrong distance."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.clusters import nearest_by_read, open_clusters, write_clusters
from espnx.device.clusters.device import SsdClusterDevice
from espnx.device.clusters.layout import CLUSTER_BYTES_MAX, TABLE
from espnx.storage import FaultRule, FaultyEngine
from espnx.storage.files import crc32c
from espnx.storage.manifest import _digest
from tests.device.clusters.made import Made, make, pairs
from tests.storage.common import until

COUNTS = [3, 0, 64, 65, 200]


def flip(path: Path, at: int, bit: int = 3) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 1 << bit]))


@pytest.mark.parametrize("at", [0, 3, 4, 190, 8192, 8192 + 65 * 64 - 1])
def test_a_bit_of_a_cluster(folder: Path, at: int) -> None:
    """Of an id or of a value: the cluster is named, the others are right."""
    made = make(folder, COUNTS)
    damaged = 0 if at < 4096 else 3
    flip(made.directory / "clusters.bin", at)
    others = [cluster for cluster in range(5) if cluster != damaged]
    with open_clusters(made.directory) as device:
        with pytest.raises(
            errors.ChecksumError,
            match=f"cluster {damaged} is not what was written in .*clusters.bin at offset",
        ) as caught:
            device.distances(made.query(), range(5)).finish()
        assert caught.value.offset_bytes == device.clusters.begin_bytes[damaged]
        found = device.distances(made.query(), others).finish()
        assert pairs(found) == [
            each for cluster in others for each in made.reply(made.query(), cluster)
        ]
        with pytest.raises(errors.ChecksumError):
            nearest_by_read(device, made.query(), range(5), 3)


def test_bits_between_clusters_do_not_matter(folder: Path) -> None:
    made = make(folder, COUNTS)
    flip(made.directory / "clusters.bin", 4095)
    with open_clusters(made.directory) as device:
        assert pairs(device.distances(made.query(), [0]).finish()) == made.reply(made.query(), 0)


def change_manifest(directory: Path, **changes: object) -> None:
    """With a checksum that is right."""
    path = directory / "MANIFEST.json"
    fields = json.loads(path.read_text())
    fields.pop("checksum")
    fields.update(changes)
    path.write_text(json.dumps({**fields, "checksum": _digest(fields)}))


def change_table(directory: Path, cluster: int, n_vectors: int, field: str = "n_vectors") -> None:
    """With a checksum that is right."""
    path = directory / "clusters.table"
    table = np.fromfile(path, TABLE)
    table[field][cluster] = n_vectors
    table.tofile(path)
    change_manifest(directory, table_crc32c=crc32c(path.read_bytes()))


@pytest.mark.parametrize(
    ("damage", "kind", "message"),
    [
        (lambda d: (d / "MANIFEST.json").unlink(), errors.StoreNotFoundError, "no published store"),
        (
            lambda d: (d / "clusters.bin").unlink(),
            errors.FileMissingError,
            "missing in .*clusters.bin",
        ),
        (
            lambda d: (d / "clusters.table").unlink(),
            errors.FileMissingError,
            "missing in .*clusters.table",
        ),
        (
            lambda d: os.truncate(d / "clusters.bin", 4096),
            errors.TruncatedFileError,
            "clusters.bin; got 4096 bytes; expected 32768",
        ),
        (
            lambda d: os.truncate(d / "clusters.bin", 2**30),
            errors.FormatError,
            "clusters.bin; got 1073741824 bytes",
        ),
        (
            lambda d: os.truncate(d / "clusters.table", 8),
            errors.TruncatedFileError,
            "clusters.table; got 8 bytes; expected 80",
        ),
        (lambda d: flip(d / "clusters.table", 9), errors.ChecksumError, "table of clusters in"),
        (lambda d: flip(d / "MANIFEST.json", 40), errors.FormatError, "manifest"),
        (
            lambda d: (d / "clusters.bin").unlink() or (d / "clusters.bin").symlink_to("/dev/zero"),
            errors.FormatError,
            "not a plain file",
        ),
        (
            lambda d: change_manifest(d, magic="espnx-index"),
            errors.FormatError,
            "not a manifest of this kind",
        ),
        (lambda d: change_manifest(d, version=1), errors.FormatError, "another version"),
        (
            lambda d: change_manifest(d, format="bf16"),
            errors.FormatError,
            "field format.*got 'bf16'",
        ),
        (lambda d: change_manifest(d, dim=0), errors.FormatError, "field dim"),
        (lambda d: change_manifest(d, dim=40000), errors.FormatError, "field dim"),
        (
            lambda d: change_manifest(d, dim=61),
            errors.FormatError,
            "cluster 3 of a table.*got at byte 8192; expected behind cluster 2, 8256",
        ),
        (lambda d: change_manifest(d, n_clusters=2**40), errors.FormatError, "field n_clusters"),
        (
            lambda d: change_manifest(d, n_clusters=6),
            errors.TruncatedFileError,
            "clusters.table; got 80 bytes; expected 96",
        ),
        (
            lambda d: change_manifest(d, n_vectors=331),
            errors.FormatError,
            "field n_vectors.*got 331; expected 332",
        ),
        (
            lambda d: change_manifest(d, data_bytes=0),
            errors.FormatError,
            "cluster 0 of a table.*got at byte 0; expected 0 to 0, in the file",
        ),
        (lambda d: change_manifest(d, data_bytes=32767), errors.FormatError, "field data_bytes"),
        (lambda d: change_manifest(d, page_bytes=2048), errors.FormatError, "field page_bytes"),
        (
            lambda d: change_manifest(d, page_bytes=12288),
            errors.FormatError,
            "field page_bytes.*expected a power of two",
        ),
        (
            lambda d: change_table(d, 3, 4096, "offset_bytes"),
            errors.FormatError,
            "cluster 3 of a table.*got at byte 4096; expected behind cluster 2, 8192",
        ),
        (
            lambda d: change_table(d, 4, 32768, "offset_bytes"),
            errors.FormatError,
            "cluster 4 of a table.*got at byte 32768; expected 0 to 19968, in the file",
        ),
        (
            lambda d: change_table(d, 4, 2**64 - 4096, "offset_bytes"),
            errors.FormatError,
            "cluster 4 of a table.*got at byte -4096",
        ),
        (
            lambda d: change_table(d, 0, 2050, "offset_bytes"),
            errors.FormatError,
            "cluster 0 of a table.*expected a multiple of 4",
        ),
        (
            lambda d: change_table(d, 0, 4000, "offset_bytes"),
            errors.FormatError,
            "cluster 0 of a table.*got 192 bytes on 2 pages; expected on 1",
        ),
        (lambda d: change_table(d, 1, 1), errors.FormatError, "field n_vectors.*expected 333"),
        (
            lambda d: change_table(d, 1, 2**32 - 1),
            errors.FormatError,
            "cluster 1 of a table.*got 4294967295 vectors; expected",
        ),
    ],
)
def test_damaged_files(
    folder: Path, damage: Callable[[Path], object], kind: type[Exception], message: str
) -> None:
    made = make(folder, COUNTS)
    damage(made.directory)
    with pytest.raises(kind, match=message) as caught:
        open_clusters(made.directory)
    assert type(caught.value) is kind


def test_a_file_that_shrinks_while_it_is_open(folder: Path, path: str) -> None:
    made = make(folder, COUNTS)
    with open_clusters(made.directory, engine=path) as device:
        os.truncate(made.directory / "clusters.bin", 8192)
        with pytest.raises((errors.TruncatedFileError, errors.ShortReadError)):
            device.distances(made.query(), [4]).finish()
        assert pairs(device.distances(made.query(), [0]).finish()) == made.reply(made.query(), 0)


def faulty(
    made: Made, *rules: FaultRule, path: str = "auto", **options: object
) -> tuple[FaultyEngine, SsdClusterDevice]:
    engine = FaultyEngine(rules, path, poison=True)
    return engine, SsdClusterDevice(made.directory, engine=engine, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("threads", [0, 3])
def test_each_read_fails_in_turn(folder: Path, path: str, threads: int) -> None:
    made = make(folder, [4000] * 40, seed=3)  # three batches, each of several requests
    expected = [each for cluster in range(40) for each in made.reply(made.query(), cluster)]
    for nth in range(1, 30):
        engine, device = faulty(
            made,
            FaultRule(operation="read", path="*.bin", nth=nth, count=1),
            path=path,
            threads=threads,
        )
        with engine, device:
            failed = None
            try:
                assert pairs(device.distances(made.query(), range(40)).finish()) == expected
            except errors.ReadError as error:
                failed = error
            assert (failed is None) == (engine.stats().fault_hits == 0)
            if failed is None:
                break
            assert (failed.errno, failed.path) == (5, str(made.directory / "clusters.bin"))
            assert pairs(device.distances(made.query(), [7]).finish()) == made.reply(
                made.query(), 7
            )
    assert nth > 3


@pytest.mark.parametrize("fault", ["flip", "stale"])
def test_wrong_bytes(folder: Path, fault: str) -> None:
    made = make(folder, COUNTS)
    engine, device = faulty(
        made, FaultRule(fault, operation="read", path="*.bin", count=1, value=77)
    )
    with engine, device:
        with pytest.raises(errors.ChecksumError, match="cluster 4 is not what was written"):
            device.distances(made.query(), [4]).finish()
        assert pairs(device.distances(made.query(), [4]).finish()) == made.reply(made.query(), 4)


def test_short_reads_are_continued(folder: Path, path: str) -> None:
    made = make(folder, COUNTS)
    engine, device = faulty(
        made, FaultRule("short", operation="read", path="*.bin", count=3, value=4096), path=path
    )
    with engine, device:
        assert pairs(device.distances(made.query(), [4]).finish()) == made.reply(made.query(), 4)


@pytest.mark.parametrize("threads", [0, 2])
def test_a_device_that_stalls(folder: Path, threads: int) -> None:
    """A read that never ends: the deadline's error, in the caller's thread, and other tickets go
    on."""
    made = make(folder, COUNTS)
    engine = FaultyEngine(
        [FaultRule("never", operation="read", path="*.bin", count=1)], poison=True
    )
    try:
        with SsdClusterDevice(made.directory, engine=engine, threads=threads) as device:
            stalled = device.distances(made.query(), [4], deadline_s=0.2)
            assert until(lambda: engine.stats().in_flight > 0)
            assert pairs(device.distances(made.query(), [0]).finish()) == made.reply(
                made.query(), 0
            )
            with pytest.raises(errors.DeadlineExceededError):
                stalled.finish()
            with pytest.raises(errors.DeadlineExceededError):
                stalled.next()
    finally:
        engine.close(grace_s=0.05)


@pytest.mark.parametrize("how", ["cancel", "forget", "close"])
def test_whoever_waits_is_woken(folder: Path, how: str) -> None:
    made = make(folder, COUNTS)
    engine = FaultyEngine([FaultRule("never", operation="read", path="*.bin")], poison=True)
    try:
        device = SsdClusterDevice(made.directory, engine=engine)
        ticket = device.distances(made.query(), [4, 3])
        raised: list[BaseException] = []

        def wait() -> None:
            try:
                ticket.finish()
            except errors.EspnxError as error:
                raised.append(error)

        waiting = threading.Thread(target=wait)
        waiting.start()
        assert until(lambda: engine.stats().in_flight > 0)
        {"cancel": ticket.cancel, "forget": device.forget, "close": device.close}[how]()
        waiting.join(20)
        assert [type(each) for each in raised] == [errors.TransferCancelledError]
        device.close()
    finally:
        engine.close(grace_s=0.05)


def test_cancelling_what_is_done_changes_nothing(folder: Path) -> None:
    made = make(folder, COUNTS)
    with open_clusters(made.directory) as device:
        ticket = device.distances(made.query(), [4])
        ticket.finish()
        ticket.cancel()
        assert pairs(ticket.finish()) == made.reply(made.query(), 4)


def test_a_child_process_is_told(folder: Path) -> None:
    made = make(folder, COUNTS)
    with open_clusters(made.directory) as device:
        ticket = device.distances(made.query(), [4])
        child = os.fork()
        if child == 0:
            told = 0
            for call in (ticket.next, ticket.cancel, lambda: device.distances(made.query(), [0])):
                try:
                    call()
                except errors.InvalidInputError:
                    told += 1
            os._exit(told)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
        assert pairs(ticket.finish()) == made.reply(made.query(), 4)


QUERY = torch.zeros(8, dtype=torch.uint8)
IDS, VECTORS, CLUSTERS = np.arange(4), np.zeros((4, 8), np.uint8), np.array([0, 1, 1, 0])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": np.arange(3)}, r"ids of vectors; got \[3\]"),
        ({"ids": np.arange(4.0)}, "ids of vectors; got float64"),
        (
            {"ids": np.array([0, 1, 2, 2**31])},
            "got 0 to 2147483648; expected numbers that int32 holds",
        ),
        ({"vectors": VECTORS.astype(np.float64)}, "vectors of clusters; got float64"),
        ({"vectors": VECTORS[0]}, r"vectors of clusters; got uint8 \[8\]"),
        ({"vectors": np.zeros((4, 32769), np.uint8)}, "dimension of vectors; got 32769"),
        ({"assignment": np.array([0, 1, 1])}, r"assignment of vectors; got \[3\]"),
        ({"assignment": np.array([0, 1, 1, -1])}, "assignment of vectors; got -1 to 1"),
        ({"assignment": np.array([[0], [1], [1], [-2]])}, "assignment of vectors; got -2 to 1"),
        ({"n_clusters": 1}, "n_clusters; got 1; expected 2 to"),
    ],
)
def test_what_is_not_written(folder: Path, change: dict[str, object], message: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=message):
        write_clusters(
            folder / "c", **{"ids": IDS, "vectors": VECTORS, "assignment": CLUSTERS, **change}
        )  # type: ignore[arg-type]
    assert not (folder / "c").exists()


def test_a_cluster_that_is_too_large(folder: Path) -> None:
    n = CLUSTER_BYTES_MAX // (4 + 32768) + 1
    vectors = np.broadcast_to(np.zeros(1, np.uint8), (n, 32768))
    with pytest.raises(
        errors.InvalidInputError,
        match="cluster 0; got 2048 vectors of 32772 bytes; expected at most 67108864",
    ):
        write_clusters(folder / "c", np.zeros(n, np.int32), vectors, np.zeros(n, np.int32))


def test_nothing_is_overwritten(folder: Path) -> None:
    made = make(folder, COUNTS)
    with pytest.raises(errors.InvalidInputError, match="already holds clusters"):
        write_clusters(made.directory, IDS, VECTORS, CLUSTERS)
    with open_clusters(made.directory) as device:
        assert pairs(device.distances(made.query(), [4]).finish()) == made.reply(made.query(), 4)


def test_an_interrupted_write_publishes_nothing_and_can_be_repeated(folder: Path) -> None:
    for operation in ("open_write", "write", "sync", "truncate", "rename", "sync_directory"):
        for nth in range(1, 9):
            where = folder / f"{operation}-{nth}"
            with FaultyEngine([FaultRule(operation=operation, nth=nth, count=1)]) as engine:
                try:
                    write_clusters(where, IDS, VECTORS, CLUSTERS, engine=engine)
                except errors.StorageError:
                    if operation != "sync_directory":  # by then the manifest is in its place
                        with pytest.raises(errors.StoreNotFoundError):
                            open_clusters(where)
                        write_clusters(where, IDS, VECTORS, CLUSTERS, engine=engine)
                else:
                    assert engine.stats().fault_hits == 0
                    break
            with open_clusters(where) as device:
                assert len(device.distances(QUERY, [0, 1]).finish()) == 4
        assert nth > 1


def test_a_vector_in_several_clusters(folder: Path) -> None:
    """Up to r of them, -1 for none; no clusters at all are a file, too."""
    write_clusters(
        folder / "c", IDS, VECTORS, np.array([[0, 2], [2, -1], [-1, -1], [0, 0]]), n_clusters=4
    )
    with open_clusters(folder / "c") as device:
        assert device.clusters.n_vectors.tolist() == [3, 0, 2, 0]
        assert device.distances(QUERY, [0, 2]).finish()["id"].tolist() == [0, 3, 3, 0, 1]
    write_clusters(folder / "none", IDS[:0], VECTORS[:0], CLUSTERS[:0])
    with open_clusters(folder / "none") as device:
        assert device.clusters.n_clusters == 0
        assert device.distances(QUERY, []).finish().size == 0
