"""Kept caches: another process continues one exactly, and a new prompt reuses what it begins
with."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from espnx import errors
from espnx.device.rows import data_file
from espnx.integrations.transformers.cache import KVCache
from espnx.kv.kept import folders
from espnx.kv.kept.library import verify
from espnx.storage import FaultRule, FaultyEngine
from tests.forks import Forks
from tests.integrations.transformers.forks import LENGTHS, NEW, go_on, inputs, lengths_of, wanted
from tests.integrations.transformers.tiny import enabled, expected, generate, make, plain, prompt
from tests.retrieval.common import memory_folder
from tests.storage.common import patiently
from tests.sweeps import some

LONGEST = max(LENGTHS)


@pytest.mark.parametrize(
    ("name", "devices", "options"),
    some(
        [
            ("llama", 1, {}),
            ("llama", 2, {"x_rows": 1, "spill_interval": 1}),
            ("llama", 1, {"format": "int8"}),
            ("opt", 1, {"x_rows": 2}),
            ("opt", 3, {"spill_interval": 5}),
            ("qwen3", 2, {"x_rows": 2, "generate": {"prefill_chunk_size": 7}}),
            ("gpt2", 1, {"x_rows": 1, "generate": {"prefill_chunk_size": 18}}),
        ],
        2,
    ),
)
def test_another_process_continues(
    folder: Path, processes: Forks, name: str, devices: int, options: dict[str, Any]
) -> None:
    """Three: one that answers nothing but the prompt, one that goes on, and this one."""
    longest = max(lengths_of(options.get("format")))
    storage, lossy = [folder / str(i) for i in range(devices)], options.get("format")
    for until in (1, 9):
        assert processes.run(model=name, storage=storage, until=until, **options) == 0
    with KVCache(enabled(name).config, storage, name="c", format=lossy) as cache:
        assert cache.get_seq_length() == longest + 9 - 1
        assert cache.store.rows.x_rows == options.get("x_rows", 0)
        assert [path.endswith("/c/rows.bin") for path in cache.store.places.data_files] == [
            True
        ] * devices
        go_on(name, cache, lossy=lossy)
        assert cache.stats()["bytes_asked"] > 0
        held = cache.get_seq_length()
    with KVCache(enabled(name).config, storage, name="c", format=lossy) as cache:
        assert cache.get_seq_length() == held == longest + NEW - 1
        assert torch.equal(cache.tokens, wanted(name, lossy)[:, :-1])  # type: ignore[arg-type]


@pytest.mark.parametrize(("made", "asked"), [("int8", None), (None, "int8"), ("fp16", None)])
def test_another_format_is_refused(folder: Path, made: str | None, asked: str | None) -> None:
    """Lossy rows are not continued by who asked for exact ones, nor the other way round; what was
    kept stays."""
    with KVCache(enabled("llama").config, folder, name="c", format=made, x_rows=0) as cache:
        go_on("llama", cache, until=1)
        length = cache.get_seq_length()
    with pytest.raises(errors.InvalidInputError, match="format of a kept cache"):
        KVCache(enabled("llama").config, folder, name="c", format=asked)
    with KVCache(enabled("llama").config, folder, name="c", format=made) as cache:
        assert cache.get_seq_length() == length


def test_layers_in_memory_are_refused(folder: Path) -> None:
    """Before anything is computed; the name is free again."""
    for _ in range(2):
        with pytest.raises(errors.InvalidInputError, match=r"kept.*full attention"):
            KVCache(enabled("gemma3").config, folder, name="c")
    KVCache(enabled("llama").config, folder, name="c").close()


@pytest.fixture(
    scope="module",
    params=[("llama", 0), ("llama", 1), ("opt", 2)],
    ids=["llama-0", "llama-1", "opt-2"],
)
def kept(request: pytest.FixtureRequest) -> Iterator[tuple[str, Path]]:
    """A model, and its cache "c" of 29 tokens: 21 asked, 9 answered but for the last. Left padding.
    To be copied."""
    name, x_rows = request.param
    with memory_folder() as where:
        with KVCache(enabled(name).config, where, name="c", x_rows=x_rows) as cache:
            go_on(name, cache, until=9)
        yield name, where


def match(cache: KVCache, said: dict[str, torch.Tensor]) -> int:
    return cache.reuse_prefix(said["input_ids"], said["attention_mask"])


def copied(kept: tuple[str, Path], folder: Path) -> None:
    shutil.copytree(kept[1], folder, dirs_exist_ok=True)


def answer(name: str, said: dict[str, torch.Tensor], n: int = 9) -> torch.Tensor:
    return generate(plain(name), said, DynamicCache(config=plain(name).config), max_new_tokens=n)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("common", [1, 7, 8, 9, 20, 26, 28])
def test_the_longest_common_prefix_is_reused(
    folder: Path, kept: tuple[str, Path], common: int
) -> None:
    """With another token after `common`, and a longer prompt."""
    name, _ = kept
    copied(kept, folder)
    ids = torch.cat([wanted(name)[:, : LONGEST + 8], prompt([11, 11], 5)["input_ids"]], dim=1)
    ids[1, common] = 3 + (ids[1, common] - 3 + 1) % 90
    said = inputs(ids)
    with KVCache(enabled(name).config, folder, name="c") as cache:
        assert match(cache, said) == common == cache.get_seq_length()
        got = generate(enabled(name), said, cache, max_new_tokens=9)
        assert cache.stats()["prefill_tokens"] == 2 * (ids.shape[1] - common)
        assert torch.equal(got, answer(name, said))
    with KVCache(enabled(name).config, folder, name="c") as cache:
        assert torch.equal(cache.tokens, got[:, :-1])  # type: ignore[arg-type]


@pytest.mark.parametrize("kept", [("llama", 0)], indirect=True, ids=["llama-0"])
@pytest.mark.parametrize("asked", [2, 8, 16, 21, 28, 29, 30])
def test_prompts_that_begin_like_the_cache(
    folder: Path, kept: tuple[str, Path], asked: int
) -> None:
    """Shorter, as long, longer by one: at least the last token is read again."""
    copied(kept, folder)
    said = inputs(wanted("llama"))
    said = {key: value[:, :asked] for key, value in said.items()}
    with KVCache(enabled("llama").config, folder, name="c") as cache:
        assert match(cache, said) == min(asked - 1, 29)
        assert torch.equal(
            generate(enabled("llama"), said, cache, max_new_tokens=9), answer("llama", said)
        )


def test_prompts_with_nothing_in_common(folder: Path) -> None:
    """The same batch size; another padding at the front makes other positions, so nothing is reused
    either."""
    with KVCache(enabled("llama").config, folder, name="c", x_rows=0) as cache:
        go_on("llama", cache, until=9)
        other = prompt([30, 30], 8)
        assert match(cache, other) == 0
        assert torch.equal(
            generate(enabled("llama"), other, cache, max_new_tokens=9), answer("llama", other)
        )
        padded = {
            "input_ids": other["input_ids"].clone(),
            "attention_mask": other["attention_mask"].clone(),
        }
        padded["attention_mask"][0, :3] = 0
        assert match(cache, padded) == 0
        assert torch.equal(
            generate(enabled("llama"), padded, cache, max_new_tokens=9), answer("llama", padded)
        )
    with KVCache(enabled("llama").config, folder, name="c") as cache:
        assert match(cache, padded) == 29
        assert match(cache, {key: value[:, :1] for key, value in padded.items()}) == 0
    with KVCache(enabled("llama").config, folder, name="c") as cache:
        assert (cache.get_seq_length(), match(cache, other)) == (0, 0), "the empty state was saved"
        assert torch.equal(
            generate(enabled("llama"), other, cache, max_new_tokens=9), answer("llama", other)
        )


def test_saving_in_between(folder: Path) -> None:
    """Beams, a crop, a reset: each state is the one that is found; space that a saved state needs
    is not used before the next save."""
    model, lengths = enabled("llama"), [21, 20]
    with KVCache(model.config, folder, name="c", x_rows=0, spill_interval=1) as cache:
        with pytest.raises(errors.StoreBusyError, match="open"):
            KVCache(model.config, folder, name="c")
        got = generate(model, prompt(lengths), cache, num_beams=3, max_new_tokens=20)
        assert torch.equal(got, expected("llama", lengths, num_beams=3, max_new_tokens=20))
        kept = cache.tokens[:, : cache.get_seq_length()].clone()  # type: ignore[index]
    with KVCache(model.config, folder, name="c") as cache:
        assert cache.store.rows.sequences == 6
        assert torch.equal(cache.tokens, kept)  # type: ignore[arg-type]
        cache.crop(-15)
        cache.save()
        held = cache.get_seq_length()
        said = {
            "input_ids": kept[:, : held + 1],
            "attention_mask": inputs(kept[:2])["attention_mask"][:, : held + 1],
        }
        said["attention_mask"] = said["attention_mask"].repeat_interleave(3, dim=0)
        after = generate(model, said, cache, max_new_tokens=9)
        assert torch.equal(after, answer("llama", said))
        cache.reset()
        generate(model, prompt([40, 40, 40], 3), cache, max_new_tokens=2)
        cache.save()
    with KVCache(model.config, folder, name="c") as cache:
        assert (cache.get_seq_length(), cache.store.rows.sequences) == (41, 3)


def test_a_state_that_is_not_saved_again_stays(folder: Path) -> None:
    """Whatever the cache does after it: nothing that was published is written over."""
    model = enabled("llama")
    with KVCache(model.config, folder, name="c", x_rows=0) as cache:
        go_on("llama", cache, until=9)
        copies = {
            path.name: path.read_bytes()
            for path in (folder / "c").iterdir()
            if path.name.startswith(("state", "MANIFEST"))
        }
        size = (folder / "c" / "rows.bin").stat().st_size
        rows = (folder / "c" / "rows.bin").read_bytes()
        for seed in range(3):
            cache.reset()
            generate(model, prompt([50, 50, 50], seed), cache, max_new_tokens=9)
        assert (folder / "c" / "rows.bin").read_bytes()[:size] == rows
        assert cache.stats()["bytes_written"] > 3 * len(rows)
    (folder / "d").mkdir()
    for name, data in copies.items():
        (folder / "d" / name).write_bytes(data)
    (folder / "d" / "rows.bin").write_bytes(rows)
    with KVCache(model.config, folder, name="d") as cache:
        go_on("llama", cache)


def test_a_pass_that_fails_in_the_model(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two layers: some have its tokens and others not. What is kept is the state before
    it."""
    from espnx.integrations.transformers.enable import enable_kv_cache

    model = enable_kv_cache(make("llama"))
    for first in (True, False):
        name = f"c{first}"
        with KVCache(model.config, folder, name=name, x_rows=0) as cache:
            if not first:
                go_on("llama", cache, until=9)

            def fail(*args: Any) -> None:
                raise RuntimeError("no memory")

            right = wanted("llama")
            with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="no memory"):
                patch.setattr(torch.nn.functional, "silu", fail)
                generate(model, inputs(right[:, : LONGEST if first else LONGEST + 9]), cache)
        with KVCache(model.config, folder, name=name) as cache:
            assert [cache.store.rows.length(layer) for layer in range(2)] == [
                0 if first else LONGEST + 8
            ] * 2
            go_on("llama", cache)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("chosen", [[1, 2], [2, 2, 1], [0, 2]])
