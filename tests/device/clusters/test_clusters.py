"""Distances of clusters on a plain SSD: every reply is NumPy's, in whatever order, on whatever
path, from however many threads."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.clusters import open_clusters, write_clusters
from espnx.device.clusters.commands import DistancesCommand
from espnx.device.clusters.device import SsdClusterDevice
from espnx.device.clusters.layout import FORMATS
from espnx.device.vectors.interface import DIST_CALC
from espnx.ops.distances import METRICS
from espnx.storage import NativeEngine
from tests.device.clusters.made import Made, make, pairs

# 64 bytes an entry: 64 fill a page.
COUNTS = [3, 0, 64, 65, 1, 0, 200, 17, 63]


def all_replies(
    made: Made, query: torch.Tensor, wanted: list[int], metric: str = "l2"
) -> list[tuple[float, int]]:
    return [each for cluster in wanted for each in made.reply(query, cluster, metric)]


@pytest.mark.parametrize("fmt", FORMATS)
def test_replies(folder: Path, path: str, fmt: str) -> None:
    made = make(folder, COUNTS, fmt)
    query = made.query()
    with open_clusters(made.directory, engine=path) as device:
        for metric in METRICS:
            for wanted in ([], [4], list(range(9)), [8, 0, 0, 5, 3], [1, 5]):
                assert pairs(
                    device.distances(query, wanted, metric=metric).finish()
                ) == all_replies(made, query, wanted, metric)


@pytest.mark.parametrize("dim", [1, 3, 17, 100, 1021])
def test_dimensions(folder: Path, dim: int) -> None:
    made = make(folder, [5, 40], "int8", dim)
    with open_clusters(made.directory) as device:
        assert pairs(device.distances(made.query(), [0, 1]).finish()) == all_replies(
            made, made.query(), [0, 1]
        )


@pytest.mark.sampled(1)
@pytest.mark.parametrize("threads", [0, 1, 3])
@pytest.mark.parametrize("window_bytes", [1, 1 << 20, 64 << 20])
def test_many_batches(folder: Path, threads: int, window_bytes: int) -> None:
    """12 MiB in batches of 4, through windows that hold none of them, and all: each item comes
    once, its reply with it."""
    rng = np.random.default_rng(5)
    made = make(folder, rng.integers(0, 4000, 100).tolist(), seed=7)
    query, wanted = made.query(), rng.permutation(100).tolist()
    with (
        NativeEngine(poison=True) as engine,
        SsdClusterDevice(
            made.directory, engine=engine, threads=threads, window_bytes=window_bytes
        ) as device,
    ):
        ticket = device.distances(query, wanted)
        came: list[int] = []
        finished = False
        while not finished:
            items, finished = ticket.next(3)
            for item in items.tolist():
                assert pairs(ticket.reply(item)[:4]) == made.reply(query, wanted[item])[:4]
            came += items.tolist()
        assert sorted(came) == list(range(100))
        assert pairs(ticket.finish()) == all_replies(made, query, wanted)
        assert ticket.stats.bytes_asked == len(made.ids) * 64
        assert ticket.stats.bytes_moved >= ticket.stats.bytes_asked
        assert device.stats().bytes_asked == ticket.stats.bytes_asked


def test_next_gives_what_is_there_at_its_timeout(folder: Path) -> None:
    made = make(folder, [4, 4])
    with open_clusters(made.directory) as device:
        ticket = device.distances(made.query(), [0, 1])
        came: list[int] = []
        while len(came) < 2:
            came += ticket.next(2**60, timeout_s=0.0)[0].tolist()
        assert sorted(came) == [0, 1]
        assert ticket.next() == (pytest.approx(np.empty(0)), True)


def test_several_threads_at_once(folder: Path) -> None:
    """One device, callers of their own queries; nobody gets another's distances."""
    made = make(folder, [900] * 20)
    queries = [made.query(seed) for seed in range(16)]
    expected = [all_replies(made, query, [3, 7, 19, 0]) for query in queries]
    with open_clusters(made.directory, threads=2) as device, ThreadPoolExecutor(8) as pool:
        for found in (
            list(
                pool.map(
                    lambda query: pairs(device.distances(query, [3, 7, 19, 0]).finish()), queries
                )
            )
            for _ in range(3)
        ):
            assert found == expected


def test_a_ticket_may_be_waited_for_by_several_threads(folder: Path) -> None:
    made = make(folder, [3000] * 12)
    expected = all_replies(made, made.query(), list(range(12)))
    with open_clusters(made.directory) as device, ThreadPoolExecutor(4) as pool:
        ticket = device.distances(made.query(), range(12))
        assert [
            pairs(each.result()) for each in [pool.submit(ticket.finish) for _ in range(4)]
        ] == [expected] * 4


def test_tickets_that_nobody_waits_for(folder: Path) -> None:
    """Their reads end with them, and the next ones are right; replies outlive ticket, device and
    engine."""
    made = make(folder, [2000] * 20)
    with open_clusters(made.directory) as device:
        for _ in range(20):
            device.distances(made.query(), range(20))
        kept = device.distances(made.query(2), [5]).finish()
    assert pairs(kept) == made.reply(made.query(2), 5)


def test_the_window_is_given_back(folder: Path) -> None:
    """By tickets that ended, were cancelled, or met an error: the next one has all of its batches
    under way at once."""
    made = make(folder, [4000] * 50, seed=7)
    with (
        NativeEngine() as engine,
        SsdClusterDevice(made.directory, engine=engine, threads=0, window_bytes=13 << 20) as device,
    ):
        for end in ("finish", "cancel", "drop", "error") * 2:
            before = engine.stats().bytes_asked
            ticket = device.distances(made.query(), range(50))
            assert engine.stats().bytes_asked - before == 50 * 4000 * 64
            if end == "finish":
                ticket.finish()
            elif end == "cancel":
                ticket.cancel()
            elif end == "error":
                device.clusters.crc32c[:] ^= 1
                with pytest.raises(errors.ChecksumError):
                    device.distances(made.query(), [0]).finish()
                device.clusters.crc32c[:] ^= 1
            del ticket


