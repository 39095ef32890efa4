"""Drafts of a smaller model by transformers' protocol, and lookup before those of any model: the
same tokens, whoever proposes them."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from transformers import DynamicCache

import espnx
from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.integrations.transformers.speculation import assistant as assistants
from espnx.integrations.transformers.speculation import decoding
from espnx.kv.draft.pace import Pace
from espnx.kv.draft.sources import Sources
from tests.integrations.transformers.speculation.drafts import knowing, one_by_one, speculated
from tests.integrations.transformers.tiny import enabled, make, plain, prompt
from tests.kv.draft.test_acceptance import probability
from tests.sweeps import at_length

LONG = [100, 61, 30]
MODES: dict[str, tuple[list[int], dict[str, Any]]] = {
    "one": ([100], {}),
    "a batch": (LONG, {}),
    "ends": (LONG, {"eos_token_id": [5, 11, 40, 60, 71]}),
    "one at a time": (LONG[:2], {"gamma": 1}),
    "chosen": (LONG, {"gamma": None}),
    "processors": (LONG, {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3}),
}


@pytest.fixture
def _without_lookup(monkeypatch: pytest.MonkeyPatch) -> None:
    """The smaller model alone proposes."""
    monkeypatch.setattr(decoding, "continuation", lambda tokens, n: [])


@pytest.fixture
def _lookup_first(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever passes say of it."""
    monkeypatch.setattr(Sources, "asks_lookup", lambda sources, *, by_clock: True)


@pytest.mark.usefixtures("_without_lookup")
@pytest.mark.sampled(1)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("is_twin", [True, False])
def test_tokens_are_those_of_one_by_one(folder: Path, mode: str, is_twin: bool) -> None:
    """A twin of the model, whose every token stands, and one that knows nothing."""
    lengths, options = MODES[mode]
    inputs, options = prompt(lengths), {"max_new_tokens": 40} | options
    own = {key: value for key, value in options.items() if key != "gamma"}
    wanted = one_by_one("llama", inputs, **own)
    small = plain("llama") if is_twin else make("qwen3", seed=3)
    with KVCache(enabled("llama").config, folder, draft=small, spill_interval=8) as cache:
        got = speculated("llama", inputs, cache, **options)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    assert (said["draft"], said["draft_bytes_asked"]) == ("assistant", 0)
    if is_twin and mode in ("one", "a batch"):
        assert said["accepted_by_position"] == [1.0] * 8
        assert said["passes"] <= 6
    if is_twin:
        assert said["sources"]["assistant"]["accepted"] > 0


@pytest.mark.usefixtures("_lookup_first")
def test_its_cache_follows_the_text(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lookup proposes in between, rightly and wrongly: what the smaller model remembers is the text
    all the same, so that each of a twin's tokens stands."""
    inputs = prompt([60, 41])
    wanted = one_by_one("llama", inputs, max_new_tokens=60)
    known, turn = knowing(wanted, 0.6), 0

    def sometimes(tokens: np.ndarray, n: int) -> list[int]:
        nonlocal turn
        turn += 1
        return known(tokens, n) if turn % 3 else []

    monkeypatch.setattr(decoding, "continuation", sometimes)
    with KVCache(enabled("llama").config, folder, draft=plain("llama")) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=60, gamma=3)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    own, lookup = said["sources"]["assistant"], said["sources"]["lookup"]
    assert own["accepted"] == own["proposed"] > 10
    assert 0 < lookup["accepted"] < lookup["proposed"]


