"""Devices that fail under `generate`: a typed error with the tokens so far, and the same cache then
goes on to the same tokens."""

from __future__ import annotations

import errno
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from espnx import errors
from espnx.integrations.transformers.cache import KVCache
from espnx.storage import FaultRule, FaultyEngine
from tests.integrations.transformers.tiny import enabled, expected, generate, make, plain, prompt
from tests.storage.common import open_descriptors, patiently, until
from tests.sweeps import in_steps

LENGTHS, NEW = [21, 20, 5], 12


def engines(rules: list[FaultRule]) -> tuple[Callable[[], FaultyEngine], list[FaultyEngine]]:
    """What a cache makes engines with, and those that it made: the first has the rules."""
    made: list[FaultyEngine] = []

    def make_engine() -> FaultyEngine:
        made.append(FaultyEngine(() if made else rules, poison=True, pool_bytes=1 << 20))
        return made[-1]

    return make_engine, made


def to_the_end(
    name: str, cache: KVCache, *, limit: int = 3, after: Callable[[], None] | None = None
) -> tuple[torch.Tensor, list[Any]]:
    """Generates; after an error again, from the tokens that came with it. What came out, and the
    errors."""
    said, caught = prompt(LENGTHS), list[Any]()
    total = max(LENGTHS) + NEW
    while True:
        ids, held = said["input_ids"], cache.get_seq_length()
        try:
            return generate(enabled(name), said, cache, max_new_tokens=total - ids.shape[1]), caught
        except errors.EspnxError as error:
            caught.append(error)
            if len(caught) > limit:
                raise
            so_far = error.sequences  # type: ignore[attr-defined]
            assert torch.equal(so_far[:, : ids.shape[1]], ids[:, : so_far.shape[1]])
            assert held <= cache.get_seq_length() < max(so_far.shape[1], 1)
            if so_far.shape[1] > ids.shape[1]:
                more = torch.ones(len(ids), so_far.shape[1] - ids.shape[1], dtype=torch.long)
                said = {
                    "input_ids": so_far,
                    "attention_mask": torch.cat([said["attention_mask"], more], dim=1),
                }
            if after is not None:
                after()


def wanted(name: str) -> torch.Tensor:
    return expected(name, LENGTHS, max_new_tokens=NEW)


@pytest.mark.sampled(1)
@in_steps(3)
@pytest.mark.parametrize(
    ("name", "x_rows"),
    [("llama", 0), ("llama", 2), ("qwen3", 3), ("opt", 3), ("mixtral", 0), ("gemma3", 0)],
)
@pytest.mark.parametrize(
    ("fault", "operation", "value"),
    [
        ("error", "read", errno.EIO),
        ("flip", "read", 8 * 100 + 1),
        ("error", "write", errno.EIO),
        ("error", "write", errno.ENOSPC),
    ],
)
def test_every_call_fails_once(
    folder: Path, name: str, x_rows: int, fault: str, operation: str, value: int, step: int
) -> None:
    """Every fifth of them at most."""
    failures = 0
    for nth in range(1, 200, 5 * step):
        make_engine, made = engines(
            [FaultRule(fault, operation=operation, nth=nth, count=1, value=value)]
        )
        with KVCache(
            enabled(name).config, folder, engine=make_engine, x_rows=x_rows, spill_interval=8
        ) as cache:
            got, caught = to_the_end(name, cache)
            assert torch.equal(got, wanted(name)), (
                f"{fault} in the {nth}th {operation}: other tokens"
            )
        hits = made[0].stats().fault_hits
        made[0].close()
        assert len(caught) <= hits
        for error in caught:
            assert isinstance(error, errors.StorageError)
            assert error.path is not None
            assert error.path in str(error)
            assert error.offset_bytes is not None or isinstance(error, errors.DiskFullError)
            assert fault != "flip" or isinstance(error, errors.ChecksumError)
        failures += len(caught)
        if not hits:
            break
    assert not hits, "the sweep never came to a run without a fault"
    assert failures >= 1
    assert not list(folder.iterdir())


@pytest.mark.parametrize(("operation", "nth"), [("read", 2), ("write", 2), ("allocate", 1)])
def test_a_device_that_is_broken_for_good(folder: Path, operation: str, nth: int) -> None:
    """The same typed error every time, at once, and the cache stays as it was."""
    make_engine, made = engines([FaultRule("error", operation=operation, nth=nth, value=errno.EIO)])
    lengths: list[int] = []
    with KVCache(enabled("llama").config, folder, engine=make_engine) as cache:
        with pytest.raises((errors.ReadError, errors.WriteError)) as caught:
            to_the_end(
                "llama", cache, limit=2, after=lambda: lengths.append(cache.get_seq_length())
            )
        assert made[0].stats().fault_hits >= 3
        assert [*lengths, cache.get_seq_length()] == lengths[:1] * 3
        assert lengths[0] < caught.value.sequences.shape[1]  # type: ignore[attr-defined]
        assert (lengths[0] == 0) == (operation == "allocate")
    made[0].close()


