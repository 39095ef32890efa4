"""Plots of emulated devices: what computing in the drive brings, over the number of drives."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .found import Found, alike
from .looks import ESPNX, OTHER, Look, grouped_bars, new_axes

#: What the plots show of the systems of the tables, and how strongly they are drawn.
DECODING = {
    "attention": ("attention in the drive", 0.55),
    "attention+x": ("and X rows, half of what is read", 1.0),
}
SEARCHING = {
    "maxsim-56": ("MaxSim in the drive, at an FPGA's rate", 0.55),
    "maxsim-2048": ("at the rate of RAGX's engines", 1.0),
}


def decoding(found: Sequence[Found]) -> Any:
    """How much faster a step is than with the same drives and no accelerator."""
    return _brought(found, DECODING, "Attention in the drive")


def searching(found: Sequence[Found]) -> Any:
    """How much faster a search is than with the same drives and no accelerator."""
    return _brought(found, SEARCHING, "MaxSim in the drive")


def brought(found: Sequence[Found], systems: Sequence[str]) -> dict[str, dict[int, float]]:
    """The time without an accelerator over that with it, by system and number of drives. Of the
    first spec."""
    ratios: dict[str, dict[int, float]] = {system: {} for system in systems}
    for row in (each.row for each in alike(found, "spec")):
        if row.system in ratios and "without" in row.ratio:
            ratios[row.system][row.params["devices"]] = row.ratio["without"]
    return {system: dict(sorted(known.items())) for system, known in ratios.items() if known}


def _brought(found: Sequence[Found], shown: dict[str, tuple[str, float]], what: str) -> Any:
    ratios = brought(found, list(shown))
    if not ratios:
        return None
    counts = sorted({count for known in ratios.values() for count in known})
    last = list(ratios.values())[-1]
    first = next(iter(ratios.values()))
    least, most = min(first), max(first)
    title = (
        f"{what}: {first[least]:.1f}x with {least}, {first[most]:.1f}x with {most} "
        f"({found[0].row.params['spec']}, emulated)"
    )
    if what.startswith("MaxSim"):
        title = (
            f"{what}: {min(first.values()):.1f}x to {max(last.values()):.1f}x "
            f"({found[0].row.params['spec']}, emulated)"
        )
    figure, axes = new_axes(title, "drives", "times as fast as without")
    rows = []
    for system, known in ratios.items():
        name, opacity = shown[system]
        heights = [known.get(count, 0.0) for count in counts]
        rows.append(
            (
                Look(name, ESPNX),
                opacity,
                heights,
                [f"{height:.1f}" if height else "" for height in heights],
            )
        )
    grouped_bars(axes, [str(count) for count in counts], rows)
    axes.axhline(1, color=OTHER, linewidth=1, alpha=0.6, zorder=0.5)
    axes.set_ylim(0, 1.35 * max(height for *_, heights, _ in rows for height in heights))
    for number, (look, opacity, *_) in enumerate(rows):
        axes.annotate(
            f"\u25a0 {look.name}",
            (0.01, 0.99 - 0.075 * number),
            xycoords="axes fraction",
            color=look.colour,
            alpha=max(opacity, 0.75),
            va="top",
            size=9,
            weight="bold" if opacity == 1 else "normal",
        )
    return figure
