"""Kinds of first stages by name. A kind is imported when a store or a build asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from ... import errors
from ...storage.parse import Fields
from ..sparse_encoder import SparseEncoder
from .interface import FirstStage

_SEVERAL = "several"  # of which each is named
#: kind -> module and class, which has ``new`` and ``parse`` beside what `FirstStage` asks for.
_KINDS: dict[str, tuple[str, str]] = {
    "ivf": ("espnx.retrieval.first_stage.ivf.stage", "IvfStage"),
    "bm25": ("espnx.retrieval.first_stage.lexical.stage", "Bm25Stage"),
    "splade": ("espnx.retrieval.first_stage.lexical.stage", "SpladeStage"),
    "graph": ("espnx.retrieval.first_stage.graph.stage", "GraphStage"),
    _SEVERAL: ("espnx.retrieval.first_stage.several", "SeveralStages"),
}


def register(kind: str, module: str, name: str) -> None:
    """Makes a class known as a kind. Raises InvalidInputError for a name that another class has."""
    if _KINDS.setdefault(kind, (module, name)) != (module, name):
        raise errors.InvalidInputError(f"first-stage kind {kind!r}", got=f"{module}.{name}", expected="a name that is free")


def kinds() -> list[str]:
    """Names that a build may give, ascending."""
    return sorted(_KINDS.keys() - {_SEVERAL})


def stage_class(kind: str) -> Any:
    """The class of a kind that a build may name. Raises InvalidInputError for another one."""
    if kind not in kinds():
        raise errors.InvalidInputError("first-stage kind", got=repr(kind), expected=" or ".join([", ".join(kinds()[:-1]), kinds()[-1]]))
    return _class_of(kind)


def _class_of(kind: str) -> Any:
    module, name = _KINDS[kind]
    return getattr(importlib.import_module(module), name)


def new_stage(named: Sequence[str], settings: Any, d_cls: int, dim: int) -> FirstStage:
    """The untrained stage of a build, or several. Raises InvalidInputError for what cannot be."""
    stages = [stage_class(kind).new(settings, d_cls, dim) for kind in named]
    found: FirstStage = stages[0] if len(stages) == 1 else _class_of(_SEVERAL).of(stages)
    return found


def parse_stage(fields: Fields, d_cls: int, dim: int) -> FirstStage:
    """The stage of which `described` was written, without what was trained. Raises FormatError. `d_cls`, `dim`: of the encoder."""
    stage: FirstStage = _class_of(fields.choice("kind", sorted(_KINDS))).parse(fields, d_cls, dim)
    return stage


def kinds_of(stage: FirstStage) -> tuple[str, ...]:
    """As `new_stage` takes them."""
    return tuple(each.kind for each in stage.stages) if stage.kind == _SEVERAL else (stage.kind,)  # type: ignore[attr-defined]


def with_sparse_encoder(stage: FirstStage, encoder: SparseEncoder) -> FirstStage:
    """A stage with the model that encodes its texts at hand. Raises InvalidInputError for a stage that has none, or has another one."""
    if not hasattr(stage, "with_sparse_encoder"):
        raise errors.InvalidInputError("sparse_encoder", got=encoder.name, expected="an index that has a first stage of splade")
    changed: FirstStage = stage.with_sparse_encoder(encoder)
    return changed


def described(stage: FirstStage) -> dict[str, Any]:
    """As manifests keep a stage."""
    return {"kind": stage.kind, **stage.describe()}


def in_words(description: Mapping[str, Any]) -> str:
    """What `described` says, on one line: the kind, and what can be said in a word; a kind with an `in_words` of its own says it so."""
    if "stages" in description:
        return "; ".join(in_words(each) for each in description["stages"])
    if own := getattr(_class_of(str(description["kind"])), "in_words", None):
        return str(own(description))
    words = (f"{name} {value}" for name, value in description.items() if name != "kind" and isinstance(value, (str, int, float)))
    return ", ".join([str(description["kind"]), *words])
