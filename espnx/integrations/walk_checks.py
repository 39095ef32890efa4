"""What holds for every device that lets many queries walk over a graph: the nearest of all vectors,
measured in plain Python, and what the graph finds without the device, to the bit."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from .. import errors
from ..device.conformance.requirement import in_threads, raises, require
from ..device.near_storage import NearStorageDevice
from ..graph.build import build
from ..graph.devices.walks import WALKS
from ..graph.filters import RowFilter
from ..graph.index import GraphIndex

_N, _DIM, _K = 400, 16, 10


class _Known:
    """A graph of whole numbers, whose distances are exact, and an open part with it."""

    def __init__(self, directory: str, walks: Any):
        rng = np.random.default_rng(5)
        self.vectors = rng.integers(0, 256, (_N, _DIM), dtype=np.uint8)
        self.queries = rng.integers(0, 256, (20, _DIM)).astype(np.float32)
        self.directory, self.walks = directory, walks

    def nearest(self, query: np.ndarray, allowed: np.ndarray | None) -> list[tuple[float, int]]:
        """Squared distances and rows, ties by row."""
        every = (
            (sum((float(a) - float(b)) ** 2 for a, b in zip(query, row, strict=True)), number)
            for number, row in enumerate(self.vectors)
            if allowed is None or allowed[number]
        )
        return sorted(every)[:_K]

    def require_right(self, queries: np.ndarray, allowed: np.ndarray | None = None) -> None:
        """Asks with a list as long as the graph."""
        include = None if allowed is None else RowFilter.of(allowed)
        found = self.walks.walk(queries, _K, list_size=_N, include=include).finish()
        for query, ids, far in zip(queries, found.ids, found.distances, strict=True):
            there = ids >= 0
            got = list(zip(far[there].tolist(), ids[there].tolist(), strict=True))
            expected = self.nearest(query, allowed)
            require(got == expected, "the nearest rows", got=got, expected=expected)


@contextmanager
def _known(device: NearStorageDevice) -> Iterator[_Known]:
    directory = os.path.join(device.path, "verify.graph")
    try:
        known = _Known(directory, None)
        build(known.vectors, directory, max_degree=16, list_size=40, threads=1)
        with closing(WALKS.open_on(device, directory)) as walks:
            known.walks = walks
            yield known
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def finds_the_nearest(device: NearStorageDevice) -> None:
    """Walks that may find all rows, some, few, none; one query and many."""
    with _known(device) as known:
        for queries in (known.queries[:1], known.queries):
            known.require_right(queries)
            for rows in (np.arange(_N) % 3 == 0, np.arange(_N) < 7, np.zeros(_N, bool)):
                known.require_right(queries, rows)


def finds_what_the_graph_finds(device: NearStorageDevice) -> None:
    """Walks with short lists, which do not find all that there is: rows, distances, pages."""
    with _known(device) as known, GraphIndex(known.directory) as plain:
        for list_size in (_K, 40):
            found = known.walks.walk(known.queries, _K, list_size=list_size).finish()
            wanted = plain.search(known.queries, _K, list_size=list_size)
            for name in ("ids", "distances", "pages"):
                got, expected = getattr(found, name), getattr(wanted, name)
                require(np.array_equal(got, expected), name, got=got, expected=expected)


def tells_what_it_knows_early(device: NearStorageDevice) -> None:
    with _known(device) as known:
        ticket = known.walks.walk(known.queries, _K, list_size=_N)
        ids, far = ticket.partial(1)
        for query, rows, distances in zip(known.queries, ids, far, strict=True):
            for row, distance in zip(rows[rows >= 0], distances[rows >= 0], strict=True):
                square = float(np.square(known.vectors[row].astype(float) - query).sum())
                require(square == distance, "a distance that is known early", got=distance)
        found = ticket.finish()
        require(bool((found.distances <= far).all()), "what is known at the end", got=far)


def answers_threads_at_once(device: NearStorageDevice) -> None:
    with _known(device) as known:
        in_threads(lambda seed: known.require_right(known.queries[seed : seed + 9]), range(4))


def ends_walks(device: NearStorageDevice) -> None:
    """Walks that are cancelled, and a part that is closed meanwhile, twice."""
    with _known(device) as known:
        ticket = known.walks.walk(known.queries, _K, list_size=_N)
        ticket.cancel()
        with raises(errors.TransferCancelledError):
            ticket.finish()
        known.require_right(known.queries[:2])
        for _ in range(2):
            known.walks.close()
        with raises(errors.EngineClosedError):
            known.walks.walk(known.queries, _K, list_size=_N).finish()


def finds_damage(device: NearStorageDevice) -> None:
    """Damage of any page: a walk over all of them ends with an error that names the file."""
    with _known(device) as known:
        for file in known.walks.path_report():
            _damage(file.path)
        with raises(errors.ChecksumError, errors.FormatError):
            known.walks.walk(known.queries[:2], _K, list_size=_N).finish()


def _damage(path: str) -> None:
    data = bytearray(Path(path).read_bytes())
    for at in range(100, len(data), 4096):
        data[at] ^= 1
    Path(path).write_bytes(data)


CHECKS: Sequence[Any] = (
    finds_the_nearest,
    finds_what_the_graph_finds,
    tells_what_it_knows_early,
    answers_threads_at_once,
    ends_walks,
    finds_damage,
)
