"""One vector for a whole text: encoders that make nothing else, and such a vector from any encoder,
for graphs of passages."""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator

import numpy as np
import torch
from torch import Tensor

from ..errors import InvalidInputError
from ..suggestions import suggests_keywords
from .encoder import Encoded, EncoderLike, check_texts, encoder_of
from .first_stage.pooling import MeanPooling

_TEXTS_AT_ONCE = 256


class SingleVectorEncoder(ABC):
    """An :class:`espnx.retrieval.encoder.Encoder` whose vector of a text is its one token: MaxSim
    of two texts is the inner product of their vectors. A subclass says how they are made.

    Attributes:
        dim: length of a vector.
    """

    name: str
    d_cls: int = 0
    dim: int

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name!r}: one vector [{self.dim}] a text>"

    @abstractmethod
    def vectors(self, texts: list[str], *, is_query: bool) -> Tensor:
        """One vector for each of some strings that were checked: float32 ``[n, dim]`` on the
        CPU."""

    def encode_documents(self, texts: list[str]) -> list[Encoded]:
        return self._encode(texts, is_query=False)

    def encode_queries(self, texts: list[str]) -> list[Encoded]:
        return self._encode(texts, is_query=True)

    def _encode(self, texts: list[str], *, is_query: bool) -> list[Encoded]:
        made = self.vectors(check_texts(texts), is_query=is_query)
        return [Encoded(torch.empty(0), vector[None]) for vector in made]


@suggests_keywords
def text_vectors(
    encoder: EncoderLike, texts: Iterable[str], *, queries: bool = False
) -> np.ndarray:
    """One vector for each text, as `espnx.graph.build` and a graph's `search` take them.

    The vector is what a model of one vector a text makes; the `cls` vector of a model that has one;
    else the mean of the text's token vectors, of length 1, and of length 0 for a text without
    tokens. The last is RAGX's ColBERT: one vector a passage.

    Args:
        encoder: an encoder, or a description of one as for `espnx.load_encoder`.
        texts: strings; read once, some hundred at a time.
        queries: whether they are encoded as queries.

    Returns:
        float32 ``[n, d]``.

    Raises:
        InvalidInputError: no encoder, or something that is no text.
    """
    made = encoder_of(encoder)
    if made is None:
        raise InvalidInputError(
            "text_vectors: encoder", got="None", expected="an encoder, or its description"
        )
    if isinstance(texts, (str, bytes)) or not isinstance(texts, Iterable):
        raise InvalidInputError(
            "text_vectors: texts",
            got=type(texts).__name__,
            expected="strings",
            fix="pass [text] for one text",
        )
    if isinstance(made, SingleVectorEncoder):
        rows = [made.vectors(check_texts(chunk), is_query=queries) for chunk in _chunks(texts)]
        return torch.cat(rows).numpy() if rows else np.empty((0, made.dim), np.float32)
    encode = made.encode_queries if queries else made.encode_documents
    pooling = MeanPooling(made.dim)
    found = [
        # not the block that all vectors of a call lie in
        (each.cls if made.d_cls else pooling.documents(each.tokens)).numpy().copy()
        for chunk in _chunks(texts)
        for each in encode(chunk)
    ]
    return np.stack(found) if found else np.empty((0, made.d_cls or made.dim), np.float32)


def _chunks(texts: Iterable[str]) -> Iterator[list[str]]:
    left = iter(texts)
    while chunk := list(itertools.islice(left, _TEXTS_AT_ONCE)):
        yield chunk
