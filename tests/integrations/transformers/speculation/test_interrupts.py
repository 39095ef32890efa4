"""What ends a draft or a pass in the middle, and what does not fit: the cache is as before the
pass, and goes on to the same tokens."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import decoding
from espnx.integrations.transformers.speculation.probe import check_pass
from espnx.kv.rows import LayerRows
from tests.forks import Forks
from tests.integrations.transformers.forks import LENGTHS, NEW, held
from tests.integrations.transformers.speculation.drafts import drafting, one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, prompt
from tests.sweeps import in_steps

LONG = [70, 50, 30]
STEP = 4


class _Interrupts:
    """Ctrl-C at the nth call of something."""

    def __init__(self, nth: int):
        self.left = nth

    def __call__(self, *args: Any) -> None:
        self.left -= 1
        if not self.left:
            raise KeyboardInterrupt


def _go_on(
    cache: KVCache, inputs: dict[str, torch.Tensor], wanted: torch.Tensor, end: int
) -> torch.Tensor:
    """Generates on from what the cache holds after an interrupt: what it says it holds is right."""
    tokens, n = cache.tokens, cache.get_seq_length()
    first = inputs["input_ids"].shape[1]
    if n:
        assert tokens is not None
        assert torch.equal(tokens[:, :n], wanted[:, :n])
    ids = wanted[:, : max(n + 1, first)]
    mask = torch.ones_like(ids)
    mask[:, :first] = inputs["attention_mask"]
    asked = {"input_ids": ids, "attention_mask": mask}
    return speculated("llama", asked, cache, max_new_tokens=first + end - ids.shape[1])


@pytest.mark.sampled(1)
@in_steps(3)
@pytest.mark.parametrize("kind", ["pages", "4bit", "lookup"])
@pytest.mark.parametrize("where", ["a layer", "what is kept"])
def test_ctrl_c(
    folder: Path, kind: str, where: str, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In the prompt, in drafts, in passes, between their layers; and while the rows of accepted
    tokens move."""
    inputs, model = prompt(LONG), enabled("llama")
    wanted = one_by_one("llama", inputs, max_new_tokens=40)
    check_pass(model, inputs["input_ids"])
    interrupts, accept = 0, LayerRows.accept
    for nth in range(1, 40, 2 * step) if where == "a layer" else range(1, 16, 2 * step):
        with monkeypatch.context() as patch:
            if kind == "lookup":
                drafting(patch, wanted, right=0.7, seed=nth)
            with KVCache(model.config, folder, draft=kind, spill_interval=8) as cache:
                interrupt = _Interrupts(nth)
                if where == "a layer":
                    hook = model.model.layers[1].mlp.register_forward_hook(interrupt)
                else:

                    def accepting(rows: LayerRows, *args: Any, interrupt: Any = interrupt) -> None:
                        interrupt()
                        accept(rows, *args)

                    patch.setattr(LayerRows, "accept", accepting)
                try:
                    got = speculated("llama", inputs, cache, max_new_tokens=40)
                except KeyboardInterrupt:
                    interrupts += 1
                    got = _go_on(cache, inputs, wanted, 40)
                finally:
                    if where == "a layer":
                        hook.remove()
                assert torch.equal(got, wanted), f"{kind}, {where}, {nth}"
    assert interrupts > 1


@in_steps(3)
def test_killed(folder: Path, processes: Forks, step: int) -> None:
    """kill -9 in a draft, in a pass that names pages, and while rows of accepted tokens move: what
    was saved is found, and can be continued, by drafts or without them."""
    begun = {
        "model": "llama", "storage": [folder / "begun"], "step": STEP, "until": STEP,
        "spill_interval": 8, "draft": "pages",
    }  # fmt: skip
    assert processes.wait(processes.start(**begun)) == 0
    saved = max(LENGTHS) + STEP - 1
    places = [
        (function, nth)
        for function in (("tier", "attend"), ("tier", "begin"), ("rows", "accept"))
        for nth in (1, 2, 5, 9)
    ]
    kills = 0
    for (owner, function), nth in places[::step]:
        storage = folder / "again"
        shutil.copytree(folder / "begun", storage)
        job = begun | {"storage": [storage], "step": NEW, "until": NEW}
        code = processes.run(**job, at=[owner, function, nth, False])
        kills += code != 0
        now = held("llama", [storage])
        assert now == saved if code else now == max(LENGTHS) + NEW - 1
        assert processes.run(**job) == 0
        assert held("llama", [storage]) == max(LENGTHS) + NEW - 1
        shutil.rmtree(storage)
    assert kills >= len(places[::step]) // 2


