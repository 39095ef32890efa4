"""Weights that stay in their files: which layers a budget keeps in memory, and the stream that
reads the others in turn."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.storage import FaultRule, FaultyEngine
from espnx.weights.layers import LayerWeights, Piece, Weight, share
from espnx.weights.safetensors_files import StoredTensor
from espnx.weights.stream import WeightFiles, WeightStream


def layer(number: int, size: int) -> LayerWeights:
    source = StoredTensor("w", f"file{number}", torch.uint8, (size,), 100)
    return LayerWeights([Weight("w", (size,), torch.uint8, (Piece(source, 0),))])


@pytest.mark.parametrize(("count", "read_ahead"), [(1, 1), (2, 1), (3, 1), (7, 1), (7, 3), (12, 2)])
def test_a_budget_is_used_up_and_never_exceeded(count: int, read_ahead: int) -> None:
    layers = [layer(number, 100_000) for number in range(count)]
    everything = share(5000, layers, None, read_ahead)
    assert everything.streamed == ()
    assert everything.total_bytes == 5000 + sum(item.resident_bytes for item in layers)
    kept = -1
    for budget in range(everything.least_bytes, everything.total_bytes + 30_000, 30_000):
        plan = share(5000, layers, budget, read_ahead)
        assert sorted(plan.resident + plan.streamed) == list(range(count))
        assert plan.total_bytes <= budget
        assert len(plan.resident) >= kept
        kept = len(plan.resident)
        if plan.streamed:
            assert plan.slots == read_ahead + 1 < len(plan.streamed) + 1
    assert kept == count


def test_resident_layers_lie_evenly_among_the_others() -> None:
    layers = [layer(number, 100_000) for number in range(12)]
    plan = share(0, layers, share(0, layers, None).total_bytes - 6 * 108_192, 1)
    assert len(plan.resident) >= 3
    gaps = [b - a for a, b in itertools.pairwise(plan.resident)]
    assert 2 <= min(gaps) <= max(gaps) <= min(gaps) + 1


@pytest.mark.parametrize("offset", [0, 1, 8, 4095, 4096])
@pytest.mark.parametrize("count", [0, 1, 1023, 1024, 5000])
def test_pages_give_back_what_was_written(offset: int, count: int, tmp_path: Path) -> None:
    values = torch.arange(count, dtype=torch.float32)
    (tmp_path / "f").write_bytes(bytes(offset) + values.numpy().tobytes())
    weight = Weight(
        "w",
        (count,),
        torch.float32,
        (Piece(StoredTensor("w", str(tmp_path / "f"), torch.float32, (count,), offset), 0),),
    )
    assert weight.is_view == (offset % 4 == 0)
    files = WeightFiles(FaultyEngine([], poison=True))
    assert torch.equal(files.resident(weight), values)
    files.engine.close()


def stream_of(tmp_path: Path, count: int, *rules: FaultRule) -> WeightStream:
    """Layers of 40,000 bytes; those of layer i are all i + 1."""
    layers = {}
    for number in range(count):
        (tmp_path / f"file{number}").write_bytes(bytes([number + 1]) * 40_100)
        source = StoredTensor("w", str(tmp_path / f"file{number}"), torch.uint8, (40_000,), 100)
        layers[number] = LayerWeights([Weight("w", (40_000,), torch.uint8, (Piece(source, 0),))])
    size = layers[0].buffer_bytes + 4096
    return WeightStream(
        WeightFiles(FaultyEngine(rules)), layers, slots=2, slot_bytes=size, converted_bytes=0
    )


def test_layers_are_read_in_turn_and_ahead(tmp_path: Path) -> None:
    stream = stream_of(tmp_path, 5)
    for turn in range(12):
        weights = stream.take(turn % 5)["w"]
        assert bool((weights == turn % 5 + 1).all())
        stream.give_back(turn % 5)
    assert stream.files.counters.layer_reads == 12
    # the next one is on its way, or here
    assert stream.files.engine.stats().bytes_asked >= 13 * 40_000
    assert stream.buffer_bytes == 2 * (stream.layers[0].buffer_bytes + 4096)
    for number in (3, 1, 4, 4, 0):  # in any order, only slower
        assert bool((stream.take(number)["w"] == number + 1).all())
    stream.files.engine.close()


@pytest.mark.parametrize("number", [0, 1])
def test_a_read_that_failed_is_tried_again(number: int, tmp_path: Path) -> None:
    # pages, and the end of the file
    stream = stream_of(
        tmp_path, 4, FaultRule("error", operation="read", path=f"*file{number}", count=2)
    )
    for turn in range(number):
        stream.take(turn)
        stream.give_back(turn)
    with pytest.raises(errors.ReadError, match=f"file{number}"):
        stream.take(number)
    # the second read may not have met its own yet
    while stream.files.engine.stats().fault_hits < 2:
        time.sleep(0.01)
    assert bool((stream.take(number)["w"] == number + 1).all())
    stream.files.engine.close()


def test_a_late_read_writes_into_nobody_elses_weights(tmp_path: Path) -> None:
    """What was read ahead and is not wanted may still be under way: its memory is not used
    again."""
    stream = stream_of(
        tmp_path, 5, FaultRule("delay", operation="read", path="*file1", value=300_000_000)
    )
    stream.take(0)
    stream.give_back(0)
    weights = stream.take(3)["w"]
    while stream.files.engine.stats().in_flight:
        time.sleep(0.01)
    assert bool((weights == 4).all())
    assert stream.files.engine.stats().fault_hits >= 1
    stream.files.engine.close()
