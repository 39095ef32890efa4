"""The heads whose attention names sources: chosen from shares by one half of the questions and
judged by the other, kept by model, and used by `Rag`."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from espnx.rag.calibration import (
    MOST_HEADS,
    AttentionHeads,
    KnownSource,
    PlantedLine,
    any_kept,
    chosen,
    is_named,
    keep,
    kept,
    model_key,
    planted,
    pool_of,
)
from espnx.rag.prompt import Wording
from tests.retrieval.common import build, toy_encoder

pytestmark = pytest.mark.usefixtures("one_thread")
KEY = model_key({"model": 1})
FOUND = AttentionHeads(((1, 3), (0, 2)), 0.75, (0.25, 0.5), 0.5, 8, 0.2)
RECALL = Wording(instructions="", sources="", question="\n\nGET", answer=":")
LINE = PlantedLine("KEY {name}: {value}", " {name}", " {value}")


def shares_of(right: list[set[tuple[int, int]]], layers: int, heads: int) -> list[torch.Tensor]:
    """Of question i and three passages, number 0 gets the most attention from the heads of
    right[i], else another."""
    generator = torch.Generator().manual_seed(3)
    found = []
    for each in right:
        share = torch.rand(layers, heads, 3, generator=generator) / 10
        for layer in range(layers):
            for head in range(heads):
                share[layer, head, 0 if (layer, head) in each else 1] += 0.3
        found.append(share)
    return found


def test_half_of_the_questions_choose_and_the_others_judge() -> None:
    """Head 2.1 is right for those that choose (even ones) and for half of the others."""
    right = [{(2, 1)}, {(0, 0), (2, 1)}, {(2, 1)}, {(0, 0)}] * 2
    found = chosen(shares_of(right, 4, 2), [0] * 8)
    assert (found.heads, found.questions) == (((2, 1),), 8)
    assert (found.right, found.chance) == (0.5, pytest.approx(1 / 3))
    assert len(found.layer_right) == 4
    assert found.mean_right == 0


def test_heads_that_are_right_together() -> None:
    """Two that are each right half of the time, strongly, and wrong by little."""
    strong, weak = [0.6, 0.1, 0.1], [0.2, 0.3, 0.1]
    odd = torch.tensor([[strong, weak], [[0.0, 0.0, 0.9]] * 2])
    even = torch.tensor([[weak, strong], [[0.0, 0.0, 0.9]] * 2])
    found = chosen([odd, odd, even, even] * 2, [0] * 8)
    assert sorted(found.heads) == [(0, 0), (0, 1)]
    assert found.right == 1
    assert found.layer_right == (1, 0)


def test_of_heads_that_are_right_alike_the_clearer_one() -> None:
    shares = [torch.tensor([[[0.3, 0.2], [0.4, 0.1]], [[0.1, 0.4], [0.2, 0.3]]])] * 4
    assert chosen(shares, [0] * 4).heads == ((0, 1),)
    assert chosen(shares, [1] * 4).heads == ((1, 0),)
    nobody = chosen([torch.zeros(2, 40, 2)] * 2, [0, 0])  # nobody looked anywhere
    assert (nobody.questions, nobody.right, nobody.mean_right) == (2, 0, 0)
    assert len(nobody.heads) <= MOST_HEADS


def test_a_source_is_named_by_more_than_any_other() -> None:
    shares = torch.tensor([[[0.3, 0.2, 0.3]], [[0.1, 0.4, 0.1]]])  # two layers of a head
    assert [bool(is_named(shares, at)) for at in range(3)] == [False, True, False]
    assert not any(bool(is_named(shares, at, [(0, 0)])) for at in range(3))
    assert is_named(shares, 1, [(1, 0)])
    assert is_named(shares, 1, [(0, 0), (1, 0)])


@pytest.mark.parametrize("count", [0, 1])
def test_too_few_questions(count: int) -> None:
    with pytest.raises(errors.InvalidInputError, match="whose source stood in the prompt"):
        chosen([torch.ones(2, 2, 2)] * count, [0] * count)


def test_each_text_has_a_line_of_its_own() -> None:
    texts = ["one\ntwo\nthree", "", "x " * 500]
    made = planted(texts, PlantedLine(), random.Random(5))
    assert len(set(made.names)) == len(set(made.texts)) == 3
    for text, new, name, value in zip(texts, made.texts, made.names, made.values, strict=True):
        lines = new.splitlines()
        lines.remove(f"The key of {name} is {value}.")
        assert lines == text.strip().splitlines()
        assert not set(made.names) & set(value.split())
    assert made == planted(texts, PlantedLine(), random.Random(5))
    strange = PlantedLine("{name}{value}{x}", "{name}", "{value}")
    assert strange.filled(strange.line, "{value}", "b") == "bb{x}"


def test_what_no_line_can_be() -> None:
    for words in ({"line": "no place"}, {"question": 3}, {"answer": "nothing"}):
        with pytest.raises(errors.InvalidInputError, match="PlantedLine"):
            PlantedLine(**words)  # type: ignore[arg-type]


def test_the_pool_is_bounded() -> None:
    texts = [f"text {i}" for i in range(300)]
    assert len(pool_of(texts, 5, random.Random(0))) == 24
    assert len(pool_of(texts, 40, random.Random(0))) == 40
    assert sorted(pool_of(["a", "a", " ", "b"], 5, random.Random(0))) == ["a", "b"]
    with pytest.raises(errors.InvalidInputError, match="passages to calibrate on"):
        pool_of(["a", "a", ""], 5, random.Random(0))


def test_heads_are_kept_by_model(tmp_path: Path) -> None:
    folder = str(tmp_path / "kv")
    assert not any_kept(folder)
    assert kept(folder, KEY) is None
    keep(folder, KEY, AttentionHeads(((0, 0),), 1.0, (1.0,), 1.0, 2, 0.5))
    keep(folder, KEY, FOUND)
    assert any_kept(folder)
    assert kept(folder, KEY) == FOUND
    assert kept(folder, model_key({"model": 2})) is None
    (path,) = Path(folder).iterdir()
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize(
    "change",
    [
        {"heads": []},
        {"heads": [[1, -1]]},
        {"heads": [[True, 0]]},
        {"heads": [[1]]},
        {"heads": 3},
        {"layer_right": [0.5, 2.0]},
        {"right": 3},
        {"mean_right": None},
        {"version": 1, "layer": 3, "right": [0.5]},
        {"model": "x"},
        {"questions": "8"},
        None,
    ],
)
def test_a_damaged_file_is_typed(tmp_path: Path, change: dict[str, Any] | None) -> None:
    keep(str(tmp_path), KEY, FOUND)
    (path,) = tmp_path.iterdir()
    said = json.loads(path.read_text())
    path.write_text("[1" if change is None else json.dumps(said | change))
    with pytest.raises(errors.FormatError, match="heads of attention"):
        kept(str(tmp_path), KEY)
    path.write_text("[]")
    with pytest.raises(errors.FormatError):
        kept(str(tmp_path), KEY)


# --- with a model ---

DOCUMENTS = [(f"d{i}", f"red green blue number {i}\nand one more line of {i}") for i in range(9)]


@pytest.fixture(scope="module")
def model() -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        espnx.demo_model(), dtype=torch.float32
    ).eval()


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(espnx.demo_model())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rag") / "store"
    build(path, DOCUMENTS, encoder=toy_encoder(), dims=None, nlist=1)
    return path


def test_rag_uses_what_was_chosen(store: Path, model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Nothing of the made-up passages stays; the next `Rag` over the directory takes the heads;
    the attention of an answer is theirs."""
    folder = tmp_path / "kv"
    words: dict[str, Any] = {"wording": RECALL, "max_new_tokens": 2, "kv": folder}
    with espnx.open(store, toy_encoder()) as index:
        with pytest.raises(errors.StateError, match="calibrate"):
            espnx.Rag(index, model, tokenizer, attention_heads="calibrated", **words)
        with espnx.Rag(index, model, tokenizer, **words) as rag:
            assert rag.ask("red", k=2).attention_heads == ()
            before = rag.ask("red", k=2).reused
            found = rag.calibrate(count=6, k=3, line=LINE)
            assert found.questions == 6
            assert len(found.layer_right) == model.config.num_hidden_layers
            after = rag.ask("red", k=2)
            assert after.attention_heads == found.heads
            assert before is not None
            assert after.reused is not None
            assert after.reused["reused"] == before["tokens"]
        assert not list(folder.glob(".calibration-*"))
        others = [(0, 0), (7, 7)]
        for given in ("calibrated", None, "mean", found.heads, others):
            with espnx.Rag(index, model, tokenizer, attention_heads=given, **words) as rag:
                answer = rag.ask("red", k=2)
            shares = [each.attention for each in answer.references]
            if given in ("calibrated", None, found.heads):
                assert answer.attention_heads == found.heads
                assert shares == [each.attention for each in after.references]
            else:
                assert answer.attention_heads == (() if given == "mean" else tuple(others))
                assert shares != [each.attention for each in after.references]
        # what an earlier version has kept is refused by name, and replaced
        (path,) = folder.glob("attention-*")
        path.write_text(json.dumps(json.loads(path.read_text()) | {"version": 1}))
        with pytest.raises(errors.FormatError, match=r"version 1.*calibrate"):
            espnx.Rag(index, model, tokenizer, **words)
        with espnx.Rag(index, model, tokenizer, attention_heads="mean", **words) as rag:
            assert rag.calibrate(count=2, k=2, line=LINE).questions == 2
        with espnx.Rag(index, model, tokenizer, attention_heads="calibrated", **words):
            pass


