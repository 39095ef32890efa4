"""CRC32C (Castagnoli): the checksum of every record and block that espnx stores."""

from __future__ import annotations

from .api import crc32c, crc32c_ranges
from .reference import crc32c_ranges_reference, crc32c_reference

__all__ = ["crc32c", "crc32c_ranges", "crc32c_ranges_reference", "crc32c_reference"]