@pytest.mark.parametrize("name", ["llama", "qwen3", "opt"])
def test_a_selection_of_sequences(folder: Path, name: str, chosen: list[int]) -> None:
    """Also one that leaves no sequence kept as X: it opens again, as `verify` says, and goes on as
    the framework's own cache does."""
    model, ids = enabled(name), prompt([40, 40, 40])["input_ids"]
    theirs = DynamicCache(config=model.config)
    index = torch.tensor(chosen)
    with torch.no_grad(), KVCache(model.config, folder, name="c", x_rows=1) as cache:
        for each, own in ((model, cache), (plain(name), theirs)):
            each(ids, past_key_values=own)
            own.batch_select_indices(index)
            each(ids[index, :5], past_key_values=own)
    assert verify(folder, "c") > 0
    with torch.no_grad(), KVCache(model.config, folder, name="c") as cache:
        assert (cache.get_seq_length(), cache.store.rows.sequences, cache.store.rows.x_rows) == (
            45,
            len(chosen),
            chosen.count(0),
        )
        right = plain(name)(ids[index, 5:9], past_key_values=theirs).logits
        assert torch.allclose(
            model(ids[index, 5:9], past_key_values=cache).logits, right, atol=1e-3
        )
    assert verify(folder, "c") > 0


def test_without_ids(folder: Path) -> None:
    """A cache that was fed vectors has no tokens to match."""
    model = enabled("llama")
    vectors = model.get_input_embeddings()(prompt([20])["input_ids"]).detach()
    with KVCache(model.config, folder, name="c") as cache, torch.no_grad():
        model(inputs_embeds=vectors, past_key_values=cache)
    with KVCache(model.config, folder, name="c") as cache:
        assert (cache.get_seq_length(), cache.tokens) == (20, None)
        assert cache.reuse_prefix(prompt([20])["input_ids"]) == 0


