"""What is trained once and shared by several stores: their rankings merge into that of one store,
and nothing else is taken for it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx
from espnx import errors
from espnx.retrieval.build.training import TRAINED_OPTIONS
from tests.retrieval.common import (
    D_CLS,
    DIM,
    EVERYTHING,
    build,
    check_store,
    corpus,
    queries,
    sign_manifest,
    toy_encoder,
)

DOCUMENTS = corpus(400, tokens=(1, 12))
#: Lossy in every way that is trained.
LOSSY: dict[str, Any] = {
    "format": "residual2",
    "pca": 4,
    "coarse": "bit1",
    "first_stage_code": "sq8",
    "nlist": 6,
}


def train(path: Path, documents: list[espnx.Document] = DOCUMENTS, **options: Any) -> espnx.Trained:
    return espnx.train(path, documents[:200], dims=(D_CLS, DIM), **options)


def ranking(path: Path, query: espnx.Encoded) -> list[tuple[float, str]]:
    """Of a whole store: (-score, id), unordered."""
    with espnx.open(path) as index:
        hits = index.search(query, k=EVERYTHING, candidates=EVERYTHING, nprobe=EVERYTHING).hits
        assert all(hit.reranked for hit in hits)
        return [(-hit.score, str(hit.id)) for hit in hits]


@pytest.mark.parametrize(
    "options", [{}, LOSSY, {"format": "fp32", "pooling": "muvera"}], ids=["fp16", "lossy", "muvera"]
)
def test_eight_stores_rank_as_one(folder: Path, options: dict[str, Any]) -> None:
    trained = train(folder / "trained", **options)
    espnx.build(folder / "whole", DOCUMENTS, trained=trained)
    for number in range(8):
        espnx.build(
            folder / f"part-{number}",
            DOCUMENTS[number::8],
            trained=espnx.Trained.load(folder / "trained"),
        )
    espnx.compact(folder / "part-3")
    espnx.delete(folder / "part-4", [DOCUMENTS[4].id])
    espnx.add(folder / "part-4", [DOCUMENTS[4]])
    for query in queries(4):
        merged = sorted(
            hit for number in range(8) for hit in ranking(folder / f"part-{number}", query)
        )
        assert merged == sorted(ranking(folder / "whole", query))
    spaces = {
        json.loads((path / "MANIFEST.json").read_text())["score_space"]
        for path in (folder / "whole", *folder.glob("part-*"))
    }
    assert len(spaces) == 1
    alone = build(
        folder / "alone", DOCUMENTS[::8], **{"first_stage_code": "sq8", "nlist": None, **options}
    )
    assert alone.documents == 50
    assert json.loads((folder / "alone" / "MANIFEST.json").read_text())["score_space"] not in spaces
    # what sharing is for: trained on its own documents, a store gives other scores
    if options is LOSSY:
        assert sorted(ranking(folder / "alone", queries(1)[0])) != sorted(
            ranking(folder / "part-0", queries(1)[0])
        )


def test_saved_and_loaded(folder: Path) -> None:
    trained = train(folder / "trained", **LOSSY)
    assert {entry.name for entry in (folder / "trained").iterdir()} == {
        "MANIFEST.json",
        "trained.safetensors",
        "LOCK",
    }
    again = espnx.Trained.load(folder / "trained")
    assert again.id == trained.id
    assert again.model.keys() == trained.model.keys()
    assert all(np.array_equal(array, trained.model[name]) for name, array in again.model.items())
    again.save(folder / "copy")
    assert espnx.Trained.load(folder / "copy").id == trained.id
    with pytest.raises(errors.InvalidInputError, match="already holds what was trained"):
        again.save(folder / "copy")
    with pytest.raises(errors.FormatError, match="not a manifest of this kind"):
        espnx.open(folder / "trained")
    with pytest.raises(errors.InvalidInputError, match="already holds what was trained"):
        train(folder / "trained")
    assert train(folder / "same", **LOSSY).id == trained.id
    assert train(folder / "other", corpus(300, seed=5, tokens=(1, 12)), **LOSSY).id != trained.id


def test_which_stores_share_a_score_space(folder: Path) -> None:
    """Those of one named encoder and the same settings do, trained together or not, where nothing
    lossy was trained."""

    def space(name: str, **options: Any) -> str:
        espnx.build(
            folder / name,
            [(i, f"text {i}") for i in range(30)],
            toy_encoder(),
            **{"nlist": 3, **options},
        )
        with espnx.open(folder / name) as index:
            return str(index.store.manifest.score_space)

    one = space("one")
    assert space("two", first_stage_code="flat", nlist=1, coarse="bit1") == one
    others = [
        space("a", format="fp32"),
        space("b", cls_weight=2.0),
        space("c", pca=4),
        space("d", format="residual2"),
    ]
    build(folder / "e", DOCUMENTS[:30])
    build(folder / "f", DOCUMENTS[:30])
    brought = [
        json.loads((folder / name / "MANIFEST.json").read_text())["score_space"] for name in "ef"
    ]
    assert len({one, *others, *brought}) == 7, (
        "vectors of an unknown encoder are comparable inside one store alone"
    )


def test_resumed_with_the_same_and_with_another(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from espnx.retrieval.build import builder

    trained, other = train(folder / "a"), train(folder / "b", format="fp32")

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    for again, resumed in ((trained, 100), (other, 0)):
        with monkeypatch.context() as patch:
            patch.setattr(builder, "publish", stop)
            with pytest.raises(KeyboardInterrupt):
                espnx.build(folder / "s", DOCUMENTS[:100], trained=trained, replace=True)
        if resumed:
            assert (
                espnx.build(
                    folder / "s", DOCUMENTS[:100], trained=again, replace=True
                ).resumed_documents
                == resumed
            )
        else:
            with pytest.warns(UserWarning, match="other settings"):
                assert (
                    espnx.build(
                        folder / "s", DOCUMENTS[:100], trained=again, replace=True
                    ).resumed_documents
                    == resumed
                )
        check_store(folder / "s", DOCUMENTS[:100], fmt=again.schema.format)


def test_an_interrupted_training_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from espnx.retrieval.build import builder

    def stop(*args: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(builder, "train_recipe", stop)
        with pytest.raises(KeyboardInterrupt):
            train(folder / "t")
    assert train(folder / "t").id == train(folder / "u").id


def test_no_documents(folder: Path) -> None:
    with pytest.raises(errors.InvalidInputError, match="documents to train on"):
        espnx.train(folder / "t", [], dims=(D_CLS, DIM))
    trained = train(folder / "u")
    assert espnx.build(folder / "s", [], trained=trained).documents == 0
    espnx.add(folder / "s", DOCUMENTS[:40])
    check_store(folder / "s", DOCUMENTS[:40])


def test_what_does_not_fit(folder: Path) -> None:
    trained = train(folder / "t")
    given = {
        "format": "fp16",
        "coarse": "bit1",
        "pca": 4,
        "pooling": "mean",
        "nlist": 2,
        "centroids": 2,
    }
    given |= {
        "first_stages": "ivf",
        "first_stage_code": "flat",
        "language": "german",
        "sparse_encoder": "splade-tiny",
    }
    assert set(given) == set(TRAINED_OPTIONS)
    for name, value in given.items():
        with pytest.raises(errors.InvalidInputError, match=f"option '{name}' beside trained="):
            espnx.build(folder / "s", DOCUMENTS[:5], trained=trained, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(errors.InvalidInputError, match="dims beside trained="):
        espnx.build(folder / "s", DOCUMENTS[:5], trained=trained, dims=(D_CLS, 16))
    with pytest.raises(TypeError, match="'cls_weight'"):
        train(folder / "v", cls_weight=2.0)
    named = espnx.train(folder / "w", [(i, f"text {i}") for i in range(30)], toy_encoder())
    other = toy_encoder()
    other.name = "another@1"
    with pytest.raises(errors.InvalidInputError, match="encoder beside trained="):
        espnx.build(folder / "s", [("a", "text")], other, trained=named)
    assert not (folder / "s" / "MANIFEST.json").exists()


@pytest.mark.parametrize(
    "change",
    [
        {"id": "0" * 32},
        {"id": "x"},
        {"format": "fp16"},
        {"format": "fp99"},
        {"dim": 8},
        {"dim": 3},
        {"dim": -1},
        {"is_normalised": None},
        {"coarse": "fp16"},
        {"coarse": "int8"},
        {"coarse": None},
        {"first_stage": {}},
        {"encoder": {"d_cls": 16}},
        {"tensors": {"size_bytes": 1, "crc32c": 0}},
        {"tensors": {"size_bytes": 2**61, "crc32c": 0}},
        {"tensors": []},
    ],
    ids=repr,
)
def test_manifests_that_cannot_be(folder: Path, change: dict[str, Any]) -> None:
    train(folder / "t", **LOSSY)
    sign_manifest(folder / "t", lambda fields: fields.update(change))
    with pytest.raises(errors.StorageError):
        espnx.Trained.load(folder / "t")


@pytest.mark.parametrize("at", [0, 8, 100, -1])
def test_damaged_tensors(folder: Path, at: int) -> None:
    train(folder / "t", **LOSSY)
    file = folder / "t" / "trained.safetensors"
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)
    with pytest.raises(errors.ChecksumError):
        espnx.Trained.load(folder / "t")
    file.write_bytes(data[:-1])
    with pytest.raises(errors.TruncatedFileError):
        espnx.Trained.load(folder / "t")
    file.unlink()
    with pytest.raises(errors.FormatError, match="missing"):
        espnx.Trained.load(folder / "t")
