"""What becomes of passages and of prompts that are composed of them: batches, beams, crop, a
library that is full, damaged, shared, killed while it was filled."""

from __future__ import annotations

import functools
import os
import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache, PreTrainedModel

import espnx
from espnx import errors
from espnx.integrations.streamed.load import load_streamed
from espnx.integrations.transformers.passages import model as passage_model
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from espnx.kv.attention import CHUNK_TOKENS
from espnx.kv.passages import context as contexts
from espnx.kv.passages.library import DATA, Library
from espnx.storage import NativeEngine
from espnx.storage.native import FaultRule, FaultyEngine
from tests.forks import killed_at
from tests.integrations.transformers import tiny
from tests.integrations.transformers.passages.families import (
    blocks_in_memory,
    enabled,
    log_probabilities,
    make,
    plain,
    words,
)

BEFORE, PASSAGES, QUESTION = words(9, 1), [words(40, 2), words(33, 3), words(50, 4)], words(12, 5)
FIRST = 9 + 40 + 33 + 50


@functools.cache
def exact() -> torch.Tensor:
    """What the question gives in memory."""
    cache = blocks_in_memory(plain("llama"), BEFORE, PASSAGES)
    return log_probabilities(plain("llama"), QUESTION, cache, FIRST)


def given(kv: PassageKV, cache: Any) -> torch.Tensor:
    return log_probabilities(kv.model, QUESTION, cache, FIRST)


def close(found: torch.Tensor, wanted: torch.Tensor) -> bool:
    return float((found - wanted).abs().max()) <= 1e-4


@pytest.fixture
def kv(folder: Path) -> Any:
    with PassageKV(enabled("llama"), folder, prefix=BEFORE) as opened:
        yield opened


def test_the_front_page_has_it(folder: Path) -> None:
    assert espnx.PassageKV is PassageKV


def test_composing_writes_and_computes_nothing(kv: PassageKV, folder: Path) -> None:
    keys = [kv.add(each) for each in PASSAGES]
    before = {path.name: path.stat().st_size for path in folder.iterdir() if path.name == DATA}
    with kv.compose(keys) as cache:
        assert close(given(kv, cache), exact())
        stats, reused = cache.stats(), cache.reused
    assert stats["bytes_written"] == 0
    assert stats["effective_path"]
    assert {
        path.name: path.stat().st_size for path in folder.iterdir() if path.name == DATA
    } == before
    assert reused["reused"] == reused["tokens"] == FIRST
    assert reused["computed"] == reused["uncached"] == reused["damaged"] == 0


def test_the_path_is_that_of_what_is_read(folder: Path) -> None:
    """Of the library's rows before any of the cache's own are stored, and of both behind that."""
    with PassageKV(enabled("llama"), folder, prefix=BEFORE, engine="posix") as kv:
        keys = [kv.add(each) for each in PASSAGES]
        with kv.compose(keys) as cache:
            before = cache.stats()
            given(kv, cache)
            after = cache.stats()
    assert before["effective_path"] == after["effective_path"]
    assert after["effective_path"].startswith("posix")
    assert after["fallback_reason"] == ""


def test_passages_of_a_batch_are_read_once(kv: PassageKV) -> None:
    """Several questions, padded behind the passages, give what each gives alone."""
    questions = [words(12, 21), words(7, 22), words(1, 23)]
    with kv.compose(PASSAGES) as cache:
        kv.model(questions[0][None], past_key_values=cache)
        once = cache.reused["bytes"]
    ids = torch.stack([torch.nn.functional.pad(each, (12 - len(each), 0)) for each in questions])
    mask = torch.ones(3, FIRST + 12, dtype=torch.int64)
    for row, each in enumerate(questions):
        mask[row, FIRST : FIRST + 12 - len(each)] = 0
    positions = (mask.cumsum(dim=1) - 1)[:, FIRST:]
    with kv.compose(PASSAGES) as cache, torch.no_grad():
        found = kv.model(
            ids, attention_mask=mask, position_ids=positions, past_key_values=cache
        ).logits
        assert cache.reused["bytes"] == once
        assert cache.passage_mass(11).shape == (3, 3, 3)
    for row, each in enumerate(questions):
        alone = blocks_in_memory(plain("llama"), BEFORE, PASSAGES)
        wanted = log_probabilities(plain("llama"), each, alone, FIRST)
        assert close(found[row, 12 - len(each) :].double().log_softmax(-1), wanted)


