"""``espnx rag ask``, ``espnx rag calibrate`` and ``espnx plan rag`` from the outside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import espnx

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
pytest.importorskip("transformers", reason="transformers is not installed (extra [models])")

from tests.cli.documents import strict_json
from tests.cli.test_index import run
from tests.retrieval.common import build, toy_encoder

TEXTS = [("a#0-14", "red green blue"), ("b", "one two three"), (3, "red and one"), ("empty", "")]


@pytest.fixture(autouse=True)
def encoders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("espnx.encoders.load_encoder", lambda name, **options: toy_encoder())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rag") / "store"
    build(path, TEXTS, encoder=toy_encoder(), dims=None, nlist=1)
    return path


def ask(store: Path, *more: Any) -> list[Any]:
    return ["rag", "ask", store, "red green", "--model", "demo", "--encoder", "toy",
            "--max-new-tokens", 3, *more]  # fmt: skip


def test_an_answer_and_its_sources(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = run(capsys, *ask(store, "-k", 4))
    assert code == 0, err
    lines = out.splitlines()
    assert "a 0-14" in out
    assert any(line.startswith("[1] ") for line in lines)
    assert "not in the prompt (empty): empty" in lines
    assert "ended by the limit" in out
    document = strict_json(run(capsys, *ask(store, "-k", 4, "--json", "-"))[1])
    assert [each["number"] for each in document["references"]] == [1, 2, 3]
    assert document["references"][0]["passage"] == "a#0-14"
    assert document["answer_tokens"] == 3
    alone = strict_json(run(capsys, *ask(store, "-k", 0, "--json", "-"))[1])
    assert alone["references"] == []


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["-k", "-1"], "k; got -1"),
        (["--prompt-tokens", "9000"], "prompt_tokens"),
        (["--deadline", "-1"], "deadline_s"),
        (["--library", "1GiB"], "--kv"),
        (["--repair", "2"], "--kv"),
        (["--blend", "0.2"], "--kv"),
        (["--attention-heads", "mean"], "--kv"),
        (["--kv", "kv", "--attention-heads", "3"], "such as 3.1,5.0"),
        (["--model", "/nowhere/at/all"], "no such folder"),
    ],
)
def test_what_it_refuses(
    store: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, out, err = run(capsys, *ask(store, *words))
    assert (code, out) == (2, "")
    assert said in err


def test_the_heads_of_attention(
    store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Chosen, kept beside the passages, and taken by the next question."""
    kv = ["--kv", tmp_path / "kv"]
    code, _, err = run(capsys, *ask(store, *kv, "--attention-heads", "calibrated"))
    assert code == 1
    assert "espnx rag calibrate" in err
    words = ["rag", "calibrate", store, "--model", "demo", "--encoder", "toy", *kv]
    code, out, err = run(capsys, *words, "--count", 2, "-k", 2)
    assert code == 0, err
    assert "kept in" in out
    found = strict_json(run(capsys, *words, "--count", 4, "-k", 2, "--json", "-")[1])
    assert (len(found["layer_right"]), found["questions"], found["chance"]) == (8, 4, 0.5)
    answer = strict_json(run(capsys, *ask(store, *kv, "-k", 2, "--json", "-"))[1])
    assert answer["attention_heads"] == found["heads"]
    given = [*kv, "-k", 2, "--attention-heads", "0.1, 7.3", "--repair", 2, "--json", "-"]
    answer = strict_json(run(capsys, *ask(store, *given))[1])
    assert answer["attention_heads"] == [[0, 1], [7, 3]]
    assert answer["reused"]["repaired"] == 6  # of two labels and a passage: the first lacks nothing
    for wrong, said in ((["--line", "x"], "PlantedLine.line"), (["--count", 1], "count")):
        code, _, err = run(capsys, *words, *wrong)
        assert code == 2
        assert said in err


def test_a_plan_of_passages(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "rag", "--model", espnx.demo_model(), "--passages", 1000]
    code, _, err = run(capsys, *words, "--library", "100MiB", "--flops", "225e9")
    assert code == 0, err
    document = strict_json(
        run(capsys, *words, "--library", "100MiB", "--flops", "225e9", "--json", "-")[1]
    )
    # 8 layers x 2 heads x (32 + 32) values of 2 bytes
    assert document["sizes"] == {
        "bytes_per_token": 2048,
        "bytes_per_passage": 2048 * 512,
        "bytes_of_all": 2048 * 512 * 1000,
    }
    harmonic = [sum(1 / rank for rank in range(1, n + 1)) for n in (100, 1000)]
    [rate] = document["hit_rate"]
    assert rate["passages"] == 100
    assert rate["hit_rate"] == pytest.approx(harmonic[0] / harmonic[1])
    assert document["break_even"]["here"] is None
    assert document["break_even"]["given"] == pytest.approx(
        2048 * 512 * 225e9 / document["operations_per_passage"]
    )
    assert document["assumed"] == ["passage-tokens", "popularity"]
    even = strict_json(
        run(capsys, *words, "--popularity", "zipf:0", "--passage-tokens", 16, "--json", "-")[1]
    )
    assert [each["hit_rate"] for each in even["hit_rate"]] == pytest.approx([0.001, 0.01, 0.1, 1])
    assert "n/a" in run(capsys, *words)[1]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["plan", "rag", "--model", "demo"], "--passages"),
        (["plan", "rag", "--passages", "5"], "nothing to plan"),
        (["plan", "--model", "demo", "--passages", "5"], "no rag"),
        (["plan", "rag", "--model", "demo", "--passages", "0"], "--passages"),
        (["plan", "rag", "--model", "demo", "--passages", "9", "--popularity", "x"], "zipf:S"),
        (["plan", "rag", "--model", "demo", "--passages", "9", "--flops", "0"], "--flops"),
        (["plan", "rag", "--model", "demo", "--passages", "9", "--library", "x"], "size"),
    ],
)
def test_plans_that_are_refused(
    capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    code, out, err = run(capsys, *words)
    assert (code, out) == (2, ""), err
    assert said in err
