"""What ``espnx device info`` shows: rows by what they mean, with units. Programs get `describe` as
it is (--json)."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from typing import Any

from ..sizes import format_rate, format_size

Row = tuple[str, str, str]

_CAPABILITIES = {
    "attends_window": "attention with a window",
    "attends_soft_cap": "attention with a soft cap",
    "attends_slopes": "attention with slopes (ALiBi)",
    "attends_unlike_widths": "K and V rows of unlike lengths",
    "attends_latent": "rows that are K and V at once",
    "attends_part_of_tail": "newest rows of some heads alone",
    "attends_widths": "head dimensions",
    "attends_formats": "formats of rows",
    "exchanges": "queries and results cross as",
    "keeps": "rows outlive the process",
    "hands_out_records": "hands out records",
}
_HEAD = (
    "name",
    "title",
    "spec",
    "kind",
    "path",
    "devices",
    "memory_bytes",
    "near_storage",
    "hand_over",
    "stretch",
)


def rows_of(facts: Mapping[str, Any]) -> list[Row]:
    """(what, value, how it is known) of `describe` with the capabilities. What a device of another
    package adds is shown by its name."""
    known = [*_HEAD, "links", "figures", "capabilities"]
    rows = [
        *_head(facts),
        *(row for name in facts if name not in known for row in _flat(name, facts[name])),
    ]
    links = {
        name: per_s
        for name, per_s in facts.get("links", {}).items()
        if not name.endswith("accelerator")
    }
    if links:
        rows += [
            ("links as opened", "", ""),
            *((f"  {name}", format_rate(per_s), "") for name, per_s in links.items()),
        ]
    group = ""
    for name, text in facts.get("figures", {}).items():
        first, _, rest = name.partition(".")
        if rest and first != group:
            rows.append((first, "", ""))
        group = first if rest else ""
        value, _, how = str(text).partition(" (")
        rows.append((f"  {_words(rest)}" if rest else _words(name), value, how.rstrip(")")))
    return [*rows, ("what it takes and keeps", "", ""), *_capabilities(facts["capabilities"])]


def _head(facts: Mapping[str, Any]) -> Iterator[Row]:
    yield "name", facts["name"], facts.get("title", "")
    yield (
        "kind",
        facts["kind"],
        "" if facts.get("spec") in (None, facts["name"]) else f"of the spec {facts['spec']}",
    )
    yield "path", os.path.abspath(facts["path"]), ""
    if "devices" in facts:
        yield "devices", str(facts["devices"]), "that share links"
    if "memory_bytes" in facts:
        yield (
            "memory of each",
            "none" if facts["memory_bytes"] is None else format_size(facts["memory_bytes"]),
            "",
        )
    if "near_storage" in facts:
        yield "computes", "near the flash" if facts["near_storage"] else "on the host", ""
    if "hand_over" in facts:
        yield "hands over", str(facts["hand_over"]), "of rows that wait on the host"
    if "stretch" in facts:
        yield "stretch", f"{facts['stretch']:g}", "seconds of this machine for one of the device's"


def _capabilities(capabilities: Mapping[str, Any]) -> Iterator[Row]:
    for name, value in capabilities.items():
        shown = (
            {True: "yes", False: "no", None: "all"}.get(value)
            if value is None or isinstance(value, bool)
            else None
        )
        if shown is None:
            shown = ", ".join(map(str, value)) if isinstance(value, (tuple, list)) else str(value)
        yield f"  {_CAPABILITIES.get(name, _words(name))}", shown, ""


def _flat(name: str, value: Any) -> Iterator[Row]:
    if isinstance(value, Mapping):
        for inner, each in value.items():
            yield from _flat(f"{name}: {inner}", each)
    else:
        yield _words(name), "none" if value is None else str(value), ""


def _words(name: str) -> str:
    """``accelerator.rates.4`` without its first part: ``rates, 4``."""
    return name.replace(".", ", ").replace("_", " ")
