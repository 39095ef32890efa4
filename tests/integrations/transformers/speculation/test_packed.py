"""Drafts of the model itself over all rows in four bits: the same tokens, no byte is read for them,
and the memory that was said."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import decoding
from espnx.kv.draft.packed import capacity_of
from espnx.kv.draft.pages import PageTier
from espnx.ops.attention.packed import packed_page_bytes
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.speculation.drafts import one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, generate, plain, prompt
from tests.sweeps import in_steps

LONG = [150, 80, 30]
MODES: dict[str, tuple[list[int], dict[str, Any], dict[str, Any]]] = {
    # lengths of the prompts, options of generate, options of the cache
    "one": ([150], {}, {}),
    "a batch": (LONG, {}, {"spill_interval": 8}),
    "ends": (LONG, {"eos_token_id": [5, 11, 40, 60, 71]}, {"spill_interval": 8}),
    "one at a time": (LONG[:2], {"gamma": 1}, {"spill_interval": 1}),
    "all in memory": ([20], {}, {"spill_interval": 999}),
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
        wanted = one_by_one(name, inputs, **own)
        with KVCache(enabled(name).config, folder, draft="4bit", **stored) as cache:
            got = speculated(name, inputs, cache, **options)
            said = cache.stats()["speculation"]
            assert cache.store.tier_bytes == 0
        assert torch.equal(got, wanted), f"{name}, {mode}"
        assert said["draft_bytes_asked"] == 0
        assert sum(said["accepted_by_position"]) > 0
        source = said["sources"]["4bit"]
        assert source["accepted"] > 0.2 * source["proposed"]


@pytest.mark.parametrize("stored", [{"format": "bf16"}, {"format": "int8"}])
def test_rows_that_are_rounded_on_the_way(folder: Path, stored: dict[str, Any]) -> None:
    inputs = prompt(LONG)
    model = enabled("llama")
    with KVCache(model.config, folder, x_rows=0, spill_interval=8, **stored) as cache:
        wanted = model.generate(**inputs, past_key_values=cache, do_sample=False, max_new_tokens=40)
    with KVCache(model.config, folder, draft="4bit", spill_interval=8, **stored) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=40)
    if stored["format"] == "bf16":
        assert torch.equal(got, wanted)
    else:  # whose scales depend on what is written together: the texts part somewhere
        assert torch.equal(got[:, :152], wanted[:, :152])


def test_the_memory_of_drafts(folder: Path) -> None:
    """Of all rows that stand, but the last few: memory for a part more pages, and for rows that
    wait for a whole one; whatever was generated before."""
    inputs = prompt([350])
    page = 2 * 2 * packed_page_bytes(128, 128)  # layers, heads
    for new in (20, 100):
        with KVCache(enabled("llama").config, folder, draft="4bit") as cache:
            speculated("llama", inputs, cache, max_new_tokens=new)
            got = cache.stats()["speculation"]["draft_memory_bytes"]
        pages = (350 + new) // 32
        rest = 2 * 2 * 31 * 256 * 4  # rows
        assert (pages - 2) * page <= got <= page * capacity_of(pages) + rest


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

        options: dict[str, Any] = {"engine": make_engine, "spill_interval": 8}
        with KVCache(enabled("llama").config, folder, draft="4bit", **options) as cache:
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


def test_a_kept_cache_packs_its_rows_again(folder: Path) -> None:
    inputs = prompt([150])
    first = one_by_one("llama", inputs, max_new_tokens=30)
    second = torch.cat([first, prompt([12], seed=4)["input_ids"]], dim=1)
    asked = {"input_ids": second, "attention_mask": torch.ones_like(second)}
    wanted = one_by_one("llama", asked, max_new_tokens=30)
    with KVCache(enabled("llama").config, folder, name="talk") as cache:
        enabled("llama").generate(
            **inputs, past_key_values=cache, max_new_tokens=30, do_sample=False
        )
    with KVCache(enabled("llama").config, folder, name="talk", draft="4bit") as cache:
        got = speculated("llama", asked, cache, max_new_tokens=30)
        assert cache.stats()["speculation"]["passes"] < 29
    assert torch.equal(got, wanted)


def test_in_inference_mode_and_out_of_it(folder: Path) -> None:
    inputs, ends = prompt(LONG), MODES["ends"][1]
    wanted = one_by_one("llama", inputs, max_new_tokens=40, **ends)
    with KVCache(enabled("llama").config, folder, draft="4bit", spill_interval=8) as cache:
        for is_on in (True, False, True):
            with torch.inference_mode(is_on):
                cache.reuse_prefix(**inputs)
                got = speculated("llama", inputs, cache, max_new_tokens=40, **ends)
            assert torch.equal(got, wanted)


SAMPLED: dict[str, tuple[Any, dict[str, Any]]] = {
    # what proposes, options of the cache
    "pages": ("pages", {"draft_memory": 0.06}),
    "pages of int8": ("pages", {"draft_memory": 0.06, "format": "int8"}),
    "4bit": ("4bit", {}),
    "4bit of int8": ("4bit", {"format": "int8"}),
    "assistant": (None, {}),
    "int8": ("none", {"format": "int8"}),
}


@pytest.mark.parametrize("kind", SAMPLED)
def test_sampled_texts_come_again_by_their_seed(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is said how many tokens are proposed, whenever writes end: at once, or any of them
    late, in another order; also behind tokens that were generated without a draft. The distribution
    is kept by the rule that all drafts share (`test_pages`)."""
    draft, stored = SAMPLED[kind]
    draft, ends, found = draft or plain("llama"), list[list[int]](), list[torch.Tensor]()
    begin = PageTier.begin

    def noted(tier: PageTier, queries: Any, n_sequences: int, dtype: Any, end: int) -> None:
        ends[-1].append(end)
        begin(tier, queries, n_sequences, dtype, end)

    monkeypatch.setattr(PageTier, "begin", noted)
    inputs, model = prompt([496, 290]), enabled("llama")
    options: dict[str, Any] = {"do_sample": True, "top_k": 20, "seed": 5}
    for slow in (0.0, 0.4, 0.9):
        late = FaultRule("delay", operation="write", probability=slow, value=60_000_000)
        engine = FaultyEngine([late] if slow else [], seed=3)
        stored = stored | {"engine": lambda engine=engine: engine, "spill_interval": 8}
        ends.append([])
        proposes = None if draft == "none" else draft
        with KVCache(model.config, folder, draft=proposes, **stored) as cache:
            if draft == "none":
                found.append(generate(model, inputs, cache, **options, max_new_tokens=40))
                continue
            ids = generate(model, inputs, cache, max_new_tokens=17)
            mask = F.pad(inputs["attention_mask"], (0, 17), value=1)
            more = {"input_ids": ids, "attention_mask": mask}
            found.append(speculated("llama", more, cache, **options, max_new_tokens=24, gamma=4))
            said = cache.stats()["speculation"]["sources"]
            assert said[draft if isinstance(draft, str) else "assistant"]["accepted"] > 0
    assert ends[0] == ends[1] == ends[2]
    assert bool(ends[0]) == (draft == "pages")
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


