"""Specs that are written are read again as they were, and nothing is written over."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from espnx import errors
from espnx.device.model.spec import load_spec, parse_spec, presets
from espnx.device.model.write import spec_text, write_spec


@pytest.mark.parametrize("name", presets())
def test_read_again(name: str, tmp_path: Path) -> None:
    spec = load_spec(name)
    write_spec(tmp_path / f"{name}.yaml", spec)
    assert load_spec(tmp_path / f"{name}.yaml") == spec


def test_a_range_is_read_again() -> None:
    spec = load_spec("pm9a3")
    read = replace(spec.flash.read_bandwidth, low=6.5e9, high=7e9)
    other = replace(spec, flash=replace(spec.flash, read_bandwidth=read))
    again = parse_spec(spec_text(other).encode(), "a test").flash.read_bandwidth
    assert (again.low, again.high) == pytest.approx((6.5e9, 7e9), rel=1e-15)


def test_words_that_yaml_has_a_meaning_for(tmp_path: Path) -> None:
    """Quoted, so that they are text again."""
    spec = load_spec("pm9a3")
    for title in ("null", "yes", "1.5", "a: b # c", "{it's", "  two  spaces", "\u00e9\u6f22"):
        other = replace(spec, title=title)
        assert parse_spec(spec_text(other).encode(), "a test") == other


def test_nothing_is_written_over(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("mine")
    with pytest.raises(errors.InvalidInputError, match="which is there"):
        write_spec(path, load_spec("pm9a3"))
    assert path.read_text() == "mine"
    with pytest.raises(errors.WriteError):
        write_spec(tmp_path / "no" / "mine.yaml", load_spec("pm9a3"))
