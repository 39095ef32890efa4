"""Drafts of the model itself, over the pages that the last pass named: the same tokens, and no byte
is read for them; over all pages they are what the pass says."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

import espnx
from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import decoding
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.speculation.drafts import one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, make, prompt
from tests.kv.draft.test_acceptance import probability
from tests.sweeps import at_length, in_steps

LONG = [150, 80, 30]
MODES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    # Lengths of the prompts, options of generate, options of the cache.
    "one": ([150], {}, {"draft_memory": 0.1}),
    "a batch": (LONG, {}, {"draft_memory": 0.3, "spill_interval": 8}),
    "ends": (LONG, {"eos_token_id": [5, 11, 40, 60, 71]}, {"spill_interval": 8}),
    "one at a time": (LONG[:2], {"gamma": 1}, {"spill_interval": 1}),
    "all in memory": ([20], {"max_new_tokens": 12}, {"spill_interval": 999}),
    "bf16 rows": (LONG, {}, {"format": "bf16", "spill_interval": 8}),
}
NAMES = ("llama", "qwen3", "opt", "gpt2")


@pytest.fixture(autouse=True)
def without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The model alone proposes."""
    monkeypatch.setattr(decoding, "continuation", lambda tokens, n: [])


@in_steps(4)
@pytest.mark.parametrize("name", NAMES)
def test_tokens_are_those_of_one_by_one(folder: Path, name: str, step: int) -> None:
    for mode in list(MODES)[NAMES.index(name) % step :: step]:
        lengths, options, stored = MODES[mode]
        inputs, options = prompt(lengths), {"max_new_tokens": 40} | options
        own = {key: value for key, value in options.items() if key != "gamma"}
        if "format" in stored:  # which rounds
            with KVCache(enabled(name).config, folder, x_rows=0, **stored) as cache:
                model = enabled(name)
                wanted = model.generate(**inputs, past_key_values=cache, do_sample=False, **own)
        else:
            wanted = one_by_one(name, inputs, **own)
        with KVCache(enabled(name).config, folder, draft="pages", **stored) as cache:
            got = speculated(name, inputs, cache, **options)
            said = cache.stats()
            assert cache.store.tier_bytes == 0
        assert torch.equal(got, wanted), f"{name}, {mode}"
        assert said["speculation"]["draft_bytes_asked"] == 0
        assert sum(said["speculation"]["accepted_by_position"]) > 0
        assert said["decode_tokens"] == said["speculation"]["tokens"]


def test_in_inference_mode_and_out_of_it(folder: Path) -> None:
    """Texts that end apart, and the conversation that goes on."""
    inputs, ends = prompt(LONG), MODES["ends"][1]
    wanted = one_by_one("llama", inputs, max_new_tokens=40, **ends)
    with KVCache(enabled("llama").config, folder, draft="pages", spill_interval=8) as cache:
        for is_on in (True, False, True):
            with torch.inference_mode(is_on):
                cache.reuse_prefix(**inputs)
                got = speculated("llama", inputs, cache, max_new_tokens=40, **ends)
            assert torch.equal(got, wanted)


def test_over_all_pages_every_draft_stands(folder: Path) -> None:
    """Nothing is missing in the pages, in what waits and in the draft's own rows; and what a pass
    read for one token it reads for nine."""
    inputs = prompt([150, 61])
    wanted = one_by_one("llama", inputs, max_new_tokens=64)
    options: dict[str, Any] = {"draft": "pages", "draft_memory": 1.0, "spill_interval": 8}
    with KVCache(enabled("llama").config, folder, **options) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=64)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    assert said["accepted_by_position"] == [1.0] * 8
    assert said["passes"] == 8  # one names the pages; then 62 tokens by nine
    assert said["draft_memory_bytes"] > 2 * 2 * 2 * 128 * 2 * 128 * 4


