"""Attention over stored K and V rows, in place, in blocks, in an I/O buffer, and over rows in
memory; partial results merge exactly."""

from __future__ import annotations

from .api import attention, merge
from .checks import ROW_FORMATS, block_bytes
from .memory import attend_rows
from .pages import attend_pages
from .reference import attention_reference
from .rows import PagesInMemory, Queries, RowsInMemory, add_sinks, attend_rows_reference

__all__ = [
    "ROW_FORMATS", "PagesInMemory", "Queries", "RowsInMemory", "add_sinks", "attend_pages",
    "attend_rows", "attend_rows_reference", "attention", "attention_reference", "block_bytes",
    "merge",
]  # fmt: skip
