"""What is asked for and not predicted, and why: no number stands for what was not computed."""

from __future__ import annotations

from .predictions import NotPredicted

_SIZES = ("0.5M", "5M", "50M", "500M")
_RAGX = (
    *(f"x_{size}" for size in _SIZES),
    *(f"over_{other}_50M" for other in ("cpu_dram", "disag_nvme", "disag_dram", "gpu_dram")),
    *(f"nvme_share_{where}_{size}" for where in ("cpu", "ragx") for size in _SIZES),
    "gtr_5M",
    "bm25_8drives_50M",
    "gtr_8drives_50M",
    "batch8_5M",
    "batch256_5M",
    "llama_1xA100",
    "over_ivf_nvme_min",
    "over_ivf_nvme_max",
    "search_energy_gain_avg",
)
UNPREDICTED = tuple(
    NotPredicted(f"ragx.{name}", "no model of RAGX's retrievers and systems yet") for name in _RAGX
)
