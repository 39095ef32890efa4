"""Damaged, truncated, foreign and stale graphs, and reads that fail: a typed error, no result, and
the graph can be searched again."""

from __future__ import annotations

import contextlib
import shutil
import time
from concurrent import futures
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.graph.devices.walks import GraphWalks
from espnx.graph.format import CODEBOOK, CODES, ENTRIES, NODES, ROWS
from espnx.storage import FaultRule
from espnx.storage.manifest import NAME
from tests.sweeps import at_length, some

QUERY = np.zeros((8, 24), np.float32)
#: Who waits for whom does not depend on where the codes lie.
one_graph = pytest.mark.parametrize("graph", some(["paged", "inline", "memory"], 3), indirect=True)


def copy_of(graph: Path, to: Path) -> Path:
    return Path(shutil.copytree(graph, to / "g"))


def open_and_verify(path: Path) -> None:
    with espnx.graph.open(path) as index:
        index.verify()


@pytest.mark.parametrize("name", [NODES, ROWS, CODES, CODEBOOK, ENTRIES, NAME])
def test_files_that_are_missing_cut_or_long(graph: Path, tmp_path: Path, name: str) -> None:
    if not (graph / name).exists():
        pytest.skip("codes lie in the pages")
    for change in ("missing", "cut", "long"):
        path = copy_of(graph, tmp_path / change)
        data = (path / name).read_bytes()
        (path / name).unlink()
        if change != "missing":
            (path / name).write_bytes(data[:-9] if change == "cut" else data + b"\0")
        if name == NAME and change == "long":
            with pytest.raises(errors.EspnxError):
                espnx.graph.open(path)
            continue
        with pytest.raises(
            (errors.FileMissingError, errors.TruncatedFileError, errors.FormatError)
        ):
            espnx.graph.open(path)


@pytest.mark.sampled(1)
@at_length("places", 9, 25)
@pytest.mark.parametrize("name", [NODES, ROWS, CODES, CODEBOOK, ENTRIES])
def test_every_region_of_bytes_is_checked(
    graph: Path, tmp_path: Path, name: str, places: int
) -> None:
    if not (graph / name).exists():
        pytest.skip("codes lie in the pages")
    path = copy_of(graph, tmp_path)
    data = bytearray((path / name).read_bytes())
    for at in np.linspace(0, len(data) - 1, places).round().astype(int).tolist():
        changed = bytearray(data)
        changed[at] ^= 0x10
        (path / name).write_bytes(changed)
        with pytest.raises((errors.ChecksumError, errors.FormatError)):
            open_and_verify(path)


def test_a_page_at_another_place_or_of_another_graph(
    graph: Path, base: np.ndarray, tmp_path: Path
) -> None:
    path = copy_of(graph, tmp_path)
    with espnx.graph.open(path) as index:
        size, n_pages = index.facts.layout.page_bytes, index.facts.layout.n_pages
    data = bytearray((path / NODES).read_bytes())
    swapped = data[size : 2 * size] + data[:size] + data[2 * size :]
    (path / NODES).write_bytes(swapped)
    with espnx.graph.open(path) as index:
        with pytest.raises(errors.StaleDataError):
            index.verify()
        with pytest.raises(errors.ChecksumError, match="another page"):
            index.search(base[: n_pages * 2], 5, list_size=2000)
    other = tmp_path / "other"
    codes = index.facts.layout.codes_in
    espnx.graph.build(
        base,
        other,
        max_degree=16,
        list_size=40,
        codes=codes,
        threads=1,
        pq_bytes=8 if codes == "inline" else 12,
    )
    (path / NODES).write_bytes((other / NODES).read_bytes())
    with (
        espnx.graph.open(path) as index,
        pytest.raises(errors.ChecksumError, match="another graph"),
    ):
        index.search(QUERY)


def test_no_graph(tmp_path: Path) -> None:
    with pytest.raises(errors.StoreNotFoundError):
        espnx.graph.open(tmp_path)
    with pytest.raises(errors.StoreNotFoundError):
        espnx.graph.open(tmp_path / "nothing")


