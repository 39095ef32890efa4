"""Folders of one vector a text against plain transformers and torch, and, where it is installed,
against sentence-transformers itself."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest
import torch

import espnx
from espnx import graph
from espnx.encoders.huggingface import HuggingFaceEncoder
from espnx.encoders.sentence_transformer import SentenceTransformerEncoder
from espnx.errors import FormatError, InvalidInputError
from espnx.retrieval.encoder import Encoder
from tests.encoders.tiny import DOCUMENTS, QUERIES, VOCABULARY, base_bert, tokenizer

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra [dev])"
)

# Sums of at most 64 products of values within 4, through two layers and a dense one, rounded to
# 2^-24.
TOLERANCE = 4 * 64 * 4 * 2**-24


def dump(path, value):
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def save_folder(
    folder, kind, *, pooling="mean", dense=True, scaled=True, prompts=None, legacy=False
):
    """As sentence-transformers 6.2 writes it, or with `legacy` 2.2."""
    torch.manual_seed(1)
    if kind == "bert":
        base_bert(folder)
    else:
        sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
        transformers.T5EncoderModel(
            transformers.T5Config(vocab_size=len(VOCABULARY), pad_token_id=0, **sizes)
        ).save_pretrained(folder)
        tokenizer(folder)
    names = [
        "Transformer",
        "Pooling",
        *(["Dense"] if dense else []),
        *(["Normalize"] if scaled else []),
    ]
    paths = ["", *(f"{number}_{name}" for number, name in enumerate(names) if number)]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (path, name) in enumerate(zip(paths, names, strict=True))
    ]
    dump(folder / "modules.json", modules)
    if legacy:
        flags = {
            "cls": "pooling_mode_cls_token",
            "mean": "pooling_mode_mean_tokens",
            "max": "pooling_mode_max_tokens",
        }
        config = {
            "word_embedding_dimension": 32,
            **{flag: name == pooling for name, flag in flags.items()},
        }
        config |= {"pooling_mode_mean_sqrt_len_tokens": False}
        dump(folder / "sentence_bert_config.json", {"max_seq_length": 20, "do_lower_case": False})
    else:
        config = {"embedding_dimension": 32, "pooling_mode": pooling, "include_prompt": True}
    dump(folder / "1_Pooling" / "config.json", config)
    if dense:
        activation = "torch.nn.modules.linear.Identity"
        dump(
            folder / "2_Dense" / "config.json",
            {
                "in_features": 32,
                "out_features": 24,
                "bias": False,
                "activation_function": activation,
            },
        )
        from safetensors.torch import save_file

        save_file(
            {"linear.weight": torch.randn(24, 32) / 6}, folder / "2_Dense" / "model.safetensors"
        )
    for name in paths[3:] if dense else paths[2:]:
        (folder / name).mkdir()
    dump(
        folder / "config_sentence_transformers.json",
        {"prompts": prompts or {}, "default_prompt_name": None},
    )
    return folder


def plain(folder, texts, pooling="mean", length=64, dense=True, scaled=True):
    """A text at a time: the transformer, the pooling, the dense layer, length 1."""
    config = json.loads((folder / "config.json").read_text())
    kind = transformers.T5EncoderModel if config["model_type"] == "t5" else transformers.AutoModel
    model, made = (
        kind.from_pretrained(folder, dtype=torch.float32).eval(),
        transformers.AutoTokenizer.from_pretrained(folder),
    )
    rows = []
    for text in texts:
        with torch.no_grad():
            states = model(
                **made(
                    text,
                    truncation=True,
                    max_length=length,
                    return_tensors="pt",
                    return_token_type_ids=False,
                )
            )
        states = states.last_hidden_state[0]
        rows.append({"mean": states.mean(0), "cls": states[0], "max": states.amax(0)}[pooling])
    vectors = torch.stack(rows)
    if dense:
        from safetensors.torch import load_file

        vectors = vectors @ load_file(folder / "2_Dense" / "model.safetensors")["linear.weight"].T
    return torch.nn.functional.normalize(vectors, dim=1) if scaled else vectors


@pytest.mark.parametrize("kind", ["bert", "t5"])
@pytest.mark.parametrize("pooling", ["mean", "cls", "max"])
def test_against_plain_torch(tmp_path, kind, pooling):
    folder = save_folder(tmp_path / "model", kind, pooling=pooling)
    encoder = espnx.load_encoder(folder)
    assert isinstance(encoder, SentenceTransformerEncoder)
    assert isinstance(encoder, Encoder)
    assert (encoder.d_cls, encoder.dim) == (0, 24)
    found = torch.cat([each.tokens for each in encoder.encode_documents(DOCUMENTS)])
    torch.testing.assert_close(found, plain(folder, DOCUMENTS, pooling), atol=TOLERANCE, rtol=0)
    assert encoder.encode_queries([]) == []


def test_older_folders_and_their_length(tmp_path):
    folder = save_folder(tmp_path / "model", "bert", pooling="cls", legacy=True, scaled=False)
    encoder = SentenceTransformerEncoder(folder, batch_tokens=32)
    found = encoder.vectors(DOCUMENTS, is_query=False)
    torch.testing.assert_close(
        found, plain(folder, DOCUMENTS, "cls", 20, scaled=False), atol=TOLERANCE, rtol=0
    )


def test_prompts(tmp_path):
    folder = save_folder(
        tmp_path / "model", "bert", prompts={"query": "lift : ", "document": "drag : "}
    )
    encoder = espnx.load_encoder(folder)
    for encode, prompt in (
        (encoder.encode_queries, "lift : "),
        (encoder.encode_documents, "drag : "),
    ):
        found = torch.cat([each.tokens for each in encode(QUERIES)])
        torch.testing.assert_close(
            found, plain(folder, [prompt + text for text in QUERIES]), atol=TOLERANCE, rtol=0
        )
    other = save_folder(tmp_path / "other", "bert", prompts={"query": "x", "document": "drag : "})
    assert SentenceTransformerEncoder(other).name != encoder.name
    config = json.loads((folder / "1_Pooling" / "config.json").read_text())
    dump(folder / "1_Pooling" / "config.json", config | {"include_prompt": False})
    with pytest.raises(InvalidInputError, match="leaves prompts out"):
        espnx.load_encoder(folder)


def test_against_the_package(tmp_path):
    package = pytest.importorskip(
        "sentence_transformers", reason="sentence-transformers is not installed"
    )
    for kind in ("bert", "t5"):
        for pooling in ("mean", "cls", "max"):
            folder = save_folder(
                tmp_path / f"{kind} {pooling}",
                kind,
                pooling=pooling,
                prompts={"query": "lift : ", "document": "of "},
            )
            theirs, ours = (
                package.SentenceTransformer(str(folder), device="cpu"),
                espnx.load_encoder(folder),
            )
            for encode, is_query in ((theirs.encode_query, True), (theirs.encode_document, False)):
                wanted = torch.from_numpy(encode(DOCUMENTS, show_progress_bar=False))
                torch.testing.assert_close(
                    ours.vectors(DOCUMENTS, is_query=is_query), wanted, atol=TOLERANCE, rtol=0
                )


def test_which_folders_are_taken(tmp_path):
    plain_folder = save_folder(tmp_path / "plain", "bert", dense=False)
    assert isinstance(espnx.load_encoder(plain_folder), HuggingFaceEncoder), (
        "its token vectors are as good as its one vector"
    )
    vectors = SentenceTransformerEncoder(plain_folder).vectors(DOCUMENTS, is_query=False)
    torch.testing.assert_close(
        vectors, plain(plain_folder, DOCUMENTS, dense=False), atol=TOLERANCE, rtol=0
    )
    assert isinstance(
        espnx.load_encoder(save_folder(tmp_path / "t5", "t5", dense=False)),
        SentenceTransformerEncoder,
    )


def test_a_graph_and_a_store_of_one_vector_a_text(tmp_path):
    pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
    encoder = espnx.load_encoder(save_folder(tmp_path / "model", "t5"))
    texts = [f"{first} {second}" for first in VOCABULARY[-10:] for second in VOCABULARY[-20:-10]]
    wanted = plain(tmp_path / "model", texts)
    vectors = espnx.text_vectors(encoder, iter(texts))
    assert vectors.dtype == np.float32
    torch.testing.assert_close(torch.from_numpy(vectors), wanted, atol=TOLERANCE, rtol=0)
    graph.build(
        vectors,
        tmp_path / "graph",
        metric="ip",
        vector_dtype="float32",
        max_degree=16,
        list_size=32,
    )
    with graph.open(tmp_path / "graph") as opened:
        found = opened.search(
            espnx.text_vectors(encoder, texts[:5], queries=True), k=1, list_size=100
        )
    assert found.ids[:, 0].tolist() == [0, 1, 2, 3, 4]
    espnx.build(
        tmp_path / "store", [(str(number), text) for number, text in enumerate(texts)], encoder
    )
    with espnx.open(tmp_path / "store", encoder) as index:
        hits = index.search(texts[7], k=3, candidates=len(texts)).hits
    best = torch.topk(wanted @ wanted[7], 3)
    assert hits[0].id == "7"
    # records are fp16
    assert [hit.score for hit in hits] == pytest.approx(best.values.tolist(), abs=2e-3)


def test_one_vector_of_other_encoders():
    tokens = np.array([[3.0, 0.0], [0.0, 4.0]], np.float32)
    encoder = espnx.FunctionEncoder(
        lambda texts: [(None, tokens[: len(text)]) for text in texts], "f", d_cls=0, dim=2
    )
    vectors = espnx.text_vectors(encoder, ["ab", "", "a"])
    np.testing.assert_allclose(vectors, [[0.6, 0.8], [0, 0], [1, 0]], atol=1e-7)
    with_cls = espnx.FunctionEncoder(
        lambda texts: [([5.0, 6.0, 7.0], [[1.0]]) for _ in texts], "g", d_cls=3, dim=1
    )
    assert espnx.text_vectors(with_cls, ["x"] * 300).tolist() == [[5, 6, 7]] * 300
    assert espnx.text_vectors(with_cls, []).shape == (0, 3)
    assert espnx.text_vectors(encoder, []).shape == (0, 2)
    for given, texts in (
        (encoder, "one text"),
        (encoder, 3),
        (encoder, [3]),
        (None, ["x"]),
        (3, ["x"]),
    ):
        with pytest.raises(InvalidInputError):
            espnx.text_vectors(given, texts)


def test_hostile_texts(tmp_path):
    encoder = espnx.load_encoder(save_folder(tmp_path / "model", "t5"))
    vectors = espnx.text_vectors(
        encoder, ["", "\x00", "\u202e\U0001f600", "a" * 1_000_000, "wing " * 5_000]
    )
    assert vectors.shape == (5, 24)
    assert np.isfinite(vectors).all()
    with pytest.raises(InvalidInputError, match="surrogate"):
        espnx.text_vectors(encoder, ["\ud800"])


@pytest.mark.parametrize(
    ("file", "change", "expected"),
    [
        ("modules.json", "{}", FormatError),
        ("modules.json", '[{"type": "x.Transformer"}]', FormatError),
        ("modules.json", '[{"type": "x.Dense", "path": "2_Dense"}]', FormatError),
        ("1_Pooling/config.json", '{"pooling_mode": "lasttoken"}', InvalidInputError),
        ("1_Pooling/config.json", '{"pooling_mode": ["cls", "mean"]}', InvalidInputError),
        ("1_Pooling/config.json", '{"pooling_mode_weightedmean_tokens": true}', InvalidInputError),
        ("1_Pooling/config.json", None, InvalidInputError),
        ("2_Dense/config.json", '{"bias": true}', FormatError),
        ("2_Dense/config.json", '{"bias": false, "activation_function": "os.system"}', FormatError),
        ("2_Dense/model.safetensors", "x" * 20, FormatError),
        ("config_sentence_transformers.json", '{"prompts": [1]}', FormatError),
        ("config_sentence_transformers.json", '{"prompts": {"query": 3}}', FormatError),
        ("sentence_bert_config.json", '{"max_seq_length": "a"}', FormatError),
        ("sentence_bert_config.json", '{"max_seq_length": 0}', FormatError),
        (
            "config.json",
            '{"model_type": "t5", "num_layers": 1000000000, "vocab_size": 153}',
            FormatError,
        ),
        ("config.json", '{"model_type": "gpt2"}', FormatError),
    ],
)
def test_damaged_folders(tmp_path, file, change, expected):
    folder = save_folder(tmp_path / "model", "t5")
    if change is None:
        (folder / file).unlink()
    else:
        (folder / file).write_text(change)
    with pytest.raises(expected):
        espnx.load_encoder(folder).encode_documents(["wing"])


def test_layers_that_do_not_fit(tmp_path):
    from safetensors.torch import save_file

    folder = save_folder(tmp_path / "model", "bert")
    save_file({"linear.weight": torch.zeros(24, 31)}, folder / "2_Dense" / "model.safetensors")
    with pytest.raises(FormatError, match="31"):
        espnx.load_encoder(folder)
    shutil.rmtree(folder / "2_Dense")
    with pytest.raises(InvalidInputError):
        espnx.load_encoder(folder)
    for options in ({"batch_tokens": 0}, {"dtype": "int8"}):
        with pytest.raises(InvalidInputError):
            SentenceTransformerEncoder(folder, **options)
