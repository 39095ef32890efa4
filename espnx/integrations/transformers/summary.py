"""The counters of caches, and what of them is for people: of one cache, and of all batches of
`espnx generate`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from ...kv.draft.tally import Tally
from ...sizes import format_size
from ...storage.engine import paths_of, reasons_of
from ...tables import render_table
from .forward.state import PassState

Stats = Mapping[str, Any]


def counters(passes: PassState, draft: Tally | None) -> dict[str, Any]:
    """`KVCache.stats` of a cache with these passes, and what its drafts brought."""
    store, decision, in_memory = passes.store, passes.x.decision, passes.in_memory
    files = store.striped.path_report()
    return {
        "tokens": passes.length(),
        "sequences": store.rows.sequences,
        **asdict(store.striped.stats()),
        **store.attention.stats(),
        "memory_bytes": store.memory_bytes,
        "effective_path": paths_of(file.effective_path for file in files),
        "fallback_reason": reasons_of(file.fallback_reason for file in files),
        "layers_on_ssd": len(passes.stored),
        "layers_in_memory": len(in_memory.every),
        "layers_in_memory_bytes": in_memory.size_bytes,
        "x_rows": min(store.rows.x_rows, store.rows.sequences),
        "decision": None if decision is None else decision.as_dict(),
        **passes.times.totals(),
        "speculation": None if draft is None else draft.as_dict(),
    }


def summary(stats: Stats, storage: Sequence[str]) -> str:
    """A table of `KVCache.stats`, several lines."""
    held = (
        f"{stats['sequences']} sequences of {stats['tokens']:,} tokens, {stats['layers_on_ssd']} "
        "layers"
    )
    memory = (
        f"{format_size(stats['memory_bytes'])} of rows that wait and of checksums, "
        f"{format_size(stats['buffer_bytes'])} of buffers"
    )
    rows: list[tuple[str, object]] = [
        ("directories", ", ".join(storage)),
        ("holds", held),
        ("on SSD", format_size(stats["stored_bytes"])),
        ("in memory", memory),
        *([("layers in memory", _in_memory(stats))] if stats["layers_in_memory"] else []),
        *work([stats]),
    ]
    return render_table(("", ""), rows)


def _in_memory(stats: Stats) -> str:
    return (
        f"{stats['layers_in_memory']} with windows or states, "
        f"{format_size(stats['layers_in_memory_bytes'])}"
    )


def work(batches: Sequence[Stats]) -> list[tuple[str, object]]:
    """What caches did, one after the other: rows of a table."""

    def total(name: str) -> float:
        return sum(stats[name] or 0 for stats in batches)

    last, rows = batches[-1], list[tuple[str, object]]()
    for name in ("prefill", "decode"):
        tokens, seconds = total(f"{name}_tokens"), total(f"{name}_s")
        rows.append(
            (
                name,
                f"{tokens:,.0f} tokens, {tokens / seconds:,.1f} tokens/s"
                if seconds
                else f"{tokens:,.0f} tokens",
            )
        )
    written, asked, moved = (
        format_size(total(f"bytes_{name}")) for name in ("written", "asked", "moved")
    )
    said = f"{written} written, {asked} asked, {moved} moved"
    if last["layers_on_ssd"] and not total("bytes_written"):
        said = (
            "nothing was written: a sequence has fewer tokens than a block, which fills pages, and "
            "K and V of those stay in memory"
        )
    fallback = f" ({last['fallback_reason']})" if last["fallback_reason"] else ""
    return [
        *rows,
        ("bytes", said),
        ("effective path", f"{last['effective_path'] or '-'}{fallback}"),
        ("waited for the disk", f"{total('waiting_s'):.1f} s"),
        (
            "a decode step",
            "-" if last["step_s"] is None else f"{last['step_s']:.3f} s measured{_predicted(last)}",
        ),
        ("sequences kept as X", _x_rows(last)),
        *_drafts([stats["speculation"] for stats in batches if stats["speculation"]]),
    ]


def _drafts(batches: Sequence[Stats]) -> list[tuple[str, object]]:
    """What drafts brought to caches that have them."""
    passes, turns, tokens = (
        sum(each[name] for each in batches) for name in ("passes", "turns", "tokens")
    )
    if not turns:
        return []
    last = batches[-1]
    accepted = " ".join(f"{share:.0%}" for share in last["accepted_by_position"]) or "-"
    memory = max(each["draft_memory_bytes"] for each in batches)
    drafts, verified = (sum(each[name] for each in batches) for name in ("draft_s", "pass_s"))
    ahead = sum(each["read_ahead_bytes"] for each in batches)
    lost = max(each["sequences_without_memory"] for each in batches)
    without = f"; {lost} sequences had none" if lost else ""
    sources = ", ".join(
        f"{each['accepted']:,} of {each['proposed']:,} by {name}"
        for name, each in last["sources"].items()
    )
    return [
        ("tokens a pass", f"{tokens / turns:.2f} of a sequence, in {passes:,} passes"),
        ("accepted by position", f"{accepted} ({last['draft']})"),
        *([("proposed tokens that stood", sources)] if sources else []),
        ("proposed at most", f"{last['gamma']} ({last['why']})"),
        (
            "drafts",
            (
                f"{drafts:.1f} s, {format_size(memory)} of memory{without}, {format_size(ahead)} "
                f"read ahead meanwhile; passes {verified:.1f} s"
            ),
        ),
    ]


def _predicted(stats: Stats) -> str:
    decision = stats["decision"]
    return (
        f", {decision['predicted_s'][decision['x_rows']]:.3f} s predicted"
        if decision and decision["predicted_s"]
        else ""
    )


def _x_rows(stats: Stats) -> str:
    decision, count = stats["decision"], stats["x_rows"]
    return f"{count} ({decision['why']})" if decision else f"{count}, as asked" if count else "0"
