"""Bytes and arithmetic of models, beside what their makers say of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from espnx.simulate.decoding.shape import Shape
from espnx.simulate.specs.kinds import ModelSpec
from espnx.simulate.specs.load import load


def shape(name: str) -> Shape:
    return Shape.of(load(ModelSpec, name))


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("opt-30b", 30),
        ("opt-66b", 66),
        ("opt-175b", 175),
        ("qwen2.5-32b", 32.5),
        ("mixtral-8x7b", 46.7),
        ("glam-143b", 143),
    ],
)
def test_parameters(name: str, billions: float) -> None:
    """Embeddings are left out: up to 1.6 billion, 5 % of the smallest."""
    found = shape(name).parameters / 1e9
    assert billions * 0.95 < found < billions * 1.001


@pytest.mark.parametrize(
    ("name", "layers", "per_layer"),
    [("opt-175b", 96, 2 * 12288), ("qwen2.5-32b", 64, 2 * 8 * 128), ("glam-143b", 32, 2 * 4096)],
)
def test_bytes_of_k_and_v(name: str, layers: int, per_layer: int) -> None:
    assert shape(name).kv_bytes(10) == 10 * layers * per_layer * 2


def test_x_beside_k_and_v() -> None:
    assert shape("opt-66b").x_ratio == 0.5
    assert shape("qwen2.5-32b").x_ratio == 2.5
    assert shape("qwen2.5-32b").group == 5


def test_experts_that_a_batch_chooses() -> None:
    """As often as random choices do: two of 64 for each of 16 tokens."""
    glam, rng = shape("glam-143b"), np.random.default_rng(0)
    chosen = np.mean(
        [
            len({each for _ in range(16) for each in rng.choice(64, 2, replace=False)})
            for _ in range(2000)
        ]
    )
    dense, sparse = glam.layer(0, 16), glam.layer(1, 16)
    expert_bytes = 2 * 4096 * 16384 * 2
    assert dense.rest_bytes == 4096 * 4096 * 2 + expert_bytes
    found = (sparse.rest_bytes - 4096 * 4096 * 2) / expert_bytes
    # 5 standard errors of the mean of 2,000
    assert found == pytest.approx(chosen, abs=5 * 2.5 / np.sqrt(2000))
    assert glam.layer(1, None).rest_bytes == 4096 * 4096 * 2 + 64 * expert_bytes
    assert sparse.rest_flops == 2 * (4096 * 4096 + 2 * 2 * 4096 * 16384)


@pytest.mark.parametrize(("layers", "every"), [(32, 1), (32, 5), (32, 32), (7, 3), (1, 1)])
def test_experts_of_one_of_several_layers(layers: int, every: int) -> None:
    """Counted layer by layer, those that are left over too."""
    model = replace(shape("mixtral-8x7b"), layers=layers, expert_every=every)
    attention = 2 * 4096 * 32 * 128 + 2 * 4096 * 8 * 128
    mlp = 3 * 4096 * 14336
    counted = sum(
        attention + mlp * (8 if number % every == every - 1 else 1) for number in range(layers)
    )
    assert model.parameters == counted
