"""Doc2Vec (Le and Mikolov, "Distributed Representations of Sentences and Documents", arXiv
1405.4053) through gensim: distributed bag of words, which is skip-gram with the text in the place
of the word (PV-DBOW, section 2.3).

A vector is inferred by training it against frozen weights, from a random start with random
negatives. gensim starts from Python's hash of the text, which every process salts anew, and goes on
from a generator that the calls before have moved; so two calls on one text differ. Here both come
from a hash of the text: a text has one vector, on every machine with this gensim, whatever was
inferred before.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import threading
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..errors import FormatError, InvalidInputError, MissingDependencyError
from ..retrieval.encoder import check_texts
from ..retrieval.single_vector import SingleVectorEncoder
from .checkpoints import read_object, read_weights

SETTINGS, WEIGHTS = "doc2vec.json", "doc2vec.safetensors"
VERSION = 1
_WORD = re.compile(r"\b\w\w+\b")
_WORD_MAX = 100  # characters; a longer run is no word, and would be kept for nothing
# What the settings of a folder may be: (kind, least, most).
_RANGES: dict[str, tuple[type, float, float]] = {
    "dim": (int, 1, 4096),
    "epochs": (int, 1, 1000),
    "negative": (int, 1, 100),
    "alpha": (float, 1e-6, 1.0),
    "min_alpha": (float, 0.0, 1.0),
    "sample": (float, 0.0, 1.0),
    "ns_exponent": (float, -2.0, 2.0),
    "seed": (int, 0, 2**32 - 1),
}


def is_doc2vec(folder: Path) -> bool:
    """Whether a folder holds what `Doc2VecEncoder.save` wrote."""
    return (folder / SETTINGS).is_file()


def words_of(text: str) -> list[str]:
    """Runs of two letters or digits and more, in lower case."""
    return [word for word in _WORD.findall(text.lower()) if len(word) <= _WORD_MAX]


class Doc2VecEncoder(SingleVectorEncoder):
    """One vector a text from a Doc2Vec model of gensim, with negative sampling (``dm=0, hs=0``).
    Documents and queries are encoded alike.

    Args:
        model: a trained ``gensim.models.doc2vec.Doc2Vec``, which is not changed. Its words are to
            be those of `words_of`. (gensim's own files are pickles: load them yourself if you trust
            them. `save` writes one that runs no code.)
        seed: of inference; another one gives other vectors.

    Vectors are as they come, not of length 1. Compare them by cosine (``metric="cosine"``): trained
    on Cranfield with the defaults, nDCG@10 is .24 by cosine and .04 by L1, which RAGX takes;
    SPLADE's is .38. A text without a known word has the vector 0; of a longer one, 10,000 known
    words count.

    Raises:
        MissingDependencyError: gensim is not installed.
        InvalidInputError: another kind of model.
    """

    def __init__(self, model: Any, *, seed: int = 0):
        gensim = _gensim()
        if not isinstance(model, gensim.Doc2Vec):
            raise InvalidInputError(
                "Doc2Vec: model",
                got=type(model).__name__,
                expected="a gensim.models.doc2vec.Doc2Vec",
            )
        if not model.sg or model.hs or not model.negative or model.dm_concat:
            raise InvalidInputError(
                "Doc2Vec: model",
                got="distributed memory, or hierarchical softmax",
                expected="dm=0, hs=0, negative > 0",
            )
        self._check_seed(seed)
        self.seed, self.dim = seed, int(model.vector_size)
        self._infer, self._model = gensim.train_document_dbow, model
        # the model's generator of random numbers is one for all threads
        self._lock = threading.Lock()
        self.name = f"doc2vec@{self._fingerprint()}"

    @classmethod
    def train(
        cls,
        texts: Iterable[str],
        *,
        dim: int = 300,
        epochs: int = 40,
        min_count: int = 2,
        negative: int = 5,
        seed: int = 0,
        workers: int = 1,
    ) -> Doc2VecEncoder:
        """A model of these texts.

        Args:
            texts: strings, gone through ``epochs + 1`` times: a list, or anything that begins anew
                with each iteration.
            dim: of a vector. epochs: of training, and of inference.
            min_count: a word that is rarer is left out.
            negative: random words beside each word of a text.
            seed: of training and inference.
            workers: threads; with one the same texts give the same model.

        Raises InvalidInputError: no text with a known word, an iterator, something that is no text,
        or an argument out of range.
        """
        gensim = _gensim()
        cls._check_seed(seed)
        for name, value in {"dim": dim, "epochs": epochs, "negative": negative}.items():
            _check_range(f"Doc2Vec: {name}", value, *_RANGES[name])
        for name, value in {"min_count": min_count, "workers": workers}.items():
            _check_range(f"Doc2Vec: {name}", value, int, 1, 2**31 - 1)
        if (
            isinstance(texts, (str, bytes))
            or not isinstance(texts, Iterable)
            or iter(texts) is texts
        ):
            raise InvalidInputError(
                "Doc2Vec: texts",
                got=type(texts).__name__,
                expected="strings that can be gone through again: a list",
            )
        model = gensim.Doc2Vec(
            vector_size=dim,
            dm=0,
            hs=0,
            negative=negative,
            min_count=min_count,
            epochs=epochs,
            seed=seed,
            workers=workers,
        )
        tagged = _Tagged(texts, gensim.TaggedDocument)
        model.build_vocab(tagged)
        if not len(model.wv):
            raise InvalidInputError(
                "Doc2Vec: texts",
                got=f"no word that occurs {min_count} times",
                expected="texts",
                fix="lower min_count",
            )
        model.train(tagged, total_examples=model.corpus_count, epochs=epochs)
        return cls(model, seed=seed)

    def vectors(self, texts: list[str], *, is_query: bool) -> Tensor:
        del is_query
        found = np.zeros((len(texts), self.dim), np.float32)
        for row, text in zip(found, texts, strict=True):
            known = [word for word in words_of(text) if word in self._model.wv.key_to_index]
            if known:
                row[:] = self._inferred(known)
        return torch.from_numpy(found)

    def _inferred(self, words: list[str]) -> np.ndarray:
        """What gensim's ``infer_vector`` does, with random numbers that depend on the words
        alone."""
        model = self._model
        digest = hashlib.sha256(f"{self.seed}\n{' '.join(words)}".encode()).digest()
        raw = np.random.PCG64(int.from_bytes(digest[:16], "little")).random_raw(self.dim)
        start = (raw >> np.uint64(11)).astype(np.float64) / 2.0**53 - 0.5
        vectors = (start / self.dim).astype(np.float32).reshape(1, -1)
        work, locks = np.zeros(self.dim, np.float32), np.ones(1, np.float32)
        alpha, step = model.alpha, (model.alpha - model.min_alpha) / max(model.epochs - 1, 1)
        with self._lock:
            before, model.random = (
                model.random,
                np.random.RandomState(int.from_bytes(digest[16:20], "little")),
            )
            try:
                for _ in range(model.epochs):
                    self._infer(
                        model,
                        words,
                        [0],
                        alpha,
                        work,
                        learn_words=False,
                        learn_hidden=False,
                        doctag_vectors=vectors,
                        doctags_lockf=locks,
                    )
                    alpha -= step
            finally:
                model.random = before
        return vectors[0]

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Writes what inference needs to a folder, as JSON and safetensors; `load` and
        `espnx.load_encoder` read it.

        Raises OSError where the folder cannot be written.
        """
        from safetensors.numpy import save_file

        where = Path(folder)
        where.mkdir(parents=True, exist_ok=True)
        words, counts = self._vocabulary()
        document = {"version": VERSION, **self._settings(), "words": words, "counts": counts}
        save_file({"hidden": np.ascontiguousarray(self._model.syn1neg)}, where / WEIGHTS)
        (where / SETTINGS).write_text(json.dumps(document))

    @classmethod
    def load(cls, folder: str | os.PathLike[str]) -> Doc2VecEncoder:
        """The encoder that `save` wrote; its vectors are the same.

        Raises:
            MissingDependencyError: gensim is not installed.
            InvalidInputError: there is no such folder.
            FormatError: it is damaged.
        """
        where = Path(folder)
        document = read_object(where / SETTINGS)
        settings, words, counts = _checked(document, where / SETTINGS)
        weights = read_weights(
            [where / WEIGHTS] if (where / WEIGHTS).is_file() else [], ["hidden"]
        ).get("hidden")
        wanted = [len(words), settings["dim"]]
        if weights is None or list(weights.shape) != wanted or not bool(weights.isfinite().all()):
            got = (
                "nothing"
                if weights is None
                else f"shape {list(weights.shape)}, or values that are not finite"
            )
            raise FormatError(
                "weights of Doc2Vec",
                path=where / WEIGHTS,
                got=got,
                expected=f"hidden, float32 {wanted}",
            )
        return cls(_rebuilt(settings, words, counts, weights.numpy()), seed=settings["seed"])

    def _vocabulary(self) -> tuple[list[str], list[int]]:
        words = list(self._model.wv.index_to_key)
        return words, [int(self._model.wv.get_vecattr(word, "count")) for word in words]

    def _settings(self) -> dict[str, Any]:
        model = self._model
        return {
            "dim": self.dim,
            "epochs": int(model.epochs),
            "negative": int(model.negative),
            "alpha": float(model.alpha),
            "min_alpha": float(model.min_alpha),
            "sample": float(model.sample or 0),
            "ns_exponent": float(model.ns_exponent),
            "seed": self.seed,
        }

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(json.dumps([self._settings(), *self._vocabulary()]).encode())
        digest.update(np.ascontiguousarray(self._model.syn1neg).tobytes())
        return digest.hexdigest()[:12]

    @staticmethod
    def _check_seed(seed: Any) -> None:
        _check_range("Doc2Vec: seed", seed, *_RANGES["seed"])


