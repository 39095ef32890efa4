"""The front page's numbers and plots stand there when results have rows for them, and not otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import make_document
from espnx.benchmarks.kv import smollm2
from espnx.benchmarks.report import headlines, plots
from espnx.errors import InvalidInputError
from tests.benchmarks.common import MACHINE, row

PAGE = "before\n<!-- headlines -->\nstale\n<!-- /headlines -->\nafter\n"
PLOT = "<!-- plots:kv-context,search-sizes -->\nstale\n<!-- /plots -->\n"


def files(**rows: list[Any]) -> dict[Path, dict[str, Any]]:
    """A result file for each name."""
    return {Path(f"{name}.json"): make_document("espnx bench", None, None, MACHINE, found) for name, found in rows.items()}


def decode(system: str, step_s: float, throttle: int | None = None, of: Mapping[str, str] | None = None, **changes: Any) -> Any:
    params = {"show": "decode", "model": "opt-1.3b", "throttle_bytes_per_s": throttle, "batch": 4, "context": 3840, **(of or {})}
    metrics = {"step_s": step_s, "asked_per_step": 3.04e9}
    return row(case="kv", params=params, system=system, median_s=2 * step_s, metrics=metrics, **changes)


def search(system: str, median_s: float, limit: int | None = 1 << 30, rerank: int | None = None, candidates: int = 1000) -> Any:
    at = {"memory_bytes": limit, "rerank": rerank, "batch": 1, "candidates": candidates}
    params = {"show": "table", "documents": 1_000_000, **at}
    return row(case="retrieval", params=params, system=system, median_s=median_s)


INDEX = row(
    case="retrieval", params={"show": "index-memory", "documents": 1_000_000}, system="sq8",
    metrics={"rss_growth_bytes": 1.38e8, "metadata_bytes": 2e6, "record_bytes": 4.62e9},
)  # fmt: skip


def lines(results: dict[Path, dict[str, Any]]) -> list[list[str]]:
    text = headlines.fill(PAGE, results)
    assert text.startswith("before\n<!-- headlines -->\n")
    assert text.endswith("<!-- /headlines -->\nafter\n")
    assert "stale" not in text
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in text.splitlines() if line.startswith("| ")][2:]


def test_headlines_come_from_rows() -> None:
    found = lines(
        files(
            a=[decode("espnx", 4.0, 800_000_000), decode("flexgen-disk", 5.0, 800_000_000)],
            b=[decode("espnx", 2.13), decode("flexgen-disk", 5.5), decode("host", 9.0)],
            c=[search("espnx", 9.0, None), search("espnx", 8.0, rerank=64), search("espnx", 0.0115), search("mmap-1", 0.144)],
            d=[search("espnx", 0.0125), search("mmap-1", 0.154), search("mmap-willneed", 0.018), INDEX],
        )
    )
    assert [(line[1], line[3]) for line in found] == [("2.1 s", "`b.json`"), ("12 ms", "`d.json`"), ("0.14 GB", "`d.json`")]
    assert found[0][0] == "a decoding step of opt-1.3b (random weights, 4 x 3,840 tokens), 3.0 GB of K and V on disk"
    assert found[0][2].startswith("5.5 s, FlexGen")
    assert found[1][2].startswith("154 ms by `mmap`, 18 ms")
    assert "1,000,000 documents, 1,000 candidates scored exactly, 1 GiB" in found[1][0]


def test_a_headline_says_what_was_run() -> None:
    """The model's weights and the depth of a search are those of the rows."""
    systems = ("espnx", "mmap-1", "mmap-willneed")
    found = lines(files(a=[decode(name, 2.0, of={"weights": "its own"}) for name in ("espnx", "flexgen-disk")]))
    assert found[0][0].startswith("a decoding step of opt-1.3b (its own weights, 4 x")
    found = lines(files(a=[decode(name, 2.0, of={"model": smollm2.KEY}) for name in ("espnx", "flexgen-disk")]))
    assert found[0][0].startswith("a decoding step of smollm2 (its own weights, 4 x")
    found = lines(files(a=[search(name, 0.01, candidates=4000) for name in systems]))
    assert "1,000,000 documents, 4,000 candidates scored exactly" in found[0][0]


def test_a_kept_cache_comes_first() -> None:
    def first_token(system: str, context: int, seconds: float) -> Any:
        return row(case="kv", params={"show": "resume", "model": "m", "context": context}, system=system, median_s=seconds)

    times = [("recomputed", 1000, 3.0), ("espnx-kept", 1000, 0.5), ("espnx-kept", 4000, 0.83), ("recomputed", 4000, 15.6)]
    results = files(a=[decode("espnx", 2.13), decode("flexgen-disk", 5.5)], b=[first_token(*each) for each in times], c=[INDEX])
    found = lines(results)
    assert [line[3] for line in found] == ["`b.json`", "`a.json`", "`c.json`"]
    assert found[0][:2] == ["the first token of an answer about 4,000 tokens read before, m", "0.83 s"]
    assert found[0][2].startswith("15.6 s")


def test_wrong_or_missing_rows_make_no_headline() -> None:
    wrong = decode("espnx", 2.0, n=0, correct=False, ratio={})
    assert lines(files(a=[wrong, decode("flexgen-disk", 5.5), search("espnx", 0.01)])) == []
    assert [line[1] for line in lines(files(a=[wrong, INDEX]))] == ["0.14 GB"]


def test_a_page_shows_the_plots_that_have_rows() -> None:
    context = row(case="kv", params={"show": "context"}, system="espnx")
    assert plots.fill(PLOT, files(a=[INDEX]), "docs/plots") == PLOT.replace("stale\n", "")
    text = plots.fill(PLOT, files(a=[context]), "../plots")
    assert '<img src="../plots/kv-context.svg" alt="tokens a second over the context" width="49%">' in text
    assert "search-sizes.svg" not in text
    with pytest.raises(InvalidInputError, match="kv-contxt"):
        plots.fill(PLOT.replace("kv-context", "kv-contxt"), {}, ".")
