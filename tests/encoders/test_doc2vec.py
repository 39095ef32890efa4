"""Doc2Vec: one vector a text whatever came before, in another process, and after saving; near texts
near; folders that are damaged."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading

import numpy as np
import pytest

import espnx
from espnx.encoders.doc2vec import SETTINGS, WEIGHTS, Doc2VecEncoder, words_of
from espnx.errors import FormatError, InvalidInputError, MissingDependencyError

pytest.importorskip("gensim", reason="gensim is not installed (extra [doc2vec])")

TOPICS = [
    "wing lift drag flow shock mach wave nose cone supersonic",
    "bread flour oven yeast dough bake crust water salt rise",
    "river rain cloud storm wind snow frost hail thunder weather",
]


def corpus(n=300):
    random = np.random.default_rng(3)
    return [" ".join(random.choice(TOPICS[number % 3].split(), 12)) for number in range(n)]


@pytest.fixture(scope="module")
def encoder():
    return Doc2VecEncoder.train(corpus(), dim=24, epochs=100, seed=5)


@pytest.fixture
def folder(encoder, tmp_path):
    encoder.save(tmp_path / "model")
    return tmp_path / "model"


TEXTS = [
    "wing lift flow",
    "bread and flour",
    "rain, rain: STORM",
    "",
    "unheard of",
    "wing lift flow",
]


def test_one_vector_a_text(encoder):
    first = espnx.text_vectors(encoder, TEXTS)
    assert first.dtype == np.float32
    np.testing.assert_array_equal(
        espnx.text_vectors(encoder, TEXTS[::-1], queries=True)[::-1], first
    )
    np.testing.assert_array_equal(first[0], first[5])
    assert not first[3:5].any()
    assert first[:3].any(1).all()
    other = Doc2VecEncoder(encoder._model, seed=6)
    assert other.name != encoder.name
    assert not np.array_equal(espnx.text_vectors(other, TEXTS), first)


def test_inference_is_gensims(encoder, monkeypatch):
    """From the same start and random numbers, to the bit."""
    import gensim.models.doc2vec as module

    started = {}
    train = module.train_document_dbow

    def noted(model, words, tags, alpha, work, **options):
        started.setdefault("vector", options["doctag_vectors"].copy())
        started.setdefault("random", model.random.get_state())
        return train(model, words, tags, alpha, work, **options)

    monkeypatch.setattr(encoder, "_infer", noted)
    ours = espnx.text_vectors(encoder, ["wing lift flow"])[0]
    monkeypatch.setattr(
        module, "pseudorandom_weak_vector", lambda size, seed_string: started["vector"][0]
    )
    encoder._model.random.set_state(started["random"])
    np.testing.assert_array_equal(ours, encoder._model.infer_vector(["wing", "lift", "flow"]))


def test_in_threads(encoder):
    wanted, found = espnx.text_vectors(encoder, TEXTS), {}
    threads = [
        threading.Thread(target=lambda i=i: found.update({i: espnx.text_vectors(encoder, TEXTS)}))
        for i in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for each in found.values():
        np.testing.assert_array_equal(each, wanted)
    assert len(found) == 4


def test_near_texts_are_near(encoder):
    vectors = espnx.text_vectors(encoder, corpus(60))
    vectors /= np.linalg.norm(vectors, axis=1, keepdims=True)
    similar = vectors @ vectors.T
    same = np.arange(60)[:, None] % 3 == np.arange(60) % 3
    assert similar[same].mean() > similar[~same].mean() + 0.5


# of Python's hash; here it is another
@pytest.mark.parametrize("salt", ["1", pytest.param("2", marks=pytest.mark.sweep)])
def test_saved_and_loaded_in_another_process(encoder, folder, salt):
    loaded = espnx.load_encoder(folder)
    assert loaded.name == encoder.name
    wanted = espnx.text_vectors(encoder, TEXTS)
    np.testing.assert_array_equal(espnx.text_vectors(loaded, TEXTS), wanted)
    code = (
        "import sys, espnx; sys.stdout.buffer.write(espnx.text_vectors(sys.argv[1], "
        "sys.argv[2:]).tobytes())"
    )
    # which kernels OpenBLAS takes decides about the last bit
    blas = {name: value for name, value in os.environ.items() if name.startswith("OPENBLAS")}
    environment = {"PYTHONHASHSEED": salt, "PATH": "/usr/bin", "OMP_NUM_THREADS": "1", **blas}
    done = subprocess.run(
        [sys.executable, "-c", code, str(folder), *TEXTS], capture_output=True, env=environment
    )
    assert done.returncode == 0, done.stderr.decode()
    np.testing.assert_array_equal(
        np.frombuffer(done.stdout, np.float32).reshape(wanted.shape), wanted
    )


def test_training_is_reproducible(encoder):
    again = Doc2VecEncoder.train(corpus(), dim=24, epochs=100, seed=5)
    assert again.name == encoder.name
    assert Doc2VecEncoder.train(corpus(), dim=24, epochs=100, seed=6).name != encoder.name


def test_words():
    assert words_of("The 2nd wing's L/D, na\u00efve \u4e2d\u6587 x " + "a" * 101) == [
        "the",
        "2nd",
        "wing",
        "na\u00efve",
        "\u4e2d\u6587",
    ]
    assert words_of("") == []


def test_models_and_arguments_that_are_refused(encoder):
    from gensim.models.doc2vec import Doc2Vec

    for model in (None, 3, "model", Doc2Vec(dm=1), Doc2Vec(dm=0, hs=1, negative=0)):
        with pytest.raises(InvalidInputError):
            Doc2VecEncoder(model)
    for options in (
        {"dim": 0},
        {"epochs": 0},
        {"seed": -1},
        {"seed": 1.5},
        {"negative": 0},
        {"min_count": 0},
        {"workers": 0},
    ):
        with pytest.raises(InvalidInputError):
            Doc2VecEncoder.train(corpus(), **options)
    for texts in ("text", 3, iter(corpus()), [3], ["\ud800"], [], ["once each word"]):
        with pytest.raises(InvalidInputError):
            Doc2VecEncoder.train(texts)


@pytest.mark.parametrize(
    "change",
    [
        {"version": 2},
        {"epochs": 10**9},
        {"epochs": 1.5},
        {"dim": 25},
        {"dim": 10**12},
        {"alpha": "x"},
        {"alpha": float("nan")},
        {"sample": None},
        {"negative": True},
        {"words": "abc"},
        {"words": ["a", "a"]},
        {"words": [1]},
        {"counts": [1]},
        {"counts": [0]},
    ],
)
def test_settings_that_are_damaged(folder, change):
    path = folder / SETTINGS
    path.write_text(json.dumps(json.loads(path.read_text()) | change))
    with pytest.raises(FormatError):
        espnx.load_encoder(folder)


def test_files_that_are_damaged(folder):
    settings, weights = (folder / name for name in (SETTINGS, WEIGHTS))
    kept = settings.read_bytes(), weights.read_bytes()
    for data in (b"", b"{", b"[]", kept[0][:100]):
        settings.write_bytes(data)
        with pytest.raises(FormatError):
            espnx.load_encoder(folder)
    settings.write_bytes(kept[0])
    for data in (b"", kept[1][:-10], b"\xff" * 64):
        weights.write_bytes(data)
        with pytest.raises(FormatError):
            espnx.load_encoder(folder)
    weights.unlink()
    with pytest.raises(FormatError):
        espnx.load_encoder(folder)


def test_gensim_missing(monkeypatch, folder):
    monkeypatch.setitem(sys.modules, "gensim.models.doc2vec", None)
    with pytest.raises(MissingDependencyError, match="doc2vec"):
        espnx.load_encoder(folder)