def test_padding_among_passages_is_refused(kv: PassageKV) -> None:
    mask = torch.ones(1, FIRST + 12, dtype=torch.int64)
    mask[0, 3] = 0
    with kv.compose(PASSAGES) as cache:
        with pytest.raises(errors.InvalidInputError, match="padding among them"):
            kv.model(QUESTION[None], attention_mask=mask, past_key_values=cache)
        assert close(given(kv, cache), exact()), "the cache goes on"


@pytest.mark.parametrize(
    "options", [{"num_beams": 3}, {"do_sample": True, "num_return_sequences": 2}, {}]
)
def test_generation(kv: PassageKV, options: dict[str, Any]) -> None:
    """Beams and samples behind passages: as behind the same rows in memory."""
    more = {"max_new_tokens": 16, "do_sample": False} | options
    model = plain("llama")
    ids = torch.cat([BEFORE, *PASSAGES, QUESTION])[None]
    torch.manual_seed(3)
    memory = blocks_in_memory(model, BEFORE, PASSAGES)
    if "num_return_sequences" in more or "num_beams" in more:
        memory.batch_repeat_interleave(more.get("num_beams", 2))
    wanted = model.generate(ids, past_key_values=memory, **more)
    with kv.compose(PASSAGES) as cache:
        torch.manual_seed(3)
        found = kv.model.generate(**cache.prompt(QUESTION[None]), past_key_values=cache, **more)
        assert cache.passage_mass(11).shape[0] == cache.store.rows.sequences
    assert torch.equal(found, wanted)


def test_crop_reset_and_reuse(kv: PassageKV) -> None:
    with kv.compose(PASSAGES) as cache:
        right = given(kv, cache)
        whole = cache.passage_mass()
        cache.crop(-5)
        assert cache.get_seq_length() == FIRST + 7
        log_probabilities(kv.model, QUESTION[7:], cache, FIRST + 7)
        torch.testing.assert_close(cache.passage_mass(), whole, atol=1e-5, rtol=0)
        with pytest.raises(errors.InvalidInputError, match="behind the passages"):
            cache.crop(-20)
        cache.crop(-12)
        assert close(given(kv, cache), right)
        cache.reset()
        assert cache.get_seq_length() == FIRST
        assert float(cache.passage_mass().abs().sum()) == 0
        assert close(given(kv, cache), right)
        ids = cache.prompt(QUESTION[None])["input_ids"]
        assert cache.reuse_prefix(ids) == FIRST + 11
        assert cache.reuse_prefix(torch.cat([ids[:, : FIRST + 3], words(4, 9)[None]], 1)) > FIRST
        with pytest.raises(errors.InvalidInputError, match="do not begin with them"):
            cache.reuse_prefix(words(FIRST + 9, 8)[None])


def test_mass_is_the_share_of_attention(kv: PassageKV) -> None:
    """The framework's own weights, summed over each passage's columns."""
    memory = blocks_in_memory(plain("llama"), BEFORE, PASSAGES)
    positions = torch.arange(FIRST, FIRST + 12)[None]
    with torch.no_grad():
        weights = plain("llama")(
            QUESTION[None], position_ids=positions, past_key_values=memory, output_attentions=True
        ).attentions
    ends = torch.tensor([9, 9 + 40, 9 + 73, FIRST])
    watched = [(2, 1), (0, 3)]
    with kv.compose(PASSAGES) as cache, kv.compose(PASSAGES) as other:
        cache.watch_heads()
        other.watch_heads(watched)
        for each in (cache, other):
            kv.model(QUESTION[None], past_key_values=each)
        for begin, end in ((0, None), (11, None), (3, 8)):
            found = cache.passage_mass(begin, end)
            heads = cache.head_mass(begin, end)[0].unflatten(0, (3, -1))
            for layer, each in enumerate(weights):
                for number in range(3):
                    columns = each[0, :, begin:end, ends[number] : ends[number + 1]].sum(-1)
                    assert abs(float(found[0, layer, number] - columns.mean())) < 1e-5
                    torch.testing.assert_close(
                        heads[layer, :, :, number], columns, rtol=0, atol=1e-5
                    )
            chosen = torch.stack([heads[layer, head] for layer, head in watched])[None]
            assert torch.equal(other.head_mass(begin, end), chosen)
        with pytest.raises(errors.InvalidInputError, match="of 4 heads of 3 layers"):
            cache.watch_heads([(0, 4)])
        assert cache.passage_mass(12, 12).tolist() == torch.zeros(1, 3, 3).tolist()


