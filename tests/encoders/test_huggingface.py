"""Encoder folders through transformers, with a two-layer BERT of random weights, and MiniLM's own
forward pass against theirs."""

from __future__ import annotations

import json
import shutil
import sys

import pytest
import torch
from torch.nn.functional import normalize

from espnx.errors import FormatError, InvalidInputError, MissingDependencyError

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra [dev])"
)

from espnx.encoders import load_encoder  # noqa: E402
from espnx.encoders.huggingface import HuggingFaceEncoder  # noqa: E402
from espnx.retrieval.encoder import Encoder  # noqa: E402

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "[", "]", "sep", *"abcdefghij"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("tiny bert")
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=len(WORDS),
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=32,
        max_position_embeddings=12,
    )
    transformers.BertModel(config).save_pretrained(path)
    (path / "vocab.txt").write_text("\n".join(WORDS))
    transformers.BertTokenizerFast(str(path / "vocab.txt"), model_max_length=12).save_pretrained(
        path
    )
    return path


@pytest.fixture
def copy(folder, tmp_path):
    return shutil.copytree(folder, tmp_path / "copy")


def by_hand(encoder, *windows):
    """Hidden states of each window, ``[CLS]`` and ``[SEP]`` included, unpadded."""
    model = transformers.AutoModel.from_pretrained(encoder.folder).eval()
    with torch.no_grad():
        return [
            model(
                input_ids=torch.tensor([[2, *(WORDS.index(word) for word in window.split()), 3]])
            ).last_hidden_state[0]
            for window in windows
        ]


@pytest.mark.parametrize("pooling", ["mean", "cls"])
def test_against_the_model_by_hand(folder, pooling):
    encoder = HuggingFaceEncoder(folder, pooling=pooling, dtype="fp32")
    assert isinstance(encoder, Encoder)
    assert (encoder.d_cls, encoder.dim, encoder.window_tokens) == (16, 16, 12)
    texts = ["a b c", "", "j"]
    for states, result in zip(
        by_hand(encoder, *texts), encoder.encode_documents(texts), strict=True
    ):
        torch.testing.assert_close(
            result.tokens, normalize(states[1:-1], dim=-1), atol=1e-6, rtol=0
        )
        pooled = states.mean(0) if pooling == "mean" else states[0]
        torch.testing.assert_close(result.cls, normalize(pooled, dim=0), atol=1e-6, rtol=0)
    assert encoder.encode_queries([]) == []


def test_long_text_goes_in_windows(folder):
    encoder = HuggingFaceEncoder(folder, dtype="fp32")
    first, second = by_hand(encoder, "a b c d e f", "g h i j a b c")  # 13 wordpieces, room for 10
    result = encoder.encode_documents(["a b c d e f g h i j a b c"])[0]
    torch.testing.assert_close(
        result.tokens, normalize(torch.cat([first[1:-1], second[1:-1]]), dim=-1), atol=1e-6, rtol=0
    )
    torch.testing.assert_close(
        result.cls, normalize(first.sum(0) + second.sum(0), dim=0), atol=1e-6, rtol=0
    )


def test_special_tokens_in_a_text_are_text(folder):
    encoder = HuggingFaceEncoder(folder, dtype="fp32")
    assert list(encoder.wordpieces(["a [SEP] b"])) == [
        [WORDS.index(word) for word in ("a", "[", "sep", "]", "b")]
    ]


def test_roberta_numbers_its_positions_from_two(copy):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 32,
    }
    config = transformers.RobertaConfig(
        vocab_size=len(WORDS), max_position_embeddings=10, pad_token_id=1, **sizes
    )
    transformers.RobertaModel(config).save_pretrained(copy)
    encoder = HuggingFaceEncoder(copy, dtype="fp32")
    assert encoder.window_tokens == 8
    # one position more would be out of the model's table
    assert len(encoder.encode_documents(["a b c d e f g h i"])[0].tokens) == 9
    alone = encoder.encode_documents(["a b c d e f"])[0]
    padded = encoder.encode_documents(["a b", "a b c d e f"])
    torch.testing.assert_close(padded[1].tokens, alone.tokens, atol=1e-6, rtol=0)
    torch.testing.assert_close(
        padded[0].tokens, encoder.encode_documents(["a b"])[0].tokens, atol=1e-6, rtol=0
    )


