"""Reads specs of all kinds: presets by name, others by path."""

from __future__ import annotations

import functools
import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from importlib import resources
from pathlib import Path
from typing import TypeVar

from ...device.model.reader import SCHEMA_VERSION, SUFFIXES, Figure, meant, missing, names_in
from ...device.model.reader import read_spec as read
from ...device.model.spec_file import Keys, parse_yaml, read_file
from ...errors import InvalidInputError
from ..figures import Range
from .graphs import CollectionSpec, ServerSpec
from .kinds import ClusterSpec, GpuSpec, HostSpec, ModelSpec, NetworkSpec, ProgramSpec, SystemSpec
from .rag import GenerationSpec, GraphWalkSpec, RetrieverSpec, SearcherSpec, ServiceSpec

S = TypeVar("S")

#: The word of each kind, which is its folder of presets, too.
WORDS: Mapping[type, str] = {
    GpuSpec: "gpu",
    HostSpec: "host",
    NetworkSpec: "network",
    ProgramSpec: "program",
    SystemSpec: "system",
    ModelSpec: "workload",
    ClusterSpec: "clusters",
    RetrieverSpec: "retriever",
    GraphWalkSpec: "walk",
    SearcherSpec: "searcher",
    ServiceSpec: "service",
    GenerationSpec: "generation",
    CollectionSpec: "collection",
    ServerSpec: "server",
}


#: Of so many layers one may have experts: a few such periods are simulated, layer by layer.
EVERY_MAX = 256


def presets(kind: type) -> tuple[str, ...]:
    """Names of the specs of a kind that come with the package."""
    return names_in(__package__, f"presets/{WORDS[kind]}")


def load(kind: type[S], source: str, beside: str | os.PathLike[str] | None = None) -> S:
    """A preset by its name, or what a file says (a name that ends in ``.yaml`` or ``.yml``).

    Args:
        beside: the file that names this one, if one does: paths begin at its folder.

    Raises:
        InvalidInputError: a name that is none.
        FileMissingError, ReadError: as it says.
        FormatError: the file is no such spec; says which field, what it has, what it should have.
    """
    if not source.endswith(SUFFIXES):
        return load_preset(kind, source)  # type: ignore[arg-type]
    path = source if beside is None else os.fspath(Path(beside).parent / source)
    return _parsed(kind, read_file(path, what(kind)), path)


@functools.cache
def load_preset(kind: type[S], name: str) -> S:
    """Raises InvalidInputError for a name that is none of `presets`."""
    known = presets(kind)
    if name not in known:
        raise InvalidInputError(
            what(kind),
            got=name,
            expected=f"{', '.join(known)}, or the path of a .yaml file",
            fix=meant(name, known),
        )
    file = resources.files(__package__) / "presets" / WORDS[kind] / f"{name}.yaml"
    return _parsed(kind, file.read_bytes(), str(file))


def what(kind: type) -> str:
    """It, in words."""
    return f"a {WORDS[kind]} spec"


def _parsed(kind: type[S], data: bytes, path: str) -> S:
    spec, tree = read(data, path, kind, what(kind), versions=(SCHEMA_VERSION,))
    if isinstance(spec, ProgramSpec):
        _check_program(spec, tree)
    if isinstance(spec, ModelSpec):
        _check_model(spec, tree)
    if isinstance(spec, ClusterSpec) and not spec.clusters:
        raise missing(tree.place, ("clusters",), "a share for one size or more", what(ClusterSpec))
    if isinstance(spec, RetrieverSpec):
        _check_retriever(spec, tree)
    if isinstance(spec, ServiceSpec):
        _check_service(spec, tree)
    return spec


def _check_program(spec: ProgramSpec, tree: Keys) -> None:
    """What a program must say that attends where it does."""
    needed = {
        "drives": ("flash_share", "gpu_bandwidth", "entry_time", "entries_at_once", "spill_tokens"),
        "cpu": ("copy_bandwidth", "cpu_bandwidth"),
    }[spec.attention]
    for name in needed:
        if getattr(spec, name) is None:
            why = f"given, as attention is on {spec.attention}"
            raise missing(tree.place, (name,), why, what(ProgramSpec))


def _check_retriever(spec: RetrieverSpec, tree: Keys) -> None:
    """What its representation must say, and what goes through its network if it has one."""
    needed = {
        "vectors": ("vector",),
        "lists": ("lists", "touched", "postings", "terms", "longest"),
    }[spec.representation]
    if spec.parameters is not None:
        needed += ("tokens", "weights")
    for name in needed:
        if getattr(spec, name) is None:
            why = f"given, as its passages are {spec.representation}"
            raise missing(tree.place, (name,), why, what(RetrieverSpec))


def _check_service(spec: ServiceSpec, tree: Keys) -> None:
    """Drives are read by the host or by what searches in them, and by one of them alone."""
    needed: tuple[str, ...] = ()
    if spec.kept == "drives":
        needed = ("drives", "flash") if spec.read is None else ("drives", "read_ahead")
    for name in needed:
        if getattr(spec, name) is None:
            raise missing(tree.place, (name,), "given, as it reads drives", what(ServiceSpec))
    if spec.read is not None and spec.flash is not None:
        raise tree.place.wrong(
            "drives that are read twice",
            got="read and flash",
            expected="read, of a host, or flash, of what searches in the drive",
        )


def _check_model(spec: ModelSpec, tree: Keys) -> None:
    shape = spec.model
    if shape.heads.value % shape.kv_heads.value:
        raise tree.place.wrong(
            "heads that share no K and V",
            got=f"{shape.heads} query heads over {shape.kv_heads}",
            expected="a whole number of query heads for each",
        )
    experts = (shape.experts, shape.active_experts)
    if (experts[0] is None) != (experts[1] is None):
        name = "experts" if experts[0] is None else "active_experts"
        raise missing(tree.place, ("model", name), "given, as the other is", what(ModelSpec))
    if experts[0] and experts[1] and experts[1].value > experts[0].value:
        raise tree.place.wrong(
            "experts that are not there", got=str(experts[1]), expected=f"at most {experts[0]}"
        )
    every = shape.expert_every
    if every is not None:
        most = min(int(shape.layers.value), EVERY_MAX)
        if every.value > most:
            raise tree.place.wrong(
                "layers of which one has experts", got=str(every), expected=f"1 to {most}"
            )


def figures(spec: object, prefix: str) -> dict[str, Figure]:
    """All figures of a spec, by the names of the fields that lead to them."""
    found: dict[str, Figure] = {}
    for each in fields(spec):  # type: ignore[arg-type]
        name, value = f"{prefix}.{each.name}", getattr(spec, each.name)
        if isinstance(value, Figure):
            found[name] = value
        elif is_dataclass(value):
            found |= figures(value, name)
        elif isinstance(value, Mapping):
            found |= {f"{name}.{key}": figure for key, figure in value.items()}
    return found


def as_range(figure: Figure) -> Range:
    low = figure.value if figure.low is None else figure.low
    high = figure.value if figure.high is None else figure.high
    return Range(low, high, figure.source, figure.confidence)


def is_a(kind: type, source: str) -> bool:
    """Whether a system is of that kind, `ServiceSpec` or `ServerSpec`: a preset, or a file that has
    what such a file alone has.

    Raises:
        FileMissingError, ReadError, FormatError: as they say, of a file.
    """
    if not source.endswith(SUFFIXES):
        return source in presets(kind)
    has = parse_yaml(read_file(source, "a system spec"), source, "a system spec").items
    return {ServiceSpec: "searcher", ServerSpec: "cores"}[kind] in has