def test_nothing_empty_and_twice(kv: PassageKV) -> None:
    """No passages: the prefix alone; empty ones take no place; one may stand in a prompt twice."""
    empty = torch.empty(0, dtype=torch.int64)
    for passages in ([], [empty], [PASSAGES[0], empty, PASSAGES[1], PASSAGES[0]]):
        memory = blocks_in_memory(plain("llama"), BEFORE, [each for each in passages if len(each)])
        first = 9 + sum(map(len, passages))
        with kv.compose(passages) as cache:
            found = log_probabilities(kv.model, QUESTION, cache, first)
            assert cache.passages == [len(each) for each in passages]
            assert cache.passage_mass().shape == (1, 3, len(passages))
        assert close(found, log_probabilities(plain("llama"), QUESTION, memory, first))


def test_no_prefix_and_no_passages(folder: Path) -> None:
    with PassageKV(enabled("llama"), folder) as kv, kv.compose([]) as cache:
        found = log_probabilities(kv.model, QUESTION, cache, 0)
    alone = DynamicCache(config=plain("llama").config)
    assert close(found, log_probabilities(plain("llama"), QUESTION, alone, 0))


def test_long_passages_come_in_chunks(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(passage_model, "CHUNK_TOKENS", 40)
    with PassageKV(enabled("llama"), folder, prefix=BEFORE) as kv, kv.compose(PASSAGES) as cache:
        assert cache.reused["computed"] == FIRST
        assert close(given(kv, cache), exact())


@pytest.mark.parametrize("part_bytes", [1, 40_000])
def test_passages_attend_some_at_a_time(
    kv: PassageKV, monkeypatch: pytest.MonkeyPatch, part_bytes: int
) -> None:
    monkeypatch.setattr(contexts, "_PART_BYTES", part_bytes)
    with kv.compose(PASSAGES) as cache:
        assert close(given(kv, cache), exact())


def test_reads_run_ahead(kv: PassageKV) -> None:
    """Steps of decoding find the reads of their layers in line, in the order they ask for them."""
    with kv.compose(PASSAGES) as cache:
        given(kv, cache)
        context, forgotten = cache._context, list[None]()
        original = context.forget
        context.forget = lambda: (forgotten.append(None), original())  # type: ignore[assignment]
        for _ in range(4):
            kv.model(QUESTION[None, :1], past_key_values=cache)
        assert not forgotten
        (device,) = context._devices
        stats = device.stats()
        assert stats.bytes_moved <= 1.5 * stats.bytes_asked
        context.forget = original  # type: ignore[method-assign]


def test_a_question_reads_once(kv: PassageKV) -> None:
    """What a question has asked for is read, and nothing more; the tokens of its answer find their
    reads in line from the second one on."""
    question = words(CHUNK_TOKENS, 6)
    for each in PASSAGES:
        kv.add(each)
    with kv.compose(PASSAGES) as cache:
        (device,) = cache._context._devices
        before = device.stats()
        kv.model(question[None], past_key_values=cache)
        assert not cache._context._line
        assert device.front() == -1
        once = device.stats().bytes_asked - before.bytes_asked
        assert device.stats().bytes_moved - before.bytes_moved == once > 0
        for number in (2, 3):
            kv.model(question[None, :1], past_key_values=cache)
            assert len(cache._context._line) == 3
            assert device.stats().bytes_asked - before.bytes_asked == number * once


@pytest.mark.parametrize("told", ["prompt", "question_tokens", None])
def test_reads_that_began_are_used(
    kv: PassageKV, monkeypatch: pytest.MonkeyPatch, told: str | None
) -> None:
    """Two questions take twice the queries of one: known before, the reads of the first pass are
    begun in portions that fit, and none of them is forgotten. A wrong word costs no more than what
    was in line."""
    heads, width, n = 4, 64, len(QUESTION)
    monkeypatch.setattr(contexts, "_PART_BYTES", 4 * heads * width * 3 * n)
    for each in PASSAGES:
        kv.add(each)
    both = QUESTION.repeat(2, 1)
    wrong = {} if told else {"question_tokens": 1}
    given = {"question_tokens": 2 * n} if told == "question_tokens" else wrong
    with kv.compose(PASSAGES, **given) as cache:
        context, forgotten = cache._context, list[int]()
        assert bool(context._line) == (told != "prompt")
        original = context.forget
        context.forget = lambda: (forgotten.append(1), original())  # type: ignore[assignment]
        if told == "prompt":
            cache.prompt(both)
        assert set(context._line) == {0, 1, 2}
        kv.model(both, past_key_values=cache)
        (device,) = context._devices
        asked, moved = device.stats().bytes_asked, device.stats().bytes_moved
        assert bool(forgotten) == (told is None)
        assert moved <= (3.5 if told is None else 2.5) * asked
        context.forget = original  # type: ignore[method-assign]


@pytest.mark.parametrize("options", [{}, {"repair": 8}, {"blend": 0.5}])
def test_composing_asks_whether_to_go_on(
    kv: PassageKV, monkeypatch: pytest.MonkeyPatch, options: dict[str, Any]
) -> None:
    """Before each part that is computed; what is whole by then stays. Nothing is left open."""
    monkeypatch.setattr(passage_model, "CHUNK_TOKENS", 16)
    calls, before = 0, len(os.listdir("/proc/self/fd"))

    def check(most: int) -> None:
        nonlocal calls
        calls += 1
        if calls > most:
            raise errors.DeadlineExceededError("enough")

    counts = list[int]()
    for most in (2, 5, 99):
        calls = 0
        try:
            with kv.compose(PASSAGES, check=partial(check, most), **options) as cache:
                counts.append(calls)
                assert cache.reused["computed"] < FIRST
        except errors.DeadlineExceededError:
            assert most < 99
            assert calls == most + 1
        assert kv.stats()["extents"] == {2: 1, 5: 2, 99: 4}[most]
    assert counts[0] >= 6
    with kv.compose(PASSAGES, check=lambda: check(-1)) as cache:
        assert cache.reused["computed"] == 0, "where nothing is computed nobody is asked"
    kv.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_passages_of_100000_tokens(kv: PassageKV, folder: Path) -> None:
    """More than the model has positions for are refused before anything is computed."""
    book = words(100_000, 9)
    for refused in (lambda: kv.add(book), lambda: kv.compose([PASSAGES[0], book])):
        with pytest.raises(errors.InvalidInputError, match="fewer than the model's 1024 positions"):
            refused()
    assert kv.stats()["extents"] == 0


@pytest.mark.parametrize("limit", [1, 400_000])
def test_a_full_library_goes_on_uncached(folder: Path, limit: int) -> None:
    """Rows for which there is no room are computed for each prompt."""
    with PassageKV(enabled("llama"), folder, prefix=BEFORE, library_bytes=limit) as kv:
        for _ in range(2):
            with kv.compose(PASSAGES) as cache:
                assert cache.reused["uncached"] > 0
                assert close(given(kv, cache), exact())
        assert kv.add(words(200, 7))
        assert kv.stats()["file_bytes"] <= limit


def test_a_damaged_passage_is_computed_anew(folder: Path) -> None:
    """In the midst of a forward pass; and the prefix, which all others were computed behind."""
    before, first = words(32, 1), FIRST + 23 + 33  # in blocks: what is packed is read at once
    with PassageKV(enabled("llama"), folder, prefix=before) as kv:
        for number in (0, 2, 3):
            with kv.compose([*PASSAGES, PASSAGES[1]]) as cache:
                wanted = log_probabilities(kv.model, QUESTION, cache, first)
            with kv.compose([*PASSAGES, PASSAGES[1]]) as cache:
                cache._context.forget()
                extent = cache._context.passages[number].extent
                assert extent is not None
                with open(folder / DATA, "r+b") as file:
                    file.seek(extent.offset_bytes + extent.size_bytes - 4096)  # of the last layer
                    file.write(b"damage")
                found = log_probabilities(kv.model, QUESTION, cache, first)
                assert cache.reused["damaged"] == 1
                assert cache.reused["computed"] == extent.identity.tokens
            assert close(found, wanted)
            assert kv.verify()["damaged"] == 0


def test_a_removed_passage_stays_for_who_has_it(kv: PassageKV) -> None:
    for number, each in enumerate(PASSAGES):
        kv.add(each, key=str(number))
    with kv.compose(["0", "1", "2"]) as cache:
        kv.remove("1")
        kv.add(words(20, 9), key="0")  # another text of that name
        assert close(given(kv, cache), exact())
    with pytest.raises(errors.InvalidInputError, match="the name '1'"):
        kv.compose(["1"])
    with pytest.raises(errors.InvalidInputError, match="the name '1'"):
        kv.remove("1")
    with kv.compose(["0"]) as cache:
        assert cache.passages == [20]


def test_prefixes_and_models_do_not_meet(folder: Path) -> None:
    """Another prefix, other weights, another tokenizer: nothing is found, and all of it stays."""
    model = make("llama")

    def computed(**options: Any) -> int:
        with PassageKV(model, folder, **options) as kv, kv.compose(PASSAGES) as cache:
            return int(cache.reused["computed"])

    assert computed(prefix=BEFORE) == FIRST
    assert computed(prefix=BEFORE) == 0
    assert computed(prefix=BEFORE[:8]) == FIRST - 1
    with PassageKV(model, folder, prefix=BEFORE) as kv:
        before = exact()
        with kv.compose(PASSAGES) as cache:
            assert close(given(kv, cache), before)
        with torch.no_grad():
            weight = model.model.layers[1].self_attn.k_proj.weight
            held = weight.clone()
            weight.mul_(1.5)
        with kv.compose(PASSAGES) as cache:
            assert cache.reused["computed"] == FIRST, "while the library was open"
        with torch.no_grad():
            weight.copy_(held)
        with kv.compose(PASSAGES) as cache:
            assert cache.reused["computed"] == 0


def test_what_is_refused(kv: PassageKV) -> None:
    for options, match in (
        ({"repair": -1}, "repair"),
        ({"repair": 2.0}, "repair"),
        ({"blend": 1.5}, "blend"),
        ({"repair": 4, "blend": 0.5}, "one of them"),
        ({"repair": 4, "mode": "prefix"}, "loses nothing"),
        ({"draft": "lookup"}, "drafts behind composed passages"),
        ({"draft_memory": 0.5}, "drafts behind composed passages"),
        ({"mode": "full"}, "prefix, blocks"),
        ({"question_tokens": 0}, "question_tokens"),
    ):
        with pytest.raises(errors.InvalidInputError, match=match):
            kv.compose(PASSAGES, **options)
    for ids in ([[1, 2], [3, 4]], [0.5], [-1]):
        with pytest.raises(errors.InvalidInputError, match="token_ids"):
            kv.add(ids)
    for passages, match in (
        ([[PASSAGES[0]], PASSAGES[1]], "lists of passages"),
        ([["a"], "a"], "lists of passages"),
    ):
        with pytest.raises(errors.InvalidInputError, match=match):
            kv.compose(passages)
    with pytest.raises(errors.InvalidInputError, match="of a batch"):
        kv.compose([PASSAGES, PASSAGES], repair=3)
    with pytest.raises(errors.InvalidInputError, match="1024 positions"):
        kv.compose([words(600, 1), words(600, 2)])
    with pytest.raises(errors.InvalidInputError, match="drafts"):
        kv.compose(PASSAGES).store.propose()
    with pytest.raises(errors.InvalidInputError, match="drafts"):
        kv.compose(PASSAGES).store.set_aside()
    kv.close()
    with pytest.raises(errors.EngineClosedError):
        kv.compose(PASSAGES)


def _dynamic() -> PreTrainedModel:
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    return make("llama", rope_parameters=rope)


def _longrope() -> PreTrainedModel:
    factors = [1.0] * 32
    rope = {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "short_factor": factors,
        "long_factor": factors,
        "original_max_position_embeddings": 64,
    }
    return make("llama", rope_parameters=rope)


def _mrope() -> PreTrainedModel:
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [8, 12, 12]}
    return make("llama", rope_parameters=rope)


