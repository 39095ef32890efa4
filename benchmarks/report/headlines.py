"""The few numbers that the front page leads with, between ``<!-- headlines -->`` and ``<!--
/headlines -->``: a line for each of `ALL` that results have rows for, the first of them; and
between ``<!-- drives -->`` and ``<!-- /drives -->`` what drives that compute bring, in a
sentence."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from espnx.sizes import format_size

from ..harness.result import Row, rows_of
from ..kv.systems import smollm2
from . import device_plots, kv_plots
from .found import Found

BLOCK = re.compile(r"(<!-- headlines -->\n).*?(<!-- /headlines -->)", re.DOTALL)
DRIVES = re.compile(r"(<!-- drives -->\n).*?(<!-- /drives -->)", re.DOTALL)
SHOWN = 5
_DRIVES_SHOWN = (1, 4, 8, 16)
_TIE = 0.1  # times nearer to one another than this say nothing about which is the faster

Line = tuple[str, str, str]  # what, with espnx, otherwise


def fill(text: str, results: Mapping[Path, Mapping[str, Any]]) -> str:
    """The text with its marked blocks filled."""
    if not (BLOCK.search(text) or DRIVES.search(text)):
        return text
    files = {
        path: [row for row in rows_of(document) if row.correct and row.n]
        for path, document in results.items()
    }
    sentence = drives([row for rows in files.values() for row in rows])
    text = DRIVES.sub(
        lambda match: match[1] + (f"\n{sentence}\n\n" if sentence else "") + match[2], text
    )
    lines = [f"| {' | '.join(line)} | `{path.name}` |" for path, line in _found(files)][:SHOWN]
    table = (
        ["", "| | espnx | otherwise | file |", "| --- | --- | --- | --- |", *lines, "", ""]
        if lines
        else []
    )
    return BLOCK.sub(lambda match: match[1] + "\n".join(table) + match[2], text)


def _found(files: Mapping[Path, Sequence[Row]]) -> list[tuple[Path, Line]]:
    """The first file that has each headline."""
    found = []
    for headline in ALL:
        lines = ((path, headline(rows)) for path, rows in files.items())
        found += [(path, line) for path, line in lines if line is not None][:1]
    return found


def _systems(rows: Sequence[Row], **params: Any) -> dict[str, Row]:
    """Rows with these parameters, by system; those of one point alone, the first."""
    found = [
        row for row in rows if all(row.params.get(name) == value for name, value in params.items())
    ]
    return {row.system: row for row in reversed(found) if row.params == found[0].params}


def _weights(row: Row) -> str:
    """What a model of the KV benchmark computes with. Rows that do not say are older than the
    parameter: all but SmolLM2's were random."""
    before = "its own" if row.params["model"] == smollm2.KEY else "random"
    return f"{row.params.get('weights', before)} weights"


def resuming(rows: Sequence[Row]) -> Line | None:
    """The first token about a context that was read before: the longest that was measured."""
    contexts = [
        row.params["context"]
        for row in rows
        if row.case == "kv" and row.params.get("show") == "resume"
    ]
    found = _systems(rows, show="resume", context=max(contexts, default=None))
    ours, anew = found.get("espnx-kept"), found.get("recomputed")
    if ours is None or anew is None:
        return None
    what = (
        f"the first token of an answer about {ours.params['context']:,} tokens read before, "
        f"{ours.params['model']}"
    )
    return what, f"{ours.median_s:.2f} s", f"{anew.median_s:.1f} s, reading them again"


def decoding(rows: Sequence[Row]) -> Line | None:
    """A step beside FlexGen's, on a disk at its own speed."""
    found = _systems(
        [row for row in rows if row.case == "kv"], show="decode", throttle_bytes_per_s=None
    )
    ours, theirs = found.get("espnx"), found.get("flexgen-disk")
    if ours is None or theirs is None:
        return None
    stored = f"{ours.metrics['asked_per_step'] / 1e9:.1f} GB of K and V on disk"
    at = f"{ours.params['batch']} x {ours.params['context']:,} tokens"
    return (
        f"a decoding step of {ours.params['model']} ({_weights(ours)}, {at}), {stored}",
        f"{ours.metrics['step_s']:.1f} s",
        f"{theirs.metrics['step_s']:.1f} s, FlexGen from the same disk",
    )


def drafting(rows: Sequence[Row]) -> Line | None:
    """A step with drafts beside decoding one by one, on the slower of the disks that it was
    measured on."""
    rows = [row for row in rows if row.case == "kv" and row.params.get("show") == "speculation"]
    rates = [row.params["throttle_bytes_per_s"] for row in rows]
    throttle = min((rate for rate in rates if rate), default=None)
    found = _systems(rows, throttle_bytes_per_s=throttle)
    ours, theirs = found.get("pages-1/16"), found.get("one-by-one")
    if ours is None or theirs is None or throttle is None:
        return None
    at = f"{ours.params['batch']} x {ours.params['context']:,} tokens"
    memory = ours.metrics["draft_memory_bytes"] + ours.params.get("draft_read_ahead_bytes", 0)
    what = (
        f"a token of each sequence with drafts ({ours.params['model']}, {at}), the same tokens to "
        f"rounding, a disk of {throttle / 1e6:,.0f} MB/s, {format_size(round(memory))} of memory "
        "for drafts and reads"
    )
    otherwise = (
        f"{theirs.metrics['step_s']:.1f} s one by one; {ours.metrics['fio_s']:.1f} s: what the "
        "disk takes to read K and V"
    )
    return what, f"{ours.metrics['step_s']:.1f} s", otherwise


