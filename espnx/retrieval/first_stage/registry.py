"""Kinds of first stages by name. A kind is imported when a store or a build asks for it."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

from ... import errors
from ...storage.parse import Fields
from .interface import FirstStage

#: kind -> module and class, which has ``new`` and ``parse`` beside what `FirstStage` asks for.
_KINDS: dict[str, tuple[str, str]] = {"ivf": ("espnx.retrieval.first_stage.ivf", "IvfStage")}


def register(kind: str, module: str, name: str) -> None:
    """Makes a class known as a kind. Raises InvalidInputError for a name that another class has."""
    if _KINDS.setdefault(kind, (module, name)) != (module, name):
        raise errors.InvalidInputError(f"first-stage kind {kind!r}", got=f"{module}.{name}", expected="a name that is free")


def kinds() -> list[str]:
    """Names that are known, ascending."""
    return sorted(_KINDS)


def stage_class(kind: str) -> Any:
    """The class of a kind. Raises InvalidInputError for an unknown one."""
    if kind not in _KINDS:
        raise errors.InvalidInputError("first-stage kind", got=repr(kind), expected=" or ".join(kinds()))
    module, name = _KINDS[kind]
    return getattr(importlib.import_module(module), name)


def parse_stage(fields: Fields, d_cls: int, dim: int) -> FirstStage:
    """The stage of which `described` was written, without what was trained. Raises FormatError. `d_cls`, `dim`: of the encoder."""
    stage: FirstStage = stage_class(fields.choice("kind", kinds())).parse(fields, d_cls, dim)
    return stage


def described(stage: FirstStage) -> dict[str, Any]:
    """As manifests keep a stage."""
    return {"kind": stage.kind, **stage.describe()}


def in_words(description: Mapping[str, Any]) -> str:
    """What `described` says, on one line: the kind, and what can be said in a word."""
    words = (f"{name} {value}" for name, value in description.items() if name != "kind" and isinstance(value, (str, int, float)))
    return ", ".join([str(description["kind"]), *words])
