"""Kinds of first stages by name: our own, those that other packages bring (entry points of the
group ``espnx.first_stages``), and, for a build, ``module:class``. A kind is imported when a store
or a build asks for it.

A store names the kinds of its stages, and never a module: opening one imports nothing but what is
known here or was installed.
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from ... import errors
from ...storage.parse import Fields
from ..sparse_encoder import SparseEncoder
from .interface import KIND, FirstStage

GROUP = "espnx.first_stages"
_SEVERAL = "several"  # of which each is named
#: kind -> module and class, which has ``new`` and ``parse`` beside what `FirstStage` asks for.
#: Nobody replaces them.
_KINDS: dict[str, tuple[str, str]] = {
    "ivf": ("espnx.retrieval.first_stage.ivf.stage", "IvfStage"),
    "bm25": ("espnx.retrieval.first_stage.lexical.stage", "Bm25Stage"),
    "splade": ("espnx.retrieval.first_stage.lexical.stage", "SpladeStage"),
    "graph": ("espnx.retrieval.first_stage.graph.stage", "GraphStage"),
    "clusters": ("espnx.retrieval.first_stage.clusters.stage", "ClusterStage"),
    _SEVERAL: ("espnx.retrieval.first_stage.several", "SeveralStages"),
}


def register(kind: str, module: str, name: str) -> None:
    """Makes a class known as a kind. Raises InvalidInputError for a name that another class has."""
    if _KINDS.setdefault(kind, (module, name)) != (module, name):
        raise errors.InvalidInputError(
            f"first-stage kind {kind!r}", got=f"{module}.{name}", expected="a name that is free"
        )


def _brought() -> dict[str, EntryPoint]:
    """Kinds of other packages."""
    return {each.name: each for each in entry_points(group=GROUP) if each.name not in _KINDS}


def kinds() -> list[str]:
    """Names that a build may give, ascending."""
    return sorted({*_KINDS, *_brought()} - {_SEVERAL})


def kind_named(name: str) -> str:
    """The kind that a build names: one of `kinds`, or of a class that is named as ``module:class``,
    which is known to this process from here on. Raises InvalidInputError,
    MissingDependencyError."""
    if ":" not in name:
        stage_class(name)
        return name
    kind = getattr(_loaded(EntryPoint(name, name, GROUP)), "kind", None)
    if not isinstance(kind, str) or KIND.fullmatch(kind) is None:
        raise errors.InvalidInputError(
            f"first stage {name!r}",
            got=f"kind {kind!r}",
            expected="a name of at most 16 letters, digits and _",
        )
    register(kind, *name.split(":", 1))
    return kind


def stage_class(kind: str) -> Any:
    """The class of a kind that a build may name. Raises InvalidInputError for another one."""
    if kind == _SEVERAL or (kind not in _KINDS and kind not in _brought()):
        raise errors.InvalidInputError(
            "first-stage kind",
            got=repr(kind),
            expected=" or ".join([", ".join(kinds()[:-1]), kinds()[-1]]),
        )
    return _class_of(kind)


def _class_of(kind: str) -> Any:
    if kind in _KINDS:
        module, name = _KINDS[kind]
        return getattr(importlib.import_module(module), name)
    entry = _brought()[kind]
    found = _loaded(entry)
    if getattr(found, "kind", None) != kind or KIND.fullmatch(kind) is None:
        got = f"{entry.value}, of kind {getattr(found, 'kind', None)!r}"
        raise errors.InvalidInputError(
            f"first stage {kind!r}", got=got, expected=f"a class of kind {kind!r}"
        )
    return found


def _loaded(entry: EntryPoint) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        raise errors.MissingDependencyError(
            f"first stage {entry.name!r} cannot be loaded", got=str(error), expected=entry.value
        ) from error


def new_stage(settings: Mapping[str, Any], pooling: str | None, d_cls: int, dim: int) -> FirstStage:
    """The untrained stage of a build, or several, by kind with the `Settings` of each. Raises
    InvalidInputError for what cannot be."""
    stages = [stage_class(kind).new(own, pooling, d_cls, dim) for kind, own in settings.items()]
    found: FirstStage = stages[0] if len(stages) == 1 else _class_of(_SEVERAL).of(stages)
    return found


def parse_stage(fields: Fields, d_cls: int, dim: int) -> FirstStage:
    """The stage of which `described` was written, without what was trained. Raises FormatError.
    `d_cls`, `dim`: of the encoder."""
    said = fields.values().get("kind")
    among = _KINDS if isinstance(said, str) and said in _KINDS else {*_KINDS, *_brought()}
    stage: FirstStage = _class_of(fields.choice("kind", sorted(among))).parse(fields, d_cls, dim)
    return stage


def kinds_of(stage: FirstStage) -> tuple[str, ...]:
    """The kinds of a stage as `new_stage` takes them."""
    return tuple(each.kind for each in stage.stages) if stage.kind == _SEVERAL else (stage.kind,)  # type: ignore[attr-defined]


def with_sparse_encoder(stage: FirstStage, encoder: SparseEncoder) -> FirstStage:
    """A stage with the model that encodes its texts at hand. Raises InvalidInputError for a stage
    that has none, or has another one."""
    if not hasattr(stage, "with_sparse_encoder"):
        raise errors.InvalidInputError(
            "sparse_encoder", got=encoder.name, expected="an index that has a first stage of splade"
        )
    changed: FirstStage = stage.with_sparse_encoder(encoder)
    return changed


def described(stage: FirstStage) -> dict[str, Any]:
    """What manifests keep of a stage."""
    return {"kind": stage.kind, **stage.describe()}


def in_words(description: Mapping[str, Any]) -> str:
    """What `described` says, on one line: the kind, and what can be said in a word; a kind with an
    `in_words` of its own says it so."""
    if "stages" in description:
        return "; ".join(in_words(each) for each in description["stages"])
    if own := getattr(_class_of(str(description["kind"])), "in_words", None):
        return str(own(description))
    words = (
        f"{name} {value}"
        for name, value in description.items()
        if name != "kind" and isinstance(value, (str, int, float))
    )
    return ", ".join([str(description["kind"]), *words])
