"""fp32 unless bf16 is asked for, on whatever processor; and stores that remember which."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import espnx
from espnx.encoders import (
    colbert,
    colberter,
    huggingface,
    minilm,
    pylate,
    sentence_transformer,
    windows,
)
from espnx.encoders.colbert import ColBERTEncoder
from espnx.encoders.doc2vec import Doc2VecEncoder
from espnx.errors import InvalidInputError
from tests.encoders import tiny

pytest.importorskip("faiss", reason="FAISS is not installed (extra [retrieval])")
pytest.importorskip("transformers", reason="transformers is not installed (extra [dev])")

TEXTS = [(str(number), text) for number, text in enumerate(tiny.collection(20))]
FAMILIES = (
    minilm.MiniLM,
    huggingface.HuggingFaceEncoder,
    colbert.ColBERTEncoder,
    colberter.ColBERTerEncoder,
    pylate.PyLateEncoder,
    sentence_transformer.SentenceTransformerEncoder,
)


@pytest.fixture(scope="module")
def colberts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.restore("colbert", tmp_path_factory.mktemp("models") / "colbert")


@pytest.fixture(scope="module")
def stores(colberts: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """One of each dtype."""
    made = {dtype: tmp_path_factory.mktemp("stores") / dtype for dtype in ("fp32", "bf16")}
    for dtype, path in made.items():
        espnx.build(path, TEXTS, espnx.load_encoder(colberts, dtype=dtype), nlist=2)
    return made


def dtype_of(encoder: espnx.Encoder | None) -> torch.dtype:
    assert isinstance(encoder, ColBERTEncoder)
    return encoder.dtype


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.__name__)
def test_fp32_is_the_default_of_every_family(family: type) -> None:
    assert (family.__init__.__kwdefaults__ or {})["dtype"] == "fp32"


def test_no_encoder_looks_at_the_processor() -> None:
    """Nor at a GPU's abilities: what is found must not depend on either."""
    for path in Path(windows.__file__).parent.glob("*.py"):
        text = path.read_text()
        assert not [
            word
            for word in ("cpuinfo", "cpu_flags", "is_bf16_supported", "cpu_capability", "mkldnn")
            if word in text
        ], path


def test_the_name_says_bf16(colberts: Path) -> None:
    exact, near = espnx.load_encoder(colberts), espnx.load_encoder(colberts, dtype="bf16")
    assert near.name == f"{exact.name}/bf16"
    assert (dtype_of(exact), dtype_of(near)) == (torch.float32, torch.bfloat16)
    with pytest.raises(InvalidInputError, match=r"'auto'.*fp32"):
        espnx.load_encoder(colberts, dtype="auto")


def test_doc2vec_has_no_bf16(tmp_path: Path) -> None:
    pytest.importorskip("gensim", reason="gensim is not installed (extra [doc2vec])")
    Doc2VecEncoder.train([text for _, text in TEXTS] * 5, dim=8).save(tmp_path / "doc2vec")
    with pytest.raises(InvalidInputError, match=r"(?s)Doc2Vec.*'bf16'.*fp32"):
        espnx.load_encoder(tmp_path / "doc2vec", dtype="bf16")


def test_what_is_described_computes_as_the_documents_were_encoded(
    stores: dict[str, Path], colberts: Path
) -> None:
    for dtype, wanted in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        with espnx.open(stores[dtype], colberts) as index:
            assert dtype_of(index.encoder) == wanted
            assert index.store.manifest.encoder.name.endswith("/bf16") == (dtype == "bf16")
            by_text = index.search("heat of a wing", k=5).hits
            encoded = espnx.load_encoder(colberts, dtype=dtype).encode_queries(["heat of a wing"])[
                0
            ]
            assert [(hit.id, hit.score) for hit in by_text] == [
                (hit.id, hit.score) for hit in index.search(encoded, k=5).hits
            ]


def test_queries_may_be_told_otherwise(stores: dict[str, Path], colberts: Path) -> None:
    for dtype, other in (("fp32", "bf16"), ("bf16", "fp32")):
        with espnx.open(stores[dtype], espnx.load_encoder(colberts, dtype=other)) as index:
            assert dtype_of(index.encoder) == (torch.float32 if other == "fp32" else torch.bfloat16)
            assert len(index.search("heat of a wing", k=3).hits) == 3
            assert not index.reload()


def test_documents_may_not(stores: dict[str, Path], colberts: Path, tmp_path: Path) -> None:
    path = tmp_path / "store"
    espnx.build(path, TEXTS, espnx.load_encoder(colberts, dtype="bf16"), nlist=2)
    with pytest.raises(InvalidInputError, match=r'(?s)another encoder.*dtype="bf16"'):
        espnx.add(path, [("new", "the nose of a body")], espnx.load_encoder(colberts))
    # described: as the store's
    assert espnx.add(path, [("new", "the nose of a body")], colberts).documents == 1
    with espnx.open(path, colberts) as index, espnx.open(stores["bf16"], colberts) as before:
        assert index.store.manifest.encoder == before.store.manifest.encoder
        assert "new" in index


def test_a_store_that_is_built_anew_in_another_dtype(colberts: Path, tmp_path: Path) -> None:
    """An index that is open does not go over with queries of the old one."""
    path = tmp_path / "store"
    espnx.build(path, TEXTS, colberts, nlist=2)
    with espnx.open(path, colberts) as index:
        before = index.search("heat of a wing", k=3).hits
        espnx.build(path, TEXTS, espnx.load_encoder(colberts, dtype="bf16"), nlist=2, replace=True)
        with pytest.raises(InvalidInputError, match="another encoder"):
            index.reload()
        assert index.search("heat of a wing", k=3).hits == before


def test_training_says_it_too(colberts: Path, tmp_path: Path) -> None:
    trained = espnx.train(
        tmp_path / "trained", TEXTS, espnx.load_encoder(colberts, dtype="bf16"), nlist=2
    )
    espnx.build(tmp_path / "store", TEXTS, colberts, trained=trained)
    with espnx.open(tmp_path / "store", colberts) as index:
        assert dtype_of(index.encoder) == torch.bfloat16
    with pytest.raises(InvalidInputError, match="encoder beside trained"):
        espnx.build(tmp_path / "other", TEXTS, espnx.load_encoder(colberts), trained=trained)


def test_minilm_is_remembered_with_its_dtype(minilm: minilm.MiniLM, tmp_path: Path) -> None:
    for dtype, wanted in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        path = tmp_path / dtype
        espnx.build(path, TEXTS, espnx.load_encoder("minilm", dtype=dtype), nlist=2)
        espnx.add(path, [("new", "nose of a body")])
        with espnx.open(path) as index:
            assert index.search("nose of a body", k=1).hits[0].id == "new"
            assert getattr(index.encoder, "dtype", None) == wanted
