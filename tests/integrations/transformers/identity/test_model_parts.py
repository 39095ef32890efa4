"""What a kept cache knows of a model: every change that changes K or V, and none that does not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import DynamicCache, PreTrainedModel
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.enable import enable_kv_cache
from espnx.integrations.transformers.identity.fingerprint import fingerprint
from espnx.integrations.transformers.identity.watch import Watch
from tests.integrations.transformers.tiny import make

Change = Callable[[PreTrainedModel], Any]


def rows_of(model: PreTrainedModel, length: int = 12) -> list[torch.Tensor]:
    """K and V of every layer, by the framework's own cache."""
    ids, cache = (
        torch.randint(3, 97, (2, length), generator=torch.Generator().manual_seed(0)),
        DynamicCache(config=model.config),
    )
    torch.manual_seed(0)
    with torch.no_grad():
        model(ids, past_key_values=cache)
    return [rows.clone() for layer in cache.layers for rows in (layer.keys, layer.values)]  # type: ignore[union-attr]


def are_equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def attention(model: PreTrainedModel) -> Any:
    return model.model.layers[0].self_attn


def mlp(model: PreTrainedModel) -> Any:
    return model.model.layers[0].mlp


class Twice(nn.Linear):
    """A linear layer of somebody's own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2


def relu(model: PreTrainedModel) -> None:
    mlp(model).act_fn = nn.ReLU()


def function(model: PreTrainedModel) -> None:
    del mlp(model).act_fn
    mlp(model).act_fn = nn.functional.relu


def another_class(model: PreTrainedModel) -> None:
    attention(model).k_proj.__class__ = Twice


def normalised(model: PreTrainedModel) -> None:
    nn.utils.parametrizations.weight_norm(attention(model).k_proj)
    attention(model).k_proj.parametrizations.weight.original0.data *= 2


def of_another_layer(model: PreTrainedModel) -> None:
    mlp(model).forward = model.model.layers[1].mlp.forward


def swapped(model: PreTrainedModel) -> None:
    model.model.layers = nn.ModuleList([model.model.layers[1], model.model.layers[0]])


@pytest.mark.parametrize(
    "change",
    [
        lambda model: setattr(model.model.layers[0].input_layernorm, "variance_epsilon", 1.0),
        lambda model: setattr(attention(model), "scaling", 1.0),
        lambda model: setattr(model.model.rotary_emb, "attention_scaling", 1.5),
        lambda model: model.model.rotary_emb.half(),
        relu,
        function,
        another_class,
        normalised,
        of_another_layer,
        swapped,
    ],
)
def test_a_change_of_what_is_no_weight(change: Change) -> None:
    model = make("llama")
    before, rows = fingerprint(model), rows_of(model)
    change(model)
    assert not are_equal(rows_of(model), rows)
    assert fingerprint(model) != before


def looked_on(model: PreTrainedModel) -> None:
    rows_of(model)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.int64), output_hidden_states=True)


def compiled(model: PreTrainedModel) -> None:
    model.compile()
    model.forward = torch.compile(model.forward)
    model.model.layers[0] = torch.compile(model.model.layers[0])
    mlp(model).compile()


def tied(model: PreTrainedModel) -> None:
    model.lm_head.weight = model.model.embed_tokens.weight
    model.config.tie_word_embeddings = True


def offloaded(model: PreTrainedModel) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.hooks.add_hook_to_module(mlp(model), accelerate.hooks.AlignDevicesHook("cpu"))


@pytest.mark.filterwarnings(
    "ignore::DeprecationWarning:torch", "ignore:.*gradient_checkpointing_enable:FutureWarning"
)
@pytest.mark.parametrize(
    "change",
    [
        enable_kv_cache,
        looked_on,
        compiled,
        tied,
        offloaded,
        copy.deepcopy,
        lambda model: model.train(),
        lambda model: model.requires_grad_(False),
        lambda model: model.gradient_checkpointing_enable(),
        lambda model: model.enable_input_require_grads(),
        lambda model: model.generation_config.update(temperature=3.0),
        lambda model: model.lm_head.register_forward_hook(lambda *args: None),
    ],
)
def test_a_change_that_changes_neither_k_nor_v(change: Change) -> None:
    model = make("llama")
    before = fingerprint(model)
    changed = change(model)
    assert fingerprint(model) == before
    if isinstance(changed, PreTrainedModel):
        assert fingerprint(changed) == before


def test_saved_and_loaded(tmp_path: Path) -> None:
    model = make("llama")
    model.save_pretrained(tmp_path)
    assert fingerprint(type(model).from_pretrained(tmp_path)) == fingerprint(model)


def test_dropout_counts_in_training() -> None:
    model = make("gpt2", attn_pdrop=0.1)
    before = fingerprint(model)
    model.train()
    assert fingerprint(model) != before


def hooked(model: PreTrainedModel) -> None:
    mlp(model).register_forward_hook(lambda module, args, output: output + 1)


def replaced(model: PreTrainedModel) -> None:
    old = mlp(model).forward

    @functools.wraps(old)
    def forward(x: torch.Tensor) -> torch.Tensor:
        return old(x) * 2

    mlp(model).forward = forward


def hidden(model: PreTrainedModel) -> None:
    mlp(model).register_forward_hook(
        torch.compiler.disable(lambda module, args, output: output + 1)
    )


def method(model: PreTrainedModel) -> None:
    model.model.get_input_embeddings = lambda: None


class Opaque(nn.Linear):
    """Weights packed in a way that nobody can read."""

    def get_extra_state(self) -> Any:
        return object()


def packed(model: PreTrainedModel) -> None:
    attention(model).k_proj.__class__ = Opaque


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (hooked, r"layers\.0\.mlp has a hook"),
        (hidden, "has a hook"),
        (method, "get_input_embeddings"),
        (replaced, r"layers\.0\.mlp has a forward pass"),
        (packed, "Opaque"),
    ],
)
def test_what_cannot_be_known_is_refused_a_name(folder: Path, change: Change, name: str) -> None:
    model = make("llama")
    change(enable_kv_cache(model))
    ids = torch.ones(1, 3, dtype=torch.int64)
    with (
        KVCache(model.config, folder, name="one") as cache,
        pytest.raises(errors.InvalidInputError, match=name) as raised,
        torch.no_grad(),
    ):
        model(ids, past_key_values=cache)
    assert raised.value.fix is not None
    assert "without a name" in raised.value.fix
    with KVCache(model.config, folder) as cache, torch.no_grad():
        model(ids, past_key_values=cache)


def test_a_hook_on_every_module_is_refused() -> None:
    model = make("llama")
    handle = nn.modules.module.register_module_forward_hook(lambda *args: None)
    try:
        with pytest.raises(errors.InvalidInputError, match="a module has a hook"):
            fingerprint(model)
    finally:
        handle.remove()


# --- packed weights ---


@pytest.mark.filterwarnings(
    "ignore:.*torch.ao.quantization.*:DeprecationWarning",
    "ignore:.*quantized tensor creation:UserWarning",
)
@pytest.mark.parametrize("dtype", [torch.qint8, torch.float16])
def test_weights_that_are_packed_when_quantised(dtype: torch.dtype) -> None:
    """They are neither parameters nor buffers."""

    def quantised(change: Change) -> tuple[PreTrainedModel, dict[str, Any]]:
        model = make("llama")
        change(model)
        model = torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype)
        return model, fingerprint(model)

    model, before = quantised(lambda model: None)
    assert quantised(lambda model: None)[1] == before
    assert fingerprint(copy.deepcopy(model)) == before
    watch = Watch(model)
    rows_of(model)
    assert watch.is_unchanged()
    for projection in ("k_proj", "o_proj"):
        other, after = quantised(
            lambda model, name=projection: getattr(attention(model), name).weight.data.mul_(-1)
        )  # type: ignore[misc]
        assert not are_equal(rows_of(other), rows_of(model))
        assert after != before
    k_proj = attention(model).k_proj
    k_proj.set_weight_bias(*k_proj._weight_bias())
    assert not watch.is_unchanged()


class Listed(nn.Linear):
    """One whose state dict lists, once more, the parts of its weight."""

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        weight: Any = self.weight
        destination[f"{prefix}weight.codes"], destination[f"{prefix}weight.scale"] = (
            weight.codes,
            weight.scale,
        )


class Shut(torch.Tensor):
    """A weight of two tensors that does not say so."""

    @staticmethod
    def __new__(cls, codes: torch.Tensor, scale: torch.Tensor, low: int) -> Shut:
        return torch.Tensor._make_wrapper_subclass(cls, codes.shape, dtype=scale.dtype)  # type: ignore[attr-defined,no-any-return]

    def __init__(self, codes: torch.Tensor, scale: torch.Tensor, low: int):
        self.codes, self.scale, self.low = codes, scale, low

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if function is torch.ops.aten.detach.default:
            return cls(args[0].codes, args[0].scale, args[0].low)
        plain = [
            (each.codes + each.low) * each.scale if isinstance(each, Shut) else each
            for each in args
        ]
        return function(*plain, **(kwargs or {}))


class Codes(Shut):
    """As packages of quantisation make them."""

    def __tensor_flatten__(self) -> tuple[list[str], dict[str, int]]:
        return ["codes", "scale"], {"low": self.low}


@pytest.mark.parametrize("listed", [nn.Linear, Listed])
@pytest.mark.parametrize("kind", ["whole", "sampled"])
def test_weights_that_are_more_than_one_tensor(kind: str, listed: type[nn.Linear]) -> None:
    def of(codes: int, scale: float, low: int, subclass: type[Shut] = Codes) -> PreTrainedModel:
        model = make("llama")
        weight = torch.full((256, 64), codes, dtype=torch.int8)
        attention(model).k_proj.weight = nn.Parameter(
            subclass(weight, torch.tensor(scale), low), requires_grad=False
        )
        attention(model).k_proj.__class__ = listed
        return model

    before = fingerprint(of(3, 0.5, 1), kind)
    assert fingerprint(of(3, 0.5, 1), kind) == before
    for other in (of(4, 0.5, 1), of(3, 0.25, 1), of(3, 0.5, 2)):
        assert not are_equal(rows_of(other), rows_of(of(3, 0.5, 1)))
        assert fingerprint(other, kind) != before
    with pytest.raises(errors.InvalidInputError, match="Shut"):
        fingerprint(of(3, 0.5, 1, Shut), kind)


# --- ropes ---

ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
    "longrope": {
        "factor": 4.0,
        "short_factor": [1.0] * 64,
        "long_factor": [2.0] * 64,
        "original_max_position_embeddings": 64,
    },
    "llama3": {
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    },
    "proportional": {"partial_rotary_factor": 0.5},
}


def test_every_kind_of_rope_is_tried() -> None:
    assert set(ROPE_INIT_FUNCTIONS) | {"default"} == set(ROPES)


def roped(kind: str) -> PreTrainedModel:
    maximum = 64 if kind == "dynamic" else 256
    return make(
        "llama",
        max_position_embeddings=maximum,
        rope_parameters={"rope_type": kind, "rope_theta": 1e4} | ROPES[kind],
    )


@pytest.mark.parametrize("kind", ROPES)
def test_a_rope_is_the_same_whatever_text_it_saw(kind: str) -> None:
    before, model = fingerprint(roped(kind)), roped(kind)
    is_rewritten = False
    for length in (20, 150, 20, 90, 200, 64, 65, 10):
        held = model.model.rotary_emb.inv_freq.clone()
        rows_of(model, length)
        is_rewritten |= not torch.equal(held, model.model.rotary_emb.inv_freq)
        assert fingerprint(model) == before, length
    assert is_rewritten == (kind in ("dynamic", "longrope"))
    for name in ("inv_freq", "original_inv_freq", "long_inv_freq"):
        if (held := getattr(model.model.rotary_emb, name, None)) is not None:
            setattr(model.model.rotary_emb, name, held * 1.001)
            assert fingerprint(model) != before, name
            setattr(model.model.rotary_emb, name, held)


@pytest.mark.parametrize("kind", ["dynamic", "longrope"])
def test_a_kept_cache_of_a_long_text_is_continued(kind: str, folder: Path) -> None:
    """In a process whose model has seen another text, or none."""
    ids = torch.randint(3, 97, (1, 101), generator=torch.Generator().manual_seed(1))
    model, other = enable_kv_cache(roped(kind)), enable_kv_cache(roped(kind))
    with torch.no_grad():
        with KVCache(model.config, folder, name="first", x_rows=0) as cache:
            model(ids[:, :100], past_key_values=cache)
        rows_of(model, 20)
        for each in (model, other):
            with KVCache(model.config, folder, name="first", x_rows=0) as cache:
                assert cache.reuse_prefix(ids) == 100
                each(ids[:, 100:], past_key_values=cache)
                cache.crop(-1)


# --- while a cache is open ---


def counted(model: PreTrainedModel) -> None:
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[0, 0] += 1


def cast(model: PreTrainedModel) -> None:
    model.half()


def put_in_its_place(model: PreTrainedModel) -> None:
    attention(model).k_proj.weight = nn.Parameter(attention(model).k_proj.weight.detach() * 2)


def module_put_in_its_place(model: PreTrainedModel) -> None:
    attention(model).k_proj = nn.Linear(64, 256, bias=False)


@pytest.mark.parametrize("change", [counted, cast, put_in_its_place, module_put_in_its_place])
def test_a_model_that_changes_under_an_open_cache(folder: Path, change: Change) -> None:
    """Also from one token to the next, and after `reset`: what is saved is of one model."""
    model = make("llama")
    enable_kv_cache(model)
    token = torch.ones(1, 1, dtype=torch.int64)
    with torch.no_grad(), KVCache(model.config, folder, name="one") as cache:
        for _ in range(3):
            model(token, past_key_values=cache)
        change(model)
        for _ in range(2):
            with pytest.raises(errors.ForeignFileError):
                model(token, past_key_values=cache)
            assert cache.get_seq_length() == 3
        cache.reset()
        with pytest.raises(errors.ForeignFileError):
            model(token, past_key_values=cache)


def test_a_watch_keeps_nothing_alive() -> None:
    model = make("llama")
    watch = Watch(model)
    assert watch.is_unchanged()
    rows_of(model)
    assert watch.is_unchanged()
    del model
    assert not watch.is_unchanged()
