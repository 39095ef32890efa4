"""The front page's numbers, sentence and plots stand there when results have rows for them, and not
otherwise."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from espnx.benchmarks.harness.result import make_document
from espnx.benchmarks.kv.systems import smollm2
from espnx.benchmarks.report import headlines, plots
from espnx.errors import InvalidInputError
from tests.benchmarks.common import MACHINE, row

PAGE = "before\n<!-- headlines -->\nstale\n<!-- /headlines -->\nafter\n"
PLOT = "<!-- plots:kv-context,search-sizes -->\nstale\n<!-- /plots -->\n"


def files(**rows: list[Any]) -> dict[Path, dict[str, Any]]:
    """A result file for each name."""
    return {
        Path(f"{name}.json"): make_document("espnx bench", None, None, MACHINE, found)
        for name, found in rows.items()
    }


def decode(
    system: str,
    step_s: float,
    throttle: int | None = None,
    of: Mapping[str, str] | None = None,
    **changes: Any,
) -> Any:
    params = {
        "show": "decode",
        "model": "opt-1.3b",
        "throttle_bytes_per_s": throttle,
        "batch": 4,
        "context": 3840,
        **(of or {}),
    }
    metrics = {"step_s": step_s, "asked_per_step": 3.04e9}
    return row(
        case="kv", params=params, system=system, median_s=2 * step_s, metrics=metrics, **changes
    )


def search(
    system: str,
    median_s: float,
    limit: int | None = 1 << 30,
    documents: int = 500_000,
    **metrics: float,
) -> Any:
    params = {"show": "sizes", "corpus": "B", "documents": documents, "memory_bytes": limit}
    return row(
        case="retrieval",
        params=params,
        system=system,
        median_s=median_s,
        metrics={"record_bytes": 5320.0 * documents, **metrics},
    )


def searches(**seconds: float) -> list[Any]:
    """Of the systems that a headline needs, and of these."""
    times = {"memory": 0.0047, "espnx": 0.0129, "mmap_1": 0.096, "mmap_willneed": 0.0125, **seconds}
    return [search(name.replace("_", "-"), median_s) for name, median_s in times.items()]


INDEX = row(
    case="retrieval",
    params={"show": "index-memory", "documents": 1_000_000},
    system="sq8",
    metrics={"rss_growth_bytes": 1.38e8, "metadata_bytes": 2e6, "record_bytes": 4.62e9},
)


def lines(results: dict[Path, dict[str, Any]]) -> list[list[str]]:
    text = headlines.fill(PAGE, results)
    assert text.startswith("before\n<!-- headlines -->\n")
    assert text.endswith("<!-- /headlines -->\nafter\n")
    assert "stale" not in text
    return [
        [cell.strip() for cell in line.strip("|").split("|")]
        for line in text.splitlines()
        if line.startswith("| ")
    ][2:]


def test_headlines_come_from_rows() -> None:
    found = lines(
        files(
            a=[decode("espnx", 4.0, 800_000_000), decode("flexgen-disk", 5.0, 800_000_000)],
            b=[decode("espnx", 2.13), decode("flexgen-disk", 5.5), decode("host", 9.0)],
            c=[search("espnx", 9.0, None), search("espnx", 0.0115), search("mmap-1", 0.144)],
            d=[*searches(), search("espnx", 0.001, documents=100), INDEX],
        )
    )
    assert [(line[1], line[3]) for line in found] == [
        ("2.1 s", "`b.json`"),
        ("12.9 ms", "`d.json`"),
        ("0.14 GB", "`d.json`"),
    ]
    assert (
        found[0][0]
        == "a decoding step of opt-1.3b (random weights, 4 x 3,840 tokens), 3.0 GB of K and V on "
        "disk"
    )
    assert found[0][2].startswith("5.5 s, FlexGen")
    assert found[1][0].startswith(
        "a search of 500,000 documents (corpus B), 2.7 GB of records in 1 GiB of memory, scored "
        "exactly"
    )
    assert (
        found[1][2]
        == "4.7 ms in memory, 96.0 ms by `mmap`, 12.5 ms with `MADV_WILLNEED`, which ties with "
        "scoring exactly"
    )


def drafted(system: str, step_s: float, throttle: int, **changes: Any) -> Any:
    params = {
        "show": "speculation",
        "model": "smollm2",
        "throttle_bytes_per_s": throttle,
        "batch": 8,
        "context": 7680,
        "draft_read_ahead_bytes": 1 << 30,
    }
    metrics = {"step_s": step_s, "fio_s": 2.8e9 / throttle, "draft_memory_bytes": 3 << 28}
    return row(
        case="kv", params=params, system=system, median_s=24 * step_s, metrics=metrics, **changes
    )


def test_drafts_stand_beside_one_by_one_and_the_disk() -> None:
    rows = [
        drafted(system, seconds, throttle)
        for throttle, seconds in ((800_000_000, 1.02), (400_000_000, 1.63))
        for system in ("pages-1/16", "4bit")
    ]
    assert lines(files(a=rows)) == []
    rows += [drafted("one-by-one", 3.54, 800_000_000), drafted("one-by-one", 7.08, 400_000_000)]
    [line] = lines(files(a=rows))
    assert line[0].startswith("a token of each sequence with drafts (smollm2, 8 x 7,680 tokens)")
    assert line[0].endswith("a disk of 400 MB/s, 1.75 GiB of memory for drafts and reads")
    assert line[1:3] == ["1.6 s", "7.1 s one by one; 7.0 s: what the disk takes to read K and V"]
    assert lines(files(a=[each for each in rows if each is not rows[2]])) == []


def test_a_cascade_is_shown_with_its_recall_alone() -> None:
    """And what is as fast as espnx is called so."""
    [line] = lines(files(a=[*searches(espnx=0.009), search("cascade-ssd-64", 0.008)]))
    assert (line[1], line[2][-27:]) == ("9.0 ms", "12.5 ms with `MADV_WILLNEED`"[-27:])
    [line] = lines(files(a=[*searches(), search("cascade-ssd-64", 0.0084, **{"recall@10": 0.98})]))
    assert line[0].endswith("by a cascade")
    assert line[1] == "8.4 ms at recall@10 0.980"


def test_decoding_goes_on_where_memory_ends() -> None:
    def at(system: str, context: int, rate: float, memory: Any = 2 << 30) -> Any:
        params = {
            "show": "context",
            "model": "m",
            "weights": "random",
            "batch": 1,
            "memory": memory,
            "context": context,
        }
        return row(
            case="kv",
            params=params,
            system=system,
            metrics={"tokens_per_s": rate, "asked_per_step": 8192.0 * context},
        )

    rows = [
        at("dynamic", 1 << 16, 4.0),
        at("espnx", 1 << 16, 3.0),
        at("espnx", 1 << 19, 0.41),
        at("memmap", 1 << 19, 0.1),
    ]
    [line] = lines(files(a=rows))
    assert (
        line[0]
        == "decoding at 512K tokens of context (m, random weights), 4.3 GB of K and V, 2 GiB of "
        "memory"
    )
    assert line[1:3] == ["0.41 tokens/s", "in memory ends at 64K tokens; mapped files 0.1 tokens/s"]
    assert lines(files(a=rows[:2])) == []  # nothing goes on
    assert (
        lines(files(a=[at("dynamic", 1 << 16, 4.0, "auto"), at("espnx", 1 << 19, 0.41, "auto")]))
        == []
    )


def test_what_drives_bring_in_a_sentence() -> None:
    def drive(show: str, system: str, count: int, ratio: float) -> Any:
        params = {"show": show, "spec": "smartssd", "devices": count}
        return row(
            case="device", kind="emulated", params=params, system=system, ratio={"without": ratio}
        )

    page = "<!-- drives -->\nstale\n<!-- /drives -->\n"
    rows = [
        drive("topology", system, count, factor * count)
        for system, factor in (("attention", 1), ("attention+x", 2))
        for count in (2, 4, 16)
    ]
    text = " ".join(headlines.fill(page, files(a=rows)).split())
    assert (
        "On 4 and 16 emulated drives of the preset `smartssd`, attention in the drive makes a "
        "decoding step 4.0 and 16.0 times" in text
    )
    assert "which halve what is read, 8.0 and 32.0 times. <!--" in text
    text = " ".join(
        headlines.fill(page, files(a=rows, b=[drive("search", "maxsim-2048", 4, 1.3)])).split()
    )
    assert "On 4 emulated drives" in text
    assert "makes a search 1.3 times as fast." in text
    assert headlines.fill(page, files(a=[INDEX])) == "<!-- drives -->\n<!-- /drives -->\n"


def test_a_headline_says_what_was_run() -> None:
    """The model's weights are those of the rows."""
    found = lines(
        files(
            a=[decode(name, 2.0, of={"weights": "its own"}) for name in ("espnx", "flexgen-disk")]
        )
    )
    assert found[0][0].startswith("a decoding step of opt-1.3b (its own weights, 4 x")
    found = lines(
        files(
            a=[decode(name, 2.0, of={"model": smollm2.KEY}) for name in ("espnx", "flexgen-disk")]
        )
    )
    assert found[0][0].startswith("a decoding step of smollm2 (its own weights, 4 x")


