"""Models whose scores are more than products (Gemma 2: soft caps; GPT-OSS: sinks): the framework's
tokens, from every kind of device."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx.integrations.transformers.forward import attention
from espnx.kv.scores import PLAIN
from tests.integrations.transformers.tiny import enabled, expected, generate, prompt

RAM = "espnx.device.example.ram_device:RamDevice"
LENGTHS = [40, 23]


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "options", [{}, {"device": RAM}, {"spill_interval": 3}], ids=["ssd", "ram", "spilled early"]
)
@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_tokens(folder: Path, name: str, options: dict[str, Any]) -> None:
    inputs = prompt(LENGTHS)
    with espnx.KVCache(enabled(name).config, folder, **options) as cache:
        assert torch.equal(
            generate(enabled(name), inputs, cache, max_new_tokens=24),
            expected(name, LENGTHS, max_new_tokens=24),
        )
        stats = cache.stats()
    assert stats["bytes_asked"] > 0
    assert (stats["layers_on_ssd"], stats["layers_in_memory"], stats["x_rows"]) == (2, 2, 0)
    on_host = 2 if (name, options.get("device")) == ("gemma2", RAM) else 0
    assert stats["layers_attended_on_host"] == on_host
    assert stats["devices_lack"] == ("attends_soft_cap" if on_host else "")


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_without_a_cache_on_ssd(name: str) -> None:
    """An enabled model computes what it did: windows and caps or sinks together, in the framework's
    own cache and in none."""
    inputs = prompt(LENGTHS)
    wanted = expected(name, LENGTHS, max_new_tokens=12)
    for use_cache in (True, False):
        found = enabled(name).generate(
            **inputs, max_new_tokens=12, do_sample=False, use_cache=use_cache
        )
        assert torch.equal(found, wanted)


@pytest.mark.parametrize("name", ["gemma2", "gpt_oss"])
def test_a_rule_that_is_left_out(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Other tokens: the comparisons above can fail."""
    inputs = prompt(LENGTHS)
    monkeypatch.setattr(attention, "ScoreRules", lambda **rules: PLAIN)
    with espnx.KVCache(enabled(name).config, folder) as cache:
        assert not torch.equal(
            generate(enabled(name), inputs, cache, max_new_tokens=24),
            expected(name, LENGTHS, max_new_tokens=24),
        )


def test_a_whole_generation_on_a_device_of_the_tests(folder: Path) -> None:
    """Rows in memory, a reference that attends: named by module and class, and nothing else in the
    way. X rows go through it, too."""
    inputs = prompt(LENGTHS)
    for name, x_rows in (("llama", 0), ("llama", 2), ("opt", 1)):
        with espnx.KVCache(enabled(name).config, folder, device=RAM, x_rows=x_rows) as cache:
            assert torch.equal(
                generate(enabled(name), inputs, cache, max_new_tokens=24),
                expected(name, LENGTHS, max_new_tokens=24),
            )
            assert cache.stats()["bytes_asked"] > 0
    assert not list(folder.iterdir())