@pytest.mark.parametrize("kind", ["pages", "lookup"])
def test_more_is_proposed_than_there_is_room_for(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """64 tokens proposed where 12 are wanted, and no space for more: none of them is written, and
    none comes out."""
    inputs = prompt([100, 60])
    wanted = one_by_one("llama", inputs, max_new_tokens=12)
    if kind == "lookup":
        drafting(monkeypatch, torch.cat([wanted, wanted], dim=1), right=1.0)
    options: dict[str, Any] = {"capacity_tokens": 112, "spill_interval": 8, "draft": kind}
    with KVCache(enabled("llama").config, folder, **options) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=12, gamma=64)
        assert cache.draft is not None
        assert len(cache.draft.offered) <= 11
        assert all(rows.stored <= 112 for rows in cache.store.rows.every)
    assert torch.equal(got, wanted)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("kind", ["pages", "4bit"])
@pytest.mark.parametrize("room", [0, 1, 2])
def test_rows_for_drafts_that_no_longer_fit(
    folder: Path, kind: str, room: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Memory in one layer for so many of three sequences: the others are dropped, in all layers,
    and it is said; tokens are the same, and the next text tries again."""
    inputs = prompt([150, 80, 61])
    wanted = one_by_one("llama", inputs, max_new_tokens=40)
    zeros, calls = torch.zeros, 0
    monkeypatch.setattr(decoding, "continuation", lambda tokens, n: [])

    def refused(*shape: Any, **options: Any) -> torch.Tensor:
        nonlocal calls
        dims = shape[0] if isinstance(shape[0], tuple) else shape
        is_rows = len(dims) == 5 or (kind, options.get("dtype")) == ("4bit", torch.uint8)
        if is_rows and dims[0]:
            calls += 1
            # the second layer's, and from then on whatever grows
            if calls > (2 if kind == "pages" else 1) and dims[0] > room:
                raise RuntimeError("[enforce fail at alloc_cpu.cpp] can't allocate memory")
        return zeros(*shape, **options)

    asked: dict[str, Any] = {"draft": kind, "spill_interval": 8}
    if kind == "pages":
        asked["draft_memory"] = 1.0
    with KVCache(enabled("llama").config, folder, **asked) as cache:
        module = "pages" if kind == "pages" else "packed"
        with monkeypatch.context() as patch:
            patch.setattr(f"espnx.kv.draft.{module}.torch.zeros", refused)
            got = speculated("llama", inputs, cache, max_new_tokens=40, gamma=2)
            assert calls > 2
        assert torch.equal(got, wanted)
        said = cache.stats()["speculation"]
        assert said["sequences_without_memory"] == 3 - room
        assert f"{3 - room} sequences had none" in cache.summary()
        assert "sequences have no memory for drafts" in said["why"]
        assert cache.store.tier_bytes == 0
        # a sequence that drafts goes on alone for a while, three at a pass
        assert (said["sources"].get(kind) is None) == (room == 0)
        cache.reset()
        before = cache.stats()["speculation"]["passes"]
        assert torch.equal(speculated("llama", inputs, cache, max_new_tokens=40), wanted)
        said = cache.stats()["speculation"]
        assert said["passes"] - before < 39
        assert "memory" not in said["why"]


def test_nothing_grows_with_the_passes(folder: Path) -> None:
    """The same text decoded again and again from the same cache: pages take what they took, what
    waits stays within three intervals and two passes (how much it is depends on when writes end),
    and what is known of drafts has as many numbers."""
    inputs, found = prompt([150, 80]), set[tuple[int, ...]]()
    with KVCache(enabled("llama").config, folder, draft="pages", spill_interval=8) as cache:
        for turn in range(8):
            speculated("llama", inputs, cache, max_new_tokens=30, gamma=3)
            store, tally = cache.store, cache.draft
            assert tally is not None
            assert store.memory_bytes < 2 * 2 * 2 * 2 * 128 * 4 * (3 * 8 + 2 * 4 + 8)
            if turn > 1:
                found.add((tally.memory_bytes, len(tally.offered), len(tally.accepted)))
            cache.crop(149 - cache.get_seq_length())
        assert tally is not None
        assert tally.passes > 100
    assert len(found) == 1
