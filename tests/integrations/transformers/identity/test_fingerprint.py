"""Whose K and V a kept cache holds: every byte of a model's weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.identity import fingerprint as fingerprints
from tests.integrations.transformers.tiny import enabled, generate, make, prompt

LENGTHS = [21, 20]


def one_value(model: torch.nn.Module) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[7, 5] += 50.0


def most_values(model: torch.nn.Module) -> None:
    weight = model.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight.view(-1)[1::2] *= -1.0


def rotation(model: torch.nn.Module) -> None:
    model.model.rotary_emb.inv_freq *= 0.5


def merged(model: torch.nn.Module) -> None:
    """As adapters are: PyTorch does not count what is done to `data`."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    weight.data += 0.01 * torch.randn_like(weight)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (one_value, "model.layers.1.mlp.down_proj.weight"),
        (most_values, "model.layers.0.mlp.down_proj.weight"),
        (rotation, "model.rotary_emb.inv_freq"),
        (merged, "model.layers.0.self_attn.q_proj.weight"),
    ],
)
def test_a_changed_model_is_refused(
    folder: Path, change: Callable[[torch.nn.Module], None], name: str
) -> None:
    """In the same process, which remembers the checksums of before."""
    model = make("llama")
    enabled_model = enable_kv_cache(model)
    with KVCache(model.config, folder, name="one") as cache:
        generate(enabled_model, prompt(LENGTHS), cache)
    change(model)
    with (
        KVCache(model.config, folder, name="one") as cache,
        pytest.raises(errors.ForeignFileError, match=name),
    ):
        generate(enabled_model, prompt(LENGTHS), cache)


def test_checksums_are_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, seen = make("llama", seed=3), [0]
    sum_of = fingerprints.sum_of

    def counted(data: torch.Tensor) -> int:
        seen[0] += data.numel()
        return sum_of(data)

    monkeypatch.setattr(fingerprints, "sum_of", counted)
    first = fingerprints.fingerprint(model)
    whole = sum(each.numel() for name, each in model.named_parameters() if "lm_head" not in name)
    assert seen[0] > whole
    seen[0] = 0
    assert fingerprints.fingerprint(model) == first
    assert seen[0] < whole
    sampled = seen[0]
    one_value(model)
    assert fingerprints.fingerprint(model) != first
    assert seen[0] == 2 * sampled + model.model.layers[1].mlp.down_proj.weight.numel()


def test_sampled_by_name_alone(folder: Path) -> None:
    model = enabled("llama")
    with KVCache(model.config, folder, name="one", fingerprint="sampled") as cache:
        generate(model, prompt(LENGTHS), cache)
    with (
        KVCache(model.config, folder, name="one") as cache,
        pytest.raises(errors.ForeignFileError, match="another fingerprint"),
    ):
        generate(model, prompt(LENGTHS), cache)
    with KVCache(model.config, folder, name="one", fingerprint="sampled") as cache:
        cache.reset()
        generate(model, prompt(LENGTHS), cache)
    with pytest.raises(errors.InvalidInputError, match="fingerprint"):
        KVCache(model.config, folder, name="two", fingerprint="some")