@pytest.mark.usefixtures("_lookup_first")
@pytest.mark.parametrize("kind", ["pages", "4bit"])
def test_lookup_comes_first(folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where it knows the text no draft is made by the model; a sequence for which it finds nothing
    has the model's."""
    inputs = prompt([150, 80])
    wanted = one_by_one("llama", inputs, max_new_tokens=40)
    known = knowing(wanted, 1.0)
    first = wanted[0, :150].tolist()

    def of_first(tokens: np.ndarray, n: int) -> list[int]:
        return known(tokens, n) if tokens[:150].tolist() == first else []

    drafted, options = list[list[int]](), {"spill_interval": 8, "draft": kind}
    by_model = decoding.Decoding._by_model

    def counted(self: Any, room: list[int]) -> Any:
        drafted.append(room)
        return by_model(self, room)

    monkeypatch.setattr(decoding.Decoding, "_by_model", counted)
    for lookup, is_asked in ((known, False), (of_first, True)):
        drafted.clear()
        monkeypatch.setattr(decoding, "continuation", lookup)
        with KVCache(enabled("llama").config, folder, **options) as cache:
            got = speculated("llama", inputs, cache, max_new_tokens=40, gamma=4)
            said = cache.stats()["speculation"]
        assert torch.equal(got, wanted)
        assert any(any(room) for room in drafted) is is_asked
        assert all(not room[0] or len(room) == 1 for room in drafted)
        assert (kind in said["sources"]) is is_asked
        assert said["sources"]["lookup"]["accepted"] == said["sources"]["lookup"]["proposed"] > 20


def count_time(monkeypatch: pytest.MonkeyPatch, draft_s: float, pass_s: float) -> None:
    """Time passes in forward passes alone: so much in a draft's, and in any other."""
    now, forward = 0.0, decoding.Decoding._forward

    def counted(self: Any, *given: Any) -> torch.Tensor:
        nonlocal now
        now += draft_s if self._undecided.rows.is_drafting else pass_s
        return forward(self, *given)

    monkeypatch.setattr(decoding.Decoding, "_forward", counted)
    monkeypatch.setattr(decoding, "time", SimpleNamespace(perf_counter=lambda: now))


@pytest.mark.parametrize("draft_s", [0.1, 3.0])
def test_a_draft_that_is_behind_is_not_asked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, draft_s: float
) -> None:
    """Lookup that is always wrong proposes where the model does not: for the first pass, which
    brings the model's rows. Where drafts take longer than passes it is not behind."""
    count_time(monkeypatch, draft_s, 1.0)
    inputs = prompt([150])
    wanted = one_by_one("llama", inputs, max_new_tokens=120)
    monkeypatch.setattr(decoding, "continuation", knowing(wanted, 0.0))
    monkeypatch.setattr(Pace, "choose", lambda pace, *_: setattr(pace, "gamma", 2))
    monkeypatch.setattr(Pace, "goes_on", lambda _, done: done < 2)
    with KVCache(enabled("llama").config, folder, draft="pages", draft_memory=1.0) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=120, gamma=None)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    assert (said["sources"]["lookup"]["proposed"] == 2) is (draft_s < 1)


