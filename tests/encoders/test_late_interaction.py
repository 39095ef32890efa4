"""Encoders of ColBERT checkpoints and PyLate folders against vectors that colbert-ai and PyLate
made; ColBERTer's shape by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from torch.nn.functional import normalize

from espnx.errors import FormatError, InvalidInputError

transformers = pytest.importorskip(
    "transformers", reason="transformers is not installed (extra [dev])"
)

from safetensors.torch import load_file, save_file  # noqa: E402

from espnx.encoders import load_encoder  # noqa: E402
from espnx.encoders.colbert import ColBERTEncoder  # noqa: E402
from espnx.encoders.colberter import ColBERTerEncoder  # noqa: E402
from espnx.encoders.huggingface import HuggingFaceEncoder  # noqa: E402
from espnx.encoders.pylate import PyLateEncoder  # noqa: E402
from espnx.retrieval.encoder import Encoder  # noqa: E402
from tests.encoders import tiny  # noqa: E402

KINDS = {
    "colbert": ColBERTEncoder,
    "colbert-attending": ColBERTEncoder,
    "pylate": PyLateEncoder,
    "pylate-plain": PyLateEncoder,
    "pylate-attending": PyLateEncoder,
}
# Two layers of fp32 on states of 32 values of order 1: some ten roundings of 2^-24 lie one after
# the other in each, more where products are summed in another order, as padding and kernels make
# it. A wrong mask, marker or cut changes values by more than 0.01.
ATOL = 3e-6


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("models")
    return {name: tiny.restore(name, root / name) for name in KINDS}


@pytest.fixture
def copy(folders, tmp_path):
    return lambda name: shutil.copytree(folders[name], tmp_path / "copy")


def expected(name):
    held = load_file(tiny.DATA / f"{name}.safetensors")
    documents = [held[f"document.{i}"] for i in range(len(tiny.DOCUMENTS))]
    queries = (
        list(held["queries"])
        if "queries" in held
        else [held[f"query.{i}"] for i in range(len(tiny.QUERIES))]
    )
    return documents, queries


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("batch_tokens", [1, 100, 4096])
def test_against_the_package(folders, name, batch_tokens):
    encoder = KINDS[name](folders[name], batch_tokens=batch_tokens)
    assert isinstance(encoder, Encoder)
    assert (encoder.d_cls, encoder.dim) == (0, 32)
    documents, queries = expected(name)
    for got, want in (
        (encoder.encode_documents(tiny.DOCUMENTS), documents),
        (encoder.encode_queries(tiny.QUERIES), queries),
    ):
        assert len(got) == len(want)
        for result, vectors in zip(got, want, strict=True):
            torch.testing.assert_close(result.tokens, vectors, atol=ATOL, rtol=0)
            assert result.cls.shape == (0,)
            assert result.tokens.is_contiguous()
            assert not result.tokens.is_inference()
    assert encoder.encode_documents([]) == []


def test_the_fixtures_can_tell():
    # Vectors of one text differ by far more than the tolerance, and so do those of the two ways to
    # treat masks.
    documents, queries = expected("colbert")
    assert (documents[0][1:] - documents[0][:-1]).abs().amax(1).min() > 0.05
    assert len(documents[4]) == 24  # cut
    assert [len(document) for document in documents[:2]] == [11, 18]  # without punctuation
    assert {len(query) for query in queries} == {16}
    assert [len(query) for query in expected("pylate-plain")[1]] == [10, 2, 4, 10]


@pytest.mark.parametrize("name", KINDS)
def test_recognised(folders, name):
    assert type(load_encoder(str(folders[name]))) is KINDS[name]
    kind = "colbert@" if KINDS[name] is ColBERTEncoder else "pylate@"
    assert load_encoder(str(folders[name])).name.startswith(kind)


def test_a_sentence_transformers_folder_is_no_pylate_folder(copy):
    folder = copy("pylate")
    modules = [
        {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
        {
            "idx": 1,
            "name": "1",
            "path": "1_Pooling",
            "type": "sentence_transformers.models.Pooling",
        },
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "config_sentence_transformers.json").write_text("{}")
    assert type(load_encoder(str(folder))) is HuggingFaceEncoder


def test_pylate_prompt_and_case(folders, copy):
    folder = copy("pylate")
    edit(
        folder / "config_sentence_transformers.json",
        prompts={"query": "The "},
        default_prompt_name="query",
    )
    edit(folder / "sentence_bert_config.json", do_lower_case=True)
    prompted, plain = PyLateEncoder(folder), PyLateEncoder(folders["pylate"])
    assert prompted.lay_out([" Wing "], is_query=True) == plain.lay_out(
        ["the  wing"], is_query=True
    )
    assert prompted.lay_out([" Wing "], is_query=True) != plain.lay_out(["wing"], is_query=True)
    assert prompted.name != plain.name


def test_name_is_of_contents_and_settings(folders, copy):
    name = ColBERTEncoder(folders["colbert"]).name
    folder = copy("colbert")
    assert ColBERTEncoder(folder).name == name
    assert ColBERTEncoder(folder, dtype="bf16").name == f"{name}/bf16"
    assert ColBERTEncoder(folder, doc_maxlen=20).name != name
    change_weight(folder / "model.safetensors", "linear.weight")
    assert ColBERTEncoder(folder).name != name


def test_pylate_name_is_of_its_layers_too(folders, copy):
    folder = copy("pylate")
    assert PyLateEncoder(folder).name == PyLateEncoder(folders["pylate"]).name
    change_weight(folder / "1_Dense" / "model.safetensors", "linear.weight")
    assert PyLateEncoder(folder).name != PyLateEncoder(folders["pylate"]).name
    assert PyLateEncoder(folder, query_length=9).name != PyLateEncoder(folder).name


def change_weight(path, name):
    tensors = load_file(path)
    tensors[name][0, 0] += 1
    save_file(tensors, path, metadata={"format": "pt"})


def test_arguments_override_the_checkpoint(folders):
    attending = ColBERTEncoder(folders["colbert"], attend_to_mask_tokens=True)
    plain = ColBERTEncoder(folders["colbert"])
    text = [tiny.QUERIES[2]]
    assert not torch.allclose(
        attending.encode_queries(text)[0].tokens, plain.encode_queries(text)[0].tokens, atol=1e-3
    )
    assert (
        len(ColBERTEncoder(folders["colbert"], query_maxlen=40).encode_queries(text)[0].tokens)
        == 40
    )
    marked = ColBERTEncoder(folders["colbert"], mask_punctuation=False)
    assert (
        len(marked.encode_documents([tiny.DOCUMENTS[0]])[0].tokens)
        == len(plain.encode_documents([tiny.DOCUMENTS[0]])[0].tokens) + 1
    )


def test_without_metadata_the_defaults_hold(copy):
    folder = copy("colbert")
    (folder / "artifact.metadata").unlink()
    edit(folder / "config.json", max_position_embeddings=300)
    edit(folder / "tokenizer_config.json", model_max_length=300)
    change_shape(folder / "model.safetensors", "bert.embeddings.position_embeddings.weight", 300)
    encoder = load_encoder(str(folder))
    assert type(encoder) is ColBERTEncoder  # by its architecture
    assert (encoder.query_maxlen, encoder.settings["mask_punctuation"]) == (32, True)
    assert encoder.doc_maxlen == 220


def test_without_metadata_and_positions_for_the_defaults(copy):
    folder = copy("colbert")
    (folder / "artifact.metadata").unlink()
    with pytest.raises(
        InvalidInputError, match=r"doc_maxlen; got 220; expected 4 to the model's 64"
    ):
        ColBERTEncoder(folder, query_maxlen=16)
    assert ColBERTEncoder(folder, doc_maxlen=64).doc_maxlen == 64


def test_weights_as_pytorch_bin(folders, copy):
    folder = copy("colbert")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    ours, theirs = ColBERTEncoder(folder), ColBERTEncoder(folders["colbert"])
    assert torch.equal(
        ours.encode_documents(["wing"])[0].tokens, theirs.encode_documents(["wing"])[0].tokens
    )


def test_a_pickle_that_runs_code_does_not(copy, tmp_path):
    folder = copy("colbert")
    (folder / "model.safetensors").unlink()
    torch.save({"linear.weight": Bomb(tmp_path / "ran")}, folder / "pytorch_model.bin")
    with pytest.raises(FormatError):
        ColBERTEncoder(folder)
    assert not (tmp_path / "ran").exists()


class Bomb:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (Path.touch, (self.path,))


def change_shape(path, name, rows):
    tensors = load_file(path)
    tensors[name] = torch.zeros(rows, tensors[name].shape[1])
    save_file(tensors, path, metadata={"format": "pt"})


def drop_weight(path, name):
    tensors = load_file(path)
    del tensors[name]
    save_file(tensors, path, metadata={"format": "pt"})


def edit(path, **changes):
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(
    ("name", "damage", "says"),
    [
        (
            "colbert",
            lambda f: drop_weight(f / "model.safetensors", "linear.weight"),
            "no linear.weight",
        ),
        (
            "colbert",
            lambda f: drop_weight(
                f / "model.safetensors", "bert.encoder.layer.1.output.dense.weight"
            ),
            "1 weights missing",
        ),
        (
            "colbert",
            lambda f: edit(f / "artifact.metadata", dim=64),
            r"shape \[32, 32\]; expected \[64, 32\]",
        ),
        (
            "colbert",
            lambda f: edit(f / "artifact.metadata", interaction="flipr"),
            "interaction 'flipr'",
        ),
        (
            "colbert",
            lambda f: edit(f / "artifact.metadata", query_token_id="[unused7]"),
            "tokenizer does not know",
        ),
        ("colbert", lambda f: edit(f / "artifact.metadata", doc_maxlen=3), "doc_maxlen; got 3"),
        (
            "colbert",
            lambda f: edit(f / "artifact.metadata", query_maxlen="16"),
            "query_maxlen; got '16'",
        ),
        ("colbert", lambda f: (f / "artifact.metadata").write_text("{"), "parse JSON"),
        ("colbert", lambda f: (f / "artifact.metadata").write_text("[]"), "got list"),
        ("colbert", lambda f: cut(f / "model.safetensors"), "load the encoder"),
        ("pylate", lambda f: cut(f / "1_Dense" / "model.safetensors"), "read weights"),
        ("pylate", lambda f: (f / "1_Dense" / "model.safetensors").unlink(), "no linear.weight"),
        (
            "pylate-plain",
            lambda f: drop_weight(f / "1_Dense" / "model.safetensors", "linear.bias"),
            "no linear.bias",
        ),
        (
            "pylate-plain",
            lambda f: drop_weight(f / "1_Dense" / "model.safetensors", "residual.weight"),
            "no residual.weight",
        ),
        (
            "pylate",
            lambda f: edit(f / "1_Dense" / "config.json", activation_function="os.system"),
            "activation system",
        ),
        (
            "pylate",
            lambda f: edit(f / "config_sentence_transformers.json", query_prefix="[X] "),
            "tokenizer does not know",
        ),
        (
            "pylate",
            lambda f: edit(f / "config_sentence_transformers.json", document_length=65),
            "document_length; got 65",
        ),
        ("pylate", lambda f: (f / "modules.json").write_text('[{"path": ""}]'), "list of modules"),
        ("pylate", lambda f: (f / "modules.json").write_text("[]"), "at least one Dense"),
    ],
)
def test_damaged_folders(copy, name, damage, says):
    folder = copy(name)
    damage(folder)
    with pytest.raises((FormatError, InvalidInputError), match=says) as raised:
        KINDS[name](folder)
    assert "copy" in str(raised.value) or "encoder: " in str(raised.value)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def test_dense_layers_that_do_not_fit(copy):
    folder = copy("pylate-plain")
    shutil.copy(folder / "1_Dense" / "model.safetensors", folder / "2_Dense" / "model.safetensors")
    with pytest.raises(FormatError, match=r"shape \[48, 32\]; expected \[any, 48\]"):
        PyLateEncoder(folder)


@pytest.fixture
def colberter(tmp_path):
    def make(**settings):
        folder = tiny.base_bert(tmp_path / "colberter")
        (folder / "colberter.json").write_text(json.dumps({"d_cls": 8, "dim": 16} | settings))
        tensors = {"cls.weight": [8, 32], "token.weight": [16, 32], "token.bias": [16]}
        tensors = {
            name: torch.from_numpy(tiny.weight(name, shape)) for name, shape in tensors.items()
        }
        save_file(tensors, folder / "compressors.safetensors")
        return folder, tensors

    return make


def states(folder, text):
    tokenizer, model = (
        kind.from_pretrained(folder)
        for kind in (transformers.AutoTokenizer, transformers.AutoModel)
    )
    made = tokenizer(text, return_tensors="pt")
    with torch.no_grad():
        return model(**made).last_hidden_state[0], made["input_ids"][0].tolist()


@pytest.mark.parametrize("normal", [False, True])
def test_colberter_pieces(colberter, normal):
    folder, weights = colberter(document_length=60, query_length=60, normalize=normal)
    encoder = load_encoder(str(folder))
    assert type(encoder) is ColBERTerEncoder
    assert (encoder.d_cls, encoder.dim) == (8, 16)
    hidden, _ = states(folder, "wings of a wing")
    cls, tokens = (
        hidden[0] @ weights["cls.weight"].T,
        hidden[1:-1] @ weights["token.weight"].T + weights["token.bias"],
    )
    for made in (encoder.encode_documents, encoder.encode_queries):
        result = made(["", "wings of a wing"])[1]
        torch.testing.assert_close(
            result.cls, normalize(cls, dim=0) if normal else cls, atol=ATOL, rtol=0
        )
        torch.testing.assert_close(
            result.tokens, normalize(tokens, dim=1) if normal else tokens, atol=ATOL, rtol=0
        )
    assert encoder.encode_documents([""])[0].tokens.shape == (0, 16)


def test_colberter_whole_words(colberter):
    folder, weights = colberter(whole_words=True, document_length=30)
    text = "wings of wing wings"  # wing ##s / of / wing / wing ##s
    hidden, ids = states(folder, text)
    assert len(ids) == 8
    tokens = hidden @ weights["token.weight"].T + weights["token.bias"]
    words = torch.stack([tokens[[1, 2, 5, 6]].mean(0), tokens[3], tokens[4]])
    result = ColBERTerEncoder(folder).encode_documents([text, ""])
    torch.testing.assert_close(result[0].tokens, words, atol=ATOL, rtol=0)
    assert result[1].tokens.shape == (0, 16)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"dim": 17}, r"token.weight.*got \[16, 32\]; expected \[17, 32\]"),
        ({"dim": 0}, "got dim 0"),
        ({"d_cls": None}, "got d_cls None"),
        ({"whole_words": 1}, "got whole_words 1"),
        ({"words": True}, "unknown 'words'"),
        ({"document_length": 1000, "query_length": 3}, "document_length; got 1000"),
    ],
    ids=str,
)
def test_colberter_settings(colberter, settings, says):
    folder, _ = colberter(**{"document_length": 20, **settings})
    with pytest.raises((FormatError, InvalidInputError), match=says):
        ColBERTerEncoder(folder)


def test_colberter_without_compressors(colberter):
    folder, _ = colberter(document_length=20)
    (folder / "compressors.safetensors").unlink()
    with pytest.raises(FormatError, match=r"cls\.weight.*got nothing"):
        ColBERTerEncoder(folder)
