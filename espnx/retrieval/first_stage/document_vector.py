"""The one vector of a document by which stages of nearest neighbours find candidates: the encoder's
CLS vector, or its tokens pooled."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from ... import errors
from ...storage.parse import Fields
from ..encoder import Encoded
from .pooling import POOLINGS, Pooling, make_pooling

_DIM_MAX = 1 << 24


@dataclass(frozen=True, eq=False)
class DocumentVector:
    """See the module.

    Attributes:
        pooling: makes the vector from the tokens; None: it is the CLS vector.
        dim: of the vector.
    """

    pooling: Pooling | None
    dim: int

    @classmethod
    def new(cls, pooling: str | None, d_cls: int, dim: int) -> DocumentVector:
        """`pooling`: as `BuildOptions` has it. Raises InvalidInputError for settings that do not
        fit the dimensions."""
        name = pooling or ("cls" if d_cls else "mean")
        if name == "cls" and not d_cls:
            raise errors.InvalidInputError(
                "pooling",
                got="'cls'",
                expected="mean or muvera, for an encoder without a CLS vector",
            )
        made = None if name == "cls" else make_pooling(name, dim)
        return cls(made, d_cls if made is None else made.dim)

    @classmethod
    def parse(cls, fields: Fields, d_cls: int, dim: int) -> DocumentVector:
        """The opposite of `describe`. Raises FormatError."""
        name, own = fields.choice("vector", ("cls", *POOLINGS)), fields.whole("dim", 1, _DIM_MAX)
        listed = fields.inner("parameters")
        parameters = {each: listed.whole(each, most=1 << 63) for each in listed}
        try:
            pooling = None if name == "cls" else make_pooling(name, dim, **parameters)
        except errors.InvalidInputError as error:
            fields.refuse("parameters", error.expected, f"{error.what}: {error.got}")
        if own != (d_cls if pooling is None else pooling.dim):
            fields.refuse("dim", d_cls if pooling is None else pooling.dim)
        return cls(pooling, own)

    def describe(self) -> dict[str, Any]:
        """What manifests keep of it."""
        return {
            "vector": "cls" if self.pooling is None else self.pooling.name,
            "parameters": {} if self.pooling is None else self.pooling.parameters(),
            "dim": self.dim,
        }

    def of_document(self, document: Encoded) -> torch.Tensor:
        """float32 [dim]."""
        return document.cls if self.pooling is None else self.pooling.documents(document.tokens)

    def of_query(self, query: Encoded) -> np.ndarray:
        """float32 [dim]."""
        return (
            (query.cls if self.pooling is None else self.pooling.query(query.tokens)).cpu().numpy()
        )