@pytest.mark.parametrize(
    ("model", "match"),
    [
        (_dynamic, "dynamic NTK"),
        (_longrope, "longrope"),
        (_mrope, "M-RoPE"),
        (lambda: tiny.make("mistral"), "a window"),
        (lambda: tiny.make("gemma3"), "a window|several kinds"),
        (lambda: tiny.make("gpt2"), "learned positions"),
        (lambda: tiny.make("opt"), "learned positions"),
    ],
)
def test_models_that_cannot_are_refused_by_name(folder: Path, model: Any, match: str) -> None:
    with pytest.raises(errors.InvalidInputError, match=match):
        PassageKV(model(), folder)


def test_a_rotation_that_is_not_one_is_seen(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a config says: keys at two places tell."""
    model = make("llama")
    rotary = model.model.rotary_emb
    original = rotary.forward
    monkeypatch.setattr(
        rotary, "forward", lambda x, position_ids: original(x, position_ids * position_ids)
    )
    with pytest.raises(errors.InvalidInputError, match="differ by"):
        PassageKV(model, folder)


def test_descriptors(kv: PassageKV) -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        with kv.compose(PASSAGES) as cache:
            given(kv, cache)
            assert len(os.listdir("/proc/self/fd")) - before <= 28
    kv.close()
    assert len(os.listdir("/proc/self/fd")) <= before


def test_two_prompts_at_once(kv: PassageKV) -> None:
    """Passes of two caches, in turn."""
    with kv.compose(PASSAGES) as one, kv.compose(PASSAGES[:2]) as two:
        half = QUESTION[:6], QUESTION[6:]
        first = [
            log_probabilities(kv.model, half[0], each, n) for each, n in ((one, FIRST), (two, 82))
        ]
        second = log_probabilities(kv.model, half[1], one, FIRST + 6)
        assert close(torch.cat([first[0], second]), exact())
        memory = blocks_in_memory(plain("llama"), BEFORE, PASSAGES[:2])
        assert close(first[1], log_probabilities(plain("llama"), half[0], memory, 82))


def _started(job: Any) -> int:
    """Runs a job in a child, which is returned."""
    child = os.fork()
    if not child:
        code = 1
        try:
            torch.set_num_threads(1)
            job()
            code = 0
        finally:
            os._exit(code)
    return child


def _ended(child: int) -> int:
    """A child's exit code, or minus the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def _forked(job: Any) -> int:
    return _ended(_started(job))


def test_two_processes_fill_one_library(folder: Path) -> None:
    """From both ends at the same time, while a third has it open; each passage is there once. A
    cache of the parent's is no child's."""
    model = enabled("llama")

    def fill(order: list[torch.Tensor]) -> None:
        with PassageKV(model, folder, prefix=BEFORE) as own:
            for each in order:
                own.add(each)

    with PassageKV(model, folder, prefix=BEFORE) as kv:
        kv.add(PASSAGES[0])
        children = [_started(partial(fill, each)) for each in (PASSAGES[::-1], PASSAGES)]
        assert [_ended(child) for child in children] == [0, 0]
        assert kv.stats()["extents"] == 4
        assert kv.verify()["damaged"] == 0
        with kv.compose(PASSAGES) as cache:
            assert cache.reused["computed"] == 0
            assert close(given(kv, cache), exact())

        def refuse() -> None:
            with pytest.raises(errors.InvalidInputError, match="parent process"):
                kv.compose(PASSAGES)

        assert _forked(refuse) == 0


@pytest.mark.sampled(1)
@pytest.mark.parametrize("name", ["write", "sync", "allocate"])
@pytest.mark.parametrize("nth", [1, 3])
def test_killed_while_it_is_filled(folder: Path, name: str, nth: int) -> None:
    """Whoever comes next finds what was whole, and computes the rest."""
    model = enabled("llama")

    def fill() -> None:
        killed_at(NativeEngine, name, nth, after=False)
        with PassageKV(model, folder, prefix=BEFORE) as own:
            for each in PASSAGES:
                own.add(each)

    assert _forked(fill) == -signal.SIGKILL
    with PassageKV(model, folder, prefix=BEFORE) as kv:
        with kv.compose(PASSAGES) as cache:
            assert close(given(kv, cache), exact())
        assert kv.verify()["damaged"] == 0
        assert kv.stats()["extents"] == 4
        assert kv.stats()["file_bytes"] == kv.stats()["stored_bytes"], "no hole is left"


def test_an_error_in_the_midst_leaves_the_cache_usable(
    kv: PassageKV, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a passage is attended to, and while one is computed."""
    with kv.compose(PASSAGES) as cache:
        context, original = cache._context, cache._context._over
        monkeypatch.setattr(context, "_over", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            kv.model(QUESTION[None], past_key_values=cache)
        monkeypatch.setattr(context, "_over", original)
        assert close(given(kv, cache), exact())
    with monkeypatch.context() as patch:
        patch.setattr(Library, "write", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt()))
        with pytest.raises(KeyboardInterrupt):
            kv.compose([words(20, 31)])
    with kv.compose([words(20, 31)]) as cache:
        assert cache.reused["computed"] == 20


@pytest.mark.parametrize(
    ("fault", "error"), [("error", None), ("flip", None), ("never", errors.DeadlineExceededError)]
)
def test_reads_that_fail(folder: Path, fault: str, error: type[Exception] | None) -> None:
    """What the device cannot read is computed anew; what it does not answer is an error, and the
    cache goes on behind it."""
    rules = list[FaultRule]()
    with PassageKV(
        enabled("llama"),
        folder,
        prefix=BEFORE,
        engine=lambda: FaultyEngine(rules, pool_bytes=1 << 20),
        deadline_s=0.5,
    ) as kv:
        for each in PASSAGES:
            kv.add(each)
        shape = kv._model.rows.shape
    # behind the prefix, which is packed, and the front of the first passage
    begin = shape.extent_bytes(9) + shape.front_bytes(40)
    end = shape.extent_bytes(9) + shape.extent_bytes(40)
    rules.append(
        FaultRule(fault, "read", f"*{DATA}", begin_bytes=begin, end_bytes=end, nth=2, count=1)
    )
    with (
        PassageKV(
            enabled("llama"),
            folder,
            prefix=BEFORE,
            engine=lambda: FaultyEngine(rules, pool_bytes=1 << 20),
            deadline_s=0.5,
        ) as kv,
        kv.compose(PASSAGES) as cache,
    ):
        if error is not None:
            with pytest.raises(error):
                kv.model(QUESTION[None], past_key_values=cache)
        assert close(given(kv, cache), exact())
        assert cache.reused["damaged"] == (0 if error else 1)


def test_modes_of_torch(folder: Path) -> None:
    """Rows that come in inference mode, or under autocast, are rows like others."""
    with PassageKV(enabled("llama"), folder, prefix=BEFORE) as kv:
        with torch.inference_mode(), kv.compose(PASSAGES) as cache:
            assert cache.reused["computed"] == FIRST
            assert close(given(kv, cache), exact())
        with kv.compose(PASSAGES) as cache:
            assert close(given(kv, cache), exact())


def test_a_model_in_training_mode_is_refused(folder: Path) -> None:
    model = make("llama").train()
    with pytest.raises(errors.InvalidInputError, match="training mode"):
        PassageKV(model, folder)


def test_a_tokenizer_counts(folder: Path) -> None:
    class Words:
        def __init__(self, *known: str):
            self.known = known

        def get_vocab(self) -> dict[str, int]:
            return {word: number for number, word in enumerate(self.known)}

    for tokenizer, computed in ((Words("a", "b"), 40), (Words("a", "b"), 0), (Words("b", "a"), 40)):
        with (
            PassageKV(enabled("llama"), folder, tokenizer=tokenizer) as kv,
            kv.compose(PASSAGES[:1]) as cache,
        ):
            assert cache.reused["computed"] == computed
    with pytest.raises(errors.InvalidInputError, match="tokenizer"):
        PassageKV(enabled("llama"), folder, tokenizer=3)


def test_a_model_whose_layers_are_streamed(folder: Path) -> None:
    """A pass inside a pass would take its weights away: damage is an error there, once."""
    make("llama").save_pretrained(folder / "model")
    model = load_streamed(folder / "model", "700KiB")
    with PassageKV(model, folder / "kv", prefix=BEFORE) as kv:
        with kv.compose(PASSAGES) as cache:
            assert close(given(kv, cache), exact())
        with kv.compose(PASSAGES) as cache:
            cache._context.forget()
            extent = cache._context.passages[1].extent
            assert extent is not None
            with open(folder / "kv" / DATA, "r+b") as file:
                file.seek(extent.offset_bytes + extent.size_bytes - 4096)
                file.write(b"damage")
            with pytest.raises(errors.ChecksumError):
                kv.model(QUESTION[None], past_key_values=cache)
        with kv.compose(PASSAGES) as cache:
            assert cache.reused["computed"] == 40
            assert close(given(kv, cache), exact())


def test_an_emulated_accelerator_attends(folder: Path) -> None:
    """Queries and results cross to it in fp16 or fp32, as its spec says; rows stay where they
    are."""
    with (
        PassageKV(enabled("llama"), folder, prefix=BEFORE, device="smartssd") as kv,
        kv.compose(PASSAGES) as cache,
    ):
        assert float((given(kv, cache) - exact()).abs().max()) < 0.02
        assert cache.reused["bytes"] > 0
