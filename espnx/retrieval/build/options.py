"""How a store is built: the options, checked."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from ... import errors
from ...checks import check_finite, check_whole, plain
from ...device.record_layout import FORMAT_NUMBERS
from ..first_stage.pooling import POOLINGS
from ..first_stage.registry import kind_named, kinds
from ..first_stage.settings import make_settings, settings_class

COARSE_FORMATS = ("bit1", "residual1", "residual2", "residual4", "int8")
#: First stages as callers name them: one, several, or each with its options.
FirstStages = str | Sequence[str] | Mapping[str, Mapping[str, Any]]
#: Keywords of `espnx.build` that are options of one stage: its kind, and what the stage calls them.
STAGE_KEYWORDS = {
    "first_stage_code": ("ivf", "code"),
    "nlist": ("ivf", "nlist"),
    "language": ("bm25", "language"),
    "sparse_encoder": ("splade", "sparse_encoder"),
}


@dataclass(frozen=True)
class BuildOptions:
    """How a store is built.

    Attributes:
        format: of the token vectors in the records: ``fp16``, ``fp32``, ``bf16``, ``int8``,
            ``bit1``, ``residual1``, ``residual2`` or ``residual4``.
        first_stages: what finds candidates: ``ivf``, ``graph``, ``clusters``, ``bm25``, ``splade``,
            those of other packages (first_stage/registry.py) or ``module:class``; one or several,
            or a mapping from each to its options. Searches take the first unless told otherwise.
            Once checked, the `Settings` of each, by kind.
        unused: options of stages that are not among them, by kind; they are checked, and tell
            builds apart.
        pca: dimensions to project token vectors to; None keeps them.
        cls_weight: weight of the CLS similarity in the score, beside MaxSim.
        memory: what the process may use, as bytes or ``1GiB``; None: half a GiB beside what
            it holds already, 1 GiB at least.
        directories: where data segments go, one per SSD; empty keeps them in the store's directory.
        coarse: format of a second, small record of every document, for the cascade; None: there is
            none.
        pooling: where first-stage vectors come from: ``cls``, or tokens pooled by ``mean`` or
            ``muvera``; None: CLS if there is one, else the mean.
        centroids: of the codebook of residual formats; None chooses from the number of tokens, as
            ColBERT does.
    """

    format: str = "fp16"
    first_stages: FirstStages = ("ivf",)
    unused: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    pca: int | None = None
    cls_weight: float = 1.0
    memory: int | str | None = None
    directories: Sequence[str] = ()
    coarse: str | None = None
    pooling: str | None = None
    centroids: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            # NumPy's numbers are numbers
            object.__setattr__(self, each.name, plain(getattr(self, each.name)))
        if not isinstance(self.format, str) or self.format not in FORMAT_NUMBERS:
            raise errors.InvalidInputError(
                "unknown record format", got=repr(self.format), expected=" or ".join(FORMAT_NUMBERS)
            )
        for name, stages in (
            ("first_stages", _by_kind(self.first_stages)),
            ("unused", self.unused),
        ):
            object.__setattr__(
                self, name, {kind: make_settings(kind, options) for kind, options in stages.items()}
            )
        for name, value in (("centroids", self.centroids), ("pca", self.pca)):
            if value is not None:
                check_whole(name, value, 1)
        if isinstance(self.directories, (str, bytes, os.PathLike)) or not isinstance(
            self.directories, Iterable
        ):
            raise errors.InvalidInputError(
                "directories",
                got=repr(self.directories),
                expected="a sequence of them",
                fix=f"pass [{self.directories!r}]",
            )
        for directory in self.directories:
            if not isinstance(directory, (str, os.PathLike)) or not os.fspath(directory):
                raise errors.InvalidInputError(
                    "directories", got=repr(directory), expected="paths, none of them empty"
                )
        # Absolute from here on: a build may be resumed, and its store opened, from anywhere.
        object.__setattr__(
            self, "directories", [os.path.abspath(directory) for directory in self.directories]
        )
        if self.coarse is not None and self.coarse not in COARSE_FORMATS:
            raise errors.InvalidInputError(
                "coarse format", got=repr(self.coarse), expected=", ".join(COARSE_FORMATS)
            )
        if self.pooling not in (None, "cls", *POOLINGS):
            raise errors.InvalidInputError(
                "pooling", got=repr(self.pooling), expected=f"cls, {' or '.join(POOLINGS)}"
            )
        check_finite("cls_weight", self.cls_weight)

    @classmethod
    def given(cls, **keywords: Any) -> BuildOptions:
        """Makes options of keywords of `espnx.build`, those of `STAGE_KEYWORDS` among them; None:
        not given. Raises InvalidInputError."""
        chosen = given_options(**keywords)
        own = {name: chosen.pop(name) for name in STAGE_KEYWORDS if name in chosen}
        stages, unused = (
            _by_kind(chosen.pop("first_stages", cls.first_stages)),
            dict[str, dict[str, Any]](),
        )
        for name, value in own.items():
            kind, option = STAGE_KEYWORDS[name]
            if option in stages.get(kind, {}):
                raise errors.InvalidInputError(
                    name,
                    got=repr(value),
                    expected=f"once: it is the option {option} of first stage {kind}",
                )
            (stages if kind in stages else unused).setdefault(kind, {})[option] = value
        return cls(first_stages=stages, unused=unused, **chosen)

    @property
    def stages(self) -> dict[str, Any]:
        """The `Settings` of each first stage, by kind, in the order in which they were named."""
        return dict(self.first_stages)  # type: ignore[arg-type]  # once checked, it is a mapping

    def stage_options(self) -> dict[str, Any]:
        """Options of stages: those of `STAGE_KEYWORDS` by that name, whether or not their stage is
        wanted; others as ``kind.option``."""
        known = {place: name for name, place in STAGE_KEYWORDS.items()}
        held: dict[str, Any] = {**self.unused, **self.stages}
        held |= {kind: settings_class(kind)() for kind, _ in known if kind not in held}
        return {
            known.get((kind, each.name), f"{kind}.{each.name}"): getattr(settings, each.name)
            for kind, settings in held.items()
            for each in fields(settings)
        }


def _by_kind(given: Any) -> dict[str, dict[str, Any]]:
    """First stages by kind, in the order in which they are named, with the options that are given
    of each."""
    named = (
        (given,) if isinstance(given, str) else tuple(given) if isinstance(given, Iterable) else ()
    )
    if (
        not named
        or not all(isinstance(kind, str) for kind in named)
        or len(set(named)) < len(named)
    ):
        raise errors.InvalidInputError(
            "first_stages",
            got=repr(given),
            expected=f"of {', '.join(kinds())}, one or several, each once",
        )
    found: dict[str, dict[str, Any]] = {}
    for name in named:
        options = given[name] if isinstance(given, Mapping) else {}
        if not isinstance(options, Mapping):
            raise errors.InvalidInputError(
                f"options of first stage {name!r}", got=repr(options), expected="a mapping, or {}"
            )
        if (kind := kind_named(name)) in found:
            raise errors.InvalidInputError(
                "first_stages", got=repr(given), expected="each kind once"
            )
        found[kind] = dict(options)
    return found


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
