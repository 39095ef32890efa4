"""The three numbers that the front page leads with, between ``<!-- headlines -->`` and ``<!-- /headlines -->``: a line for each of `ALL`
that results have rows for, the first three."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ..harness.result import Row, rows_of
from ..kv import smollm2

BLOCK = re.compile(r"(<!-- headlines -->\n).*?(<!-- /headlines -->)", re.DOTALL)
SHOWN = 3

Line = tuple[str, str, str]  # what, with espnx, otherwise


def fill(text: str, results: Mapping[Path, Mapping[str, Any]]) -> str:
    """The text with its marked blocks filled."""
    if not BLOCK.search(text):
        return text
    files = {path: [row for row in rows_of(document) if row.correct and row.n] for path, document in results.items()}
    lines = [f"| {' | '.join(line)} | `{path.name}` |" for path, line in _found(files)][:SHOWN]
    table = ["", "| | espnx | otherwise | file |", "| --- | --- | --- | --- |", *lines, "", ""] if lines else []
    return BLOCK.sub(lambda match: match[1] + "\n".join(table) + match[2], text)


def _found(files: Mapping[Path, Sequence[Row]]) -> list[tuple[Path, Line]]:
    """Of each headline the first file that has it."""
    found = []
    for headline in ALL:
        lines = ((path, headline(rows)) for path, rows in files.items())
        found += [(path, line) for path, line in lines if line is not None][:1]
    return found


def _systems(rows: Sequence[Row], **params: Any) -> dict[str, Row]:
    """Rows with these parameters, by system; those of one point alone, the first."""
    found = [row for row in rows if all(row.params.get(name) == value for name, value in params.items())]
    return {row.system: row for row in reversed(found) if row.params == found[0].params}


def _weights(row: Row) -> str:
    """What a model of the KV benchmark computes with. Rows that do not say are older than the parameter: all but SmolLM2's were random."""
    return f"{row.params.get('weights', 'its own' if row.params['model'] == smollm2.KEY else 'random')} weights"


def resuming(rows: Sequence[Row]) -> Line | None:
    """The first token about a context that was read before: the longest that was measured."""
    contexts = [row.params["context"] for row in rows if row.case == "kv" and row.params.get("show") == "resume"]
    found = _systems(rows, show="resume", context=max(contexts, default=None))
    ours, anew = found.get("espnx-kept"), found.get("recomputed")
    if ours is None or anew is None:
        return None
    what = f"the first token of an answer about {ours.params['context']:,} tokens read before, {ours.params['model']}"
    return what, f"{ours.median_s:.2f} s", f"{anew.median_s:.1f} s, reading them again"


def decoding(rows: Sequence[Row]) -> Line | None:
    """A step beside FlexGen's, on a disk at its own speed."""
    found = _systems([row for row in rows if row.case == "kv"], show="decode", throttle_bytes_per_s=None)
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


def searching(rows: Sequence[Row]) -> Line | None:
    """An exact search beside memory-mapped records, where memory is short."""
    limits = [row.params.get("memory_bytes") for row in rows if row.case == "retrieval" and row.params["show"] == "table"]
    for limit in sorted({limit for limit in limits if isinstance(limit, int)}):
        found = _systems(rows, show="table", memory_bytes=limit, rerank=None, batch=1)
        if {"espnx", "mmap-1", "mmap-willneed"} <= found.keys():
            times = {name: f"{1e3 * (row.median_s or 0):.0f} ms" for name, row in found.items()}
            params = found["espnx"].params
            scored = f"{params['candidates']:,} candidates scored exactly"
            what = f"a search of {params['documents']:,} documents, {scored}, {limit / 2**30:g} GiB of memory"
            return what, times["espnx"], f"{times['mmap-1']} by `mmap`, {times['mmap-willneed']} with `MADV_WILLNEED` for all at once"
    return None


def holding(rows: Sequence[Row]) -> Line | None:
    """What must be in memory to search."""
    found = _systems(rows, show="index-memory").get("sq8")
    if found is None:
        return None
    resident = found.metrics["rss_growth_bytes"] + found.metrics["metadata_bytes"]
    what = f"memory to search {found.params['documents']:,} documents"
    return what, f"{resident / 1e9:.2f} GB", f"{found.metrics['record_bytes'] / 1e9:.1f} GB more with the records in memory"


#: In the order of the page.
ALL: tuple[Callable[[Sequence[Row]], Line | None], ...] = (resuming, decoding, searching, holding)
