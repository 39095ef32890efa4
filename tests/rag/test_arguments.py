"""Arguments of the wrong kind: each is refused by a typed error, and nothing was looked for,
computed or kept by then."""

from __future__ import annotations

import asyncio
import inspect
import math
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")

from espnx.rag.calibration import KnownSource, PlantedLine
from espnx.rag.prompt import Wording
from tests.retrieval.common import build, toy_encoder

DOCUMENTS = [("a", "red green blue"), ("b", "red one two")]
NO_TEXT = [None, 5, 1.5, True, b"red", ["red"], {}, torch.zeros(2), "", "  ", "red \ud800"]
NO_COUNT = [None, "5", 1.5, True, -1, math.nan, [3], 1 << 70, torch.tensor(3)]
NO_SECONDS = ["5", True, 0, -1.0, math.nan, math.inf, [3], 10**400]
NO_SEARCH = [
    5,
    "bm25",
    ["bm25"],
    {"first_stages": "bm25"},
    {"k": 3},
    {5: 3},
    {"candidates": "all"},
    {"include": "a"},
    {"include": [1.5]},
    {"deadline_s": 0},
    {"on_candidates": 5},
]
KNOWN = [KnownSource("red", "a")]
NO_KNOWN = [5, "red", b"red", {"red": "a"}, ["red"], [("red", "a")], [None], [*KNOWN, 5]]


def _name(given: dict[str, Any]) -> str:
    """Alike in every process: addresses are not."""
    ((name, value),) = list(given.items())[:1]
    return f"{name}-{getattr(value, '__name__', repr(value))}"[:40]


NO_FUNCTION = [5, "say", [len], asyncio.sleep]


def cases() -> Iterator[tuple[str, dict[str, Any]]]:
    """(method, arguments), with one of them wrong."""
    for name in ("ask", "aask"):
        yield from ((name, {"question": each}) for each in NO_TEXT)
        yield from ((name, {"question": "red", "k": each}) for each in NO_COUNT)
    for name, given in (
        ("ask", {"question": "red"}),
        ("aask", {"question": "red"}),
        ("judge", {"questions": KNOWN}),
        ("calibrate", {}),
    ):
        yield from ((name, given | {"deadline_s": each}) for each in NO_SECONDS)
        yield from ((name, given | {"search": each}) for each in NO_SEARCH)
    yield from (("judge", {"questions": each}) for each in [None, *NO_KNOWN])
    yield from (("calibrate", {"questions": each}) for each in NO_KNOWN)
    for each in [*NO_COUNT, 1, 65]:
        yield "judge", {"questions": KNOWN, "k": each}
        yield "calibrate", {"k": each}
    yield from (("calibrate", {"count": each}) for each in [*NO_COUNT, 1])
    yield from (("calibrate", {"line": each}) for each in [5, "KEY {name}", {}, True, PlantedLine])
    yield from (("calibrate", {"seed": each}) for each in [None, "x", 1.5, True, [1], -1])
    yield from (("check", {"answer": each}) for each in [None, 5, "red", {}, [], espnx.Answer])


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rag") / "store"
    build(path, DOCUMENTS, encoder=toy_encoder(), dims=None, nlist=1)
    return path


def refused(call: Callable[[], Any]) -> errors.InvalidInputError:
    with pytest.raises(errors.InvalidInputError) as caught:
        found = call()
        if inspect.isawaitable(found):
            asyncio.run(found)  # type: ignore[arg-type]
    error = caught.value
    assert error.got is not None, error
    assert error.expected is not None, error
    assert len(str(error)) < 1000
    return error


