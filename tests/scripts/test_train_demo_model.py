"""The training of the demo model at a thousandth of its size: it learns, reloads, repeats, resumes, and its recall questions are fair."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import itertools
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

if not all(map(importlib.util.find_spec, ("transformers", "tokenizers"))):
    pytest.skip("transformers and tokenizers are not installed (extra [models])", allow_module_level=True)

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import docstrings
import train_demo_model as script

TINY = script.Settings(
    steps=6,
    context=256,
    vocabulary=640,
    hidden=32,
    layers=2,
    heads=4,
    kv_heads=2,
    batch_tokens=512,
    learning_rate=2e-2,
    threads=1,
    recall_samples=2,
)
SMALL = ("vocabulary", "hidden", "layers", "heads", "kv_heads", "batch_tokens", "learning_rate", "recall_samples")
DOCUMENTS = script.BLOCK_DOCUMENTS * script.HELD_OUT_EVERY


@functools.cache
def documents() -> list[dict[str, str]]:
    standard_library = sorted(name for name in sys.stdlib_module_names if not name.startswith("_"))
    found = list(itertools.islice(docstrings.documents(packages=standard_library, max_chars=400), DOCUMENTS))
    assert len(found) == DOCUMENTS
    return found


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("tiny") / "prepared"
    script.prepare(work, iter(documents()), TINY.vocabulary)
    return work


@pytest.fixture(scope="module")
def data(prepared: Path) -> Any:
    return script.Data(prepared)


def weights(model: Any) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in model.parameters()])


def contains(stream: list[int], part: list[int], end: int) -> bool:
    return any(stream[i : i + len(part)] == part for i in range(end - len(part) + 1))


def test_the_same_seed_gives_the_same_weights_also_when_interrupted(data: Any, tmp_path: Path) -> None:
    for name in "abc":
        (tmp_path / name).mkdir()
    straight, run = script.train(TINY, tmp_path / "a", data)
    _, half = script.train(TINY, tmp_path / "b", data, until_step=3)
    assert (half.step, run.step) == (3, 6)
    resumed, again = script.train(TINY, tmp_path / "b", data, resume=True)
    other, _ = script.train(dataclasses.replace(TINY, seed=1), tmp_path / "c", data)
    assert torch.equal(weights(straight), weights(resumed))
    assert not torch.equal(weights(straight), weights(other))
    assert (again.step, again.tokens) == (run.step, run.tokens) == (6, 6 * 512)
    with pytest.raises(SystemExit, match="made with hidden 32, got 64"):
        script.train(dataclasses.replace(TINY, hidden=64), tmp_path / "b", data, resume=True)


def test_it_learns_and_what_it_wrote_reloads(
    prepared: Path, data: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small = {
        field: getattr(TINY, field)
        for field in ("vocabulary", "hidden", "layers", "heads", "kv_heads", "batch_tokens", "learning_rate", "recall_samples")
    }
    monkeypatch.setattr(script, "Settings", functools.partial(script.Settings, **small))
    monkeypatch.setattr(docstrings, "documents", lambda: iter(documents()))
    out, threads = tmp_path / "models" / "demo", torch.get_num_threads()
    try:
        assert script.main(["--out", str(out), "--steps", "40", "--context", "256", "--threads", "1", "--seed", "3"]) == 0
    finally:
        torch.set_num_threads(threads)
    table = capsys.readouterr().out
    names = {path.name for path in out.iterdir()}
    assert names == {
        "README.md",
        "config.json",
        "held_out.safetensors",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "training.json",
    }
    assert (prepared / "tokenizer.json").read_bytes() == (out.with_name("demo.work") / "tokenizer.json").read_bytes()

    record = json.loads((out / "training.json").read_text())
    assert record["command"] == "python scripts/train_demo_model.py --minutes 50 --steps 40 --seed 3 --context 256 --threads 1"
    assert record["curve"][0]["train_loss"] == pytest.approx(np.log(TINY.vocabulary), abs=0.1)  # it begins knowing nothing
    assert record["results"]["validation_loss"] < record["curve"][0]["train_loss"] - 0.5
    assert record["results"]["validation_perplexity"] == pytest.approx(np.exp(record["results"]["validation_loss"]))
    assert list(record["results"]["recall_exact_match"]) == ["128"]  # the other distances do not fit into 256 tokens
    assert [point["context"] for point in record["curve"]] == [32, 64, 256]  # steps 1, 20 and 40: short first, full at the end
    assert f"{record['results']['parameters']:,}" in table
    assert "exact recall at 128 tokens" in table
    check_reloaded(out, data)


def check_reloaded(out: Path, data: Any) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model, tokenizer = AutoModelForCausalLM.from_pretrained(out), AutoTokenizer.from_pretrained(out)
    assert (model.dtype, model.config.max_position_embeddings, tokenizer.eos_token_id) == (torch.bfloat16, 256, 0)
    text = "Return the array.\nKEY axis: shape data\n\tünïcode  ok"
    assert tokenizer(text).input_ids == data.ids(text)
    assert tokenizer.decode(tokenizer(text).input_ids) == text
    state = torch.load(out.with_name("demo.work") / "state.pt", weights_only=True)["model"]
    assert all(torch.equal(value, state[name].to(torch.bfloat16)) for name, value in model.state_dict().items())


def test_documents_are_held_out_in_blocks(data: Any) -> None:
    texts = [document["text"] for document in documents()]
    first = script.BLOCK_DOCUMENTS * (script.HELD_OUT_EVERY // 2)
    assert data.about["held_out_documents"] == script.BLOCK_DOCUMENTS
    expected = [[0], *([*data.ids(text), 0] for text in texts[first : first + script.BLOCK_DOCUMENTS])]
    assert data.held_out.tolist() == list(itertools.chain.from_iterable(expected))
    assert set(map(tuple, data.words["train"])).isdisjoint(map(tuple, data.words["held_out"]))
    with pytest.raises(SystemExit, match="got 799 documents, expected more than 800"):
        script.prepare(Path("nowhere"), iter(documents()[:799]), 300)


@pytest.mark.parametrize("length", [16, 33, 256])
def test_every_answer_stands_in_a_key_line_before(data: Any, length: int) -> None:
    answered = 0
    for seed in range(40):
        ids, marks = script.recall_sequence(data, np.random.default_rng(seed), length)
        assert len(ids) == len(marks) == length
        marked = itertools.groupby(range(length), marks.__getitem__)
        questions = [list(group) for mark, group in marked if mark == script.ANSWER_WEIGHT]
        for places in questions:
            answered += 1
            assert marks[places[0] - 1] == 0.0  # the question itself is not to be predicted
            assert contains(ids, [ids[i] for i in places], places[0])
    assert answered >= (40 if length == 256 else 0)


def test_a_batch_depends_on_seed_and_step_alone(data: Any) -> None:
    first, again, later = (script.batch(data, TINY, step, 32) for step in (5, 5, 6))
    assert first[0].shape == first[1].shape == (16, 33)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first[0], later[0])
    assert not torch.equal(first[0], script.batch(data, dataclasses.replace(TINY, seed=1), 5, 32)[0])
    assert first[2].any()


def test_copies_are_judged_from_the_second_time_on() -> None:
    for seed, length in itertools.product(range(10), (16, 17, 65)):
        ids, marks = script.copy_sequence(np.random.default_rng(seed), length, 50)
        period = marks.index(1.0) if 1.0 in marks else length
        assert period >= 8
        assert len(ids) == len(marks) == length
        assert ids[period:] == ids[: length - period]
        assert 0 not in ids


def test_recall_lines_are_cut_as_the_tokenizer_cuts_them(data: Any) -> None:
    head, tail = data.line("KEY", data.ids(" array"), data.ids(" shape") + data.ids(" data"))
    assert head + tail == data.ids("\nKEY array: shape data\n")


class LooksUp:
    """A model that answers with what followed the last time its newest tokens stood together, ``skip`` tokens off."""

    device = torch.device("cpu")

    def __init__(self, skip: int) -> None:
        self.skip = skip

    def __call__(self, input_ids: torch.Tensor, use_cache: bool) -> Any:
        logits = torch.zeros(*input_ids.shape, TINY.vocabulary)
        row = input_ids[0].tolist()
        for end in range(len(row) - 24, len(row)):
            best = max(range(end), key=lambda at: (common_tail(row, at, end), at))
            logits[0, end, row[best + 1 + self.skip if best + 1 + self.skip < len(row) else 0]] = 1.0
        return SimpleNamespace(logits=logits)


def common_tail(row: list[int], at: int, end: int) -> int:
    count = 0
    while count <= at and count < 16 and row[at - count] == row[end - count]:
        count += 1
    return count


def test_recall_is_solved_by_looking_up_and_by_nothing_less(data: Any) -> None:
    settings = dataclasses.replace(TINY, recall_samples=8)
    assert script.recall(LooksUp(0), data, settings) == {128: 1.0}
    assert script.recall(LooksUp(1), data, settings) == {128: 0.0}


@pytest.mark.parametrize("distance", [64, 128, 192])
def test_recall_questions_have_their_distance(data: Any, distance: int) -> None:
    for seed in range(20):
        ids, count = script.question(data.for_questions, np.random.default_rng(seed), 256, distance)
        assert len(ids) == 257
        answer = ids[-count:]
        assert ids[-count - distance : len(ids) - distance] == answer
        text = data.tokenizer.decode(ids)
        key = text.rsplit("GET ", 1)[1].split(":")[0]
        assert text.count(f"KEY {key}:") == 1
        assert text.count("\nKEY ") >= 2  # at least one other key to tell it from


@pytest.mark.parametrize("words", [["--minutes", "0.0"], ["--steps", "0"], ["--context", "255"], ["--context", "260"], ["--threads", "0"]])
def test_bad_options_are_refused(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        script.arguments(words)
    assert f"{words[0]}: got {words[1]}, expected" in capsys.readouterr().err