def test_nothing_was_done(folder: Path) -> None:
    """No state, no entry; saving without a name says what to do."""
    for _ in range(2):
        with KVCache(plain("llama").config, folder, name="c") as cache:
            assert cache.get_seq_length() == 0
            cache.save()
    assert not (folder / "c" / "MANIFEST.json").exists()
    with (
        KVCache(plain("llama").config, folder) as cache,
        pytest.raises(errors.StateError, match="name"),
    ):
        cache.save()
    for bad in ("", "a/b", "..", ".x", "a b", "x" * 129, "c\n"):
        with pytest.raises(errors.InvalidInputError, match="name of a cache"):
            KVCache(plain("llama").config, folder, name=bad)
    assert {path.name for path in folder.iterdir()} == {"c"}
    KVCache(plain("llama").config, folder, name="x" * 128).close()


def test_a_name_stays_locked_where_a_write_may_land(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which was given up: it would come to lie in the rows of who opens the cache next. As long as
    the process lives."""
    monkeypatch.setattr(folders, "_HELD", set())
    monkeypatch.setattr(data_file, "CLOSE_S", 0.05)
    model = enabled("llama")

    def attempt(deadline_s: float) -> bool:
        where = folder / f"{deadline_s:g}"
        rule = FaultRule("never", operation="write", path="*rows.bin", count=1)
        with FaultyEngine([rule]) as engine:
            monkeypatch.setattr(engine, "close", partial(engine.close, 0.05))
            options: Any = {"engine": lambda: engine, "deadline_s": deadline_s, "x_rows": 0}
            cache = KVCache(model.config, where, name="c", **options)
            with pytest.raises(errors.DeadlineExceededError):
                generate(model, prompt([40, 40]), cache, max_new_tokens=3)
            cache.reset()
            cache.close()
            with pytest.raises(errors.StoreBusyError, match="open"):
                KVCache(model.config, where, name="c")
            assert len(folders._HELD) == 1
            folders._HELD.pop().unlock()  # as when its process is gone
            with KVCache(model.config, where, name="c", x_rows=0) as cache:
                assert cache.get_seq_length() == 0
        assert not folders._HELD
        return True

    patiently(attempt, 0.15)
