"""``espnx bench kv --show speculation`` and ``--show acceptance`` at toy size: the counts of
acceptance by a second program, and what becomes of wrong tokens."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from espnx import errors
from espnx.benchmarks.harness.result import load, rows_of
from espnx.benchmarks.kv import sweeps
from espnx.benchmarks.kv.fleet import Limit
from espnx.benchmarks.kv.speculation import show, timing, work
from espnx.benchmarks.kv.speculation.work import GAMMA, ONE_BY_ONE, SYSTEMS, SpeculationWork
from espnx.benchmarks.kv.systems.models import (
    Task,
    tolerance_of_other_shapes,
    tolerance_of_rounded_rows,
    write_weights,
)
from espnx.cli.main import main
from espnx.integrations.transformers.speculation import decoding
from espnx.kv.draft.acceptance import next_token
from espnx.kv.draft.lookup import continuation
from tests.benchmarks.kv.test_case import bench

LLAMA = {
    "model_type": "llama",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "intermediate_size": 96,
    "vocab_size": 300,
}
CONTEXT, POSITIONS = 300, 20
DRAFTS = [name for name in SYSTEMS if name != ONE_BY_ONE]

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def short(here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweeps, "_LEAST_SPECULATED", 128)
    monkeypatch.setattr(timing, "_QUICK_POSITIONS", 10)
    monkeypatch.setattr("espnx.benchmarks.kv.speculation.timing.shutil.which", lambda name: None)


def made(folder: Path, batch: int = 1) -> SpeculationWork:
    task = Task("tiny", LLAMA, batch, CONTEXT, 8, "fp32", 1)
    write_weights(task, folder / "weights")
    it = SpeculationWork(
        task.words(), POSITIONS, str(folder / "weights"), str(folder / "kv"), {"x_rows": 0}
    )
    it.fill(CONTEXT)
    return it


@pytest.mark.usefixtures("short")
def test_every_system(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = tmp_path / "r.json"
    words = ["--pairs", "2", "--context", "200", "--batch", "2", "--dtype", "fp32"]
    words += ["--show", "speculation", "--json", str(result), "--draft-read-ahead", "1MiB"]
    assert bench(tmp_path, *words) == 0
    rows = rows_of(load(result))
    assert [(one.params["context"], one.system) for one in rows] == [
        (200, system) for system in [*DRAFTS, ONE_BY_ONE]
    ]
    for one in rows:
        assert (one.n, one.correct, one.params["text"]) == (2, True, "random tokens")
        assert one.metrics["draft_bytes"] == 0
        # of two sequences; K and V of two layers, 64 wide, fp32, for each of 16 tokens
        first = one.params["context"] + 1
        assert one.bytes_asked == sum(2 * (first + i) * 2 * 2 * 64 * 4 for i in range(16))
        assert one.metrics["step_s"] == pytest.approx((one.median_s or 0) / 16)
        if one.system == ONE_BY_ONE:
            assert one.metrics["tokens_a_pass"] == 1.0
        else:
            assert set(one.ratio) == {ONE_BY_ONE}
            by_model = one.system != "lookup"
            assert (one.metrics["draft_memory_bytes"] > 0) is by_model
            assert one.metrics["read_ahead_limit_bytes"] == (1 << 20 if by_model else 0)
            assert one.metrics["read_ahead_per_step"] >= 0
    captured = capsys.readouterr()
    assert "No prefill" not in captured.err
    assert "fio is not installed" in captured.err
    assert "tokens a pass" in captured.out
    assert sorted(path.name for path in tmp_path.iterdir()) == ["r.json", "tiny.json"]


@pytest.mark.usefixtures("short")
def test_wrong_tokens_have_no_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A rule that accepts whatever was proposed."""

    def willing(scores: torch.Tensor, drafted: int | None, *by: Any, is_sampled: bool) -> Any:
        if drafted is not None:
            return drafted, True
        return next_token(scores, drafted, *by, is_sampled=is_sampled)

    monkeypatch.setattr(decoding, "next_token", willing)
    monkeypatch.setattr(decoding, "continuation", lambda tokens, n: [7] * n)
    result = tmp_path / "r.json"
    words = ["--pairs", "1", "--context", "128", "--batch", "1", "--dtype", "fp32"]
    words += ["--show", "speculation", "--json", str(result)]
    assert bench(tmp_path, *words) == 1
    found = {one.system: one for one in rows_of(load(result))}
    assert (found["lookup"].correct, found["lookup"].n, found["lookup"].ratio) == (False, 0, {})
    assert found[ONE_BY_ONE].correct
    assert "WRONG RESULT of lookup" in capsys.readouterr().err