def test_the_memory_of_drafts(folder: Path) -> None:
    """Of K and V a quarter, and three pages more; whatever was generated before."""
    inputs, taken = prompt([350]), list[int]()
    options: dict[str, Any] = {"draft": "pages", "draft_memory": 0.25}
    for new in (20, 60):
        with KVCache(enabled("llama").config, folder, **options) as cache:
            speculated("llama", inputs, cache, max_new_tokens=new)
            taken.append(cache.stats()["speculation"]["draft_memory_bytes"])
            assert cache.store.memory_bytes < 5e5
    page = 2 * 32 * 2 * 128 * 4 * 2  # layers, rows, heads, values, bytes, K and V
    for stored, got in zip((368, 408), taken, strict=True):
        pages = 3 + round(0.25 * -(-stored // 32))
        assert (pages - 1) * page <= got <= 1.05 * pages * page


@in_steps(3)
@pytest.mark.parametrize(("fault", "value"), [("error", errno.EIO), ("flip", 801)])
def test_every_read_fails_once(folder: Path, fault: str, value: int, step: int) -> None:
    inputs = prompt(LONG)
    wanted = one_by_one("llama", inputs, max_new_tokens=30)
    failures = 0
    for nth in range(1, 24, 2 * step):
        made = list[FaultyEngine]()

        def make_engine(nth: int = nth, made: list[FaultyEngine] = made) -> FaultyEngine:
            rule = FaultRule(fault, operation="read", nth=nth, count=1, value=value)
            made.append(FaultyEngine(() if made else [rule], poison=True, pool_bytes=1 << 20))
            return made[-1]

        options: dict[str, Any] = {"engine": make_engine, "spill_interval": 8, "draft_memory": 0.3}
        with KVCache(enabled("llama").config, folder, draft="pages", **options) as cache:
            try:
                got = speculated("llama", inputs, cache, max_new_tokens=30)
            except errors.StorageError as error:
                failures += 1
                so_far = error.sequences  # type: ignore[attr-defined]
                assert torch.equal(so_far[:, :151], wanted[:, :151])
                cache.reuse_prefix(**inputs)
                got = speculated("llama", inputs, cache, max_new_tokens=30)
        made[0].close()
        assert torch.equal(got, wanted), f"{fault} in the {nth}th read"
    assert failures > 1


def too_willing(
    scores: torch.Tensor, drafted: int | None, drawn_by: Any = None, *, is_sampled: bool
) -> tuple[int, bool]:
    """A wrong rule: what was proposed stands, however likely it is."""
    if drafted is not None:
        return drafted, True
    return int(torch.multinomial(scores.softmax(-1), 1)), False


@torch.no_grad()
def third_token(model: Any, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The distribution of the third new token behind a text [1, n], over all pairs before it."""
    pairs = torch.cartesian_prod(torch.arange(vocabulary), torch.arange(vocabulary))
    wanted = torch.zeros(vocabulary, dtype=torch.float64)
    for part in pairs.split(250):
        cache = DynamicCache(config=model.config)
        text = (model(ids, past_key_values=cache).logits[0, -1] / 0.7).softmax(-1)
        cache.batch_repeat_interleave(len(part))
        behind = (model(part, past_key_values=cache).logits / 0.7).softmax(-1).double()
        second = behind[:, 0].gather(1, part[:, 1:]).flatten()
        wanted += (text[part[:, 0]] * second) @ behind[:, 1]
    return wanted.float()


@at_length("is_right", True, False)
def test_sampled_tokens_keep_their_distribution(
    folder: Path, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The third new token, the first that a draft proposes (the pass before it names the pages):
    chi-square of 300 draws against its exact distribution. A wrong rule fails it."""
    if not is_right:
        monkeypatch.setattr(decoding, "next_token", too_willing)
    vocabulary, draws = 50, 100
    model = espnx.enable_kv_cache(make("llama", vocab_size=vocabulary, initializer_range=0.2))
    ids = torch.randint(3, vocabulary, (1, 150), generator=torch.Generator().manual_seed(2))
    wanted = third_token(model, ids, vocabulary)
    counts, accepted = torch.zeros(vocabulary), list[float]()
    torch.manual_seed(3)
    for _ in range(3):
        with KVCache(model.config, folder, draft="pages", draft_memory=0.01) as cache:
            got = espnx.generate(
                model,
                ids.expand(draws, -1),
                attention_mask=torch.ones(draws, 150, dtype=torch.int64),
                past_key_values=cache,
                gamma=2,
                max_new_tokens=4,
                do_sample=True,
                temperature=0.7,
                top_k=0,
            )
            accepted.append(cache.stats()["speculation"]["accepted_by_position"][0])
        counts += got[:, 152].bincount(minlength=vocabulary)
    if is_right:
        assert 0.1 < sum(accepted) / len(accepted) < 0.9
    assert (probability(counts, wanted) > 1e-3) is is_right


def test_a_kept_cache_names_its_pages_again(folder: Path) -> None:
    inputs = prompt([150])
    first = one_by_one("llama", inputs, max_new_tokens=30)
    second = torch.cat([first, prompt([12], seed=4)["input_ids"]], dim=1)
    asked = {"input_ids": second, "attention_mask": torch.ones_like(second)}
    wanted = one_by_one("llama", asked, max_new_tokens=30)
    with KVCache(enabled("llama").config, folder, name="talk") as cache:
        enabled("llama").generate(
            **inputs, past_key_values=cache, max_new_tokens=30, do_sample=False
        )
    with KVCache(enabled("llama").config, folder, name="talk", draft="pages") as cache:
        got = speculated("llama", asked, cache, max_new_tokens=30)
        assert cache.stats()["speculation"]["passes"] < 29
    assert torch.equal(got, wanted)


def test_what_does_not_go_together(folder: Path) -> None:
    config = enabled("llama").config
    for options, named in (
        ({"draft": "pages", "draft_memory": 0.0}, "above 0"),
        ({"draft": "pages", "draft_memory": 2}, "at most 1"),
        ({"draft": "lookup", "draft_memory": 0.1}, "takes no memory"),
        ({"draft_memory": 0.1}, "without a draft"),
        ({"draft": "pages", "x_rows": 1}, "x_rows=0"),
    ):
        with pytest.raises(errors.InvalidInputError, match=named):
            KVCache(config, folder, **options)  # type: ignore[arg-type]
    assert not list(folder.iterdir())