def test_wrong_arguments_of_methods(store: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = list[str]()
    with espnx.open(store, toy_encoder()) as index:
        search = index.search
        with espnx.Rag(index, generate=lambda prompt: asked.append(prompt) or "Red [1].") as rag:
            answer = rag.ask("red", k=1)
            asked.clear()
            monkeypatch.setattr(index, "search", lambda *_, **__: pytest.fail("searched"))
            monkeypatch.setattr(index, "get", lambda *_, **__: pytest.fail("read"))
            for name, given in cases():
                try:
                    refused(lambda n=name, g=given: getattr(rag, n)(**g))
                except BaseException:
                    print(name, given)
                    raise
            assert not asked
            monkeypatch.undo()
            assert index.search == search
            assert rag.ask("red", k=1).text == answer.text == "Red [1]."
            # what is right is taken, a mapping's iterators too
            for each in ({"include": iter(["a"])}, {"prefetch_step": 0}, {"candidates": 1}, {}):
                assert rag.ask("red", k=1, search=each).references[0].passage in ("a", "b")
            assert rag.ask("red", k=2**31 - 1).text == "Red [1]."
            with pytest.raises(errors.StateError, match="generate="):
                rag.judge(KNOWN)


@pytest.mark.parametrize(
    "given",
    [
        *({"index": each} for each in (None, 5, b"store", ["store"], "a\0b")),
        *({"generate": each} for each in NO_FUNCTION),
        *({"tokenizer": each} for each in (5, "gpt2", [])),
        *({"prefix": each} for each in (None, 5, b"", ["x"], "\ud800")),
        *({"wording": each} for each in ("x", {}, "", 5, Wording)),
        *({"max_new_tokens": each} for each in (*NO_COUNT, 0)),
        *({"passage_tokens": each} for each in (*NO_COUNT, 0)),
        *({"prompt_tokens": each} for each in (*NO_COUNT[1:], 0)),
        *({name: 1} for name in ("kv", "library_bytes", "repair", "attention_heads")),
        {"generate_options": {"do_sample": True}},
        {"generate": None},
    ],
    ids=_name,
)
def test_wrong_arguments_of_a_function(store: Path, given: dict[str, Any]) -> None:
    options = {"index": store, "generate": lambda prompt: "x", "encoder": toy_encoder()} | given
    refused(lambda: espnx.Rag(**options))


class Config:
    """Of a model with four positions."""

    max_position_embeddings, num_hidden_layers, num_attention_heads = 4096, 2, 2

    def get_text_config(self, decoder: bool = False) -> Config:
        return self


class Model:
    """What looks like a model, and must not be asked."""

    config, device = Config(), torch.device("cpu")

    def generate(self, **_: Any) -> None:
        pytest.fail("the model was asked")


class Tokenizer:
    """Reads letters."""

    chat_template, all_special_tokens, all_special_ids = None, (), ()

    def get_added_vocab(self) -> dict[str, int]:
        return {}

    def __call__(self, text: str, **_: Any) -> Any:
        return type("Encoding", (), {"input_ids": [ord(each) for each in text]})

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    "given",
    [
        *({"model": each} for each in (5, "demo", Tokenizer(), Model)),
        *({"tokenizer": each} for each in (None, 5, "demo", len, Model())),
        *({"generate_options": each} for each in (5, "greedy", [1], {5: 1}, {"max_length": 3})),
        *({"generate_options": {"num_return_sequences": each}} for each in (2, "1", None)),
        *({"attention_heads": each} for each in (5, "all", [], [5], [(0,)], [(0, 9)], [(-1, 0)])),
        *({"attention_heads": each} for each in ([(True, 0)], [(0.0, 0)], {0: 0}, [(0, 0)])),
        *({"repair": each} for each in ("1", 1.5, -1, True, math.nan, [1], 1)),
        *({"blend": each} for each in ("1", -0.1, 1.1, True, math.nan, [0.5], 0.5)),
        *({"library_bytes": each} for each in (5, "1GiB")),
        {"repair": 1, "blend": 0.5},
    ],
    ids=_name,
)
def test_wrong_arguments_of_a_model(store: Path, given: dict[str, Any]) -> None:
    options = {"model": Model(), "tokenizer": Tokenizer(), "encoder": toy_encoder()} | given
    refused(lambda: espnx.Rag(store, **options))


def test_what_is_right_is_taken(store: Path) -> None:
    with espnx.Rag(store, Model(), Tokenizer(), encoder=toy_encoder(), wording=None) as rag:
        assert rag.frame_ids[:3] == tuple(map(ord, "Ans"))


@pytest.mark.parametrize(
    "make",
    [
        *(lambda each=each: KnownSource(each, "a") for each in NO_TEXT),
        *(lambda each=each: KnownSource("red", each) for each in (None, 1.5, True, b"a", 1 << 70)),
        *(lambda each=each: KnownSource("red", "a", each) for each in (5, b"x", [], "\ud800")),
        *(lambda each=each: PlantedLine(line=each) for each in (None, 5, "x", "{name}\ud800")),
        *(lambda each=each: PlantedLine(answer=each) for each in (None, 5, "x", [])),
        *(lambda each=each: Wording(answer=each) for each in (None, 5, b"x", [], "\ud800")),
    ],
)
def test_wrong_parts(make: Callable[[], Any]) -> None:
    refused(make)
