"""How many sequences keep X rows: the closed form, every possible answer compared, and what must
not change it the wrong way."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.device.rows.ssd import SsdRowDevice
from espnx.kv import schedule, shown
from espnx.kv.schedule import SMALL_BYTES, Costs, Shape, choose, decide, predict, read_rate
from espnx.ops.attention import Queries, RowsInMemory, attend_rows
from espnx.storage import FaultRule, FaultyEngine

FREE = math.inf


def shape(
    *,
    sequences: int = 16,
    hidden: int = 1024,
    heads: int = 16,
    n_kv: int = 16,
    d: int = 64,
    is_rotary: bool = True,
) -> Shape:
    return Shape(4, sequences, 10_000, hidden, heads, n_kv, d, torch.float16, is_rotary)


def random_shape(rng: random.Random) -> Shape:
    n_kv, d = rng.choice([4, 8, 16]), rng.choice([64, 128])
    return shape(
        sequences=rng.randint(1, 30),
        hidden=rng.randint(1, 2 * n_kv * d - 1),
        heads=16,
        n_kv=n_kv,
        d=d,
    )


def random_costs(rng: random.Random) -> Costs:
    """In which every part of the time can be the longest."""
    ssd, attend = (10 ** rng.uniform(8.5, 10.5) for _ in range(2))
    return Costs(ssd, attend, 10 ** rng.uniform(-8, -5.5), rng.choice([0.0, rng.uniform(0, 2)]))


def _never() -> float:
    raise AssertionError("there is nothing to be won: no step is to be timed")


def test_sizes() -> None:
    s = shape(hidden=1024, n_kv=16, d=64)
    assert s.ratio == 0.5
    assert s.kv_bytes == 4 * 10_000 * 2 * 16 * 64 * 2
    assert shape(n_kv=4).ratio == 2.0


def test_seconds_of_a_step() -> None:
    """By hand, the disk the slower one and the cores."""
    s, gigabyte = shape(sequences=4), 1e9
    kv_s = s.kv_bytes / gigabyte
    assert predict(s, Costs(gigabyte, FREE, 0.0, 0.0), 0) == pytest.approx(4 * kv_s)
    assert predict(s, Costs(gigabyte, FREE, 0.0, 0.0), 3) == pytest.approx((1 + 3 * 0.5) * kv_s)
    assert predict(s, Costs(FREE, gigabyte, 1e-6, 0.25), 3) == pytest.approx(
        0.25 + kv_s + 3 * 4 * 10_000 * 1e-6
    )
    assert predict(s, Costs(FREE, gigabyte, 1e-6, 0.25), 0) == pytest.approx(0.25 + 4 * kv_s)
    assert predict(s, Costs(1.0, gigabyte, 0.0, 0.25), 4) == pytest.approx(4 * 0.5 * s.kv_bytes)


@pytest.mark.parametrize("sequences", [1, 7, 16, 1000])
@pytest.mark.parametrize("link_over_ssd", [0.05, 0.2, 1 / 3, 0.5, 0.9, 1.0, 3.0])
def test_closed_form(sequences: int, link_over_ssd: float) -> None:
    """HILOS, section 4.2: where X rows are half of K and V and two links count, alpha = 2 B_link /
    (B_ssd + B_link) of the sequences."""
    s = shape(sequences=sequences)
    ssd = 7e9
    # a token's X row over that link
    x_s = s.kv_bytes * s.ratio / (s.layers * s.tokens) / (link_over_ssd * ssd)
    found = choose(s, Costs(ssd, FREE, x_s, 0.0)).x_rows
    wanted = min(1.0, 2 * link_over_ssd / (1 + link_over_ssd)) * sequences
    assert abs(found - wanted) < 1


def test_without_compute_all_are_x_rows() -> None:
    assert choose(shape(), Costs(1e9, FREE, 0.0, 0.0)).x_rows == 16


def test_without_a_disk_none_are() -> None:
    """Equal times: the smaller number."""
    assert choose(shape(), Costs(FREE, FREE, 0.0, 1.0)).x_rows == 0
    assert choose(shape(), Costs(FREE, FREE, 1e-9, 1.0)).x_rows == 0


@pytest.mark.parametrize("seed", range(5))
def test_least_of_all(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(100):
        s, costs, group = random_shape(rng), random_costs(rng), rng.choice([1, 1, 2, 3, 5])
        found = choose(s, costs, group)
        candidates = [x for x in range(s.sequences + 1) if x % group == 0]
        assert found.x_rows in candidates
        times = [predict(s, costs, x) for x in candidates]
        assert predict(s, costs, found.x_rows) == min(times)
        assert found.x_rows == candidates[times.index(min(times))]
        assert found.predicted_s == tuple(predict(s, costs, x) for x in range(s.sequences + 1))
        assert found.costs == costs


@pytest.mark.parametrize("seed", range(5))
def test_what_makes_x_rows_more_or_fewer(seed: int) -> None:
    """A slower disk asks for no fewer of them; dearer X rows and more other work for no more; what
    costs more makes no step faster."""
    rng = random.Random(seed)
    for _ in range(100):
        s, costs = random_shape(rng), random_costs(rng)
        least = choose(s, costs)
        slower_disk = choose(
            s,
            Costs(
                costs.ssd_bytes_per_s / 1.5,
                costs.attend_bytes_per_s,
                costs.x_s_per_token,
                costs.dense_s,
            ),
        )
        dearer = choose(
            s,
            Costs(
                costs.ssd_bytes_per_s,
                costs.attend_bytes_per_s,
                costs.x_s_per_token * 1.5,
                costs.dense_s,
            ),
        )
        busier = choose(
            s,
            Costs(
                costs.ssd_bytes_per_s,
                costs.attend_bytes_per_s,
                costs.x_s_per_token,
                costs.dense_s + 0.5,
            ),
        )
        slower_cores = choose(
            s,
            Costs(
                costs.ssd_bytes_per_s,
                costs.attend_bytes_per_s / 1.5,
                costs.x_s_per_token,
                costs.dense_s,
            ),
        )
        assert dearer.x_rows <= least.x_rows <= slower_disk.x_rows
        assert busier.x_rows <= least.x_rows
        for other in (slower_disk, dearer, busier, slower_cores):
            assert min(other.predicted_s) >= min(least.predicted_s)
            assert all(a >= b for a, b in zip(other.predicted_s, least.predicted_s, strict=True))


@pytest.mark.parametrize("hidden", [2 * 4 * 64, 2 * 4 * 64 + 1, 4096])
def test_x_rows_that_are_no_smaller(hidden: int) -> None:
    """Nothing is measured: there is no device to measure."""
    found = decide(shape(hidden=hidden, n_kv=4), _never, _never)
    assert (found.x_rows, found.predicted_s, found.costs) == (0, (), None)
    assert "of the bytes of K and V" in found.why


def test_few_bytes() -> None:
    small = Shape(1, 1, 100, 64, 4, 4, 64, torch.float16, True)
    assert small.kv_bytes * small.sequences < SMALL_BYTES
    assert decide(small, _never, _never).as_dict() == {
        "x_rows": 0,
        "why": "too few bytes to matter",
        "predicted_s": (),
        "costs": None,
    }


@pytest.mark.parametrize("is_rotary", [True, False])
def test_measured(tmp_path: Path, is_rotary: bool) -> None:
    """Rates are rates, the answer is the least of what they predict, and nothing stays on the
    device."""
    device = SsdRowDevice(tmp_path)
    try:
        s = shape(is_rotary=is_rotary)
        found = decide(s, lambda: [device], lambda: 0.001, 2)
        costs = found.costs
        assert costs is not None
        assert all(
            0 < rate < FREE
            for rate in (
                costs.ssd_bytes_per_s,
                costs.attend_bytes_per_s,
                costs.x_s_per_token,
                costs.dense_s,
            )
        )
        assert found == choose(s, costs, 2)
        assert json.loads(json.dumps(found.as_dict()))["x_rows"] == found.x_rows
        assert device.stats().stored_bytes == 0
        assert device.front() == -1
    finally:
        device.close()


def test_measuring_a_device_that_fails(tmp_path: Path) -> None:
    """Is its error, and nothing stays there either."""
    with FaultyEngine([FaultRule("error", operation="read", nth=3, count=1)]) as engine:
        device = SsdRowDevice(tmp_path, engine=engine)
        try:
            with pytest.raises(errors.ReadError):
                read_rate(device)
            assert device.stats().stored_bytes == 0
            assert read_rate(device) > 0
        finally:
            device.close()


def test_what_computes_on_rows_is_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where the device has them, be it a GPU, and with as many threads as will attend."""
    device, asked = SsdRowDevice(tmp_path), list[tuple[torch.device, int]]()

    def attend(
        queries: Queries, rows: RowsInMemory, *, threads: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append((rows.k.device, threads))
        return attend_rows(queries, rows, threads=threads)

    for module in (schedule, shown):
        monkeypatch.setattr(module, "attend_rows", attend)
    monkeypatch.setattr(schedule, "read_rate", lambda _: 1e9)
    try:
        for is_rotary in (True, False):
            asked.clear()
            schedule.measure(shape(is_rotary=is_rotary), [device], lambda: 0.001, 1)
            assert asked == [(device.compute, 1)] * 8
    finally:
        device.close()
