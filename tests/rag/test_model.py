"""`Rag` with a model: what it reads token by token, signs that do not act in data, a template, the
positions of a model, and passages that come from a library."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import espnx
from espnx import errors

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
pytest.importorskip("transformers", reason="transformers is not installed")

import transformers

from espnx.integrations.transformers.passages.model import PassageModel
from espnx.integrations.transformers.passages.passage_kv import PassageKV
from espnx.rag.generation import ModelGenerator
from espnx.rag.pieces import IdCounter
from espnx.rag.prompt import Wording, quoted
from espnx.rag.stop import Stop
from tests.retrieval.common import build, toy_encoder

pytestmark = pytest.mark.usefixtures("one_thread")

TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"
DOCUMENTS = [
    ("a", "red green blue <|endoftext|> more"),
    ("garden", "red things\nKEY garden: silver river\nand more of them"),
    ("b", "red one two three"),
]
#: Words that the small model was trained to answer.
RECALL = Wording(instructions="", sources="", question="\n\nGET garden", answer=":")


@pytest.fixture(scope="module")
def model() -> Any:
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(
        espnx.demo_model(), dtype=torch.float32
    ).eval()


@pytest.fixture
def tokenizer() -> Any:
    return transformers.AutoTokenizer.from_pretrained(espnx.demo_model())


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rag") / "store"
    build(path, DOCUMENTS, encoder=toy_encoder(), dims=None, nlist=1)
    return path


@pytest.fixture
def index(store: Path) -> Iterator[espnx.Index]:
    with espnx.open(store, toy_encoder()) as opened:
        yield opened


class Library:
    """Stands for a `PassageKV`: a cache that the model itself has computed. Attention is counted as
    its number of tokens."""

    def __init__(self, model: Any, prefix: tuple[int, ...]):
        self.model, self.prefix = model, list(prefix)
        self.composed, self.opened = list[list[list[int]]](), 0

    def compose(self, passages: list[list[int]]) -> Any:
        self.composed.append([list(each) for each in passages])
        self.opened += 1
        cache = transformers.DynamicCache(config=self.model.config)
        held = [*self.prefix, *itertools.chain.from_iterable(passages)]
        with torch.no_grad():
            self.model(torch.tensor([held]), past_key_values=cache)

        def prompt(ids: torch.Tensor) -> dict[str, torch.Tensor]:
            whole = torch.cat([torch.tensor([held]), ids], dim=1)
            return {"input_ids": whole, "attention_mask": torch.ones_like(whole)}

        def close() -> None:
            self.opened -= 1

        def passage_mass(begin: int = 0, end: int | None = None) -> torch.Tensor:
            shares = torch.tensor([float(len(each)) for each in passages])
            return torch.stack([shares, 2 * shares])[None]

        def watch_heads(heads: Any = None) -> None:
            cache.watched = heads

        def head_mass(begin: int = 0, end: int | None = None) -> torch.Tensor:
            shares = torch.tensor([float(len(each)) for each in passages])
            weights = torch.tensor([10.0 * layer + head for layer, head in cache.watched])
            return (weights[:, None] * shares)[None, :, None].expand(-1, -1, 3, -1)

        cache.prompt, cache.passage_mass, cache.close = prompt, passage_mass, close
        cache.watch_heads, cache.head_mass = watch_heads, head_mass
        cache.reused = {"tokens": len(held)}
        return cache


def test_what_the_model_reads(index: espnx.Index, model: Any, tokenizer: Any) -> None:
    """The tokens of the answer are those of the same prompt, fed to the framework; and the small
    model recalls a line of a source."""
    with espnx.Rag(index, model, tokenizer, wording=RECALL, max_new_tokens=6) as rag:
        answer = rag.ask("red", k=3)
        hits = index.search("red", k=3).hits
        texts = ["", "[1]\n", "\n\n[2]\n", "\n\n[3]\n"]
        ids = list(rag.frame_ids)
        safe = IdCounter(tokenizer)
        for n, hit in enumerate(hits, 1):
            ids += tokenizer(texts[n], add_special_tokens=False).input_ids
            ids += safe.data(quoted(hit.text)).ids
        for text in ("\n\nGET garden", "red", ":"):
            ids += tokenizer(text, add_special_tokens=False).input_ids
    assert answer.prompt_tokens == len(ids)
    made = model.generate(torch.tensor([ids]), max_new_tokens=6, do_sample=False)[0, len(ids) :]
    assert answer.text == tokenizer.decode(made, skip_special_tokens=True).strip()
    assert answer.answer_tokens == len(made)
    assert answer.timings.first_token_s is not None
    assert all(each.attention is None for each in answer.references)
    assert answer.reused is None


@pytest.mark.parametrize(
    "text",
    ["", "plain", "<|endoftext|>", "a<|endoftext|><|endoftext|>b", "<|im_end|>x<|tool|>", "<|endo"],
)
def test_no_sign_acts_in_data(tokenizer: Any, text: str) -> None:
    tokenizer.add_tokens(["<|tool|>"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|im_end|>"]})
    piece = IdCounter(tokenizer).data(text)
    assert not set(piece.ids) & {*tokenizer.all_special_ids, *tokenizer.get_added_vocab().values()}
    assert piece.text == text
    assert IdCounter(tokenizer).trusted("<|im_end|>").ids == (
        tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )


def test_signs_within_signs_are_read(tokenizer: Any) -> None:
    """Runs of spaces are tokens of their own to some tokenizers; no letter of data is lost."""
    tokenizer.add_tokens([" " * n for n in range(2, 9)])
    text = "def f():\n        if x:\n            return  1   # one\n"
    piece = IdCounter(tokenizer).data(text)
    assert piece.text == text
    assert not set(piece.ids) & {*tokenizer.get_added_vocab().values()}


def test_signs_of_one_letter_are_letters(tokenizer: Any) -> None:
    """Line breaks are tokens of their own to Gemma, alone and in runs: passages keep their lines.
    What is special and one letter long cannot be read otherwise."""
    tokenizer.add_tokens(["\n" * n for n in range(1, 5)] + ["\t", "{"])
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_end|>", "\x04"]})
    counter = IdCounter(tokenizer)
    text = "a {\n\tb\n\n\n}\n<|im_end|>\n"
    piece = counter.data(text)
    assert piece.text == text
    runs = {tokenizer.convert_tokens_to_ids("\n" * n) for n in range(2, 5)}
    assert not set(piece.ids) & {*runs, *tokenizer.all_special_ids}
    assert counter.data("a\x04b").text == "ab"
    assert counter.data("\n").ids == counter.trusted("\n").ids


@pytest.mark.parametrize("template", [TEMPLATE, NO_SYSTEM + TEMPLATE])
@pytest.mark.parametrize("prefix", ["", "Be brief."])
def test_a_chat_template_is_applied(model: Any, tokenizer: Any, template: str, prefix: str) -> None:
    tokenizer.chat_template = template
    frame = ModelGenerator(model, tokenizer, Wording(), prefix, 8).frame
    turns = [
        {"role": "user", "content": f"{Wording().instructions}\n\nSources:\n\nS\n\nQuestion: Q"}
    ]
    if prefix and template == TEMPLATE:
        turns.insert(0, {"role": "system", "content": prefix})
    elif prefix:
        turns[0]["content"] = f"{prefix}\n\n{turns[0]['content']}"
    wanted = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert f"{frame.head.text}S{frame.middle.text}Q{frame.end.text}" == wanted


@pytest.mark.parametrize("template", ["nothing", "{{ messages[0].content }}" * 2])
def test_a_template_that_drops_the_user_is_refused(
    model: Any, tokenizer: Any, template: str
) -> None:
    tokenizer.chat_template = template
    with pytest.raises(errors.InvalidInputError, match="chat template"):
        ModelGenerator(model, tokenizer, Wording(), "", 8)


@pytest.mark.parametrize("heads", [None, [(0, 1)], [(1, 1), (0, 3)]])
def test_passages_come_from_a_library(
    index: espnx.Index, model: Any, tokenizer: Any, heads: list[tuple[int, int]] | None
) -> None:
    """The same tokens as without one; labels are passages of their own, so that a passage's tokens
    are the same whatever its number is."""
    options: dict[str, Any] = {"wording": RECALL, "max_new_tokens": 6}
    with espnx.Rag(index, model, tokenizer, **options) as rag:
        plain = rag.ask("red", k=3)
        library = Library(model, rag.frame_ids)
    with espnx.Rag(index, model, tokenizer, kv=library, attention_heads=heads, **options) as rag:
        composed = rag.ask("red", k=3)
        first = rag.ask("red", k=1)
        assert rag.ask("red", k=0).reused is None
    assert composed.text == plain.text
    assert composed.prompt_tokens == plain.prompt_tokens
    assert library.opened == 0
    assert library.composed[1] == library.composed[0][:2]
    assert first.references[0].attention == composed.references[0].attention
    sizes = [len(each) for each in library.composed[0][1::2]]
    # the mean of both layers, or that of the heads
    factor = 1.5 if heads is None else sum(10 * a + b for a, b in heads) / len(heads)
    assert composed.attention_heads == tuple(heads or ())
    assert [each.attention for each in composed.references] == [factor * n for n in sizes]
    assert composed.reused == {"tokens": sum(map(len, library.composed[0])) + len(library.prefix)}


def test_passages_come_from_ssd(
    index: espnx.Index, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """A `PassageKV`: computed for the first question, read for the second, and for one over fewer
    passages, which stand elsewhere then."""
    with espnx.Rag(
        index, model, tokenizer, kv=tmp_path / "kv", wording=RECALL, max_new_tokens=6
    ) as rag:
        first, second, fewer = (rag.ask("red", k=k) for k in (3, 3, 1))
    assert second.text == first.text
    assert first.reused is not None
    assert second.reused is not None
    assert fewer.reused is not None
    assert first.reused["computed"] == first.reused["tokens"] > 0
    assert second.reused["reused"] == second.reused["tokens"] == first.reused["tokens"]
    assert second.reused["computed"] == fewer.reused["computed"] == 0
    shares = {each.document: each.attention for each in second.references}
    assert [each.attention for each in first.references] == pytest.approx(list(shares.values()))
    assert max(shares, key=lambda each: shares[each] or 0.0) == "garden"
    assert 0 < sum(share or 0.0 for share in shares.values()) < 1


@pytest.mark.parametrize("options", [{"repair": 3}, {"blend": 0.3}])
def test_tokens_are_computed_anew(
    index: espnx.Index, model: Any, tokenizer: Any, tmp_path: Path, options: dict[str, Any]
) -> None:
    """As `PassageKV.compose` does it: the answer is that behind the same passages, composed so."""
    words: dict[str, Any] = {"wording": RECALL, "max_new_tokens": 6}
    folder = tmp_path / "kv"
    with espnx.Rag(index, model, tokenizer, kv=folder, **words, **options) as rag:
        answer = rag.ask("red", k=3)
        ids = rag.frame_ids
    assert answer.reused is not None
    assert answer.reused["repaired"] > 0
    assert all(0 < (each.attention or 0) < 1 for each in answer.references)
    shown = list[Any]()

    class Watched(espnx.PassageKV):
        def compose(self, passages: Any, *, blend: Any = None, **more: Any) -> Any:
            shown.append((passages, more.get("repair"), blend))
            return super().compose(passages, blend=blend, **more)

    with Watched(model, folder, prefix=ids, tokenizer=tokenizer) as kv:
        if "blend" in options:
            with espnx.Rag(index, model, tokenizer, kv=kv, **words, **options) as rag:
                assert rag.ask("red", k=3).text == answer.text
            assert [each[1:] for each in shown] == [(None, options["blend"])]
        else:  # its compose does not say that it takes repair
            with pytest.raises(errors.InvalidInputError, match="takes repair"):
                espnx.Rag(index, model, tokenizer, kv=kv, **words, **options)
    for wrong, match in (({"repair": -1}, "0 or more"), ({"repair": 2, "blend": 0.5}, "one of")):
        with pytest.raises(errors.InvalidInputError, match=match):
            espnx.Rag(index, model, tokenizer, kv=folder, **wrong)
    with pytest.raises(errors.InvalidInputError, match="no kv="):
        espnx.Rag(index, model, tokenizer, **options)
    with pytest.raises(errors.InvalidInputError, match="what answers"):
        espnx.Rag(index, generate=lambda prompt: "x", **options)


def test_a_deadline_ends_composing(
    index: espnx.Index, model: Any, tokenizer: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has passed when the second passage is to be computed: what is whole by then stays, and
    the next question goes on from there."""
    computed, original = list[int](), PassageModel.run
    left_s = Stop.left_s

    def counted(self: Any, cache: Any, ids: Any, positions: Any = None) -> None:
        original(self, cache, ids, positions)
        computed.append(len(ids))

    def left(self: Stop, most: float) -> float:
        return 0.0 if len(computed) == 2 else left_s(self, most)

    monkeypatch.setattr(PassageModel, "run", counted)
    monkeypatch.setattr(Stop, "left_s", left)
    with espnx.Rag(
        index, model, tokenizer, kv=tmp_path / "kv", wording=RECALL, max_new_tokens=2
    ) as rag:
        with pytest.raises(errors.DeadlineExceededError):
            rag.ask("red", k=3, deadline_s=600)
        assert len(computed) == 2
        monkeypatch.setattr(Stop, "left_s", left_s)
        reused = rag.ask("red", k=3).reused
        assert reused is not None
        assert reused["reused"] == sum(computed[:2])
        assert reused["computed"] == reused["tokens"] - sum(computed[:2])


