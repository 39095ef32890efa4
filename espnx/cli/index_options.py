"""Words of an index's options, known before anything that knows them is imported."""

from __future__ import annotations

FORMATS = ("fp32", "fp16", "bf16", "int8", "bit1", "residual1", "residual2", "residual4")
POOLINGS = ("cls", "mean", "muvera")
