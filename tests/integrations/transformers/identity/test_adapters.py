"""Whose K and V a kept cache holds, where PEFT's adapters are loaded: those that are active count,
and no others."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.identity.fingerprint import fingerprint
from espnx.integrations.transformers.identity.watch import Watch
from tests.integrations.transformers.identity.test_model_parts import are_equal, rows_of
from tests.integrations.transformers.tiny import generate, make, prompt

peft = pytest.importorskip("peft")
# PEFT's own
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

TARGETS = ["q_proj", "k_proj", "v_proj"]
LORA = {"r": 4, "target_modules": TARGETS, "init_lora_weights": False}
KINDS: dict[str, Callable[[], Any]] = {
    "lora": lambda: peft.LoraConfig(**LORA, lora_dropout=0.1),
    "dora": lambda: peft.LoraConfig(**LORA, use_dora=True),
    "with an embedding": lambda: peft.LoraConfig(**LORA, modules_to_save=["embed_tokens"]),
    "with tokens": lambda: peft.LoraConfig(**LORA, trainable_token_indices=[1, 5, 7]),
    "ia3": lambda: peft.IA3Config(
        target_modules=["k_proj", "v_proj"], feedforward_modules=[], init_ia3_weights=False
    ),
    "loha": lambda: peft.LoHaConfig(r=4, target_modules=TARGETS, init_weights=False),
    "lokr": lambda: peft.LoKrConfig(r=4, target_modules=TARGETS, init_weights=False),
    "oft": lambda: peft.OFTConfig(oft_block_size=4, target_modules=TARGETS, init_weights=False),
    "fourier": lambda: peft.FourierFTConfig(
        n_frequency=50, target_modules=TARGETS, init_weights=False
    ),
    "norms": lambda: peft.LNTuningConfig(target_modules=["input_layernorm"]),
    "vera": lambda: peft.VeraConfig(r=4, target_modules=TARGETS, init_weights=False),
    "shira": lambda: peft.ShiraConfig(r=4, target_modules=TARGETS, init_weights=False),
}
SHARED = ("vera",)  # whose adapters share tensors, so that PEFT wants to wrap the model


def adapted(kind: str) -> tuple[PreTrainedModel, list[Any]]:
    """A model with the adapters `one` and `two`, and its modules that have them."""
    torch.manual_seed(0)
    model = make("llama")
    if kind in SHARED:
        peft.get_peft_model(model, KINDS[kind](), "one").add_adapter("two", KINDS[kind]())
    else:
        for name in ("one", "two"):
            peft.inject_adapter_in_model(KINDS[kind](), model, name)
    for name, parameter in model.named_parameters():
        if ".one" in name or ".two" in name:
            parameter.data += 0.05 * torch.randn_like(parameter)
    return model.eval(), [
        module for module in model.modules() if hasattr(type(module), "adapter_layer_names")
    ]


def use(layers: list[Any], *names: str) -> None:
    for layer in layers:
        layer.enable_adapters(bool(names))
        if names:
            layer.set_adapter(list(names))


def add(model: PreTrainedModel, adapter: str) -> None:
    for name, parameter in model.named_parameters():
        if f".{adapter}" in name:
            parameter.data += 0.1


def scale(layers: list[Any], by: float) -> None:
    for layer in layers:
        if isinstance(scaling := vars(layer).get("scaling"), dict) and isinstance(
            scaling.get("one"), float
        ):
            scaling["one"] *= by


@pytest.mark.parametrize("kind", KINDS)
def test_every_switch_of_adapters(kind: str) -> None:
    """Two states of a model whose K or V differ have other fingerprints; what is loaded and not
    used has none."""
    model, layers = adapted(kind)
    use(layers)
    states: list[tuple[str, dict[str, Any], list[torch.Tensor]]] = [
        ("none loaded", fingerprint(make("llama")), rows_of(make("llama")))
    ]

    def note(title: str) -> None:
        states.append((title, fingerprint(model), rows_of(model)))
        assert fingerprint(model) == states[-1][1]

    for title, change in {
        "one": lambda: use(layers, "one"),
        "one, twice as much": lambda: scale(layers, 2.0),
        "two": lambda: (scale(layers, 0.5), use(layers, "two")),
    }.items():
        watch = Watch(model)
        change()
        note(title)
        has_scales = any(isinstance(vars(layer).get("scaling"), dict) for layer in layers)
        assert not watch.is_unchanged() or (title == "one, twice as much" and not has_scales)
    if kind == "lora":
        use(layers, "one", "two")
        note("both")
    use(layers, "one")
    add(model, "two")
    note("one, and two was changed")
    assert states[-1][1] == states[1][1]
    use(layers)
    note("off")
    assert states[-1][1] == states[0][1]
    use(layers, "one")
    add(model, "one")
    note("one was changed")
    for (name, mark, rows), (other, other_mark, other_rows) in itertools.combinations(states, 2):
        assert are_equal(rows, other_rows) or mark != other_mark, (name, other)
    assert sum(mark == states[1][1] for _, mark, _ in states) >= 2


def test_adapters_beside_it_change_nothing() -> None:
    """Whatever order they came in, and whether they went."""

    def holding(*names: str) -> PreTrainedModel:
        model = make("llama")
        for name in names:
            config = (
                peft.LoraConfig(**LORA)
                if name == "one"
                else peft.LoraConfig(r=2, target_modules=["v_proj", "o_proj"], lora_alpha=3)
            )
            model.add_adapter(config, name)
        for layer in (
            module for module in model.modules() if hasattr(type(module), "adapter_layer_names")
        ):
            for name, parameter in layer.named_parameters():
                if ".one." in name:
                    parameter.data.fill_(0.01)
        model.set_adapter("one")
        return model.eval()

    alone = fingerprint(holding("one"))
    assert fingerprint(holding("one", "two")) == fingerprint(holding("two", "one")) == alone
    model = holding("two", "one")
    model.delete_adapter("two")
    assert fingerprint(model) == alone


def test_an_adapter_around_another() -> None:
    """A whole module that is trained beside LoRA, of which it has a copy."""
    model, layers = adapted("with an embedding")
    use(layers, "one")
    before = fingerprint(model)
    with torch.no_grad():
        model.model.embed_tokens.modules_to_save["one"].weight[5] += 1  # type: ignore[index,union-attr,operator]
    assert fingerprint(model) != before


def test_merged_adapters_are_weights() -> None:
    model, layers = adapted("lora")
    use(layers, "one")
    active = fingerprint(model)
    for layer in layers:
        layer.merge()
    merged = fingerprint(model)
    use(layers)  # the next forward pass takes them out again
    assert (
        len(
            {str(each) for each in (active, merged, fingerprint(model), fingerprint(make("llama")))}
        )
        == 4
    )
    assert fingerprint(model)["adapters"] == "off, merged ['one']"


def test_a_kept_cache_of_an_adapter(folder: Path) -> None:
    """It belongs to the adapters that were active, in the next cache and in an open one."""
    model = make("llama")
    config = peft.LoraConfig(**LORA)
    model.add_adapter(config, "one")
    model.add_adapter(config, "two")
    model.set_adapter("one")
    enable_kv_cache(model.eval())
    inputs = prompt([30, 30])
    with KVCache(model.config, folder, name="k", x_rows=0) as cache:
        generate(model, inputs, cache, max_new_tokens=4)
    for change in (
        lambda: model.set_adapter("two"),
        lambda: model.set_adapter(["one", "two"]),
        model.disable_adapters,
    ):
        change()
        with (
            KVCache(model.config, folder, name="k") as cache,
            pytest.raises(errors.ForeignFileError, match="adapters") as raised,
        ):
            generate(model, inputs, cache)
        assert "active ['one']" in str(raised.value)
        model.enable_adapters()
    model.set_adapter("one")
    model.delete_adapter("two")
    with KVCache(model.config, folder, name="k") as cache:
        assert cache.reuse_prefix(inputs["input_ids"]) == 29
        generate(model, inputs, cache, max_new_tokens=4)
        model.disable_adapters()
        cache.reset()
        with pytest.raises(errors.ForeignFileError, match="adapters"):
            generate(model, inputs, cache)