class _Tagged:
    """Texts as gensim wants them, each time anew."""

    def __init__(self, texts: Iterable[str], tagged: Any):
        self.texts, self.tagged = texts, tagged

    def __iter__(self) -> Iterator[Any]:
        for number, text in enumerate(self.texts):
            yield self.tagged(words_of(check_texts([text])[0]), [number])


def _rebuilt(
    settings: Mapping[str, Any], words: list[str], counts: list[int], hidden: np.ndarray
) -> Any:
    """A model that infers as the one did that was saved."""
    model = _gensim().Doc2Vec(
        vector_size=settings["dim"],
        dm=0,
        hs=0,
        negative=settings["negative"],
        min_count=1,
        epochs=settings["epochs"],
        alpha=settings["alpha"],
        min_alpha=settings["min_alpha"],
        sample=settings["sample"],
        ns_exponent=settings["ns_exponent"],
    )
    model.build_vocab_from_freq(dict(zip(words, counts, strict=True)), corpus_count=1)
    # gensim sorts by count, and words of one count in any order; what it keeps of each word depends
    # on the count alone.
    model.wv.index_to_key = list(words)
    model.wv.key_to_index = {word: number for number, word in enumerate(words)}
    model.syn1neg = hidden
    return model


def _checked(
    document: Mapping[str, Any], path: Path
) -> tuple[dict[str, Any], list[str], list[int]]:
    """Settings, words and counts. Raises FormatError for any that `Doc2VecEncoder.save` does not
    write."""

    def refuse(got: object, expected: str) -> FormatError:
        return FormatError("settings of Doc2Vec", path=path, got=got, expected=expected)

    if document.get("version") != VERSION:
        raise refuse(f"version {document.get('version')!r}", f"version {VERSION}")
    for name, limits in _RANGES.items():
        try:
            _check_range(name, document.get(name), *limits)
        except InvalidInputError as error:
            raise refuse(f"{name} {error.got}", str(error.expected)) from None
    words, counts = document.get("words"), document.get("counts")
    if (
        not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) for word in words)
        or len(set(words)) < len(words)
    ):
        raise refuse("other words", "words, each once")
    whole = isinstance(counts, list) and all(
        isinstance(count, int) and not isinstance(count, bool) and count > 0 for count in counts
    )
    if (
        not whole
        or len(counts) != len(words)  # type: ignore[arg-type]
        or counts != sorted(counts, reverse=True)  # type: ignore[arg-type]
        or sum(counts) >= 2**62
    ):
        raise refuse("other counts", "a count of each word, falling")
    return {name: document[name] for name in _RANGES}, words, counts


def _check_range(what: str, value: Any, kind: type, least: float, most: float) -> None:
    kinds = (int, float) if kind is float else (int,)
    if (
        isinstance(value, bool)
        or not isinstance(value, kinds)
        or not math.isfinite(value)
        or not least <= value <= most
    ):
        raise InvalidInputError(
            what,
            got=repr(value),
            expected=(
                f"{'a whole number' if kind is int else 'a number'} from {least:g} to {most:g}"
            ),
        )


def _gensim() -> Any:
    try:
        import gensim.models.doc2vec as module
    except ImportError as error:
        raise MissingDependencyError(
            "Doc2Vec encoder", got=str(error), expected="gensim", fix="pip install 'espnx[doc2vec]'"
        ) from error
    return module
