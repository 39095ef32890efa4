"""Algorithms 1 and 2 of in-storage distance calculation: one result, NumPy's, for every number of
host threads."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from espnx import errors
from espnx.device.clusters import nearest_by_command, nearest_by_read, open_clusters, write_clusters
from espnx.device.clusters.layout import FORMATS
from espnx.device.clusters.nearest import nearest
from espnx.device.vectors.interface import REPLY
from espnx.ops.distances import METRICS
from espnx.storage import FaultRule, FaultyEngine
from tests.device.clusters.made import make
from tests.storage.common import interrupted

ALGORITHMS = (nearest_by_read, nearest_by_command)


def found(result: tuple[np.ndarray, np.ndarray]) -> list[tuple[float, int]]:
    ids, far = result
    assert (ids.dtype, far.dtype) == (np.int32, np.float32)
    return list(zip(far.tolist(), ids.tolist(), strict=True))


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("fmt", FORMATS)
def test_both_find_the_nearest(folder: Path, fmt: str, metric: str) -> None:
    made = make(folder, [30, 0, 70, 1, 200, 64, 5], fmt, seed=4)
    with open_clusters(made.directory) as device:
        for seed in range(3):
            query, wanted = made.query(seed), [6, 0, 4, 2, 1]
            for k in (1, 10, 305, 1000):
                expected = made.nearest(query, wanted, k, metric)
                for algorithm in ALGORITHMS:
                    for threads in (1, 2, 3, 32):
                        assert (
                            found(
                                algorithm(device, query, wanted, k, metric=metric, threads=threads)
                            )
                            == expected
                        )


@pytest.mark.parametrize("threads", [1, 2])
def test_ties_go_by_id_and_an_id_counts_once(folder: Path, threads: int) -> None:
    """Two hundred vectors at three distances, each in up to three clusters."""
    rng = np.random.default_rng(0)
    ids = rng.permutation(200).astype(np.int32)
    vectors = rng.integers(0, 3, (200, 1)).astype(np.uint8)
    write_clusters(folder / "c", ids, vectors, rng.integers(-1, 5, (200, 3)), n_clusters=5)
    query = torch.zeros(1, dtype=torch.uint8)
    with open_clusters(folder / "c") as device:
        replies = device.distances(query, range(5)).finish()
        expected = sorted({(float(each["distance"]), int(each["id"])) for each in replies})
        assert len(expected) < len(replies)
        for k in (1, 20, 90, 200):
            for algorithm in ALGORITHMS:
                assert found(algorithm(device, query, range(5), k, threads=threads)) == expected[:k]


def test_equal_bits_of_floats(folder: Path) -> None:
    rng = np.random.default_rng(2)
    vectors = rng.normal(size=(500, 37)).astype(np.float32)
    write_clusters(folder / "c", np.arange(500), vectors, rng.integers(0, 9, 500))
    query = torch.from_numpy(rng.normal(size=37).astype(np.float32))
    with open_clusters(folder / "c") as device:
        results = [
            found(algorithm(device, query, range(9), 50, threads=threads))
            for algorithm in ALGORITHMS
            for threads in (1, 4)
        ]
    assert all(each == results[0] for each in results)
    far = ((vectors.astype(np.float64) - query.double().numpy()) ** 2).sum(1)
    assert [of for _, of in results[0]] == np.argsort(far)[:50].tolist()


def test_what_is_not_a_number_comes_last() -> None:
    replies = np.zeros(40, REPLY)
    replies["id"] = np.arange(40)
    replies["distance"] = np.nan
    replies["distance"][30] = 2.0
    assert nearest(replies, 2)[0].tolist() == [30, 0]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"k": 0}, "k, vectors wanted; got 0"),
        ({"threads": 0}, "threads of the host; got 0"),
        ({"threads": 33}, "got 33; .* at most 32"),
    ],
)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_is_refused(
    folder: Path, algorithm: object, change: dict[str, int], message: str
) -> None:
    made = make(folder, [3, 3])
    with (
        open_clusters(made.directory) as device,
        pytest.raises(errors.InvalidInputError, match=message),
    ):
        algorithm(device, made.query(), [0, 1], **{"k": 1, **change})  # type: ignore[operator]


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_ctrl_c_while_a_read_stalls(
    folder: Path, algorithm: Callable[..., tuple[np.ndarray, np.ndarray]]
) -> None:
    """It does not wait for the threads' deadlines, and the device answers what comes next."""
    made = make(folder, [30, 0, 70, 1, 200, 64, 5])
    query, wanted = made.query(), [6, 0, 4, 2, 1]
    engine = FaultyEngine([FaultRule("never", path="*clusters.bin", count=2, operation="read")])
    with open_clusters(made.directory, engine=engine) as device:
        begun = time.perf_counter()
        with interrupted(lambda: engine.stats().fault_hits == 2), pytest.raises(KeyboardInterrupt):
            algorithm(device, query, wanted, 10, threads=5, deadline_s=60.0)
        assert time.perf_counter() - begun < 30
        assert found(algorithm(device, query, wanted, 10, threads=5)) == made.nearest(
            query, wanted, 10
        )
    engine.close(grace_s=0.05)