def test_short_reads(folder: Path) -> None:
    make_engine, made = engines([FaultRule("short", operation="read", value=4096)])
    with KVCache(enabled("llama").config, folder, engine=make_engine) as cache:
        got, caught = to_the_end("llama", cache)
    assert (torch.equal(got, wanted("llama")), caught) == (True, [])
    assert made[0].stats().retries > 0
    made[0].close()


@pytest.mark.parametrize("operation", ["read", "write"])
def test_a_stalled_device(folder: Path, operation: str) -> None:
    """The deadline is an error, soon; the device answers again, and so do the tokens. A write has
    to be over before its rows are written again."""

    def caught(deadline_s: float) -> list[type] | None:
        kind, late_ns = ("never", 0) if operation == "read" else ("delay", int(1.3e9 * deadline_s))
        make_engine, made = engines(
            [FaultRule(kind, operation=operation, nth=2, count=1, value=late_ns)]
        )
        with KVCache(
            enabled("llama").config, folder, engine=make_engine, deadline_s=deadline_s
        ) as cache:
            got, errors_of_it = to_the_end("llama", cache)
            assert torch.equal(got, wanted("llama"))
        made[0].close(grace_s=0.01)
        # others were late, too
        return [type(error) for error in errors_of_it] if len(errors_of_it) == 1 else None

    assert patiently(caught, 0.25) == [errors.DeadlineExceededError]


def test_a_write_that_never_ends(folder: Path) -> None:
    """Its rows are not written again, over which it might land: that is told each time, in time,
    until the cache is reset, and what comes then lies elsewhere."""

    def attempt(deadline_s: float) -> bool:
        make_engine, made = engines([FaultRule("never", operation="write", nth=2, count=1)])
        with KVCache(
            enabled("llama").config, folder, engine=make_engine, deadline_s=deadline_s
        ) as cache:
            with pytest.raises(errors.DeadlineExceededError, match="still with the device"):
                to_the_end("llama", cache, limit=2)
            cache.reset()
            got, caught = to_the_end("llama", cache)
            assert (torch.equal(got, wanted("llama")), caught) == (True, [])
            assert made[0].stats().in_flight == 1
        made[0].close(grace_s=0.01)
        return True

    patiently(attempt, 0.25)


def test_late_answers_change_nothing(folder: Path) -> None:
    make_engine, made = engines(
        [FaultRule("delay", operation="*", value=3_000_000, probability=0.5)]
    )
    with KVCache(
        enabled("llama").config, folder, engine=make_engine, read_ahead_bytes=4096
    ) as cache:
        assert torch.equal(to_the_end("llama", cache)[0], wanted("llama"))
    made[0].close()


def test_the_directory_is_removed(folder: Path) -> None:
    """The data file has no name anyway."""
    with KVCache(enabled("llama").config, folder / "rows") as cache:
        inputs = prompt(LENGTHS)
        some = generate(enabled("llama"), inputs, cache, max_new_tokens=4)
        shutil.rmtree(folder / "rows")
        mask = torch.cat([inputs["attention_mask"], torch.ones(3, 4, dtype=torch.long)], dim=1)
        got = generate(
            enabled("llama"),
            {"input_ids": some, "attention_mask": mask},
            cache,
            max_new_tokens=NEW - 4,
        )
        assert torch.equal(got, wanted("llama"))


def test_a_closed_cache(folder: Path) -> None:
    cache = KVCache(enabled("llama").config, folder)
    generate(enabled("llama"), prompt(LENGTHS), cache, max_new_tokens=4)
    cache.close()
    cache.close()
    with pytest.raises(errors.EngineClosedError):
        generate(enabled("llama"), prompt([30, 30, 30]), cache, max_new_tokens=20)


def test_closing_returns_the_space(folder: Path) -> None:
    """At once: the data file has no name, so its space is there as long as anything has it open."""
    cache = KVCache(enabled("llama").config, folder)
    generate(enabled("llama"), prompt(LENGTHS), cache, max_new_tokens=1)
    assert files_of(folder)
    cache.close()
    assert until(lambda: not files_of(folder)), files_of(folder)


def files_of(folder: Path) -> set[str]:
    return {name for name in open_descriptors() if str(folder) in name}


def test_an_error_of_the_caller_ends_it(folder: Path) -> None:
    with pytest.raises(KeyError), KVCache(enabled("llama").config, folder) as cache:
        generate(enabled("llama"), prompt(LENGTHS), cache, max_new_tokens=4)
        raise KeyError
    assert not list(folder.iterdir())
    with pytest.raises(errors.EngineClosedError):
        generate(enabled("llama"), prompt([30, 30, 30]), cache, max_new_tokens=20)


