"""How a store is built: the options, checked."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ... import errors
from ...checks import check_finite, check_whole, plain
from ...device.record_layout import FORMAT_NUMBERS
from ..first_stage.ivf.arrays import CODES
from ..first_stage.pooling import POOLINGS
from ..first_stage.registry import kinds, stage_class

COARSE_FORMATS = ("bit1", "residual1", "residual2", "residual4", "int8")


@dataclass(frozen=True)
class BuildOptions:
    """How a store is built.

    Attributes:
        format: of the token vectors in the records: ``fp16``, ``fp32``, ``bf16``, ``int8``, ``bit1``, ``residual1``, ``residual2`` or
            ``residual4``.
        first_stages: what finds candidates: ``ivf``, ``graph``, or what was registered (first_stage/registry.py), one or several; searches
            take the first unless told otherwise.
        language: of the texts, for ``bm25``: its stemmer (PyStemmer) cuts their endings off, and of English stop words are left out;
            ``none``: words as they stand.
        sparse_encoder: for ``splade``: the model, or a description as `espnx.load_sparse_encoder` takes it; None: ``splade-tiny``.
        first_stage_code: code of the IVF lists: ``flat``, ``sq8``, ``sq6``, ``sq4`` or ``pqM``.
        nlist: number of lists; None chooses from the number of documents.
        pca: dimensions to project token vectors to; None keeps them.
        cls_weight: weight of the CLS similarity in the score, beside MaxSim.
        memory: what the process may use, as bytes or ``1GiB``; None: that, or half a GiB beside what it holds already where that is more.
        directories: where data segments go, one per SSD; empty keeps them in the store's directory.
        coarse: format of a second, small record of every document, for the cascade; None: there is none.
        pooling: where first-stage vectors come from: ``cls``, or tokens pooled by ``mean`` or ``muvera``; None: CLS if there is one, else
            the mean.
        centroids: of the codebook of residual formats; None chooses from the number of tokens, as ColBERT does.
    """

    format: str = "fp16"
    first_stages: str | Sequence[str] = ("ivf",)
    first_stage_code: str = "sq8"
    nlist: int | None = None
    pca: int | None = None
    cls_weight: float = 1.0
    memory: int | str | None = None
    directories: Sequence[str] = ()
    coarse: str | None = None
    pooling: str | None = None
    centroids: int | None = None
    language: str = "english"
    sparse_encoder: Any = None

    def __post_init__(self) -> None:
        for field in fields(self):
            object.__setattr__(self, field.name, plain(getattr(self, field.name)))  # NumPy's numbers are numbers
        if not isinstance(self.format, str) or self.format not in FORMAT_NUMBERS:
            raise errors.InvalidInputError("unknown record format", got=repr(self.format), expected=" or ".join(FORMAT_NUMBERS))
        object.__setattr__(self, "first_stages", _checked_stages(self.first_stages))
        code = self.first_stage_code
        if not isinstance(code, str) or (code not in CODES and re.fullmatch(r"pq[0-9]+", code) is None):
            raise errors.InvalidInputError("first-stage code", got=repr(code), expected=f"{', '.join(CODES)} or pqM")
        for name, value in (("nlist", self.nlist), ("centroids", self.centroids), ("pca", self.pca)):
            if value is not None:
                check_whole(name, value, 1)
        if isinstance(self.directories, (str, bytes, os.PathLike)) or not isinstance(self.directories, Iterable):
            raise errors.InvalidInputError(
                "directories", got=repr(self.directories), expected="a sequence of them", fix=f"pass [{self.directories!r}]"
            )
        for directory in self.directories:
            if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
                raise errors.InvalidInputError("directories", got=repr(directory), expected="paths, none of them empty")
        # Absolute from here on: a build may be resumed, and its store opened, from anywhere.
        object.__setattr__(self, "directories", [os.path.abspath(directory) for directory in self.directories])
        if self.coarse is not None and self.coarse not in COARSE_FORMATS:
            raise errors.InvalidInputError("coarse format", got=repr(self.coarse), expected=", ".join(COARSE_FORMATS))
        if self.pooling not in (None, "cls", *POOLINGS):
            raise errors.InvalidInputError("pooling", got=repr(self.pooling), expected=f"cls, {' or '.join(POOLINGS)}")
        check_finite("cls_weight", self.cls_weight)


def _checked_stages(given: Any) -> tuple[str, ...]:
    named = (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    if not named or not all(isinstance(kind, str) for kind in named) or len(set(named)) < len(named):
        raise errors.InvalidInputError("first_stages", got=repr(given), expected=f"of {', '.join(kinds())}, one or several, each once")
    for kind in named:
        stage_class(kind)
    return named


def checked_dims(dims: Any) -> tuple[int, int]:
    """(d_cls, dim) as Python's numbers. Raises InvalidInputError."""
    try:
        d_cls, dim = (plain(value) for value in dims)
    except (TypeError, ValueError):
        raise errors.InvalidInputError("dims", got=repr(dims), expected="(d_cls, dim)") from None
    check_whole("d_cls of a record", d_cls, 0)
    check_whole("dim of a record", dim, 1)
    return d_cls, dim


def given_options(**options: Any) -> dict[str, Any]:
    """Those that a caller gave: the others are None."""
    return {name: value for name, value in options.items() if value is not None}
