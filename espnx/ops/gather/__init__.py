"""Ragged records of an I/O buffer as one compact tensor, for a kernel that takes nothing else.

Not part of what `espnx.ops` offers: MaxSim scores records where they lie, which moves each byte
once and not three times (docs/measured/kernels.md).
"""

from __future__ import annotations

from .api import gather
from .reference import gather_reference

__all__ = ["gather", "gather_reference"]
