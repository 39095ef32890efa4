"""Drafts of the model itself over all rows in four bits: the same tokens, no byte is read for them,
and the memory that was said."""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import decoding
from espnx.kv.draft.packed import capacity_of
from espnx.kv.rows import LayerRows, StoredRun
from espnx.ops.attention.packed import packed_page_bytes
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.speculation.drafts import one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, plain, prompt
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


@pytest.mark.parametrize("kind", ["pages", "4bit", "assistant"])
def test_sampled_texts_come_again_by_their_seed(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it is said how many tokens are proposed, and writes have ended: pages of others are not
    named. The distribution is kept by the rule that all drafts share (`test_pages`)."""
    is_written = LayerRows._is_written

    def waited(rows: LayerRows, run: StoredRun) -> bool:
        end = time.monotonic() + 60
        while not is_written(rows, run) and time.monotonic() < end:
            time.sleep(0.001)
        return is_written(rows, run)

    if kind == "pages":
        monkeypatch.setattr(LayerRows, "_is_written", waited)
    draft: Any = plain("llama") if kind == "assistant" else kind
    inputs = prompt([150, 80])
    options: dict[str, Any] = {"do_sample": True, "top_k": 20, "max_new_tokens": 30, "gamma": 4}
    found = []
    for _ in range(2):
        torch.manual_seed(5)
        with KVCache(enabled("llama").config, folder, draft=draft) as cache:
            found.append(speculated("llama", inputs, cache, **options))
            assert cache.stats()["speculation"]["sources"][kind]["accepted"] > 0
    assert torch.equal(*found)


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
