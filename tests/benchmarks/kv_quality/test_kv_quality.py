"""``espnx bench kv-quality`` on a tiny random model: exact rows give what memory gives, int8 rows
nearly, and wrong rows are seen."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if importlib.util.find_spec("transformers") is None:
    pytest.skip("transformers is not installed (extra [models])", allow_module_level=True)

from espnx.benchmarks.harness.result import Row, load, rows_of
from espnx.benchmarks.kv_quality import measure as kv_quality
from espnx.benchmarks.kv_quality.case import CASE
from espnx.benchmarks.kv_quality.measure import Found, plan, read_options, same
from espnx.benchmarks.kv_quality.recall import NAME, HeldOut, question
from espnx.cli.main import main
from espnx.errors import FormatError, InvalidInputError
from espnx.kv.striping import StripedDevices

CONTEXT, VOCABULARY = 640, 97
MARKS = {"KEY": [1], "GET": [2], ":": [3], "\n": [4]}


def held_out(tokens: int = 2000) -> HeldOut:
    rng = np.random.default_rng(0)
    words = [[5 + i % 40, 50 + i // 2] for i in range(40)]
    return HeldOut(rng.integers(45, VOCABULARY, tokens).astype(np.uint16), words, MARKS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Heads of 128 values: a block of int8 rows holds 256 tokens, one of fp32 rows 8."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=128,
        max_position_embeddings=CONTEXT,
        initializer_range=0.25,
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("models") / "tiny"
    LlamaForCausalLM(config).save_pretrained(path)
    held_out().save(path)
    return path


def bench(folder: Path, storage: Path, *words: str) -> tuple[int, dict[str, Row]]:
    result = storage / "r.json"
    options = [
        "--model",
        str(folder),
        "--path",
        str(storage),
        "--windows",
        "3",
        "--questions",
        "3",
        "--batch",
        "2",
        *words,
    ]
    code = main(["bench", "kv-quality", *options, "--json", str(result)])
    return code, {row.system: row for row in rows_of(load(result))}


def test_exact_rows_equal_memory_and_int8_rows_come_close(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, rows = bench(folder, tmp_path, "--piece", "100")
    assert code == 0
    assert list(rows) == ["dynamic", "espnx", "espnx-int8"]
    assert all(
        row.correct and row.case == "kv-quality" and row.params["windows"] == 3
        for row in rows.values()
    )
    exact, lossy, memory = (rows[name].metrics for name in ("espnx", "espnx-int8", "dynamic"))
    # two layers, two heads, K and V of 128 values
    assert (memory["bytes_per_token"], exact["bytes_per_token"]) == (4096.0, 4096.0)
    # pages of 4 KiB with 256 rows of 2 x 128 bytes and their scales
    assert lossy["bytes_per_token"] == 2 * 2 * 69632 / 256
    assert 0 < exact["loss_difference_max"] <= exact["loss_difference_allowed"] < 1e-3
    assert (
        exact["other_tokens_share"]
        == memory["loss_difference_max"]
        == memory["stored_share"]
        == 0.0
    )
    assert exact["perplexity"] == pytest.approx(memory["perplexity"], rel=1e-5)
    # int8 rows were really read: results differ by much more than rounding, and yet not by much.
    assert lossy["loss_difference_max"] > 10 * exact["loss_difference_allowed"]
    assert lossy["perplexity"] == pytest.approx(memory["perplexity"], rel=0.05)
    assert 0.3 < lossy["stored_share"] < 0.9 < exact["stored_share"] <= 1.0
    for row in (rows["espnx"], rows["espnx-int8"]):
        assert row.bytes_asked > 0
        assert {name for name in row.metrics if name.startswith("recall_")} == {
            "recall_128",
            "recall_512",
        }
    headers, cells = CASE.table(list(rows.values()))
    assert all(len(headers) == len(line) for line in cells)
    out = capsys.readouterr().out
    assert "recall 512" in out
    assert "1088" in out


def test_rows_that_are_stored_wrong_are_seen(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    put = StripedDevices.put

    def off_by_one(self: StripedDevices, layout: Any, k: torch.Tensor, *others: Any) -> Any:
        return put(self, layout, k.roll(1, dims=2), *others)

    monkeypatch.setattr(StripedDevices, "put", off_by_one)
    code, rows = bench(folder, tmp_path, "--quick")
    assert code == 1
    assert rows["dynamic"].correct
    assert not rows["espnx"].correct
    assert "WRONG RESULT of espnx:" in capsys.readouterr().err


class LooksUp(torch.nn.Module):
    """Answers with the value of the newest line with the key asked for; `off` more than that."""

    def __init__(self, off: int) -> None:
        super().__init__()
        self.off, self.seen = off, list[list[int]]()

    def forward(self, input_ids: torch.Tensor, past_key_values: Any, use_cache: bool) -> Any:
        if not past_key_values:
            self.seen = [[] for _ in input_ids]
            past_key_values.append(1)
        logits = torch.zeros(*input_ids.shape, VOCABULARY)
        for row, ids in enumerate(input_ids.tolist()):
            for at, token in enumerate(ids):
                seen = self.seen[row]
                seen.append(token)
                starts = [
                    i for i in range(len(seen) - 1, 0, -1) if seen[i] == 2 and seen[i - 1] == 4
                ]
                if starts and len(seen) - starts[0] < 12:
                    asked = seen[starts[0] + 1 :]  # the key, a colon and what was answered
                    keys = [
                        i
                        for i in range(starts[0])
                        if seen[i] == 1 and seen[i + 1 : i + 1 + len(asked)] == asked
                    ]
                    if keys:
                        logits[
                            row, at, (seen[keys[-1] + 1 + len(asked)] + self.off) % VOCABULARY
                        ] = 1.0
        return type("Output", (), {"logits": logits})


@pytest.mark.parametrize(("off", "share"), [(0, 1.0), (1, 0.0)])
def test_recall_is_solved_by_looking_up(folder: Path, off: int, share: float) -> None:
    options = read_options(arguments(folder, "--questions", "5"))
    model = LooksUp(off)
    for part in plan(held_out(), CONTEXT, options):
        if part.distance is not None:
            found = Found()
            kv_quality.feed(model, [], part, found)
            assert found.right[part.distance] == [share == 1.0] * len(part.ids)


def arguments(folder: Path, *words: str) -> Any:
    import argparse

    parser = argparse.ArgumentParser()
    CASE.configure(parser)
    for name in ("--seed", "--pairs"):
        parser.add_argument(name, type=int, default=1)
    parser.add_argument("--quick", action="store_true")
    return parser.parse_args(["--model", str(folder), *words])


def test_the_plan_asks_for_what_is_stored(folder: Path) -> None:
    work = plan(
        held_out(),
        CONTEXT,
        read_options(arguments(folder, "--questions", "3", "--batch", "2", "--piece", "300")),
    )
    text = [part for part in work if part.distance is None]
    assert [part.ends for part in text] == [[300, 600, 640]] * len(text)
    assert sum(len(part.ids) for part in text) == 3  # as many as there are
    for part in work:
        assert part.ids.shape[1] == part.ends[-1] + 1
        assert part.ends == sorted(set(part.ends))
        if part.distance is not None:
            # The answer comes with the last piece, what it repeats in an earlier one and in the
            # first half.
            assert all(
                count < part.ends[-1] - part.ends[-2] < part.distance for count in part.counted
            )
            assert part.ends[-1] - part.distance < CONTEXT // 2 or part.ends[-1] == CONTEXT
    again = plan(
        held_out(),
        CONTEXT,
        read_options(arguments(folder, "--questions", "3", "--batch", "2", "--piece", "300")),
    )
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(work, again, strict=True))


def test_another_token_counts_only_where_the_lead_is_clear() -> None:
    def made(loss: float, token: int, margin: float) -> Found:
        return Found(
            losses=[torch.tensor([loss])],
            tokens=[torch.tensor([token])],
            margins=[torch.tensor([margin])],
        )

    assert same(made(1.0, 3, 0.1), made(1.0, 3, 0.1), 0.01)
    assert same(made(1.0, 4, 0.1), made(1.0, 3, 0.02), 0.01)
    assert not same(made(1.0, 4, 0.1), made(1.0, 3, 0.021), 0.01)
    assert not same(made(1.021, 3, 0.1), made(1.0, 3, 0.1), 0.01)
    assert not same(made(float("nan"), 3, 0.1), made(1.0, 3, 0.1), 0.01)


def test_held_out_text_comes_back(tmp_path: Path) -> None:
    with pytest.raises(InvalidInputError, match=r"train_demo_model\.py"):
        HeldOut.load(tmp_path)
    given = held_out(50)
    given.save(tmp_path)
    found = HeldOut.load(tmp_path)
    assert np.array_equal(found.tokens, given.tokens)
    assert (found.words, found.marks) == (given.words, given.marks)
    asked = [question(one, np.random.default_rng(1), 256, 128) for one in (given, found)]
    assert asked[0] == asked[1]
    HeldOut(given.tokens, given.words[:15], given.marks).save(tmp_path)
    with pytest.raises(FormatError, match="15 words"):
        HeldOut.load(tmp_path)
    (tmp_path / NAME).write_bytes(b"no tensors")
    with pytest.raises(FormatError, match="cannot read"):
        HeldOut.load(tmp_path)


@pytest.mark.parametrize(
    "words", [["--dtype", "fp8"], ["--dtype", ","], ["--windows", "0"], ["--piece", "-1"]]
)
def test_bad_options_are_refused(folder: Path, words: list[str]) -> None:
    with pytest.raises(InvalidInputError):
        read_options(arguments(folder, *words))


def test_a_folder_without_a_model_names_the_command(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "kv-quality", "--model", str(tmp_path)]) == 2
    assert "scripts/train_demo_model.py" in capsys.readouterr().err


def test_text_shorter_than_the_context_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidInputError, match="more than 640"):
        plan(held_out(640), CONTEXT, read_options(arguments(folder)))


def test_the_result_file_says_nothing_of_paths(folder: Path, tmp_path: Path) -> None:
    _, rows = bench(folder, tmp_path, "--quick", "--dtype", "bf16")
    document = json.loads((tmp_path / "r.json").read_text())
    assert str(tmp_path) not in json.dumps(document)
    assert {row.params["model"] for row in rows.values()} == {"tiny"}
    assert rows["espnx"].correct
    assert rows["espnx"].metrics["bytes_per_token"] == 2048.0