def test_questions_whose_source_is_known(
    store: Path, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """Those whose source is not among the hits do not count."""
    with (
        espnx.open(store, toy_encoder()) as index,
        espnx.Rag(
            index, model, tokenizer, wording=RECALL, max_new_tokens=2, kv=tmp_path / "kv"
        ) as rag,
    ):
        hits = index.search("red green", k=3).hits
        known = [
            KnownSource("red green", hits[0].id, "blue"),
            KnownSource("red green", hits[1].id),
            KnownSource("red green", "nobody"),
        ]
        assert rag.calibrate(known, k=3).questions == 2
        # the same attention by another way: `ask` watches the heads while the model speaks
        order = ["mean", [(3, 6)], [(0, 0), (7, 7)]]
        for heads in order:
            with espnx.Rag(
                index,
                model,
                tokenizer,
                wording=RECALL,
                max_new_tokens=2,
                kv=tmp_path / "kv",
                attention_heads=heads,
            ) as other:
                answer = other.ask("red green", k=3)
                shares = [each.attention or 0.0 for each in answer.references]
                most = answer.references[shares.index(max(shares))].passage
                asked = [KnownSource("red green", each.id) for each in hits]
                found = other.judge([*asked, KnownSource("red green", "nobody")], k=3)
                assert found == (*[each.id == most for each in hits], None)
        with pytest.raises(errors.InvalidInputError, match="KnownSource"):
            rag.judge(["red"], k=3)  # type: ignore[list-item]
        with pytest.raises(errors.InvalidInputError, match="2 or more"):
            rag.calibrate(known[1:], k=3)
        with pytest.raises(errors.InvalidInputError, match="KnownSource"):
            rag.calibrate([("red", 3)], k=3)  # type: ignore[list-item]
        for wrong in ({"count": 1}, {"k": 1}, {"deadline_s": 0}):
            with pytest.raises(errors.InvalidInputError):
                rag.calibrate(**wrong)  # type: ignore[arg-type]


def test_without_a_library_nothing_is_chosen(store: Path, model: Any, tokenizer: Any) -> None:
    with espnx.open(store, toy_encoder()) as index:
        for rag in (
            espnx.Rag(index, generate=lambda prompt: "x"),
            espnx.Rag(index, model, tokenizer, max_new_tokens=2),
        ):
            with rag:
                with pytest.raises(errors.StateError, match=r"attention of passages|passages of a"):
                    rag.judge([KnownSource("red", "d0")], k=2)
                with pytest.raises(errors.StateError, match="attention of passages"):
                    rag.calibrate(count=2, k=2)
        with pytest.raises(errors.StateError, match="no kv="):
            espnx.Rag(index, model, tokenizer, attention_heads="calibrated")
        for wrong in (3, [(99, 0)], [(0, 8)], [(0, True)], [], "best"):
            with pytest.raises(errors.InvalidInputError, match="heads"):
                espnx.Rag(index, model, tokenizer, attention_heads=wrong)
