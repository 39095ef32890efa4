"""What every variant takes of a multiprocessor, and how fast it can be at most: the table in
tests/data/kernels.json, and the page that shows it, beside what was measured.

``python -m tests.kernels.table`` compiles all of them and writes both; with words behind it, those
in whose names one of them stands, and those that the table lacks. The others' rows stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import triton

from tests.kernels.bounds import MEMORY_BYTES_S, RATE_MIN, bounds
from tests.kernels.sass import analysed
from tests.kernels.variants import CAPABILITIES, VARIANTS
from tests.ptx.nvcc import nvcc_release

ROOT = Path(__file__).resolve().parents[2]
TABLE = ROOT / "tests" / "data" / "kernels.json"
MEASURED = ROOT / "benchmarks" / "results" / "kernels-h200.json"
PAGE = ROOT / "docs" / "measured" / "kernels.md"
BEGIN, END = "<!-- kernel-bounds -->\n", "<!-- /kernel-bounds -->"
BESIDE, BESIDE_END = "<!-- kernel-measured -->\n", "<!-- /kernel-measured -->"
#: Variants, and the rows of the result file that ran them: what every one of them says of itself
#: (None: nothing; of blocks that are no whole tiles another variant is used).
RAN: dict[str, dict[str, Any]] = {
    **{
        f"attention {fmt} d {d} {n} queries": {
            "part": "attention",
            "format": fmt,
            "d": d,
            "block_rows": None,
        }
        for fmt, n in (("fp16", 8), ("bf16", 8), ("int8", 8), ("fp32", 16))
        for d in (64, 128)
    },
    **{
        f"attention {fmt} d {d} X 16 queries": {"part": "x", "format": fmt, "d": d}
        for fmt, d in (("fp16", 256), ("fp16", 576), ("bf16", 576))
    },
    **{
        f"maxsim {fmt} d 128 by warps": {"part": "maxsim", "format": fmt, "d": 128}
        for fmt in ("fp16", "bf16", "int8", "bit1")
    },
    **{
        f"maxsim {fmt} d {d} 32 query tokens": {"part": "maxsim", "format": fmt, "d": d}
        for fmt, d in (
            *((fmt, 384) for fmt in ("fp16", "bf16", "int8")),
            *(("fp32", 128), ("residual2", 128)),
        )
    },
    "crc32c by warps": {"part": "crc32c", "system": "espnx"},
    "crc32c of words": {"part": "crc32c", "system": "espnx-triton"},
}
#: Of these what ran was another kernel, which has been replaced; the present ones have not run.
REPLACED = ("maxsim int8 d 128 by warps", "maxsim bit1 d 128 by warps")
COLUMNS = (
    "variant",
    "registers",
    "stack B",
    "shared KiB",
    "instructions (tensor)",
    "tile KiB",
    "in flight KiB",
    "issue",
    "tensor",
    "shared",
    *(f"of {name}'s memory" for name in MEMORY_BYTES_S),
    "bar",
)


def stored_nvcc() -> str:
    """The release of nvcc whose code the table describes."""
    return str(json.loads(TABLE.read_text())["nvcc"])


def stored() -> list[dict[str, Any]]:
    return json.loads(TABLE.read_text())["rows"]


def rendered(rows: list[dict[str, Any]]) -> str:
    """The table of the page, for sm_90. ``bar``: which GPUs' bar a variant meets that has one."""
    barred = {variant.name for variant in VARIANTS if variant.has_bar}
    lines = ["| " + " | ".join(COLUMNS) + " |", "| --- " * len(COLUMNS) + "|"]
    for row in rows:
        if row["sm"] != 90:
            continue
        found = bounds(row)
        met = [gpu for gpu in MEMORY_BYTES_S if found.meets(gpu)]
        tensor = row["by_class"].get("tensor", 0)
        cells = (
            row["variant"],
            row["registers"],
            row["stack_bytes"],
            f"{row['shared_bytes'] / 1024:.0f}",
            f"{row['instructions']} ({tensor})",
            f"{row['tile_bytes'] / 1024:.2f}",
            f"{found.in_flight_bytes / 1024:.0f}",
            *(
                "-" if rate == float("inf") else f"{rate / 1e12:.2f}"
                for rate in (found.issue, found.tensor, found.shared)
            ),
            *(f"{found.rate / rate:.2f}x" for rate in MEMORY_BYTES_S.values()),
            "-" if row["variant"] not in barred else " and ".join(met) or "missed",
        )
        lines.append("| " + " | ".join(str(cell) for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def ran(variant: str) -> list[dict[str, Any]]:
    """The rows of the result file for which `variant` ran: ours, in the order of the file."""
    asked = {"system": "espnx", **RAN[variant]}
    return [
        row
        for row in json.loads(MEASURED.read_text())["rows"]
        if all({**row["params"], "system": row["system"]}.get(k) == v for k, v in asked.items())
    ]


def beside_measured(rows: list[dict[str, Any]]) -> str:
    """Bounds beside what was measured, the slowest and the fastest row of each variant. The share:
    of the bound or of the copy's rate, whichever is less; none where another kernel ran."""
    by_name = {row["variant"]: bounds(row) for row in rows if row["sm"] == 90}
    columns = ("variant", "bound, TB/s", "copy, TB/s", "measured, TB/s", "share of the lesser")
    lines = ["| " + " | ".join(columns) + " |", "| --- " * len(columns) + "|"]
    for variant in RAN:
        metrics = [row["metrics"] for row in ran(variant)]
        most, copied = by_name[variant].rate, metrics[0]["copy_bytes_per_s"]
        rates = [each["bytes_per_s"] for each in metrics]
        cells = (
            variant,
            f"{most / 1e12:.2f}",
            f"{copied / 1e12:.2f}",
            _range(1e-12 * min(rates), 1e-12 * max(rates)),
            _range(min(rates) / min(most, copied), max(rates) / min(most, copied)),
        )
        if variant in REPLACED:
            cells = (*cells[:3], f"{cells[3]} (*before*)", "-")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines) + "\n"


def _range(least: float, most: float) -> str:
    ends = dict.fromkeys(f"{end:.2f}" for end in (least, most))
    return " to ".join(ends)


def page_with(text: str, rows: list[dict[str, Any]]) -> str:
    """The page with the tables in their places."""
    for begin, end, table in (
        (BEGIN, END, rendered(rows)),
        (BESIDE, BESIDE_END, beside_measured(rows)),
    ):
        before, _, rest = text.partition(begin)
        _, _, after = rest.partition(end)
        text = f"{before}{begin}\n{table}\n{end}{after}"
    return text


def main(*words: str) -> None:
    known = {(row["variant"], row["sm"]): row for row in stored()} if words else {}
    rows = []
    for variant in VARIANTS:
        for capability in CAPABILITIES:
            key = (variant.name, capability)
            if key not in known or any(word in variant.name for word in words):
                known[key] = analysed(variant, capability)
                print(known[key], flush=True)
            rows.append(known[key])
    lines = ",\n".join("  " + json.dumps(row) for row in rows)
    compilers = f'"triton": {json.dumps(triton.__version__)}, "nvcc": {json.dumps(nvcc_release())}'
    TABLE.write_text(f'{{{compilers}, "rows": [\n{lines}\n]}}\n')
    PAGE.write_text(page_with(PAGE.read_text(), rows))
    missed = [
        row["variant"]
        for row in rows
        if row["sm"] == 90 and bounds(row).rate < RATE_MIN * max(MEMORY_BYTES_S.values())
    ]
    print("below the bar on the fastest memory:", *missed, sep="\n  ")


if __name__ == "__main__":
    main(*sys.argv[1:])
