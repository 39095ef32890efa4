"""Sizes before a graph is built are those it has then."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import espnx.graph
from espnx import errors
from espnx.cli.main import main
from espnx.graph.planning import plan_graph
from tests.cli.documents import strict_json
from tests.graph.conftest import clustered


@pytest.mark.parametrize("codes", ["inline", "paged", "memory"])
@pytest.mark.parametrize(("dtype", "pq_bytes"), [("float16", None), ("float32", 5)])
def test_a_plan_is_what_a_build_takes(
    tmp_path: Path, codes: str, dtype: str, pq_bytes: int | None
) -> None:
    options: dict[str, Any] = {
        "codes": codes,
        "vector_dtype": dtype,
        "pq_bytes": pq_bytes,
        "max_degree": 12,
        "num_entry_points": 9,
    }
    plan = plan_graph(700, 10, **options)
    report = espnx.graph.build(clustered(700, 10), tmp_path / "g", **options)
    assert (plan.page_bytes, plan.nodes_per_page, plan.pq_bytes) == (
        report.page_bytes,
        report.nodes_per_page,
        report.pq_bytes,
    )
    with espnx.graph.open(tmp_path / "g") as index:
        sizes = index.facts.file_sizes
        assert len(index.facts.entries) in (9, 10)  # the medoid may be among those that were drawn
        more = (len(index.facts.entries) - 9) * (4 + plan.pq_bytes)
        assert plan.disk["total_bytes"] + more == sum(sizes.values())
        assert plan.disk["nodes_bytes"] == sizes["nodes.bin"]
        assert plan.disk["codes_bytes"] == sizes.get("codes.bin", 0)
        assert abs(plan.memory["total_bytes"] - index.facts.memory_bytes) <= 8 + plan.pq_bytes


def test_memory_does_not_grow_where_codes_are_inline() -> None:
    small, large = (plan_graph(n, 128) for n in (10**6, 10**9))
    assert small.memory == large.memory
    assert plan_graph(10**9, 128, codes="memory").memory["codes_bytes"] == 64 * 10**9
    fit_bytes = 48 * 128**2  # of a rotation, whatever n is
    assert large.build["whole_bytes"] - fit_bytes == 1000 * (small.build["whole_bytes"] - fit_bytes)
    assert large.build["whole_bytes"] > 3 * 512 * 10**9  # two copies of vectors and edges
    assert large.build["least_bytes"] < 21 * 10**9
    assert plan_graph(0, 3).disk["nodes_bytes"] == 0


def test_a_build_asks_for_what_the_plan_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    n, dim = 300, 16
    vectors = np.random.default_rng(0).standard_normal((n, dim)).astype(np.float32)
    monkeypatch.setattr(
        importlib.import_module("espnx.graph.build"), "available_bytes", lambda: 1000
    )
    with pytest.raises(errors.OutOfMemoryError) as caught:
        espnx.graph.build(vectors, tmp_path / "g", threads=1)
    assert caught.value.needed_bytes == plan_graph(n, dim).build["whole_bytes"]


@pytest.mark.parametrize(
    "wrong",
    [
        {"n": -1},
        {"n": 2**32},
        {"dim": 0},
        {"dim": 10**6},
        {"vector_dtype": "auto"},
        {"codes": "nowhere"},
        {"max_degree": 0},
        {"pq_bytes": 9},
        {"num_entry_points": 0},
        {"dim": 30000, "vector_dtype": "float32"},
    ],
)
def test_refuses(wrong: dict[str, Any]) -> None:
    with pytest.raises(errors.InvalidInputError):
        plan_graph(**({"n": 10, "dim": 8} | wrong))


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--vectors", "1000000", "--dim", "128"]
    out = str(tmp_path / "p.json")
    assert (
        main([*words, "--price-per-tb-ssd", "100", "--price-per-gb-ram", "8", "--json", out]) == 0
    )
    assert "media cost" in capsys.readouterr().out
    modes = strict_json((tmp_path / "p.json").read_text())["modes"]
    assert set(modes) == {"inline", "paged", "memory"}
    for codes, mode in modes.items():
        plan = plan_graph(10**6, 128, codes=codes)
        assert mode["disk"] == plan.disk
        assert mode["cost"]["ssd"] == pytest.approx(plan.disk["total_bytes"] / 1e10)
        assert mode["cost"]["ram"] == pytest.approx(plan.memory["total_bytes"] / 2**30 * 8)
    assert main([*words, "--codes", "memory", "--json", out]) == 0
    assert "media cost" not in capsys.readouterr().out
    assert set(strict_json((tmp_path / "p.json").read_text())["modes"]) == {"memory"}
    assert main(["plan", "--vectors", "10"]) == 2
    assert main(["plan", "--vectors", "10", "--dim", "4", "--documents", "3"]) == 2
    assert main([*words, "--price-per-tb-ssd", "-1"]) == 2
    assert main([*words, "--price-per-gb-ram", "nan"]) == 2


def test_a_code_byte_too_many_is_said(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture
) -> None:
    long, short = (plan_graph(1000, 384, pq_bytes=pq_bytes) for pq_bytes in (48, 47))
    assert (long.page_bytes, short.page_bytes) == (8192, 4096)
    assert long.hint is not None
    assert "pq_bytes=47 instead of 48" in long.hint
    assert "0.50x" in long.hint
    assert short.hint is None
    assert plan_graph(1000, 384, pq_bytes=48, codes="memory").hint is None
    # one byte less, and two nodes share a page
    shared = plan_graph(1000, 128, pq_bytes=34, max_degree=48)
    assert "pq_bytes=33" in (shared.hint or "")
    for dim in (32, 96, 128, 384, 768, 784, 1024, 1536):
        assert plan_graph(1000, dim).hint is None, "what is chosen needs no hint"
    report = espnx.graph.build(clustered(60, 384), tmp_path / "g", pq_bytes=48)
    assert report.hint == long.hint
    assert long.hint in report.summary()
    assert long.hint in caplog.text
    assert main(["plan", "--vectors", "1000", "--dim", "384", "--pq-bytes", "48"]) == 0
    assert long.hint in capsys.readouterr().out