@pytest.mark.parametrize("n", [12, 30])
def test_nan_in_k(folder: Path, n: int) -> None:
    """A NaN reaches whoever sees it, from memory and from disk alike, and nobody else."""
    model, theirs = (make("llama") for _ in range(2))
    for each in (model, theirs):
        with torch.no_grad():
            each.get_input_embeddings().weight[2] = float("nan")
    from espnx.integrations.transformers.enable import enable_kv_cache

    enable_kv_cache(model)
    inputs = prompt([n, n])
    inputs["input_ids"][0, 3] = 2
    with KVCache(model.config, folder) as cache, torch.no_grad():
        ours = [model(**inputs, past_key_values=cache).logits[:, -1]]
        ids = inputs["input_ids"]
        whole = [theirs(input_ids=ids).logits[:, -1]]
        for token in range(20):
            new = torch.full((2, 1), 5 + token)
            ids = torch.cat([ids, new], dim=1)
            ours.append(model(input_ids=new, past_key_values=cache).logits[:, -1])
            whole.append(theirs(input_ids=ids).logits[:, -1])
        assert cache.stats()["bytes_asked"] > 0
    got, right = torch.stack(ours), torch.stack(whole)
    assert torch.equal(got.isnan(), right.isnan())
    assert bool(got[:, 0].isnan().all())
    torch.testing.assert_close(
        got[:, 1], right[:, 1], rtol=1e-3, atol=1e-4 * float(right[:, 1].abs().max())
    )


def test_two_threads(folder: Path) -> None:
    """Each with a cache of its own, one model and one directory."""
    results: dict[int, list[bool]] = {1: [], 2: []}

    def work(number: int) -> None:
        name = ("llama", "opt")[number - 1]
        for _ in range(3):
            with KVCache(enabled(name).config, folder, spill_interval=1) as cache:
                results[number].append(torch.equal(to_the_end(name, cache)[0], wanted(name)))

    for name in ("llama", "opt"):
        enabled(name), wanted(name)
    threads = [threading.Thread(target=work, args=(number,)) for number in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: [True] * 3, 2: [True] * 3}
    assert not list(folder.iterdir())


def test_places_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    for storage in (
        tmp_path / "file",
        tmp_path / "file" / "below",
        [tmp_path / "fine", "/proc/nowhere"],
    ):
        before = open_descriptors()
        with pytest.raises(
            (errors.WriteError, errors.InvalidInputError), match=r"file|/proc/nowhere"
        ):
            KVCache(plain("llama").config, storage)
        assert until(lambda known=before: len(open_descriptors()) <= len(known))
    assert not list((tmp_path / "fine").iterdir())


@pytest.mark.parametrize("x_rows", [0, 1])
def test_an_error_of_the_model_between_two_layers(folder: Path, x_rows: int) -> None:
    """Layers before it have taken in a token that those behind it have not: the next pass begins
    where both agree."""
    model = enabled("llama")
    inputs = prompt([24])
    ids = inputs["input_ids"]
    with KVCache(model.config, folder, x_rows=x_rows) as cache, torch.no_grad():
        model(input_ids=ids[:, :20], past_key_values=cache)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(model.model.layers[0].mlp, "forward", _fail)
            with pytest.raises(RuntimeError, match="as asked"):
                model(input_ids=ids[:, 20:21], past_key_values=cache)
        assert torch.equal(generate(model, inputs, cache), expected("llama", [24]))


def _fail(*_: object) -> None:
    raise RuntimeError("as asked")


def test_a_pass_that_reaches_no_layer(folder: Path) -> None:
    """It adds nothing, nor does it hide the next one."""
    model, inputs = enabled("llama"), prompt([24])
    with KVCache(model.config, folder) as cache, torch.no_grad():
        with pytest.raises(IndexError):
            model(input_ids=torch.full((1, 3), 10**6), past_key_values=cache)
        assert torch.equal(generate(model, inputs, cache), expected("llama", [24]))
        assert cache.tokens is not None
        assert torch.equal(cache.tokens, expected("llama", [24])[:, :-1])


def test_a_prompt_of_another_batch(folder: Path) -> None:
    with KVCache(enabled("llama").config, folder) as cache:
        generate(enabled("llama"), prompt([20, 20]), cache)
        assert cache.reuse_prefix(**prompt([24])) == 0
        assert torch.equal(generate(enabled("llama"), prompt([24]), cache), expected("llama", [24]))


def test_rotations_with_a_mask_and_without(folder: Path) -> None:
    """One row of positions stands for all sequences until a mask makes them differ."""
    model, inputs = enabled("llama"), prompt([24, 24])
    ids = inputs["input_ids"]
    with KVCache(model.config, folder, x_rows=2) as cache, torch.no_grad():
        model(input_ids=ids[:, :20], past_key_values=cache)
        assert torch.equal(generate(model, inputs, cache), expected("llama", [24, 24]))


def test_the_last_pass_counts(folder: Path) -> None:
    with KVCache(enabled("llama").config, folder) as cache:
        enabled("llama").generate(**prompt([20]), past_key_values=cache, max_new_tokens=1)
        stats = cache.stats()
        assert (stats["prefill_tokens"], stats["decode_tokens"], stats["step_s"]) == (20, 0, None)
        assert stats["prefill_s"] > 0
        generate(enabled("llama"), prompt([24]), cache)
        assert cache.stats()["decode_tokens"] > 0
