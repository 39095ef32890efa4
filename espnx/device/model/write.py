"""Specs written as YAML: what `load_spec` reads again, figure by figure. A file of its own, since
whoever reads specs writes none."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from typing import Any

import yaml

from ... import errors
from .reader import SCHEMA_VERSION, Figure
from .spec import DeviceSpec


def spec_text(spec: DeviceSpec) -> str:
    """The YAML file of a spec, without what it does not say."""
    words = {"schema_version": SCHEMA_VERSION, **_tree(spec)}
    text: str = yaml.safe_dump(
        words, sort_keys=False, default_flow_style=None, allow_unicode=True, width=1000
    )
    return text


def _tree(value: Any) -> Any:
    if isinstance(value, Figure):
        per_unit = value.value / value.number
        bounds = {"low": value.low, "high": value.high}
        return {
            "value": value.number,
            **{name: each / per_unit for name, each in bounds.items() if each is not None},
            "unit": value.unit,
            "source": value.source,
            "confidence": value.confidence,
        }
    if is_dataclass(value):
        every = {each.name: _tree(getattr(value, each.name)) for each in fields(value)}
        return {name: each for name, each in every.items() if each not in (None, {}, [])}
    if isinstance(value, Mapping):
        return {str(key): _tree(each) for key, each in value.items()}
    return list(value) if isinstance(value, tuple) else value


def write_spec(path: str | os.PathLike[str], spec: DeviceSpec) -> None:
    """A new file, which appears whole or not at all. Raises InvalidInputError where there is one,
    WriteError."""
    text, place = spec_text(spec), os.fspath(path)
    try:
        with open(place, "x", encoding="utf-8") as file:
            try:
                file.write(text)
                file.flush()
            except OSError:
                os.unlink(place)
                raise
    except FileExistsError as error:
        raise errors.InvalidInputError(
            "a device spec",
            got=f"{place}, which is there",
            expected="a new file",
            fix="another name, or remove it",
        ) from error
    except OSError as error:
        raise errors.WriteError(
            "cannot write a device spec", path=place, errno=error.errno
        ) from error