def test_a_passage_that_is_a_book(model: Any, tokenizer: Any, tmp_path: Path) -> None:
    """Of 100,000 tokens as many are read as one passage may have; beside it stands another."""
    documents = [("book", "red green blue one " * 25_000), ("b", "red one two three"), ("c", " ")]
    inner = toy_encoder()
    encoder = espnx.FunctionEncoder(  # of the first words, as encoders cut
        lambda texts: inner.encode_documents([" ".join(each.split()[:32]) for each in texts]),
        "toy@first",
        d_cls=inner.d_cls,
        dim=inner.dim,
    )
    build(tmp_path / "store", documents, encoder=encoder, dims=None, nlist=1)
    with (
        espnx.open(tmp_path / "store", encoder) as index,
        espnx.Rag(
            index,
            model,
            tokenizer,
            kv=tmp_path / "kv",
            wording=RECALL,
            max_new_tokens=2,
            passage_tokens=64,
        ) as rag,
    ):
        answer = rag.ask("red", k=3)
        assert {each.passage: each.is_cut for each in answer.references} == {
            "book": True,
            "b": False,
        }
        assert [(each.passage, each.why) for each in answer.left_out] == [("c", "empty")]
        assert answer.prompt_tokens < 200
        assert rag.check(answer) == {1: "unchanged", 2: "unchanged"}