def test_name_is_of_content_and_pooling(folder, copy):
    mean = load_encoder(str(folder)).name
    assert mean.startswith("hf-bert@")
    assert mean.endswith("/mean")
    assert load_encoder(str(copy)).name == mean
    assert HuggingFaceEncoder(copy, pooling="cls").name == mean.replace("/mean", "/cls")
    weights = (copy / "model.safetensors").read_bytes()
    (copy / "model.safetensors").write_bytes(weights[:-1] + bytes([weights[-1] ^ 1]))
    assert load_encoder(str(copy)).name != mean


def test_bf16(folder):
    exact, near = (
        HuggingFaceEncoder(folder, dtype=dtype).encode_documents(["a b c d"])[0]
        for dtype in ("fp32", "bf16")
    )
    assert near.tokens.dtype == torch.float32
    assert not torch.equal(exact.tokens, near.tokens)
    # four additions of unit-sized values to 8 bits
    torch.testing.assert_close(near.tokens, exact.tokens, atol=4 * 2**-8, rtol=0)


@pytest.mark.parametrize(
    "damage", ["truncated", "weight missing", "config", "no config", "no weights", "pickle only"]
)
def test_damaged_folders(copy, damage):
    weights = copy / "model.safetensors"
    if damage == "truncated":
        weights.write_bytes(weights.read_bytes()[:-100])
    elif damage == "weight missing":
        from safetensors.torch import load_file, save_file

        tensors = load_file(weights)
        del tensors["encoder.layer.1.output.dense.weight"]
        save_file(tensors, weights, metadata={"format": "pt"})
    elif damage == "config":
        (copy / "config.json").write_text("{")
    elif damage == "no config":
        (copy / "config.json").unlink()
    else:
        weights.unlink()
        if damage == "pickle only":
            torch.save({}, copy / "pytorch_model.bin")
    expected = (
        FormatError if damage in ("truncated", "weight missing", "config") else InvalidInputError
    )
    with pytest.raises(expected, match="copy"):
        HuggingFaceEncoder(copy)


def test_tokenizer_of_a_larger_model(copy):
    tokenizer = transformers.AutoTokenizer.from_pretrained(copy)
    tokenizer.add_tokens(["zeta"])
    tokenizer.save_pretrained(copy)
    encoder = HuggingFaceEncoder(copy)
    assert len(encoder.encode_documents(["a"])[0].tokens) == 1
    with pytest.raises(InvalidInputError, match=f"token id {len(WORDS)}"):
        encoder.encode_documents(["a zeta"])


def test_encoder_decoder_is_refused(copy):
    (copy / "config.json").write_text(json.dumps({"model_type": "t5"}))
    with pytest.raises(InvalidInputError, match="type t5"):
        HuggingFaceEncoder(copy)


@pytest.mark.parametrize(
    "change",
    [
        {"pooling": "max"},
        {"window_tokens": 2},
        {"window_tokens": 13},
        {"batch_tokens": 0},
        {"dtype": "x"},
    ],
)
def test_wrong_arguments(folder, change):
    with pytest.raises(InvalidInputError):
        HuggingFaceEncoder(folder, **change)


def test_transformers_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        HuggingFaceEncoder(folder)


def test_minilm_forward_equals_transformers(minilm):
    from espnx.encoders.minilm import WHEEL

    theirs = HuggingFaceEncoder(WHEEL.folder(), dtype="fp32", window_tokens=256)
    ids = torch.randint(1000, 30000, (3, 40), generator=torch.Generator().manual_seed(0))
    mask = torch.arange(40) < torch.tensor([[40], [17], [2]])
    with torch.inference_mode():
        assert (theirs.hidden(ids, mask) - minilm.hidden(ids, mask))[mask].abs().max() < 1e-5
        assert (theirs.hidden(ids, None) - minilm.hidden(ids, None)).abs().max() < 1e-5
    texts = [
        "",
        "Hello, world!",
        "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f600 [SEP]",
        "x = numpy.linalg.svd(a)\n\n    >>> y " * 20,
    ]
    for a, b in zip(theirs.encode_documents(texts), minilm.encode_documents(texts), strict=True):
        torch.testing.assert_close(a.tokens, b.tokens, atol=1e-5, rtol=0)
        torch.testing.assert_close(a.cls, b.cls, atol=1e-5, rtol=0)