def test_commands(folder: Path) -> None:
    """As the thesis defines them: opcode, cluster's address, query in the payload, 8 bytes of reply
    a vector."""
    made = make(folder, COUNTS)
    with open_clusters(made.directory) as device:
        commands = device.commands(made.query(), [3, 1, 0, 6], metric="ip")
    assert [each.cdw10 for each in commands] == [2, 0, 5], (
        "pages before each; an empty cluster needs no command"
    )
    assert {each.opcode for each in commands} == {DIST_CALC}
    assert {each.payload for each in commands} == {made.query().numpy().tobytes()}
    assert {each.metric for each in commands} == {"ip"}
    assert [each.data_len for each in commands] == [65 * 8, 3 * 8, 200 * 8]
    assert [each.flash_bytes for each in commands] == [8192, 4096, 16384]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"query": torch.zeros(60)}, "query against uint8 vectors; got torch.float32"),
        ({"query": torch.zeros(59, dtype=torch.uint8)}, "got 59 values; expected 60"),
        (
            {"query": torch.zeros(2, 60, dtype=torch.uint8)},
            r"got \[2, 60\] on cpu; expected one query",
        ),
        ({"clusters": [9]}, "number of a cluster; got 9; expected 0 to 8"),
        ({"clusters": [0, -1]}, "number of a cluster; got -1"),
        ({"clusters": [0.5]}, "clusters; got float64"),
        ({"clusters": [[0]]}, r"clusters; got int64 \[1, 1\]"),
        ({"metric": "cos"}, "metric of distances; got 'cos'"),
        ({"deadline_s": 0.0}, "deadline_s must be positive"),
    ],
)
def test_what_is_refused(folder: Path, change: dict[str, object], message: str) -> None:
    made = make(folder, COUNTS)
    with (
        open_clusters(made.directory) as device,
        pytest.raises(errors.InvalidInputError, match=message),
    ):
        device.distances(**{"query": made.query(), "clusters": [0], **change})  # type: ignore[arg-type]


def test_a_closed_device(folder: Path) -> None:
    made = make(folder, COUNTS)
    device = open_clusters(made.directory)
    device.close()
    device.close()
    with pytest.raises(errors.EngineClosedError):
        device.distances(made.query(), [0])


def test_paths_are_told(folder: Path, path: str) -> None:
    made = make(folder, COUNTS)
    with open_clusters(made.directory, engine=path) as device:
        (told,) = device.path_report()
        assert told.path == str(made.directory / "clusters.bin")
        assert told.effective_path.startswith(path)


def test_clusters_that_share_a_page(folder: Path, path: str) -> None:
    """Each is found where the table says, in whatever order they lie; what a request reads of flash
    is each page once."""
    made = make(folder, [3, 0, 20, 64, 10, 300], dim=60)
    begin = np.array([16384 + 2048, 0, 16384 + 4, 0, 4096 + 1284, 20480 + 4096 * 3])
    write_clusters(
        folder / "packed",
        made.ids,
        made.vectors,
        np.array(
            [np.flatnonzero([row in own for own in made.of_cluster])[0] for row in range(397)]
        ),
        n_clusters=6,
        page_bytes=16384,
        offset_bytes=begin,
    )
    query = made.query()
    with open_clusters(folder / "packed", engine=path) as device:
        for wanted in ([5, 4, 3, 2, 1, 0], [0, 2], [3, 4, 3]):
            assert pairs(device.distances(query, wanted).finish()) == all_replies(
                made, query, wanted
            )
        commands = device.commands(query, [0, 1, 2, 4])
        assert [(each.cdw10, each.cdw11) for each in commands] == [(4, 2048), (4, 4), (1, 1284)]
        assert {each.flash_bytes for each in commands} == {16384}
        file = device.clusters
        assert file.new_pages(np.array([0, 2, 1, 5, 4, 3, 0])).tolist() == [1, 0, 0, 2, 1, 0, 0]
        line = DistancesCommand(query, [0, 2, 1, 5, 4, 3]).begin_line(file, {})
        assert line["bytes"] == 4 * 16384


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"page_bytes": 5000}, "page_bytes, of a page of flash; got 5000"),
        ({"page_bytes": 1 << 17}, "page_bytes, of a page of flash; got 131072"),
        ({"offset_bytes": np.zeros(3)}, r"offset_bytes of clusters; got float64 \[3\]"),
        ({"offset_bytes": np.zeros(3, int)}, r"offset_bytes of clusters; got int64 \[3\]"),
        ({"offset_bytes": np.array([0, 100])}, "cluster 1; got at byte 100; expected behind"),
        ({"offset_bytes": np.array([0, 4094])}, "cluster 1; got at byte 4094; expected a multiple"),
        ({"offset_bytes": np.array([0, 4092])}, "cluster 1; got 3200 bytes on 2 pages"),
        ({"offset_bytes": np.array([0, -4])}, "cluster 1; got at byte -4"),
        ({"offset_bytes": np.array([0, 2**44])}, "clusters; got 17592186047616 bytes"),
    ],
)
def test_places_where_no_cluster_may_lie(
    folder: Path, change: dict[str, object], message: str
) -> None:
    made = make(folder, [50, 50])
    of = np.array([int(row in made.of_cluster[1]) for row in range(100)])
    with pytest.raises(errors.InvalidInputError, match=message):
        write_clusters(folder / "c", made.ids, made.vectors, of, **change)  # type: ignore[arg-type]