@pytest.mark.sampled(1)
@pytest.mark.parametrize("engine", ["auto", "posix"])
@pytest.mark.parametrize(
    ("rule", "error"),
    [
        (FaultRule("error", operation="read", nth=5, count=1), errors.ReadError),
        (FaultRule("flip", operation="read", nth=7, count=1, value=333), errors.ChecksumError),
        (FaultRule("stale", operation="read", nth=9, count=1), errors.ChecksumError),
        (FaultRule("never", operation="read", nth=3, count=1), errors.DeadlineExceededError),
    ],
)
def test_reads_that_fail(
    graph: Path, queries: np.ndarray, engine: str, rule: FaultRule, error: type[Exception]
) -> None:
    with espnx.graph.open(graph, engine=engine, rules=[rule]) as index:
        with pytest.raises(error):
            index.search(
                queries, 5, list_size=30, deadline_s=0.3 if rule.fault == "never" else 30.0
            )
        again = index.search(queries, 5, list_size=30, beam_width=1)
    with espnx.graph.open(graph) as index:
        assert np.array_equal(again.ids, index.search(queries, 5, list_size=30, beam_width=1).ids)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "rules",
    [
        *(
            [FaultRule("short", operation="read", probability=0.3, value=value)]
            for value in (0, 1, 100, 512, 4095)
        ),
        [
            FaultRule("error", operation="read", probability=0.2, value=4),
            FaultRule("error", operation="read", probability=0.2, value=11),
        ],
        [FaultRule("delay", operation="read", probability=0.1, value=20_000_000)],
    ],
)
def test_reads_that_take_several_turns(
    graph: Path, queries: np.ndarray, rules: list[FaultRule]
) -> None:
    with espnx.graph.open(graph) as index, espnx.graph.open(graph, rules=rules) as faulty:
        expected = index.search(queries, 5, list_size=30, beam_width=1)
        assert np.array_equal(
            faulty.search(queries, 5, list_size=30, beam_width=1).ids, expected.ids
        )


@one_graph
def test_a_deadline_is_of_each_query_and_not_of_the_batch(graph: Path, queries: np.ndarray) -> None:
    slow = FaultRule("delay", operation="read", probability=1.0, value=20_000_000)
    deadline_s, asked = 1.0, np.resize(queries, (20, queries.shape[1]))
    with (
        espnx.graph.open(graph, threads=1, walks=1, rules=[slow]) as index,
        espnx.graph.open(graph) as plain,
    ):
        begun = time.monotonic()
        found = index.search(asked, 5, list_size=5, beam_width=1, deadline_s=deadline_s)
        assert time.monotonic() - begun > deadline_s, "a batch that is too short says nothing"
        assert np.array_equal(found.ids, plain.search(asked, 5, list_size=5, beam_width=1).ids)


@one_graph
@pytest.mark.parametrize("walks", [1, 64])
def test_searches_go_on_after_reads_that_never_end(
    graph: Path, queries: np.ndarray, walks: int
) -> None:
    """Each takes a place with the queue forever, and no walk's place; nor does anybody wait for it
    again."""
    lost = FaultRule("never", operation="read", nth=1, count=min(walks, 40))
    with (
        espnx.graph.open(graph, threads=1, walks=walks, rules=[lost]) as index,
        espnx.graph.open(graph) as plain,
    ):
        with pytest.raises(errors.DeadlineExceededError):
            index.search(queries[:40], 5, list_size=30, deadline_s=0.3)
        begun = time.monotonic()
        for query in queries[:10]:
            found = index.search(query, 5, list_size=30, beam_width=1, deadline_s=20.0)
            assert np.array_equal(found.ids, plain.search(query, 5, list_size=30, beam_width=1).ids)
        assert time.monotonic() - begun < 10, "every step waits for reads that never end"


