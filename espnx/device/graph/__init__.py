"""Walks over a graph of vectors on the device that keeps it: hop, reads, distances, next hop,
without the host."""

from __future__ import annotations

from .device import SsdGraphDevice

__all__ = ["SsdGraphDevice"]
