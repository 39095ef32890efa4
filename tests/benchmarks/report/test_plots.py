"""Plots come from result rows alone, say in their title what was found, and the same rows give the
same file."""

from __future__ import annotations

import itertools
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import Row
from espnx.benchmarks.report import looks, plots

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra [bench])")


@pytest.fixture(autouse=True)
def style() -> None:
    looks.use_style()


def row(show: str, system: str, params: dict[str, Any], metrics: dict[str, float]) -> Row:
    return Row(
        "retrieval",
        {"show": show, "corpus": "B", "nprobe": 64, **params},
        system,
        "measured",
        "auto",
        "uring",
        "cold",
        3,
        0.1,
        0.1,
        0.0,
        1,
        1,
        True,
        metrics,
        {},
    )


def results(rows: list[Row]) -> dict[Path, dict[str, Any]]:
    return {
        Path("r.json"): {
            "machine": {"memory_bytes": 4_000_000_000},
            "rows": [asdict(each) for each in rows],
        }
    }


def drawn(name: str, rows: list[Row]) -> Any:
    found = plots.PLOTS[name].rows(results(rows))
    return plots.PLOTS[name].draw(found) if found else None


def lines(figure: Any) -> dict[str, list[tuple[float, float]]]:
    """The points of each line that has a name."""
    axes = figure.axes[0]
    return {
        line.get_label(): line.get_xydata().tolist()
        for line in axes.lines
        if not line.get_label().startswith("_")
    }


def words(figure: Any) -> list[str]:
    return [text.get_text().strip() for text in figure.axes[0].texts if text.get_text()]


def title(figure: Any) -> str:
    return str(figure.get_suptitle()).replace("\n", " ")


def speculated(rate: int | None, system: str, step_s: float, batch: int = 8) -> Row:
    """Of 64 steps of 800 MB each, at 400 MB/s or, not throttled, at 1,600."""
    params = {"model": "m", "batch": batch, "context": 7680, "throttle_bytes_per_s": rate}
    fio_s = 8e8 / (rate or 1.6e9)
    metrics = {"step_s": step_s, "fio_s": fio_s, "tokens_a_pass": 2.0}
    one = replace(row("speculation", system, params, metrics), case="kv")
    return replace(one, bytes_asked=64 * 800_000_000, median_s=64 * step_s)


def test_speculation_over_the_rate_of_the_disk() -> None:
    rows = [
        speculated(400_000_000, "one-by-one", 2.1),
        speculated(400_000_000, "pages-1/16", 0.5),
        speculated(None, "one-by-one", 0.8),
        speculated(None, "pages-1/16", 0.4),
        speculated(None, "lookup", 0.7),
    ]
    assert drawn("kv-speculation", [rows[0], rows[1]]) is None, "a single rate"
    smaller = speculated(200_000_000, "pages-1/16", 9.0, batch=1)
    figure = drawn("kv-speculation", [*rows, smaller])
    assert title(figure).startswith("At 400 MB/s a step takes 0.25 of the time")
    found = lines(figure)
    assert found["drafts over 1/16"] == [[400.0, 0.5], [1600.0, 0.4]]
    assert found["one by one"] == [[400.0, 2.1], [1600.0, 0.8]]
    assert found["disk alone (fio)"] == [[400.0, 2.0], [1600.0, 0.5]]


def hit_rates() -> list[Row]:
    return [
        row(
            "hit-rate",
            "espnx",
            {"prefetch_step": step, "recall_wanted": 0.95},
            {"hit_rate": step + 0.4},
        )
        for step in (0.3, 0.1)
    ]


def qualities() -> list[Row]:
    sizes = {"fp16": (1e4, 0.4), "bit1": (1e3, 0.39)}
    return [
        row("formats", name, {}, {"bytes_per_document": size, "nDCG@10": found})
        for name, (size, found) in sizes.items()
    ]


def test_each_plot_has_its_rows(tmp_path: Path) -> None:
    assert plots.draw_all(tmp_path, results(hit_rates())) == [tmp_path / "docs/plots/hit-rate.svg"]
    assert len(plots.draw_all(tmp_path, results([*hit_rates(), *qualities()]))) == 2


def test_the_same_rows_give_the_same_file(tmp_path: Path) -> None:
    [path] = plots.draw_all(tmp_path, results(qualities()))
    first = path.read_bytes()
    plots.draw_all(tmp_path, results(qualities()))
    assert path.read_bytes() == first
    assert b"#ffffff" not in first, "a plot has no background of its own"


def test_wrong_or_other_rows_draw_nothing(tmp_path: Path) -> None:
    rows = [row("table", "espnx", {}, {"hit_rate": 1.0}), row("formats", "fp16", {}, {})]
    assert plots.draw_all(tmp_path, results(rows)) == []