def going_on(rows: Sequence[Row]) -> Line | None:
    """Decoding under a memory limit, where caches in memory no longer fit: at the longest
    context."""
    found = kv_plots.limited(
        [Found(row, 0) for row in rows if row.case == "kv" and row.params.get("show") == "context"]
    )
    if not found:
        return None
    of = {
        name: [each.row for each in found if each.row.system == name]
        for name in ("espnx", "dynamic", "memmap")
    }
    ours, fits = max(of["espnx"], key=_context), max(of["dynamic"], key=_context)
    limit, stored = (
        format_size(ours.params["memory"]),
        f"{ours.metrics['asked_per_step'] / 1e9:.1f} GB of K and V",
    )
    at = f"{kv_plots.tokens(ours.params['context'])} tokens of context"
    mapped = [
        row.metrics["tokens_per_s"] for row in of["memmap"] if _context(row) == _context(ours)
    ]
    return (
        f"decoding at {at} ({ours.params['model']}, {_weights(ours)}), {stored}, {limit} of memory",
        f"{ours.metrics['tokens_per_s']:.2g} tokens/s",
        f"in memory ends at {kv_plots.tokens(fits.params['context'])} tokens"
        + "".join(f"; mapped files {rate:.2g} tokens/s" for rate in mapped),
    )


def _context(row: Row) -> int:
    return int(row.params["context"])


def searching(rows: Sequence[Row]) -> Line | None:
    """A search of the largest records of the plot of sizes: by a cascade where its recall is known,
    else scored exactly, which finds what memory would. Latency never stands without recall."""
    limits = [
        row.params.get("memory_bytes")
        for row in rows
        if row.case == "retrieval" and row.params.get("show") == "sizes"
    ]
    least = min((limit for limit in limits if isinstance(limit, int)), default=None)
    of_limit = [
        row
        for row in rows
        if row.params.get("show") == "sizes" and row.params["memory_bytes"] == least
    ]
    found = _systems(
        of_limit, documents=max((row.params["documents"] for row in of_limit), default=None)
    )
    if least is None or not {"memory", "espnx", "mmap-1", "mmap-willneed"} <= found.keys():
        return None
    cascade = found.get("cascade-ssd-64")
    is_known = cascade is not None and "recall@10" in cascade.metrics
    ours = cascade if cascade is not None and is_known else found["espnx"]
    size, corpus = (
        f"{ours.metrics['record_bytes'] / 1e9:.1f} GB of records",
        f"corpus {ours.params['corpus']}",
    )
    how = "by a cascade" if ours is cascade else "scored exactly: the hits that memory gives"
    what = (
        f"a search of {ours.params['documents']:,} documents ({corpus}), {size} in "
        f"{format_size(least)} of memory, {how}"
    )
    memory, mapped, asked = (_timed(found[name]) for name in ("memory", "mmap-1", "mmap-willneed"))
    return (
        what,
        _timed(ours),
        f"{memory} in memory, {mapped} by `mmap`, {asked} with `MADV_WILLNEED`{_tie(found)}",
    )


def _timed(row: Row) -> str:
    recall = f" at recall@10 {row.metrics['recall@10']:.3f}" if "recall@10" in row.metrics else ""
    return f"{1e3 * (row.median_s or 0):.1f} ms{recall}"


def _tie(found: Mapping[str, Row]) -> str:
    """What is to be said where the kernel, asked for every record at once, is as fast as espnx."""
    ratio = (found["espnx"].median_s or 0) / (found["mmap-willneed"].median_s or 1)
    return ", which ties with scoring exactly" if abs(ratio - 1) <= _TIE else ""


def holding(rows: Sequence[Row]) -> Line | None:
    """What must be in memory to search."""
    found = _systems(rows, show="index-memory").get("sq8")
    if found is None:
        return None
    resident = found.metrics["rss_growth_bytes"] + found.metrics["metadata_bytes"]
    what = f"memory to search {found.params['documents']:,} documents"
    return (
        what,
        f"{resident / 1e9:.2f} GB",
        f"{found.metrics['record_bytes'] / 1e9:.1f} GB more with the records in memory",
    )


#: In the order of the page.
ALL: tuple[Callable[[Sequence[Row]], Line | None], ...] = (
    resuming,
    going_on,
    decoding,
    drafting,
    searching,
    holding,
)


def drives(rows: Sequence[Row]) -> str | None:
    """What computing in 1 to 16 drives brings, in a sentence; None without such rows."""
    of = {
        show: [
            Found(row, 0) for row in rows if row.case == "device" and row.params.get("show") == show
        ]
        for show in ("topology", "search")
    }
    steps = (
        device_plots.brought(of["topology"], ["attention", "attention+x"]) if of["topology"] else {}
    )
    searches = device_plots.brought(of["search"], ["maxsim-2048"]) if of["search"] else {}
    counts = [
        count
        for count in _DRIVES_SHOWN
        if all(count in known for known in [*steps.values(), *searches.values()])
    ]
    if not steps.keys() >= {"attention", "attention+x"} or not counts:
        return None

    def said(known: Mapping[int, float]) -> str:
        return _listed([f"{known[count]:.1f}" for count in counts])

    spec = of["topology"][0].row.params["spec"]
    text = (
        f"On {_listed([str(count) for count in counts])} emulated drives of the preset `{spec}`, "
        f"attention in the drive makes a decoding step {said(steps['attention'])} times as fast as "
        "the same drives that only store, and with X rows, which halve what is read, "
        f"{said(steps['attention+x'])} times"
    )
    if "maxsim-2048" in searches:
        text += (
            "; MaxSim in the drive, at a rate that is assumed, makes a search "
            f"{said(searches['maxsim-2048'])} times as fast"
        )
    return textwrap.fill(f"{text}.", 140, break_on_hyphens=False)


def _listed(words: Sequence[str]) -> str:
    return f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