def test_a_kept_cache_comes_first() -> None:
    def first_token(system: str, context: int, seconds: float) -> Any:
        return row(
            case="kv",
            params={"show": "resume", "model": "m", "context": context},
            system=system,
            median_s=seconds,
        )

    times = [
        ("recomputed", 1000, 3.0),
        ("espnx-kept", 1000, 0.5),
        ("espnx-kept", 4000, 0.83),
        ("recomputed", 4000, 15.6),
    ]
    results = files(
        a=[decode("espnx", 2.13), decode("flexgen-disk", 5.5)],
        b=[first_token(*each) for each in times],
        c=[INDEX],
    )
    found = lines(results)
    assert [line[3] for line in found] == ["`b.json`", "`a.json`", "`c.json`"]
    assert found[0][:2] == [
        "the first token of an answer about 4,000 tokens read before, m",
        "0.83 s",
    ]
    assert found[0][2].startswith("15.6 s")


def test_wrong_or_missing_rows_make_no_headline() -> None:
    wrong = decode("espnx", 2.0, n=0, correct=False, ratio={})
    assert lines(files(a=[wrong, decode("flexgen-disk", 5.5), search("espnx", 0.01)])) == []
    assert [line[1] for line in lines(files(a=[wrong, INDEX]))] == ["0.14 GB"]


def test_a_page_shows_the_plots_that_have_rows() -> None:
    context = row(case="kv", params={"show": "context"}, system="espnx")
    assert plots.fill(PLOT, files(a=[INDEX]), "docs/plots") == PLOT.replace("stale\n", "")
    text = plots.fill(PLOT, files(a=[context]), "../plots")
    assert (
        '<img src="../plots/kv-context.svg" alt="tokens a second over the context, with memory to '
        'spare" width="49%">' in text
    )
    assert "search-sizes.svg" not in text
    with pytest.raises(InvalidInputError, match="kv-contxt"):
        plots.fill(PLOT.replace("kv-context", "kv-contxt"), {}, ".")