def test_titles_are_findings() -> None:
    assert (
        title(drawn("hit-rate", hit_rates()))
        == "After 30% of the lists 70% to 70% of the candidates are known"
    )
    figure = drawn("formats", qualities())
    assert title(figure) == "One bit a dimension: 10% of the bytes, at least 98% of the quality"
    assert lines(figure) == {"B": [[0, pytest.approx(0.975)], [1, 1]]}


def sizes(system: str, limit: int | None = 1_000_000_000, **metrics: float) -> list[Row]:
    found = [
        row("sizes", system, {"memory_bytes": limit}, {"record_bytes": gigabytes * 1e9, **metrics})
        for gigabytes in (0.5, 2, 3)
    ]
    return [replace(each, median_s=0.01 * number) for number, each in enumerate(found, 1)]


def test_what_is_in_memory_is_pale_where_memory_has_ended() -> None:
    figure = drawn(
        "search-sizes",
        [*sizes("memory"), *sizes("espnx"), *sizes("espnx-30%"), *sizes("mmap-1", None)],
    )
    found = lines(figure)
    # one limit at a time, and systems that the plot knows
    assert list(found) == ["in memory", "espnx"]
    assert [line.get_alpha() for line in figure.axes[0].lines] == [0.55, None, None, None]
    assert figure.axes[0].lines[1].get_xydata().tolist() == [[0.5, pytest.approx(10)]]
    assert [point[0] for point in found["espnx"]] == [0.5, 2, 3]
    assert figure.axes[0].lines[-1].get_xdata()[0] == 1.0
    assert words(figure) == ["memory ends", "in memory", "espnx"]


def test_a_search_is_shown_with_its_recall() -> None:
    figure = drawn(
        "search-sizes",
        [*sizes("mmap-1", **{"recall@10": 1.0}), *sizes("cascade-ssd-64", **{"recall@10": 0.981})],
    )
    assert (
        title(figure)
        == "3.0 GB of records, 953.7 MiB of memory: espnx 30 ms a search, mmap 30 (recall@10)"
    )
    assert words(figure)[1:] == ["mmap (1.000)", "espnx, cascade (0.981)"]
    figure = drawn("search-sizes", [*sizes("mmap-1"), *sizes("espnx"), *sizes("cascade-ssd-64")])
    assert list(lines(figure)) == ["mmap", "espnx"]


def test_without_a_limit_memory_is_the_machines() -> None:
    figure = drawn("search-sizes", sizes("memory", None))
    assert len(lines(figure)["in memory"]) == 3
    assert figure.axes[0].lines[-1].get_xdata()[0] == 4.0


def context(
    system: str, tokens: int, tokens_per_s: float, memory: Any = "auto", **metrics: float
) -> Row:
    params = {
        "context": tokens,
        "batch": 2,
        "model": "m",
        "dtype": "bf16",
        "memory": memory,
        "throttle_bytes_per_s": None,
    }
    found = row(
        "context",
        system,
        params,
        {"tokens_per_s": tokens_per_s, "asked_per_step": 1000.0 * tokens, **metrics},
    )
    return replace(found, case="kv")


def test_decoding_over_the_context() -> None:
    rows = [
        context("espnx", 1000, 20, fio_s=0.01),
        context("espnx", 4000, 10, fio_s=0.1),
        context("dynamic", 1000, 25),
    ]
    figure = drawn("kv-context", [*rows, context("espnx", 9000, 1, memory=5_000_000)])
    assert lines(figure) == {
        "in memory": [[1000, 25]],
        "espnx": [[1000, 20], [4000, 10]],
        "disk alone (fio)": [[4000, 20]],  # far above what anything reaches it is left out
    }
    assert words(figure)[0] == "memory ends at 4M \u2192"
    assert title(figure) == "Where K and V fit in memory, espnx decodes at 0.80 to 0.80 of its rate"
    assert drawn("kv-context", [context("dynamic", 1000, 10)]) is None


def test_decoding_under_a_limit() -> None:
    """The line in memory ends, ours goes on; without both there is no picture, on a page
    neither."""
    ours = [context("espnx", tokens, 10, memory=2 << 20) for tokens in (1024, 2048, 4096)]
    figure = drawn(
        "kv-memory",
        [*ours, context("dynamic", 1024, 25, memory=2 << 20), context("espnx", 8192, 1)],
    )
    assert title(figure) == "2 MiB of memory hold 1K tokens of context; espnx goes on to 4K"
    assert list(lines(figure)) == ["in memory", "espnx"]
    assert words(figure) == ["K and V alone\nare larger", "in memory", "espnx"]
    for missing in (
        ours,
        [context("dynamic", 1024, 25, memory=2 << 20), *ours[:1]],
        [context("dynamic", 1024, 25), context("espnx", 4096, 9)],
    ):
        assert drawn("kv-memory", missing) is None
        assert "svg" not in plots.fill(
            "<!-- plots:kv-memory -->\n<!-- /plots -->", results(missing), "."
        )


