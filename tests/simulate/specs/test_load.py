"""Machines and workloads as files: those that come along, a user's own, and what is wrong."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from espnx import errors
from espnx.device.model.reader import CONFIDENCES
from espnx.simulate.specs.graphs import CollectionSpec, ServerSpec
from espnx.simulate.specs.kinds import (
    ClusterSpec,
    GpuSpec,
    HostSpec,
    ModelSpec,
    NetworkSpec,
    ProgramSpec,
    SystemSpec,
)
from espnx.simulate.specs.load import WORDS, as_range, figures, load, load_preset, presets
from espnx.simulate.specs.rag import (
    GenerationSpec,
    GraphWalkSpec,
    RetrieverSpec,
    SearcherSpec,
    ServiceSpec,
)

KINDS = (
    GpuSpec,
    HostSpec,
    NetworkSpec,
    ProgramSpec,
    SystemSpec,
    ModelSpec,
    ClusterSpec,
    RetrieverSpec,
    GraphWalkSpec,
    SearcherSpec,
    ServiceSpec,
    GenerationSpec,
    CollectionSpec,
    ServerSpec,
)
PRESETS = Path(__file__).resolve().parents[3] / "espnx" / "simulate" / "specs" / "presets"


def text_of(kind: type, name: str) -> str:
    return (PRESETS / WORDS[kind] / f"{name}.yaml").read_text()


@pytest.mark.parametrize(
    ("kind", "name"), [(kind, name) for kind in KINDS for name in presets(kind)]
)
def test_what_comes_along(kind: type, name: str) -> None:
    """Every figure says where it is from; a range is around its figure."""
    spec = load_preset(kind, name)
    assert spec.name == name
    for figure in figures(spec, name).values():
        assert figure.confidence in CONFIDENCES
        assert figure.source
        assert as_range(figure).low <= figure.value <= as_range(figure).high


def test_there_is_one_of_each_kind() -> None:
    assert all(presets(kind) for kind in KINDS)
    assert {"smartssd-4", "smartssd-8", "smartssd-16"} < set(presets(SystemSpec))


def test_a_user_s_own(tmp_path: Path) -> None:
    """By path; what it names is beside it, or comes along."""
    (tmp_path / "gpu.yaml").write_text(text_of(GpuSpec, "a100-40gb").replace("a100-40gb", "mine"))
    own = text_of(SystemSpec, "smartssd-4").replace("gpu: a100-40gb", "gpu: gpu.yaml")
    (tmp_path / "own.yaml").write_text(own)
    system = load(SystemSpec, str(tmp_path / "own.yaml"))
    assert load(GpuSpec, system.gpu, tmp_path / "own.yaml").name == "mine"
    assert load(HostSpec, system.host, tmp_path / "own.yaml").name == "xeon-6342"


def test_unknown_names() -> None:
    with pytest.raises(errors.InvalidInputError, match=r"did you mean smartssd-16\?"):
        load(SystemSpec, "smartsd-16")
    with pytest.raises(errors.FileMissingError, match="no such workload spec"):
        load(ModelSpec, "nowhere.yaml")


MODEL = "opt-66b"


@pytest.mark.parametrize(
    ("kind", "name", "old", "new", "said"),
    [
        (ModelSpec, MODEL, "schema_version: 2", "schema_version: 1", "a workload spec is of ano"),
        (ModelSpec, MODEL, "layers:", "layer:", "a workload spec has no such field: model.layer"),
        (ModelSpec, MODEL, "kv_heads: {value: 72", "kv_heads: {value: 7", "share no K and V"),
        (ModelSpec, "glam-143b", "  experts: {value: 64", "  experts: {value: 1", "not there"),
        (ModelSpec, "glam-143b", "  experts:", "  #", "lacks a field: model.experts"),
        (ModelSpec, "glam-143b", "expert_every: {value: 2", "expert_every: {value: 33", "1 to 32"),
        (SystemSpec, "smartssd-4", "kv: drives", "kv: tape", "expected drives, memory"),
        (SystemSpec, "smartssd-4", "[writeback, x-cache]", "[write]", "expected writeback, x-c"),
        (SystemSpec, "smartssd-4", "{value: 4,", "{value: 0,", "out of range"),
        (GpuSpec, "a100-40gb", "value: 1555", "value: -1555", "out of range"),
        (GpuSpec, "a100-40gb", "high: 75", "high: 101", "at most all of it"),
        (HostSpec, "xeon-6342", "memory:", "memry:", "did you mean memory"),
        (NetworkSpec, "ethernet-100g", "unit: Gb/s", "unit: GHz", "an unknown word"),
        (ClusterSpec, "sift", "  12:", "  0:", "a whole number of KiB, 1 or more"),
        (ClusterSpec, "sift", "value: 48.09", "value: 148.09", "at most all of it"),
        (ClusterSpec, "stress", "  16: {", "  # {", "clusters.*expected a mapping|lacks a field"),
        (ProgramSpec, "hilos", "entry_time:", "#", "lacks a field: entry_time"),
        (ProgramSpec, "flexgen", "copy_bandwidth:", "#", "as attention is on cpu"),
    ],
)
def test_files_that_are_wrong(
    kind: type, name: str, old: str, new: str, said: str, tmp_path: Path
) -> None:
    text = text_of(kind, name)
    assert old in text
    path = tmp_path / "wrong.yaml"
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(errors.FormatError, match=said):
        load(kind, str(path))


def test_every_field_of_a_program_is_said_by_one() -> None:
    """None is an option that nobody needs."""
    programs = [load_preset(ProgramSpec, name) for name in presets(ProgramSpec)]
    for each in fields(ProgramSpec):
        assert any(getattr(program, each.name) is not None for program in programs), each.name
