"""Devices that stall, drop completions, reply short or with no numbers, or die: a typed error that
names the device, nothing wrong is handed out, and what lies on the other devices is intact."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import espnx
from espnx import errors
from espnx.device.conformance.known_rows import assert_right, attend, put, queries
from espnx.device.conformance.row_checks import rng
from espnx.device.emulation.faults import DeviceFault, Faults
from espnx.device.interface import RecordQuery
from espnx.device.row_layout import RowLayout
from tests.device.clusters.made import make, pairs
from tests.retrieval.common import build, corpus
from tests.retrieval.common import queries as encoded

LAYOUT = RowLayout("fp16", 128, 128)
KINDS = {
    "drop": errors.DeadlineExceededError,
    "short": errors.ShortReadError,
    "nan": errors.DeviceFailedError,
    "die": errors.DeviceFailedError,
}


def opened(
    folder: Path, *faults: DeviceFault, n: int = 1, name: str = "smartssd", **options: Any
) -> Any:
    return espnx.device.open(
        name, [folder / str(i) for i in range(n)], faults=faults, stretch=0, **options
    )


@pytest.mark.parametrize("kind", list(KINDS))
def test_attention_that_fails(folder: Path, kind: str) -> None:
    """Every ticket is invalid, and the next try is right, unless the device is dead."""
    (device,) = opened(folder, DeviceFault(kind, "attend", nth=2))  # type: ignore[arg-type]
    rows = device.open_rows(deadline_s=0.2)
    try:
        seen, look = (
            [put(rows, LAYOUT, 1, range(2), 300, rng())[0].use(0)],
            queries(LAYOUT, 1, 2, 1, rng()),
        )
        rows.flush()
        attend(rows, LAYOUT, seen, look)
        with pytest.raises(KINDS[kind], match="smartssd 0"):
            attend(rows, LAYOUT, seen, look)
        assert rows.front() == -1
        if kind == "die":
            for call in (
                lambda: attend(rows, LAYOUT, seen, look),
                lambda: put(rows, LAYOUT, 1, range(2), 5, rng()),
            ):
                with pytest.raises(errors.DeviceFailedError, match="does not answer"):
                    call()
        else:
            assert_right(attend(rows, LAYOUT, seen, look), seen, look, exchanges="fp16")
    finally:
        rows.close()


def test_a_stall_takes_its_time(folder: Path) -> None:
    (device,) = opened(folder, DeviceFault("stall", "attend", nth=2, seconds=2.5))
    rows = device.open_rows()
    seen, look, times = (
        [put(rows, LAYOUT, 1, range(2), 300, rng())[0].use(0)],
        queries(LAYOUT, 1, 2, 1, rng()),
        [],
    )
    for _ in range(2):
        begun_s = device.topology.now()
        assert_right(attend(rows, LAYOUT, seen, look), seen, look, exchanges="fp16")
        times.append(device.topology.now() - begun_s)
    assert times[0] < 0.1
    assert 2.5 <= times[1] < 2.6
    rows.close()


@pytest.mark.parametrize("kind", ["drop", "die"])
def test_a_write_that_fails(folder: Path, kind: str) -> None:
    (device,) = opened(folder, DeviceFault(kind, "put"))  # type: ignore[arg-type]
    rows = device.open_rows(deadline_s=0.2)
    with pytest.raises(KINDS[kind], match="smartssd 0"):
        put(rows, LAYOUT, 1, range(2), 300, rng())
        rows.flush()
    rows.close()


def test_one_of_several_dies_in_a_generation(folder: Path) -> None:
    """The error names it; the cache stands where it stood, and rows on the others are whole."""
    import transformers

    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        pad_token_id=0,
        eos_token_id=None,
    )
    model = espnx.enable_kv_cache(transformers.LlamaForCausalLM(config).eval())
    devices = opened(folder, DeviceFault("die", "attend", nth=5, device=1), n=2)
    prompt = torch.arange(1, 60)[None]
    with (
        espnx.KVCache(config, device=devices, format="fp16", spill_interval=4, x_rows=0) as cache,
        torch.no_grad(),
    ):
        model(prompt, past_key_values=cache)
        with pytest.raises(errors.DeviceFailedError, match="smartssd 1") as caught:
            for token in range(20):
                before = cache.get_seq_length()
                model(torch.tensor([[token]]), past_key_values=cache)
        assert caught.value.path == str(folder / "1")
        assert cache.get_seq_length() == before
        whole, other = (cache.store.striped.devices[i] for i in (0, 1))
        assert whole.stats().stored_bytes > 0
        rows = next(each for each in cache.store.every if each is not None)
        seen = list[int]()
        views = rows.views(rows.covered(), range(1))[0]
        whole.forget()
        whole.visit(
            whole.ahead(rows.layout, views), lambda memory, pieces: seen.append(memory.numel())
        )
        assert sum(seen) > 0
        with pytest.raises(errors.DeviceFailedError):
            other.visit(
                other.ahead(rows.layout, rows.views(rows.covered(), range(1))[1]),
                lambda memory, pieces: None,
            )


@pytest.mark.parametrize("kind", list(KINDS))
def test_scores_that_fail(tmp_path: Path, kind: str) -> None:
    build(tmp_path / "0", corpus(40))
    query = encoded(1)[0]
    asked = RecordQuery(query.cls.reshape(1, -1), query.tokens, 1.0)
    devices = opened(tmp_path, DeviceFault(kind, "maxsim", nth=2))  # type: ignore[arg-type]
    with (
        espnx.open(tmp_path / "0", None) as plain,
        espnx.open(tmp_path / "0", None, device=devices) as index,
    ):
        first = index.store.full.maxsim(np.arange(40), [asked], deadline_s=0.2).finish()
        assert np.array_equal(first, plain.store.full.maxsim(np.arange(40), [asked]).finish())
        with pytest.raises(KINDS[kind], match="smartssd 0"):
            index.store.full.maxsim(np.arange(40), [asked], deadline_s=0.2).finish()
        if kind != "die":
            assert np.array_equal(index.store.full.maxsim(np.arange(40), [asked]).finish(), first)


def test_a_search_in_which_a_device_dies(tmp_path: Path) -> None:
    build(tmp_path / "0", corpus(40))
    with espnx.open(
        tmp_path / "0", None, device=opened(tmp_path, DeviceFault("die", "maxsim", nth=2))
    ) as index:
        assert len(index.search(encoded(1)[0], k=5).hits) == 5
        for _ in range(2):
            with pytest.raises(errors.DeviceFailedError, match="smartssd 0"):
                index.search(encoded(1)[0], k=5)


@pytest.mark.parametrize("kind", list(KINDS))
def test_distances_that_fail(tmp_path: Path, kind: str) -> None:
    made = make(tmp_path, [5, 9])
    (device,) = opened(tmp_path, DeviceFault(kind, "distances"), name="cosmos-async-pe")  # type: ignore[arg-type]
    clusters, query = device.open_clusters(made.directory), made.query()
    with pytest.raises(KINDS[kind], match="cosmos-async-pe 0"):
        clusters.distances(query, [0, 1], deadline_s=0.2).finish()
    if kind != "die":
        assert pairs(clusters.distances(query, [1]).finish()) == made.reply(query, 1)
    clusters.close()


def test_queries_that_are_no_numbers(folder: Path) -> None:
    """What comes of them is none either: the device is not to blame."""
    (device,) = opened(folder)
    rows = device.open_rows()
    seen, look = (
        [put(rows, LAYOUT, 1, range(2), 40, rng())[0].use(0)],
        queries(LAYOUT, 1, 2, 1, rng()),
    )
    look.q[0, 0] = float("nan")
    assert attend(rows, LAYOUT, seen, look)[0][0, 0].isnan().all()
    rows.close()


def test_chance_is_seeded() -> None:
    rules = [DeviceFault("nan", "attend", count=None, probability=0.3)]

    def struck(seed: int) -> list[bool]:
        faults = Faults(rules, seed)
        return [faults.strike(0, "attend") is not None for _ in range(200)]

    assert struck(1) == struck(1) != struck(2)
    assert 30 < sum(struck(1)) < 90
    faults = Faults([DeviceFault("short", nth=3, count=2, device=1)])
    assert [faults.strike(1, "attend") is not None for _ in range(6)] == [
        False,
        False,
        True,
        True,
        False,
        False,
    ]
    assert faults.strike(0, "attend") is None


@pytest.mark.parametrize(
    "wrong",
    [
        {"kind": "burn"},
        {"kind": "die", "verb": "sing"},
        {"kind": "nan", "nth": 0},
        {"kind": "nan", "probability": 2.0},
        {"kind": "stall", "seconds": -1.0},
    ],
)
def test_wrong_rules(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        DeviceFault(**wrong)
    with pytest.raises(errors.InvalidInputError):
        Faults(["die"])  # type: ignore[list-item]
