"""One causal model of each mechanism with a cache on SSD beside the framework's own, and the
committed table of all of them."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.models.case import OUTCOMES, table
from espnx.benchmarks.models.sweep import check, load_configs, names, sweep, variants
from tests.sweeps import some

RESULT = Path(__file__).resolve().parents[3] / "benchmarks" / "results" / "kv-models.json"

#: Model, variant, what comes of it: a mechanism each.
MECHANISMS = [
    ("llama", "", "equal"), ("qwen3", "", "equal"), ("olmo2", "", "equal"),
    ("cohere2", "", "equal"), ("phi", "", "equal"), ("gpt2", "", "equal"), ("opt", "", "equal"),
    ("gpt_neox", "", "equal"), ("gpt_bigcode", "", "equal"), ("bert", "", "equal"),
    ("bart", "", "equal"), ("phimoe", "", "equal"), ("qwen2_moe", "", "equal"),
    ("gemma3_text", "", "equal"), ("gemma3n_text", "", "equal"), ("gemma4_text", "", "equal"),
    ("qwen3_next", "", "equal"), ("jamba", "", "equal"), ("lfm2", "", "equal"),
    ("falcon_h1", "", "equal"), ("mistral", "no window", "equal"),
    ("minimax_m3_vl_text", "no sparse layers", "equal"), ("minimax_m3_vl_text", "", "refused"),
    ("deepseek_v3", "", "refused"), ("deepseek_v32", "", "refused"), ("gpt_oss", "", "equal"),
    ("llama4_text", "", "refused"), ("gemma3n", "", "equal"), ("qwen4_exp_text", "", "refused"),
    ("diffllama", "", "refused"), ("doge", "", "refused"), ("gemma2", "", "equal"),
    ("mamba", "", "refused"), ("bloom", "", "refused"),
]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "variant", "outcome"),
    some(MECHANISMS, 3),
    ids=[" ".join(each[:2]).strip() for each in MECHANISMS],
)
@pytest.mark.filterwarnings("ignore")
def test_one_of_each_mechanism(name: str, variant: str, outcome: str) -> None:
    """Prompts of which most is read from disk; a few new tokens."""
    configs = load_configs()
    found = check(
        name, variants(name, configs)[variant], configs["shared"], lengths=(100, 60), new=4
    )
    assert found["outcome"] == outcome, found["why"]
    assert bool(found["why"]) == (outcome == "refused" or found["x_rows"].get("2") == "refused")
    assert (found["bytes_asked"] > 0) == (found["layers_on_ssd"] > 0)


@pytest.mark.parametrize("kind", ["gemma4", "gemma4_unified"])
@pytest.mark.filterwarnings("ignore")
def test_draft_models_that_attend_to_their_main_models_rows(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of their layers take K and V from elsewhere, which some versions of transformers cannot
    even make."""
    configs, name = load_configs(), f"{kind}_assistant"
    config = type(CONFIG_MAPPING[f"{kind}_text"]())
    monkeypatch.setattr(
        config, "kv_sharing_modes", property(lambda self: ["reuse"] * self.num_hidden_layers)
    )
    found = check(name, variants(name, configs)[""], configs["shared"])
    assert (found["outcome"], "no past_key_values" in found["why"]) == ("refused", True)
    assert "draft model" in configs["not_alone"][name]


def test_the_table_has_every_model() -> None:
    """A newer transformers has others: `make models`."""
    rows = rows_of(load(RESULT))
    assert not set(names()) - {row.params["model"] for row in rows}
    assert {row.params["outcome"] for row in rows} <= set(OUTCOMES)
    assert all(row.correct for row in rows)
    headers, cells = table(rows)
    assert [len(line) for line in cells] == [len(headers)] * len(rows)


def test_a_sweep_goes_on() -> None:
    """Models that have an outcome are not run again."""
    found = list(sweep(["llama", "mamba"], {"llama": {}}))
    assert [(name, [each["outcome"] for each in outcomes]) for name, outcomes, _ in found] == [
        ("mamba", ["refused"])
    ]