@one_graph
@pytest.mark.parametrize("way", ["a search", "a device"])
def test_a_search_is_called_off_while_another_thread_waits(
    graph: Path, queries: np.ndarray, monkeypatch: pytest.MonkeyPatch, way: str
) -> None:
    """For a read that never ends; what is asked for next is found."""
    lost = FaultRule("never", operation="read", count=1)
    opened = partial(espnx.graph.GraphIndex, rules=[lost])
    monkeypatch.setattr("espnx.graph.devices.walks.GraphIndex", opened)
    with contextlib.closing(GraphWalks(graph)) as device:
        ticket = device.walk(queries[:3], 5, list_size=30, deadline_s=60.0)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(ticket.finish)
            assert not futures.wait([found], timeout=0.1).done
            ticket.cancel() if way == "a search" else device.forget()
            assert isinstance(found.exception(timeout=20), errors.TransferCancelledError)
        with pytest.raises(errors.TransferCancelledError):
            ticket.finish()
        again = device.walk(queries[:3], 5, list_size=30).finish()
    with espnx.graph.open(graph) as plain:
        expected = plain.search(queries[:3], 5, list_size=30)
    assert np.array_equal(again.ids, expected.ids)


@one_graph
def test_a_query_alone_does_not_wait_behind_a_batch(graph: Path, queries: np.ndarray) -> None:
    slow = FaultRule("delay", operation="read", probability=1.0, value=2_000_000)
    with espnx.graph.open(graph, threads=1, walks=1, rules=[slow]) as index:
        batch = index.start(
            np.resize(queries, (40, queries.shape[1])), 5, list_size=30, beam_width=1
        )
        index.search(queries[0], 5, list_size=10, beam_width=1)
        ids, _ = batch.partial(0)
        assert (ids[-1] < 0).all(), "the batch was over first"


@one_graph
def test_early_results_are_of_pages_that_have_arrived(graph: Path, queries: np.ndarray) -> None:
    slow = FaultRule("delay", operation="read", probability=1.0, value=2_000_000)
    with espnx.graph.open(graph, threads=1, walks=8, rules=[slow]) as index:
        search = index.start(
            np.resize(queries, (60, queries.shape[1])), 5, list_size=30, beam_width=1
        )
        ids, far = search.partial(1)
        assert (ids[:, 0] >= 0).all()
        assert np.isfinite(far[:, 0]).all()
        search.finish()


@one_graph
@at_length("times", 6, 20)
def test_a_search_outlives_the_graph_that_began_it(
    graph: Path, queries: np.ndarray, times: int
) -> None:
    expected = np.sort(exact_ids(graph, queries), axis=1)
    for _ in range(times):
        search = espnx.graph.open(graph).start(queries, 5, list_size=300)
        assert np.array_equal(np.sort(search.finish().ids, axis=1), expected)
        # dropped at once, with everything that its walks look at
        espnx.graph.open(graph).start(queries, 5, list_size=300)


def exact_ids(graph: Path, queries: np.ndarray) -> np.ndarray:
    with espnx.graph.open(graph) as index:
        return index.search(queries, 5, list_size=300).ids


@one_graph
def test_closing_does_not_hang_on_a_read_that_never_ends(graph: Path) -> None:
    index = espnx.graph.open(graph, rules=[FaultRule("never", operation="read")])
    with pytest.raises(errors.DeadlineExceededError):
        index.search(QUERY, 5, deadline_s=0.3)
    begun = time.monotonic()
    index.close()
    assert time.monotonic() - begun < 20


def test_a_search_that_has_failed_says_so_again(
    graph: Path, queries: np.ndarray, tmp_path: Path
) -> None:
    path = copy_of(graph, tmp_path)
    data = bytearray((path / NODES).read_bytes())
    for at in range(100, len(data), 4096):
        data[at] ^= 1
    (path / NODES).write_bytes(data)
    with espnx.graph.open(path) as index:
        search = index.start(queries, 5, list_size=30)
        said = []
        for _ in range(2):
            with pytest.raises(errors.ChecksumError) as caught:
                search.finish()
            said.append(str(caught.value))
        assert said[0] == said[1]
        with pytest.raises(errors.ChecksumError):
            search.partial(1)
