"""What holds for every device that measures the vectors of clusters. All values are whole numbers,
so that distances are exact in every format and any order of additions."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...storage import FaultyEngine
from ..clusters.write import write_clusters
from ..near_storage import NearStorageDevice
from ..vectors.interface import REPLY, ClusterDevice
from .faults import fault_checks
from .requirement import in_threads, raises, require

_DTYPES = {"uint8": np.uint8, "int8": np.int8, "fp16": np.float16, "fp32": np.float32}
_SIZES = (5, 0, 1, 300, 64, 65, 0)  # vectors of each cluster


@dataclass(frozen=True)
class _Known:
    """A file of clusters and what is in it."""

    directory: str
    ids: np.ndarray
    vectors: np.ndarray
    of_cluster: list[np.ndarray]

    def query(self, seed: int) -> torch.Tensor:
        values = _whole(self.vectors.dtype, (self.vectors.shape[1],), seed)
        return torch.from_numpy(values if values.dtype.kind in "iu" else values.astype(np.float32))

    def replies(self, query: torch.Tensor, clusters: list[int], metric: str) -> np.ndarray:
        """`REPLY` of clusters, one after the other."""
        rows = np.concatenate(
            [np.empty(0, np.int64), *(self.of_cluster[cluster] for cluster in clusters)]
        ).astype(np.int64)
        values, wanted = self.vectors[rows].astype(np.int64), query.numpy().astype(np.int64)
        found = np.empty(len(rows), REPLY)
        found["distance"] = (
            ((values - wanted) ** 2).sum(1) if metric == "l2" else -(values * wanted).sum(1)
        )
        found["id"] = self.ids[rows]
        return found


def _whole(dtype: Any, shape: tuple[int, ...], seed: int) -> np.ndarray:
    low, high = {"u": (0, 256), "i": (-128, 128), "f": (-9, 10)}[np.dtype(dtype).kind]
    return np.random.default_rng(seed).integers(low, high, shape).astype(dtype)


@contextmanager
def _known(device: NearStorageDevice, fmt: str = "uint8", dim: int = 60) -> Iterator[_Known]:
    rng = np.random.default_rng(dim)
    of = rng.permutation(np.repeat(np.arange(len(_SIZES)), _SIZES))
    ids, vectors = (
        rng.permutation(len(of)).astype(np.int32) * 3 - 100,
        _whole(_DTYPES[fmt], (len(of), dim), dim),
    )
    directory = os.path.join(device.path, f"verify-{fmt}-{dim}.clusters")
    write_clusters(directory, ids, vectors, of, n_clusters=len(_SIZES))
    try:
        yield _Known(
            directory,
            ids,
            vectors,
            [np.flatnonzero(of == cluster) for cluster in range(len(_SIZES))],
        )
    finally:
        shutil.rmtree(directory)


def _require_right(found: np.ndarray, wanted: np.ndarray, what: str) -> None:
    require(
        found.dtype == REPLY and len(found) == len(wanted),
        f"{what}: entries",
        got=(found.dtype, len(found)),
        expected=len(wanted),
    )
    wrong = np.flatnonzero(found != wanted)[:1].tolist()
    require(
        not wrong,
        f"{what}: entry {wrong}",
        got=wrong and found[wrong[0]],
        expected=wrong and wanted[wrong[0]],
    )


def measures_every_vector(device: NearStorageDevice) -> None:
    """Formats, lengths of vectors, metrics; empty clusters, and one that is named twice;
    counters."""
    for fmt in _DTYPES:
        for dim in (1, 60, 131):
            with (
                _known(device, fmt, dim) as known,
                closing(device.open_clusters(known.directory)) as clusters,
            ):
                for metric in ("l2", "ip"):
                    for seed, some in enumerate(([3, 0, 3, 1], [6], [], list(range(len(_SIZES))))):
                        query, before = known.query(seed), clusters.stats()
                        ticket = clusters.distances(query, some, metric=metric)
                        _require_right(
                            ticket.finish(),
                            known.replies(query, some, metric),
                            f"{fmt}, {dim} values, {metric}",
                        )
                        least = sum(len(known.of_cluster[cluster]) for cluster in set(some)) * (
                            dim * known.vectors.itemsize + 4
                        )
                        asked = ticket.stats.bytes_asked
                        require(
                            asked >= least,
                            "bytes asked of a ticket",
                            got=asked,
                            expected=f"at least {least}",
                        )
                        grown = clusters.stats().bytes_asked - before.bytes_asked
                        require(
                            grown == asked,
                            "bytes asked of the device for it",
                            got=grown,
                            expected=asked,
                        )


def names_every_cluster_once(device: NearStorageDevice) -> None:
    """Clusters are named as they are measured, in any order; what was named can be had at once."""
    some = [3, 4, 1, 0, 3]
    with _known(device) as known, closing(device.open_clusters(known.directory)) as clusters:
        query = known.query(9)
        ticket, named, is_all = clusters.distances(query, some), list[int](), False
        while not is_all:
            items, is_all = ticket.next()
            for item in items.tolist():
                _require_right(
                    ticket.reply(item),
                    known.replies(query, [some[item]], "l2"),
                    f"the cluster at place {item}",
                )
            named += items.tolist()
        require(
            sorted(named) == list(range(len(some))),
            "places that `next` has named",
            got=named,
            expected="each once",
        )


def refuses_what_does_not_fit(device: NearStorageDevice) -> None:
    with _known(device) as known, closing(device.open_clusters(known.directory)) as clusters:
        for query, some in (
            (known.query(0)[:-1], [0]),
            (known.query(0).float(), [0]),
            (known.query(0), [-1]),
            (known.query(0), [7]),
        ):
            with raises(errors.InvalidInputError):
                clusters.distances(query, some).finish()
        with raises(errors.InvalidInputError):
            clusters.distances(known.query(0), [0], metric="cosine")
        _require_right(
            clusters.distances(known.query(0), [0]).finish(),
            known.replies(known.query(0), [0], "l2"),
            "after a refusal",
        )


def answers_threads_at_once(device: NearStorageDevice) -> None:
    with _known(device) as known, closing(device.open_clusters(known.directory)) as clusters:

        def ask(seed: int) -> None:
            for turn in range(50):
                query, some = known.query(100 * seed + turn), [turn % 7, seed % 7, 3]
                _require_right(
                    clusters.distances(query, some).finish(),
                    known.replies(query, some, "l2"),
                    "with other threads",
                )

        in_threads(ask, range(4))


def is_closed(device: NearStorageDevice) -> None:
    """Twice."""
    with _known(device) as known:
        clusters: ClusterDevice = device.open_clusters(known.directory)
        for _ in range(2):
            clusters.close()
        with raises(errors.EngineClosedError):
            clusters.distances(known.query(0), [0])


@contextmanager
def _asked(
    device: NearStorageDevice, *, engine: FaultyEngine, deadline_s: float
) -> Iterator[Callable[[], None]]:
    with (
        _known(device) as known,
        closing(device.open_clusters(known.directory, engine=engine)) as clusters,
    ):
        query = known.query(1)
        yield lambda: _require_right(
            clusters.distances(query, [3, 4], deadline_s=deadline_s).finish(),
            known.replies(query, [3, 4], "l2"),
            "after an error",
        )


CHECKS = (
    measures_every_vector,
    names_every_cluster_once,
    refuses_what_does_not_fit,
    answers_threads_at_once,
    is_closed,
)
FAULT_CHECKS = fault_checks(_asked)
