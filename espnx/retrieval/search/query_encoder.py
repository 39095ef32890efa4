"""Queries as an index takes them: text, which the store's encoder makes vectors of, and vectors as
they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from ... import errors
from ..encoder import (
    AUTO,
    Encoded,
    Encoder,
    EncoderLike,
    check_count,
    check_same_encoder,
    encoder_of,
    remembered_encoder,
)
from ..store.manifest import EncoderEntry, Manifest
from .opened.versions import OpenVersions

Query = str | Encoded
Queries = list[str] | list[Encoded] | list[Query] | tuple[Query, ...]


class QueryEncoder:
    """The encoder of an index's queries.

    Args:
        given: an encoder, or a description of one; ``auto``: the one that the store remembers;
            None: there is none.
        compute: where one that is described computes.
        versions: of the store.

    Raises InvalidInputError unless the store was built with the same (or with none).
    """

    def __init__(self, given: EncoderLike | None, compute: str, versions: OpenVersions):
        self._compute, self._versions = compute, versions
        self._remembers = isinstance(given, str) and given == AUTO
        self._encoder: Encoder | None = None
        if given is not None and not self._remembers:
            self.use(given)

    def encoder(self) -> Encoder | None:
        """None: there is none. Raises what `espnx.load_encoder` raises, where it is the remembered
        one and was not wanted before."""
        if self._encoder is None and self._remembers:
            # once for all threads, and not while another version comes
            with self._versions.changing:
                if self._encoder is None:
                    self._encoder = remembered_encoder(
                        self._versions.newest.store.manifest.encoder.name, self._compute
                    )
        return self._encoder

    def use(self, encoder: EncoderLike) -> None:
        """Encodes with `encoder` from here on. Raises InvalidInputError unless the store was built
        with the same (or with none)."""
        found = encoder_of(
            encoder, self._compute, built_with=self._versions.newest.store.manifest.encoder.name
        )
        if found is None:
            raise errors.InvalidInputError(
                "encoder", got="None", expected="an encoder, or a description of one"
            )
        self._versions.newest.check_encoder(found)
        self._encoder = found

    def check(self, new: Manifest, old: Manifest) -> None:
        """Raises InvalidInputError for a version whose documents were encoded by another."""
        # nobody chose it for these documents, nor its dtype
        if self._encoder is not None and new.encoder.name != old.encoder.name:
            check_same_encoder(self._encoder, new.encoder.name)

    def encode(self, queries: Sequence[Query]) -> list[Encoded]:
        """Vectors of each. Raises InvalidInputError for texts where there is no encoder."""
        texts = [query for query in queries if isinstance(query, str)]
        if texts:
            encoder = self.encoder()
            if encoder is None:
                raise errors.InvalidInputError(
                    "a query is text, and the index has no encoder",
                    got="a store whose documents brought their vectors"
                    if self._remembers
                    else "encoder=None",
                    fix="open the index with encoder=..., or pass vectors",
                )
            made = list(encoder.encode_queries(texts))
            check_count(encoder, len(texts), len(made))
        else:
            made = []
        vectors = iter(made)
        return [query if isinstance(query, Encoded) else next(vectors) for query in queries]


def listed(queries: Query | Queries | Mapping[Any, Query], built: EncoderEntry) -> list[Query]:
    """The queries of a search, one by one. Raises InvalidInputError for what is none; `built`: of
    which vectors there could be."""
    if isinstance(queries, (str, Encoded)):
        return [queries]
    if (
        not isinstance(queries, Iterable)
        or isinstance(queries, torch.Tensor)
        or getattr(queries, "ndim", 0) > 1
    ):
        raise _no_query(queries, built, "a str or an Encoded, or a list of them")
    wanted: list[Query] = list(queries.values() if isinstance(queries, Mapping) else queries)
    for query in wanted:
        if not isinstance(query, (str, Encoded)):
            raise _no_query(query, built, "a str or an Encoded")
    return wanted


def _no_query(given: object, built: EncoderEntry, expected: str) -> errors.InvalidInputError:
    """The error for what is no query; vectors are told how they become one."""
    shape = getattr(given, "shape", None)
    got = type(given).__name__ + ("" if shape is None else f" of shape {list(shape)}")
    cls = f"of shape [{built.d_cls}]" if built.d_cls else "torch.zeros(0)"
    fix = f"espnx.Encoded(cls=..., tokens=...), cls {cls}, tokens of shape [n, {built.dim}]"
    return errors.InvalidInputError(
        "a query", got=got, expected=expected, fix=None if shape is None else fix
    )