def test_what_does_not_go_together(folder: Path) -> None:
    config = enabled("llama").config
    for options, named in (
        ({"draft": "4bit", "draft_memory": 0.5}, "follows from the rows"),
        ({"draft": "4bit", "x_rows": 1}, "x_rows=0"),
    ):
        with pytest.raises(errors.InvalidInputError, match=named):
            KVCache(config, folder, **options)  # type: ignore[arg-type]
    assert not list(folder.iterdir())


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["pages", "4bit"])
@pytest.mark.parametrize(("count", "device"), [(3, None), (2, "smartssd")])
def test_several_disks_and_an_emulated_device(
    folder: Path, kind: str, count: int, device: str | None
) -> None:
    """Reads that come through other devices name the same pages and pack the same rows."""
    inputs = prompt(LONG)
    wanted = one_by_one("llama", inputs, max_new_tokens=30)
    places = [folder / str(i) for i in range(count)]
    options: dict[str, Any] = {"draft": kind, "spill_interval": 8}
    said = []
    for where, through in (([folder], None), (places, device)):
        for place in where:
            place.mkdir(exist_ok=True)
        storage = [str(place) for place in where]
        with KVCache(enabled("llama").config, storage, device=through, **options) as cache:
            got = speculated("llama", inputs, cache, max_new_tokens=30)
            said.append(cache.stats()["speculation"]["sources"])
        assert torch.equal(got, wanted)
    assert said[0] == said[1]
