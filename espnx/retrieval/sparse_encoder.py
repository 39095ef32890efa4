"""What a sparse encoder is: a text as weights of the terms of a vocabulary, for posting lists.

It stands beside :class:`espnx.retrieval.encoder.Encoder`, whose vectors are dense: a store may be
built with one of either kind.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterable, Iterator, Sequence
from importlib.metadata import EntryPoint
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np

from ..errors import InvalidInputError
from ..suggestions import suggests_keywords


class SparseVector(NamedTuple):
    """One text. Its similarity to another is the sum of the products of the weights of the terms
    that both have.

    Attributes:
        terms: int32 [n], ascending, each once: numbers of `SparseEncoder.vocabulary`. A text may
            have none.
        weights: float32 [n], above 0.
    """

    terms: np.ndarray
    weights: np.ndarray

    def named(self, vocabulary: Sequence[str]) -> dict[str, float]:
        """The weight of each term by its name, the heaviest first: for reading, and for
        `espnx.Postings`."""
        order = np.argsort(-self.weights, kind="stable")
        return {
            vocabulary[term]: weight
            for term, weight in zip(
                self.terms[order].tolist(), self.weights[order].tolist(), strict=True
            )
        }


@runtime_checkable
class SparseEncoder(Protocol):
    """What an index of posting lists asks of the model that makes its weights.

    Attributes:
        name: as of :attr:`espnx.retrieval.encoder.Encoder.name`: the same wherever weights belong
            together, and different where not.
        vocabulary: what each term is called, for explanations; a term is a place in it.
    """

    @property
    def name(self) -> str: ...

    @property
    def vocabulary(self) -> Sequence[str]: ...

    def encode_documents(self, texts: list[str]) -> list[SparseVector]:
        """One :class:`SparseVector` per text, in the order of ``texts``."""
        ...

    def encode_queries(self, texts: list[str]) -> list[SparseVector]:
        """One :class:`SparseVector` per text, in the order of ``texts``."""
        ...


#: What callers may give for one: itself, or a description as `espnx.load_sparse_encoder` takes it.
SparseEncoderLike = SparseEncoder | str | os.PathLike[str]

# As for dense encoders, the families lie in a room above this one.
_FAMILIES = "espnx.encoders"
_TEXTS_AT_ONCE = 256
_BY_DESCRIPTION = EntryPoint("by description", f"{_FAMILIES}:load_sparse_encoder", _FAMILIES)
_BY_NAME = EntryPoint("by name", f"{_FAMILIES}:load_sparse_named", _FAMILIES)


@suggests_keywords
def term_vectors(
    encoder: SparseEncoderLike, texts: Iterable[str], *, queries: bool = False
) -> Iterator[dict[str, float]]:
    """The weights of the terms of each text by their names, as `espnx.Postings` takes and asks for
    them.

    Args:
        encoder: a sparse encoder, or a description of one as for `espnx.load_sparse_encoder`.
        texts: strings; read once, some hundred at a time, as results are asked for.
        queries: whether they are encoded as queries.

    Raises:
        InvalidInputError: no sparse encoder, or something that is no text.
    """
    made = sparse_encoder_of(encoder)
    if made is None:
        raise InvalidInputError(
            "term_vectors: encoder", got="None", expected="a sparse encoder, or its description"
        )
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise InvalidInputError(
            "term_vectors: texts",
            got=type(texts).__name__,
            expected="strings",
            fix="pass [text] for one text",
        )
    return _named(made, texts, queries)


def _named(
    encoder: SparseEncoder, texts: Iterable[str], queries: bool
) -> Iterator[dict[str, float]]:
    encode, vocabulary = (
        encoder.encode_queries if queries else encoder.encode_documents,
        encoder.vocabulary,
    )
    left = iter(texts)
    while chunk := list(itertools.islice(left, _TEXTS_AT_ONCE)):
        yield from (vector.named(vocabulary) for vector in encode(chunk))


def sparse_encoder_of(given: object, device: str = "cpu") -> SparseEncoder | None:
    """A sparse encoder, or None, as a caller gave it; one that was described is loaded to that
    device.

    Raises InvalidInputError for what can be none, and what `espnx.load_sparse_encoder` raises.
    """
    if given is None:
        return None
    if isinstance(given, (str, os.PathLike)):
        loaded: SparseEncoder = _BY_DESCRIPTION.load()(os.fspath(given), device=device)
        return loaded
    if not isinstance(given, SparseEncoder) or isinstance(given, type):
        raise InvalidInputError(
            "sparse encoder",
            got=f"the class {given.__name__}" if isinstance(given, type) else type(given).__name__,
            expected=(
                '"splade-tiny", a folder, or an object with name, vocabulary, encode_documents and '
                "encode_queries"
            ),
            fix="espnx.load_sparse_encoder(...)",
        )
    return given


def remembered_sparse_encoder(name: str | None, device: str = "cpu") -> SparseEncoder | None:
    """The sparse encoder that an index was built with, by the name that it keeps; None where it
    keeps none.

    Raises InvalidInputError for one that came out of a folder (an index does not know where on
    which machine that lies), or whose model is another one now.
    """
    if name is None:
        return None
    loaded: SparseEncoder = _BY_NAME.load()(name, device=device)
    check_same_sparse_encoder(loaded, name)
    return loaded


def check_same_sparse_encoder(encoder: SparseEncoder, built_with: str | None) -> None:
    """Raises InvalidInputError unless an index was built with it, or with none that had a name."""
    if built_with is not None and encoder.name != built_with:
        raise InvalidInputError(
            "the index was built with another sparse encoder", got=encoder.name, expected=built_with
        )