def test_time_to_the_first_token() -> None:
    times = (
        ("recomputed", 1024, 3.0),
        ("recomputed", 7680, 38.0),
        ("espnx-kept", 7680, 0.5),
        ("kept-in-ram", 7680, 0.4),
    )
    found = [
        replace(
            row("resume", system, {"context": tokens, "model": "m"}, {}),
            case="kv",
            median_s=seconds,
        )
        for system, tokens, seconds in times
    ]
    figure = drawn("first-token", found)
    assert title(figure) == "About 7,680 tokens read before: the first token 76 times sooner"
    assert words(figure) == ["38.0 s", "0.50 s", "0.40 s"]
    assert drawn("first-token", found[:2]) is None


def devices(show: str, *systems: tuple[str, float]) -> list[Row]:
    """What each system brings with 1 and 16 drives: as much, and half as much again."""
    params = {"show": show, "spec": "smartssd"}
    return [
        replace(
            row(show, system, {**params, "devices": count}, {}),
            case="device",
            kind="emulated",
            ratio={"without": factor * more},
        )
        for system, factor in systems
        for count, more in ((16, 1.5), (1, 1.0))
    ]


def test_what_drives_bring() -> None:
    figure = drawn(
        "device-topology",
        devices("topology", ("attention", 1.0), ("attention+x", 2.0), ("all", 9.0)),
    )
    assert title(figure) == "Attention in the drive: 1.0x with 1, 1.5x with 16 (smartssd, emulated)"
    assert [bar.get_height() for bar in figure.axes[0].patches] == [1.0, 1.5, 2.0, 3.0]
    assert drawn("device-search", devices("search", ("without", 1.0))) is None


def graph(data: str, n: int, system: str, **metrics: float) -> Row:
    found = row(
        "sweep",
        system,
        {"data": data, "n": n, "list_size": 10, "recall": 0.95},
        {"recall": 0.97, "queries_per_s": 9.0, **metrics},
    )
    return replace(found, case="graph")


def test_graphs_of_real_vectors_come_first() -> None:
    rows = [
        graph("hard, 1,000", 1000, "diskann"),
        graph("tokens", 50, "diskann"),
        graph("tokens", 50, "espnx-inline"),
        graph("pixels", 9, "espnx-inline"),
    ]
    summary = replace(
        rows[2], params={**rows[2].params, "show": "summary"}, ratio={"diskann": 1.94}
    )
    figure = drawn("graph-rates", [*rows, summary])
    assert title(figure) == "At recall 0.95, 1.9 times DiskANN's queries (espnx-inline)"
    assert figure.axes[0].get_xlabel() == "recall@10, tokens"
    assert {line.get_label(): line.get_color() for line in figure.axes[0].lines} == {
        "diskann": looks.OTHER,
        "espnx-inline": looks.ESPNX,
    }
    assert drawn("graph-reads", rows) is None


def test_graphs_that_all_systems_reach_recall_on_come_first() -> None:
    """Of as many real vectors and systems, those on which no line ends early; whichever file comes
    first."""
    short, whole = (
        [graph("patches", 50, name) for name in ("diskann", "espnx-inline")],
        [graph("tokens", 50, "espnx-inline")],
    )
    short[1], more = (
        graph("patches", 50, "espnx-inline", recall=0.999),
        graph("tokens", 50, "diskann", recall=0.98),
    )
    figure = drawn(
        "graph-rates",
        [
            *short,
            more,
            *(replace(each, metrics={**each.metrics, "recall": 0.98}) for each in whole),
        ],
    )
    assert figure.axes[0].get_xlabel() == "recall@10, tokens"


def test_reads_over_clusters_are_of_the_largest_recall() -> None:
    def of(system: str, clusters: int, reads: float, recall: float = 0.95) -> Row:
        params = {"clusters": clusters, "recall": recall}
        metrics = {"reads": reads, "reads_over_shards": reads / (4 * clusters)}
        return replace(row("clusters", system, params, metrics), case="graph")

    rows = [
        *(of("espnx-shards", each, 4 * each) for each in (256, 16)),
        *(of("espnx-clusters", each, 20 + each / 16) for each in (16, 256)),
        of("espnx-clusters", 16, 9, recall=0.9),
        of("espnx-shards-k", 16, 700),
    ]
    figure = drawn("graph-clusters", rows)
    assert title(figure) == "At 256 clusters, 0.04 of the reads of as many graphs"
    assert lines(figure) == {
        "as many graphs, all asked": [[16, 64], [256, 1024]],
        "clusters": [[16, 21], [256, 36]],
    }
    assert drawn("graph-clusters", rows[1:2]) is None


def test_names_at_the_ends_of_lines_stand_apart() -> None:
    assert looks._apart([0.1, 0.5]) == [0.1, 0.5]
    touching = looks._apart([0.5, 0.5, 0.51, 0.9])
    assert min(b - a for a, b in itertools.pairwise(touching)) >= looks._LABEL_SHARE - 1e-9
    assert sum(touching[:3]) == pytest.approx(1.51)
    assert touching[3] == 0.9