@pytest.mark.parametrize("kind", ["pages", "4bit"])
def test_lookup_that_is_right_takes_over(
    folder: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What it would have brought is seen in the passes over what the model proposed."""
    inputs = prompt([150, 80])
    wanted = one_by_one("llama", inputs, max_new_tokens=120)
    monkeypatch.setattr(decoding, "continuation", knowing(wanted, 1.0))
    # which says nothing that the model says
    least = lambda scores, *, is_sampled: (int(scores.argmin()), None)  # noqa: E731
    monkeypatch.setattr(decoding, "drawn", least)
    with KVCache(enabled("llama").config, folder, draft=kind, spill_interval=8) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=120, gamma=4)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    lookup, model = said["sources"]["lookup"], said["sources"][kind]
    assert model["accepted"] == 0
    assert lookup["accepted"] == lookup["proposed"] > 4 * model["proposed"] > 0


@torch.no_grad()
def _second_token(model: Any, ids: torch.Tensor, vocabulary: int) -> torch.Tensor:
    """The distribution of the second new token behind a text [1, n]."""
    cache = DynamicCache(config=model.config)
    first = (model(ids, past_key_values=cache).logits[0, -1] / 0.7).softmax(-1)
    cache.batch_repeat_interleave(vocabulary)
    behind = model(torch.arange(vocabulary)[:, None], past_key_values=cache).logits[:, 0] / 0.7
    return first @ behind.softmax(-1)


@pytest.mark.usefixtures("_without_lookup")
@at_length("is_right", True, False)
def test_sampled_tokens_keep_their_distribution(
    folder: Path, is_right: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Chi-square of 400 draws of the second new token, the first that is proposed, against its
    exact distribution; a rule by which what is proposed stands fails it."""
    if not is_right:

        def too_willing(
            scores: Any, drafted: int | None, by: Any = None, *, is_sampled: bool
        ) -> Any:
            if drafted is not None:
                return drafted, True
            return int(torch.multinomial(scores.softmax(-1), 1)), False

        monkeypatch.setattr(decoding, "next_token", too_willing)
    vocabulary, draws = 30, 100
    sizes = {"vocab_size": vocabulary, "initializer_range": 0.2}
    model, small = espnx.enable_kv_cache(make("llama", **sizes)), make("llama", seed=1, **sizes)
    ids = torch.randint(3, vocabulary, (1, 20), generator=torch.Generator().manual_seed(2))
    wanted = _second_token(model, ids, vocabulary)
    counts, accepted = torch.zeros(vocabulary), list[float]()
    torch.manual_seed(3)
    for _ in range(4):
        with KVCache(model.config, folder, draft=small) as cache:
            got = espnx.generate(
                model,
                ids.expand(draws, -1),
                attention_mask=torch.ones(draws, 20, dtype=torch.int64),
                past_key_values=cache,
                gamma=1,
                max_new_tokens=3,
                do_sample=True,
                temperature=0.7,
                top_k=0,
            )
            accepted.append(cache.stats()["speculation"]["accepted_by_position"][0])
        counts += got[:, 21].bincount(minlength=vocabulary)
    if is_right:
        assert 0.05 < sum(accepted) / len(accepted) < 0.9
    assert (probability(counts, wanted) > 1e-3) is is_right


@pytest.mark.usefixtures("_without_lookup")
def test_nothing_grows_with_the_passes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What proposes has the tokens of its text and no list beside them, and goes with it."""
    made = list[assistants.Assistant]()

    class Watched(assistants.Assistant):
        def __init__(self, *args: Any):
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr("espnx.integrations.transformers.speculation.generate.Assistant", Watched)
    lists = []
    draft = assistants.Assistant.draft

    def drafted(self: Any, text: int, ids: torch.Tensor, n: int, **options: Any) -> Any:
        found = draft(self, text, ids, n, **options)
        own = vars(self._of[text][0])
        lists.append(sum(len(each) for each in own.values() if isinstance(each, list)))
        return found

    monkeypatch.setattr(Watched, "draft", drafted)
    with KVCache(enabled("llama").config, folder, draft=plain("llama")) as cache:
        speculated("llama", prompt([30, 20]), cache, max_new_tokens=40, gamma=2)
    assert len(lists) > 20
    assert len(set(lists)) == 1
    assert not made[0]._of


def test_other_vocabularies_are_refused(folder: Path) -> None:
    config = enabled("llama").config
    for wrong, named in (
        (make("llama", vocab_size=50), "a vocabulary of 50 tokens"),
        (torch.nn.Linear(2, 2), "Linear"),
        (make("llama").base_model, "LlamaModel"),
    ):
        with pytest.raises(errors.InvalidInputError, match=named):
            KVCache(config, folder, draft=wrong)  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match="takes no memory"):
        KVCache(config, folder, draft=make("llama"), draft_memory=0.1)
    assert not list(folder.iterdir())


@pytest.mark.usefixtures("_without_lookup")
def test_a_smaller_model_whose_positions_end(folder: Path) -> None:
    """From there on it proposes nothing; the text goes on."""
    inputs = prompt([50, 30])
    wanted = one_by_one("llama", inputs, max_new_tokens=40)
    small = make("gpt2", n_positions=64)
    with KVCache(enabled("llama").config, folder, draft=small) as cache:
        got = speculated("llama", inputs, cache, max_new_tokens=40, gamma=4)
        said = cache.stats()["speculation"]
    assert torch.equal(got, wanted)
    assert said["sources"]["assistant"]["proposed"] > 40


@pytest.mark.usefixtures("_without_lookup")
def test_a_smaller_model_that_says_nan(folder: Path) -> None:
    """Nothing can be drawn from that: an error that names it, the cache as before, which another
    draft continues."""
    inputs, small = prompt([30]), make("llama")
    small.lm_head.weight.data.fill_(torch.nan)
    with KVCache(enabled("llama").config, folder, draft=small) as cache:
        with pytest.raises(errors.StateError, match="a draft of LlamaForCausalLM") as caught:
            speculated("llama", inputs, cache, max_new_tokens=10, do_sample=True, gamma=2)
        assert len(caught.value.sequences[0]) > 30  # type: ignore[attr-defined]
        wanted = one_by_one("llama", inputs, max_new_tokens=10)
        cache.reuse_prefix(**inputs)
        assert torch.equal(speculated("llama", inputs, cache, max_new_tokens=10), wanted)