@pytest.mark.usefixtures("short")
def test_gamma_beside_the_best_fixed_number(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = tmp_path / "r.json"
    words = ["--pairs", "1", "--context", "200", "--batch", "2", "--dtype", "fp32", "--new", "6"]
    assert bench(tmp_path, *words, "--show", "gamma", "--json", str(result)) == 0
    rows = rows_of(load(result))
    cells = {(one.params["context"], one.params["batch"]) for one in rows}
    assert cells == {(128, 1), (128, 2), (200, 1), (200, 2)}
    for cell in cells:
        own = [one for one in rows if (one.params["context"], one.params["batch"]) == cell]
        assert [one.system for one in own] == ["chosen", *(f"gamma-{n}" for n in (0, 2, 4, 8, 16))]
        assert all((one.n, one.correct) == (1, True) for one in own)
        chosen, fixed = own[0], {one.system: one for one in own[1:]}
        best = f"gamma-{chosen.metrics['best_gamma']:.0f}"
        assert fixed[best].median_s == min(one.median_s or 0.0 for one in own[1:])
        assert chosen.metrics["over_best"] == pytest.approx(
            (chosen.median_s or 0.0) / (fixed[best].median_s or 1.0), rel=1e-6
        )
        assert fixed["gamma-0"].metrics["tokens_a_pass"] == 1.0
    captured = capsys.readouterr()
    assert "of 4 within 15% of the best fixed number" in captured.err
    assert "x the best fixed" in captured.out


@pytest.mark.usefixtures("short")
def test_many_long_sequences_begin_alike(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Each has rows of its own, of half the bytes, and goes on as from a prompt of its own."""
    result = tmp_path / "r.json"
    words = ["--pairs", "1", "--context", "200", "--batch", "2", "--dtype", "fp32"]
    assert bench(tmp_path, *words, "--show", "long", "--json", str(result)) == 0
    (row,) = rows_of(load(result))
    assert (row.system, row.n, row.correct, row.params["rows"]) == ("pages-1/16", 1, True, "bf16")
    # two sequences, K and V of two layers, four heads of 16, two bytes
    assert row.metrics["kv_bytes"] == 2 * 200 * 2 * 2 * 4 * 16 * 2
    assert row.metrics["one_by_one_s"] > 0
    assert row.metrics["draft_bytes"] == 0
    assert "written as that of each" in row.params["prefill"]
    assert "one by one ms" in capsys.readouterr().out


def test_sequences_that_begin_alike_are_those_of_their_own_prompts(tmp_path: Path) -> None:
    task = Task("tiny", LLAMA, 3, CONTEXT, 8, "fp32", 1)
    write_weights(task, tmp_path / "weights")
    it = SpeculationWork(
        task.words(),
        POSITIONS,
        str(tmp_path / "weights"),
        str(tmp_path / "kv"),
        {"x_rows": 0},
        is_shared=True,
    )
    it.fill(CONTEXT)
    assert (it.tokens[:, :CONTEXT] == it.tokens[0, :CONTEXT]).all()
    assert len({tuple(row) for row in it.tokens[:, CONTEXT:].tolist()}) == 3
    ids = it.tokens[:, : CONTEXT + 1]
    plain = it.model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        past_key_values=DynamicCache(config=it.model.config),
        max_new_tokens=8,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )
    assert torch.equal(it.reference, plain[:, CONTEXT + 1 :])
    kept = tmp_path / "kv" / f"3-of-{CONTEXT}"
    size_bytes = sum(each.stat().st_size for each in kept.rglob("*") if each.is_file())
    assert size_bytes > 3 * CONTEXT * 2 * 2 * 2 * 64 * 4


def test_a_long_show_needs_a_size() -> None:
    """What a process needs is not known before."""
    options: Any = SimpleNamespace(limit=Limit("auto"))
    with pytest.raises(errors.InvalidInputError, match="--memory 2GiB"):
        show._group(options)


@pytest.mark.usefixtures("short")
def test_acceptance_has_no_times(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = list[dict[str, dict[str, float]]]()
    for context in ("200", "128"):
        result = tmp_path / f"{context}.json"
        words = ["--show", "acceptance", "--context", context, "--batch", "1", "--dtype", "fp32"]
        assert bench(tmp_path, *words, "--json", str(result)) == 0
        rows = rows_of(load(result))
        assert all((one.n, one.median_s, one.correct) == (0, None, True) for one in rows)
        found.append({f"{one.system} {one.params['context']}": dict(one.metrics) for one in rows})
    assert set(found[0]) == {f"{name} {context}" for name in DRAFTS for context in (128, 200)}
    shorter = {name: metrics for name, metrics in found[0].items() if name.endswith(" 128")}
    assert found[1] == shorter, "nothing depends on the machine"
    assert "given text" in capsys.readouterr().out


def test_over_all_pages_every_draft_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    every = {"all": {"draft": "pages", "draft_memory": 1.0}, **SYSTEMS}
    monkeypatch.setattr(work, "SYSTEMS", every)
    found = made(tmp_path).forced("all", "text")
    assert found["tokens_a_pass"] == GAMMA + 1
    assert found["accepted"] == [1.0] * GAMMA
    assert found["draft_bytes"] == 0
    # each pass reads what is stored, for nine tokens
    assert 0.8 / 9 < found["asked_share"] < 1.05 / 9


@pytest.mark.parametrize("text", ["text", "quoted"])
def test_lookup_as_a_second_program_counts_it(tmp_path: Path, text: str) -> None:
    """What the model says of given tokens all at once, from the framework's own cache."""
    it = made(tmp_path, batch=2)
    found = it.forced("lookup", text)
    ids = it._given(text)
    with torch.no_grad():
        cache = DynamicCache(config=it.model.config)
        said = it.model(ids, past_key_values=cache).logits[0].argmax(dim=-1).tolist()
    at, kept = CONTEXT, list[int]()
    while at < CONTEXT + POSITIONS:
        right = 0
        for proposed, wanted in zip(
            continuation(ids[0, : at + 1].numpy(), GAMMA), said[at:], strict=False
        ):
            if proposed != wanted:
                break
            right += 1
        kept.append(right + 1)
        at += right + 1
    assert found["tokens_a_pass"] == sum(kept) / len(kept)
    assert found["passes"] == len(kept)


def test_a_context_is_as_it_was_after_each_turn(tmp_path: Path) -> None:
    it = made(tmp_path, batch=2)
    first = it.run("pages-1/16")
    for name in ("lookup", ONE_BY_ONE, "pages-1/16"):
        it.forced(name, "text") if name != ONE_BY_ONE else None
        it.run(name)
        assert it.verdict(name) == {"problem": None, "places": []}
    assert it.run("pages-1/16")["draft_bytes"] == first["draft_bytes"] == 0
    it.found["lookup"] = it.found["lookup"].clone()
    it.found["lookup"][1, 3] += 1
    verdict = it.verdict("lookup")
    assert [place["sequence"] for place in verdict["places"]] == [1]
    assert verdict["problem"].startswith("sequence 1, token 3")


def test_the_model_of_the_demo(tmp_path: Path, here: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its own weights, over text that it has not seen."""
    result = tmp_path / "r.json"
    words = ["bench", "kv", "--quick", "--memory", "ample", "--path", str(tmp_path)]
    words += ["--model", "demo", "--dtype", "fp32", "--batch", "1", "--show", "acceptance"]
    assert main([*words, "--json", str(result)]) == 0
    rows = {one.system: one for one in rows_of(load(result))}
    assert rows["pages-1/4"].params["text"] == "held-out text"
    assert rows["pages-1/4"].params["weights"] == "its own"
    assert rows["pages-1/4"].metrics["forced_tokens_a_pass"] > 2
    lookup = rows["lookup"].metrics
    assert lookup["forced_tokens_a_pass_quoted"] > lookup["forced_tokens_a_pass"]


def test_rows_that_are_rounded_lie_further_apart() -> None:
    """Values that differ by d, rounded to bf16, differ by sqrt(d s) at most."""
    config = SimpleNamespace(num_hidden_layers=30, hidden_size=576, intermediate_size=1536)
    close = tolerance_of_other_shapes(config, "fp32")
    assert tolerance_of_rounded_rows(config, "fp32", "fp32") == close
    assert tolerance_of_rounded_rows(config, "bf16", "bf16") == tolerance_of_other_shapes(
        config, "bf16"
    )
    wide = tolerance_of_rounded_rows(config, "fp32", "bf16")
    apart = close / 5
    generator = torch.Generator().manual_seed(3)
    values = torch.randn(1 << 21, generator=generator, dtype=torch.float64)
    others = values * (1 + apart * torch.randn(1 << 21, generator=generator, dtype=torch.float64))
    rounded, also = values.bfloat16().double(), others.bfloat16().double()
    found = float((((rounded - also) / values) ** 2).mean().sqrt())
    assumed = ((wide - close) / 5) ** 2 / (2 * config.num_hidden_layers)
    assert 0.5 * assumed**0.5 < found < assumed**0.5
