"""Models under `torch.compile`: the framework's logits and tokens, in both orders of compiling and
enabling."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import espnx
from espnx.integrations.transformers.cache import KVCache
from tests.integrations.transformers.tiny import expected, generate, make, plain, prompt
from tests.sweeps import some

PARTS = ((0, 30), (30, 31), (31, 41))


@pytest.fixture(autouse=True)
def nothing_compiled(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Graphs are kept by code, not by model. What the compiler traces is written down for no
    reader: pytest would keep all of it."""
    monkeypatch.setattr(logging.getLogger("torch.__trace"), "propagate", False)
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def whole(model: PreTrainedModel, **how: Any) -> Callable[..., Any]:
    return torch.compile(model, **how)  # type: ignore[no-any-return]


def in_place(model: PreTrainedModel, **how: Any) -> Callable[..., Any]:
    model.compile(**how)
    return model


def check(
    name: str, run: Callable[..., Any], cache: Any, *, atol: float = 1e-4, **more: Any
) -> None:
    """Chunks and steps of padded prompts: the logits of the model that is not compiled."""
    inputs, theirs = prompt([41, 35]), DynamicCache(config=plain(name).config)
    seen = inputs["attention_mask"].bool()
    with torch.no_grad():
        for begin, end in PARTS:
            said = {
                "input_ids": inputs["input_ids"][:, begin:end],
                "attention_mask": inputs["attention_mask"][:, :end],
            }
            wanted = plain(name)(**said, past_key_values=theirs).logits[seen[:, begin:end]]
            found = run(**said, past_key_values=cache, **more).logits[seen[:, begin:end]]
            torch.testing.assert_close(
                found, wanted, rtol=1e-4, atol=atol * float(wanted.abs().max())
            )


@pytest.mark.parametrize(
    ("compiled", "enabled_first", "x_rows"), some([(whole, False, 2), (in_place, True, 0)], 2)
)
def test_logits(
    folder: Path, compiled: Callable[..., Any], enabled_first: bool, x_rows: int
) -> None:
    model = make("llama")
    if enabled_first:
        espnx.enable_kv_cache(model)
    run = compiled(model, backend="eager")
    espnx.enable_kv_cache(model)
    with KVCache(model.config, folder, x_rows=x_rows, spill_interval=1) as cache:
        check("llama", run, cache)
        assert cache.get_seq_length() == 41
        assert cache.stats()["bytes_asked"] > 0


@pytest.mark.sweep
def test_windows(folder: Path) -> None:
    model = espnx.enable_kv_cache(make("gemma3"))
    with KVCache(model.config, folder, x_rows=0) as cache:
        check("gemma3", whole(model, backend="eager"), cache)


def test_generate(folder: Path) -> None:
    """`generate` of a model whose forward pass is compiled."""
    model = espnx.enable_kv_cache(make("llama"))
    model.forward = torch.compile(model.forward, backend="eager")
    with KVCache(model.config, folder, x_rows=0) as cache:
        assert torch.equal(generate(model, prompt([37, 20]), cache), expected("llama", [37, 20]))


def test_without_a_cache_of_ours() -> None:
    """A compiled model cannot look whether its positions are those of packed sequences, and masks
    them as if they were."""
    model = espnx.enable_kv_cache(make("llama"))
    run, ids = whole(model, backend="eager"), prompt([41])["input_ids"]
    with torch.no_grad():
        wanted = plain("llama")(ids).logits
        torch.testing.assert_close(
            run(ids, use_cache=False).logits,
            wanted,
            rtol=1e-4,
            atol=1e-4 * float(wanted.abs().max()),
        )
        with pytest.raises(espnx.errors.InvalidInputError, match="packed"):
            run(ids, position_ids=torch.arange(41)[None] % 20, use_cache=False)


@torch._dynamo.config.patch(
    allow_unspec_int_on_nn_module=True, recompile_limit=16, fail_on_recompile_limit_hit=True
)
def test_many_layers_are_compiled_once(folder: Path) -> None:
    """With the settings that docs/kv-cache.md names: no layer is compiled anew for its number."""
    model = espnx.enable_kv_cache(make("llama", num_hidden_layers=20))
    run, ids = whole(model, backend="eager"), prompt([20])["input_ids"]
    with KVCache(model.config, folder, x_rows=0) as cache, torch.no_grad():
        logits = torch.cat(
            [run(part, past_key_values=cache).logits for part in ids.split([18, 2], dim=1)], dim=1
        )
        wanted = model(ids).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


def test_one_graph_cannot_be(folder: Path) -> None:
    model = espnx.enable_kv_cache(make("llama"))
    run = whole(model, backend="eager", fullgraph=True)
    with (
        KVCache(model.config, folder, x_rows=0) as cache,
        torch.no_grad(),
        pytest.raises(
            torch._dynamo.exc.Unsupported,
            match=r"rows on SSD is no part of a graph.*fullgraph=False",
        ),
    ):
        run(prompt([20])["input_ids"], past_key_values=cache)
    with KVCache(model.config, folder, x_rows=0) as cache, torch.no_grad():
        assert torch.isfinite(model(prompt([20])["input_ids"], past_key_values=cache).logits).all()


def test_a_compiled_pass_that_breaks_off(folder: Path) -> None:
    """It was none, as one that is not compiled."""
    model = espnx.enable_kv_cache(make("llama"))
    run, ids = whole(model, backend="eager"), prompt([41])["input_ids"]
    with KVCache(model.config, folder, x_rows=0) as cache, torch.no_grad():
        run(ids[:, :40], past_key_values=cache)

        def stop(*_: Any) -> None:
            raise ZeroDivisionError

        hook = model.model.layers[0].register_forward_hook(stop)
        with pytest.raises(ZeroDivisionError):
            run(ids[:, 40:], past_key_values=cache)
        hook.remove()
        assert cache.get_seq_length() == 40
        found, wanted = run(ids[:, 40:], past_key_values=cache).logits, model(ids).logits[:, 40:]
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))


@pytest.mark.skipif(
    not os.environ.get("ESPNX_INDUCTOR"),
    reason="ESPNX_INDUCTOR is not set: the C++ compiler takes a minute",
)
# of torch's own modules, when inductor is first imported
@pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")
def test_the_default_backend(folder: Path) -> None:
    """Compiled by inductor, with the memory of one pass used again in the next where the device has
    graphs of its own."""
    model = espnx.enable_kv_cache(make("llama", num_hidden_layers=1))
    run, ids = whole(model, mode="reduce-overhead", dynamic=True), prompt([20, 20])["input_ids"]
    with KVCache(model.config, folder, x_rows=0) as cache, torch.no_grad():
        logits = torch.cat(
            [run(part, past_key_values=cache).logits for part in ids.split([18, 2], dim=1)], dim=1
        )
        wanted = model(ids).logits
    torch.testing.assert_close(logits, wanted, rtol=1e-4, atol=1e-4 * float(wanted.abs().max()))
