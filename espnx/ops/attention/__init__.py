"""Attention over stored K and V rows, in place, in blocks, in an I/O buffer; partial results merge exactly."""

from __future__ import annotations

from .api import attention, merge
from .checks import ROW_FORMATS, block_bytes
from .reference import attention_reference

__all__ = ["ROW_FORMATS", "attention", "attention_reference", "block_bytes", "merge"]