def test_reads_begin_while_the_search_runs(
    index: espnx.Index, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    """What is likely is what the prompt is composed of in the end; no thread is left; and who
    listens to the search hears it, too."""
    told, wanted = list[Any](), list[list[list[int]]]()

    class Early(Library):
        def prefetch(self) -> Any:
            return self

        def want(self, passages: list[list[int]]) -> None:
            wanted.append([list(each) for each in passages])

        def cancel(self) -> None:
            self.cancelled = True

        def compose(self, passages: list[list[int]], prefetch: Any = None) -> Any:
            assert prefetch is self
            return super().compose(passages)

    options: Any = {"wording": RECALL, "max_new_tokens": 3}
    with espnx.Rag(index, model, tokenizer, **options) as plain:
        library = Early(model, plain.frame_ids)
    before = threading.active_count()
    with espnx.Rag(index, model, tokenizer, kv=library, **options) as rag:
        answer = rag.ask("red", k=3, search={"on_candidates": told.append})
        assert len(answer.references) == 3
        assert told[-1].is_ranked
        assert wanted[-1] == library.composed[0]
        assert threading.active_count() == before
        assert library.cancelled
        library.want = lambda passages: 1 / 0  # type: ignore[assignment]
        with pytest.raises(ZeroDivisionError):
            rag.ask("red", k=3)
        assert threading.active_count() == before
        assert rag.ask("red", k=0).references == ()
    with espnx.Rag(index, model, tokenizer, kv=tmp_path / "kv", **options) as rag:
        rag.ask("red", k=3)
        reused = rag.ask("red", k=2).reused
        assert reused is not None
        assert reused["computed"] == 0
        assert reused["wasted"] <= reused["prefetched"] / 2
        assert reused["hidden"] <= reused["prefetched"]


@pytest.mark.parametrize(
    "options",
    [
        {"max_new_tokens": 3},
        {"streamer": None},
        {"past_key_values": None},
        {"return_dict_in_generate": True},
        {"num_return_sequences": 2, "do_sample": True},
    ],
)
def test_options_that_a_rag_has_itself(
    index: espnx.Index, model: Any, tokenizer: Any, options: dict[str, Any]
) -> None:
    with pytest.raises(errors.InvalidInputError, match=f"generate_options: {max(options)}"):
        espnx.Rag(index, model, tokenizer, generate_options=options)


def test_heads_need_a_library(index: espnx.Index, model: Any, tokenizer: Any) -> None:
    with pytest.raises(errors.InvalidInputError, match="attention_heads"):
        espnx.Rag(index, model, tokenizer, attention_heads=[(0, 0)])


def test_nobody_knows_which_beam_looked_where(
    index: espnx.Index, model: Any, tokenizer: Any, tmp_path: Path
) -> None:
    beams = {"num_beams": 2, "eos_token_id": torch.tensor([0, 5])}
    for options, is_known in ((beams, False), ({}, True)):
        with espnx.Rag(
            index, model, tokenizer, kv=tmp_path / "kv", max_new_tokens=4, generate_options=options
        ) as rag:
            found = rag.ask("what does the log hold?", k=2).references
            assert found
            assert all((each.attention is not None) == is_known for each in found)


def test_tokens_beyond_the_vocabulary(model: Any, tmp_path: Path) -> None:
    most = len(model.get_input_embeddings().weight)
    with PassageKV(model, tmp_path / "kv") as kv:
        for wrong in ([most], [-1], torch.tensor([0, 1 << 40])):
            with pytest.raises(errors.InvalidInputError, match="token_ids"):
                kv.add(wrong, key="x")
            with pytest.raises(errors.InvalidInputError, match="a passage"):
                kv.compose([wrong])
        with pytest.raises(errors.InvalidInputError, match="x"):
            kv.compose(["x"])
        kv.add([most - 1])


def test_positions_bound_the_prompt(index: espnx.Index, model: Any, tokenizer: Any) -> None:
    most = model.config.max_position_embeddings
    for options in ({"max_new_tokens": most}, {"prompt_tokens": most}):
        with pytest.raises(errors.InvalidInputError, match="positions"):
            espnx.Rag(index, model, tokenizer, **options)
    with espnx.Rag(index, model, tokenizer, max_new_tokens=4, wording=RECALL) as rag:
        with pytest.raises(errors.InvalidInputError, match="without any source"):
            rag.ask("red " * most)
        # the question leaves room for little
        fitting = IdCounter(tokenizer).data("red " * 1000).size // 1000
        answer = rag.ask("red " * ((most - 4 - 40) // fitting), k=3)
    assert answer.prompt_tokens <= most - 4
    assert answer.left_out or any(each.is_cut for each in answer.references)


def test_a_deadline_ends_a_model(index: espnx.Index, model: Any, tokenizer: Any) -> None:
    begun = time.perf_counter()
    with (
        espnx.Rag(index, model, tokenizer, max_new_tokens=1500, wording=RECALL) as rag,
        pytest.raises(errors.DeadlineExceededError),
    ):
        rag.ask("red", deadline_s=0.3)
    assert time.perf_counter() - begun < 10
